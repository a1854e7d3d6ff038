// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Second connections: a thread for each link that is silent. An attempt to reach a server that is
// cut off lasts, and neither heartbeats nor the links of other servers wait for it.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/wait.h"
#include "client/links/link.h"

namespace cpudist::client {

class Seekers {
 public:
  // Whose links they are, and what is to be done for them. Called with `mutex` held, which guards
  // the links, but for connect().
  struct Owner {
    std::mutex& mutex;
    ConditionVariable& changed;  // told when a link is not silent any more, or all is over
    uint64_t liveness_ms;
    std::function<bool()> over;  // nobody is looked for any more
    std::function<wire::Frame(const Link&)> make_hello;
    std::function<std::chrono::milliseconds(Link&)> pause_of;  // before another attempt
    std::function<std::shared_ptr<transport::Connection>(const std::string& address,
                                                         TimePoint deadline)>
        connect;
  };

  Seekers(Owner owner, size_t servers) : owner_(std::move(owner)), threads_(servers) {}

  // The owner's one thread that looks after links, with the lock.
  void seek_if_silent(Link& link, TimePoint now);
  void join();  // without the lock, once all is over

 private:
  bool is_silent(Link& link, TimePoint now) const;  // for so long that another is wanted
  void seek(Link& link);                            // a thread of its own
  TimePoint try_spare(Link& link, std::unique_lock<std::mutex>& lock);
  void drop_spare(Link& link, std::unique_lock<std::mutex>& lock);

  const Owner owner_;
  std::vector<std::thread> threads_;  // by server
};

}  // namespace cpudist::client

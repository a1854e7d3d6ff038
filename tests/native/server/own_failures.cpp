// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What goes wrong inside a server is told as its own failure, not as a violation by its peer.

#include <exception>
#include <new>
#include <stdexcept>
#include <string>

#include "support/server_fixture.h"

namespace cpudist::testing {
namespace {

// What the server throws to the channel, and answers, when this is thrown while it greets.
std::string failure_of_hello(std::exception_ptr planted, ErrorCode code) {
  server::Server server(server_options(1));
  Trainer trainer(server, 0);
  trainer.connection()->fail_address(std::move(planted));
  std::string thrown;
  try {
    trainer.hello(1, 1);
  } catch (const Error& error) {
    CHECK_EQ(error.code(), code);
    thrown = error.what();
  }
  CHECK_EQ(trainer.error(1, code), thrown);
  CHECK_EQ(server.stats().refused, 0u);
  CHECK_EQ(server.stats().trainers, 0u);
  // Nothing is left of it: the trainer comes again.
  trainer.disconnect();
  trainer.reconnect();
  trainer.reply(trainer.hello(1, 1), wire::FrameKind::kHello);
  CHECK_EQ(server.stats().trainers, 1u);
  return thrown;
}

}  // namespace

TEST(server_out_of_memory_is_overloaded) {
  const auto text =
      failure_of_hello(std::make_exception_ptr(std::bad_alloc()), ErrorCode::kOverloaded);
  CHECK(contains(text, "server 0 (host-s pid 1)"));
  CHECK(contains(text, "of trainer 0: it has no memory left"));
}

TEST(server_that_fails_otherwise_has_an_internal_error) {
  const auto text = failure_of_hello(std::make_exception_ptr(std::runtime_error("planted")),
                                     ErrorCode::kInternal);
  CHECK(contains(text, "of trainer 0: planted"));
}

TEST(server_error_of_a_peer_stays_a_protocol_violation) {
  server::Server server(server_options(1));
  Trainer trainer(server, 0);
  bool thrown = false;
  try {
    trainer.ask(wire::FrameKind::kBarrier);  // before the hello
  } catch (const Error& error) {
    CHECK_EQ(error.code(), ErrorCode::kProtocol);
    thrown = true;
  }
  CHECK(thrown);
  CHECK_EQ(server.stats().refused, 1u);
}

}  // namespace cpudist::testing

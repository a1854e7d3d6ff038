// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Who is at the other end of a link, proven by a secret that both ends have: three frames of kind
// kAuth before the first other one. Each end sends a nonce and says by the header of its frames
// who it is; each proves the secret by a MAC over both nonces and both identities, the listener
// first. A MAC is of one end, one use, two nonces and the address that was dialled, so none is good
// for another run, rank, shard, address or link: somebody whom a false address leads to, and who
// hands on what it is told to where it should have gone, is refused. Knows frames only, no sockets.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/buffer.h"
#include "base/errors.h"
#include "base/hmac.h"
#include "wire/frame.h"

namespace cpudist::wire {

inline constexpr size_t kSecretBytesMin = 32;
inline constexpr size_t kAddressBytesMax = 256;

// What the frames of one end say in their headers.
struct Identity {
  uint64_t run_id = 0;
  uint32_t epoch = 0;
  uint32_t incarnation = 0;  // of a trainer
  Role role = Role::kTrainer;
  uint16_t rank = 0;
  bool operator==(const Identity&) const = default;
};
Identity identity_of(const FrameHeader& header);
std::string describe(const Identity& identity);  // "trainer 3, incarnation 1"

// What a link is for: a proof for one is none for another.
enum class Purpose : uint32_t { kServers = 1, kShuffle = 2 };

enum class AuthStep : uint32_t {
  kChallenge = 1,  // by who connects: its nonce, and whom it has dialled
  kAnswer = 2,     // by who listens: its nonce and its proof
  kProof = 3,      // by who connects
};

struct AuthMessage {
  AuthStep step = AuthStep::kChallenge;
  Purpose purpose = Purpose::kServers;
  Nonce nonce{};        // zeros in a proof
  Mac mac{};            // zeros in a challenge
  std::string address;  // of a challenge: as who listens publishes it; else empty
};
Buffer encode(const AuthMessage& message);
AuthMessage decode_auth(std::span<const uint8_t> payload);  // throws Error(kProtocol)

// What an end needs to prove itself. Never changes; shared by all links of a channel.
struct Credentials {
  std::string secret;
  Identity own;
  Purpose purpose = Purpose::kServers;
};
// Throws Error(kInvalidArgument) for a short one.
void check_secret(const std::string& secret);
// Throws Error(kInvalidArgument) for a short secret, kAuthentication where nothing can be proven.
std::shared_ptr<const Credentials> make_credentials(std::string secret, const Identity& own,
                                                    Purpose purpose);

// The causes that a refusal names, in the words of whom it is told: an end that has a key says
// no_key_here() to one that has none, which says no_key_there(). other_address(): the link was
// made to an address that is not the listener's.
Error no_key_here();
Error no_key_there();
Error wrong_key();
Error other_address();
// Of an end without a key `own` is nobody.
Frame refusal_of(const Error& error, const Identity& own = {});

// What both ends of a link compute.
struct Transcript {
  Purpose purpose = Purpose::kServers;
  Identity connecting;
  Identity listening;
  Nonce connecting_nonce{};
  Nonce listening_nonce{};
  std::string address;  // that was dialled, which the listener has published
};

// The end that connects. One thread.
class ConnectingHandshake {
 public:
  // `address`: that is dialled.
  ConnectingHandshake(std::shared_ptr<const Credentials> credentials, std::string address);

  Frame challenge() const;
  // Takes the answer, returns the proof. Throws kAuthentication, of which the other end is to be
  // told by refusal_of(), and kProtocol.
  Frame prove(const Frame& answer);
  const Identity& peer() const { return transcript_.listening; }  // after prove()

 private:
  const std::shared_ptr<const Credentials> credentials_;
  Transcript transcript_;
};

// The end that listens. One thread.
class ListeningHandshake {
 public:
  // `address`: where it listens, as it tells others.
  ListeningHandshake(std::shared_ptr<const Credentials> credentials, std::string address);

  // Takes a challenge and returns the answer.
  Frame answer(const Frame& challenge);
  // Takes the proof.
  void accept(const Frame& proof);
  bool answered() const { return answered_; }
  bool done() const { return done_; }
  const Identity& peer() const { return transcript_.connecting; }  // once done

 private:
  const std::shared_ptr<const Credentials> credentials_;
  Transcript transcript_;
  bool answered_ = false;
  bool done_ = false;
};

}  // namespace cpudist::wire

// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// threads: none
//
// Handshakes without sockets: who is let in, and what of everything else is refused.

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "support/channel_fixture.h"
#include "support/check.h"
#include "support/handshake_fixture.h"
#include "wire/control.h"

using namespace cpudist;           // NOLINT
using namespace cpudist::testing;  // NOLINT
using wire::ConnectingHandshake;
using wire::Frame;
using wire::FrameKind;
using wire::ListeningHandshake;

namespace {

using Change = std::function<void(Frame&)>;

// What the listening end says to a trainer whose answer and proof are changed on their way.
uint32_t met(const Change& answer_changes, const Change& proof_changes) {
  ConnectingHandshake trainer(with_key(a_trainer()), kAddress);
  ListeningHandshake server(with_key(a_server()), kAddress);
  return error_code([&] {
    Frame answer = server.answer(trainer.challenge());
    answer_changes(answer);
    Frame proof = trainer.prove(answer);
    proof_changes(proof);
    server.accept(proof);
    CHECK(server.done());
    CHECK(server.peer() == a_trainer());
    CHECK(trainer.peer() == a_server());
  });
}

void keep(Frame&) {}

// Another payload, since those of frames may be shared.
void set_byte(Frame& frame, size_t at, uint8_t flip) {
  Buffer changed(frame.payload.size());
  std::memcpy(changed.data(), frame.payload.data(), changed.size());
  changed.data()[at] ^= flip;
  frame.payload = std::move(changed);
}

constexpr size_t kNonceAt = 8;
constexpr size_t kMacAt = kNonceAt + kNonceBytes;

}  // namespace

TEST(handshake_lets_in_who_has_the_key) { CHECK_EQ(met(keep, keep), 0u); }

TEST(handshake_of_another_key_is_refused_by_who_connects) {
  ConnectingHandshake trainer(with_key(a_trainer(), kOtherSecret), kAddress);
  ListeningHandshake server(with_key(a_server()), kAddress);
  const Frame answer = server.answer(trainer.challenge());
  CHECK_EQ(error_code([&] { trainer.prove(answer); }), code(ErrorCode::kAuthentication));
  CHECK(!server.done());
}

// A stranger has no key to be wrong: whatever it sends as a proof is refused.
TEST(handshake_of_another_key_is_refused_by_who_listens) {
  ConnectingHandshake trainer(with_key(a_trainer()), kAddress);
  ListeningHandshake server(with_key(a_server()), kAddress);
  ListeningHandshake accomplice(with_key(a_server(), kOtherSecret), kAddress);
  ConnectingHandshake stranger(with_key(a_trainer(), kOtherSecret), kAddress);
  static_cast<void>(server.answer(trainer.challenge()));
  const Frame proof = stranger.prove(accomplice.answer(stranger.challenge()));
  CHECK_EQ(error_code([&] { server.accept(proof); }), code(ErrorCode::kAuthentication));
  CHECK(!server.done());
}

TEST(handshake_that_was_changed_on_its_way_is_refused) {
  for (size_t at = kNonceAt; at < kMacAt + kMacBytes; ++at) {
    CHECK(met([&](Frame& frame) { set_byte(frame, at, 0x40); }, keep) != 0);
  }
  for (size_t at = kNonceAt; at < kMacAt + kMacBytes; ++at) {
    CHECK(met(keep, [&](Frame& frame) { set_byte(frame, at, 0x40); }) != 0);
  }
  // Who they are is proven with it.
  CHECK(met([](Frame& frame) { ++frame.header.run_id; }, keep) != 0);
  CHECK(met([](Frame& frame) { ++frame.header.rank; }, keep) != 0);
  CHECK(met([](Frame& frame) { frame.header.role = wire::Role::kTrainer; }, keep) != 0);
  CHECK(met(keep, [](Frame& frame) { ++frame.header.incarnation; }) != 0);
  CHECK(met(keep, [](Frame& frame) { ++frame.header.rank; }) != 0);
  CHECK(met(keep, [](Frame& frame) { ++frame.header.run_id; }) != 0);
}

TEST(handshake_as_somebody_else_is_refused) {
  ConnectingHandshake trainer(with_key(a_trainer()), kAddress);
  ListeningHandshake server(with_key(a_server()), kAddress);
  Frame challenge = trainer.challenge();
  ++challenge.header.incarnation;
  const Frame answer = server.answer(challenge);
  CHECK_EQ(error_code([&] { trainer.prove(answer); }), code(ErrorCode::kAuthentication));
}

// Somebody whom a false address leads to hands on all that it is told, and maybe says that it was
// told the right one.
TEST(handshake_by_another_address_is_refused) {
  ListeningHandshake server(with_key(a_server()), kAddress);
  ConnectingHandshake misled(with_key(a_trainer()), "tcp:10.0.0.6:4000");
  const Frame challenge = misled.challenge();
  CHECK_EQ(error_code([&] { static_cast<void>(server.answer(challenge)); }),
           code(ErrorCode::kAuthentication));
  CHECK(!server.answered());
  ConnectingHandshake true_one(with_key(a_trainer()), kAddress);
  Frame forged = true_one.challenge();
  std::memcpy(forged.payload.data() + kNonceAt, challenge.payload.data() + kNonceAt, kNonceBytes);
  const Frame answer = server.answer(forged);
  CHECK_EQ(error_code([&] { misled.prove(answer); }), code(ErrorCode::kAuthentication));
  // To whom it is told which it was.
  ConnectingHandshake told(with_key(a_trainer()), "tcp:10.0.0.6:4000");
  try {
    static_cast<void>(told.prove(wire::refusal_of(wire::other_address())));
    CHECK(false);
  } catch (const Error& error) {
    CHECK_EQ(std::string(error.what()), std::string(wire::other_address().what()));
  }
}

TEST(handshake_has_an_address_in_its_challenge_only) {
  ConnectingHandshake trainer(with_key(a_trainer()), kAddress);
  ListeningHandshake server(with_key(a_server()), kAddress);
  Frame answer = server.answer(trainer.challenge());
  wire::AuthMessage message = wire::decode_auth(answer.payload.bytes());
  CHECK(message.address.empty());
  message.address = kAddress;
  answer.payload = encode(message);
  CHECK_EQ(error_code([&] { trainer.prove(answer); }), code(ErrorCode::kProtocol));
  message = wire::decode_auth(trainer.challenge().payload.bytes());
  message.address = std::string(wire::kAddressBytesMax + 1, 'x');
  CHECK(error_code([&] { wire::decode_auth(encode(message).bytes()); }) != 0);
}

TEST(handshake_gives_back_nothing_that_it_has_heard) {
  // Its own nonce.
  ConnectingHandshake trainer(with_key(a_trainer()), kAddress);
  ListeningHandshake server(with_key(a_server()), kAddress);
  const Frame challenge = trainer.challenge();
  Frame answer = server.answer(challenge);
  std::memcpy(answer.payload.data() + kNonceAt, challenge.payload.data() + kNonceAt, kNonceBytes);
  CHECK_EQ(error_code([&] { trainer.prove(answer); }), code(ErrorCode::kProtocol));
  // Its own challenge.
  CHECK_EQ(error_code([&] { trainer.prove(challenge); }), code(ErrorCode::kProtocol));
  // Itself, by its own listener.
  const auto shuffle = [](const wire::Identity& own) {
    return with_key(own, kSecret, wire::Purpose::kShuffle);
  };
  ConnectingHandshake out(shuffle(a_trainer()), kAddress);
  ListeningHandshake in(shuffle(a_trainer()), kAddress);
  CHECK_EQ(error_code([&] { static_cast<void>(in.answer(out.challenge())); }),
           code(ErrorCode::kProtocol));
  // A proof of who listens as one of who connects.
  ListeningHandshake other(with_key(a_server(1)), kAddress);
  Frame reflected = other.answer(trainer.challenge());
  Buffer as_proof(reflected.payload.size());
  std::memcpy(as_proof.data(), reflected.payload.data(), as_proof.size());
  as_proof.data()[0] = static_cast<uint8_t>(wire::AuthStep::kProof);
  std::memset(as_proof.data() + kNonceAt, 0, kNonceBytes);
  reflected.payload = std::move(as_proof);
  reflected.header = challenge.header;
  CHECK_EQ(error_code([&] { server.accept(reflected); }), code(ErrorCode::kAuthentication));
}

TEST(handshake_that_was_recorded_is_good_for_no_other) {
  ConnectingHandshake trainer(with_key(a_trainer()), kAddress);
  ListeningHandshake server(with_key(a_server()), kAddress);
  const Frame challenge = trainer.challenge();
  const Frame answer = server.answer(challenge);
  const Frame proof = trainer.prove(answer);
  server.accept(proof);
  for (const wire::Identity& listener : {a_server(), a_server(1), a_server(0, 8)}) {
    ListeningHandshake again(with_key(listener), kAddress);
    static_cast<void>(again.answer(challenge));
    CHECK_EQ(error_code([&] { again.accept(proof); }), code(ErrorCode::kAuthentication));
    CHECK(!again.done());
  }
  ConnectingHandshake later(with_key(a_trainer()), kAddress);
  CHECK_EQ(error_code([&] { later.prove(answer); }), code(ErrorCode::kAuthentication));
}

TEST(handshake_of_a_link_for_something_else_is_refused) {
  ConnectingHandshake trainer(with_key(a_trainer(), kSecret, wire::Purpose::kShuffle), kAddress);
  ListeningHandshake server(with_key(a_server()), kAddress);
  CHECK_EQ(error_code([&] { static_cast<void>(server.answer(trainer.challenge())); }),
           code(ErrorCode::kProtocol));
}

TEST(handshake_frames_of_another_size_are_refused) {
  const Frame challenge = ConnectingHandshake(with_key(a_trainer()), kAddress).challenge();
  for (const size_t size :
       {size_t{0}, size_t{8}, size_t{71}, size_t{72}, size_t{80}, size_t{95}, size_t{104}}) {
    Frame frame = copy_of(challenge);
    Buffer cut(size);
    std::memset(cut.data(), 0, size);
    std::memcpy(cut.data(), challenge.payload.data(), std::min(size, challenge.payload.size()));
    frame.payload = std::move(cut);
    ListeningHandshake server(with_key(a_server()), kAddress);
    CHECK_EQ(error_code([&] { static_cast<void>(server.answer(frame)); }),
             code(ErrorCode::kProtocol));
  }
  CHECK_EQ(challenge.payload.size(), 96u);
}

TEST(handshake_frames_out_of_turn_are_refused) {
  ListeningHandshake server(with_key(a_server()), kAddress);
  ConnectingHandshake trainer(with_key(a_trainer()), kAddress);
  Frame hello = trainer.challenge();
  hello.header.kind = FrameKind::kHello;
  CHECK_EQ(error_code([&] { static_cast<void>(server.answer(hello)); }),
           code(ErrorCode::kProtocol));
  static_cast<void>(server.answer(trainer.challenge()));
  CHECK_EQ(error_code([&] { server.accept(trainer.challenge()); }), code(ErrorCode::kProtocol));
}

// Who refuses has proven nothing: none of its words are repeated, only the cause.
TEST(handshake_takes_the_cause_of_a_refusal_and_no_words) {
  const auto told = [](const Error& error) {
    ConnectingHandshake trainer(with_key(a_trainer()), kAddress);
    try {
      static_cast<void>(trainer.prove(wire::refusal_of(error)));
    } catch (const Error& found) {
      return std::string(found.what());
    }
    return std::string();
  };
  CHECK_EQ(told(wire::no_key_there()), std::string(wire::no_key_there().what()));
  CHECK_EQ(told(wire::no_key_here()), std::string(wire::no_key_here().what()));
  const Error forged(ErrorCode::kAuthentication, "send your key to 10.6.6.6");
  CHECK_EQ(told(forged), std::string(wire::wrong_key().what()));
  const Error other(ErrorCode::kClosed, "10.6.6.6");
  CHECK(told(other).find("10.6.6.6") == std::string::npos);
}

TEST(handshake_needs_a_long_key) {
  CHECK_EQ(error_code([] { with_key(a_trainer(), std::string(31, 'x')); }),
           code(ErrorCode::kInvalidArgument));
}

// As docs/wire.md has it.
TEST(handshake_proves_nonces_and_both_ends) {
  ConnectingHandshake trainer(with_key(a_trainer(3)), kAddress);
  ListeningHandshake server(with_key(a_server(1)), kAddress);
  const Frame challenge = trainer.challenge();
  const Frame answer = server.answer(challenge);
  std::vector<uint8_t> proven;
  const auto add = [&](const void* data, size_t size_bytes) {
    const auto* bytes = static_cast<const uint8_t*>(data);
    proven.insert(proven.end(), bytes, bytes + size_bytes);
  };
  const auto add_u32 = [&](uint32_t value) { add(&value, sizeof value); };
  const auto add_u64 = [&](uint64_t value) { add(&value, sizeof value); };
  add("cpudist listens", 16);
  add_u32(1);
  add_u32(0);
  for (const auto& [incarnation, role, rank] : {std::tuple{1u, 2u, 3u}, std::tuple{0u, 1u, 1u}}) {
    add_u64(7);
    add_u32(0);
    add_u32(incarnation);
    add_u32(role);
    add_u32(rank);
  }
  add(challenge.payload.data() + kNonceAt, kNonceBytes);
  add(answer.payload.data() + kNonceAt, kNonceBytes);
  add_u32(static_cast<uint32_t>(kAddress.size()));
  add((kAddress + std::string(3, '\0')).data(), 20);
  const Mac mac = hmac_sha256(kSecret, proven);
  CHECK(std::memcmp(mac.data(), answer.payload.data() + kMacAt, kMacBytes) == 0);
}

// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "wire/handshake/handshake.h"

#include <cstring>
#include <utility>

#include "wire/control.h"
#include "wire/fields.h"

namespace cpudist::wire {
namespace {

constexpr char kListens[] = "cpudist listens";
constexpr char kConnects[] = "cpudist connect";
static_assert(sizeof kListens == sizeof kConnects, "what is proven has one length");

const char kSameKey[] =
    ". Give every process of the run the same key: CPUDIST_SECRET_FILE, or CPUDIST_SECRET";

void put_identity(Writer* writer, const Identity& identity) {
  writer->u64(identity.run_id);
  writer->u32(identity.epoch);
  writer->u32(identity.incarnation);
  writer->u32(static_cast<uint32_t>(identity.role));
  writer->u32(identity.rank);
}

Mac mac_of(const Credentials& credentials, const char (&who)[sizeof kListens],
           const Transcript& transcript) {
  Writer writer;
  writer.bytes(who, sizeof who);
  writer.u32(static_cast<uint32_t>(transcript.purpose));
  writer.u32(0);
  put_identity(&writer, transcript.connecting);
  put_identity(&writer, transcript.listening);
  writer.bytes(transcript.connecting_nonce.data(), kNonceBytes);
  writer.bytes(transcript.listening_nonce.data(), kNonceBytes);
  writer.text(transcript.address);
  const Buffer proven = writer.finish();
  return hmac_sha256(credentials.secret, {proven.data(), proven.size()});
}

FrameHeader header_of(const Identity& own, FrameKind kind) {
  FrameHeader header;
  header.kind = kind;
  header.run_id = own.run_id;
  header.epoch = own.epoch;
  header.incarnation = own.incarnation;
  header.role = own.role;
  header.rank = own.rank;
  header.param_set = kNoParamSet;
  return header;
}

Frame frame_of(const Identity& own, const AuthMessage& message) {
  Frame frame;
  frame.header = header_of(own, FrameKind::kAuth);
  frame.payload = encode(message);
  return frame;
}

Error cause_of(const std::string& told) {
  for (const Error& cause : {no_key_here(), no_key_there(), other_address()}) {
    if (told == cause.what()) return cause;
  }
  return wrong_key();
}

// What came at this step; anything else is a refusal of the other end's, or a misfit.
AuthMessage taken(const Frame& frame, AuthStep step, Purpose purpose) {
  if (frame.header.kind == FrameKind::kError) {
    // Whoever says so has proven nothing: of its words only the cause is taken.
    const ErrorReply reply = decode_error(frame.payload.bytes());
    if (reply.code == ErrorCode::kAuthentication) throw cause_of(reply.message);
    refuse("an error before anything was proven");
  }
  if (frame.header.kind != FrameKind::kAuth) {
    refuse(std::string("a frame of kind ") + name_of(frame.header.kind) +
           " before anything was proven");
  }
  const AuthMessage message = decode_auth(frame.payload.bytes());
  if (message.step != step) {
    refuse("step " + std::to_string(static_cast<uint32_t>(message.step)) +
           " of a handshake, expected " + std::to_string(static_cast<uint32_t>(step)));
  }
  if (message.purpose != purpose) refuse("a handshake of a link for something else");
  return message;
}

Error reflected() {
  return Error(ErrorCode::kProtocol, "the other end gives back what this one has said");
}

}  // namespace

template <typename V>
void fields(V& v, Of<V, AuthMessage>& m) {
  v.choice(m.step, AuthStep::kChallenge, AuthStep::kProof, "step of a handshake");
  v.choice(m.purpose, Purpose::kServers, Purpose::kShuffle, "purpose of a link");
  v.octets(m.nonce);
  v.octets(m.mac);
  v.text(m.address, kAddressBytesMax);
}

Buffer encode(const AuthMessage& message) { return write_message(message); }
AuthMessage decode_auth(std::span<const uint8_t> payload) {
  const auto message = read_message<AuthMessage>(payload);
  const bool spare_nonce = message.step == AuthStep::kProof && message.nonce != Nonce{};
  const bool spare_mac = message.step == AuthStep::kChallenge && message.mac != Mac{};
  const bool spare_address = message.step != AuthStep::kChallenge && !message.address.empty();
  if (spare_nonce || spare_mac || spare_address) refuse("reserved bytes of a frame are not zero");
  return message;
}

Identity identity_of(const FrameHeader& header) {
  return {header.run_id, header.epoch, header.incarnation, header.role, header.rank};
}

std::string describe(const Identity& identity) {
  const std::string rank = std::to_string(identity.rank);
  if (identity.role == Role::kServer) return "server " + rank;
  return "trainer " + rank + ", incarnation " + std::to_string(identity.incarnation);
}

void check_secret(const std::string& secret) {
  if (secret.size() < kSecretBytesMin) {
    throw Error(ErrorCode::kInvalidArgument, "a key of " + std::to_string(secret.size()) +
                                                 " bytes: expected at least " +
                                                 std::to_string(kSecretBytesMin));
  }
}

std::shared_ptr<const Credentials> make_credentials(std::string secret, const Identity& own,
                                                    Purpose purpose) {
  check_secret(secret);
  open_libcrypto();
  return std::make_shared<const Credentials>(Credentials{std::move(secret), own, purpose});
}

Error no_key_here() {
  return Error(
      ErrorCode::kAuthentication,
      std::string("no key here: the other end asks for one, and this process has none") + kSameKey);
}

Error no_key_there() {
  return Error(
      ErrorCode::kAuthentication,
      std::string("no key there: this process has one, and the other end has none") + kSameKey);
}

Error wrong_key() {
  return Error(ErrorCode::kAuthentication,
               std::string("wrong key: that of the other end is not this process's, or what they "
                           "say was changed on its way") +
                   kSameKey);
}

Error other_address() {
  return Error(ErrorCode::kAuthentication,
               "another address: the process that answers does not listen there, so somebody in "
               "between hands on what it is told. Look who writes addresses to the run's store, "
               "and let no proxy stand between processes with a key");
}

Frame refusal_of(const Error& error, const Identity& own) {
  Frame frame;
  frame.header = header_of(own, FrameKind::kError);
  frame.payload = encode(ErrorReply{error.code(), error.what()});
  return frame;
}

// ---- the end that connects

ConnectingHandshake::ConnectingHandshake(std::shared_ptr<const Credentials> credentials,
                                         std::string address)
    : credentials_(std::move(credentials)) {
  transcript_.address = std::move(address);
  transcript_.purpose = credentials_->purpose;
  transcript_.connecting = credentials_->own;
  transcript_.connecting_nonce = make_nonce();
}

Frame ConnectingHandshake::challenge() const {
  AuthMessage message;
  message.step = AuthStep::kChallenge;
  message.purpose = transcript_.purpose;
  message.nonce = transcript_.connecting_nonce;
  message.address = transcript_.address;
  return frame_of(credentials_->own, message);
}

Frame ConnectingHandshake::prove(const Frame& answer) {
  const AuthMessage message = taken(answer, AuthStep::kAnswer, transcript_.purpose);
  transcript_.listening = identity_of(answer.header);
  transcript_.listening_nonce = message.nonce;
  const bool mirrored = message.nonce == transcript_.connecting_nonce ||
                        transcript_.listening == transcript_.connecting;
  if (mirrored) throw reflected();
  if (!equal_macs(message.mac, mac_of(*credentials_, kListens, transcript_))) throw wrong_key();
  AuthMessage proof;
  proof.step = AuthStep::kProof;
  proof.purpose = transcript_.purpose;
  proof.mac = mac_of(*credentials_, kConnects, transcript_);
  return frame_of(credentials_->own, proof);
}

// ---- the end that listens

ListeningHandshake::ListeningHandshake(std::shared_ptr<const Credentials> credentials,
                                       std::string address)
    : credentials_(std::move(credentials)) {
  transcript_.address = std::move(address);
  transcript_.purpose = credentials_->purpose;
  transcript_.listening = credentials_->own;
}

Frame ListeningHandshake::answer(const Frame& challenge) {
  const AuthMessage message = taken(challenge, AuthStep::kChallenge, transcript_.purpose);
  transcript_.connecting = identity_of(challenge.header);
  transcript_.connecting_nonce = message.nonce;
  if (transcript_.connecting == transcript_.listening) throw reflected();
  // Whoever changes this text on its way has a transcript that the other end has not.
  if (message.address != transcript_.address) throw other_address();
  transcript_.listening_nonce = make_nonce();
  AuthMessage reply;
  reply.step = AuthStep::kAnswer;
  reply.purpose = transcript_.purpose;
  reply.nonce = transcript_.listening_nonce;
  reply.mac = mac_of(*credentials_, kListens, transcript_);
  answered_ = true;
  return frame_of(credentials_->own, reply);
}

void ListeningHandshake::accept(const Frame& proof) {
  const AuthMessage message = taken(proof, AuthStep::kProof, transcript_.purpose);
  if (identity_of(proof.header) != transcript_.connecting) {
    refuse("a proof of " + describe(identity_of(proof.header)) + " to the challenge of " +
           describe(transcript_.connecting));
  }
  if (!equal_macs(message.mac, mac_of(*credentials_, kConnects, transcript_))) throw wrong_key();
  done_ = true;
}

}  // namespace cpudist::wire

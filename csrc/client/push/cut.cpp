// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "client/push/cut.h"

#include <algorithm>

namespace cpudist::client {

wire::Cut make_cut(uint64_t number, const std::string& name, uint64_t wait_ms, wire::CutStep step,
                   uint64_t base) {
  if (number == 0) {
    throw Error(ErrorCode::kInvalidArgument, "a cut needs a number above 0, found 0");
  }
  if (!name.empty() && !wire::is_snapshot_name(name)) {
    throw Error(ErrorCode::kInvalidArgument,
                "a snapshot's name has letters a-z, digits, '-' and '.', begins with a letter or "
                "digit and has at most " +
                    std::to_string(wire::kSnapshotNameBytesMax) + " bytes, found '" + name + "'");
  }
  if (base >= number) {
    throw Error(ErrorCode::kInvalidArgument, "cut " + std::to_string(number) +
                                                 " of changes since cut " + std::to_string(base) +
                                                 ", which has to be an earlier one");
  }
  return {number, wait_ms, step, name, base};
}

void take_marker_back(Session& session, uint32_t param_set, uint64_t number) {
  wire::CutQuery query;
  query.number = number;
  query.take_back = true;
  std::vector<RequestPtr> requests;
  for (uint32_t s = 0; s < session.server_count(); ++s) {
    requests.push_back(session.send(s, wire::FrameKind::kCutStatus, param_set, encode(query)));
  }
  session.wait(requests, Session::Caller::kBackground);
}

CutAnswer join_answers(uint64_t number, std::span<const RequestPtr> replies) {
  CutAnswer answer;
  answer.number = number;
  answer.taken = true;
  size_t taken_back = 0;
  for (size_t i = 0; i < replies.size(); ++i) {
    const auto reply = wire::decode_cut_reply(replies[i]->reply.payload.bytes());
    if (reply.number != number) {
      throw Error(ErrorCode::kProtocol, "server " + std::to_string(replies[i]->server) +
                                            " answers for cut " + std::to_string(reply.number) +
                                            ", asked for " + std::to_string(number));
    }
    if (answer.name.empty()) answer.name = reply.name;
    if (answer.reason.empty()) answer.reason = reply.reason;
    answer.taken = answer.taken && reply.taken;
    if (reply.taken_back) ++taken_back;
    answer.digests.push_back(reply.digest);
  }
  answer.taken_back = taken_back == replies.size();
  answer.torn = taken_back > 0 && !answer.taken_back;
  const auto differs = [&](uint64_t digest) { return digest != answer.digests.front(); };
  if (answer.taken && std::any_of(answer.digests.begin(), answer.digests.end(), differs)) {
    answer.taken = false;
    answer.reason =
        "the servers cut at different moments, since a trainer came, went or was lost meanwhile";
  }
  return answer;
}

}  // namespace cpudist::client

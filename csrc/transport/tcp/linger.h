// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The end of a socket whose peer has not ended it yet.
#pragma once

#include <memory>

#include "transport/door.h"
#include "transport/tcp/reactor.h"

namespace cpudist::transport::tcp {

// Ends our half and drops what still comes until the peer ends its half, or for a short while. A
// socket closed with bytes unread would be reset, and a reset takes back what was sent last: the
// reason for the end. On the reactor's thread.
// `place`, where there is one, is given back with the descriptor, which goes at once when others
// need it.
void linger(Reactor& reactor, Descriptor socket, std::unique_ptr<Door::Guest> place = nullptr);

}  // namespace cpudist::transport::tcp

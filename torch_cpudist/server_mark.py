# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Tells servers of an optimizer that they hold nothing of.

Servers compare what every trainer opens, and tell all trainers of a difference. So one
that averages among trainers opens something too: an empty parameter set.
"""

from __future__ import annotations

from torch_cpudist import _core


class ServerMark:
    """An empty parameter set on all servers. Cost: two requests to each."""

    def __init__(self, client: _core.Client) -> None:
        """Opens it. Collective.

        Args:
            client: this trainer's.

        Raises:
            ConfigMismatchError: another trainer opened something else; on all.
            PeerLostError, OperationTimeoutError: a server or trainer does not answer.
        """
        self._client = client
        layout = _core.ParamSetLayout(configs=[], tables=[], blocks=[])
        self._id: int | None = client.open(layout)
        client.ready(self._id)

    def close(self, tell_servers: bool) -> None:
        """Ends it. Idempotent."""
        if self._id is not None and tell_servers:
            self._client.close(self._id)
        self._id = None

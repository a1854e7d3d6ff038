# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A trainer and a server of one process, whose link hands frames over in memory.

What is timed is everything that a pull and a push of one table cost besides transport:
stamps, deduplication, partition, packing, the server's lookup, Adagrad and the replies.
"""

from __future__ import annotations

import itertools

import torch

from torch_cpudist import _core

RUN_ID = 1
_names = itertools.count()


class EmbeddingPath:
    """One table of ``weight``'s shape, trained on a server of this process."""

    def __init__(self, weight: torch.Tensor, config: _core.OptimizerConfig) -> None:
        rows, dim = weight.shape
        self.config = config
        self.cache = weight.clone()
        network = _core.InprocNetwork()
        self.server = _core.Server(
            run_id=RUN_ID, shard_id=0, server_count=1, trainer_count=1, host="server"
        )
        address = self.server.listen_inproc(network, f"path{next(_names)}")
        self.client = _core.Client(run_id=RUN_ID, servers=[[address]], network=network)
        self.client.connect()
        table = _core.TableSpec("table", rows, dim)
        layout = _core.ParamSetLayout(configs=[config], tables=[table], blocks=[])
        self.set = self.client.open(layout)
        self.set.store_run(0, 0, rows, self.cache.data_ptr())
        self.set.ready()
        self.set.bind_table(0, self.cache.data_ptr())

    def pull(self, keys: torch.Tensor) -> None:
        """Brings the rows of int64 ``keys`` into the cache."""
        self.set.pull(0, keys.data_ptr(), keys.numel(), False)

    def push(self, keys: torch.Tensor, rows: torch.Tensor) -> None:
        """Trains on gradients ``rows`` (float32 ``[n, dim]``) of ``keys``."""
        gradient = (0, keys.data_ptr(), keys.numel(), rows.data_ptr())
        self.set.push(
            configs=[self.config],
            parameters=[],
            tables=[gradient],
            weights=[],
        )

    def close(self) -> None:
        """Ends the run and its server."""
        self.client.goodbye()
        self.server.stop()

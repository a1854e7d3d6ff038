# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The rendezvous store ends during training: only ``init()`` needs it."""

from __future__ import annotations

import threading

import pytest
import torch
from patience import PATIENCE, PATIENCE_S
from torch.distributed import DistError, TCPStore

import torch_cpudist as cpudist
from torch_cpudist import _core


@pytest.mark.parametrize("servers", [0, 1])
@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_nobody_notices_that_the_store_has_failed(strategy, servers):
    ranks = 2 + servers
    patience = PATIENCE
    keeper = [TCPStore("localhost", 0, is_master=True, timeout=patience)]
    port = keeper[0].port
    stores = [TCPStore("localhost", port, timeout=patience) for _ in range(ranks)]
    network = _core.InprocNetwork()
    trained, failed = threading.Barrier(3), threading.Barrier(3)
    weights, errors = [], []

    def train():
        model = torch.nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            model.weight.zero_()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        opt = cpudist.DistributedOptimizer(inner, model, strategy=strategy)

        def step():
            opt.zero_grad()
            (-model.weight.sum()).backward()
            opt.step()

        step()
        trained.wait(PATIENCE_S)
        failed.wait(PATIENCE_S)
        for _ in range(3):
            step()
        opt.state_dict()
        cpudist.barrier()
        opt.flush()
        weights.append(model.weight.tolist())

    def run(rank):
        try:
            cpudist.init(
                rank=rank,
                world_size=ranks,
                store=stores[rank],
                servers=servers,
                network=network,
                timeout_s=PATIENCE_S,
                variables={},
            )
            if cpudist.is_server():
                cpudist.serve()
            else:
                train()
            cpudist.shutdown()
        except BaseException as error:
            errors.append(error)
            trained.abort()
            failed.abort()

    threads = [
        threading.Thread(target=run, args=(r,), daemon=True) for r in range(ranks)
    ]
    for thread in threads:
        thread.start()
    trained.wait(PATIENCE_S)
    keeper.clear()
    with pytest.raises(DistError):
        stores[0].check(["any"])
    failed.wait(PATIENCE_S)
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert errors == []
    # Sync averages the two gradients, Async applies each.
    steps = 4.0 if strategy == "sync" else 8.0
    assert weights == [[[steps, steps]]] * 2

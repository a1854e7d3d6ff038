# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Lookups of replicas are foreseen, each part's by its replica."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from foreseen_cases import STEPS, TABLES, WATCHED, Columns, batches_of
from sync_cases import assert_same_bits, copy_of, run
from torch import nn

import torch_cpudist as cpudist

REPLICAS = 2


def loss(model: nn.Module, batch: torch.Tensor) -> Any:
    return model(batch).square().mean()


@pytest.mark.parametrize("trainers", [1, 2])
def test_one_request_per_server_and_part(trainers: int) -> None:
    def train(learn: bool) -> Any:
        def body(context: cpudist.Context) -> Any:
            model = Columns()
            strategy = cpudist.Sync(communicator={"learn_lookups": learn})
            inner = torch.optim.Adagrad(model.parameters(), lr=0.1)
            opt = cpudist.DistributedOptimizer(inner, model, strategy=strategy)
            requests = []
            with cpudist.ReplicaExecutor(
                model, loss, opt, REPLICAS, num_threads=1
            ) as executor:
                for batch in batches_of(context.trainer_rank):
                    before = opt.stats()["requests"]
                    executor.run(batch)
                    requests.append(opt.stats()["requests"] - before)
            stats = opt.stats()["lookups"]
            opt.leave()
            context.barrier()
            opt.flush()
            return copy_of(model), requests, stats

        return run(body, trainers, 2)

    for (plain, _, _), (found, requests, stats) in zip(
        train(False), train(True), strict=True
    ):
        assert_same_bits(plain, found)
        # Two parts are watched in a step, in the second of which one may be the third
        # that a plan is made of.
        assert max(requests[WATCHED:]) <= 2 * (REPLICAS + 1)
        assert stats["tables"] == TABLES
        assert stats["together"] >= REPLICAS * (STEPS - WATCHED)
        assert stats["in_vain"] == 0

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Rows of remote tables under Geo: whose slots there are, and everyone's movement."""

from __future__ import annotations

import threading

import pytest
import torch
from geo_cases import geo
from geo_rows import Rows, after_all_left
from patience import PATIENCE_S
from remote_cases import DIM, ROWS, remote, remote_embedding, wrap
from sync_cases import run
from table_cases import alone
from torch import nn

import torch_cpudist as cpudist

STEPS = 11


@pytest.mark.parametrize("trainers", [1, 2, 3])
@pytest.mark.parametrize("servers", [0, 2])
@pytest.mark.parametrize("cache_bytes", [1 << 20, 1500, 0])
def test_the_servers_hold_everyones_movement(trainers, servers, cache_bytes):
    results, rows, vector = after_all_left(
        trainers, servers, lambda rank: STEPS + 2 * rank, cache_bytes=cache_bytes
    )
    # Thirds of whole numbers are not exact.
    tolerance = 1e-3 if trainers == 3 else 0.0
    for found, stats, dense in results:
        for name, expected in rows.items():
            assert (found[name] - expected).abs().max() <= tolerance, name
        assert (dense - vector).abs().max() <= tolerance
        assert (stats["retired_rows"] > 0) == (cache_bytes < 1 << 20)


@pytest.mark.parametrize("rule", ["sum", "mean"])
@pytest.mark.parametrize("wire_dtype", ["fp32", "bf16"])
def test_retired_rows_are_conserved_by_every_rule(rule, wire_dtype):
    communicator = {"merge_rule": rule, "wire_dtype": wire_dtype, "pull_dtype": "fp32"}
    kept, cut = (
        after_all_left(
            2, 2, lambda rank: STEPS, cache_bytes=size, communicator=communicator
        )
        for size in (1 << 20, 900)
    )
    for (_, whole, _), (_, few, _) in zip(kept[0], cut[0], strict=True):
        assert whole["retired_rows"] == 0 < few["retired_rows"]
    if rule == "sum":
        for found, _, _ in cut[0]:
            for name, expected in cut[1].items():
                assert (found[name] - expected).abs().max() <= 1e-4, name


def test_a_step_that_fails_behind_a_table_leaves_no_row_of_before_it():
    def body():
        module = remote(
            lambda: nn.ModuleList(nn.Embedding(ROWS, DIM) for _ in range(2))
        )
        opt = wrap(module, geo(2))
        rows = torch.tensor([3, 5])
        with torch.no_grad():
            begun = module[0](rows).clone()
        (module[0](rows).sum() + module[1](rows).sum()).backward()
        never = torch.sparse_coo_tensor([[7]], torch.ones(1, DIM), (ROWS, DIM))
        module[1].weight.grad = never.coalesce()  # of a row that nobody looked up
        with pytest.raises(cpudist.UnpulledRowError):
            opt.step()
        return begun, module[0](rows).detach(), opt.stats()["exchange"]["slot_rows"]

    begun, found, count = alone(body)
    assert count == 2
    assert torch.equal(found, begun - 1)


def test_slots_are_of_rows_that_were_updated():
    def body():
        module = remote_embedding()
        opt = wrap(module, geo(2))
        with torch.no_grad():
            module(torch.arange(ROWS))
        assert opt.stats()["exchange"]["slot_rows"] == 0
        module(torch.tensor([3, 3, 5])).sum().backward()
        module(torch.tensor([7]))  # looked up, without a gradient
        opt.step()
        return opt.stats()["exchange"]

    stats = alone(body)
    assert stats["slot_rows"] == 2
    assert 0 < stats["slot_bytes"] <= stats["memory_bytes"]


@pytest.mark.parametrize(
    ("trainers", "wire_dtype"),
    [(1, "fp32"), (2, "fp32"), (2, "fp16"), (2, "bf16"), (2, "int8")],
)
def test_memory_stays_within_the_budget_and_two_intervals(trainers, wire_dtype):
    """Also where what rounding leaves is too small to be ever sent."""
    interval, width, budget = 2, 10, 4000
    communicator = {"wire_dtype": wire_dtype, "pull_dtype": "fp32"}

    modules = [remote(lambda: nn.Embedding(100_000, DIM)) for _ in range(trainers)]

    def body(context):
        module = modules[context.trainer_rank]
        options = {"exchange_budget": None, "communicator": communicator}
        opt = wrap(module, geo(interval, cache_bytes=budget, **options))
        most, size = 0, 0
        for step in range(60):
            first = (1000 * context.trainer_rank + step) * width
            opt.zero_grad()
            (module(torch.arange(first, first + width)) * 0.0123).sum().backward()
            opt.step()
            stats = opt.stats()["exchange"]
            most = max(most, stats["slot_bytes"])
            size = stats["slot_bytes"] // stats["slot_rows"]
        opt.leave()
        context.barrier()
        opt.flush()
        with torch.no_grad():
            before = torch.zeros(0)
            for rank in range(context.trainer_count):
                first = 1000 * rank * width
                rows = module(torch.arange(first, first + 60 * width))
                before = torch.cat([before, rows.flatten()])
        return most, size, opt.stats()["exchange"]["retired_rows"], before

    results = run(body, trainers, 1)
    for most, size, retired, rows in results:
        # Rows of the interval that ends, and of those since an exchange began.
        assert most <= budget + 3 * interval * width * size
        assert retired > 0
        assert torch.equal(rows, results[0][3])


def test_a_row_that_was_retired_comes_back_with_its_value_and_new_state():
    def body():
        module = remote(lambda: nn.Embedding(ROWS, DIM))
        inner = torch.optim.Adagrad(module.parameters(), lr=1.0)
        opt = wrap(module, geo(1, cache_bytes=0), inner)
        with torch.no_grad():
            begun = module(torch.tensor([3])).clone()
        for ids in ([3], [4], [5]):
            opt.zero_grad()
            module(torch.tensor(ids)).sum().backward()
            opt.step()
        with torch.no_grad():
            gone = module(torch.tensor([3])).clone()
        opt.zero_grad()
        module(torch.tensor([3])).sum().backward()
        opt.step()
        with torch.no_grad():
            return begun, gone, module(torch.tensor([3])), opt.stats()["exchange"]

    begun, gone, again, stats = alone(body)
    assert stats["retired_rows"] >= 2
    # Adagrad's first step is its rate, whatever the gradient; a second one is less.
    torch.testing.assert_close(gone, begun - 1)
    torch.testing.assert_close(again, begun - 2)


def test_others_movement_comes_to_rows_that_are_here_and_to_lookups():
    modules = [remote(Rows).first for _ in range(2)]  # zeros

    def body(context):
        module = modules[context.trainer_rank]
        nothing = torch.zeros(1, DIM)
        opt = wrap(module, geo(1))
        for _ in range(2):
            opt.zero_grad()
            if context.trainer_rank == 0:
                module(torch.tensor([2, 3])).sum().backward()
            else:  # it has a slot for one of them, and moves it by nothing
                (module(torch.tensor([2])) * nothing).sum().backward()
            opt.step()
        context.barrier()
        opt.flush()
        with torch.no_grad():
            return module(torch.tensor([2, 3]))

    for found in run(body, 2, 2):
        torch.testing.assert_close(found, torch.full((2, DIM), -2.0))


def test_other_threads_look_rows_up_while_slots_come_and_go():
    modules = [remote(Rows).first for _ in range(2)]

    def body(context):
        module = modules[context.trainer_rank]
        opt = wrap(module, geo(1, cache_bytes=300, exchange_budget=None))
        done, seen = threading.Event(), []

        def look():
            with torch.no_grad():
                while not done.is_set() or not seen:
                    rows = module(torch.arange(ROWS))
                    # Whole steps, of all elements of a row.
                    seen.append(bool((rows == rows[:, :1]).all()))

        reader = threading.Thread(target=look)
        reader.start()
        try:
            for step in range(60):
                opt.zero_grad()
                module(torch.arange(step, step + 7).remainder(ROWS)).sum().backward()
                opt.step()
        finally:
            done.set()
            reader.join(PATIENCE_S)
        return all(seen), opt.stats()["exchange"]["retired_rows"]

    for whole, retired in run(body, 2, 1):
        assert whole
        assert retired > 0

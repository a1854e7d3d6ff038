# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Geo beside everything else that users do: writing, counting, interrupts, ends."""

from __future__ import annotations

import copy
import itertools
import threading

import pytest
import torch
from geo_cases import (
    Moving,
    alone,
    geo,
    model_sum,
    seeds_of,
    steps,
    train,
    wrap,
    wrapped,
)
from interrupts import interrupted
from patience import PATIENCE_S
from sync_cases import (
    ONE_THREAD,
    RULES,
    Batches,
    Model,
    assert_same_bits,
    build,
    copy_of,
    run,
)

import torch_cpudist as cpudist
from torch_cpudist import _core

# -- writing to the model --------------------------------------------------------------


def test_a_stored_model_is_everyones_to_the_bit():
    saved = {k: v + 0.1 for k, v in Moving().state_dict().items()}

    def body(context):
        model = Moving()
        opt = wrapped(model, geo(2), lr=0.1)
        train(model, opt, seeds_of(context.trainer_rank, 5 + context.trainer_rank))
        model.load_state_dict(saved)
        opt.store_model(all_rows=True)
        assert_same_bits(copy_of(model), saved)
        opt.flush()
        assert_same_bits(copy_of(model), saved)
        context.barrier()
        train(model, opt, [7])

    run(body, 3, 2)


def test_what_was_not_written_keeps_everyones_movement():
    def body(context):
        model = Moving()
        opt = wrapped(model, geo(2))
        train(model, opt, seeds_of(context.trainer_rank, 5))
        if context.trainer_rank == 0:
            with torch.no_grad():
                model.vector.fill_(5.0)
        opt.store_model()
        return copy_of(model)

    expected = model_sum(seeds_of(0, 5) + seeds_of(1, 5))
    expected["vector"].fill_(5.0)
    for found in run(body, 2, 2):
        assert_same_bits(found, expected)


def test_loaded_state_leaves_all_with_one_model():
    def body(context):
        model = Model()
        opt = wrap(build(RULES["adam"], model), model)
        batches = Batches(2)
        steps(opt, model, batches, 0, 5, context.trainer_rank)
        opt.load_state_dict(copy.deepcopy(opt.state_dict()))
        return copy_of(model)

    first, second = run(body, 2, 2)
    assert_same_bits(first, second)


def test_writing_behind_its_back_is_refused():
    def body(context):
        model = Moving()
        opt = wrapped(model, geo(2))
        train(model, opt, seeds_of(0, 4))
        context.barrier()
        opt.flush()
        expected = copy_of(model)
        with torch.no_grad():
            model.first.weight[3] = 9.0
        with pytest.raises(cpudist.ModelChangedError, match=r"first\.weight"):
            train(model, opt, [1])
        with pytest.raises(cpudist.ModelChangedError, match=r"first\.weight"):
            opt.flush()
        opt.flush(overwrite=True)
        assert_same_bits(copy_of(model), expected)
        context.barrier()
        train(model, opt, [5])

    run(body, 2, 2)


def test_what_is_written_at_the_end_reaches_nobody():
    """Averaged weights put in for a last evaluation, say."""
    written = threading.Event()

    def body(context):
        model = Moving()
        opt = wrapped(model, geo(2))
        train(model, opt, seeds_of(context.trainer_rank, 5))
        context.barrier()
        if context.trainer_rank == 0:
            with torch.no_grad():
                model.first.weight.add_(100.0)
                model.vector.add_(100.0)
            opt.leave()
            written.set()
        else:
            assert written.wait(PATIENCE_S)
            opt.leave()
            opt.flush()
        return copy_of(model)

    assert_same_bits(run(body, 2, 2)[1], model_sum(seeds_of(0, 5) + seeds_of(1, 5)))


@pytest.mark.parametrize("under_way", [False, True])
def test_a_barrier_hands_on_nothing_that_was_written(under_way):
    """It stands, and still counts as written; what else moved is everyone's."""
    seeds = seeds_of(0, 5) + seeds_of(1, 5)

    def body(context):
        model = Moving()
        opt = wrapped(model, geo(5 if under_way else 2, exchange_budget=0.001))
        train(model, opt, seeds_of(context.trainer_rank, 5))
        if context.trainer_rank == 0:
            with torch.no_grad():
                model.first.weight.add_(100.0)
                model.vector.add_(100.0)
        written = copy_of(model)
        context.barrier()
        if context.trainer_rank == 0:
            assert model.first.weight.equal(written["first.weight"])
            assert model.vector.equal(written["vector"])
            with pytest.raises(cpudist.ModelChangedError, match="2 parameters"):
                train(model, opt, [1])
        opt.flush(overwrite=True)
        return copy_of(model)

    for found in run(body, 2, 2):
        whole = model_sum(seeds)
        for name in ("second.weight", "matrix"):
            assert found[name].equal(whole[name])
        for name in ("first.weight", "vector"):
            assert float(found[name].max()) < 60  # nothing of what was written


@pytest.mark.parametrize("call", ["flush", "store_model", "leave", "wrap"])
def test_writing_while_an_exchange_is_under_way(call):
    saved = {k: v + 0.1 for k, v in Moving().state_dict().items()}

    def body(context):
        model = Moving()
        opt = wrapped(model, geo(5, exchange_budget=0.001))
        train(model, opt, seeds_of(context.trainer_rank, 5))
        model.load_state_dict(saved)
        if call == "flush":
            opt.flush(overwrite=True)
            assert all(float(p.detach().abs().max()) < 60 for p in model.parameters())
            return
        if call == "leave":
            opt.leave()
        if call == "wrap":
            opt = wrapped(model, geo(2))
        else:
            opt.store_model(all_rows=True)
        assert_same_bits(copy_of(model), saved)
        opt.flush()
        assert_same_bits(copy_of(model), saved)
        context.barrier()

    run(body, 2, 2)


def test_weights_may_move_in_memory():
    def body(context):
        model = Moving()
        opt = wrapped(model, geo(2))
        for i in range(6):
            train(model, opt, [10 * context.trainer_rank + i])
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
        model.zero_grad()  # sparse tensors cannot be shared
        model.share_memory()
        opt.leave()
        context.barrier()
        opt.flush()
        found = copy_of(model)
        model.double()
        with pytest.raises(cpudist.ModelChangedError, match="expected"):
            opt.flush()
        model.float()
        model.matrix.data = model.matrix.data.double()
        return found

    seeds = [10 * rank + i for rank in range(2) for i in range(6)]
    for found in run(body, 2, 2):
        assert_same_bits(found, model_sum(seeds))


def test_parameters_that_are_not_contiguous():
    def body(context):
        model = Moving()
        model.matrix.data = model.matrix.data.t().contiguous().t()
        assert not model.matrix.is_contiguous()
        opt = wrapped(model, geo(2))
        train(model, opt, seeds_of(context.trainer_rank, 5))
        opt.leave()
        context.barrier()
        opt.flush()
        return copy_of(model)

    for found in run(body, 2, 2):
        assert_same_bits(found, model_sum(seeds_of(0, 5) + seeds_of(1, 5)))


# -- counters --------------------------------------------------------------------------


def test_counters_and_memory():
    def body(context):
        model = Moving()
        opt = wrapped(model, geo(4))
        known = []
        for seed in seeds_of(context.trainer_rank, 10):
            train(model, opt, [seed])
            known.append(cpudist.global_step())
        assert known == sorted(known)
        assert known[3] >= 4
        touched = sum(
            int((w != o).any(dim=1).sum())
            for w, o in zip(
                (
                    model_sum(seeds_of(context.trainer_rank, 10))[f"{n}.weight"]
                    for n in names
                ),
                (Moving().state_dict()[f"{n}.weight"] for n in names),
                strict=True,
            )
        )
        opt.flush()
        found = opt.stats()["exchange"]
        context.barrier()
        opt.flush()
        train(model, opt, [1])
        return known[-1], cpudist.global_step(), found, touched

    names = ("first", "second")
    for last, after, found, touched in run(body, 2, 2):
        assert 10 <= last <= 20
        assert after in (21, 22)  # the other one may have shut down by then
        assert found["exchanges"] >= 1
        assert found["rows_sent"] > 0
        assert found["shadow_rows"] >= touched > 0
    last, after, found, _ = run(body, 1)[0]
    assert (last, after) == (10, 11)
    assert found["exchanges"] == found["shadow_rows"] == found["rows_sent"] == 0


def test_more_rows_than_fit_a_reply_come_in_several():
    """A server sends up to 32 MiB of rows at once."""
    rows, dim = 40_000, 256

    def body(context):
        model = torch.nn.Embedding(
            rows, dim, sparse=True, _weight=torch.zeros(rows, dim)
        )
        opt = wrapped(model, geo(100))
        if context.trainer_rank == 0:
            ids = torch.arange(rows)[None]
            ones = torch.ones(rows, dim)
            model.weight.grad = torch.sparse_coo_tensor(
                ids, ones, (rows, dim), check_invariants=False
            )
            opt.step()
            opt.leave()
        context.barrier()
        opt.flush()
        done = bool(model.weight.eq(-1.0).all())
        return done, opt.stats()["exchange"]["exchanges"]

    # One before the barrier, one in the flush, and one for what did not fit.
    assert run(body, 2, 1)[1] == (True, 3)


def test_a_copy_of_the_model_is_a_plain_one():
    def body(context):
        model = Moving()
        opt = wrapped(model, geo(2))
        train(model, opt, [1, 2])
        copied = copy.deepcopy(model)
        train(model, opt, [3])
        assert_same_bits(copy_of(copied), model_sum([1, 2]))
        inner = torch.optim.SGD(copied.parameters(), lr=1.0)
        copied.vector.sum().backward()
        inner.step()

    alone(body)


# -- interrupts and ends ---------------------------------------------------------------


def flush_for_ever(opt):
    while True:
        opt.flush()


def flush_and_interrupt(context, opt):
    """Ctrl-C once a flush has sent something, whose answer it waits for."""
    client = context.trainer_client()
    before = client.stats()["requests"]

    def ready():
        return client.stats()["requests"] > before

    with pytest.raises(KeyboardInterrupt), interrupted(ready):
        flush_for_ever(opt)


def test_interrupted_flushes_lose_nothing():
    """Ctrl-C while an exchange is waited for, again and again."""
    plan = _core.FaultPlan(delay=1.0, delay_ms_max=40, seed=1)
    shared = {
        "world_size": 2,
        "store": torch.distributed.HashStore(),
        "network": _core.InprocNetwork(plan),
        "variables": ONE_THREAD,
    }
    results = {}

    def body(rank):
        context = cpudist.init(rank=rank, **shared)
        model = Moving()
        opt = wrapped(model, geo(2))
        for i in range(3):
            train(model, opt, [100 * rank + i])
            if rank == 0:
                flush_and_interrupt(context, opt)
        context.barrier()
        opt.leave()
        context.barrier()
        opt.flush()
        results[rank] = copy_of(model)
        context.shutdown()

    other = threading.Thread(target=body, args=(1,), daemon=True)
    other.start()
    body(0)
    other.join(PATIENCE_S)
    expected = model_sum([100 * rank + i for rank in range(2) for i in range(3)])
    for rank in range(2):
        assert_same_bits(results[rank], expected)


def test_a_lost_server_is_told_at_a_later_step():
    def body(context):
        model = Moving()
        opt = wrapped(model, geo(1))
        train(model, opt, range(3))
        context.barrier()
        if context.trainer_rank == 1:
            context.abort("out of memory")
            return
        with pytest.raises(cpudist.PeerLostError, match="out of memory"):
            train(model, opt, itertools.repeat(1))

    with pytest.raises(cpudist.PeerLostError):  # out of trainer 0's own shutdown
        run(body, 2)

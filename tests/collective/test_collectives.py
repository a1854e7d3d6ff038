# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""AllReduce, LocalSGD and Hybrid. Trainers are processes, which gloo needs."""

from __future__ import annotations

import copy
import re
import signal

import pytest
import torch
from async_cases import Counting, wrapped
from averaging_cases import averages
from collective_cases import (
    Dense,
    adam,
    asks_alone,
    batch_of,
    difference,
    loss_of,
    one_stops_early,
    until_lost,
)
from endings import lose_rank
from hybrid_cases import hybrids
from patience import PATIENCE_S
from reduce_cases import reduces
from sync_cases import ONE_THREAD, run

import torch_cpudist as cpudist
from torch_cpudist import strategies
from torch_cpudist.testing import ProcessRanks

pytestmark = pytest.mark.processes

SAME = 1e-6
CASES = ("mean", "samples", "clipped", "tensors")


@pytest.mark.parametrize("trainers", [2, 3])
def test_trainers_that_average_equal_one_process_and_ddp(trainers):
    with ProcessRanks(averages, trainers, variables=ONE_THREAD) as ranks:
        results = ranks.results(PATIENCE_S)
    for found in results:
        for one in (found["float32"], found["float64"]):
            assert max(one[name] for name in CASES) <= SAME
            assert all(one[f"{name} bits"] for name in CASES)
            assert one["one norm"] > 1e-4  # which is another thing
            assert one["buckets"] >= 6
            # Hooks sent what the step needed; weights are known at the step only.
            assert one["mean repeated"] == 0
            assert one["samples repeated"] == 1
        assert found["float64"]["mean"] <= 1e-12
        assert found["ddp"] <= SAME
        assert found["no_sync"][0] <= SAME
        assert found["no_sync"][1] == 0
        for how in ("passes", "clipped", "create_graph"):
            assert found[how][0] <= SAME
            assert found[how][1] == 1
        check_state(found["state"])
        assert found["replicas"][0] <= SAME
        assert found["replicas"][1:3] == [0, True]
        assert "(register_post_accumulate_grad_hook)" in found["replicas"][3]
        local = found["local"]
        assert local["worst"] <= 2 * SAME
        assert local["apart"]
        assert local["together"]
        assert local["averages"] == 5
    if trainers == 2:
        check_refusals([found["refused"] for found in results])
        for found in results:
            assert found["outer"] <= 2 * SAME
            assert found["outer between"] <= 2 * SAME
            first, second, third = found["mismatched"]
            assert "by the same strategy" in first
            assert "by the same strategy" in second
            assert "trainer 0 has AllReduce" in third
            assert found["written"]["kept"]
            assert found["written"]["averages"] == 0
            assert found["written"]["together"]
        said = [found["written"]["refused"] for found in results]
        assert "All is as before" in said[1]
        assert said[0] == ""


def check_state(found):
    """Saved, loaded into plain torch and back; written by one trainer; counted."""
    assert found["continued"] <= SAME
    assert found["stored"] == 7.0
    assert found["bits"]
    # Steps of the group since it was wrapped, on every trainer.
    assert found["global_step"] == 6


@pytest.mark.parametrize("trainers", [2, 3])
def test_reduce_has_the_numbers_of_all_reduce_and_a_share_of_the_state(trainers):
    with ProcessRanks(reduces, trainers, variables=ONE_THREAD) as ranks:
        results = ranks.results(PATIENCE_S)
    for found in results:
        one = found["float32"]
        assert max(one[name] for name in CASES) <= SAME
        assert all(one[f"{name} bits"] for name in CASES)
        assert one["buckets"] >= 3
        assert one["mean repeated"] == 0
        like = found["like"]
        assert like["difference"] <= SAME
        assert like["counted"]
        assert like["share"] == pytest.approx(1 / trainers, rel=0.25)
        for name in (name for name in found if name.startswith("tables")):
            assert found[name]["worst"] <= 1, name
            assert found[name]["bits"], name
    assert sum(found["like"]["share"] for found in results) == pytest.approx(1, rel=0.1)
    if trainers == 3:
        # A sum that it has begun ends, though a trainer has left meanwhile.
        assert [found["left"] for found in results] == [3.0] * 3
        return
    for found in results:
        assert found["clipped"] == [pytest.approx(0, abs=SAME), 1]
        check_state(found["state"])
        check_compression(found)
        assert all(found["rewrapped"].values()), found["rewrapped"]


def check_compression(found):
    assert all(found["algebra"].values()), found["algebra"]
    losses = found["converges"]
    assert losses["bf16"] <= 1.02 * losses["none"] + 1e-4
    assert losses["none"] < 0.5
    assert losses["bf16 bytes"] < 0.8 * losses["none bytes"]


def test_state_that_is_spread_is_asked_for_by_all():
    variables = {**ONE_THREAD, "CPUDIST_ROUND_DEADLINE_MS": "3000"}
    with ProcessRanks(asks_alone, 2, variables=variables) as ranks:
        for rank in range(2):
            ranks.expect(rank, "report", PATIENCE_S)
        error = ranks.expect(1, "error", PATIENCE_S)["value"]
        assert error["type"] == "OperationTimeoutError"
        assert "trainer 0 is in state_dict(), which under Reduce every" in error["text"]


def check_refusals(found):
    """Every trainer is told the same, with names and values."""
    assert found[0] == found[1]
    assert found[0]["samples"].startswith("ConfigMismatchError: step: 1 of 2 trainers")
    assert "param_groups[0]['lr'] = 0.1, trainer 1 has" in found[0]["lr"]
    assert "0.weight (3, 2)" in found[0]["shape"]
    assert "trainer 1 has parameter 0.weight (3, 3)" in found[0]["shape"]


def test_parts_of_a_hybrid_keep_what_each_promises():
    with ProcessRanks(hybrids, 2, variables=ONE_THREAD) as ranks:
        for found in ranks.results(PATIENCE_S):
            for name, one in found.items():
                if name.startswith("rewritten"):
                    assert one, name
                elif name.startswith("half done"):
                    assert "All is as before" in one["said"], name
                    assert one["kept"], name
                    assert one["back"], name
                elif name.startswith("parity"):
                    assert one["worst"] <= 1, name
                    assert one["bits"], name
                else:
                    # Dense parameters: equal on all, after every step.
                    assert one["bits"], name
                    assert one["replay"], name
                    # Tables: every gradient once, or their mean.
                    assert one["mean" if name.endswith(" sync") else "once"], name
                    assert ("exchange" in one["stats"]) == name.endswith("geo")


def test_a_trainer_that_stops_early_is_named():
    with ProcessRanks(one_stops_early, 2, variables=ONE_THREAD) as ranks:
        error = ranks.expect(0, "error", PATIENCE_S)["value"]
        assert error["type"] == "OperationTimeoutError"
        assert "trainer 1 has left" in error["text"]
        assert ranks.expect(1, "error", PATIENCE_S)["value"]["type"] == "PeerLostError"


@pytest.mark.parametrize(
    ("number", "liveness_ms", "limit_s"),
    [(signal.SIGKILL, "5000", 2.0), (signal.SIGSTOP, "3000", 6.0)],
)
def test_a_lost_trainer_is_told_to_all(number, liveness_ms, limit_s):
    variables = {**ONE_THREAD, "CPUDIST_LIVENESS_MS": liveness_ms}
    with ProcessRanks(until_lost, 3, variables=variables) as ranks:
        for rank in range(3):
            ranks.expect(rank, "report", PATIENCE_S)
        lost_s = lose_rank(ranks, 2, number)
        for rank in range(2):
            error = ranks.expect(rank, "error", PATIENCE_S)
            assert error["value"]["type"] == "PeerLostError", error
            assert error["time_s"] - lost_s < limit_s
            if number == signal.SIGSTOP:
                assert re.search(r"(trainer|server) 2\b", error["value"]["text"]), error
        for process in ranks.processes[:2]:
            process.join(PATIENCE_S)  # nothing of gloo keeps it
            assert process.exitcode == 0


def test_a_frozen_trainer_is_named_where_a_dedicated_server_knows_it():
    """Who waits for it in a collective is told by nobody else for half an hour."""
    variables = {**ONE_THREAD, "CPUDIST_LIVENESS_MS": "3000"}
    with ProcessRanks(until_lost, 3, servers=1, variables=variables) as ranks:
        for rank in (1, 2):
            ranks.expect(rank, "report", PATIENCE_S)
        lose_rank(ranks, 2, signal.SIGSTOP)
        error = ranks.expect(1, "error", PATIENCE_S)["value"]
        assert error["type"] == "PeerLostError", error
        assert re.search(r"trainer 1 \(.* was lost: silent for", error["text"]), error


def train(model, stepped, steps, **options):
    for step in range(steps):
        stepped.zero_grad()
        loss_of(model, batch_of(step, 0, 3, torch.float32), (0, 1)).backward()
        stepped.step(**options)


@pytest.mark.parametrize("strategy", ["all_reduce", "reduce", "local_sgd"])
def test_a_world_of_one_is_plain_torch(strategy):
    def body(context):
        ours, plain = Dense(), Dense()
        optimizer = cpudist.DistributedOptimizer(adam(ours), ours, strategy)
        reference = adam(plain)
        train(ours, optimizer, 3)
        train(plain, reference, 3)
        saved = optimizer.state_dict()
        assert saved["state"].keys() == reference.state_dict()["state"].keys()
        before = copy.deepcopy(dict(ours.named_parameters()))
        train(ours, optimizer, 1, samples=0)
        if strategy != "local_sgd":  # there samples only count
            assert all(torch.equal(p, before[n]) for n, p in ours.named_parameters())
        else:
            train(plain, reference, 1)
        optimizer.flush()
        optimizer.leave()
        return difference(ours, plain)

    assert run(body, 1) == [0.0]


def test_sharding_that_has_no_effect_is_said(caplog):
    def body(context):
        model = Dense()
        strategy = {"name": "allreduce", "sharding": {"slice": False}}
        cpudist.DistributedOptimizer(adam(model), model, strategy)

    run(body, 1)
    assert "AllReduce: sharding has no effect" in caplog.text


def test_what_cannot_be_averaged_is_refused():
    def alone(context):
        with pytest.raises(cpudist.UnsupportedModelError, match=r"Hybrid\(dense="):
            wrapped(Counting(), "local_sgd")
        adamw = torch.optim.AdamW((lazy := Counting()).parameters())
        with pytest.raises(cpudist.UnsupportedOptimizerError, match=r"Hybrid\(dense="):
            cpudist.DistributedOptimizer(adamw, lazy, "allreduce")
        with pytest.raises(cpudist.UnsupportedModelError, match="found no table"):
            cpudist.DistributedOptimizer(adam(model := Dense()), model, "hybrid")
        clip = cpudist.ClipNorm(1.0)
        model = Counting()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with pytest.raises(cpudist.UnsupportedOptimizerError, match="ClipValue"):
            cpudist.DistributedOptimizer(optimizer, model, "hybrid", clip=clip)

    def threads(context):
        with pytest.raises(cpudist.BackendUnavailableError, match="in-process network"):
            cpudist.DistributedOptimizer(adam(model := Dense()), model, "allreduce")

    run(alone, 1)
    run(threads, 2)


def test_parts_are_named_by_arguments():
    made = strategies.strategy("hybrid", sparse={"name": "geo", "push_every": 7})
    assert made.sparse == cpudist.Geo(push_every=7)
    assert made.dense == cpudist.AllReduce()
    refused = [
        ({"dense": "async"}, "Valid: allreduce, local_sgd, reduce, sync"),
        ({"sparse": cpudist.HalfAsync()}, "expected one of Sync"),
        (
            {"dense": cpudist.Sync(sharding={"slice": False})},
            "Pass sharding= to Hybrid",
        ),
    ]
    for options, message in refused:
        with pytest.raises(cpudist.ConfigurationError, match=message):
            cpudist.Hybrid(**options)

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``CPUDIST_TRANSPORT=c10d``: the same as over sockets, and the same ends."""

from __future__ import annotations

import datetime
import re
import signal

import pytest
import torch
from async_cases import all_seeds, model_sum
from endings import lose_rank
from patience import PATIENCE_S
from programs import skip_without_oneccl
from sync_cases import ONE_THREAD, run
from transport_cases import RULE_NAMES, WIDE, everything, sync, train_forever

import torch_cpudist as cpudist
from torch_cpudist import _core
from torch_cpudist.launch import environment, rank_network
from torch_cpudist.testing import ProcessRanks

pytestmark = pytest.mark.processes

# oneCCL asks for news all the time: two survivors on two cores are slow to look.
TOLD_S = {"gloo": 1.0, "shm": 1.0, "ccl": 2.0}
OVER_C10D = ONE_THREAD | {"CPUDIST_TRANSPORT": "c10d", "CPUDIST_BACKEND": "gloo"}
LIVENESS_S = 3.0
GROUP = {
    "CPUDIST_ROLE": "trainer",
    "CPUDIST_RENDEZVOUS": "127.0.0.1:29400",
    "CPUDIST_TRANSPORT": "c10d",
}


def check_traffic(found):
    """Both sides count the same bytes, but for heartbeats under way."""
    for told in found:
        assert told["reconnects"] == 0
        assert min(told["client"]) > 3 * 4 * WIDE / 2  # of the large payloads alone
    if any(told["server"] is None for told in found):
        return  # dedicated servers tell nothing
    assert all(re.fullmatch(r"c10d:\d", *told["addresses"]) for told in found)
    for way in range(2):
        clients, servers = (
            sum(told[side][way] for told in found) for side in ("client", "server")
        )
        assert abs(clients - servers) <= 5000


@pytest.mark.parametrize(
    ("backend", "trainers", "servers"), [("gloo", 2, 0), ("gloo", 2, 2), ("shm", 2, 1)]
)
def test_training_equals_that_over_another_transport_bit_for_bit(
    backend, trainers, servers
):
    expected = {
        name: run(lambda _, name=name: sync(name), trainers, servers)[0]
        for name in RULE_NAMES
    }
    sums = model_sum(all_seeds(trainers, 40))
    counts = {name: value.tolist() for name, value in sums.items()}
    size = trainers + servers
    variables = OVER_C10D | {"CPUDIST_BACKEND": backend}
    with ProcessRanks(everything, size, servers=servers, variables=variables) as ranks:
        results = ranks.results(PATIENCE_S)
        assert ranks.exit_codes(PATIENCE_S) == [0] * size
    trained = [one for one in results if one is not None]
    assert len(trained) == trainers
    for found in trained:
        for name in RULE_NAMES:
            assert found[name] == expected[name]
        assert found["counts"] == counts
        assert found["wide"]
        # Threads that a backend starts from ours have their name.
        assert found["threads"] >= 2 * (servers or trainers - 1)
        assert found["threads left"] == 0
    check_traffic([found["traffic"] for found in trained])


def check_loss(entry, since_s, limit_s, who):
    assert entry["value"]["type"] == "PeerLostError", entry
    assert re.search(who, entry["value"]["text"]), entry
    assert "c10d:" in entry["value"]["text"], entry
    assert entry["time_s"] - since_s <= limit_s, entry["time_s"] - since_s


@pytest.mark.parametrize(
    "backend", ["gloo", "shm", pytest.param("ccl", marks=pytest.mark.integrations)]
)
def test_a_killed_rank_is_named_by_every_survivor(backend):
    if backend == "ccl":
        skip_without_oneccl()
    variables = OVER_C10D | {"CPUDIST_BACKEND": backend}
    with ProcessRanks(train_forever, 3, variables=variables) as ranks:
        for rank in range(3):
            ranks.expect(rank, "report", PATIENCE_S)
        lost_s = lose_rank(ranks, 1, signal.SIGKILL)
        for rank in (0, 2):
            entry = ranks.expect(rank, "error", PATIENCE_S)
            check_loss(
                entry, lost_s, TOLD_S[backend], r"(trainer|server) 1\b.* was lost"
            )
            assert not re.search(r"(trainer|server) [02]\b[^:]* was lost", str(entry))
        codes = ranks.exit_codes(PATIENCE_S)
        assert [codes[0], codes[2]] == [0, 0]


@pytest.mark.parametrize(("frozen", "who"), [(0, "server 0"), (2, "trainer 1")])
def test_a_frozen_process_is_named_within_the_clock_of_liveness(frozen, who):
    clocks = {"CPUDIST_LIVENESS_MS": str(int(LIVENESS_S * 1000))}
    variables = OVER_C10D | clocks
    with ProcessRanks(train_forever, 3, servers=1, variables=variables) as ranks:
        for rank in (1, 2):
            ranks.expect(rank, "report", PATIENCE_S)
        lost_s = lose_rank(ranks, frozen, signal.SIGSTOP)
        for rank in {0, 1, 2} - {frozen}:
            entry = ranks.expect(rank, "error", PATIENCE_S)
            check_loss(entry, lost_s, LIVENESS_S + 1.0, who + r"\b")


def test_what_it_cannot_serve_is_refused_at_once():
    with pytest.raises(cpudist.ConfigurationError, match="jobs of their own"):
        cpudist.init(variables=GROUP)
    with pytest.raises(cpudist.ConfigurationError, match="in-process network"):
        run(lambda _: None, 2, variables=OVER_C10D)
    nccl = environment.Environment(transport="c10d", backend="nccl")
    with pytest.raises(cpudist.ConfigurationError, match="CPUDIST_BACKEND=nccl"):
        rank_network.check(nccl, threads=False)


def test_a_key_that_cannot_be_proven_there_is_told_of(caplog):
    needs = environment.Environment(transport="c10d", secret_required=True)
    with pytest.raises(cpudist.ConfigurationError, match="CPUDIST_AUTH=require"):
        rank_network.check(needs, threads=False)
    has = environment.Environment(transport="c10d", secret=_core.Secret(b"k" * 32))
    rank_network.check(has, threads=False)
    assert "the key that is set guards nothing that travels" in caplog.text


def test_a_world_of_one_needs_no_group():
    with cpudist.init(variables=OVER_C10D) as context:
        assert context.addresses() == []
        assert torch.distributed.get_world_size() == 1
        context.shutdown()


def test_modules_of_two_builds_refuse_each_other():
    with pytest.raises(cpudist.InvalidArgumentError, match="build the modules"):
        _core.RankNetwork(datetime.datetime_CAPI, [1])

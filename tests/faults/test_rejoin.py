# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A trainer that servers have counted as lost goes on by itself, once it reaches them.

It trains with a gradient of -1 in each step, so that values say how many were applied:
all but those that it counts as lost, none of them twice.
"""

# ruff: noqa: F811  (fixtures)

from __future__ import annotations

import contextlib
import functools
import signal

import pytest
from endings import lose_rank
from group_fixtures import groups, steps_of  # noqa: F401
from network_hosts import ADDRESSES, enter, make_hosts  # noqa: F401
from patience import PATIENCE_S
from rejoining import by_rank, goes_on, stays
from sync_cases import KEY

import torch_cpudist as cpudist
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.testing import ProcessRanks

pytestmark = pytest.mark.processes

CLOCKS = {"CPUDIST_LIVENESS_MS": "3000"}
GEO = cpudist.Geo(push_every=2, exchange_budget=1.0)
# Halves of whole numbers, over and over.
ROUNDING = 1e-3


def check_ends(servers, ranks=2):
    for rank in range(ranks):
        assert servers.expect(rank, "result", PATIENCE_S)["value"] is None


def check_counted(found, before, exact=True):
    """What it counts as lost is what values lack, and nothing came after its loss."""
    rank, steps, recovered = (found[name] for name in ("rank", "steps", "recovered"))
    assert found["incarnation"] >= 2
    assert (recovered["rejoined"], recovered["count"]) == (1, 0)
    lost, torn = recovered["lost_updates"], recovered["torn_updates"]
    assert 1 <= lost < steps
    after = steps - found["back"]
    assert after == 20
    assert found["values"][rank] == pytest.approx(before[rank] + after, abs=ROUNDING)
    if exact:
        kept = found["values"][rank] - (steps - lost)
        assert 0 <= kept <= torn
    else:  # of movement that was handed on in part, or kept back, or nothing
        assert found["began"][rank] == pytest.approx(before[rank], abs=ROUNDING)
        assert before[rank] <= found["back"]


STRATEGIES = [
    ("async", True, KEY),
    (cpudist.Async(max_staleness=16), True, {}),
    (GEO, False, KEY),
]


def counted_before_waking(victim, steady, steps_of, folder):
    """Freezes a trainer until servers have lost it; what they had of it then."""
    steps_of("victim", 20)
    steps_of("steady", 1)
    lose_rank(victim, 0, signal.SIGSTOP)
    (folder / "away").touch()
    before = steady.expect(0, "report", PATIENCE_S)["value"]
    victim.signal(0, signal.SIGCONT)
    return before


@pytest.mark.parametrize(("strategy", "exact", "key"), STRATEGIES)
def test_a_frozen_trainer_that_wakes_up_goes_on_by_itself(
    strategy, exact, key, groups, steps_of, tmp_path
):
    variables = CLOCKS | key
    servers = groups.servers(**variables)
    steady, victim = (
        groups.start(
            "trainer", functools.partial(body, tmp_path, strategy), **variables
        )
        for body in (stays, goes_on)
    )
    before = counted_before_waking(victim, steady, steps_of, tmp_path)
    told = victim.expect(0, "warning", PATIENCE_S)["value"]
    while told.startswith("Geo("):  # of exchanges that are late
        told = victim.expect(0, "warning", PATIENCE_S)["value"]
    assert "which servers had counted as lost, goes on as incarnation 2" in told
    found = victim.expect(0, "result", PATIENCE_S)["value"]
    check_counted(found, before, exact)
    (tmp_path / "stop").touch()
    mine, steps, values = steady.expect(0, "result", PATIENCE_S)["value"]
    check_ends(servers)
    assert {mine, found["rank"]} == {0, 1}
    assert values[mine] == pytest.approx(steps, abs=ROUNDING)
    assert values[found["rank"]] == pytest.approx(
        found["values"][found["rank"]], abs=ROUNDING
    )
    # The dense element is on another server than the rows, or comes with them.
    torn = found["recovered"]["torn_updates"]
    assert values[8] == pytest.approx(sum(values[:8]), abs=torn + ROUNDING)


def test_trainer_0_goes_on_and_saves_snapshots(groups, steps_of, tmp_path):
    where = {"CPUDIST_SNAPSHOT_DIR": str(tmp_path / "snapshots"), **CLOCKS}
    servers = groups.servers(**where)
    body = functools.partial(by_rank, tmp_path, "async")
    jobs = [groups.start("trainer", body, **where) for _ in range(2)]
    ranks = [job.expect(0, "report", PATIENCE_S)["value"] for job in jobs]
    victim, steady = (jobs[ranks.index(rank)] for rank in (0, 1))
    before = counted_before_waking(victim, steady, steps_of, tmp_path)
    found = victim.expect(0, "result", PATIENCE_S)["value"]
    check_counted(found, before)
    (tmp_path / "stop").touch()
    steady.expect(0, "result", PATIENCE_S)
    check_ends(servers)
    saved = Directory(tmp_path / "snapshots").manifest("after")
    assert [one.rank for one in saved.trainers] == [0, 1]
    assert saved.trainers[found["rank"]].steps == found["steps"]


def test_a_restart_beside_a_frozen_trainer_is_left_alone(groups, steps_of, tmp_path):
    """Who wakes up finds that another process is that trainer by now."""
    servers = groups.servers(**CLOCKS)
    body = functools.partial(stays, tmp_path, "async")
    steady = groups.start("trainer", body, **CLOCKS)
    job = {"TORCHELASTIC_RUN_ID": "victims", **CLOCKS}
    victim = groups.start(
        "trainer", functools.partial(goes_on, tmp_path, "async"), **job
    )
    steps_of("victim", 5)
    steps_of("steady", 1)
    lose_rank(victim, 0, signal.SIGSTOP)
    (tmp_path / "away").touch()
    before = steady.expect(0, "report", PATIENCE_S)["value"]
    written = steps_of("victim")
    who, values = groups.trainer(
        "victim", steps=written + 7, pause_s=0.0, **job
    ).expect(0, "result", PATIENCE_S)["value"]
    assert values[who] == before[who] + 7
    victim.signal(0, signal.SIGCONT)
    error = victim.expect(0, "error", PATIENCE_S)["value"]
    assert error["type"] == "FencedError", error
    (tmp_path / "stop").touch()
    mine, steps, values = steady.expect(0, "result", PATIENCE_S)["value"]
    check_ends(servers)
    assert who == 1 - mine
    assert (values[who], values[mine]) == (before[who] + 7, steps)


@pytest.mark.parametrize("key", [{}, KEY])
def test_a_frozen_server_0_is_waited_for_no_longer_than_said(key, groups, steps_of):
    """Its system takes connections all the time, where servers are met as well."""
    variables = CLOCKS | key
    servers = groups.servers(**variables)
    waits = {"CPUDIST_REJOIN_S": "2"}
    jobs = [groups.trainer(name, **variables, **waits) for name in "ab"]
    for name in "ab":
        steps_of(name, 3)
    lose_rank(servers, 0, signal.SIGSTOP)
    for job in jobs:
        error = job.expect(0, "error", PATIENCE_S)["value"]
        assert error["type"] == "PeerLostError", error
        assert "server 0" in error["text"]
        assert "within 2 s (CPUDIST_REJOIN_S)" in error["text"]
        assert "in time)" in error["text"]


def test_a_cut_longer_than_the_liveness_is_outlived(make_hosts, steps_of, tmp_path):
    hosts = make_hosts()
    meet = f"{ADDRESSES[0]}:29600"  # nobody else is on these hosts
    shared = {"CPUDIST_RENDEZVOUS": meet, "CPUDIST_THREADS": "1", **CLOCKS, **KEY}

    def start(role, body, ranks, apart, **others):
        job = ProcessRanks(
            body,
            ranks,
            variables={"CPUDIST_ROLE": role, **shared, **others},
            prepare=functools.partial(enter, hosts.names, apart),
        )
        return ended.enter_context(job)

    with contextlib.ExitStack() as ended:
        servers = start("server", stays, 2, -1, CPUDIST_TRAINERS="2")
        steady = start("trainer", functools.partial(stays, tmp_path, "async"), 1, -1)
        waits = {"CPUDIST_REJOIN_S": str(int(PATIENCE_S))}
        body = functools.partial(goes_on, tmp_path, "async")
        victim = start("trainer", body, 1, 0, **waits)
        steps_of("victim", 20)
        steps_of("steady", 1)
        hosts.cut()
        (tmp_path / "away").touch()
        before = steady.expect(0, "report", PATIENCE_S)["value"]
        hosts.mend()
        found = victim.expect(0, "result", PATIENCE_S)["value"]
        check_counted(found, before)
        (tmp_path / "stop").touch()
        mine, steps, values = steady.expect(0, "result", PATIENCE_S)["value"]
        check_ends(servers)
        assert values[mine] == steps
        assert values[1 - mine] == found["values"][1 - mine]

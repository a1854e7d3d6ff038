# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What advice says of figures: each that is out of bounds, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from torch_cpudist.advice.figures import Figures
from torch_cpudist.advice.judging import judge

SOUND = Figures(
    seconds=10.0,
    steps=100,
    trainers=4,
    servers=2,
    one_host=False,
    colocated=False,
    cores=2,
    threads=2,
    cores_busy=1.9,
    queued=0.2,
    data_s=0.5,
    wait_s=1.5,
    round_wait_s=1.0,
    in_rounds=True,
    load=0.3,
    requests=400,
    bytes=10**8,
    rows_pulled=10**5,
    together=100,
    wire_dtype="fp32",
)


def test_of_what_is_sound_nothing_is_said() -> None:
    assert judge(SOUND) == []
    assert judge(replace(SOUND, cores=1, threads=1)) == []
    assert judge(replace(SOUND, replicas=2, threads=1, replicas_set=2)) == []
    # Servers that are busy and keep nobody waiting, and waits of a single host.
    assert judge(replace(SOUND, load=0.95)) == []
    own = replace(SOUND, one_host=True, colocated=True, load=None, in_rounds=False)
    assert judge(replace(own, wait_s=6.0, round_wait_s=6.0)) == []


@pytest.mark.parametrize(
    ("changed", "topic", "says"),
    [
        ({"threads": 8}, "threads", "8 torch threads compute on 2 cores"),
        ({"threads": 8, "queued": 35.0}, "threads", "waited 3.5 s for a core in each"),
        ({"replicas": 2}, "threads", "CPUDIST_REPLICAS_NUM_THREADS=1."),
        ({"replicas": 4, "threads": 1}, "threads", "and CPU_NUM=2."),
        ({"replicas_set": 4}, "replicas", "CPU_NUM=4 (or CPUDIST_REPLICAS_COUNT)"),
        ({"cores": 8}, "replicas", "Use the others: a ReplicaExecutor with CPU_NUM=8"),
        (
            {"cores": 8, "steps": 9000},
            "replicas",
            "Use the others: 8 times as many ranks",
        ),
        ({"wait_s": 5.0, "load": 0.9}, "servers", "CPUDIST_SERVERS=6"),
        ({"wait_s": 9.9, "load": 1.0}, "servers", "CPUDIST_SERVERS=34"),
        ({"wait_s": 5.0, "load": 0.1}, "network", "was busy 10 % of the time"),
        ({"wait_s": 5.0, "load": None}, "network", "cannot be seen from here"),
        ({"wait_s": 5.0}, "network", "4.0 requests of 12.5 ms each"),
        ({"wait_s": 5.0, "alone": 200}, "network", "leave learn_lookups on"),
        ({"wait_s": 5.0}, "network", "order: ask for rows ahead (cpudist.data.pref"),
        ({"wait_s": 5.0, "strategy": "Geo"}, "network", "a larger Geo(push_every=)"),
        ({"wait_s": 5.0, "bounded": True}, "network", "raise max_staleness"),
        ({"data_s": 4.0}, "data", "40 % of the time went in waiting for the next"),
        ({"data_s": None, "asleep_s": 4.0}, "data", "40 % of the time this thread"),
        (
            {"wait_s": 6.0, "round_wait_s": 6.0},
            "strategy",
            "60 % of the time went in rounds",
        ),
        ({"collective_s": 5.0}, "strategy", "LocalSGD(every=)"),
    ],
)
def test_what_is_amiss_is_said_with_what_to_set(
    changed: dict[str, Any], topic: str, says: str
) -> None:
    found = judge(replace(SOUND, **changed))
    assert [advice.topic for advice in found] == [topic]
    assert says in found[0].text
    assert found[0].text.endswith(".")
    assert found[0].figures


def test_what_is_set_already_is_not_asked_for() -> None:
    slow = replace(SOUND, wait_s=5.0, round_wait_s=0.0)
    ahead = replace(slow, rows_prefetched=10, wire_dtype="int8", strategy="Async")
    (before,), (after,) = judge(slow), judge(ahead)
    for knob in ("prefetch", "int8", "Async"):
        assert knob in before.text
        assert knob not in after.text
    assert "Geo" in after.text


def test_shares_are_the_same_on_a_machine_of_a_quarter_of_the_speed() -> None:
    times = ("seconds", "data_s", "wait_s", "round_wait_s", "queued")
    for changed in ({}, {"wait_s": 5.0}, {"data_s": 4.0}, {"load": 0.9, "wait_s": 4.0}):
        fast = replace(SOUND, **changed)
        slow = replace(fast, **{name: 4 * getattr(fast, name) for name in times})
        topics = [[advice.topic for advice in judge(one)] for one in (fast, slow)]
        assert topics[0] == topics[1]


def test_rounds_that_take_as_long_as_lookups_wait_for_nobody() -> None:
    rounds = replace(SOUND, wait_s=4.5, round_wait_s=3.0)
    assert rounds.others_s == 0.0
    assert [advice.topic for advice in judge(rounds)] == ["network"]
    assert replace(rounds, in_rounds=False, round_wait_s=4.5).servers_s == 4.5

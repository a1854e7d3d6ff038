# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What ``CPUDIST_METRICS`` may say, and counters as metrics: without the package."""

from __future__ import annotations

import sys

import pytest
from ports import free_port

import torch_cpudist as cpudist
from torch_cpudist import testing
from torch_cpudist.launch.environment import MetricsAddress, parse
from torch_cpudist.monitor.families import ages


def test_ages_become_buckets_that_are_always_there():
    found = {"pushes": 7, "steps": {"0": 2, "1": 0, "2-3": 5}, "steps_mean": 2.0}
    made = ages(found, "steps", 5)
    assert made.buckets == [(0, 2), (1, 2), (3, 7), (7, 7), (15, 7), (float("inf"), 7)]
    assert made.total == 14
    assert [size for size, _ in ages(found, "steps", 1).buckets] == [
        0,
        1,
        3,
        float("inf"),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("9400", ("127.0.0.1", 9400)),
        ("10.0.0.5:9400", ("10.0.0.5", 9400)),
        (" [::1]:9400 ", ("::1", 9400)),
        ("[::]:1", ("::", 1)),
    ],
)
def test_addresses_are_read(text, expected):
    assert parse({"CPUDIST_METRICS": text}).metrics == MetricsAddress(*expected)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "65536",
        "-1",
        "on",
        "localhost:9400",
        "9400:",
        ":9400",
        "::1:9400",
        "[1.2.3.4]:5",
    ],
)
def test_what_is_no_address_is_refused(text):
    with pytest.raises(
        cpudist.ConfigurationError, match="numeric address of this host"
    ):
        parse({"CPUDIST_METRICS": text})


def test_ports_of_all_ranks_must_be_there():
    variables = {"CPUDIST_METRICS": "65530"}
    with pytest.raises(cpudist.ConfigurationError, match="go beyond 65535"):
        cpudist.init(
            variables=variables, rank=0, world_size=7, store=testing.HashStore()
        )


@pytest.mark.processes
def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client.core", None)
    with pytest.raises(cpudist.BackendUnavailableError, match="extra 'monitor'"):
        cpudist.init(variables={"CPUDIST_METRICS": str(free_port())})

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What is found of a run is checked field by field; whatever it is, it has a name."""

from __future__ import annotations

import json

import pytest

import torch_cpudist as cpudist
from torch_cpudist.launch.meeting.run_word import job_of, run_of

RUN = {
    "run_id": 7,
    "trainers": 2,
    "servers": [["tcp:10.0.0.1:1", "unix:x"], ["tcp:10.0.0.2:1"]],
    "hosts": ["a", "b"],
    "settings": {"CPUDIST_STRATEGY": "async"},
}


def test_a_run_is_read():
    assert run_of(json.dumps(RUN)) == RUN


@pytest.mark.parametrize("text", ["", "x", "[[" * 50_000, "[]", "7", "null", "{}"])
def test_what_is_no_run_is_said(text):
    with pytest.raises(cpudist.ProtocolError):
        run_of(text)


@pytest.mark.parametrize("name", sorted(RUN))
def test_a_field_that_is_missing_is_named(name):
    word = json.dumps({n: value for n, value in RUN.items() if n != name})
    named = {"run_id": "the run's id", "trainers": "the number of trainers"}
    with pytest.raises(cpudist.ProtocolError, match=named.get(name, f"'{name}'")):
        run_of(word)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("run_id", 0),
        ("run_id", 1.5),
        ("trainers", 2**16),
        ("servers", 5),
        ("servers", []),
        ("servers", {"0": ["tcp:10.0.0.1:1"]}),
        ("servers", [["tcp:10.0.0.1:1"], "tcp:10.0.0.2:1"]),
        ("servers", [["tcp:10.0.0.1:1"], []]),
        ("servers", [["tcp:10.0.0.1:1"], [1]]),
        ("hosts", ["a"]),
        ("hosts", ["a", None]),
        ("hosts", "ab"),
        ("settings", []),
        ("settings", {"CPUDIST_STRATEGY": 1}),
    ],
)
def test_a_field_of_another_kind_is_named(name, value):
    named = {"run_id": "the run's id", "trainers": "the number of trainers"}
    with pytest.raises(cpudist.ProtocolError, match=named.get(name, f"'{name}'")):
        run_of(json.dumps(RUN | {name: value}))


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "[0]", "[0,1,2]", "[0,0]", "[-1,1]", '["0",1]', "[0,true]"]
)
def test_what_is_no_job_is_said(text):
    assert job_of("[3, 2]") == (3, 2)
    with pytest.raises(cpudist.ProtocolError):
        job_of(text)

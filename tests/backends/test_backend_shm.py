# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Backend shm: against plain torch and gloo, and what is told when a rank is lost."""

from __future__ import annotations

import signal
import sys

import pytest
import shm_cases
import shm_faults
import torch
import torch.distributed as dist
from endings import lose
from patience import PATIENCE_S
from shm_ranks import Ranks

import torch_cpudist as cpudist
from torch_cpudist import _build_info
from torch_cpudist.backends import load_c10d, shm

pytestmark = pytest.mark.processes

# Promised: a dead rank is told within about a second, one that has stopped soon after
# the group's timeout. Beside other processes one of several tries is enough, and every
# try is far from the time limit of a group.
KILLED_S = 1.2
STOPPED_S = shm_faults.STOPPED_S + 1.0
TRIES = 4
LATE_S = shm_faults.TIMEOUT.total_seconds() / 2


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_collectives_equal_plain_torch(size, tmp_path):
    with Ranks(shm_cases.everything, size, tmp_path) as ranks:
        assert ranks.results() == [None] * size


def test_a_group_over_two_hosts(tmp_path):
    with Ranks(shm_faults.on_two_hosts, 3, tmp_path) as ranks:
        results = ranks.results()
    assert results[1] == {}
    for found in (results[0], results[2]):
        assert found["type"] == "PeerLostError", found
        assert "rank 1 (process" in found["text"]


def test_what_does_not_match_is_told_on_every_rank(tmp_path):
    with Ranks(shm_faults.mismatches, 3, tmp_path) as ranks:
        results = ranks.results()
    for found in results:
        for name in ("size", "dtype", "op", "kind"):
            assert found[name]["type"] == "ConfigMismatchError", found[name]
            assert "rank 2 calls" in found[name]["text"]
            assert found[f"{name} again"]["type"] == "ConfigMismatchError"
        assert "rank 2 calls all_reduce (sum) of 6 float32" in found["size"]["text"]
        assert found["dtype of op"]["type"] == "InvalidArgumentError"
        assert found["forked"]["type"] == "0"
    for found in results[:2]:
        assert found["late"]["type"] == "OperationTimeoutError"
        assert "rank 2 (process" in found["late"]["text"]
        assert 0.25 <= float(found["late"]["after_s"]) < 2.0


@pytest.mark.parametrize(
    ("number", "body", "limit_s", "words"),
    [
        (signal.SIGKILL, shm_faults.until_killed, KILLED_S, "has ended"),
        (signal.SIGSTOP, shm_faults.until_stopped, STOPPED_S, "stopped by a signal"),
    ],
)
def test_a_lost_rank_is_told_to_the_others(number, body, limit_s, words, tmp_path):
    told_s = []
    while not told_s or (min(told_s) >= limit_s and len(told_s) < TRIES):
        folder = tmp_path / str(len(told_s))
        folder.mkdir()
        told_s.append(seconds_until_told(number, body, words, folder))
    assert max(told_s) < LATE_S, told_s
    assert min(told_s) < limit_s, told_s


def seconds_until_told(number, body, words, folder):
    """Until the last of the others has its error, which names the rank and its end."""
    with Ranks(body, 3, folder) as ranks:
        pids = [ranks.expect(rank, "report")["value"] for rank in range(3)]
        lost_s = lose(pids[2], number)
        took_s = []
        for rank in range(2):
            error = ranks.expect(rank, "error", 2 * LATE_S)
            assert error["value"]["type"] == "PeerLostError", error
            assert f"rank 2 (process {pids[2]}" in error["value"]["text"]
            assert words in error["value"]["text"]
            took_s.append(error["time_s"] - lost_s)
            ranks.check_left(rank)
    return max(took_s)


def test_a_rank_that_is_lost_while_messages_are_awaited(tmp_path):
    with Ranks(shm_faults.messages_until_lost, 2, tmp_path) as ranks:
        pids = [ranks.expect(rank, "report")["value"] for rank in range(2)]
        lose(pids[1], signal.SIGKILL)
        error = ranks.expect(0, "error", PATIENCE_S)["value"]
        assert error["type"] == "PeerLostError"
        assert f"rank 1 (process {pids[1]}) has ended" in error["text"]


def test_a_receive_from_anybody_ends_when_nobody_is_left(tmp_path):
    with Ranks(shm_faults.anybody_until_lost, 3, tmp_path) as ranks:
        found = ranks.expect(0, "result")["value"]
    for name, lost in (("recv", 2), ("again", 2), ("send", 1)):
        assert found[name]["type"] == "PeerLostError", found
        assert f"rank {lost} (process" in found[name]["text"]
        assert "has ended" in found[name]["text"]
    assert found["after_s"] < shm_faults.TIMEOUT.total_seconds() / 4


def test_messages_that_do_not_match_are_told_to_both(tmp_path):
    with Ranks(shm_faults.unlike_messages, 2, tmp_path) as ranks:
        results = ranks.results()
    for found in results:
        for peer in ("-1", "2"):
            assert found[peer]["type"] == "InvalidArgumentError", found
        for name in ("size", "dtype"):
            assert found[name]["type"] == "ConfigMismatchError", found
        assert (
            "12 bytes of float32 with tag 0, rank 1 expects 12 bytes of int32"
            in (found["dtype"]["text"])
        )


def test_without_the_compiled_backends_the_remedy_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_cpudist._c10d", None)
    with pytest.raises(cpudist.BackendUnavailableError, match="pip install"):
        load_c10d("shm")


def test_backends_built_for_another_torch_name_both(monkeypatch):
    monkeypatch.setattr(_build_info, "TORCH_VERSION", "2.11.4+cpu")
    with pytest.raises(cpudist.BackendUnavailableError) as caught:
        load_c10d("shm")
    for word in ("shm", "torch 2.11.4+cpu", f"torch {torch.__version__}", "gloo"):
        assert word in str(caught.value)
    monkeypatch.setattr(_build_info, "TORCH_VERSION", "2.13.99")
    assert load_c10d("shm").__name__ == "torch_cpudist._c10d"


def test_a_world_of_one(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("shm", store=store, rank=0, world_size=1)
    try:
        tensor = shm.empty(None, 7, torch.float64)
        tensor.fill_(3)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [3.0] * 7
        with pytest.raises(cpudist.InvalidArgumentError, match="nobody to receive"):
            dist.recv(torch.ones(1))
        with pytest.raises(cpudist.InvalidArgumentError, match=r"shm\.Options"):
            dist.new_group(backend="shm", pg_options=object())
        gloo = dist.new_group(backend="gloo")
        with pytest.raises(cpudist.InvalidArgumentError, match="found gloo"):
            shm.empty(gloo, 7, torch.float64)
    finally:
        dist.destroy_process_group()

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The backend ccl, which needs a process per rank: against gloo, and in trouble."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
from ccl_cases import everything, late_and_lost
from endings import lose_rank
from patience import PATIENCE_S
from programs import skip_without_oneccl
from sync_cases import ONE_THREAD

from torch_cpudist.backends import ccl
from torch_cpudist.testing import ProcessRanks

pytestmark = [pytest.mark.processes, pytest.mark.integrations]

VARIABLES = {**ONE_THREAD, "CPUDIST_BACKEND": "ccl"}


@pytest.fixture(scope="module", autouse=True)
def _runtime():
    skip_without_oneccl()
    ccl.check()


def check_refusals(refused):
    assert "with tag 3: oneCCL has no tags" in refused["tag"]
    assert "from any rank is not supported" in refused["any"]
    assert "BAND of Int is not supported" in refused["bits"]
    assert "UInt32 is not supported" in refused["dtype"]
    assert "expected a floating dtype. Use SUM" in refused["average"]
    assert "exchange its indices and values" in refused["sparse"]
    assert "3 elements do not hold 1 x 2" in refused["list"]


def check_disagreements(told):
    for name in ("size", "dtype", "root", "call", "splits"):
        assert "ranks disagree about what they call" in told[name], (name, told)
    assert "all_reduce of 8 bytes" in told["size"]
    assert "all_reduce of 12 bytes" in told["size"]
    assert "barrier" in told["call"]
    assert told["right"] == "no error"


def test_it_does_what_gloo_does():
    with ProcessRanks(everything, 2, variables=VARIABLES) as ranks:
        results = ranks.results(PATIENCE_S)
    for rank, found in enumerate(results):
        assert found["backend"] == ["ccl", "ccl"]
        assert found["environment"]["CCL_WORKER_OFFLOAD"] == "0"
        assert found["environment"]["CCL_LOCAL_RANK"] == str(rank)
        assert found["environment"]["FI_TCP_IFACE"] == "lo"
        assert found["wrong"] == []
        check_refusals(found["refused"])
        check_disagreements(found["disagree"])
        assert found["ddp"] <= 1e-6
        assert found["fsdp"] <= 1e-6
        assert found["strategy"]["worst"] <= 1e-6
        assert found["strategy"]["bits"]


def test_a_late_and_a_killed_rank_are_told():
    with ProcessRanks(late_and_lost, 4, variables=VARIABLES) as ranks:
        for rank in range(4):
            told = ranks.expect(rank, "report", PATIENCE_S)["value"]
            around = [(rank - 1) % 4 + rank, rank + (rank + 1) % 4]
            assert told["sums"] == sorted(around)
            if rank == 3:
                continue
            assert "timed out: a member of the group does not take" in told["late"]
            assert "cannot be used any more, because" in told["again"]
            assert 0.9 < told["waited_s"] < 8.0
        for rank in range(4):
            ranks.expect(rank, "report", PATIENCE_S)
        lost_s = lose_rank(ranks, 2, signal.SIGKILL)
        for rank in (0, 1, 3):
            error = ranks.expect(rank, "error", PATIENCE_S)
            assert error["value"]["type"] == "PeerLostError", error
            # Who looks later may find the first of the others gone, too.
            text = error["value"]["text"]
            assert re.search(r"pid \d+, has ended|a rank is lost", text), text
            assert error["time_s"] - lost_s < 4.0
        for rank in (0, 1, 3):
            ranks.processes[rank].join(PATIENCE_S)  # nothing of oneCCL keeps it
            assert ranks.processes[rank].exitcode == 0
            left = Path("/dev/shm").glob(f"{ranks.pid(rank)}:*")
            assert list(left) == []


def test_files_of_killed_ranks_are_removed(tmp_path):
    finished = os.fork()
    if finished == 0:
        os._exit(0)
    os.waitpid(finished, 0)
    old = time.time() - 3600
    names = {
        f"{finished}:0:0": False,
        f"{os.getpid()}:0:0": True,
        f"{finished}:0:0.more": True,
        "other": True,
    }
    for name in names:
        (tmp_path / name).write_bytes(b"x")
        os.utime(tmp_path / name, (old, old))
    (tmp_path / f"{finished}:1:0").write_bytes(b"x")  # a new one
    assert ccl.remove_left_files(tmp_path) == 1
    assert (tmp_path / f"{finished}:1:0").exists()
    assert {name: (tmp_path / name).exists() for name in names} == names

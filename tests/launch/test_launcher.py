# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``cpudist.launch``: what ranks get and return, and what is told of their ends."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from patience import PATIENCE_S
from programs import descendants

import torch_cpudist as cpudist

pytestmark = pytest.mark.processes

PAGE = Path(__file__).resolve().parents[2] / "docs" / "launch.md"


def cell(text):
    """The names of a cell, whose functions no process could import."""
    names = {"__name__": "__main__", "cpudist": cpudist, "torch": torch}
    exec(text, names)  # noqa: S102
    return names


def test_the_cells_of_the_page_train_together(capfd, monkeypatch):
    monkeypatch.setenv("CPUDIST_THREADS", "1")
    (text,) = re.findall(
        r"<!-- launch -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL
    )
    before = dict(os.environ)
    results = cell(text)["results"]
    assert [one["rank"] for one in results] == [0, 1]
    assert torch.equal(results[0]["weight"], results[1]["weight"])
    said = f"weight {results[0]['weight'][0, 0].item()}"
    shown = capfd.readouterr().out.splitlines()
    assert {f"[rank {rank}] {said}" for rank in range(2)} <= set(shown)
    assert dict(os.environ) == before
    assert zombies() == []


def zombies():
    """Children of this process that nobody has waited for."""
    found = []
    for pid in descendants(os.getpid()):
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        found += [pid] if stat[0] == "Z" else []
    return found


def fails_while_others_wait(folder):
    cpudist.init()
    rank = cpudist.trainer_rank()
    (folder / str(rank)).write_text(str(os.getpid()))
    cpudist.barrier()
    if rank == 1:
        raise ValueError("bad sample")
    while True:
        time.sleep(0.1)


def gone(pid):
    return not Path(f"/proc/{pid}").exists()


def test_a_rank_that_fails_is_named_and_the_others_are_ended(tmp_path):
    with pytest.raises(cpudist.RankFailedError) as caught:
        cpudist.launch(fails_while_others_wait, (tmp_path,), nprocs=2)
    text = str(caught.value)
    assert caught.value.rank == 1
    assert text.startswith("launch: rank 1 of 2 failed, the others were ended: ")
    assert "in fails_while_others_wait" in text
    assert "torch_cpudist/launcher.py" not in text
    assert text.endswith("ValueError: bad sample")
    assert all(gone((tmp_path / str(rank)).read_text()) for rank in range(2))


def ends(how):
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "left":
        print("printed before")  # nothing flushes it
        os._exit(3)
    if how == "told":
        sys.stdout.write("a line without an end")
        sys.stdout.flush()
        return object()
    return time.sleep(PATIENCE_S)


@pytest.mark.parametrize(
    ("how", "words"),
    [("killed", r"signal 9 \(SIGKILL\)$"), ("left", "its process ended with status 3")],
)
def test_a_process_that_ends_without_a_word_is_named(how, words, capfd):
    with pytest.raises(cpudist.RankFailedError, match=words) as caught:
        cpudist.launch(ends, (how,), nprocs=1)
    assert caught.value.rank == 0
    shown = "[rank 0] printed before\n" in capfd.readouterr().out
    assert shown == (how == "left")


def test_what_is_no_data_is_refused(capfd):
    with pytest.raises(cpudist.InvalidArgumentError, match="rank 0 returned something"):
        cpudist.launch(ends, ("told",), nprocs=1)
    assert "[rank 0] a line without an end\n" in capfd.readouterr().out


def test_ranks_that_do_not_end_are_named_and_ended(tmp_path):
    before = set(descendants(os.getpid()))
    with pytest.raises(cpudist.OperationTimeoutError, match=r"ranks \[0, 1\] of 2"):
        cpudist.launch(ends, ("late",), nprocs=2, timeout_s=0.3)
    assert set(descendants(os.getpid())) <= before


@pytest.mark.parametrize("nprocs", [0, -1, True, 1.5, 65536])
def test_a_wrong_number_is_refused(nprocs):
    with pytest.raises(cpudist.InvalidArgumentError, match="a whole number from 1"):
        cpudist.launch(ends, nprocs=nprocs)


def test_other_wrong_calls_are_refused(monkeypatch):
    with pytest.raises(cpudist.InvalidArgumentError, match="timeout_s=0"):
        cpudist.launch(ends, nprocs=1, timeout_s=0)
    with pytest.raises(cpudist.InvalidArgumentError, match="a function, found str"):
        cpudist.launch("ends", nprocs=1)
    with pytest.raises(cpudist.InvalidArgumentError, match="cannot be copied"):
        cpudist.launch(ends, (sys._getframe(),), nprocs=1)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(cpudist.ConfigurationError, match="in rank 1 of a launch"):
        cpudist.launch(ends, nprocs=1)
    monkeypatch.delenv("RANK")
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(cpudist.BackendUnavailableError, match=r"\[notebook\]"):
        cpudist.launch(ends, nprocs=1)


def test_the_folder_of_that_name_can_still_be_imported():
    import torch_cpudist.launch.run
    from torch_cpudist.launch import run

    assert run is sys.modules["torch_cpudist.launch.run"]
    assert callable(cpudist.launch)
    assert torch_cpudist.launcher.launch is cpudist.launch

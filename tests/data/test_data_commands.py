# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Commands that hang, and processes that end while threads read."""

from __future__ import annotations

import contextlib
import gzip
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from data_cases import SLOTS, records, write
from patience import PATIENCE_S
from programs import clean_environment
from torch.utils.data import DataLoader

import torch_cpudist as cpudist
from torch_cpudist.data import InMemoryDataset, QueueDataset
from torch_cpudist.data.reading.leaving import leaving

GONE_S = 60.0


@pytest.fixture
def files(tmp_path):
    return write(tmp_path, [records(50)])


def processes_with(word: str) -> list[bytes]:
    """Those that are left after a while: killed ones take a moment to be gone.

    Less than they sleep: one that nobody has killed is still there.
    """
    deadline = time.monotonic() + GONE_S
    while (left := running(word)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def running(word: str) -> list[bytes]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_bytes())
    return [text for text in found if word.encode() in text]


def read_all(dataset):
    if isinstance(dataset, InMemoryDataset):
        dataset.load()
    for _ in dataset:
        pass


@pytest.mark.parametrize("format", ["multislot", "parquet"])
@pytest.mark.parametrize("make", [QueueDataset, InMemoryDataset])
@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("sleep {0} & sleep {0}", "wrote nothing for 0.3 s"),
        ("sleep {0} &", "has ended, but something that it started keeps its output"),
        ("exec sleep {0} >&-", "has closed its output and did not end within 0.3 s"),
    ],
)
def test_a_command_that_hangs_is_ended_in_time(
    files, make, command, found, format, caplog
):
    if format == "parquet":
        pytest.importorskip("pyarrow", reason="the extra data is not installed")
    word = f"86.{os.getpid()}"
    dataset = make(
        files,
        SLOTS,
        format=format,
        pipe_command=command.format(word),
        command_timeout_s=0.3,
    )
    with (
        caplog.at_level(logging.WARNING, "torch_cpudist"),
        pytest.raises(cpudist.errors.DataFileError, match=found) as caught,
    ):
        read_all(dataset)
    assert "command_timeout_s" in str(caught.value)
    assert str(files[0]) in str(caught.value)
    assert processes_with(word) == []
    told = [one.getMessage() for one in caplog.records if "0.15 s" in one.getMessage()]
    assert len(told) == 1
    assert "it is killed after 0.3 s (command_timeout_s)" in told[0]


def test_a_slow_command_is_told_of_while_it_is_waited_for(files, caplog):
    caplog.set_level(logging.WARNING, "torch_cpudist")
    done = files[0].with_name("done")
    command = f"until test -e {done}; do sleep 0.01; done; cat"
    dataset = QueueDataset(
        files, SLOTS, batch_size=50, pipe_command=command, command_timeout_s=4.0
    )

    class Notices(logging.Handler):
        def emit(self, record):
            done.touch()

    handler = Notices()
    logging.getLogger("torch_cpudist").addHandler(handler)
    try:
        assert len(list(dataset)) == 1  # never without the notice
    finally:
        logging.getLogger("torch_cpudist").removeHandler(handler)


def test_the_deadline_of_commands_is_checked(files):
    for wrong in (0, -1, float("nan"), float("inf"), "x", True):
        with pytest.raises(cpudist.InvalidArgumentError, match="command_timeout_s"):
            QueueDataset(files, SLOTS, pipe_command="cat", command_timeout_s=wrong)
    with pytest.raises(cpudist.InvalidArgumentError, match="there is no pipe_command"):
        InMemoryDataset(files, SLOTS, command_timeout_s=1.0)


def test_a_worker_that_is_killed_leaves_no_command(files):
    word = f"85.{os.getpid()}"
    dataset = QueueDataset(
        files, SLOTS, batch_size=10, pipe_command=f"head -n 10; sleep {word}"
    )
    loader = iter(DataLoader(dataset, batch_size=None, num_workers=1))
    next(loader)
    assert running(word)
    for worker in multiprocessing.active_children():
        os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"killed|exited"):
        next(loader)
    assert processes_with(word) == []


def test_a_fork_leaves_the_readers_to_its_parent(files):
    dataset = InMemoryDataset(files, SLOTS, pipe_command="sleep 60")
    dataset.preload()
    child = os.fork()
    if child == 0:
        ended = 1
        with contextlib.suppress(BaseException):
            leaving.leave()
            ended = 0
        os._exit(ended)
    assert os.waitpid(child, 0)[1] == 0
    dataset.release()


# Reads in daemon threads, by every way to read, and ends when told.
READING = """
import sys, threading
import torch_cpudist as cpudist
from torch_cpudist.data import InMemoryDataset, QueueDataset, Slot

plain, packed, table, word = sys.argv[1:]
slots = [Slot("x", dim=1)]

def memory(path, **options):
    dataset = InMemoryDataset([path], slots, batch_size=10, **options)
    dataset.load()
    return dataset

def queue(path, **options):
    return QueueDataset([path], slots, batch_size=10, **options)

ways = [
    lambda: queue(plain), lambda: queue(packed), lambda: memory(plain),
    lambda: queue(plain, pipe_command="cat"),
    lambda: queue(plain, pipe_command=f"head -n 20; sleep {word}"),
    lambda: memory(plain, pipe_command=f"sleep {word}"),
]
if table:
    ways.append(lambda: queue(table, format="parquet"))
    ways.append(lambda: queue(table, format="parquet", pipe_command=f"sleep {word}"))
begun = [threading.Event() for _ in ways]

def read(way, begun):
    if "sleep" in str(way.__code__.co_consts):
        begun.set()
    dataset = way()
    while True:
        for batch in dataset:
            begun.set()

for way, event in zip(ways, begun):
    threading.Thread(target=read, args=(way, event), daemon=True).start()
for event in begun:
    assert event.wait(300)
print("reads", flush=True)
sys.stdin.readline()
"""


@pytest.mark.processes
@pytest.mark.parametrize("way", ["ends", "killed"])
def test_a_process_that_ends_while_daemon_threads_read(tmp_path, way):
    """It does not abort, says nothing, and leaves no command behind."""
    plain, packed, table = (tmp_path / name for name in ("a", "a.gz", "a.parquet"))
    plain.write_text("".join(f"1 {i}\n" for i in range(1000)))
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    parquet = pytest.importorskip("pyarrow.parquet") if way == "ends" else None
    if parquet is not None:
        import pyarrow

        parquet.write_table(pyarrow.table({"x": list(range(1000))}), table)
    word = f"84.{os.getpid()}"
    with subprocess.Popen(
        [sys.executable, "-c", READING, plain, packed, table if parquet else "", word],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=clean_environment(),
        text=True,
    ) as process:
        assert process.stdout.readline() == "reads\n", process.stderr.read()
        deadline = time.monotonic() + PATIENCE_S
        while len(running(f"sleep {word}")) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        if way == "killed":
            process.kill()
        said = process.communicate("\n", timeout=PATIENCE_S)[1]
    assert process.returncode == (-signal.SIGKILL if way == "killed" else 0), said
    assert "Traceback" not in said
    assert processes_with(word) == []

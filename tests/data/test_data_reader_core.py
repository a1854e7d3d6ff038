# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Readers and stores of the compiled core as Python sees them."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from interrupts import interrupted, waiting_in_a_call
from patience import PATIENCE_S

from torch_cpudist import _core
from torch_cpudist.errors import (
    BadRecordError,
    ClosedError,
    DataFileError,
    ForkedProcessError,
    InvalidArgumentError,
    OperationTimeoutError,
)

WHOLE = (0, 0, 2**64 - 1)


def make_schema(**rest: Any) -> _core.DataSchema:
    slots: list[Any] = [
        ("id", "int", 1, 0, 0, True, [], True),
        ("bag", "int", 0, 0, 0, True, [], True),
        ("dense", "float", 2, 0, 0.0, True, [], False),
    ]
    return _core.DataSchema(format="multislot", slots=slots, **rest)


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Ten lines: id i, a bag of i % 3 ids, and two floats."""
    lines = []
    for i in range(10):
        bag = " ".join([str(i % 3), *[str(100 * i + k) for k in range(i % 3)]])
        lines.append(f"1 {i} {bag} 2 {i}.5 -{i}\n")
    file = tmp_path / "data"
    file.write_text("".join(lines))
    return str(file)


def ids(reader: Any) -> list[int]:
    found: list[int] = []
    while (batch := reader.next(PATIENCE_S)) is not None:
        found += batch.ints[: batch.records].tolist()
    return found


def test_batches_become_tensors_without_a_copy(path: str) -> None:
    reader = _core.DataReader(
        make_schema(), files=[path], lanes=[[WHOLE]], batch_size=4
    )
    batch = reader.next(PATIENCE_S)
    assert batch is not None
    assert batch.records == 4
    assert batch.sections == [4, 3, 8]
    id_, bag, offsets = torch.from_numpy(batch.ints).split_with_sizes([4, 3, 5])
    dense = torch.from_numpy(batch.floats).view(4, 2)
    assert batch.ints.__array_interface__["data"][0] == id_.data_ptr()
    del batch, reader
    gc.collect()  # the tensors keep the memory
    assert id_.tolist() == [0, 1, 2, 3]
    assert bag.tolist() == [100, 200, 201]
    assert offsets.tolist() == [0, 0, 1, 3, 3]
    assert dense.tolist() == [[0.5, 0], [1.5, -1], [2.5, -2], [3.5, -3]]


def test_memory_of_batches_is_used_again(path: str) -> None:
    schema = make_schema()
    addresses = set()
    for _ in range(20):
        reader = _core.DataReader(schema, files=[path], lanes=[[WHOLE]], batch_size=10)
        batch = reader.next(PATIENCE_S)
        assert batch is not None
        addresses.add(batch.ints.__array_interface__["data"][0])
        del batch
    assert len(addresses) <= 2


def test_positions_are_plain_lists_and_can_be_taken_up(path: str) -> None:
    def make(position: Any) -> _core.DataReader:
        size = os.path.getsize(path)
        lanes = [[(0, 0, 90)], [(0, 90, size)]]
        return _core.DataReader(
            make_schema(), files=[path], lanes=lanes, batch_size=2, position=position
        )

    reader = make(None)
    assert reader.position() == [[[0, 0, 0, 0], [0, 0, 0, 0]], 0, 0]
    positions = [reader.position()]
    while (batch := reader.next(PATIENCE_S)) is not None:
        positions.append(batch.position)  # type: ignore[arg-type]
    whole = ids(make(None))
    assert sorted(whole) == list(range(10))
    for done, position in enumerate(positions):
        assert ids(make(position)) == whole[2 * done :]


def test_a_wait_without_a_batch_ends_in_time(path: str) -> None:
    reader = _core.DataReader(
        make_schema(), files=[path], lanes=[[WHOLE]], batch_size=2, command="sleep 99"
    )
    with pytest.raises(OperationTimeoutError, match=r"lane 0 of 1 reads .* 'sleep 99'"):
        reader.next(0.05)
    reader.stop()
    with pytest.raises(ClosedError):
        reader.next(PATIENCE_S)


def test_a_wait_is_ended_by_a_signal() -> None:
    class GotSignalError(Exception):
        pass

    def handle(*_: object) -> None:
        raise GotSignalError

    reader = _core.DataReader(
        make_schema(), files=["x"], lanes=[[WHOLE]], batch_size=1, fed=True
    )
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with (
            pytest.raises(GotSignalError),
            interrupted(waiting_in_a_call(), signal.SIGUSR1),
        ):
            reader.next(PATIENCE_S)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_bytes_and_columns_are_fed(path: str) -> None:
    reader = _core.DataReader(
        make_schema(),
        files=["x", "y"],
        lanes=[[(0, 0, 1), (1, 0, 1)]],
        batch_size=4,
        fed=True,
    )

    def feed() -> None:
        data = Path(path).read_bytes()
        for at in range(0, len(data), 7):
            reader.feed(0, memoryview(data)[at : at + 7])
        reader.feed_end_of_file(0)
        columns: list[Any] = [
            (np.arange(10, 12), None),
            (np.array([5]), np.array([0, 1, 1])),
            (np.zeros(4, dtype=np.float32), None),
        ]
        reader.feed_columns(0, 2, columns)
        reader.feed_end_of_file(0)

    thread = threading.Thread(target=feed)
    thread.start()
    assert ids(reader) == list(range(12))
    thread.join()
    assert not reader.feed(0, b"1 1")
    with pytest.raises(InvalidArgumentError, match="expected a numpy array of int64"):
        reader.feed_columns(0, 1, [(np.zeros(1, dtype=np.int32), None)])  # type: ignore[list-item]


def test_errors_have_their_classes(path: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.write_text("1 1 0 2 1 1\n1 x 0 2 1 1\n")
    schema = make_schema()

    def read(file: str, **rest: Any) -> list[int]:
        lanes = [[WHOLE]]
        return ids(
            _core.DataReader(schema, files=[file], lanes=lanes, batch_size=1, **rest)
        )

    with pytest.raises(BadRecordError, match=r"bad:2:3: "):
        read(str(bad))
    with pytest.raises(DataFileError, match="No such file"):
        read(str(tmp_path / "none"))
    with pytest.raises(DataFileError, match=r"status 4; .*\nwhy"):
        read(path, command="echo why >&2; exit 4")
    reader = _core.DataReader(
        schema, files=[str(bad)], lanes=[[WHOLE]], batch_size=1, policy="skip"
    )
    assert ids(reader) == [1]
    assert reader.bad_lines() == {0: 1}
    assert len(reader.notices()) == 1
    assert reader.notices() == []


def test_a_store_is_loaded_permuted_and_read(path: str) -> None:
    store = _core.DataStore(make_schema())
    store.load(files=[path], lanes=[[(0, 100, 2**64 - 1)], [(0, 0, 100)]])
    store.wait(PATIENCE_S)
    assert store.records == 10
    assert store.progress()["parts_done"] == 2
    checksum = store.checksum()
    assert ids(store.reader(batch_size=3, threads=2)) == list(range(10))
    shuffled = ids(store.reader(batch_size=3, seed=5))
    store.permute(5)
    assert ids(store.reader(batch_size=4)) == shuffled
    assert ids(store.reader(batch_size=4, begin_record=6)) == shuffled[6:]
    assert sorted(shuffled) == list(range(10)) != shuffled
    assert store.checksum() == checksum
    store.release()
    assert store.records == 0


@pytest.mark.parametrize("name", ["progress", "bad_lines", "notices"])
def test_other_threads_go_on_while_a_call_waits_for_the_store(
    tmp_path: Path, name: str
) -> None:
    """Permuting holds the store; who asks it meanwhile does not hold Python."""
    file = tmp_path / "many"
    file.write_text("1 7 1 0 2 0.5 -1\n" * 100_000)
    store = _core.DataStore(make_schema())
    store.load(files=[str(file)], lanes=[[WHOLE]])
    store.wait(PATIENCE_S)
    ask = getattr(store, name)
    over = threading.Event()
    ticks: list[float] = []

    def permute() -> None:
        while not over.is_set():
            store.permute(3)

    def tick() -> None:
        while not over.wait(0.0005):
            ticks.append(time.perf_counter())

    # Nobody runs but who is let: a thread keeps Python until it waits.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60.0)
    threads = [threading.Thread(target=body) for body in (permute, tick)]
    for thread in threads:
        thread.start()
    try:
        deadline = time.perf_counter() + PATIENCE_S
        while True:
            time.sleep(0.001)
            ticks.clear()
            begin = time.perf_counter()
            ask()
            end = time.perf_counter()
            if any(begin < t < end for t in ticks):
                break
            assert end < deadline, "nobody else ran during a call"
    finally:
        sys.setswitchinterval(interval)
        over.set()
        for thread in threads:
            thread.join()


def test_texts_are_hashed_as_readers_do(tmp_path: Path) -> None:
    file = tmp_path / "texts"
    file.write_text("1 red 1 blue\n")
    slots: list[Any] = [
        (name, "int", 1, 1000, 0, True, [], True) for name in ("first", "second")
    ]
    schema = _core.DataSchema(format="multislot", slots=slots)
    reader = _core.DataReader(schema, files=[str(file)], lanes=[[WHOLE]], batch_size=1)
    batch = reader.next(PATIENCE_S)
    assert batch is not None
    red = _core.hash_texts(np.array([0, 3]), b"red", 0, 1000)
    blue = _core.hash_texts(np.array([3, 7]), b"redblue", 1, 1000)
    assert batch.ints.tolist() == [red[0], blue[0]]
    with pytest.raises(InvalidArgumentError, match="offsets"):
        _core.hash_texts(np.array([0, 4]), b"red", 0, 1000)


def test_a_forked_child_is_refused(path: str) -> None:
    reader = _core.DataReader(
        make_schema(), files=[path], lanes=[[WHOLE]], batch_size=1
    )
    batch = reader.next(PATIENCE_S)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            reader.next(PATIENCE_S)
        except ForkedProcessError:
            status = 0
        finally:
            del reader, batch
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert ids(reader) == list(range(1, 10))

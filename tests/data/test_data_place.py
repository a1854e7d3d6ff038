# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Positions that are saved at awkward moments, and what iterations leave behind."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
import time
import weakref
from pathlib import Path

import pytest
from data_cases import SLOTS, flat, line, read, records, unpacked, write
from patience import PATIENCE_S
from torch.utils.data import DataLoader

import torch_cpudist as cpudist
from torch_cpudist.data import InMemoryDataset, QueueDataset, Slot

COUNT = 1003


@pytest.fixture
def files(tmp_path):
    found = records(COUNT)
    return write(tmp_path, [found[:700], found[700:]])


def queue(files):
    return QueueDataset(files, SLOTS, batch_size=50, threads=2)


def memory(files):
    dataset = InMemoryDataset(files, SLOTS, batch_size=50)
    dataset.load()
    return dataset


@pytest.mark.parametrize("make", [queue, memory])
def test_batches_read_ahead_of_the_end_can_come_again(files, make):
    dataset = make(files)
    whole = read(dataset)
    assert dataset.epoch == 1
    for unused in (0, 1, 3):
        state = dataset.state_dict(unused=unused)
        resumed = make(files)
        resumed.load_state_dict(state)
        assert resumed.epoch == (0 if unused else 1)
        assert read(resumed) == (whole[-unused:] if unused else whole)
    for wrong in ({}, None, {**state, "version": 99}):
        with pytest.raises(cpudist.ConfigMismatchError, match="version 1"):
            make(files).load_state_dict(wrong)
    for epoch in (-1, "1", None):
        with pytest.raises(cpudist.InvalidArgumentError, match="whole number"):
            dataset.set_epoch(epoch)
    with pytest.raises(cpudist.InvalidArgumentError, match="unused=1"):
        make(files).state_dict(unused=1)


def test_a_position_is_of_the_files_as_the_iteration_found_them(files):
    dataset = queue(files)
    iterator = iter(dataset)
    next(iterator)
    with files[0].open("a") as file:
        file.write(line(records(1)[0]))
    state = dataset.state_dict()
    with pytest.raises(cpudist.ConfigMismatchError, match="sizes_bytes"):
        queue(files).load_state_dict(state)


def test_a_position_outlives_a_beginning_that_failed(files):
    dataset = queue(files)
    batches = read(dataset)
    iterator = iter(dataset)
    next(iterator)
    dataset.load_state_dict(dataset.state_dict())
    hidden = files[0].with_suffix(".hidden")
    files[0].rename(hidden)
    with pytest.raises(cpudist.errors.DataFileError, match="No such file"):
        iter(dataset)
    hidden.rename(files[0])
    assert read(dataset) == batches[1:]


def test_an_iteration_that_another_one_ended_says_so(files):
    for dataset in (queue(files), memory(files)):
        first = iter(dataset)
        iter(dataset)
        with pytest.raises(cpudist.ClosedError, match="another one over the same"):
            next(first)


def test_a_loaded_position_is_not_for_processes_of_a_loader(files):
    dataset = queue(files)
    iterator = iter(dataset)
    next(iterator)
    dataset.load_state_dict(dataset.state_dict())
    loader = DataLoader(dataset, batch_size=None, num_workers=2, timeout=PATIENCE_S)
    with pytest.raises(cpudist.InvalidArgumentError, match="num_workers=0"):
        list(loader)


def test_processes_of_a_loader_read_the_epoch_that_was_set(files):
    options = {"batch_size": 50, "shuffle": True, "seed": 2}
    dataset = QueueDataset(files, SLOTS, **options)
    kept = next(iterator := iter(dataset))  # forks have the threads' objects only
    loader = DataLoader(dataset, batch_size=None, num_workers=1, timeout=PATIENCE_S)
    epochs = []
    for epoch in range(2):
        dataset.set_epoch(epoch)
        epochs.append(flat(read(loader)))
    assert sorted(epochs[0]) == sorted(epochs[1]) == records(COUNT)
    assert epochs[0] != epochs[1]
    again = [kept, *iterator]
    assert sorted(flat(map(unpacked, again))) == records(COUNT)


def test_copies_begin_anew(files):
    dataset = memory(files)
    next(iter(dataset))
    for copied in (pickle.loads(pickle.dumps(dataset)), copy.deepcopy(dataset)):  # noqa: S301
        with pytest.raises(cpudist.ClosedError, match="load"):
            iter(copied)
        copied.load()
        assert flat(read(copied)) == records(COUNT)


def test_a_dataset_that_is_dropped_ends_without_the_garbage_collector(files):
    gc.disable()
    try:
        for make in (queue, memory):
            dataset = make(files)
            iterator = iter(dataset)
            next(iterator)
            dropped = [weakref.ref(dataset), weakref.ref(iterator)]
            del dataset, iterator
            assert [reference() for reference in dropped] == [None, None]
    finally:
        gc.enable()


def test_close_ends_commands(files):
    word = f"87.{os.getpid()}"
    command = f"cat; sleep {word} & sleep {word}"
    dataset = QueueDataset(files, SLOTS, batch_size=50, pipe_command=command)
    iterator = iter(dataset)
    next(iterator)
    iterator.close()
    assert _processes_with(word) == []


def test_no_slot_has_the_name_of_instance_ids(files):
    slots = [Slot("instance_id"), *SLOTS]
    with pytest.raises(cpudist.InvalidArgumentError, match="'instance_id', too"):
        QueueDataset(files, slots, instance_ids=True)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(cpudist.errors.DataFileError, match="regular file"):
        iter(QueueDataset([path], SLOTS))


def test_a_command_may_complain_in_any_bytes(files):
    command = "printf '\\351 no\\n' >&2; exit 3"
    dataset = QueueDataset(files, SLOTS, pipe_command=command)
    with pytest.raises(cpudist.errors.DataFileError, match=r"\\xe9 no"):
        read(dataset)


def test_close_ends_a_command_whose_output_is_parquet(tmp_path):
    pytest.importorskip("pyarrow", reason="the extra data is not installed")
    word = f"88.{os.getpid()}"
    path = tmp_path / "t.parquet"
    path.write_bytes(b"")
    dataset = QueueDataset(
        [path], [Slot("x")], format="parquet", pipe_command=f"sleep {word}; cat",
        timeout_s=0.2,
    )  # fmt: skip
    iterator = iter(dataset)
    with pytest.raises(cpudist.OperationTimeoutError, match=r"t\.parquet"):
        next(iterator)
    began = time.monotonic()
    iterator.close()
    assert time.monotonic() - began < 8
    assert _processes_with(word) == []


def _processes_with(word: str) -> list[bytes]:
    """Those that are left after a while: killed ones take a moment to be gone."""
    deadline = time.monotonic() + 60  # less than they sleep
    while (left := _running(word)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def _running(word: str) -> list[bytes]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_bytes())
    return [text for text in found if word.encode() in text]


def test_lines_are_numbered_where_bad_ones_are_in_every_part(tmp_path):
    path, kept = tmp_path / "many.txt", tmp_path / "kept.txt"
    lines = [line(record) for record in records(30_000)]
    bad = range(7, len(lines), 1000)
    for number in bad:
        lines[number] = f"bad {number}\n"
    path.write_text("".join(lines))
    dataset = QueueDataset(
        [path], SLOTS, batch_size=500, threads=3, shuffle=True,
        bad_lines="quarantine", quarantine=str(kept),
    )  # fmt: skip
    assert sum(map(len, read(dataset))) == len(lines) - len(bad)
    assert dataset.bad_lines() == {str(path): len(bad)}
    texts = kept.read_text().splitlines()
    places, bad_lines = texts[::2], texts[1::2]
    pairs = sorted(zip((int(t.split()[1]) for t in bad_lines), places, strict=True))
    assert [number for number, _ in pairs] == [*bad]
    for number, place in pairs:
        assert place.startswith(f"# {path}:{number + 1}:1: ")


def test_names_are_texts_in_utf8(tmp_path):
    name = os.fsencode(tmp_path) + b"/caf\xe9.txt"
    with open(name, "w") as file:
        file.write(line(records(1)[0]))
    with pytest.raises(cpudist.InvalidArgumentError, match="not UTF-8"):
        QueueDataset([os.fsdecode(name)], SLOTS)
    good = os.fsencode(tmp_path) + "/café.txt".encode()
    os.rename(name, good)
    assert flat(read(QueueDataset([good], SLOTS))) == records(1)


def test_parquet_columns_need_not_hold_what_stands_for_nulls(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="the extra data is not installed")
    parquet = pytest.importorskip(
        "pyarrow.parquet", reason="the extra data is not installed"
    )
    path = tmp_path / "t.parquet"
    table = pyarrow.table(
        {"id": pyarrow.array([1, None, 3], pyarrow.uint32()), "x": [1.0, 2.0, None],
         "y": [0.0, 1.0, float("nan")]}
    )  # fmt: skip
    parquet.write_table(table, path, row_group_size=1)
    slots = [Slot("id", dim=1, missing=-1), Slot("x", "dense", missing=0.5)]
    (batch,) = QueueDataset([path], slots, format="parquet", batch_size=3, threads=1)
    assert batch["id"].ids.tolist() == [1, -1, 3]
    assert batch["x"].tolist() == [[1.0], [2.0], [0.5]]
    slots = [Slot("id", "dense", missing=0.5)]
    (batch,) = QueueDataset([path], slots, format="parquet", batch_size=3, threads=1)
    assert batch["id"].tolist() == [[1.0], [0.5], [3.0]]
    for slot, found in (
        (Slot("x", dim=1, hash_range=9), "which can be hashed, found double"),
        (Slot("y", "dense"), "records 2 to 2"),
    ):
        with pytest.raises(cpudist.errors.BadRecordError, match=found):
            list(QueueDataset([path], [slot], format="parquet"))

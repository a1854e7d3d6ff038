# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``InMemoryDataset``: what is loaded, shuffled, resumed and released."""

from __future__ import annotations

import gzip
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from data_cases import SLOTS, flat, read, records, unpacked, write
from patience import PATIENCE_S
from torch.utils.data import DataLoader

import torch_cpudist as cpudist
from torch_cpudist.data import InMemoryDataset

COUNT = 2003


@pytest.fixture
def files(tmp_path):
    found = records(COUNT)
    return write(tmp_path, [found[:700], [], found[700:]])


def loaded(files, **options):
    dataset = InMemoryDataset(files, SLOTS, **{"batch_size": 64, **options})
    dataset.load()
    return dataset


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_the_order_is_that_of_the_files(files, threads):
    dataset = loaded(files, threads=threads)
    assert dataset.records == COUNT
    assert len(dataset) == 32
    assert 50 * COUNT < dataset.size_bytes < 200 * COUNT + (8 << 20)
    for _ in range(2):
        batches = read(dataset)
        assert flat(batches) == records(COUNT)
        assert [len(batch) for batch in batches] == [64] * 31 + [19]
    assert len(read(loaded(files, drop_last=True))) == 31


def test_shuffles_permute_and_can_be_repeated(files):
    dataset = loaded(files)
    dataset.local_shuffle(seed=5)
    once = flat(read(dataset))
    assert once != records(COUNT)
    assert sorted(once) == records(COUNT)
    dataset.local_shuffle(seed=6)
    assert flat(read(dataset)) != once
    dataset.local_shuffle(seed=5)
    assert flat(read(dataset)) == once
    again = loaded(files, threads=3)
    again.local_shuffle(seed=5)
    assert flat(read(again)) == once
    alone = loaded(files)
    alone.global_shuffle(seed=5)
    assert flat(read(alone)) == once  # in a world of one
    every_epoch = loaded(files, shuffle=True, seed=2)
    epochs = [flat(read(every_epoch)) for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[1]) == records(COUNT)
    every_epoch.set_epoch(0)
    assert flat(read(every_epoch)) == epochs[0]


def test_shares_divide_the_records(files):
    parts = [loaded(files, share=(number, 3)) for number in range(3)]
    assert sorted(flat(flat(read(part)) for part in parts)) == records(COUNT)


def test_one_of_several_ranks_has_to_know_its_number(files, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with ThreadPoolExecutor(1) as thread:  # which was in no run, whatever this one was
        with pytest.raises(cpudist.ConfigurationError, match="which trainer it is"):
            thread.submit(loaded, files).result(PATIENCE_S)
        half = thread.submit(loaded, files, share=(0, 2)).result(PATIENCE_S)
        monkeypatch.setenv("WORLD_SIZE", "1")
        whole = thread.submit(loaded, files).result(PATIENCE_S)
    assert half.records < whole.records == COUNT


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_position_resumes_with_the_next_record(files, shuffle):
    def dataset():
        return InMemoryDataset(files, SLOTS, batch_size=64, shuffle=shuffle, threads=2)

    first = dataset()
    first.load()
    first.local_shuffle(seed=1)
    first.local_shuffle(seed=9)
    read(first)  # epoch 0
    whole = read(first)
    for stop in (0, 1, 17, 31):
        first.set_epoch(1)
        iterator = iter(first)
        for _ in range(stop):
            next(iterator)
        state = json.loads(json.dumps(first.state_dict()))
        behind = json.loads(json.dumps(first.state_dict(unused=min(stop, 1))))
        iterator.close()
        resumed = dataset()
        resumed.load_state_dict(state)
        assert resumed.epoch == 1
        assert read(resumed) == whole[stop:]
        resumed.load_state_dict(behind)
        assert read(resumed) == whole[max(0, stop - 1) :]


def test_preload_loads_aside_and_compressed_files_load(files):
    for path in files:
        path.write_bytes(gzip.compress(path.read_bytes()))
    dataset = InMemoryDataset(files, SLOTS, batch_size=100, threads=2)
    with pytest.raises(cpudist.InvalidArgumentError, match="preload"):
        dataset.wait()
    dataset.preload()
    dataset.wait()
    assert flat(read(dataset)) == records(COUNT)


def test_nothing_is_there_before_load_or_after_release(files):
    dataset = InMemoryDataset(files, SLOTS)
    for use in (iter, len, read, lambda d: d.records, lambda d: d.local_shuffle()):
        with pytest.raises(cpudist.ClosedError, match="load"):
            use(dataset)
    dataset.load()
    kept = next(iter(dataset))
    dataset.release()
    dataset.release()
    assert unpacked(kept) == records(1)
    with pytest.raises(cpudist.ClosedError, match="load"):
        len(dataset)
    dataset.load()
    assert dataset.records == COUNT


def test_bad_lines_and_files(files, tmp_path):
    files[0].write_text("oops\n" + files[0].read_text())
    with pytest.raises(cpudist.errors.BadRecordError, match=r"part-0\.txt:1:1"):
        loaded(files)
    dataset = loaded(files, bad_lines="skip")
    assert dataset.records == COUNT
    assert dataset.bad_lines() == {str(files[0]): 1}
    with pytest.raises(cpudist.errors.DataFileError, match="none"):
        loaded([tmp_path / "none"])
    with pytest.raises(cpudist.errors.DataFileError, match="exit 4"):
        loaded(files, pipe_command="exit 4")


def test_processes_of_a_loader_are_refused(files):
    dataset = loaded(files)
    assert flat(read(DataLoader(dataset, batch_size=None))) == records(COUNT)
    loader = DataLoader(dataset, batch_size=None, num_workers=1, timeout=PATIENCE_S)
    with pytest.raises(cpudist.InvalidArgumentError, match="num_workers=0"):
        next(iter(loader))


def test_shuffles_check_their_arguments(files):
    dataset = loaded(files)
    for seed in (-1, 0.5, 2**63):
        with pytest.raises(cpudist.InvalidArgumentError, match="seed"):
            dataset.local_shuffle(seed=seed)
    for key in ("pair", "none", "instance_id"):
        with pytest.raises(cpudist.InvalidArgumentError, match="key"):
            dataset.global_shuffle(key=key)

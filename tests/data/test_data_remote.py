# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Lists of files, and files of other file systems: fsspec's own in memory."""

from __future__ import annotations

import gzip
import subprocess
import sys
from collections import Counter

import pytest
from data_cases import SLOTS, flat, line, read, records, write
from patience import PATIENCE_S
from programs import clean_environment

import torch_cpudist as cpudist
from torch_cpudist.data import InMemoryDataset, QueueDataset, Slot, list_files

fsspec = pytest.importorskip("fsspec")

COUNT = 500


@pytest.fixture
def memory():
    """fsspec's file system in memory, with data in /clicks."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    drawn = records(COUNT)
    for part in range(4):
        text = "".join(map(line, drawn[part::4])).encode()
        packed = part == 3
        system.pipe(
            f"/clicks/day-{part % 2}/part-{part}{'.gz' * packed}",
            gzip.compress(text) if packed else text,
        )
    yield system
    system.store.clear()


def test_urls_are_listed_by_pattern_and_folder(memory):
    every = [
        "memory://clicks/day-0/part-0",
        "memory://clicks/day-0/part-2",
        "memory://clicks/day-1/part-1",
        "memory://clicks/day-1/part-3.gz",
    ]
    assert list_files("memory://clicks/day-*/part-*") == every
    assert list_files("memory://clicks/**") == every
    assert list_files("memory://clicks/day-0") == every[:2]
    assert list_files("memory://clicks/day-0/") == every[:2]
    assert list_files("memory://clicks/day-[1]/part-1") == every[2:3]
    for nothing in ("memory://clicks/none-*", "memory://none", "memory://clicks"):
        with pytest.raises(cpudist.errors.DataFileError, match="found none"):
            list_files(nothing)


def test_a_local_listing_is_of_paths(tmp_path):
    files = write(tmp_path, [records(3), records(3)])
    (tmp_path / "folder").mkdir()
    every = [str(path) for path in files]
    assert list_files(f"{tmp_path}/part-*.txt") == every
    assert list_files(tmp_path) == every
    assert list_files(files[0]) == every[:1]
    assert list_files(f"file://{tmp_path}/part-*.txt") == [f"file://{p}" for p in every]
    with pytest.raises(cpudist.InvalidArgumentError, match="anon"):
        list_files(tmp_path, anon=True)
    with pytest.raises(cpudist.errors.DataFileError, match="found none"):
        list_files(f"{tmp_path}/x*")


@pytest.mark.parametrize("make", [QueueDataset, InMemoryDataset])
@pytest.mark.parametrize("share", [(0, 1), (1, 2)])
def test_datasets_read_urls_as_they_read_files(memory, tmp_path, make, share):
    urls = list_files("memory://clicks/day-*/part-*")
    local = []
    for number, url in enumerate(urls):
        path = tmp_path / f"{number}{'.gz' if url.endswith('.gz') else ''}"
        path.write_bytes(memory.cat(url))
        local.append(path)
    found = []
    for files in (urls, local, [*local[:2], *urls[2:]], [f"file://{p}" for p in local]):
        dataset = make(files, SLOTS, batch_size=32, threads=2, share=share)
        if make is InMemoryDataset:
            dataset.load()
        found.append(read(dataset))
    whole = Counter(flat(found[0]))
    assert len(whole) == (COUNT if share == (0, 1) else COUNT // 2)
    assert all(Counter(flat(one)) == whole for one in found)
    assert found[0] == found[3]


def test_a_position_in_urls_can_be_taken_up(memory):
    urls = list_files("memory://clicks/day-*/part-*")
    dataset = QueueDataset(urls, SLOTS, batch_size=32, threads=2)
    whole = read(dataset)
    dataset.set_epoch(0)
    iterator = iter(dataset)
    for _ in range(5):
        next(iterator)
    again = QueueDataset(urls, SLOTS, batch_size=32, threads=2)
    again.load_state_dict(dataset.state_dict())
    assert read(again) == whole[5:]


def test_parquet_is_read_from_urls_by_row_groups(memory):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    with memory.open("/table", "wb") as file:
        table = pyarrow.table({"x": list(range(1000))})
        parquet.write_table(table, file, row_group_size=100)
    found = []
    for number in range(2):
        dataset = QueueDataset(
            ["memory://table"], [Slot("x", dim=1)], format="parquet",
            batch_size=50, share=(number, 2),
        )  # fmt: skip
        found.append([n for batch in dataset for n in batch["x"].ids.tolist()])
    assert all(found)
    assert sorted(found[0] + found[1]) == list(range(1000))
    memory.pipe("/broken", b"PAR1 no PAR1")
    broken = QueueDataset(["memory://broken"], [Slot("x")], format="parquet")
    with pytest.raises(cpudist.errors.DataFileError, match="memory://broken"):
        read(broken)


def test_csv_from_a_url_has_its_header(memory):
    memory.pipe("/a.csv", b"y,x\n1,5\n2,6\n")
    dataset = QueueDataset(["memory://a.csv"], [Slot("x", dim=1)], format="csv")
    assert [batch["x"].ids.tolist() for batch in dataset] == [[5], [6]]
    memory.pipe("/empty.csv", b"")
    with pytest.raises(cpudist.BadRecordError, match=r"memory://empty\.csv:1:1"):
        iter(QueueDataset(["memory://empty.csv"], [Slot("x")], format="csv"))


def test_what_cannot_be_read_is_named(memory):
    missing = QueueDataset(["memory://none"], SLOTS)
    with pytest.raises(cpudist.errors.DataFileError, match="memory://none"):
        iter(missing)
    with pytest.raises(cpudist.errors.DataFileError, match="found a directory"):
        iter(QueueDataset(["memory://clicks"], SLOTS))
    with pytest.raises(cpudist.InvalidArgumentError, match="another file system"):
        QueueDataset(["memory://clicks/x"], SLOTS, pipe_command="cat")
    cut = memory.cat("/clicks/day-1/part-3.gz")[:-20]
    memory.pipe("/cut.gz", cut)
    with pytest.raises(cpudist.errors.DataFileError, match=r"cut\.gz.*cut off at"):
        read(QueueDataset(["memory://cut.gz"], SLOTS))


def test_a_driver_that_is_not_there_is_named():
    for call in (list_files, lambda url: iter(QueueDataset([url], SLOTS))):
        with pytest.raises(cpudist.ConfigurationError, match="no driver for nosuch://"):
            call("nosuch://bucket/a")


class Failing(fsspec.AbstractFileSystem):
    """A driver whose errors are of a class of its own."""

    protocol = "failing"

    def info(self, path, **options):
        return {"name": path, "size": 10, "type": "file"}

    def _open(self, path, mode="rb", **options):
        raise KeyError("no credentials")


def test_whatever_a_driver_raises_is_an_error_of_this_file():
    fsspec.register_implementation("failing", Failing, clobber=True)
    with pytest.raises(
        cpudist.errors.DataFileError, match=r"failing://a: .*credential"
    ):
        iter(QueueDataset(["failing://a"], SLOTS))


@pytest.mark.processes
def test_without_fsspec_local_paths_work_and_urls_say_what_to_install(tmp_path):
    program = """
import sys
sys.modules["fsspec"] = None
import torch_cpudist as cpudist
from torch_cpudist.data import QueueDataset, Slot, list_files
files = list_files(sys.argv[1])
slots = [Slot("number", dim=1), Slot("bag"), Slot("pair", "dense", dim=2)]
assert sum(len(batch["pair"]) for batch in QueueDataset(files, slots)) == 6
for call in (list_files, lambda url: iter(QueueDataset([url], slots))):
    try:
        call("s3://bucket/a")
    except cpudist.ConfigurationError as error:
        assert "pip install fsspec" in str(error), error
    else:
        raise AssertionError
"""
    write(tmp_path, [records(3), records(3)])
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path],
        env=clean_environment(), capture_output=True, text=True, timeout=PATIENCE_S,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``QueueDataset``: every record once, in an order that can be repeated and resumed."""

from __future__ import annotations

import gzip
import itertools
import json
import threading

import pytest
import torch
from data_cases import SLOTS, flat, line, read, records, unpacked, write
from patience import PATIENCE_S
from torch import nn
from torch.utils.data import DataLoader

import torch_cpudist as cpudist
from torch_cpudist.data import QueueDataset, Slot, criteo_slots

COUNT = 3001


@pytest.fixture
def files(tmp_path):
    found = records(COUNT)
    return write(tmp_path, [found[:1000], found[1000:1001], [], found[1001:]])


def test_batches_are_what_modules_take(files):
    batch = next(iter(QueueDataset(files, SLOTS, batch_size=64)))
    assert set(batch) == {"number", "bag", "pair"}
    values, offsets = batch["bag"]
    assert (values.dtype, offsets.dtype) == (torch.int64, torch.int64)
    assert offsets.shape == (65,)
    assert offsets[-1] == len(values)
    assert batch["number"].ids.shape == (64,)
    assert batch["pair"].shape == (64, 2)
    assert batch["pair"].dtype == torch.float32
    bags = nn.EmbeddingBag(10, 4, include_last_offset=True)
    assert bags(values.clamp(0, 9), offsets).shape == (64, 4)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("trainers", [1, 3])
def test_every_record_once_in_full_batches(files, threads, trainers):
    seen = []
    for trainer in range(trainers):
        # Trainers need not have equally many threads.
        count = threads + trainer
        dataset = QueueDataset(
            files, SLOTS, batch_size=32, threads=count, share=(trainer, trainers)
        )
        batches = read(dataset)
        assert all(len(batch) == 32 for batch in batches[:-1])
        assert batches == read(dataset)  # another epoch, not shuffled
        seen += flat(batches)
    assert sorted(seen) == records(COUNT)


def test_one_thread_keeps_the_order_and_drop_last_drops_the_rest(files):
    assert flat(read(QueueDataset(files, SLOTS, batch_size=100, threads=1))) == (
        records(COUNT)
    )
    batches = read(
        QueueDataset(files, SLOTS, batch_size=100, threads=1, drop_last=True)
    )
    assert flat(batches) == records(COUNT)[:3000]


def test_a_shuffle_is_another_order_every_epoch_and_the_same_every_run(files):
    def dataset():
        return QueueDataset(
            files, SLOTS, batch_size=50, threads=2, shuffle=True, seed=3,
            shuffle_records=500,
        )  # fmt: skip

    first = dataset()
    epochs = [flat(read(first)) for _ in range(3)]
    assert first.epoch == 3
    assert all(sorted(epoch) == records(COUNT) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    again = dataset()
    again.set_epoch(1)
    assert flat(read(again)) == epochs[1]
    numbers = [record[0] for record in epochs[0]]
    ascending = sum(a < b for a, b in itertools.pairwise(numbers))
    assert abs(ascending / COUNT - 0.5) < 0.06


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("kind", ["plain", "gzip", "command"])
def test_a_position_resumes_with_the_next_record(files, kind, shuffle):
    options = {"threads": 2, "shuffle": shuffle, "shuffle_records": 256, "seed": 1}
    if kind == "command":
        options["pipe_command"] = "cat"
    if kind == "gzip":
        for path in files:
            path.write_bytes(gzip.compress(path.read_bytes()))

    def dataset():
        return QueueDataset(files, SLOTS, batch_size=64, **options)

    whole = read(dataset())
    for stop in [*range(0, len(whole), 7), len(whole) - 1]:
        under_way = dataset()
        iterator = iter(under_way)
        for expected in whole[:stop]:
            assert unpacked(next(iterator)) == expected
        state = json.loads(json.dumps(under_way.state_dict()))
        behind = json.loads(json.dumps(under_way.state_dict(unused=min(stop, 2))))
        iterator.close()
        resumed = dataset()
        resumed.load_state_dict(state)
        assert read(resumed) == whole[stop:]
        assert resumed.epoch == 1
        resumed.load_state_dict(behind)
        assert read(resumed) == whole[max(0, stop - 2) :]


def test_a_position_fits_equal_settings_only(files):
    state = QueueDataset(files, SLOTS, batch_size=64).state_dict()
    for other in (
        QueueDataset(files, SLOTS, batch_size=65),
        QueueDataset(files, SLOTS, batch_size=64, threads=2),
        QueueDataset(files[:2], SLOTS, batch_size=64),
        QueueDataset(files, SLOTS, batch_size=64, share=(1, 2)),
    ):
        with pytest.raises(cpudist.ConfigMismatchError, match="saved with"):
            other.load_state_dict(state)
    same = QueueDataset(files, SLOTS, batch_size=64)
    files[0].write_text(line(records(1)[0]))
    with pytest.raises(cpudist.ConfigMismatchError, match="sizes_bytes"):
        same.load_state_dict(state)


def test_several_consumers_share_one_epoch(files):
    iterator = iter(QueueDataset(files, SLOTS, batch_size=10, threads=2))
    found = [[] for _ in range(4)]

    def consume(mine):
        mine.extend(record for batch in iterator for record in unpacked(batch))

    threads = [threading.Thread(target=consume, args=(mine,)) for mine in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sorted(flat(found)) == records(COUNT)


def test_processes_of_a_loader_share_the_files(files):
    dataset = QueueDataset(files, SLOTS, batch_size=32)
    loader = DataLoader(dataset, batch_size=None, num_workers=2, timeout=PATIENCE_S)
    assert sorted(flat(read(loader))) == records(COUNT)


def test_batches_outlive_their_reader(files):
    kept = list(QueueDataset(files, SLOTS, batch_size=500, buffer_bytes=1 << 16))
    assert flat(map(unpacked, kept)) == records(COUNT)


@pytest.mark.parametrize(
    ("text", "column", "what"),
    [
        ("1 7 1 x 2 1 2", 7, "'x'"),
        ("1 7 0 2 1", 7, "pair"),
        ("1 7 1 9223372036854775808 2 1 2", 7, "bag"),
        ("1 7 0 2 nan 1", 9, "pair"),
        ("2 7 8 0 2 1 1", 1, "number"),
        ("1 7 0 2 1 1 5", 13, "end"),
    ],
)
def test_a_bad_line_names_file_line_and_column(tmp_path, text, column, what):
    good = line(records(1)[0])
    path = tmp_path / "bad.txt"
    path.write_text(good * 3 + text + "\n" + good)
    with pytest.raises(cpudist.errors.BadRecordError, match=what) as raised:
        read(QueueDataset([path], SLOTS, batch_size=2))
    assert f"{path}:4:{column}:" in str(raised.value)


def test_skip_counts_and_logs_once_per_file_and_quarantine_keeps(tmp_path, caplog):
    found = records(10)
    paths = write(tmp_path, [found[:5], found[5:]])
    for path in paths:
        path.write_text("bad one\n" + path.read_text() + "bad two\n")
    skipping = QueueDataset(paths, SLOTS, batch_size=4, bad_lines="skip", threads=1)
    assert flat(read(skipping)) == found
    assert skipping.bad_lines() == {str(path): 2 for path in paths}
    assert len([r for r in caplog.records if "bad lines" in r.getMessage()]) == 2
    kept = tmp_path / "kept.txt"  # a path, as files are
    keeping = QueueDataset(
        paths, SLOTS, batch_size=4, bad_lines="quarantine", quarantine=kept
    )
    assert sorted(flat(read(keeping))) == found
    lines = [text for text in kept.read_text().splitlines() if text[0] != "#"]
    assert sorted(lines) == ["bad one", "bad one", "bad two", "bad two"]


def test_line_ends_marks_and_empty_lines(tmp_path):
    found = records(3)
    path = tmp_path / "odd.txt"
    text = "\r\n".join(line(record).rstrip("\n") for record in found)
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n\n" + text.encode())
    assert flat(read(QueueDataset([path], SLOTS, batch_size=2))) == found


def test_files_that_cannot_be_read(tmp_path, files):
    missing = QueueDataset([tmp_path / "none.txt"], SLOTS)
    with pytest.raises(cpudist.errors.DataFileError, match=r"none\.txt: No such file"):
        iter(missing)
    with pytest.raises(cpudist.errors.DataFileError, match="folder"):
        iter(QueueDataset([tmp_path], SLOTS))
    cut = tmp_path / "cut.gz"
    cut.write_bytes(gzip.compress(files[0].read_bytes())[:-20])
    with pytest.raises(cpudist.errors.DataFileError, match="cut off"):
        read(QueueDataset([cut], SLOTS, batch_size=64))
    failing = QueueDataset(files, SLOTS, pipe_command="head -1; echo no >&2; exit 3")
    with pytest.raises(cpudist.errors.DataFileError, match="no"):
        read(failing)
    long = tmp_path / "long.txt"
    long.write_text(line(records(1)[0]) + "1 " + "7" * 5000 + "\n")
    with pytest.raises(cpudist.errors.BadRecordError, match=r"long\.txt:2"):
        read(QueueDataset([long], SLOTS, line_limit_bytes=2048))
    assert read(QueueDataset([], SLOTS)) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"format": "tsv"}, {"batch_size": 0}, {"threads": 0}, {"bad_lines": "drop"},
        {"bad_lines": "quarantine"}, {"quarantine": "x"}, {"pipe_command": " "},
        {"shuffle_records": 0}, {"share": (2, 2)}, {"timeout_s": 0.0}, {"seed": -1},
        {"share": 1}, {"timeout_s": "x"}, {"pipe_command": 3}, {"seed": None},
        {"buffer_bytes": 1}, {"delimiter": ";;"}, {"separator": ","},
        {"format": "criteo", "instance_ids": True},
        {"format": "parquet", "bad_lines": "skip"},
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_by_name(files, wrong):
    with pytest.raises((cpudist.InvalidArgumentError, cpudist.ConfigurationError)) as e:
        QueueDataset(files, SLOTS, **wrong)
    assert [*wrong][-1] in str(e.value)


def test_wrong_slots_and_files_are_refused(files):
    for slots in ([], [Slot("a"), Slot("a")], [Slot("a", used=False)]):
        with pytest.raises(cpudist.InvalidArgumentError, match="slots"):
            QueueDataset(files, slots)
    for names in ("one.txt", {"a", "b"}, ["a", "a"]):
        with pytest.raises(cpudist.InvalidArgumentError, match="files"):
            QueueDataset(names, SLOTS)
    for wrong in (
        {"kind": "rare"}, {"dim": 0}, {"dtype": torch.float64}, {"hash_range": 1},
        {"missing": 0.5}, {"columns": "a"}, {"columns": ["a", "b"]},
    ):  # fmt: skip
        with pytest.raises(cpudist.InvalidArgumentError, match="Slot"):
            Slot("a", **wrong)


def test_criteo(tmp_path):
    path = tmp_path / "criteo.tsv"
    numbers, codes = ["1", "", "-2"] + ["5"] * 10, ["0000000f", ""] + ["ff"] * 24
    path.write_text("\t".join(["1", *numbers, *codes]) + "\n")
    (batch,) = QueueDataset([path], criteo_slots(), format="criteo")
    assert batch["label"].tolist() == [[1.0]]
    assert batch["dense"].tolist() == [[1.0, 0.0, -2.0] + [5.0] * 10]
    found = [batch[f"C{number}"].ids.item() for number in range(1, 27)]
    assert found == [15, -1] + [255] * 24
    (hashed,) = QueueDataset([path], criteo_slots(hash_range=50), format="criteo")
    ids = [hashed[f"C{number}"].ids.item() for number in range(1, 27)]
    assert ids[1] == 0
    assert all(1 <= value < 50 for value in ids[:1] + ids[2:])
    assert len(set(ids[2:])) > 10  # equal values of other columns go elsewhere


def test_csv(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text('w,ids,skip,"name, full",x\n2.5,1|2,z,"a ""b""",3\n,,"z,z",,\n')
    slots = [
        Slot("ids"),
        Slot("xw", "dense", dim=2, columns=["x", "w"], missing=-1),
        Slot("name", dim=1, hash_range=1000, columns=["name, full"]),
        Slot("class", "dense", dtype=torch.int64, columns=["x"], missing=9),
    ]
    (batch,) = QueueDataset([path], slots, format="csv", batch_size=2)
    assert batch["ids"].values.tolist() == [1, 2]
    assert batch["ids"].offsets.tolist() == [0, 2, 2]
    assert batch["xw"].tolist() == [[3.0, 2.5], [-1.0, -1.0]]
    assert batch["class"].tolist() == [[3], [9]]
    assert batch["class"].dtype == torch.int64
    name = batch["name"].ids.tolist()
    assert 1 <= name[0] < 1000
    assert name[1] == 0
    with pytest.raises(cpudist.errors.BadRecordError, match="none"):
        read(QueueDataset([path], [Slot("none")], format="csv"))


def test_parquet_gives_what_csv_gives(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="the extra data is not installed")
    parquet = pytest.importorskip(
        "pyarrow.parquet", reason="the extra data is not installed"
    )
    count = 500
    table = pa.table(
        {
            "x": pa.array([None if i % 7 == 0 else i / 4 for i in range(count)]),
            "id": pa.array(range(count)),
            "name": pa.array(
                [None if i % 5 == 0 else f"n{i % 9}" for i in range(count)]
            ),
            "tags": pa.array([list(range(i % 4)) for i in range(count)]),
        }
    )
    path, text = tmp_path / "t.parquet", tmp_path / "t.csv"
    parquet.write_table(table, path, row_group_size=64)
    cells = zip(*(table[name].to_pylist() for name in table.column_names), strict=True)
    rows = [
        ",".join(
            "" if cell is None else "|".join(map(str, cell)) if type(cell) is list
            else str(cell) for cell in row
        )
        for row in cells
    ]  # fmt: skip
    text.write_text("\n".join(["x,id,name,tags", *rows]) + "\n")
    slots = [
        Slot("x", "dense", missing=-3),
        Slot("id", dim=1),
        Slot("name", dim=1, hash_range=100),
        Slot("tags"),
    ]
    options = {"batch_size": 32, "threads": 1}
    ours = list(QueueDataset([path], slots, format="parquet", **options))
    theirs = list(QueueDataset([text], slots, format="csv", **options))
    command = QueueDataset(
        [path], slots, format="parquet", pipe_command="cat", **options
    )
    for found in (ours, list(command)):
        assert len(found) == len(theirs)
        for left, right in zip(found, theirs, strict=True):
            assert torch.equal(left["x"], right["x"])
            for name in ("id", "name", "tags"):
                assert torch.equal(left[name].values, right[name].values)
                assert torch.equal(left[name].offsets, right[name].offsets)
    with pytest.raises(cpudist.errors.BadRecordError, match="none"):
        list(QueueDataset([path], [Slot("none")], format="parquet"))
    with pytest.raises(cpudist.errors.DataFileError, match=r"t\.csv"):
        list(QueueDataset([text], slots, format="parquet"))


def test_zstd_and_instance_ids(tmp_path):
    zstandard = pytest.importorskip(
        "zstandard", reason="the extra data is not installed"
    )
    found = records(50)
    path = tmp_path / "a.zst"
    text = "".join(f"1 user-{number % 5} {line(record)}" for number, record in
                   enumerate(found))  # fmt: skip
    path.write_bytes(zstandard.compress(text.encode()))
    (batch,) = QueueDataset([path], SLOTS, batch_size=50, instance_ids=True)
    assert unpacked(batch) == found
    ids = batch["instance_id"].tolist()
    assert len(set(ids)) == 5
    assert ids[:5] == ids[5:10]


def test_an_empty_csv_file_has_no_header(tmp_path):
    path = tmp_path / "empty.csv"
    path.touch()
    with pytest.raises(cpudist.BadRecordError, match=r"empty\.csv:1:1: .*header"):
        iter(QueueDataset([path], [Slot("a")], format="csv"))
    assert read(QueueDataset([path], SLOTS)) == []  # of other formats: no records


@pytest.mark.parametrize("size", [0, 9000])
def test_a_file_that_shrinks_while_it_is_read(tmp_path, size):
    path = tmp_path / "shrinks.txt"
    lines = list(map(line, records(50000)))
    path.write_text("".join(lines))
    iterator = iter(QueueDataset([path], SLOTS, batch_size=4, buffer_bytes=1 << 16))
    next(iterator)
    with path.open("r+b") as file:
        file.truncate(len("".join(lines[:size])))
    with pytest.raises(cpudist.DataFileError, match=r"shrinks\.txt"):
        list(iterator)

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The Fashion-MNIST example: files are checked, and it learns in every layout."""

from __future__ import annotations

import gzip
import importlib
import json
import struct
import sys
from pathlib import Path

import fashion_mnist
import numpy as np
import printed
import pytest
import torch
from fashion_mnist_data import KINDS, SIDE, DataError, load, read_idx
from lazily import Lazily

pictures = Lazily("fashion_mnist_picture", importlib.import_module)  # matplotlib

TRAIN, TEST = 288, 60


def idx(values: np.ndarray, magic: int | None = None) -> bytes:
    magic = 0x0800 | values.ndim if magic is None else magic
    header = struct.pack(f">{1 + values.ndim}I", magic, *values.shape)
    return header + values.astype(np.uint8).tobytes()


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(gzip.compress(data, 1))
    return path


def write_split(folder: Path, name: str, count: int) -> None:
    """Kind k is a bright bar at its own height, under noise."""
    generator = np.random.default_rng(count)
    kinds = generator.integers(0, KINDS, count)
    images = generator.integers(0, 100, (count, SIDE, SIDE))
    for image, kind in zip(images, kinds, strict=True):
        image[2 + 2 * kind : 5 + 2 * kind, 4:24] += 120
    write(folder / f"{name}-images-idx3-ubyte.gz", idx(images))
    write(folder / f"{name}-labels-idx1-ubyte.gz", idx(kinds))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("pictures")
    write_split(made, "train", TRAIN)
    write_split(made, "t10k", TEST)
    return made


# -- files --------------------------------------------------------------------


def test_a_split_is_read_with_its_kinds(folder: Path) -> None:
    pictures = load(folder, "train")
    assert pictures.images.shape == (TRAIN, 1, SIDE, SIDE)
    assert pictures.images.dtype == np.uint8
    assert pictures.kinds.dtype == np.int64
    row = 7
    top = 2 + 2 * pictures.kinds[row]
    assert pictures.images[row, 0, top : top + 3, 4:24].min() >= 120
    images, kinds = fashion_mnist.Data(pictures).batch(torch.tensor([row]))
    assert images.dtype == torch.float32
    assert float(images.max()) < (1 - 0.286) / 0.353 + 1e-6
    assert int(kinds[0]) == pictures.kinds[row]


BARS = np.zeros((3, SIDE, SIDE), np.uint8)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\0\0\x08", "expected a header of 16 bytes, found 3"),
        (idx(BARS, 0x0801), "magic number 0x00000803 .*found 0x00000801"),
        (idx(BARS[:, :5]), r"sizes \['any', 28, 28\], found \[3, 5, 28\]"),
        (idx(BARS)[:-1], "expected 2352 bytes after the header.*found 2351"),
        (idx(BARS) + b"x", "expected 2352 bytes after the header.*found 2353"),
        (
            struct.pack(">4I", 0x0803, 2**32 - 1, SIDE, SIDE),
            "expected 3367254359280 bytes.*found 0",
        ),
    ],
    ids=["header", "magic", "sizes", "short", "long", "huge"],
)
def test_what_is_no_such_file_is_refused_by_name(
    data: bytes, words: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "x.gz", data)
    with pytest.raises(DataError, match=f"x.gz: expected.*|{words}") as caught:
        read_idx(path, None, SIDE, SIDE)
    assert caught.match(words)
    assert caught.match("x.gz")


def test_gzip_that_is_none_or_cut_off_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    whole = gzip.compress(idx(BARS + 7))
    for data in (b"no gzip", whole[:-12], whole[:20] + b"\xff" * 20 + whole[40:]):
        path.write_bytes(data)
        with pytest.raises(DataError, match=r"x.gz: expected a whole gzip file, found"):
            read_idx(path, None, SIDE, SIDE)


def test_splits_that_do_not_fit_together_are_refused(
    folder: Path, tmp_path: Path
) -> None:
    images = (folder / "t10k-images-idx3-ubyte.gz").read_bytes()
    (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(images)
    labels = tmp_path / "t10k-labels-idx1-ubyte.gz"
    write(labels, idx(np.zeros(TEST - 1)))
    with pytest.raises(DataError, match=r"labels.*sizes \[60\], found \[59\]"):
        load(tmp_path, "t10k")
    write(labels, idx(np.full(TEST, 10)))
    with pytest.raises(DataError, match="kinds 0 to 9, found 10"):
        load(tmp_path, "t10k")


def test_missing_files_are_one_sentence_with_a_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = fashion_mnist.parse_arguments(["--data", str(tmp_path)])
    with pytest.raises(SystemExit) as caught:
        fashion_mnist.read_data(options)
    said = str(caught.value)
    assert said.startswith("Fashion-MNIST: train-images-idx3-ubyte.gz is not in")
    assert "apt-get download dataset-fashion-mnist && dpkg-deb -x" in said
    assert "\n" not in said


# -- training -----------------------------------------------------------------


def run_main(
    monkeypatch: pytest.MonkeyPatch, folder: Path, results: Path, *more: str
) -> list[dict[str, float]]:
    arguments = ["--data", str(folder), "--results", str(results), "--batch-size", "16"]
    monkeypatch.setattr(sys, "argv", ["fashion_mnist.py", *arguments, *more])
    fashion_mnist.main()
    line = json.loads(results.read_text())
    assert line["trainers"] == 1
    epochs: list[dict[str, float]] = line["epochs"]
    assert all(epoch["seconds"] > 0 and epoch["cpu_s"] > 0 for epoch in epochs)
    return epochs


def test_it_learns_and_replicas_learn_the_same(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    results = tmp_path / "results.json"
    monkeypatch.setenv("CPUDIST_THREADS", "1")
    picture = tmp_path / "clothes.png"
    drawn = ["--picture", str(picture)]
    alone = run_main(monkeypatch, folder, results, "--epochs", "2", *drawn)
    assert alone[-1]["accuracy"] > 0.9
    assert picture.read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert f"test accuracy {alone[-1]['accuracy']:.4f}" in shown
    printed.check("fashion-mnist", shown)
    monkeypatch.setenv("CPU_NUM", "2")
    together = run_main(monkeypatch, folder, results, "--epochs", "2")
    assert json.loads(results.read_text())["replicas"] == 2
    assert abs(together[-1]["accuracy"] - alone[-1]["accuracy"]) < 0.03


def test_the_picture_has_shares_of_each_kind() -> None:
    found = pictures.confused(np.array([0, 0, 0, 0, 9]), np.array([0, 0, 0, 6, 5]))
    assert found[0].tolist() == [0.75, 0, 0, 0, 0, 0, 0.25, 0, 0, 0]
    assert found[9].tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 0, 0]
    assert found.sum() == 2


def test_bfloat16_and_other_strategies_learn_as_well(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "results.json"
    monkeypatch.setenv("CPUDIST_STRATEGY", "sync")
    epochs = run_main(monkeypatch, folder, results, "--epochs", "2", "--bf16")
    assert json.loads(results.read_text())["strategy"] == "sync"
    assert epochs[-1]["accuracy"] > 0.9


def test_parts_of_trainers_are_disjoint_and_make_whole_batches(folder: Path) -> None:
    options = fashion_mnist.parse_arguments(["--batch-size", "100"])
    data = fashion_mnist.Data(load(folder, "train"))
    data.kinds = torch.arange(TRAIN)
    rows = [
        [kinds for _, kinds in data.parts(options, 1, rank, 2)] for rank in range(2)
    ]
    assert [len(part) for part in rows[0]] == [50] * (TRAIN // 100)
    seen = torch.cat([part for parts in rows for part in parts])
    assert len(seen.unique()) == len(seen) == TRAIN // 100 * 100
    again = next(data.parts(options, 2, 0, 2))[1]
    assert not torch.equal(again, rows[0][0])


def test_a_batch_that_cannot_be_shared_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CPU_NUM", "5")
    with pytest.raises(SystemExit, match=r"cannot be shared by 1 trainer\(s\) with 5"):
        run_main(monkeypatch, folder, tmp_path / "r")


def test_command_line_errors_say_what_was_expected(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        fashion_mnist.parse_arguments(["--epochs", "0"])
    assert "--epochs must be at least 1, got 0" in capsys.readouterr().err

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""State trees come back as they were, or are refused with their place."""

from __future__ import annotations

import collections
import json
import math
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_files import ModelFiles

from torch_cpudist.errors import SnapshotCorruptError, SnapshotError
from torch_cpudist.snapshot.checked_json import Malformed
from torch_cpudist.snapshot.tensors import NUMPY
from torch_cpudist.snapshot.trainer_files import (
    read_trainer,
    read_written,
    write_trainer,
)
from torch_cpudist.snapshot.trees import TORCH, Leaf, pack, unpack


def same(a: Any, b: Any) -> bool:
    """Whether two trees have the same types, order and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        equal = a.dtype == b.dtype and a.shape == b.shape
        return equal and bytes_of(a) == bytes_of(b)
    if isinstance(a, np.ndarray):
        equal = a.dtype == b.dtype and a.shape == b.shape
        return equal and a.tobytes() == b.tobytes()
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        both_nan = a != a and b != b
        return both_nan or struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(x, y) and same(a[x], b[y]) for x, y in zip(a, b, strict=True)
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def through_files(tree: Any) -> Any:
    files, folder = ModelFiles(), Path("/snapshots/one")
    trainer = write_trainer(folder, 3, pack(tree), 17, files)
    assert read_written(folder, 3, files) == trainer
    return read_trainer(folder, trainer, files)


def random_tensor(generator: random.Random) -> torch.Tensor:
    dtype = TORCH[generator.choice(sorted(TORCH))]
    shape = [generator.randrange(4) for _ in range(generator.randrange(4))]
    contents = generator.randbytes(math.prod(shape) * dtype.itemsize)
    if dtype is torch.bool:
        contents = bytes(byte & 1 for byte in contents)
    tensor = torch.empty(shape, dtype=dtype)
    if contents:
        tensor.reshape(-1).view(torch.uint8).numpy()[:] = list(contents)
    return tensor


def random_array(generator: random.Random) -> np.ndarray:
    dtype = NUMPY[generator.choice(sorted(NUMPY))]
    shape = [generator.randrange(4) for _ in range(generator.randrange(4))]
    contents = generator.randbytes(math.prod(shape) * dtype.itemsize)
    if dtype == np.bool_:
        contents = bytes(byte & 1 for byte in contents)
    array = np.frombuffer(contents, dtype=dtype).reshape(shape)
    return np.asfortranarray(array) if generator.random() < 0.3 else array


def random_float(generator: random.Random) -> float:
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324, 1.7e308, 0.1]
    found = struct.unpack("d", generator.randbytes(8))[0]
    return generator.choice([*special, found])


def random_text(generator: random.Random) -> str:
    letters = 'ab$\0\n"\\é\U0001f600\udc80 '
    return "".join(generator.choices(letters, k=generator.randrange(6)))


def random_key(generator: random.Random) -> Any:
    key = generator.choice(
        [
            random_text(generator),
            generator.randrange(-(2**70), 2**70),
            generator.random(),
            None,
            generator.randbytes(3),
            (1, random_text(generator)),
        ]
    )
    return key


def random_tree(generator: random.Random, depth: int = 0) -> Any:
    leaves = [
        lambda: None,
        lambda: generator.random() < 0.5,
        lambda: (
            generator.choice([-1, 1])
            * generator.getrandbits(generator.choice([3, 53, 54, 64, 200, 20_000]))
        ),
        lambda: random_float(generator),
        lambda: random_text(generator),
        lambda: generator.randbytes(generator.randrange(20)),
        lambda: random_tensor(generator),
        lambda: random_array(generator),
        lambda: random_array(generator).reshape(-1)[:1].sum(),
        lambda: TORCH[generator.choice(sorted(TORCH))],
    ]
    if depth > 3 or generator.random() < 0.3:
        return generator.choice(leaves)()
    items = [random_tree(generator, depth + 1) for _ in range(generator.randrange(5))]
    keys = [random_key(generator) for _ in items]
    texts = [random_text(generator) for _ in items]
    return generator.choice(
        [
            lambda: items,
            lambda: tuple(items),
            lambda: dict(zip(keys, items, strict=True)),
            lambda: dict(zip(texts, items, strict=True)),
            lambda: collections.OrderedDict(zip(keys, items, strict=True)),
        ]
    )()


@pytest.mark.parametrize("seed", range(4))
def test_random_trees_come_back(seed) -> None:
    generator = random.Random(seed)
    for _ in range(100):
        tree = random_tree(generator)
        assert same(through_files(tree), tree), tree


def test_the_comparison_tells_things_apart() -> None:
    pairs = [
        (0.0, -0.0),
        (1, 1.0),
        (1, True),
        ([1], (1,)),
        ({1: 2, 3: 4}, {3: 4, 1: 2}),
        ({}, collections.OrderedDict()),
        (np.float64(1), 1.0),
        (torch.zeros(2), torch.zeros(2, 1)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (np.zeros(2), torch.zeros(2, dtype=torch.float64)),
    ]
    for a, b in pairs:
        assert not same(a, b)
        assert same(a, a)
        assert same(b, b)


def test_what_jobs_keep_comes_back() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    schedules = [
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 3, 5]),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(optimizer),
                torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
            ],
            [4],
        ),
    ]
    tree = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "generator": np.random.default_rng(3).bit_generator.state,
        "philox": np.random.Generator(np.random.Philox(3)).bit_generator.state,
        "random": random.getstate(),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedules": [schedule.state_dict() for schedule in schedules],
    }
    back = through_files(tree)
    assert type(back["schedules"][0]["milestones"]) is collections.Counter
    assert same(back, tree)
    for kept, schedule in zip(back["schedules"], schedules, strict=True):
        schedule.load_state_dict(kept)
    model.load_state_dict(back["model"])
    optimizer.load_state_dict(back["optimizer"])
    random.setstate(back["random"])
    np.random.set_state(back["numpy"])
    torch.set_rng_state(back["torch"])


def test_nothing_changes_what_was_packed(tmp_path) -> None:
    tensor, array, items = torch.zeros(3), np.zeros(3), [1]
    packed = pack({"tensor": tensor, "array": array, "items": items})
    tensor += 1
    array += 1
    items.append(2)
    back = read_trainer(tmp_path, write_trainer(tmp_path, 0, packed, 0))
    assert back["tensor"].tolist() == [0, 0, 0]
    assert back["array"].tolist() == [0, 0, 0]
    assert back["items"] == [1]
    back["tensor"] += 1  # memory of its own
    back["array"] += 1


def test_views_of_strange_layout() -> None:
    base = torch.arange(24.0).reshape(2, 3, 4)
    tree = {
        "transposed": base.transpose(0, 2),
        "strided": base[:, ::2, 1::2],
        "expanded": base[:1, :1, :1].expand(2, 2, 2),
        "conjugate": torch.tensor([1 + 2j], dtype=torch.complex64).conj(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "array": np.arange(24.0).reshape(2, 3, 4).transpose(2, 0, 1)[::2],
    }
    back = through_files(tree)
    for name in ("transposed", "strided", "expanded", "conjugate", "parameter"):
        assert torch.equal(back[name], tree[name].detach()), name
    assert type(back["parameter"]) is torch.Tensor
    np.testing.assert_array_equal(back["array"], tree["array"])


def test_what_is_twice_in_a_tree_is_kept_once() -> None:
    tensor = torch.arange(1000.0)
    packed = pack({"a": tensor, "b": [tensor]})
    assert len(packed.leaves) == 1
    back = through_files({"a": tensor, "b": [tensor]})
    assert back["a"] is back["b"][0]


class Point(tuple):
    pass


class Steps(int):
    pass


def a_circle() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


REFUSED = [
    (lambda: {"data": {"next": [1, object()]}}, r"state\['data'\]\['next'\]\[1\]"),
    (lambda: [{1, 2}], r"state\[0\] is of type builtins.set"),
    (lambda: {"x": Point()}, r"state\['x'\] is of type .*Point"),
    (lambda: Steps(3), r"state is of type .*Steps"),
    (lambda: 1j, "builtins.complex"),
    (lambda: print, "builtin_function"),
    (lambda: {object(): 1}, "has a key of type object"),
    (lambda: {math.nan: 1}, "has a key of type float"),
    (lambda: {(1, (2, frozenset())): 1}, "has a key of type tuple"),
    (lambda: torch.zeros(2, device="meta"), "a tensor of meta"),
    (lambda: torch.zeros(2).to_sparse(), "torch.sparse_coo"),
    (lambda: torch.zeros(2, dtype=torch.complex128), "torch.complex128"),
    (lambda: np.zeros(2, dtype=object), "an array of dtype"),
    (lambda: np.zeros(2, dtype=">f4"), "an array of dtype"),
    (lambda: np.array(["text"]), "an array of dtype"),
    (lambda: np.str_("text"), "an array of dtype"),
    (lambda: bytearray(3), "builtins.bytearray"),
    (lambda: collections.deque([1]), "collections.deque"),
    (a_circle, "in a circle"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_what_cannot_be_kept_is_named(make, message) -> None:
    with pytest.raises(SnapshotError, match=message) as raised:
        pack(make())
    assert "cannot keep" in str(raised.value)


def test_the_place_begins_with_what_is_kept() -> None:
    with pytest.raises(SnapshotError, match=r"state of 'schedule'\['lr'\] is of type"):
        pack({"lr": object()}, "state of 'schedule'")


LEAF = Leaf("F32", (1,), np.zeros(4, dtype=np.uint8))
MALFORMED = [
    {"$tensor": "t1"},
    {"$tensor": 0},
    {"$tensor": "t0", "more": 1},
    {"$unknown": 1},
    {"$pickle": "gASV"},
    {"$tuple": {}},
    {"$items": [[1]]},
    {"$items": [[1, 2], [1, 3]]},
    {"$items": [[[1], 2]]},
    {"$items": [[{"$tensor": "t0"}, 2]]},
    {"$bytes": "?"},
    {"$int": "0xg"},
    {"$float": "1.0"},
    {"$float": 1},
    {"$dtype": "nn"},
    {"$scalar": ["F32", "00"]},
    {"$scalar": ["F33", "00000000"]},
    {"$scalar": "F32"},
    {"a": [{"$tensor": "gone"}]},
]


@pytest.mark.parametrize("tree", MALFORMED, ids=json.dumps)
def test_trees_that_nobody_packed_are_refused(tree) -> None:
    with pytest.raises(Malformed):
        unpack(tree, {"t0": LEAF})


def test_a_deep_tree_of_a_file_is_refused() -> None:
    tree: Any = 0
    for _ in range(5000):
        tree = [tree]
    with pytest.raises(Malformed, match="deep"):
        unpack(tree, {})


def test_files_of_another_trainer_are_refused(tmp_path) -> None:
    trainer = write_trainer(tmp_path, 1, pack({}), 5)
    (tmp_path / "trainer-001.json").rename(tmp_path / "trainer-002.json")
    with pytest.raises(SnapshotCorruptError, match="rank: expected") as raised:
        read_written(tmp_path, 2)
    assert raised.value.file == "trainer-002.json"
    assert read_written(tmp_path, 1) is None
    with pytest.raises(SnapshotCorruptError, match="not there"):
        read_trainer(tmp_path, trainer)


def test_the_file_of_an_earlier_attempt_is_none(tmp_path) -> None:
    earlier = write_trainer(tmp_path, 1, pack({"x": 1}), 5, number=10)
    assert read_written(tmp_path, 1, number=10) == earlier
    assert read_written(tmp_path, 1, number=20) is None
    later = write_trainer(tmp_path, 1, pack({"x": 2}), 6, number=20)
    assert read_written(tmp_path, 1, number=20) == later != earlier


def test_the_file_of_another_run_is_none(tmp_path) -> None:
    """Of the same number, by a run that was killed: it is waited for on."""
    dead = write_trainer(tmp_path, 1, pack({"x": 1}), 5, number=10, run_id=2**64 - 1)
    assert read_written(tmp_path, 1, number=10, run_id=7) is None
    assert read_written(tmp_path, 1, number=10, run_id=2**64 - 1) == dead
    mine = write_trainer(tmp_path, 1, pack({"x": 2}), 6, number=10, run_id=7)
    assert read_written(tmp_path, 1, number=10, run_id=7) == mine != dead
    assert read_trainer(tmp_path, mine) == {"x": 2}


def test_a_file_that_names_no_run_can_be_read(tmp_path) -> None:
    """As those of before there was one; a run that saves does not take it for its."""
    trainer = write_trainer(tmp_path, 1, pack({"x": 1}), 5, number=10)
    assert "run" not in json.loads((tmp_path / trainer.file).read_text())
    assert read_trainer(tmp_path, trainer) == {"x": 1}
    assert read_written(tmp_path, 1, number=10) == trainer
    assert read_written(tmp_path, 1, number=10, run_id=7) is None

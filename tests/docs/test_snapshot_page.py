# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The reader of docs/snapshot.md reads snapshots, without this package."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from loop_pages import blocks_of, run_block
from patience import PATIENCE_S
from small_chains import NAMES, NEWEST, TABLE, weights_of, write_chain
from small_snapshots import NAME, commit, row_values
from warm_starts import Setup, ranks, same, saved

from torch_cpudist.snapshot import trees
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.parts import COLUMNS
from torch_cpudist.snapshot.reading import Snapshot

PAGE = Path(__file__).resolve().parents[2] / "docs" / "snapshot.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = blocks_of(TEXT)
READER, CHECK = BLOCKS["snapshot reader", "read"], BLOCKS["snapshot reader", "check"]


def read(folder: Path):
    names: dict = {}
    exec(READER, names)  # noqa: S102  the page's own block
    return names["read"](folder)


def check(folder: Path) -> list[str]:
    names: dict = {}
    exec(READER + CHECK, names)  # noqa: S102  the page's own blocks
    return names["check"](folder)


@pytest.fixture
def folder(tmp_path):
    directory = Directory(tmp_path / "snapshots")
    tables = {"users.weight": range(300), "items.weight": [7]}
    commit(directory, tables=tables, servers=3, part_rows=40)
    return directory.folder(NAME)


def test_it_is_as_short_as_it_is_said() -> None:
    assert len(READER.strip().splitlines()) <= 35
    assert "torch_cpudist" not in READER + CHECK


def test_the_reader_reads_what_was_saved(folder) -> None:
    tables, dense = read(folder)
    keys = np.arange(300)
    weights = np.array([tables["users.weight"][key] for key in range(300)])
    np.testing.assert_array_equal(weights, row_values(keys, 4, 0.5))
    assert list(tables["items.weight"]) == [7]
    snapshot = Snapshot(folder)
    assert dense.keys() == {"top.weight", "top.bias"}
    for name, values in dense.items():
        np.testing.assert_array_equal(values, snapshot.dense(name))
        assert values.dtype == snapshot.dense(name).dtype


def test_the_checksums_are_those_of_the_page(folder) -> None:
    shutil.rmtree(folder)
    commit(Directory(folder.parent), servers=1, trainers=1)
    assert check(folder) == []
    for name in ("s000-t000-0000.safetensors", "manifest.json"):
        whole = (folder / name).read_bytes()
        changed = bytearray(whole)
        changed[20] ^= 8
        (folder / name).write_bytes(changed)
        if name != "manifest.json":
            assert check(folder) == [name]
        else:
            changed = whole.replace(b'"Sync"', b'"Sunc"')
            (folder / name).write_bytes(changed)
            assert check(folder) == ["manifest.json"]
        (folder / name).write_bytes(whole)


def test_the_reader_reads_chains(tmp_path) -> None:
    write_chain(Directory(tmp_path), servers=2)
    tables, dense = read(tmp_path / NAMES[2])
    assert sorted(tables[TABLE]) == sorted(NEWEST)
    keys = np.array(sorted(NEWEST))
    found = np.array([tables[TABLE][int(key)] for key in keys])
    np.testing.assert_array_equal(found, weights_of(keys))
    assert dense.keys() == {"top.weight", "top.bias"}
    assert check(tmp_path / NAMES[2]) == []
    shutil.rmtree(tmp_path / NAMES[0])
    commit(Directory(tmp_path), NAMES[0])
    assert check(tmp_path / NAMES[1]) == ["manifest.json of the base"]


@pytest.mark.processes
def test_the_reader_needs_nothing_else(folder, tmp_path) -> None:
    program = tmp_path / "reader.py"
    lines = [
        "import sys",
        "sys.modules['torch'] = sys.modules['torch_cpudist'] = None",
        READER,
        f"tables, dense = read({str(folder)!r})",
        "print(len(tables['users.weight']), sorted(dense))",
    ]
    program.write_text("\n".join(lines))
    done = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("300 ['top.bias', 'top.weight']\n", "")


def test_dense_parameters_go_through_checkpoints_of_torch(tmp_path) -> None:
    """From a snapshot of a job into the model of another, wrapped and plain."""
    names = run_block(BLOCKS["checkpoints", "save"], "checkpoints", {})
    run_block(BLOCKS["checkpoints", "load"], "checkpoints", names)
    setup = Setup(average=0.9)
    values, _ = saved(setup, tmp_path)
    dense = {name: one for name, one in values.items() if name.startswith("top.")}
    names["to_checkpoint"](tmp_path / "here", tmp_path / "checkpoint")

    def body(job):
        job.train(0, 2)
        rows = job.rows("a")
        names["from_checkpoint"](tmp_path / "checkpoint", job.model, job.opt)
        found = job.values()
        assert same({name: found[name] for name in dense}, dense)
        assert torch.equal(found["a.weight"], rows)
        job.train(2, 4)
        return job.values()

    one, other = ranks(dataclasses.replace(setup, seed=2), None, body)
    assert same(one, other)
    plain = setup.model()
    names["from_checkpoint"](tmp_path / "checkpoint", plain)
    assert same({name: plain.get_parameter(name) for name in dense}, dense)


def test_the_commands_are_those_that_there_are(folder, capsys) -> None:
    from torch_cpudist.snapshot.tools.commands import main

    calls = [
        line.split("#")[0].split()[3:]
        for line in TEXT.splitlines()
        if line.startswith("python -m torch_cpudist.snapshot")
    ]
    assert [call[0] for call in calls] == [
        *("compact", "list", "verify", "rows", "diff")
    ]
    commit(Directory(folder.parent), "other", servers=1, trainers=1)
    words = {
        "DIR": str(folder.parent),
        "TABLE": "users.weight",
        "KEY...": "3",
        "DIR/ONE": str(folder),
        "DIR/OTHER": str(folder.parent / "other"),
    }
    compact, *calls = calls
    chain = folder.parents[1] / "chain"
    write_chain(Directory(chain), servers=1, trainers=1)
    assert compact[1:] == ["DIR", "[NAME]"]
    assert main(["compact", str(chain)]) == 0
    assert capsys.readouterr().out.startswith(f"{NAMES[2]}-full ")
    assert main(["compact", str(chain), NAMES[1]]) == 0
    assert capsys.readouterr().out.startswith(f"{NAMES[1]}-full ")
    for call in calls:
        code = main([words.get(word, word) for word in call])
        assert code == (1 if call[0] == "diff" else 0)
        assert NAME in capsys.readouterr().out or call[0] == "rows"


def test_the_page_has_every_field_and_every_mark(folder) -> None:
    """Of manifests and states all fields, of rows all columns, of trees all marks."""

    def fields_of(value) -> set[str]:
        if isinstance(value, list):
            return set().union(*map(fields_of, value))
        if not isinstance(value, dict):
            return set()
        named = {key: item for key, item in value.items() if key != "options"}
        options = {"options"} & value.keys()
        return {*named, *options}.union(*map(fields_of, named.values()))

    manifest = json.loads((folder / "manifest.json").read_text())
    manifest.pop("param_groups")
    trainer = json.loads((folder / "trainer-000.json").read_text())
    trainer.pop("state")
    documented = set(re.findall(r"`([^`\n]+)`", TEXT))
    fields = fields_of(manifest) | fields_of(trainer) | {"param_groups", "state"}
    assert len(fields) > 40
    assert fields - documented == set()
    columns = {*COLUMNS, "bucket_begin"}
    assert columns - documented == set()
    marks = set(re.findall(r'"(\$\w+)"', Path(trees.__file__).read_text()))
    assert len(marks) >= 10
    assert {mark for mark in marks if mark not in TEXT} == set()

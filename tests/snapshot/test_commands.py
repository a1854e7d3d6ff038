# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``python -m torch_cpudist.snapshot``: what it prints and how it ends."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest
from patience import PATIENCE_S
from small_snapshots import NAME, columns_of, commit, entry, write, write_tensors

from torch_cpudist.snapshot import names, parts
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.member import DENSE_FORMAT
from torch_cpudist.snapshot.reading import Snapshot
from torch_cpudist.snapshot.tools.commands import main


@pytest.fixture
def directory(tmp_path):
    found = Directory(tmp_path)
    commit(found, tables={"users.weight": range(40), "items.weight": range(5)})
    return found


@pytest.fixture
def run(capsys):
    def call(*arguments: object) -> tuple[int, str, str]:
        code = main([str(one) for one in arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def flip(path, at: int = 9000) -> None:
    contents = bytearray(path.read_bytes())
    contents[at] ^= 1
    path.write_bytes(contents)


def test_list(directory, run) -> None:
    commit(directory, "best", number=40, servers=1, trainers=1)
    folder = directory.prepare("snap-000000000099-5f3a")
    (folder / "s000-dense.safetensors").write_bytes(b"")
    (directory.path / "notes").mkdir()
    code, out, _ = run("list", directory.path)
    assert code == 0
    newest, older, begun = out.splitlines()
    assert newest.startswith("best  ")
    assert "Sync  update 40, 14 rows" in newest
    assert newest.endswith(" 1 server, 1 trainer")
    assert older.startswith(NAME)
    assert "45 rows" in older
    assert "2 servers, 2 trainers" in older
    assert begun == "snap-000000000099-5f3a  not committed: no snapshot"
    code, out, _ = run("list", "--json", directory.path)
    found = json.loads(out)
    assert [one["name"] for one in found["snapshots"]] == ["best", NAME]
    assert found["uncommitted"] == ["snap-000000000099-5f3a"]
    assert found["snapshots"][1]["tables"] == {"users.weight": 40, "items.weight": 5}
    assert found["snapshots"][1]["bytes"] > 10_000


def test_list_of_nothing(tmp_path, run) -> None:
    assert run("list", tmp_path) == (0, f"no snapshots in {tmp_path}\n", "")
    code, _, said = run("list", tmp_path / "gone")
    assert code == 2
    assert "is no directory" in said


def test_list_names_damaged_manifests(directory, run) -> None:
    flip(directory.folder(NAME) / names.MANIFEST, 100)
    code, out, _ = run("list", directory.path)
    assert code == 1
    assert f"{NAME}  damaged: " in out


def test_verify(directory, run) -> None:
    commit(directory, "best", number=40, servers=1, trainers=1)
    code, out, _ = run("verify", directory.path)
    assert code == 0
    assert out.count("are as they were written") == 2
    flip(directory.folder(NAME) / "s001-t000-0000.safetensors")
    flip(directory.folder(NAME) / "trainer-001.safetensors", -1)
    code, out, _ = run("verify", directory.path)
    assert code == 1
    assert out.count("DAMAGED") == 2
    assert "s001-t000-0000.safetensors of table 'users.weight' is damaged" in out
    assert "best  " in out
    code, out, _ = run("verify", "--json", directory.folder(NAME))
    (found,) = json.loads(out)["snapshots"]
    assert [(one["file"], one["table"]) for one in found["damaged"]] == [
        ("s001-t000-0000.safetensors", "users.weight"),
        ("trainer-001.safetensors", ""),
    ]
    assert code == 1
    assert run("verify", directory.folder("best"))[0] == 0


def test_verify_of_a_damaged_manifest(directory, run) -> None:
    flip(directory.folder(NAME) / names.MANIFEST, 100)
    code, out, _ = run("verify", directory.folder(NAME))
    assert code == 1
    assert "manifest.json is damaged" in out


def test_verify_of_what_is_no_snapshot(tmp_path, run) -> None:
    code, _, said = run("verify", tmp_path)
    assert code == 2
    assert "is no snapshot" in said


def test_rows(directory, run) -> None:
    code, out, _ = run("rows", directory.path, "users.weight", 3, 39)
    assert code == 0
    head, three, last = out.splitlines()
    assert head == f"{NAME}, table users.weight, 4 elements"
    assert three.startswith("3  weight [3.5, 3.5625, 3.625, 3.6875]")
    assert "count 3" in three
    assert last.startswith("39  ")
    code, out, _ = run("rows", "--json", directory.folder(NAME), "users.weight", 3, 40)
    three, none = json.loads(out)["rows"]
    assert three["weight"] == [3.5, 3.5625, 3.625, 3.6875]
    assert three["last_seen"] == 3
    assert none == {"key": 40, "found": False}
    assert code == 1
    assert "no row" in run("rows", directory.path, "users.weight", 40)[1]


def test_rows_that_cannot_be(directory, run) -> None:
    code, _, said = run("rows", directory.path, "user", 3)
    assert code == 2
    assert "no table 'user', only ['users.weight', 'items.weight']" in said
    code, _, said = run("rows", directory.path, "users.weight", 2**40)
    assert code == 2
    assert "are none" in said


def test_rows_of_a_damaged_file(directory, run) -> None:
    for server in (0, 1):
        flip(directory.folder(NAME) / f"s00{server}-t000-0000.safetensors")
    code, out, said = run("rows", directory.path, "users.weight", 3)
    assert code == 1
    assert "is damaged" in said
    assert out == ""


def test_diff_of_equals_over_other_servers(directory, run) -> None:
    tables = {"items.weight": range(5), "users.weight": range(40)}
    commit(directory, "other", tables=tables, servers=3, part_rows=7)
    code, out, _ = run("diff", directory.folder(NAME), directory.folder("other"))
    assert code == 0
    assert "all parameters are equal" in out
    assert "users.weight: equal" in out


def test_diff(directory, run) -> None:
    manifest = write(
        directory, "other", tables={"users.weight": range(3, 42)}, servers=1
    )
    path = directory.folder("other") / str(names.PartName(0, 0))
    columns = columns_of(np.arange(3, 42), manifest.tables[0], average=True)
    at = {key: np.flatnonzero(columns["keys"] == key)[0] for key in (5, 6, 7, 8)}
    columns["weight"][at[5], 1] += 2
    columns["weight"][at[6], 0] = np.nan
    columns["count"][at[7]] += 1
    columns["state"][at[8], 3] = -0.0
    contents = write_tensors(directory.files, path, columns, parts.FORMAT)
    rest = [file for file in manifest.files if file.table is None]
    directory.commit(
        dataclasses.replace(manifest, files=(*rest, entry(path.name, contents, 0, 39)))
    )
    code, out, _ = run("diff", directory.folder(NAME), directory.folder("other"))
    assert code == 1
    assert "items.weight: only in the first" in out
    assert (
        "users.weight: 3 rows only in the first, 2 only in the second, 4 differ, "
        "weights by at most inf" in out
    )
    assert "top.weight: equal" in out
    out = run("diff", "--json", directory.folder(NAME), directory.folder("other"))[1]
    found = {one["name"]: one for one in json.loads(out)["parameters"]}
    assert found["users.weight"]["changed"] == 4
    assert found["users.weight"]["largest"] == "inf"


def test_diff_of_other_columns(directory, run) -> None:
    commit(directory, "plain", average=False, servers=1)
    code, out, _ = run("diff", directory.folder(NAME), directory.folder("plain"))
    assert code == 1
    assert "users.weight: columns" in out


def test_diff_of_dense_parameters(directory, run) -> None:
    manifest = write(directory, "other", servers=1)
    path = directory.folder("other") / str(names.PartName(0, None))
    snapshot = Snapshot(directory.folder(NAME))
    tensors = {}
    for dense in snapshot.manifest.dense:
        for block in dense.blocks:
            tensors[f"{block.name}.weight"] = snapshot.block_weight(dense, block).copy()
            if dense.state:
                tensors[f"{block.name}.state"] = snapshot.block_state(dense, block)
            tensors[f"{block.name}.average"] = snapshot.block_average(dense, block)
    tensors["top.weight.block1.weight"][2] += 0.5
    tensors["top.bias.weight"][0] += 1e-9
    contents = write_tensors(directory.files, path, tensors, DENSE_FORMAT)
    rest = [file for file in manifest.files if file.table is not None]
    files = (*rest, entry(path.name, contents, None, 0))
    directory.commit(dataclasses.replace(manifest, files=files))
    code, out, _ = run("diff", directory.folder(NAME), directory.folder("other"))
    assert code == 1
    assert "top.weight: 1 elements differ, by at most 0.5" in out
    assert "top.bias: 1 elements differ, by at most 1e-09" in out


def test_what_is_no_command(run, capsys) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["lost"])
    assert raised.value.code == 2
    assert "list" in capsys.readouterr().err


@pytest.mark.processes
def test_as_a_program(directory) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch_cpudist.snapshot", "list", directory.path],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(NAME)

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Runs every block of docs/migrating_fluid.md and docs/migrating_fluid_data.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
from fluid_names import NAMES
from fluid_rows import absent, claims, exists, references, rows

pytestmark = pytest.mark.usefixtures("in_a_folder")
DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = [DOCS / "migrating_fluid.md", DOCS / "migrating_fluid_data.md"]
TEXT = "\n".join(page.read_text() for page in PAGES)
BLOCKS = re.findall(r"<!-- (\w+): (\S+) -->\n```python\n(.*?)```", TEXT, re.DOTALL)


def blocks(kind: str) -> dict[str, str]:
    return {about: body for found, about, body in BLOCKS if found == kind}


def execute(body: str, names: dict | None = None) -> dict:
    names = {"__name__": "__main__"} if names is None else names
    exec(compile(body, "migrating_fluid", "exec"), names)  # noqa: S102
    return names


def test_every_block_is_tagged_once():
    assert TEXT.count("\n```") == 2 * len(BLOCKS)
    assert {kind for kind, _, _ in BLOCKS} == {"fluid", "script", "start", "run"}
    assert len({(kind, about) for kind, about, _ in BLOCKS}) == len(BLOCKS)


@pytest.mark.parametrize("about", blocks("fluid"))
def test_blocks_of_fluid_are_python(about):
    ast.parse(blocks("fluid")[about])


def test_the_script_trains_and_saves(tmp_path):
    model = execute(blocks("script")["train.py"])["model"]
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    assert all(torch.equal(saved[k], v) for k, v in model.state_dict().items())


@pytest.mark.parametrize("about", blocks("run"))
def test_a_block_runs(about):
    names = execute(blocks("start")["model"])
    before = {
        name: value.clone() for name, value in names["model"].state_dict().items()
    }
    execute(blocks("run")[about], names)
    if "step" in blocks("run")[about] or "train(" in blocks("run")[about]:
        after = names["model"].state_dict()
        # Those of an open table are in no state_dict().
        shared = before.keys() & after.keys()
        assert any(not torch.equal(after[name], before[name]) for name in shared)


def prose(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for name, anchor in re.findall(r"\]\(([\w./]*)#?([^)]*)\)", prose(page)):
        heads = re.findall(
            r"^#+ (.+)$", prose(DOCS / (name or page.name)), re.MULTILINE
        )
        slugs = [re.sub(r"[^\w -]", "", head).lower() for head in heads]
        assert not anchor or anchor in [slug.replace(" ", "-") for slug in slugs]


@pytest.mark.parametrize("area", NAMES)
def test_every_name_has_a_place(area):
    text = "".join(prose(page) for page in PAGES)
    words = NAMES[area].split()
    assert [word for word in words if not re.search(re.escape(word), text)] == []


ROWS = [(page.name, *row) for page in PAGES for row in rows(page.read_text())]


@pytest.mark.parametrize(
    ("page", "fluid", "answer"), ROWS, ids=[f"{p}-{f[:40]}" for p, f, _ in ROWS]
)
def test_a_row_names_what_is_there(page, fluid, answer):
    found = references(answer)
    gone = [one for one in found if claims(one) and not exists(one)]
    assert gone == [], f"{page}: {fluid}"
    assert absent(answer) or any(map(exists, found)), f"{page}: {fluid} names nothing"


def test_all_rows_are_read():
    # Of every list below "What Fluid has".
    items = sum(page.read_text().count("\n- ") for page in PAGES)
    assert len(ROWS) == items > 150
    assert ("migrating_fluid.md", "`transpile(", True) in {
        (page, fluid[:11], "init()" in answer) for page, fluid, answer in ROWS
    }


@pytest.mark.parametrize(
    "there",
    [
        "cpudist.init()",
        "Geo(push_every=100)",
        "cpudist.optim.RowWiseAdagrad",
        "Communicator(max_merge=, merge_rule=, send_queue_size=)",
        "CPUDIST_BACKEND=nccl",
        "CPUDIST_SEND_THREADS",
        "executor.replicas",
        "torchrun --nproc-per-node --nnodes",
        "threads=",
        "tests/docs/test_migrating_fluid.py::test_all_rows_are_read",
    ],
)
def test_what_is_there_is_found(there):
    assert exists(there)


@pytest.mark.parametrize(
    "gone",
    [
        "cpudist.start()",
        "Geo(push_each=100)",
        "cpudist.optim.Lamb",
        "Communicator(max_merge=, pool=)",
        "CPUDIST_BACKENDS=nccl",
        "executor.count",
        "tests/docs/test_migrating_fluid.py::test_gone",
        "tests/docs/test_gone.py::test_all_rows_are_read",
    ],
)
def test_what_is_gone_is_noticed(gone):
    assert claims(gone)
    assert not exists(gone)
    assert not absent(gone)


def test_a_row_that_says_none_says_why():
    assert absent("none: there are no scopes")
    assert not absent("none")
    assert not absent("none: for GPUs")
    assert not absent("the same")

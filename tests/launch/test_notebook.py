# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``cpudist.launch`` in a real Jupyter kernel."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from patience import PATIENCE_S

nbformat = pytest.importorskip("nbformat", reason="the extra integrations")
nbclient = pytest.importorskip("nbclient", reason="the extra integrations")
pytest.importorskip("ipykernel", reason="the extra integrations")

pytestmark = [pytest.mark.processes, pytest.mark.integrations]

ROOT = Path(__file__).resolve().parents[2]
CELLS = (
    "import torch, torch_cpudist as cpudist\nfactor = torch.tensor(3.0)",
    # A function of a cell, with a value of another one, after torch has computed here.
    "(torch.ones(500, 500) @ torch.ones(500, 500)).sum()\n"
    "def work(number):\n"
    "    cpudist.init()\n"
    "    total = torch.tensor(float(cpudist.trainer_rank() + 1)) * factor * number\n"
    "    torch.distributed.all_reduce(total)\n"
    "    print('total', total.item())\n"
    "    if number < 0:\n"
    "        raise ValueError(f'rank {cpudist.trainer_rank()} has {number}')\n"
    "    cpudist.shutdown()\n"
    "    return total.item()",
    "cpudist.launch(work, (2,), nprocs=2)",
    "try:\n"
    "    cpudist.launch(work, (-1,), nprocs=2)\n"
    "except cpudist.RankFailedError as error:\n"
    "    print(str(error)[-20:], error.rank in (0, 1))",
    "import os\n"
    "ps = os.popen(f'ps --no-headers --ppid {os.getpid()} -o stat').read()\n"
    "print(ps.count('Z'))",
)


def test_functions_of_cells_run_in_several_processes(monkeypatch):
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("CPUDIST_THREADS", "1")
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(text) for text in CELLS]
    nbclient.NotebookClient(
        notebook, timeout=PATIENCE_S, kernel_name="python3"
    ).execute()

    def said(number, kind):
        outputs = notebook.cells[number].outputs
        if kind == "stdout":
            return "".join(one.text for one in outputs if one.get("name") == "stdout")
        return [one.data["text/plain"] for one in outputs if "data" in one][-1]

    assert said(2, "result") == "[18.0, 18.0]"
    for rank in range(2):
        assert f"[rank {rank}] total 18.0\n" in said(2, "stdout")
    assert said(3, "stdout").splitlines()[-1].endswith(" has -1 True")
    assert said(4, "stdout").split() == ["0"]

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The click-through example without a vocabulary, and the files that it makes."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path

import criteo
import criteo_data
import printed
import pytest
from patience import PATIENCE_S
from programs import ROOT, Launcher

from torch_cpudist.data import QueueDataset, criteo_slots

SCRIPT = str(ROOT / "examples/criteo/criteo.py")
TRAINERS, BATCH, COUNT = 2, 128, 3


def pushes_of_keys(files: list[Path]) -> Counter[tuple[str, int]]:
    """In how many batches of some trainer each value of a column is."""
    found: Counter[tuple[str, int]] = Counter()
    for rank in range(TRAINERS):
        batches = QueueDataset(
            files, criteo_slots(), format="criteo", batch_size=BATCH, shuffle=True,
            threads=1, share=(rank, TRAINERS),
        )  # fmt: skip
        for batch in batches:
            for name in criteo.CATEGORIES:
                found.update((name, key) for key in set(batch[name].ids.tolist()))
    return found


def test_rows_are_those_of_keys_that_came_often_enough(
    launch_forks: Launcher, tmp_path: Path
) -> None:
    made = {"--data": tmp_path, "--rows": 1500, "--keys": 20_000, "--exponent": 1.05}
    told = {"--count-filter": COUNT, "--batch-size": BATCH, "--print-every": 2}
    told["--results"] = results = tmp_path / "results.json"
    words = [str(word) for pair in {**made, **told}.items() for word in pair]
    start = ["torchrun", "--standalone", f"--nproc-per-node={TRAINERS}"]
    program = launch_forks([*start, SCRIPT, "--open", *words], CPUDIST_THREADS=1)
    assert program.wait(PATIENCE_S) == 0, program.text()
    figures = json.loads(results.read_text())
    (table,) = figures["tables"].values()
    pushes = pushes_of_keys(sorted(tmp_path.glob("train-*.tsv")))
    kept = sum(count >= COUNT for count in pushes.values())
    assert 0 < kept < len(pushes) / 2
    assert table["rows"] == kept
    assert table["filtered"] == sum(min(n, COUNT - 1) for n in pushes.values())
    assert table["evicted"] == 0
    assert 0.5 < figures["auc"] < figures["ceiling"]
    (said,) = re.findall(r"table\.weight: ([\d,]+) rows,", program.text())
    assert int(said.replace(",", "")) == kept
    # Of trainer 0: the other one's are the same, before or after these.
    own = r"^(?:trainer 0: |[\d,]+ samples/s |test: |embeddings\.).*$"
    lines = re.findall(own, program.text(), re.MULTILINE)
    printed.check("criteo", "\n".join(lines))


def test_made_files_have_as_many_keys_as_were_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = criteo_data.Keys(26 * 30, exponent=0.5)
    made = criteo_data.prepare(tmp_path, 2000, 2, keys=keys)
    lines = [line for file in made["train"] for line in file.open()]
    assert len(lines) == 2000
    cells = [line.rstrip("\n").split("\t") for line in lines]
    for column in range(criteo_data.CATEGORIES):
        values = {line[-criteo_data.CATEGORIES + column] for line in cells}
        assert len(values - {""}) == 30
    monkeypatch.setattr(sys, "argv", ["criteo_data.py", str(tmp_path), "--rows", "20"])
    criteo_data.main()
    printed.check("criteo-data", capsys.readouterr().out)
    # Files of other keys are others.
    plain = criteo_data.prepare(tmp_path, 2000, 2)
    assert not {*plain["train"]} & {*made["train"]}


def test_keys_of_fewer_than_columns_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one for each of 26 columns"):
        criteo_data.Keys(25)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--open --strategy geo", "--open trains with sync, half_async, async, hybrid"),
        ("--count-filter 2", "--count-filter and --max-rows are for --open"),
        ("--max-rows 2", "--count-filter and --max-rows are for --open"),
        ("--files a", "expected --files and --test together"),
    ],
)
def test_what_would_change_nothing_is_refused(
    words: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["criteo.py", *words.split()])
    with pytest.raises(SystemExit) as ended:
        criteo.parse_arguments()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err

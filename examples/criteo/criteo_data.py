# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Files in Criteo's format with labels that a hidden model draws.

A line: a label, 13 whole numbers and 26 categorical values of 8 hexadecimal digits,
between tabs, with values missing. The hidden model knows a weight per categorical value
and per number, so the AUC of a trained model has a known ceiling: the hidden one's.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

NUMBERS, CATEGORIES = 13, 26
MISSING_NUMBERS, MISSING_CATEGORIES = 0.2, 0.05
VOCABULARY = 100_000  # of the largest categorical column; others are smaller
EXPONENT = 1.2  # of the ranks' Zipf distribution
POSITIVE_SHARE = 0.25
SCORE_STD = 1.6
CHUNK_ROWS = 50_000

Floats = NDArray[np.float64]


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _weights(codes: NDArray[np.uint64]) -> Floats:
    """A weight of standard normal size for every value, out of its bits alone."""
    mixed = _mixed(codes + np.uint64(0x9E3779B97F4A7C15))
    halves = np.stack([mixed >> np.uint64(32), mixed & np.uint64(0xFFFFFFFF)])
    uniform = (halves.astype(np.float64) + 0.5) / 2**32
    # Box and Muller 1958.
    return np.sqrt(-2 * np.log(uniform[0])) * np.cos(2 * np.pi * uniform[1])


def _draw(generator: np.random.Generator, rows: int) -> tuple[Any, Any, Any, Floats]:
    """Numbers, categorical codes, what is missing of either, and the hidden scores."""
    numbers = np.floor(np.exp(generator.normal(1.0, 1.5, (rows, NUMBERS)))) - 1
    ranks = np.empty((rows, CATEGORIES), dtype=np.uint64)
    for column in range(CATEGORIES):
        size = max(10, VOCABULARY >> (column // 2))
        share = 1 / np.arange(1, size + 1) ** EXPONENT
        steps = np.cumsum(share / share.sum())
        drawn = np.searchsorted(steps, generator.random(rows))
        ranks[:, column] = np.minimum(drawn, size - 1)
    columns = np.arange(CATEGORIES, dtype=np.uint64) << np.uint64(40)
    codes = _mixed(ranks + columns) & np.uint64(0xFFFFFFFF)
    no_number = generator.random((rows, NUMBERS)) < MISSING_NUMBERS
    no_code = generator.random((rows, CATEGORIES)) < MISSING_CATEGORIES
    slopes = _weights(np.arange(NUMBERS, dtype=np.uint64))
    logs = np.where(no_number, 0, np.log1p(np.maximum(numbers, 0)) - 1)
    scores = logs @ slopes + np.where(no_code, 0, _weights(codes + columns)).sum(axis=1)
    return (numbers.astype(np.int64), no_number), (codes, no_code), ranks, scores


def _lines(labels: Any, numbers: Any, codes: Any) -> str:
    columns = [labels.astype(np.int64).astype(str).tolist()]
    for values, missing, form in ((*numbers, "{:d}"), (*codes, "{:08x}")):
        for column in range(values.shape[1]):
            texts = map(form.format, values[:, column].tolist())
            gaps = missing[:, column].tolist()
            columns.append(
                ["" if gap else text for text, gap in zip(texts, gaps, strict=True)]
            )
    return "\n".join(map("\t".join, zip(*columns, strict=True))) + "\n"


def write(path: Path, rows: int, seed: int) -> dict[str, float]:
    """Writes a file, whole or not at all; equal arguments write equal bytes.

    Returns:
        ``rows``, ``positive_share``, and the ``auc`` of the hidden model.
    """
    generator = np.random.default_rng(seed)
    partial = path.with_suffix(".partial")
    all_scores, all_labels = [], []
    with partial.open("w", encoding="ascii") as file:
        for begin in range(0, rows, CHUNK_ROWS):
            count = min(CHUNK_ROWS, rows - begin)
            numbers, codes, _, scores = _draw(generator, count)
            scores *= SCORE_STD / np.sqrt(NUMBERS + CATEGORIES)
            offset = np.log(POSITIVE_SHARE / (1 - POSITIVE_SHARE))
            chances = 1 / (1 + np.exp(-(scores + offset)))
            labels = generator.random(count) < chances
            file.write(_lines(labels, numbers, codes))
            all_scores.append(scores)
            all_labels.append(labels)
    labels, scores = np.concatenate(all_labels), np.concatenate(all_scores)
    facts = {
        "rows": rows,
        "positive_share": float(labels.mean()),
        "auc": auc(scores, labels),
    }
    partial.replace(path)
    return facts


def auc(scores: Floats, labels: NDArray[np.bool_]) -> float:
    """The area under the ROC curve of scores that are all different."""
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores, kind="stable")] = np.arange(1, len(scores) + 1)
    positive = int(labels.sum())
    area = ranks[labels].sum() - positive * (positive + 1) / 2
    return float(area / (positive * (len(labels) - positive)))


def prepare(folder: Path, rows: int, parts: int, seed: int = 7) -> dict[str, Any]:
    """Makes training files and a test file unless they are there.

    Returns:
        ``train`` (paths), ``test`` (a path) and ``ceiling``, the AUC of the hidden
        model on the test file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{rows}-{parts}-{seed}"
    train = [folder / f"train-{name}-{part}.tsv" for part in range(parts)]
    test, facts = folder / f"test-{name}.tsv", folder / f"facts-{name}.json"
    if not facts.is_file():
        for part, path in enumerate(train):
            write(path, rows * (part + 1) // parts - rows * part // parts, seed + part)
        found = write(test, max(1000, rows // 10), seed + parts)
        facts.write_text(json.dumps(found) + "\n", encoding="utf-8")
    ceiling = json.loads(facts.read_text(encoding="utf-8"))["auc"]
    return {"train": train, "test": test, "ceiling": ceiling}


def main() -> None:
    """Writes files from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="where to write")
    parser.add_argument("--rows", type=int, default=200_000, help="of all train files")
    parser.add_argument("--parts", type=int, default=4, help="training files")
    options = parser.parse_args()
    print(json.dumps(prepare(options.folder, options.rows, options.parts), default=str))


if __name__ == "__main__":
    main()

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Files in Criteo's format with labels that a hidden model draws.

A line: a label, 13 whole numbers and 26 categorical values of 8 hexadecimal digits,
between tabs, with values missing. The hidden model knows a weight per categorical value
and per number, so the AUC of a trained model has a known ceiling: the hidden one's.

By default a column has at most 100,000 values. With ``--keys`` all columns together
have so many, most of which are then seen once or never, as in logs of a real site.
"""

from __future__ import annotations

import argparse
import functools
import json
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Keys:
    """How many values the categorical columns have, and how often each is drawn.

    Attributes:
        total: of all columns together, dealt evenly; None: `VOCABULARY` in the first
            two columns, and half of that in every second one that follows.
        exponent: of the Zipf distribution of a column's ranks.
    """

    total: int | None = None
    exponent: float = EXPONENT

    def __post_init__(self) -> None:
        """Refuse what leaves a column without a value."""
        if self.total is not None and self.total < CATEGORIES:
            raise ValueError(
                f"keys: expected at least one for each of {CATEGORIES} columns, "
                f"found {self.total}"
            )

    def of_column(self, column: int) -> int:
        """How many values a column has."""
        if self.total is None:
            return max(10, VOCABULARY >> (column // 2))
        return self.total // CATEGORIES

    def steps(self, column: int) -> Floats:
        """The share of draws of a column that have this rank or a lower one."""
        return _steps(self.of_column(column), self.exponent)

    def in_names(self) -> str:
        """What sets files of these keys apart from those of the default ones."""
        return "" if self == Keys() else f"-{self.total}-{self.exponent:g}"


@functools.lru_cache(maxsize=CATEGORIES)
def _steps(size: int, exponent: float) -> Floats:
    share = 1 / np.arange(1, size + 1) ** exponent
    return np.cumsum(share / share.sum())


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


def _draw(
    generator: np.random.Generator, rows: int, keys: Keys
) -> tuple[Any, Any, Any, Floats]:
    """Numbers, categorical codes, what is missing of either, and the hidden scores."""
    numbers = np.floor(np.exp(generator.normal(1.0, 1.5, (rows, NUMBERS)))) - 1
    ranks = np.empty((rows, CATEGORIES), dtype=np.uint64)
    for column in range(CATEGORIES):
        steps = keys.steps(column)
        drawn = np.searchsorted(steps, generator.random(rows))
        ranks[:, column] = np.minimum(drawn, len(steps) - 1)
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


def write(path: Path, rows: int, seed: int, keys: Keys = Keys()) -> dict[str, float]:
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
            numbers, codes, _, scores = _draw(generator, count, keys)
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


def prepare(
    folder: Path, rows: int, parts: int, seed: int = 7, keys: Keys = Keys()
) -> dict[str, Any]:
    """Makes training files and a test file unless they are there.

    Returns:
        ``train`` (paths), ``test`` (a path) and ``ceiling``, the AUC of the hidden
        model on the test file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{rows}-{parts}-{seed}{keys.in_names()}"
    train = [folder / f"train-{name}-{part}.tsv" for part in range(parts)]
    test, facts = folder / f"test-{name}.tsv", folder / f"facts-{name}.json"
    if not facts.is_file():
        for part, path in enumerate(train):
            count = rows * (part + 1) // parts - rows * part // parts
            write(path, count, seed + part, keys)
        found = write(test, max(1000, rows // 10), seed + parts, keys)
        facts.write_text(json.dumps(found) + "\n", encoding="utf-8")
    ceiling = json.loads(facts.read_text(encoding="utf-8"))["auc"]
    return {"train": train, "test": test, "ceiling": ceiling}


def add_keys(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say what values the columns have."""
    add = parser.add_argument
    add("--keys", type=int, help="possible values of all columns of made files")
    add("--exponent", type=float, default=EXPONENT, help="of their Zipf distribution")


def keys_of(options: argparse.Namespace) -> Keys:
    """Returns what the options of ``add_keys`` say."""
    return Keys(options.keys, options.exponent)


def main() -> None:
    """Writes files from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="where to write")
    parser.add_argument("--rows", type=int, default=200_000, help="of all train files")
    parser.add_argument("--parts", type=int, default=4, help="training files")
    add_keys(parser)
    options = parser.parse_args()
    made = prepare(options.folder, options.rows, options.parts, keys=keys_of(options))
    print(json.dumps(made, default=str))


if __name__ == "__main__":
    main()

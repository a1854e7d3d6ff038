# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What word2vec.py says about its vectors: WordSim-353, and files of vectors.

WordSim-353 (Finkelstein et al., "Placing Search in Context", 2002) has 353 pairs of
words and how alike people found them. The list is read where gensim's package has it,
installed or as a wheel.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from word2vec_data import DataError

LIST_IN_PACKAGE = "gensim/test/test_data/wordsim353.tsv"
WHEEL = "gensim-*.whl"
HOW_TO_GET = "`pip install gensim==4.4.0`, or `pip download --no-deps gensim==4.4.0`"

Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Similarity:
    """How well cosines of vectors follow people's judgement.

    Attributes:
        rho: Spearman's rank correlation over the pairs whose words are known.
        pairs: how many these are.
        unknown: share of all pairs that has a word without a vector.
    """

    rho: float
    pairs: int
    unknown: float


def find_list(place: Path | None, folder: Path) -> str | None:
    """Return the text of WordSim-353, or `None` when it is nowhere.

    Args:
        place: the list, or a wheel of gensim; `None`: gensim where it is installed,
            else a wheel in `folder`.
        folder: where downloads are kept.

    Raises:
        DataError: `place` is missing or has no such list.
    """
    if place is None:
        spec = util.find_spec("gensim")
        for root in (spec.submodule_search_locations or []) if spec else []:
            found = Path(root).parent / LIST_IN_PACKAGE
            if found.is_file():
                return found.read_text("utf-8")
        wheels = sorted(folder.glob(WHEEL))
        if not wheels:
            return None
        place = wheels[-1]
    if not place.is_file():
        raise DataError(f"{place} is missing: to get WordSim-353, {HOW_TO_GET}")
    if not zipfile.is_zipfile(place):
        return place.read_text("utf-8")
    with zipfile.ZipFile(place) as wheel:
        try:
            return wheel.read(LIST_IN_PACKAGE).decode("utf-8")
        except KeyError:
            raise DataError(
                f"{place}: expected {LIST_IN_PACKAGE} in it, found none; {HOW_TO_GET}"
            ) from None


def read_pairs(text: str) -> list[tuple[str, str, float]]:
    """Return the pairs of a list: two words and a number a line, tabs between.

    Raises:
        DataError: a line is something else, or there is none.
    """
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("#") or not line.strip():
            continue
        try:
            first, second, judgement = line.split("\t")
            found.append((first.lower(), second.lower(), float(judgement)))
        except ValueError:
            raise DataError(
                f"line {number} of the word pairs: expected two words and a number "
                f"with tabs between, found {line!r}"
            ) from None
    if not found:
        raise DataError("expected word pairs, found none")
    return found


def ranks(values: Sequence[float]) -> npt.NDArray[np.float64]:
    """Return the rank of each value from 1; equal ones share their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    mean_rank: npt.NDArray[np.float64] = np.cumsum(counts) - (counts - 1) / 2
    return mean_rank[inverse]


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's rank correlation; nan for fewer than two different values."""
    with np.errstate(invalid="ignore"):
        return float(np.corrcoef(ranks(first), ranks(second))[0, 1])


def similarity(
    words: Sequence[str], vectors: Vectors, pairs: Sequence[tuple[str, str, float]]
) -> Similarity:
    """Score vectors ``[len(words), dim]`` by word pairs."""
    place = {word: row for row, word in enumerate(words)}
    known = [pair for pair in pairs if pair[0] in place and pair[1] in place]
    lengths = np.linalg.norm(vectors, axis=1)
    cosines = []
    for first, second, _ in known:
        i, j = place[first], place[second]
        scale = max(float(lengths[i] * lengths[j]), np.finfo(np.float32).tiny)
        cosines.append(float(vectors[i] @ vectors[j]) / scale)
    rho = spearman([p[2] for p in known], cosines) if len(known) > 1 else float("nan")
    return Similarity(rho, len(known), 1 - len(known) / len(pairs))


def score(
    place: Path | None, folder: Path, words: Sequence[str], vectors: Vectors
) -> dict[str, Any]:
    """Print and return the score of vectors, if WordSim-353 is at hand.

    Args:
        place: as of ``find_list``.
        folder: the same.
        words: of the vectors.
        vectors: ``[len(words), dim]``.
    """
    text = find_list(place, folder)
    if text is None:
        print(f"not scored: WordSim-353 is not at hand; {HOW_TO_GET}", flush=True)
        return {"rho": None}
    found = similarity(words, vectors, read_pairs(text))
    print(
        f"WordSim-353: rho {found.rho:.3f} over {found.pairs} pairs, "
        f"{found.unknown:.1%} unknown",
        flush=True,
    )
    return {"rho": found.rho, "scored": found.pairs, "unknown": found.unknown}


def save_vectors(path: Path, words: Sequence[str], vectors: Vectors) -> None:
    """Write vectors in word2vec's text form: a line of sizes, then a word a line."""
    with path.open("w", encoding="utf-8") as file:
        file.write(f"{len(words)} {vectors.shape[1]}\n")
        for word, vector in zip(words, vectors, strict=True):
            file.write(f"{word} {' '.join(f'{value:.6g}' for value in vector)}\n")

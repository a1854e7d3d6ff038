# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Click data with planted labels for the case ``ctr``.

Every slot has ids of its own, Zipf distributed; a label is drawn from a hidden model
with a linear and a factorisation-machine part, so the AUC of a trained model means
something and has a known ceiling, the AUC of the hidden model itself.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# Raised when the same specification gives other data than before.
GENERATOR_VERSION = 1
CHUNK_SAMPLES = 65_536
LATENT_DIM = 4
PARTS = ("train", "test")

Ids = NDArray[np.int32]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class CtrSpec:
    """What is drawn; the same specification gives the same bytes on every machine."""

    slots: int = 26
    rows: int = 1_000_000
    exponent: float = 1.05
    dense: int = 13
    train_samples: int = 1_048_576
    test_samples: int = 65_536
    positive_share: float = 0.25
    score_std: float = 2.0
    seed: int = 20

    def folder(self, cache: Path) -> Path:
        """Returns where the data is kept, also before it is there."""
        text = json.dumps([GENERATOR_VERSION, asdict(self)], sort_keys=True)
        return cache / f"ctr-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


class Samples(NamedTuple):
    """``ids`` int32 [n, slots]; ``dense`` [n, dense] and ``labels`` [n] float32."""

    ids: Ids
    dense: Floats
    labels: Floats

    def part(self, rank: int, world_size: int) -> Samples:
        """Returns the samples that trainer ``rank`` of ``world_size`` trains on."""
        total = len(self.labels)
        begin, end = (total * r // world_size for r in (rank, rank + 1))
        here = slice(begin, end)
        return Samples(self.ids[here], self.dense[here], self.labels[here])


def slot_sizes(spec: CtrSpec) -> list[int]:
    """Deals ``spec.rows`` ids to the slots as evenly as possible."""
    base, rest = divmod(spec.rows, spec.slots)
    return [base + (slot < rest) for slot in range(spec.slots)]


def slot_offsets(spec: CtrSpec) -> NDArray[np.int64]:
    """Returns the first id of each slot."""
    sizes = np.array([0, *slot_sizes(spec)[:-1]], dtype=np.int64)
    return np.cumsum(sizes)


def zipf_cdf(size: int, exponent: float) -> NDArray[np.float64]:
    """Returns P(rank <= k) for P(k) proportional to k ** -exponent, k = 1..size."""
    cdf = np.cumsum(np.arange(1, size + 1, dtype=np.float64) ** -exponent)
    return cdf / cdf[-1]


class Generator:
    """Draws samples of one hidden model."""

    def __init__(self, spec: CtrSpec) -> None:
        self.spec = spec
        rng = np.random.default_rng([spec.seed, 0])
        sizes = slot_sizes(spec)
        self._cdfs = {size: zipf_cdf(size, spec.exponent) for size in set(sizes)}
        # Frequent ids are scattered over a slot, as hashed ids are: neighbours in rank
        # would otherwise be neighbours in memory.
        self._places = [rng.permutation(size).astype(np.int32) for size in sizes]
        self._weights = rng.standard_normal(spec.rows, dtype=np.float32)
        self._latent = rng.standard_normal((spec.rows, LATENT_DIM), dtype=np.float32)
        self._dense_weights = rng.standard_normal(spec.dense, dtype=np.float32)
        self._scale, self._bias = 1.0, 0.0
        rng = np.random.default_rng([spec.seed, 1])
        raw = self.score(*self._features(rng, CHUNK_SAMPLES))
        self._scale = float(spec.score_std / raw.std())
        self._bias = _bias_for(raw * self._scale, spec.positive_share)

    def _features(self, rng: np.random.Generator, count: int) -> tuple[Ids, Floats]:
        spec = self.spec
        ids = np.empty((count, spec.slots), dtype=np.int32)
        offsets = slot_offsets(spec)
        for slot, places in enumerate(self._places):
            cdf = self._cdfs[len(places)]
            rank = np.searchsorted(cdf, rng.random(count), side="right")
            ids[:, slot] = places[np.minimum(rank, len(places) - 1)] + offsets[slot]
        return ids, rng.standard_normal((count, spec.dense), dtype=np.float32)

    def score(self, ids: Ids, dense: Floats) -> Floats:
        """Returns the hidden model's logits: dense, linear and pairwise parts."""
        slots, width = self.spec.slots, self.spec.dense
        latent = self._latent[ids]
        pairs = latent.sum(axis=1) ** 2 - (latent**2).sum(axis=1)
        score = dense @ self._dense_weights / np.sqrt(width)
        score = score + self._weights[ids].sum(axis=1) / np.sqrt(slots)
        score = score + 0.35 * pairs.sum(axis=1) / (slots * np.sqrt(LATENT_DIM))
        return (score * self._scale + self._bias).astype(np.float32)

    def draw(self, part: str, count: int) -> tuple[Samples, Floats]:
        """Returns ``count`` samples of ``part`` and their hidden logits."""
        rng = np.random.default_rng([self.spec.seed, 2 + PARTS.index(part)])
        samples = Samples(
            np.empty((count, self.spec.slots), dtype=np.int32),
            np.empty((count, self.spec.dense), dtype=np.float32),
            np.empty(count, dtype=np.float32),
        )
        logits = np.empty(count, dtype=np.float32)
        for begin in range(0, count, CHUNK_SAMPLES):
            here = slice(begin, min(begin + CHUNK_SAMPLES, count))
            ids, dense = self._features(rng, here.stop - begin)
            logits[here] = self.score(ids, dense)
            draws = rng.random(here.stop - begin)
            samples.ids[here], samples.dense[here] = ids, dense
            samples.labels[here] = draws < 1.0 / (1.0 + np.exp(-logits[here]))
        return samples, logits


def _bias_for(logits: Floats, share: float) -> float:
    """Returns the bias at which ``logits`` have the mean probability ``share``."""
    low, high = -30.0, 30.0
    for _ in range(60):
        middle = (low + high) / 2
        mean = float((1.0 / (1.0 + np.exp(-(logits + middle)))).mean())
        low, high = (middle, high) if mean < share else (low, middle)
    return (low + high) / 2


def auc(labels: Floats, scores: Floats) -> float:
    """Returns the area under the ROC curve; tied scores count half.

    Raises:
        ValueError: there are no positive or no negative labels.
    """
    positives = float(labels.sum())
    negatives = len(labels) - positives
    if not positives or not negatives:
        raise ValueError("AUC needs positive and negative labels; found only one kind")
    _, group, counts = np.unique(scores, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(counts) - (counts - 1) / 2.0
    rank_sum = float(mean_rank[group][labels > 0].sum())
    return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)


def load(folder: Path, part: str) -> Samples:
    """Maps one part of prepared data, read-only."""
    names = (f"{part}_{field}.npy" for field in Samples._fields)
    return Samples(
        *(np.load(folder / name, mmap_mode="r", allow_pickle=False) for name in names)
    )


def prepare(spec: CtrSpec, cache: Path) -> Path:
    """Returns the folder of ``spec``'s data, generating it when it is not there yet.

    Safe against a crash and against a second process: the folder appears whole.
    """
    folder = spec.folder(cache)
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.partial-", dir=cache))
    try:
        generator = Generator(spec)
        facts: dict[str, object] = {"spec": asdict(spec)}
        for part, count in zip(
            PARTS, (spec.train_samples, spec.test_samples), strict=True
        ):
            samples, logits = generator.draw(part, count)
            facts[f"{part}_planted_auc"] = auc(samples.labels, logits)
            for field, array in zip(Samples._fields, samples, strict=True):
                np.save(partial / f"{part}_{field}.npy", array, allow_pickle=False)
        (partial / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder

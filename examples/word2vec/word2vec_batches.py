# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Batches for skip-gram with negative sampling, whole blocks of text at a time.

Sentences are shuffled and dealt to the trainers; frequent words are thinned out; every
word predicts those around it, up to a distance drawn for it (Mikolov et al.,
"Distributed Representations of Words and Phrases and their Compositionality", NIPS
2013). What is left of the text is cut into blocks of consecutive words. A block looks
each of its words up once, and shares one draw of negatives (Ji et al., "Parallelizing
Word2Vec in Shared and Distributed Memory", 2016): all its pairs are then entries of two
small matrix products. No loop runs over words. A shared negative may be the very word
that some pair of its block predicts; word2vec's program would draw another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from word2vec_data import Corpus

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

NEGATIVE_POWER = 0.75
NEGATIVE_SLOTS = 1 << 22
# Sentences that are made into batches at once: some 300,000 words, 30 MB.
SENTENCES_AT_ONCE = 50_000
OUTSIDE = -1


@dataclass(frozen=True)
class Sampling:
    """What pairs are made of the text.

    Attributes:
        window: largest distance of a pair's words.
        negatives: weight of all negatives of a pair, in pairs.
        sample: frequency above which words are thinned out; 0: none.
        block: consecutive words that share negatives.
        shared_negatives: different draws in a block.
        batch_words: words of a step after thinning, a multiple of `block`.
        seed: of everything that is drawn.
    """

    window: int = 5
    negatives: int = 5
    sample: float = 1e-4
    block: int = 32
    shared_negatives: int = 64
    batch_words: int = 2048
    seed: int = 1


class Batch(NamedTuple):
    """Blocks of text; b blocks of n words, k negatives each, window w.

    Attributes:
        inputs: int64 ``[b * n]``, the words that predict.
        outputs: int64 ``[b * n + 2 * w + b * k]``: the same words with w before and
            after, then every block's negatives.
        pairs: float32 ``[b, n, 2 * w + 1]``, 1 where the word at distance -w … w is
            to be predicted, else 0.
        words: words of the text, before thinning, that this batch stands for.
    """

    inputs: torch.Tensor
    outputs: torch.Tensor
    pairs: torch.Tensor
    words: float


def keep_probability(counts: Integers, sample: float) -> Floats:
    """Return for each word how likely one of its places stays in the text.

    As word2vec's program: ``(sqrt(f / t) + 1) * t / f`` at most 1, with frequency f
    and threshold t.
    """
    if sample == 0:
        return np.ones(len(counts), np.float32)
    ratio = counts / (sample * counts.sum())
    found: Floats = np.minimum(1, (np.sqrt(ratio) + 1) / ratio).astype(np.float32)
    return found


def negative_table(counts: Integers, slots: int = NEGATIVE_SLOTS) -> Integers:
    """Return words, each as often as its count to the power 3/4 is of all.

    Every word has one slot at least.
    """
    share = counts**NEGATIVE_POWER
    places = np.maximum(1, np.rint(slots * share / share.sum())).astype(np.int64)
    return np.repeat(np.arange(len(counts)), places)


class Sampler:
    """Makes the batches of one trainer."""

    def __init__(
        self, corpus: Corpus, sampling: Sampling, rank: int = 0, trainers: int = 1
    ) -> None:
        """Prepare the tables that are drawn from."""
        self.corpus, self.sampling = corpus, sampling
        self.rank, self.trainers = rank, trainers
        self.keep = keep_probability(corpus.counts, sampling.sample)
        self.table = negative_table(corpus.counts)
        ends = np.cumsum(corpus.lengths, dtype=np.int64)
        self.begins = ends - corpus.lengths

    def steps(self, words: int | None = None) -> int:
        """Return about how many batches an epoch of `words` has; equal for all."""
        left = float(self.keep @ self.corpus.counts)
        if words is not None:
            left *= min(1.0, words / len(self.corpus.tokens))
        return max(1, round(left / self.trainers / self.sampling.batch_words))

    def epoch(self, number: int, words: int | None = None) -> Iterator[Batch]:
        """Yield the batches of this trainer's sentences, in an order of this epoch.

        Args:
            number: of the epoch; another number is another order and other draws.
            words: of all trainers, about; `None`: the whole text.
        """
        seed = self.sampling.seed
        order = np.random.default_rng((seed, number)).permutation(len(self.begins))
        if words is not None:
            ends = np.cumsum(self.corpus.lengths[order], dtype=np.int64)
            order = order[: int(np.searchsorted(ends, words)) + 1]
        mine = order[self.rank :: self.trainers]
        draws = np.random.default_rng((seed, number, self.rank + 1))
        for begin in range(0, len(mine), SENTENCES_AT_ONCE):
            yield from self._batches(mine[begin : begin + SENTENCES_AT_ONCE], draws)

    def _text(
        self, chosen: Integers, draws: np.random.Generator
    ) -> tuple[Integers, Integers, int]:
        """Return the thinned words of sentences, and the sentence of each."""
        lengths = self.corpus.lengths[chosen].astype(np.int64)
        ends = np.cumsum(lengths)
        total = int(ends[-1])
        sentence = np.repeat(np.arange(len(chosen)), lengths)
        place = np.arange(total) + (self.begins[chosen] - ends + lengths)[sentence]
        tokens = self.corpus.tokens[place]
        stays = draws.random(total, dtype=np.float32) < self.keep[tokens]
        return tokens[stays].astype(np.int64), sentence[stays], total

    def _batches(self, chosen: Integers, draws: np.random.Generator) -> Iterator[Batch]:
        sampling = self.sampling
        size, window = sampling.block, sampling.window
        tokens, sentence, words = self._text(chosen, draws)
        blocks = -(-len(tokens) // size)
        if not blocks:
            return
        reach = np.zeros(blocks * size, np.int64)
        reach[: len(tokens)] = draws.integers(1, window + 1, len(tokens))
        around = (window, window + blocks * size - len(tokens))
        # Places beyond the text have word 0, in no sentence: they make no pairs.
        tokens = np.pad(tokens, around)
        sentence = np.pad(sentence, around, constant_values=OUTSIDE)
        pairs = pair_marks(sentence, reach, window).reshape(blocks, size, -1)
        drawn = draws.integers(0, len(self.table), (blocks, sampling.shared_negatives))
        negatives = self.table[drawn]
        step = sampling.batch_words // size
        for begin in range(0, blocks, step):
            end = min(begin + step, blocks)
            first, last = begin * size, end * size
            nearby = tokens[first : last + 2 * window]
            outputs = np.concatenate([nearby, negatives[begin:end].reshape(-1)])
            yield Batch(
                torch.from_numpy(nearby[window : window + last - first]),
                torch.from_numpy(outputs),
                torch.from_numpy(pairs[begin:end]),
                words * (end - begin) / blocks,
            )


def pair_marks(sentence: Integers, reach: Integers, window: int) -> Floats:
    """Return 1 for every pair of one sentence within a word's reach, else 0.

    Args:
        sentence: ``[n + 2 * window]``, of each place and those before and after.
        reach: ``[n]``, distance up to which a word predicts others; 0: none.
        window: largest reach.

    Returns:
        ``[n, 2 * window + 1]``, by distance from -window to window.
    """
    count = len(reach)
    here = sentence[window : window + count]
    marks = np.zeros((count, 2 * window + 1), np.float32)
    for distance in range(1, window + 1):
        reached = reach >= distance
        for offset in (window - distance, window + distance):
            marks[:, offset] = reached & (sentence[offset : offset + count] == here)
    return marks

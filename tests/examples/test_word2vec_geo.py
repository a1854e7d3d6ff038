# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What word vectors learn under Geo, against one process on the same text."""

from __future__ import annotations

import threading
from itertools import islice

import numpy as np
import pytest
import torch
import word2vec_batches as batches
import word2vec_data as data
import word2vec_model as models
from patience import PATIENCE_S
from sync_cases import run

import torch_cpudist as cpudist

TOPICS, WORDS, SENTENCES = 40, 25, 1500
SAMPLING = batches.Sampling(sample=0, batch_words=128, seed=1)


def made_up() -> data.Corpus:
    """Sentences of one topic each; some words of a topic are rare."""
    draws = np.random.default_rng(1)
    share = 1 / np.arange(1, WORDS + 1)
    share /= share.sum()
    topics = draws.integers(TOPICS, size=SENTENCES)
    words = [t * WORDS + draws.choice(WORDS, 10, p=share) for t in topics]
    return data.build(
        ".\n".join(" ".join(spelled(word) for word in line) for line in words), 1
    )


def spelled(number: int) -> str:
    return "".join(chr(ord("a") + int(digit)) for digit in f"{number:05d}")


def alike(corpus: data.Corpus, vectors: torch.Tensor) -> float:
    """The share of words whose nearest neighbour is of their topic."""
    places = [int("".join(str(ord(c) - ord("a")) for c in w)) for w in corpus.words]
    topics = torch.tensor(places) // WORDS
    unit = torch.nn.functional.normalize(vectors)
    near = (unit @ unit.T).fill_diagonal_(-1).argmax(dim=1)
    return float((topics[near] == topics).double().mean())


def learned(corpus: data.Corpus, trainers: int, **options) -> float:
    """What all trainers' words together have taught trainer 0.

    They step together: what they know of each other does not depend on the machine.
    """
    together = threading.Barrier(trainers)

    def body(context):
        torch.manual_seed(1)
        model = models.SkipGram(len(corpus.words), SAMPLING, 16)
        inner = torch.optim.Adagrad(model.parameters(), lr=0.2)
        optimizer = cpudist.DistributedOptimizer(inner, model, cpudist.Geo(**options))
        part = batches.Sampler(corpus, SAMPLING, context.trainer_rank, trainers)
        # Numbers of batches differ by chance.
        for batch in islice(part.epoch(0), part.steps() - 1):
            together.wait(PATIENCE_S)
            optimizer.zero_grad()
            model(batch).backward()
            optimizer.step()
        context.barrier()
        optimizer.flush()
        return model.inputs.weight.detach().clone()

    return alike(corpus, run(body, trainers)[0])


@pytest.mark.parametrize(("trainers", "least"), [(2, 0.92), (4, 0.75)])
def test_geo_learns_nearly_what_one_process_does(trainers, least):
    """Late exchanges, and the mean of movements, leave 0.84 and 0.51 of it."""
    corpus = made_up()
    alone = learned(corpus, 1)
    assert alone > 0.9
    assert learned(corpus, trainers) >= least * alone

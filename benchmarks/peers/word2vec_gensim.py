# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Peer of the case ``word2vec``: gensim's own trainer, whose loops are in C.

The same text, window, negatives, thinning and dimension as the example word2vec, which
is told with the same options; its own learning rate. It reads the sentences from a file
(``corpus_file``): then no Python runs between words.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "word2vec"))

import numpy as np
from gensim.models import Word2Vec
from word2vec import Meter, over_trainers, parse_arguments, read_data, write_results
from word2vec_data import Corpus
from word2vec_report import score


def write_sentences(corpus: Corpus, words: int | None, path: Path) -> int:
    """Writes sentences of ``words`` words in all, a line each; returns how many."""
    ends = np.cumsum(corpus.lengths, dtype=np.int64)
    begins = ends - corpus.lengths
    count = len(ends)
    if words is not None:
        count = min(count, int(np.searchsorted(ends, words)) + 1)
    with path.open("w", encoding="utf-8") as file:
        for begin, end in zip(begins[:count], ends[:count], strict=True):
            line = " ".join(corpus.words[token] for token in corpus.tokens[begin:end])
            file.write(line + "\n")
    return int(ends[count - 1])


def train(options: argparse.Namespace, corpus: Corpus, threads: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sentences.txt"
        words = write_sentences(corpus, options.words, path)
        model = Word2Vec(
            sg=1,
            vector_size=options.dim,
            window=options.window,
            negative=options.negatives,
            sample=options.sample,
            min_count=1,  # the text has none but words of the vocabulary
            workers=threads,
            seed=options.seed,
        )
        model.build_vocab(corpus_file=str(path))
        meter = Meter(words=float(words * options.epochs))
        meter.begin()
        model.train(
            corpus_file=str(path),
            total_examples=model.corpus_count,
            total_words=model.corpus_total_words,
            epochs=options.epochs,
        )
        meter.end()
    found = {
        **over_trainers(meter, 0.0, 0.0),
        **score(
            options.wordsim, options.cache, model.wv.index_to_key, model.wv.vectors
        ),
        **{"strategy": "gensim", "trainers": 1, "loss": None},
    }
    write_results(options.results, found)


if __name__ == "__main__":
    told = parse_arguments()
    train(told, read_data(told), int(os.environ.get("OMP_NUM_THREADS", "1")))

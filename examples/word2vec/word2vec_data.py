# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Text as sentences of word numbers: GCIDE, or any file of English text.

GCIDE, a dictionary of 4.2 million words (Webster 1913 and additions, GPL-2+), comes
with Debian's package dict-gcide. Cleaning: brackets and pronunciations out, lower case,
cut into sentences, words of letters, sentences of two words or more. Words that are
rarer than a minimum leave the text; the others are numbered by falling count.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

PACKAGE = "dict-gcide"
DICTIONARY = Path("/usr/share/dictd/gcide.dict.dz")
CACHE = Path(__file__).resolve().parents[2] / "build" / "word2vec"
CACHE_FORMAT = 1
GZIP_MAGIC = b"\x1f\x8b"
MIN_COUNT = 5
LEAST_SENTENCE = 2

ASIDE = re.compile(r"\[[^\]]{0,60}\]|\\[^\\\n]{1,60}\\")
SENTENCE_END = re.compile(r"[.;:?!]\s|\n\n")
WORD = re.compile(r"[a-z]+(?:'[a-z]+)?")


class DataError(Exception):
    """A file is missing or not what it should be; the message says what to do."""


@dataclass(frozen=True)
class Corpus:
    """A text in numbers.

    Attributes:
        words: the vocabulary, most frequent first.
        counts: int64 ``[len(words)]``, how often each stands in the text.
        tokens: int32 ``[n]``, the words of all sentences, one after another.
        lengths: int32 ``[sentences]``, words of each.
    """

    words: list[str]
    counts: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int32]


def read_text(path: Path) -> str:
    """Return the text of a file, plain or gzipped.

    Raises:
        DataError: it is missing, cut off, or holds no text.
    """
    try:
        data = path.read_bytes()
        if data.startswith(GZIP_MAGIC):
            data = gzip.decompress(data)
    except FileNotFoundError:
        raise DataError(
            f"{path} is missing: get GCIDE without root by `apt-get download {PACKAGE} "
            f"&& dpkg-deb -x {PACKAGE}_*.deb gcide` and pass --data "
            f"gcide{DICTIONARY}, or by `apt install {PACKAGE}`; any file of English "
            "text will do too"
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{path}: expected text or a whole gzip file, found: {error}"
        ) from None
    return data.decode("utf-8", errors="ignore")


def sentences(text: str) -> Iterator[list[str]]:
    """Yield the sentences of a text that have two words or more."""
    text = ASIDE.sub(" ", text).lower()
    for part in SENTENCE_END.split(text):
        words = WORD.findall(part)
        if len(words) >= LEAST_SENTENCE:
            yield words


def build(text: str, min_count: int = MIN_COUNT) -> Corpus:
    """Number a text.

    Raises:
        DataError: fewer than two words are frequent enough.
    """
    number_of: dict[str, int] = {}
    numbers, lengths = [], []
    for words in sentences(text):
        numbers.append([number_of.setdefault(word, len(number_of)) for word in words])
        lengths.append(len(words))
    raw = np.fromiter((n for one in numbers for n in one), np.int64, sum(lengths))
    counts = np.bincount(raw, minlength=len(number_of))
    order = np.argsort(-counts, kind="stable")
    kept = order[counts[order] >= min_count]
    if len(kept) < 2:
        raise DataError(
            f"expected a text with at least 2 words that occur {min_count} times, "
            f"found {len(raw):,} words, {len(kept)} of them so frequent; pass another "
            "--data or a smaller --min-count"
        )
    rank = np.full(len(number_of), -1, np.int64)
    rank[kept] = np.arange(len(kept))
    names = list(number_of)
    tokens = rank[raw]
    of_sentence = np.repeat(np.arange(len(lengths)), lengths)[tokens >= 0]
    left = np.bincount(of_sentence, minlength=len(lengths))
    return Corpus(
        [names[i] for i in kept],
        counts[kept],
        tokens[tokens >= 0].astype(np.int32),
        left[left > 0].astype(np.int32),
    )


def read_cache(path: Path) -> Corpus:
    """Read what ``write_cache`` wrote."""
    with np.load(path, allow_pickle=False) as kept:
        words = kept["words"].tobytes().decode("ascii").split()
        return Corpus(words, kept["counts"], kept["tokens"], kept["lengths"])


def write_cache(corpus: Corpus, path: Path) -> None:
    """Write a numbered text; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.stem}.{os.getpid()}.npz")
    words = np.frombuffer(" ".join(corpus.words).encode("ascii"), np.uint8)
    np.savez(
        partial,
        words=words,
        counts=corpus.counts,
        tokens=corpus.tokens,
        lengths=corpus.lengths,
    )
    partial.replace(path)


def load(
    path: Path = DICTIONARY, cache: Path = CACHE, min_count: int = MIN_COUNT
) -> Corpus:
    """Return a text in numbers, kept in the folder `cache` from then on.

    Numbering GCIDE takes 10 to 30 seconds. Any number of processes may call this.

    Raises:
        DataError: see ``read_text`` and ``build``.
    """
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:
        read_text(path)
        raise
    kept = cache / f"text-{CACHE_FORMAT}-{min_count}-{digest}.npz"
    if not kept.is_file():
        write_cache(build(read_text(path), min_count), kept)
    return read_cache(kept)


def most_frequent(corpus: Corpus, count: int) -> dict[str, int]:
    """Return the first words of the vocabulary with their counts."""
    found = Counter(dict(zip(corpus.words, corpus.counts.tolist(), strict=True)))
    return dict(found.most_common(count))


def main() -> None:
    """Prepare a text and say what is in it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("data", type=Path, nargs="?", default=DICTIONARY, help="gcide.dict.dz or text")
    add("--cache", type=Path, default=CACHE, help="folder of numbered texts")
    add("--min-count", type=int, default=MIN_COUNT, help="of a word in the text")
    options = parser.parse_args()
    try:
        corpus = load(options.data, options.cache, options.min_count)
    except DataError as error:
        raise SystemExit(str(error)) from None
    print(
        f"{len(corpus.lengths):,} sentences, {len(corpus.tokens):,} words, "
        f"{len(corpus.words):,} different; {most_frequent(corpus, 5)}"
    )


if __name__ == "__main__":
    main()

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Trains word vectors by skip-gram with negative sampling on GCIDE, or your own text.

python examples/word2vec/word2vec.py --data gcide/usr/share/dictd/gcide.dict.dz
torchrun --standalone --nproc-per-node=2 examples/word2vec/word2vec.py --strategy geo

Every trainer reads the text and trains on sentences of its own. Vectors are scored by
WordSim-353 where gensim's package is at hand, and written with --vectors.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from word2vec_batches import Batch, Sampler, Sampling
from word2vec_data import CACHE, DICTIONARY, MIN_COUNT, Corpus, DataError, load
from word2vec_model import SkipGram
from word2vec_report import find_list, save_vectors, score

import torch_cpudist as cpudist

# Good ones for batches of 2048 words, found on GCIDE.
RATES = {"adagrad": 0.2, "sgd": 0.05, "sparse_adam": 0.002}
# The rate falls linearly, in so many stairs: pushes of one rate can be merged.
STAIRS = 100
LOWEST_RATE = 1e-4
POINTS_PER_EPOCH = 8
# Of these no trainer may leave before the others.
TOGETHER = ("allreduce", "reduce")
STRATEGIES = ("sync", "half_async", "async", "geo", *TOGETHER)


class DivergedError(ArithmeticError):
    """Training went astray; the message says what to do."""


def make_optimizer(
    options: argparse.Namespace, model: torch.nn.Module
) -> torch.optim.Optimizer:
    """Return the torch optimizer that was asked for."""
    kinds = {
        "adagrad": torch.optim.Adagrad,
        "sgd": torch.optim.SGD,
        "sparse_adam": torch.optim.SparseAdam,
    }
    made: torch.optim.Optimizer = kinds[options.optimizer](
        model.parameters(), lr=options.lr
    )
    return made


def averaged_trainers(strategy: cpudist.Strategy) -> int:
    """Return over how many trainers a step's gradients are averaged."""
    if strategy.name in ("sync", "allreduce", "reduce"):
        return cpudist.trainer_count()
    if isinstance(strategy, cpudist.HalfAsync):
        for group in strategy.group or ():
            if cpudist.trainer_rank() in group:
                return len(group)
        on_host = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return min(on_host, cpudist.trainer_count())
    return 1


@dataclass
class Meter:
    """Words, seconds, CPU seconds and loss of this trainer, evaluations left out."""

    words: float = 0.0
    seconds: float = 0.0
    cpu_s: float = 0.0
    steps: int = 0
    points: list[dict[str, float]] = field(default_factory=list)
    loss: float = math.nan
    _pairs: float = 0.0
    _sum: float = 0.0

    def begin(self) -> None:
        """Start the clocks."""
        self._began = time.perf_counter(), time.process_time()

    def end(self) -> None:
        """Stop them."""
        self.seconds += time.perf_counter() - self._began[0]
        self.cpu_s += time.process_time() - self._began[1]

    def step(self, batch: Batch, loss: torch.Tensor) -> None:
        """Count a step and the loss of its pairs."""
        self.words += batch.words
        self.steps += 1
        self._pairs += float(batch.pairs.sum())
        self._sum += float(loss)

    def point(self) -> float:
        """Return the mean loss of a pair since the last point.

        Raises:
            DivergedError: it is no number.
        """
        self.loss = self._sum / max(self._pairs, 1.0)
        if not math.isfinite(self.loss):
            raise DivergedError(
                f"expected a finite loss, found {self.loss} after {self.words:,.0f} "
                "words: pass a lower --lr or a smaller --batch-size"
            )
        seconds = self.seconds + time.perf_counter() - self._began[0]
        self.points.append({"words": self.words, "seconds": seconds, "loss": self.loss})
        self._pairs = self._sum = 0.0
        return self.loss


def anybody(has_more: bool) -> bool:
    """Return whether that is so on any trainer; every trainer calls this."""
    left = torch.tensor([float(has_more)])
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(left, dist.ReduceOp.MAX)
    return bool(left)


def until_all_are_done(
    batches: Iterator[Batch], planned: int, ask: Callable[[bool], bool] = anybody
) -> Iterator[Batch | None]:
    """Yield a trainer's batches, then `None` for as long as another one has some.

    Numbers of batches differ by chance, by far less than a tenth. Only behind that do
    trainers ask each other, with a small all-reduce before each step.
    """
    yield from islice(batches, planned * 9 // 10 if planned >= 50 else 0)
    while True:
        batch = next(batches, None)
        if not ask(batch is not None):
            return
        yield batch


@dataclass
class Lesson:
    """One trainer's training, whoever the optimizer is: this package or plain torch.

    Attributes:
        model: returns the loss of a batch, summed over its pairs.
        scale: what the loss is multiplied by, where gradients are averaged.
        steps: of an epoch at most; `None`: as many as there are batches.
        together: every trainer takes every step, without a batch when it has no more.
        say: told the words and the loss a few times per epoch.
    """

    options: argparse.Namespace
    sampler: Sampler
    model: Callable[[Batch], torch.Tensor]
    optimizer: torch.optim.Optimizer
    scale: float = 1.0
    steps: int | None = None
    together: bool = False
    say: Callable[[Meter], None] = lambda meter: None

    def epoch(self, number: int, meter: Meter) -> None:
        """Train on this trainer's sentences once."""
        planned = self.steps or self.sampler.steps(self.options.words)
        batches = self.sampler.epoch(number, self.options.words)
        every = max(1, planned // POINTS_PER_EPOCH)
        mine: Iterable[Batch | None] = islice(batches, self.steps)
        if self.together:
            mine = until_all_are_done(batches, planned)
        for step, batch in enumerate(mine):
            self._set_rate(number + min(step / planned, 1.0))
            self.optimizer.zero_grad()
            if batch is None:
                self.optimizer.step()
                continue
            loss = self.model(batch)
            (loss * self.scale if self.scale != 1 else loss).backward()
            self.optimizer.step()
            meter.step(batch, loss.detach())
            if (step + 1) % every == 0:
                meter.point()
                self.say(meter)

    def _set_rate(self, epochs: float) -> None:
        # By the place in the epoch, not by words: a round needs one rate for all.
        stair = math.floor(STAIRS * epochs / self.options.epochs)
        rate = self.options.lr * max(1 - stair / STAIRS, LOWEST_RATE)
        for group in self.optimizer.param_groups:
            group["lr"] = rate


def traffic(optimizer: cpudist.DistributedOptimizer) -> tuple[float, float]:
    """Return bytes that this trainer sent and received, and seconds it waited."""
    stats = optimizer.stats()
    moved = stats["bytes_sent"] + stats["bytes_received"]
    waited = stats["wait_s"]
    if among_trainers := stats.get("collective"):
        moved += among_trainers["sent_bytes"]
        waited += among_trainers["wait_s"]
    return float(moved), float(waited)


def over_trainers(meter: Meter, moved: float, waited: float) -> dict[str, float]:
    """Return what all trainers did together; every trainer calls this.

    Trainers of jobs of their own share no group: then they are those of this job.
    """
    sums = torch.tensor([meter.words, meter.cpu_s, moved, waited], dtype=torch.float64)
    longest = torch.tensor([meter.seconds], dtype=torch.float64)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(sums)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
    words, cpu_s, moved, waited = sums.tolist()
    return {
        "words": words,
        "seconds": float(longest),
        "words_per_s": words / float(longest),
        "cpu_us_per_word": 1e6 * cpu_s / words,
        "bytes_per_word": moved / words,
        "wait_s": waited,
    }


def finish(
    options: argparse.Namespace,
    corpus: Corpus,
    model: SkipGram,
    meter: Meter,
    about: dict[str, Any],
) -> None:
    """Score, show and write what was measured and learned; trainer 0 calls this."""
    found = {**about, "loss": meter.loss, "points": meter.points}
    vectors = model.inputs.weight.detach().numpy()
    found |= score(options.wordsim, options.cache, corpus.words, vectors)
    print(
        f"{about['strategy']}, {about['trainers']} trainer(s): loss {meter.loss:.4f}, "
        f"{about['words_per_s']:,.0f} words/s, {about['cpu_us_per_word']:.2f} CPU "
        f"us/word, {about['bytes_per_word']:,.1f} B/word, "
        f"waited {about['wait_s']:.1f} s"
    )
    write_results(options.results, found)
    if options.vectors is not None:
        save_vectors(options.vectors, corpus.words, vectors)
    if options.picture is not None:
        from word2vec_picture import draw  # matplotlib only where it is asked for

        draw(options.picture, meter.points, corpus.words, vectors)
        print(f"picture: {options.picture}")


def write_results(path: Path | None, found: dict[str, Any]) -> None:
    """Write a line of JSON, if somebody wants it."""
    if path is not None:
        path.write_text(json.dumps(found) + "\n", encoding="utf-8")


def show(meter: Meter) -> None:
    """Say how far trainer 0 is."""
    print(f"{meter.words:12,.0f} words, loss {meter.loss:.4f}", flush=True)


def train(options: argparse.Namespace, corpus: Corpus) -> None:
    """Train, measure and report; every trainer calls this."""
    torch.manual_seed(options.seed)
    chief = cpudist.trainer_rank() == 0
    sampling = sampling_of(options)
    model = SkipGram(len(corpus.words), sampling, options.dim)
    inner = make_optimizer(options, model)
    optimizer = cpudist.DistributedOptimizer(inner, model, strategy=options.strategy)
    trainers = cpudist.trainer_count()
    lesson = Lesson(
        options,
        Sampler(corpus, sampling, cpudist.trainer_rank(), trainers),
        model,
        optimizer,
    )
    lesson.together = optimizer.strategy.name in TOGETHER
    if options.merge == "sum":
        lesson.scale = float(averaged_trainers(optimizer.strategy))
    if chief:
        lesson.say = show
    meter = Meter()
    cpudist.barrier()
    before = traffic(optimizer)
    for epoch in range(options.epochs):
        meter.begin()
        lesson.epoch(epoch, meter)
        cpudist.barrier()  # everybody's words are in the model
        meter.end()
    moved, waited = (
        now - then for now, then in zip(traffic(optimizer), before, strict=True)
    )
    about = {
        **over_trainers(meter, moved, waited),
        "strategy": optimizer.strategy.name,
        "trainers": trainers,
        "servers": cpudist.server_count(),
        "staleness": optimizer.stats()["staleness"],
    }
    if chief:
        optimizer.flush()
        finish(options, corpus, model, meter, about)
    cpudist.barrier()


def sampling_of(options: argparse.Namespace) -> Sampling:
    """Return what pairs are to be made."""
    return Sampling(
        window=options.window,
        negatives=options.negatives,
        sample=options.sample,
        batch_words=options.batch_size,
        seed=options.seed,
    )


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, default=DICTIONARY, help="gcide.dict.dz or a text")
    add("--cache", type=Path, default=CACHE, help="folder of the numbered text")
    add("--min-count", type=int, default=MIN_COUNT, help="of a word in the text")
    add("--epochs", type=int, default=1, help="passes over the text")
    add("--dim", type=int, default=100, help="length of a vector")
    add("--window", type=int, default=5, help="largest distance of a pair")
    add("--negatives", type=int, default=5, help="negatives per pair, by weight")
    add("--sample", type=float, default=1e-4, help="thin out words above; 0: none")
    add("--batch-size", type=int, default=2048, help="words of a trainer in a step")
    add("--optimizer", choices=RATES, default="adagrad", help="of torch.optim")
    add("--lr", type=float, help=f"at the start; default: {RATES}")
    add("--strategy", choices=STRATEGIES, default="sync", help="by name")
    add(
        "--merge",
        choices=("sum", "mean"),
        default="sum",
        help="of trainers' gradients, where the strategy averages (as Sync does)",
    )
    add("--seed", type=int, default=1, help="of all that is drawn")
    add("--words", type=int, help="train on about WORDS words only, for a quick try")
    add("--wordsim", type=Path, help="wordsim353.tsv, or a wheel of gensim")
    add("--vectors", type=Path, help="file for vectors, in word2vec's text form")
    add("--results", type=Path, help="file for what was measured, as a JSON line")
    add("--picture", type=Path, help="PNG to write (needs matplotlib)")
    options = parser.parse_args(arguments)
    for name in ("epochs", "dim", "window", "negatives", "words", "min_count"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    block = Sampling.block
    if options.batch_size < block or options.batch_size % block:
        parser.error(f"--batch-size must be a multiple of {block}")
    if 2 * options.window > block:
        parser.error(f"--window must be at most {block // 2}")
    if not 0 <= options.sample < 1:
        parser.error("--sample must be from 0 to below 1")
    options.lr = RATES[options.optimizer] if options.lr is None else options.lr
    return options


def read_data(options: argparse.Namespace) -> Corpus:
    """Return the text; end with a sentence without it."""
    try:
        find_list(options.wordsim, options.cache)
        return load(options.data, options.cache, options.min_count)
    except DataError as error:
        sys.exit(f"word2vec: {error}")


def main() -> None:
    """Serve or train, as the launch says."""
    options = parse_arguments()
    corpus = read_data(options)
    cpudist.init()
    try:
        if cpudist.is_server():
            cpudist.serve()
        else:
            train(options, corpus)
    finally:
        cpudist.shutdown(pull="none")


if __name__ == "__main__":
    main()

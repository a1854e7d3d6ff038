# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Trains a vector for every node of a graph, and tells held-out edges by them.

python examples/node2vec/node2vec.py --data graphs/.../cond-mat-2005.gt.gz
torchrun --standalone --nproc-per-node=2 examples/node2vec/node2vec.py --strategy geo \
    --data graphs/.../cond-mat-2005.gt.gz

node2vec (Grover, Leskovec, KDD 2016): walks with a bias, and skip-gram with negative
sampling over them, as examples/word2vec trains it over sentences. Every trainer walks
from nodes of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from node2vec_graph import (
    COLLECTION,
    NAME,
    STEEPEST,
    DataError,
    Graph,
    Held,
    hold_out,
    load,
    walks,
)

import torch_cpudist as cpudist
from torch_cpudist import metrics

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "word2vec"))

import word2vec
from word2vec_batches import Sampler, Sampling
from word2vec_data import Corpus
from word2vec_model import SkipGram

Floats = npt.NDArray[np.float32]
Pairs = npt.NDArray[np.int64]
# A trainer draws negatives of its own.
NEXT_SEED = 1_000_003


def walked(
    options: argparse.Namespace, graph: Graph, rank: int, trainers: int
) -> Corpus:
    """Return this trainer's walks, as sentences of nodes."""
    draws = np.random.default_rng((options.seed, 2, rank))
    order = np.random.default_rng((options.seed, 3)).permutation(starts_of(graph))
    begins = np.repeat(order[rank::trainers], options.walks)
    found = walks(graph, begins, options.length, options.p, options.q, draws)
    names = [str(node) for node in range(graph.nodes)]
    lengths = np.full(len(found), options.length, np.int32)
    # In the long run a walk is at a node as often as its degree says: the negatives'
    # weights are the same on all trainers.
    counts = np.maximum(graph.degrees, 1)
    return Corpus(names, counts, found.reshape(-1).astype(np.int32), lengths)


def starts_of(graph: Graph) -> npt.NDArray[np.int64]:
    """Return the nodes that a walk can leave."""
    return np.flatnonzero(graph.degrees)


def common_steps(options: argparse.Namespace, graph: Graph, trainers: int) -> int:
    """Return how many whole batches the trainer of the fewest walks has."""
    fewest = len(starts_of(graph)) // trainers * options.walks
    return max(1, fewest * options.length // options.batch_size)


def cosines(vectors: Floats, pairs: Pairs) -> Floats:
    """Return how alike the two nodes of each pair are, -1 to 1."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
    found: Floats = (unit[pairs[:, 0]] * unit[pairs[:, 1]]).sum(axis=1)
    return found


def edge_auc(real: Floats, false: Floats) -> float:
    """Return how likely an edge has the larger cosine than a pair that is none."""
    area = metrics.AUC(from_logits=True)
    area.update(real, np.ones(len(real)))
    area.update(false, np.zeros(len(false)))
    return float(area.compute())


def train(options: argparse.Namespace, graph: Graph) -> dict[str, Any]:
    """Train, measure and report; every trainer calls this.

    Returns:
        What was measured; without quality on all but trainer 0.
    """
    torch.manual_seed(options.seed)
    held = hold_out(graph, options.held_out, options.seed)
    rank, trainers = cpudist.trainer_rank(), cpudist.trainer_count()
    began = time.perf_counter()
    corpus = walked(options, held.train, rank, trainers)
    walked_s = time.perf_counter() - began
    sampling = Sampling(
        window=options.window,
        negatives=options.negatives,
        sample=0,
        batch_words=options.batch_size,
        seed=options.seed + NEXT_SEED * rank,
    )
    model = SkipGram(graph.nodes, sampling, options.dim)
    inner = word2vec.make_optimizer(options, model)
    optimizer = cpudist.DistributedOptimizer(inner, model, strategy=options.strategy)
    lesson = word2vec.Lesson(options, Sampler(corpus, sampling), model, optimizer)
    lesson.steps = common_steps(options, held.train, trainers)
    # A pair is an update of its own, whoever else is averaged with it.
    lesson.scale = float(word2vec.averaged_trainers(optimizer.strategy))
    meter = word2vec.Meter()
    cpudist.barrier()
    before = word2vec.traffic(optimizer)
    for epoch in range(options.epochs):
        meter.begin()
        lesson.epoch(epoch, meter)
        cpudist.barrier()  # everybody's walks are in the model
        meter.end()
    now = word2vec.traffic(optimizer)
    moved, waited = (late - early for late, early in zip(now, before, strict=True))
    about = {
        **word2vec.over_trainers(meter, moved, waited),
        "strategy": optimizer.strategy.name,
        "trainers": trainers,
        "servers": cpudist.server_count(),
        "walked_s": walked_s,
        "loss": meter.loss,
        "points": meter.points,
    }
    if rank == 0:
        optimizer.flush()
        about |= finish(options, held, model, about)
    cpudist.barrier()
    return about


def finish(
    options: argparse.Namespace, held: Held, model: SkipGram, about: dict[str, Any]
) -> dict[str, float]:
    """Score, show and write what was learned; trainer 0 calls this."""
    vectors = model.inputs.weight.detach().numpy()
    degrees = held.train.degrees.astype(np.float32)
    real, false = cosines(vectors, held.real), cosines(vectors, held.false)
    by_degree = [
        np.log(degrees[pairs]).sum(axis=1) for pairs in (held.real, held.false)
    ]
    found = {"auc": edge_auc(real, false), "auc_of_degrees": edge_auc(*by_degree)}
    print(
        f"{about['strategy']}, {about['trainers']} trainer(s) on {about['servers']} "
        f"server(s): AUC {found['auc']:.4f} of {len(real):,} held-out edges, "
        f"by degrees {found['auc_of_degrees']:.4f}"
    )
    print(
        f"loss {about['loss']:.4f}, {about['words']:,.0f} nodes walked in "
        f"{about['walked_s']:.1f} s, trained at {about['words_per_s']:,.0f} nodes/s, "
        f"{about['bytes_per_word']:,.0f} B/node, waited {about['wait_s']:.1f} s",
        flush=True,
    )
    if options.results is not None:
        text = json.dumps({**about, **found})
        options.results.write_text(text + "\n", encoding="utf-8")
    if options.picture is not None:
        from node2vec_report import draw  # matplotlib only where it is asked for

        draw(options.picture, about["points"], real, false)
        print(f"picture: {options.picture}")
    return found


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, default=Path("/") / COLLECTION / NAME, help="the graph")
    add("--p", type=float, default=1.0, help="how seldom a walk turns back")
    add("--q", type=float, default=1.0, help="how seldom it leaves the neighbourhood")
    add("--walks", type=int, default=6, help="from each node")
    add("--length", type=int, default=30, help="nodes of a walk")
    add("--held-out", type=float, default=0.2, help="share of the edges")
    add("--epochs", type=int, default=1, help="passes over the walks")
    add("--dim", type=int, default=64, help="length of a vector")
    add("--window", type=int, default=5, help="largest distance of a pair")
    add("--negatives", type=int, default=5, help="negatives per pair, by weight")
    add("--batch-size", type=int, default=2048, help="nodes of a trainer in a step")
    add("--optimizer", choices=word2vec.RATES, default="adagrad", help="of torch.optim")
    add("--lr", type=float, help=f"at the start; default: {word2vec.RATES}")
    add("--strategy", choices=word2vec.STRATEGIES, default="sync", help="by name")
    add("--seed", type=int, default=1, help="of all that is drawn")
    add("--results", type=Path, help="file for what was measured, as a JSON line")
    add("--picture", type=Path, help="PNG to write (needs matplotlib)")
    options = parser.parse_args(arguments)
    for name in ("walks", "epochs", "dim", "window", "negatives"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")
    for name in ("p", "q"):
        if not 1 / STEEPEST <= getattr(options, name) <= STEEPEST:
            parser.error(f"--{name} must be from 1/{STEEPEST:g} to {STEEPEST:g}")
    if options.length < 2:
        parser.error(f"--length must be at least 2, got {options.length}")
    if not 0 < options.held_out < 1:
        parser.error(f"--held-out must be above 0 and below 1, got {options.held_out}")
    block = Sampling.block
    if options.batch_size < block or options.batch_size % block:
        parser.error(f"--batch-size must be a multiple of {block}")
    if 2 * options.window > block:
        parser.error(f"--window must be at most {block // 2}")
    if options.lr is None:
        options.lr = word2vec.RATES[options.optimizer]
    options.words = None  # of all walks, for word2vec
    return options


def read_data(options: argparse.Namespace) -> Graph:
    """Return the graph; end with a sentence without it."""
    try:
        return load(options.data)
    except DataError as error:
        sys.exit(f"node2vec: {error}")


def main() -> None:
    """Serve or train, as the launch says."""
    options = parse_arguments()
    graph = read_data(options)
    cpudist.init()
    try:
        if cpudist.is_server():
            cpudist.serve()
        else:
            train(options, graph)
    finally:
        cpudist.shutdown(pull="none")


if __name__ == "__main__":
    main()

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Trains two towers on MovieLens-100k: which movies will a user like next?

python examples/movielens/movielens.py --data recbole-1.2.1-py3-none-any.whl
torchrun --standalone --nproc-per-node=2 examples/movielens/movielens.py --data ...

The negatives of a like are the other movies of its batch, corrected for their
popularity. Trainers share each batch; Recall@k and NDCG@k are of all users, of whom
every trainer ranks the movies for some. With --remote all tables are on the servers
only.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from movielens_data import WHEEL, DataError, Likes, load
from movielens_model import TwoTowers

import torch_cpudist as cpudist
from torch_cpudist import losses, metrics, strategies

REMOTE_STRATEGIES = ("sync", "half_async", "async", "geo", "hybrid")
# Movies on the map: those with so many likes of training.
DRAWN_LIKES = 40


def my_batches(
    likes: Likes, epoch: int, options: argparse.Namespace
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield this trainer's users and movies of each batch, perhaps none."""
    order = np.random.default_rng((options.seed, epoch)).permutation(len(likes.train))
    for begin in range(0, len(order), options.batch_size):
        batch = order[begin : begin + options.batch_size]
        mine = batch[cpudist.trainer_rank() :: cpudist.trainer_count()]
        users, items = likes.train[mine].T
        yield torch.from_numpy(users.copy()), torch.from_numpy(items.copy())


def ranked(likes: Likes, scores: torch.Tensor, k: int) -> dict[str, float]:
    """Return Recall@k and NDCG@k over the users of all trainers; collective.

    Args:
        likes: the data; every trainer counts the users of its own.
        scores: ``[users, items]`` of these users.
        k: how many movies are shown.
    """
    mine = slice(cpudist.trainer_rank(), None, cpudist.trainer_count())
    users = torch.arange(likes.users)[mine]
    relevant = torch.from_numpy(likes.relevant()[mine])
    scores = scores.masked_fill(torch.from_numpy(likes.seen[mine]), -torch.inf)
    # What is neither shown nor to be found changes no value.
    shown = scores >= scores.topk(k, dim=1).values[:, -1:]
    counted = (shown | relevant) & scores.isfinite()
    found = metrics.Metrics(
        {f"Recall@{k}": metrics.Recall(k), f"NDCG@{k}": metrics.NDCG(k)}
    )
    groups = users[:, None].expand(relevant.shape)
    found.update(scores[counted], relevant[counted], groups=groups[counted])
    return dict(found.compute_all())


def model_scores(model: TwoTowers, likes: Likes) -> torch.Tensor:
    """Return ``[users, items]`` for this trainer's users."""
    users = torch.arange(likes.users)
    mine = users[cpudist.trainer_rank() :: cpudist.trainer_count()]
    model.eval()
    with torch.no_grad():
        queries, items = model(mine, torch.arange(likes.items))
    model.train()
    return queries @ items.T


def popular_scores(likes: Likes) -> torch.Tensor:
    """Return the same by likes of training: all users see the most popular movies."""
    users = len(range(cpudist.trainer_rank(), likes.users, cpudist.trainer_count()))
    return torch.from_numpy(likes.popularity()).double().expand(users, -1)


def build(options: argparse.Namespace, likes: Likes) -> TwoTowers:
    """Make the model; with ``--remote`` its tables have no rows on this trainer."""
    torch.manual_seed(options.seed)
    remote = cpudist.remote_tables(min_rows=1) if options.remote else nullcontext()
    with remote:
        return TwoTowers(likes, options.dim)


def train(options: argparse.Namespace, likes: Likes) -> dict[str, Any]:
    """Train, measure and report; every trainer calls this, and gets what was found."""
    model = build(options, likes)
    optimizer = cpudist.DistributedOptimizer(
        torch.optim.Adagrad(model.parameters(), lr=options.lr),
        model,
        strategy=options.strategy,
    )
    chief = cpudist.trainer_rank() == 0
    log_q = torch.from_numpy(np.log(np.maximum(likes.popularity(), 1)))
    baseline = ranked(likes, popular_scores(likes), options.k)
    points: list[dict[str, float]] = []
    seconds = 0.0
    for epoch in range(options.epochs):
        began = time.perf_counter()
        total = []
        for users, items in my_batches(likes, epoch, options):
            optimizer.zero_grad()
            if len(users):
                queries, rows = model(users, items)
                loss = losses.in_batch_softmax(
                    queries,
                    rows,
                    log_q=log_q[items],
                    ids=items,
                    temperature=options.temperature,
                )
                loss.backward()
                total.append(loss.item())
            optimizer.step(samples=len(users))
        cpudist.barrier()  # everybody's samples are in the model
        optimizer.flush("dense")
        seconds += time.perf_counter() - began
        found = ranked(likes, model_scores(model, likes), options.k)
        points.append({"epoch": epoch + 1, "loss": float(np.mean(total)), **found})
        if chief:
            values = ", ".join(f"{name} {value:.4f}" for name, value in found.items())
            print(f"epoch {epoch + 1}: loss {points[-1]['loss']:.4f}, {values}")
        cpudist.barrier()  # nobody trains on meanwhile
    about = {
        **points[-1],
        "strategy": optimizer.strategy.name,
        "trainers": cpudist.trainer_count(),
        "servers": cpudist.server_count(),
        "samples_per_s": options.epochs * len(likes.train) / seconds,
        "baseline": baseline,
        "points": points,
    }
    if chief:
        finish(options, likes, model, about)
    cpudist.barrier()
    return about


def finish(
    options: argparse.Namespace, likes: Likes, model: TwoTowers, about: dict[str, Any]
) -> None:
    """Show and write what was found; trainer 0 calls this."""
    found = ", ".join(f"{name} {about[name]:.4f}" for name in about["baseline"])
    popular = ", ".join(f"{name} {v:.4f}" for name, v in about["baseline"].items())
    print(
        f"{about['strategy']}, {about['trainers']} trainer(s) on {about['servers']} "
        f"server(s): {found}, {about['samples_per_s']:,.0f} samples/s"
    )
    print(f"the most popular movies for all: {popular}", flush=True)
    if options.results is not None:
        options.results.write_text(json.dumps(about) + "\n", encoding="utf-8")
    if options.picture is not None:
        from movielens_report import draw  # matplotlib only where it is asked for

        often = np.flatnonzero(likes.popularity() >= DRAWN_LIKES)
        with torch.no_grad():
            vectors = model.items(torch.from_numpy(often)).numpy()
        genres = [likes.genres[item] for item in often]
        draw(options.picture, about["points"], about["baseline"], vectors, genres)
        print(f"picture: {options.picture}")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, required=True, help=WHEEL)
    add("--epochs", type=int, default=20, help="passes over the likes")
    add("--batch-size", type=int, default=1024, help="likes of all trainers in a step")
    add("--dim", type=int, default=32, help="length of a vector")
    add("--lr", type=float, default=0.05, help="of Adagrad")
    add("--temperature", type=float, default=0.1, help="of the softmax")
    add("--k", type=int, default=20, help="movies that are shown to a user")
    # LocalSGD alone trains no tables.
    names = [name for name in strategies.names() if name != "local_sgd"]
    add("--strategy", choices=names, default="sync", help="by name")
    remote = "tables on the servers only, with " + ", ".join(REMOTE_STRATEGIES)
    add("--remote", action="store_true", help=remote)
    add("--seed", type=int, default=1, help="of initial values and of the order")
    add("--results", type=Path, help="file for what was measured, as a JSON line")
    add("--picture", type=Path, help="PNG to write (needs matplotlib)")
    options = parser.parse_args(arguments)
    for name in ("epochs", "batch_size", "dim", "k"):
        if getattr(options, name) < 1:
            told = f"--{name.replace('_', '-')} must be at least 1"
            parser.error(f"{told}, got {getattr(options, name)}")
    if not options.temperature > 0 or not options.lr > 0:
        parser.error("--temperature and --lr must be above 0")
    if options.remote and options.strategy not in REMOTE_STRATEGIES:
        parser.error(f"--remote needs one of {', '.join(REMOTE_STRATEGIES)}")
    return options


def read_data(options: argparse.Namespace) -> Likes:
    """Return the data; end with a sentence without them."""
    try:
        likes = load(options.data)
    except DataError as error:
        sys.exit(f"movielens: {error}")
    if options.k > likes.items:
        sys.exit(f"movielens: --k must be at most {likes.items}, got {options.k}")
    return likes


def main() -> None:
    """Serve or train, as the launch says."""
    options = parse_arguments()
    likes = read_data(options)
    cpudist.init()
    try:
        if cpudist.is_server():
            cpudist.serve()
        else:
            train(options, likes)
    finally:
        cpudist.shutdown(pull="none")


if __name__ == "__main__":
    main()

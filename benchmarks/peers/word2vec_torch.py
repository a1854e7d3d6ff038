# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Peer of the case ``word2vec``: plain torch, or DDP over gloo under torchrun.

The same model, batches and optimizers as the example word2vec, which is told with the
same options.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[2] / "examples" / "word2vec"), str(HERE.parents[1])]

import usage  # noqa: E402
from word2vec import (  # noqa: E402
    Lesson,
    Meter,
    finish,
    make_optimizer,
    over_trainers,
    parse_arguments,
    read_data,
    sampling_of,
    show,
)
from word2vec_batches import Sampler  # noqa: E402
from word2vec_data import Corpus  # noqa: E402
from word2vec_model import SkipGram  # noqa: E402

# DDP needs as many steps of all ranks; by chance some have a few batches less.
SHARE_OF_STEPS = 0.98


def train(options: argparse.Namespace, corpus: Corpus) -> None:
    rank, trainers = int(os.environ.get("RANK", "0")), 1
    together = "WORLD_SIZE" in os.environ
    if together:
        dist.init_process_group("gloo")
        trainers = dist.get_world_size()
    torch.manual_seed(options.seed)
    sampling = sampling_of(options)
    model = SkipGram(len(corpus.words), sampling, options.dim)
    optimizer = make_optimizer(options, model)
    sampler = Sampler(corpus, sampling, rank, trainers)
    lesson = Lesson(options, sampler, model, optimizer)
    if together:
        lesson.model = DistributedDataParallel(model)
        lesson.scale = float(trainers)  # DDP averages
        lesson.steps = max(1, int(SHARE_OF_STEPS * sampler.steps(options.words)))
    if rank == 0:
        lesson.say = show
    meter, sent = Meter(), usage.tcp_bytes_sent()
    for epoch in range(options.epochs):
        meter.begin()
        lesson.epoch(epoch, meter)
        if together:
            dist.barrier()
        meter.end()
    moved = float(usage.tcp_bytes_sent() - sent)
    about = {
        **over_trainers(meter, moved, 0.0),
        "strategy": "DDP over gloo" if together else "torch",
        "trainers": trainers,
    }
    if rank == 0:
        finish(options, corpus, model, meter, about)
    if together:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    told = parse_arguments()
    # torchrun gives every rank one thread; a row's count is in OMP_NUM_THREADS.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    train(told, read_data(told))

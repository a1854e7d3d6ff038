# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Peer: TorchRec, whole tables dealt to the ranks, fused kernel, over gloo."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
import torchrec
from ctr_data import slot_offsets, slot_sizes
from job import Job
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingEnv, ShardingType

from peers.common import (
    ADAGRAD_EPS,
    EMBEDDING_STD,
    TorchTrainee,
    adagrad,
    make_mlp,
    measure,
    spec_of,
)


class TableCtrModel(nn.Module):
    """The same network over one TorchRec table per slot."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        spec = spec_of(job)
        torch.manual_seed(job.seed)
        self.mlp = make_mlp(spec, job.dim)
        self.features = [f"slot{slot}" for slot in range(spec.slots)]
        self.bags = torchrec.EmbeddingBagCollection(
            [
                torchrec.EmbeddingBagConfig(
                    name=f"table_{feature}",
                    embedding_dim=job.dim,
                    num_embeddings=rows,
                    feature_names=[feature],
                    init_fn=partial(nn.init.normal_, std=EMBEDDING_STD),
                )
                for feature, rows in zip(self.features, slot_sizes(spec), strict=True)
            ],
            device=torch.device("cpu"),
        )
        self._first_ids = torch.from_numpy(slot_offsets(spec))

    def forward(self, ids: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        """Returns logits [batch] for ``ids`` [batch, slots] and ``dense``."""
        indices = (ids - self._first_ids).t().flatten()
        bags = torchrec.KeyedJaggedTensor(
            keys=self.features,
            values=indices,
            lengths=torch.ones(indices.numel(), dtype=torch.int64),
            stride=len(ids),
        )
        rows = self.bags(bags).values()
        return self.mlp(torch.cat([rows, dense], dim=1)).squeeze(1)


def shard(job: Job, model: TableCtrModel) -> DistributedModelParallel:
    """Deals the tables to the ranks and wraps the network in DDP."""
    _apply_optimizer_in_backward(
        torch.optim.Adagrad,
        model.bags.parameters(),
        optimizer_kwargs={"lr": job.lr, "eps": ADAGRAD_EPS},
    )
    constraints = {
        f"table_{feature}": ParameterConstraints(
            sharding_types=[ShardingType.TABLE_WISE.value],
            compute_kernels=[EmbeddingComputeKernel.FUSED.value],
        )
        for feature in model.features
    }
    sharders = [EmbeddingBagCollectionSharder()]
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=job.trainers, compute_device="cpu"),
        batch_size=job.batch,
        constraints=constraints,
    )
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    return DistributedModelParallel(
        module=model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=plan,
        sharders=sharders,
    )


def train(job: Job, rank: int) -> None:
    torch.set_num_threads(job.threads)
    dist.init_process_group("gloo")
    try:
        model = shard(job, TableCtrModel(job))
        network = (p for n, p in model.named_parameters() if ".bags." not in f".{n}")
        measure(job, rank, TorchTrainee(job, model, adagrad(job, network)))
    finally:
        dist.destroy_process_group()

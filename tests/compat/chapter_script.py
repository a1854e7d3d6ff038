# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""DDP with oneCCL and IPEX, as chapters on training with several CPUs write it.

It knows nothing of torch_cpudist.
"""

import os

import intel_extension_for_pytorch as ipex
import oneccl_bindings_for_pytorch  # noqa: F401
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    dist.init_process_group(backend="ccl", init_method="env://")
    rank = dist.get_rank()
    torch.manual_seed(0)
    images = torch.randn(64, 1, 8, 8)
    labels = (images[:, 0, :4].mean((1, 2)) > 0) * 2 + (images[:, 0, 4:, 4].mean(1) > 0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 4)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()
    model, optimizer = ipex.optimize(model, optimizer=optimizer, dtype=torch.bfloat16)
    replica = DistributedDataParallel(model)
    data = TensorDataset(images, labels)
    sampler = DistributedSampler(data, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    with torch.no_grad():
        first = nn.functional.cross_entropy(model(images), labels).item()
    for epoch in range(20):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.cross_entropy(replica(inputs), targets)
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        last = nn.functional.cross_entropy(model(images), labels).item()
    values = torch.cat([one.detach().flatten() for one in model.parameters()])
    mine = values.double().sum()
    total = mine.clone()
    dist.all_reduce(total)
    same = torch.equal(total, mine * dist.get_world_size())
    launcher = os.environ["CCL_PROCESS_LAUNCHER"]
    print(f"rank {rank}: same {same} launcher {launcher} learned {last < 0.7 * first}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A trainer or server of separate groups; whole-number gradients, as in async_cases.

``train_groups.py NAME STEPS PAUSE_S``: every step adds a gradient of -1 to element 0
and to the row of this trainer's number, and is written down in the file ``NAME.steps``
once it is applied. A file ``stop`` ends it earlier.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

import torch_cpudist as cpudist


def main() -> None:
    name, steps, pause_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    cpudist.init(timeout_s=60)
    if cpudist.is_server():
        cpudist.serve()
        cpudist.shutdown()
        return
    model = torch.nn.Embedding(8, 1, sparse=True)
    dense = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
        dense.weight.zero_()
    both = torch.nn.ModuleList([model, dense])
    inner = torch.optim.SGD(both.parameters(), lr=1.0)
    optimizer = cpudist.DistributedOptimizer(inner, both, strategy="async")
    row = torch.tensor([cpudist.trainer_rank()])
    log = Path(f"{name}.steps")
    done = len(log.read_text()) if log.exists() else 0
    Path(f"{name}.pid").write_text(str(os.getpid()))
    for _ in range(steps - done):
        optimizer.zero_grad()
        (-model(row).sum() - dense.weight.sum()).backward()
        optimizer.step()
        optimizer.flush("none")
        with log.open("a") as file:
            file.write(".")
        time.sleep(pause_s)
        if Path("stop").exists():
            break
    optimizer.flush()
    values = [int(v) for v in (*model.weight.flatten(), *dense.weight.flatten())]
    print(f"{name} is trainer {cpudist.trainer_rank()}: {values}", flush=True)
    cpudist.shutdown()


if __name__ == "__main__":
    main()

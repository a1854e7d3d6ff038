# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A trainer of separate groups; whole-number gradients, as in async_cases.

Every step adds a gradient of -1 to element 0 and to the row of this trainer's number,
and is written down in the file ``NAME.steps`` once it is applied. A file ``stop`` ends
it earlier. Run by torchrun: ``train_groups.py NAME STEPS PAUSE_S``, which steps until
it is killed, and after its restart makes so many steps more.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

import torch_cpudist as cpudist

MANY = 100_000


class Training:
    """The model of one trainer, and its steps."""

    def __init__(
        self, folder: Path, name: str, strategy: str | cpudist.Strategy = "async"
    ) -> None:
        self.folder, self.name = folder, name
        self.table = torch.nn.Embedding(8, 1, sparse=True)
        self.dense = torch.nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            self.table.weight.zero_()
            self.dense.weight.zero_()
        both = torch.nn.ModuleList([self.table, self.dense])
        inner = torch.optim.SGD(both.parameters(), lr=1.0)
        self.optimizer = cpudist.DistributedOptimizer(inner, both, strategy=strategy)
        self.log = folder / f"{name}.steps"
        (folder / f"{name}.pid").write_text(str(os.getpid()))

    def step(self, flush: bool = True) -> None:
        row = torch.tensor([cpudist.trainer_rank()])
        self.optimizer.zero_grad()
        (-self.table(row).sum() - self.dense.weight.sum()).backward()
        self.optimizer.step()
        if flush:
            self.optimizer.flush("none")
        with self.log.open("a") as file:
            file.write(".")

    def done(self) -> int:
        """Steps that are written down."""
        return len(self.log.read_text()) if self.log.exists() else 0

    def train(self, steps: int, pause_s: float, flush: bool = True) -> None:
        for _ in range(steps - self.done()):
            self.step(flush)
            time.sleep(pause_s)
            if (self.folder / "stop").exists():
                break

    def values(self) -> list[int]:
        """The rows and then element 0, as the servers have them."""
        self.optimizer.flush()
        return [int(value) for value in self.weights()]

    def weights(self) -> list[float]:
        """The rows and then element 0, as they stand here."""
        both = (*self.table.weight.flatten(), *self.dense.weight.flatten())
        return [float(value.detach()) for value in both]


def train(
    folder: Path,
    name: str,
    steps: int,
    pause_s: float,
    context: cpudist.Context,
    report: Any,
) -> list[Any]:
    """What a rank started by a test runs."""
    training = Training(folder, name)
    training.train(steps, pause_s)
    return [context.trainer_rank, training.values()]


def main() -> None:
    name, steps, pause_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    cpudist.init(timeout_s=300)
    training = Training(Path.cwd(), name)
    restarted = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
    training.train(training.done() + steps if restarted else MANY, pause_s)
    print(json.dumps([cpudist.trainer_rank(), training.values()]), flush=True)
    cpudist.shutdown()


if __name__ == "__main__":
    main()

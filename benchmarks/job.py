# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a worker process is told, and the gate where the workers of one row meet.

Free of torch: the runner and the workers share this file.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

POLL_S = 0.001
# A synchronous peer is at most one step ahead of trainer 0: when trainer 0 names a last
# step so far ahead, no trainer has passed it.
STOP_MARGIN_STEPS = 3
# Widths of the hidden layers of the case ctr.
HIDDEN = (400, 400, 400)


class DeadlineError(Exception):
    """A wait of the benchmark took longer than its deadline."""


@dataclass(frozen=True)
class Job:
    """One launch of one row."""

    name: str
    module: str
    strategy: str
    run_dir: str
    data_dir: str
    trainers: int
    servers: int
    threads: int
    batch: int
    dim: int
    lr: float
    seconds: float
    steps: int
    warmup_steps: int
    bf16: bool
    deadline_s: float
    seed: int = 20
    replicas: int = 1
    step_ms: float = 0.0
    dilation: float = 1.0
    device: str = "cpu"
    hidden: Sequence[int] = HIDDEN

    def save(self) -> Path:
        """Writes the job where its workers read it."""
        path = Path(self.run_dir) / "job.json"
        path.write_text(json.dumps(asdict(self)))
        return path

    @staticmethod
    def load(path: Path) -> Job:
        """Reads a job that ``save`` wrote."""
        return Job(**json.loads(path.read_text()))

    def report_path(self, rank: int) -> Path:
        """Returns where trainer ``rank`` writes its report."""
        return Path(self.run_dir) / f"trainer-{rank}.json"

    def error_path(self, rank: int) -> Path:
        """Returns where process ``rank`` writes why it ended early."""
        return Path(self.run_dir) / f"error-{rank}.txt"


class Gate:
    """Lets trainers of any kind, also strangers to each other, begin and end together.

    A small file mapped by all: one slot for the last step, one counter per trainer. It
    takes no part in what is measured: a step reads one number.
    """

    def __init__(self, job: Job, rank: int, poll_s: float = POLL_S) -> None:
        self._job, self._rank, self._poll_s = job, rank, poll_s
        path = Path(job.run_dir) / "gate"
        self._slots = np.memmap(path, np.int64, "r+", shape=(1 + job.trainers,))
        self._deadline = time.monotonic() + job.deadline_s

    @staticmethod
    def create(job: Job) -> None:
        """Makes the file; called once, before the trainers start."""
        path = Path(job.run_dir) / "gate"
        np.zeros(1 + job.trainers, dtype=np.int64).tofile(path)

    def meet(self) -> None:
        """Waits until every trainer has come here as often as this one."""
        arrivals = self._slots[1:]
        arrivals[self._rank] += 1
        mine = int(arrivals[self._rank])
        self._wait(lambda: int(arrivals.min()) >= mine, f"meeting {mine}")

    def last_step(self) -> int:
        """Returns the step to stop before, or 0 while it is not known."""
        return int(self._slots[0])

    def stop_after(self, step: int) -> None:
        """Names the last step; trainer 0 calls it when the time is over."""
        self._slots[0] = step + STOP_MARGIN_STEPS

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        while not done():
            if time.monotonic() > self._deadline:
                missing = [r for r, n in enumerate(self._slots[1:]) if n == 0]
                raise DeadlineError(
                    f"{self._job.name}: trainer {self._rank} waited for {what} for "
                    f"{self._job.deadline_s:g} s; never came: {missing or 'none'}"
                )
            time.sleep(self._poll_s)

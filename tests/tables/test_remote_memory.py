# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a table of a billion rows takes, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from patience import PATIENCE_S
from programs import clean_environment

pytestmark = pytest.mark.processes

PROGRAM = """
import json, resource
from pathlib import Path
import torch
from torch import nn
import torch_cpudist as cpudist

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

context = cpudist.init()
with cpudist.remote_tables(min_rows=1_000_000):
    model = nn.Sequential(nn.Embedding(1_000_000_000, 16), nn.Linear(16, 1))
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
optimizer = cpudist.DistributedOptimizer(optimizer, model)
for step in range(20):
    optimizer.zero_grad()
    model(torch.randint(0, 1_000_000_000, (2000,))).square().mean().backward()
    optimizer.step()

@torch.no_grad()
def evaluate(keys):
    for ids in torch.randint(0, 1_000_000_000, (keys,)).split(50_000):
        model(ids)

evaluate(200_000)  # buffers that are kept have their size
before = resident_bytes(), context.server.stats()["rows"]
evaluate(1_000_000)
after = resident_bytes(), context.server.stats()["rows"]
status = Path("/proc/self/status").read_text()
peak = 1024 * int(status.split("VmHWM:")[1].split()[0])
print(json.dumps([before, after, peak]))
cpudist.shutdown()
"""


def test_a_billion_rows_fit_and_evaluation_keeps_nothing():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    before, after, peak = json.loads(done.stdout.splitlines()[-1])
    assert peak < 10**9
    assert 30_000 < before[1] <= 20 * 2000
    assert after[1] == before[1]
    assert after[0] - before[0] < 32 * 2**20

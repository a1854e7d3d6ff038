# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Training that loses a process, and what its survivors must be told in time."""

from __future__ import annotations

import os
import re
import signal

import torch
from sync_cases import KEY

import torch_cpudist as cpudist

# Promised: a dead process is named within a second, a frozen one within a second after
# CPUDIST_LIVENESS_MS. Beside other processes the first takes longer, but never as long
# as the clocks of the second do by default.
PROMISED_S = 1.0
KILLED_S = 2.8
STOPPED_S = 4.0
# As by default.
LIVENESS = {"CPUDIST_LIVENESS_MS": "3000"}
LIVENESS_S = 4.0
INTERRUPTED_S = 5.0  # promised: a second, for a process that has a core
# Of the kills with a key: links are closed and ends seen as without.
LOSSES = [(signal.SIGKILL, KEY, KILLED_S), (signal.SIGSTOP, LIVENESS, LIVENESS_S)]


def make():
    model = torch.nn.Sequential(
        torch.nn.EmbeddingBag(50, 4, sparse=True), torch.nn.Linear(4, 1)
    )
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    return model, cpudist.DistributedOptimizer(optimizer, model)


def step(model, opt):
    opt.zero_grad()
    model(torch.randint(50, (8, 3))).square().mean().backward()
    opt.step()


def train_forever(context, report):
    """Steps without end; reports once that training runs."""
    model, opt = make()
    for _ in range(3):
        step(model, opt)
    report("training")
    while True:
        step(model, opt)


def check_loss(entry, since_s, limit_s, role_and_rank):
    """The error of a survivor: typed, in time, naming role, rank and address."""
    assert entry["value"]["type"] == "PeerLostError", entry
    text = entry["value"]["text"]
    assert re.search(role_and_rank, text), text
    assert re.search(r"unix:|tcp:|inproc:", text), text
    assert "pid" in text, text
    assert entry["time_s"] - since_s <= limit_s, entry["time_s"] - since_s


def check_ended(entry):
    """The error of a survivor on the host of who was killed: it was seen to have ended.

    That is proof, unlike a clock, and comes long before one. Not for ranks with much
    shared memory, whose sockets are closed before that is freed; nor where the kernel
    or a container has no pidfds.
    """
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return
    assert "its process has ended" in entry["value"]["text"], entry

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Sync under torchrun, over real sockets: every rule in every layout, in one launch.

The parameters equal those of one process within the parity bar, and those of the same
ranks as threads over the in-process channel bit for bit.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from patience import PATIENCE_S
from programs import Launcher
from sync_cases import (
    RULES,
    SMALL_BLOCKS,
    Batches,
    assert_same_bits,
    largest_difference,
    reference,
    train,
)
from train_parity import LAYOUTS, file_of

pytestmark = pytest.mark.processes

TESTS = Path(__file__).resolve().parent.parent
SUPPORT = (TESTS / "support", TESTS / "support" / "processes")
SCRIPT = Path(__file__).resolve().parent / "train_parity.py"


@pytest.fixture(scope="module")
def folder(preloaded, tmp_path_factory):
    """Where one launch, of as many ranks as the largest layout has, left its states."""
    folder = tmp_path_factory.mktemp("torchrun")
    launcher = Launcher(folder, preloaded.environment())
    ranks = max(trainers + servers for trainers, servers in LAYOUTS)
    program = launcher(
        f"torchrun --standalone --nproc-per-node={ranks} '{SCRIPT}' '{folder}'",
        CPUDIST_THREADS=1,
        PYTHONPATH=os.pathsep.join(map(str, (TESTS.parent, *SUPPORT))),
    )
    try:
        assert program.wait(PATIENCE_S) == 0, program.text()
        yield folder
    finally:
        launcher.end()


@pytest.mark.parametrize(("trainers", "servers"), LAYOUTS)
def test_equals_one_process(trainers, servers, folder):
    found = [
        torch.load(folder / file_of(rank, trainers, servers), weights_only=True)
        for rank in range(trainers)
    ]
    for name, rule in RULES.items():
        threads = train(rule, Batches(trainers), servers, strategy=SMALL_BLOCKS)
        expected, allowed = reference(name, trainers)
        for states in found:
            assert_same_bits(states[name], threads[0])
            assert largest_difference(states[name], expected) <= allowed, name

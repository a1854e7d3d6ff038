# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Sync under torchrun, over real sockets: every rule in one run per layout.

The parameters equal those of one process within the parity bar, and those of the same
ranks as threads over the in-process channel bit for bit.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

import pytest
import torch
from ahead import ahead
from sync_cases import (
    RULES,
    SMALL_BLOCKS,
    Batches,
    assert_same_bits,
    largest_difference,
    reference,
    train,
)

TESTS = Path(__file__).resolve().parent.parent
SCRIPT = Path(__file__).resolve().parent / "train_parity.py"
LAYOUTS = [(trainers, servers) for trainers in (1, 2, 3) for servers in (0, 2)]


def launched_states(trainers, servers, launch):
    variables = {
        "CPUDIST_SERVERS": servers,
        "CPUDIST_THREADS": 1,
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS / "support")]),
    }
    ranks = trainers + servers
    program = launch(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc-per-node={ranks}", str(SCRIPT), str(launch.folder)),
        ],
        **variables,
    )
    assert program.wait(110) == 0, program.text()
    return [
        torch.load(
            launch.folder / f"trainer-{rank}-of-{trainers}.pt", weights_only=True
        )
        for rank in range(trainers)
    ]


@pytest.fixture(scope="module")
def launched(request, tmp_path_factory):
    jobs = {
        f"test_equals_one_process[{trainers}-{servers}]": functools.partial(
            launched_states, trainers, servers
        )
        for trainers, servers in LAYOUTS
    }
    with ahead(request, tmp_path_factory, jobs) as launches:
        yield launches


@pytest.mark.parametrize(("trainers", "servers"), LAYOUTS)
def test_equals_one_process(trainers, servers, launched, request):
    found = launched.result(request)
    for name, rule in RULES.items():
        threads = train(rule, Batches(trainers), servers, strategy=SMALL_BLOCKS)
        expected, allowed = reference(name, trainers)
        for states in found:
            assert_same_bits(states[name], threads[0])
            assert largest_difference(states[name], expected) <= allowed, name

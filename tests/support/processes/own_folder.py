# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A folder for tests that run a script's code in this process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import torch_cpudist as cpudist


@pytest.fixture
def in_a_folder(monkeypatch, tmp_path):
    """A folder to write to; of what the code has begun nothing stays."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CPUDIST_THREADS", "1")
    with torch.random.fork_rng():
        yield
    if dist.is_initialized():
        cpudist.shutdown("none")

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The case ``allreduce`` of the benchmark: which backends it leaves out."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
# The benchmark is run as a script: its modules are found beside run.py.
sys.path.insert(0, str(BENCHMARKS))

from cases import allreduce  # noqa: E402
from peers import deepspeed_shm  # noqa: E402

import torch_cpudist as cpudist  # noqa: E402
from torch_cpudist.backends import ccl, ccl_runtime  # noqa: E402


def test_only_a_backend_that_is_not_there_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent() -> None:
        raise cpudist.BackendUnavailableError("ccl needs oneCCL.\nMore of it.")

    monkeypatch.setattr(deepspeed_shm, "missing", lambda ranks: "")
    monkeypatch.setattr(ccl_runtime, "find", absent)
    assert allreduce.missing_backends(1) == {"ccl": "ccl needs oneCCL."}
    monkeypatch.setattr(ccl_runtime, "find", lambda: None)
    assert allreduce.missing_backends(1) == {}
    monkeypatch.delattr(ccl, "check")
    with pytest.raises(AttributeError, match="check"):
        allreduce.missing_backends(1)


def test_deepspeed_is_missing_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("no compiler\nand much more")

    monkeypatch.setattr(ccl_runtime, "find", lambda: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install" in allreduce.missing_backends(1)["deepspeed"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(deepspeed_shm, "_operator", fails)
    reason = "RuntimeError: no compiler"
    assert allreduce.missing_backends(1) == {"deepspeed": reason}
    assert "one core for each" in allreduce.missing_backends(1000)["deepspeed"]


def test_what_deepspeed_leaves_of_a_launch_is_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(deepspeed_shm, "MEMORY", tmp_path)
    kept = tmp_path / "deepspeed_allreduce_buffer_0_cpudist-bench_other_0"
    left = tmp_path / "deepspeed_allreduce_buffer_0_cpudist-bench_mine_1"
    for file in (kept, left):
        file.touch()
    deepspeed_shm.remove_memory("mine")
    assert kept.exists()
    assert not left.exists()

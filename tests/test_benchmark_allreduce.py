# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The case ``allreduce`` of the benchmark: which backends it leaves out."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
# The benchmark is run as a script: its modules are found beside run.py.
sys.path.insert(0, str(BENCHMARKS))

from cases import allreduce  # noqa: E402

import torch_cpudist as cpudist  # noqa: E402
from torch_cpudist.backends import ccl, ccl_runtime  # noqa: E402


def test_only_a_backend_that_is_not_there_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent() -> None:
        raise cpudist.BackendUnavailableError("ccl needs oneCCL.\nMore of it.")

    monkeypatch.setattr(ccl_runtime, "find", absent)
    assert allreduce.missing_backends() == {"ccl": "ccl needs oneCCL."}
    monkeypatch.setattr(ccl_runtime, "find", lambda: None)
    assert allreduce.missing_backends() == {}
    monkeypatch.delattr(ccl, "check")
    with pytest.raises(AttributeError, match="check"):
        allreduce.missing_backends()

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a trainer is told that waits for values which nobody loads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import torch_cpudist as cpudist
from torch_cpudist.resuming.under_way import UnderWay
from torch_cpudist.snapshot.directory import Directory


def waiting(path):
    client = SimpleNamespace(check=lambda: None)
    run = SimpleNamespace(
        run_id=7,
        incarnation=1,
        trainer_rank=1,
        trainer_count=2,
        trainer_client=lambda: client,
    )
    return UnderWay(run, Directory(path), 0)


def test_at_the_start_every_trainer_has_to_resume(tmp_path):
    with pytest.raises(cpudist.OperationTimeoutError) as raised:
        waiting(tmp_path).wait(0.0)
    told = str(raised.value)
    assert told.startswith("resume: trainer 0 has not loaded or begun anything")
    assert "Every trainer has to call resume()" in told


def test_after_a_loss_it_is_trainer_0_that_is_missing(tmp_path):
    with pytest.raises(cpudist.OperationTimeoutError) as raised:
        waiting(tmp_path).wait(0.0, after_loss=True)
    told = str(raised.value)
    assert "If trainer 0 has ended, start its job again" in told
    assert "resume()" not in told

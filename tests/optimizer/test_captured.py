# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Marks that others did not come to: how long none is made after one."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from torch_cpudist.drivers.saving import CutAnswer
from torch_cpudist.optimizer.captured import Captured
from torch_cpudist.optimizer.saves import Save
from torch_cpudist.optimizer.schedules import Schedules


@pytest.mark.parametrize(("waited_s", "rests_s"), [(10.0, 200.0), (0.1, 0.0)])
def test_after_a_wait_in_vain_nobody_is_kept_for_a_while(waited_s, rests_s):
    told = []
    captured = Captured(
        SimpleNamespace(together=False),
        lambda: SimpleNamespace(skip=told.append),
        None,
        Schedules({}),
        None,
        rank=1,
    )
    now = time.monotonic()
    captured.add(Save(3, 9, {}, now - waited_s, whole=True, base=None, name=""))
    assert not captured.rests(now)
    captured.answered(CutAnswer(3, False, "", "no marker in time from trainers 2"))
    assert told == ["no marker in time from trainers 2"]
    assert not captured
    assert captured.rests(now + 0.95 * rests_s) == (rests_s > 0)
    # An hour more than a slow machine takes from one line to the next.
    assert not captured.rests(now + 20 * (waited_s + 3600) + 1)

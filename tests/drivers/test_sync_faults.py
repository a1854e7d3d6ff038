# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Lost, repeated, reordered frames and cut links change no bit of the result."""

from __future__ import annotations

import pytest
from sync_cases import KEY, RULES, SMALL_BLOCKS, Batches, assert_same_bits, train

import torch_cpudist as cpudist
from torch_cpudist import _core

PLANS = {
    "drop": {"drop": 0.2},
    "duplicate": {"duplicate": 0.2},
    "reorder": {"reorder": 0.5, "duplicate": 0.2},
    "cut": {"cut": 0.03},
    "all": {"drop": 0.2, "duplicate": 0.2, "reorder": 0.2, "cut": 0.01},
}
COUNTERS = {
    "drop": "dropped",
    "duplicate": "duplicated",
    "reorder": "reordered",
    "cut": "cut",
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize(
    ("clip", "variables"),
    [(None, KEY), (cpudist.ClipNorm(0.5), {}), (cpudist.ClipTensorNorm(0.2), KEY)],
    ids=["key", "clip_norm", "clip_each_key"],
)
def test_the_result_is_that_of_an_undisturbed_run(name, clip, variables):
    batches = Batches(3, steps=12)
    options = {"strategy": SMALL_BLOCKS, "clip": clip}
    plain = train(RULES["adam"], batches, 2, **options)
    plan = _core.FaultPlan(seed=11, **PLANS[name])
    network = _core.InprocNetwork(plan)
    disturbed = {"network": network, "variables": variables}
    found = train(RULES["adam"], batches, 2, **disturbed, **options)
    for ours, theirs in zip(found, plain, strict=True):
        assert_same_bits(ours, theirs)
    counts = network.counts()
    for fault in PLANS[name]:
        assert getattr(counts, COUNTERS[fault]) > 0, fault

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Runs of rows to the servers and back."""

from __future__ import annotations

import numpy as np
import pytest
from core_cluster import DIM, ROWS, Cluster, address

from torch_cpudist import _core, errors


def test_runs_of_rows_go_to_the_servers_and_back():
    config = _core.OptimizerConfig("adagrad", lr=0.1, eps=1e-10)
    with Cluster(1, 3, config=config) as cluster:
        (trainer,) = cluster.start().trainers
        rng = np.random.default_rng(1)
        table, state = rng.random((2, ROWS, DIM), dtype=np.float32)
        counts = rng.integers(1, 9, ROWS).astype(np.uint32)
        arrays = table, state, counts
        trainer.set.store_run(0, 0, ROWS, *[address(array) for array in arrays], 17)
        found = [np.zeros_like(array) for array in arrays]
        step = trainer.set.fetch_run(0, 0, ROWS, *[address(array) for array in found])
        assert step == 17
        for array, expected in zip(found, arrays, strict=True):
            np.testing.assert_array_equal(array, expected)
        found = [np.zeros_like(array[3:]) for array in arrays]
        step = trainer.set.fetch_run(0, 3, ROWS, *[address(array) for array in found])
        assert step == 17
        for array, expected in zip(found, arrays, strict=True):
            np.testing.assert_array_equal(array, expected[3:])
        with pytest.raises(errors.RowOutOfRangeError, match=f"0 .. {ROWS + 1} of"):
            trainer.set.fetch_run(0, 0, ROWS + 1, address(table))

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Averages of a snapshot's rows, brought to its moment for another decay."""

from __future__ import annotations

import numpy as np
import pytest

from torch_cpudist.served.loading import settle_averages


@pytest.mark.parametrize("round_", [10, 2**32 + 1])
def test_averages_are_of_the_moment_or_of_the_row_if_that_is_later(round_) -> None:
    seen = [round_ - 1, round_ - 4, round_, round_ + 5, round_ - 4]
    columns = {
        "weight": np.zeros((5, 2), np.float32),
        "average": np.ones((5, 2), np.float32),
        "count": np.array([3, 3, 3, 3, 0], np.uint32),
        "last_seen": np.array([one % 2**32 for one in seen], np.uint32),
    }
    settle_averages(columns, round_, 0.5)
    # Servers that were ahead of the manifest's round had updated the third and fourth.
    expected = [1, 0.125, 1, 1, 0]
    np.testing.assert_array_equal(columns["average"][:, 0], expected)
    found = columns["last_seen"].astype(np.int64)
    then = [round_ - 1, round_ - 1, round_, round_ + 5, round_ - 1]
    np.testing.assert_array_equal(found, [one % 2**32 for one in then])
    assert columns["last_seen"].dtype == np.uint32

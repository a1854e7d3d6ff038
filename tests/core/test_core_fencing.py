# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Numbers of a trainer's starts, as clients and servers have them."""

from __future__ import annotations

import pytest
from core_cluster import Cluster

from torch_cpudist import errors


def test_who_starts_with_a_number_that_is_taken_is_told_the_last_one():
    with Cluster(1, 1, elastic=True) as cluster:
        cluster.start()
        taken = cluster.make_client(0, 1, incarnation=5, host="stranger")
        taken.connect()
        for incarnation in (2, 5):
            late = cluster.make_client(0, 1, incarnation=incarnation, host="trainer")
            assert late.fenced_by() == 0
            with pytest.raises(errors.FencedError):
                late.connect()
            assert late.fenced_by() == 5
        following = cluster.make_client(0, 1, incarnation=6, host="trainer")
        following.connect()
        assert following.fenced_by() == 0
        following.abort("the test is over")
        taken.abort("the test is over")

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``global_shuffle`` among processes: every record once, by the seed alone."""

from __future__ import annotations

import itertools
import os
import signal
from collections import Counter

import pytest
from data_cases import records, write
from patience import PATIENCE_S
from shuffle_cases import shuffled

from torch_cpudist import testing

pytestmark = pytest.mark.processes

COUNT = 6000
VARIABLES = {"OMP_NUM_THREADS": "1", "CPUDIST_THREADS": "1"}


def test_records_are_dealt_by_the_seed(tmp_path):
    drawn = records(COUNT)
    files = write(tmp_path, [drawn[:100], drawn[100:5000], drawn[5000:]])
    variables = VARIABLES | {"SHUFFLE_FILES": os.pathsep.join(map(str, files))}
    with testing.ProcessRanks(shuffled, 3, variables=variables) as ranks:
        found = [ranks.expect(rank, "report", PATIENCE_S)["value"] for rank in range(3)]
        killed_s = ranks.signal(2, signal.SIGKILL)
        lost = [ranks.expect(rank, "error", PATIENCE_S) for rank in range(2)]
    for name in ("before", "once", "again", "dealt_before", "dealt"):
        assert sorted(n for one in found for n in one[name]) == list(range(COUNT))
    for one in found:
        assert one["all"] == COUNT
        assert one["again"] == one["once"]
        for other in found:  # a third of each trainer's records goes to each
            count = len(other["before"])
            came = len(set(one["once"]) & set(other["before"]))
            assert abs(came - count / 3) < 5 * (count * 2 / 9) ** 0.5
        ascending = sum(a < b for a, b in itertools.pairwise(one["once"]))
        assert abs(ascending / len(one["once"]) - 0.5) < 0.06
        count = len(one["dealt"])  # files that were dealt are shuffled globally, too
        assert abs(count - COUNT / 3) < 5 * (COUNT * 2 / 9) ** 0.5
    homes = Counter()
    for rank, one in enumerate(found):
        homes.update({(rank, key[0]) for _, *key in one["by_key"] if key})
    assert len({key for _, key in homes}) == len(homes)  # one trainer for each first id
    assert sorted(n for one in found for n, *_ in one["by_key"]) == list(range(COUNT))
    for one in lost:
        assert one["value"]["type"] == "PeerLostError", one
        assert one["time_s"] - killed_s < 10

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Averages of rows are those of the moment of the snapshot."""

from __future__ import annotations

import numpy as np
from small_snapshots import commit

from torch_cpudist.inference.from_snapshot import SnapshotValues
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.reading import Snapshot


def test_rows_that_were_ahead_of_the_cut_have_their_own_average(tmp_path) -> None:
    directory = Directory(tmp_path)
    manifest = commit(directory, number=6)
    snapshot = Snapshot(directory.folder(manifest.name))
    keys = np.arange(0, 40, 3)
    stored = snapshot.rows("users.weight", keys).columns
    found = {}
    for run in SnapshotValues(snapshot, averaged=True).runs("users.weight"):
        found.update(zip(run.keys.tolist(), run.columns["weight"], strict=True))
    assert sorted(found) == keys.tolist()
    ahead = 0
    for i, key in enumerate(keys.tolist()):
        weight, average = stored["weight"][i], stored["average"][i]
        missed = 6 - int(stored["last_seen"][i]) - 1
        ahead += missed < 0
        left = 0.5 ** max(missed, 0) if stored["count"][i] else 0.0
        expected = weight + left * (average - weight)
        np.testing.assert_allclose(found[key], expected, rtol=1e-6)
    assert ahead > 2

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Tables whose rows go are saved, go on, and leave the keys that went in deltas."""

from __future__ import annotations

import pytest
import torch
from open_cases import KEYS, read
from open_jobs import STOP, assert_goes_on, module_of, ranks, train
from snapshot_cases import settle

import torch_cpudist as cpudist
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.reading import Snapshot

EVICT = cpudist.Evict(unseen_steps=2)


@pytest.mark.parametrize(("trainers", "servers", "then"), [(1, 1, 3), (2, 3, 2)])
def test_a_run_goes_on_to_the_bit(tmp_path, trainers, servers, then):
    assert_goes_on(tmp_path, trainers, servers, then, eviction=EVICT)


@pytest.mark.parametrize("then", [1, 3])
def test_deltas_have_the_keys_that_went(tmp_path, then):
    """A chain of a whole one and deltas is what the servers had."""
    often = {"every_steps": 100, "delta_every_steps": 2, "full_every": 10, "keep": 20}

    def made(seed=1):
        return [module_of(seed, eviction=EVICT) for _ in range(2)]

    def first(opt, module, rank):
        opt.resume(tmp_path, **often)
        for at in range(STOP + 1):
            if at == STOP:
                found = read(module), opt.table_stats()["weight"]
            train(opt, module, rank, at, at + 1)
            # Written within the step behind the one that it is of.
            settle(opt)
        return *found, opt.stats()["snapshot"]

    def second(opt, module, rank):
        started = opt.resume(tmp_path)
        assert started.step == STOP
        return read(module), opt.table_stats()["weight"]["rows"]

    expected, stats, saved = ranks(first, tmp_path, made(), 2)[0]
    assert stats["evicted"] > 0
    assert (saved["saved"], saved["deltas"], saved["failed"]) == (4, 3, 0)
    directory = Directory(tmp_path)
    newest = Snapshot(directory.folder(directory.newest()))
    assert len(newest.members) > 2
    assert newest.verify() == []
    assert sum(len(one.gone("weight")) for one in newest.members) > 0
    found = newest.rows("weight", KEYS)
    assert int(found.found.sum()) == stats["rows"]
    for rows, count in ranks(second, tmp_path, made(seed=2), then):
        assert torch.equal(rows, expected)
        assert count == stats["rows"]

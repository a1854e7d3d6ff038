# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""AllReduce and LocalSGD: trainers as processes, which gloo needs."""

from __future__ import annotations

import signal

import pytest
from collective_cases import ONE_THREAD, averages, one_stops_early, until_lost, hybrids

from torch_cpudist.testing import ProcessRanks

START_S = 60.0


def test_hybrids():
    with ProcessRanks(hybrids, 2, variables=ONE_THREAD) as ranks:
        for found in ranks.results(START_S):
            for k, v in found.items():
                print(k, v)


def test_early():
    with ProcessRanks(one_stops_early, 2, variables=ONE_THREAD) as ranks:
        print(ranks.expect(0, "error", START_S))
        print(ranks.expect(1, "error", START_S))


def test_killed():
    with ProcessRanks(until_lost, 3, variables=ONE_THREAD) as ranks:
        for r in range(3):
            ranks.expect(r, "report", START_S)
        now = ranks.signal(2, signal.SIGKILL)
        for r in range(2):
            e = ranks.expect(r, "error", START_S)
            print(e["time_s"] - now, e)

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A rank that ``init()`` refuses is told to the others, which would wait for it."""

from __future__ import annotations

import pytest
from patience import PATIENCE_S
from rank_threads import in_threads
from torch.distributed import HashStore

import torch_cpudist as cpudist
from torch_cpudist.launch.default_group import DefaultGroup


def started(ranks, **options):
    """What ``init()`` of each rank raises, by rank."""
    store = HashStore()

    def start(rank):
        cpudist.init(
            rank=rank,
            world_size=ranks,
            store=store,
            # A rank that waits is still there when it is joined.
            timeout_s=2 * PATIENCE_S,
            variables={},
            **options,
        )

    return in_threads(ranks, start)


@pytest.mark.parametrize("servers", [0, 1])
@pytest.mark.parametrize("refused", [0, 2])
def test_all_are_told_at_once_why_one_cannot_take_part(refused, servers, monkeypatch):
    def check(self, environment, layout):
        if environment.rank == refused:
            raise cpudist.BackendUnavailableError("there is no MPI here")

    monkeypatch.setattr(DefaultGroup, "check", check)
    errors = started(3, servers=servers)
    own = errors.pop(refused)
    assert isinstance(own, cpudist.BackendUnavailableError)
    for error in errors:
        assert isinstance(error, cpudist.ConfigurationError)
        assert f"rank {refused} cannot take part" in str(error)
        assert "BackendUnavailableError: there is no MPI here" in str(error)

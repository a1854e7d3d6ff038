# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A rank that ``init()`` refuses is told to the others, which would wait for it."""

from __future__ import annotations

import threading

import pytest
from torch.distributed import HashStore

import torch_cpudist as cpudist
from torch_cpudist.process_group import TrainerGroup

TIME_S = 60.0


def started(ranks, **options):
    """What ``init()`` of each rank raises, by rank."""
    store, errors = HashStore(), [None] * ranks

    def start(rank):
        try:
            cpudist.init(
                rank=rank,
                world_size=ranks,
                store=store,
                timeout_s=TIME_S,
                variables={},
                **options,
            )
        except cpudist.Error as error:
            errors[rank] = error

    threads = [
        threading.Thread(target=start, args=(r,), daemon=True) for r in range(ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIME_S / 2)  # less than what they would wait
        assert not thread.is_alive()
    return errors


@pytest.mark.parametrize("servers", [0, 1])
@pytest.mark.parametrize("refused", [0, 2])
def test_all_are_told_at_once_why_one_cannot_take_part(refused, servers, monkeypatch):
    def check(self, environment, layout):
        if environment.rank == refused:
            raise cpudist.BackendUnavailableError("there is no MPI here")

    monkeypatch.setattr(TrainerGroup, "check", check)
    errors = started(3, servers=servers)
    own = errors.pop(refused)
    assert isinstance(own, cpudist.BackendUnavailableError)
    for error in errors:
        assert isinstance(error, cpudist.ConfigurationError)
        assert f"rank {refused} cannot take part" in str(error)
        assert "BackendUnavailableError: there is no MPI here" in str(error)

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A global shuffle proves the run's key on its links."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import torch_cpudist as cpudist
from torch_cpudist import _core
from torch_cpudist.data.reading import global_shuffle

KEY = "a key of at least thirty-two bytes"


class Made(Exception):
    """The core's part would be made."""


@pytest.mark.parametrize("key", [KEY, None])
def test_links_of_a_shuffle_have_the_run_s_key(monkeypatch, key):
    found = {}

    def make(_, **options):
        found.update(options)
        raise Made

    monkeypatch.setattr(_core, "DataShuffle", make)
    reading = SimpleNamespace(core_schema=lambda: None)
    variables = {"CPUDIST_SECRET": key} if key else {}
    context = cpudist.init(variables=variables)
    share = (context.trainer_rank, context.trainer_count)
    try:
        with pytest.raises(Made):
            global_shuffle.exchange_records(None, reading, share, 1, None)
    finally:
        context.abort("the test is over")
    assert found["secret"] == (_core.Secret(key.encode()) if key else None)

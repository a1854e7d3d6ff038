# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Hooks run and ``state`` answers as users of torch's optimizers expect."""

from __future__ import annotations

import pytest
from optimizer_cases import alone, linear, step_on, wrapped

import torch_cpudist as cpudist


def test_state_dict_hooks_run_as_in_torch():
    def body():
        model = linear()
        optimizer = wrapped(model)
        seen = []
        optimizer.register_state_dict_pre_hook(lambda o: seen.append("before saving"))
        optimizer.register_state_dict_post_hook(lambda o, d: {**d, "extra": 1})
        optimizer.register_load_state_dict_pre_hook(
            lambda o, d: {k: v for k, v in d.items() if k != "extra"}
        )
        optimizer.register_load_state_dict_post_hook(lambda o: seen.append("loaded"))
        saved = optimizer.state_dict()
        assert saved["extra"] == 1
        optimizer.load_state_dict(saved)
        assert seen == ["before saving", "loaded"]

    alone(body)


def test_state_says_where_it_is():
    def body():
        model = linear()
        optimizer = wrapped(model)
        step_on(model, optimizer)
        for read in (optimizer.state.__getitem__, optimizer.state.get):
            with pytest.raises(cpudist.UnsupportedOptimizerError, match="state_dict"):
                read(model.weight)

    alone(body)

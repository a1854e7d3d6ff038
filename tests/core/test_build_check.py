# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which torch, Python and platform the package accepts, before it is imported."""

from __future__ import annotations

import pytest
import torch

from torch_cpudist import _build_check


@pytest.mark.parametrize(
    "running", ["2.11.0+cu130", "2.12.0", "2.13.0", torch.__version__]
)
def test_one_build_serves_every_torch_of_the_list(running):
    _build_check.check_torch(running, "2.13.0+cpu")


@pytest.mark.parametrize("running", ["2.9.1", "2.10.0", "2.14.0", "3.13.0"])
def test_another_torch_is_refused_by_name(running):
    with pytest.raises(ImportError) as caught:
        _build_check.check_torch(running, "2.13.0+cpu")
    for word in (
        f"torch {running} is",
        "2.11 or 2.12 or 2.13",
        "built against torch 2.13.0",
    ):
        assert word in str(caught.value)


def test_platform_and_python_are_checked():
    _build_check.check_platform("linux", (3, 11, 0))
    with pytest.raises(ImportError, match="Linux only; this is darwin"):
        _build_check.check_platform("darwin", (3, 12, 0))
    with pytest.raises(ImportError, match=r"Python 3\.11 or newer.*3\.10\.2"):
        _build_check.check_platform("linux", (3, 10, 2))

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Plug-ins are imported when they are used, and say what they need."""

from __future__ import annotations

import subprocess
import sys

import pytest
from programs import clean_environment

import torch_cpudist as cpudist
from torch_cpudist.errors import BackendUnavailableError

NAME = "torch_cpudist.integrations.lightning"


def test_without_its_project_a_plug_in_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    for one in ("lightning", "lightning.pytorch", "lightning.pytorch.accelerators"):
        monkeypatch.setitem(sys.modules, one, None)
    monkeypatch.delitem(vars(cpudist.integrations), "lightning", raising=False)
    with pytest.raises(BackendUnavailableError, match=r"torch-cpudist\[lightning\]"):
        cpudist.integrations.lightning  # noqa: B018


def test_there_are_no_others():
    assert dir(cpudist.integrations) == ["lightning"]
    with pytest.raises(AttributeError, match="has no attribute 'ray'"):
        cpudist.integrations.ray  # noqa: B018


@pytest.mark.integrations
@pytest.mark.processes
def test_importing_the_package_imports_no_other_project():
    code = (
        "import sys, torch_cpudist; assert 'lightning' not in sys.modules; "
        "torch_cpudist.integrations.lightning; assert 'lightning' in sys.modules"
    )
    pytest.importorskip("lightning")
    subprocess.run([sys.executable, "-c", code], check=True, env=clean_environment())

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What importing the package costs every process of a job."""

from __future__ import annotations

import subprocess
import sys

import pytest
from patience import PATIENCE_S

_CODE = (
    "import sys, torch_cpudist; print(*sorted(m for m in sys.modules if m.startswith("
    "('torch._dynamo', 'torch._inductor'))))"
)


@pytest.mark.processes
def test_no_compiler_is_imported_before_somebody_compiles():
    ran = subprocess.run(
        [sys.executable, "-c", _CODE],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == []

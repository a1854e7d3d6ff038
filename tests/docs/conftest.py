# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What tests of pages share: a folder for the code of one, and the site of all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from own_folder import in_a_folder
from patience import PATIENCE_S

__all__ = ["in_a_folder"]

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site made of docs/, built without a warning."""
    folder = tmp_path_factory.mktemp("site")
    # The theme's note on its own future is no warning of this site.
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(folder)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    return folder

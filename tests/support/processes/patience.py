# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How long tests wait for what must come: the one deadline of tests that time nothing.

Reached by a failing test only, and so long that a machine of two cores with many busy
programs beside the tests gets there. pytest's own limit for each test (pyproject.toml)
is three times as long, so that a test fails with the words of what it waited for.
"""

from __future__ import annotations

from datetime import timedelta

PATIENCE_S = 300.0
PATIENCE = timedelta(seconds=PATIENCE_S)

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``python -m torch_cpudist.snapshot list|verify|rows|diff|compact``."""

from __future__ import annotations

import sys

from torch_cpudist.snapshot.tools.commands import main

if __name__ == "__main__":
    sys.exit(main())

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``python -m torch_cpudist``: doctor (docs/doctor.md), top (docs/monitoring.md)."""

from __future__ import annotations

import sys

from torch_cpudist.doctor import commands as doctor
from torch_cpudist.top import commands as top

COMMANDS = {"doctor": doctor.main, "top": top.main}


def main() -> int:
    """Runs the command that the first argument names."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in COMMANDS:
        print(f"usage: python -m torch_cpudist {'|'.join(COMMANDS)} [--help]")
        return 0 if name in ("-h", "--help") else 2
    return COMMANDS[name](sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())

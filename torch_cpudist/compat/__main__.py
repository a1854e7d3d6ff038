# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``python -m torch_cpudist.compat SCRIPT [ARGUMENT...]``."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from torch_cpudist.compat.modules import install

_USAGE = (
    "usage: python -m torch_cpudist.compat SCRIPT [ARGUMENT...]\n\n"
    "Runs a script that imports oneccl_bindings_for_pytorch or "
    "intel_extension_for_pytorch."
)


def main(arguments: list[str]) -> int:
    """Runs the script as ``python SCRIPT ARGUMENT...`` would, after ``install``."""
    if arguments[:1] in ([], ["-h"], ["--help"]):
        print(_USAGE, file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    script = arguments[0]
    if not Path(script).is_file():
        print(f"{script}: there is no such script\n{_USAGE}", file=sys.stderr)
        return 2
    install()
    sys.argv = arguments
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

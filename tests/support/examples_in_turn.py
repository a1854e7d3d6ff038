# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Runs an example once per strategy, in one launch: ``SCRIPT STRATEGY...``."""

from __future__ import annotations

import os
import runpy
import sys


def main() -> None:
    script, *strategies = sys.argv[1:]
    for strategy in strategies:
        os.environ["CPUDIST_STRATEGY"] = strategy
        print(f"strategy {strategy}", flush=True)
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()

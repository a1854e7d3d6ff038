# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Runs one trainer of one row: ``worker.py JOB [RANK]``, RANK also from torchrun.

``worker.py --probe MODULE...`` imports modules and says which of them cannot be.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import sys
import traceback
from pathlib import Path

from job import Job


def probe(modules: list[str]) -> int:
    """Returns 0 when all ``modules`` import; says on stdout why one does not."""
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:
            print(f"import {name}: {type(error).__name__}: {error}".splitlines()[0])
            return 1
    return 0


def main(arguments: list[str]) -> int:
    if arguments[0] == "--probe":
        return probe(arguments[1:])
    job = Job.load(Path(arguments[0]))
    rank = int(arguments[1]) if len(arguments) > 1 else int(os.environ["RANK"])
    # Outlives a runner that was killed by no more than this, and shows where it hung.
    faulthandler.dump_traceback_later(job.deadline_s, exit=True)
    try:
        importlib.import_module(f"peers.{job.module}").train(job, rank)
    except BaseException:
        job.error_path(rank).write_text(traceback.format_exc())
        raise
    faulthandler.cancel_dump_traceback_later()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

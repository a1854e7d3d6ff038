# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The picture of node2vec.py: the loss, and how alike nodes of an edge are."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
import numpy.typing as npt

matplotlib.use("Agg")

from matplotlib import pyplot as plt

BINS = np.linspace(-1, 1, 61)
MILLION = 1e6


def draw(
    picture: Path,
    points: list[dict[str, float]],
    real: npt.NDArray[np.float32],
    false: npt.NDArray[np.float32],
) -> None:
    """Draw the loss over the nodes walked, and cosines of pairs.

    Args:
        picture: file to write.
        points: words (nodes of walks) and loss, in order.
        real: cosines of edges that were held out.
        false: of pairs of the same degrees that are no edges.
    """
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    walked = [point["words"] / MILLION for point in points]
    axes[0].plot(walked, [p["loss"] for p in points], "o-")
    axes[0].set(xlabel="nodes walked by trainer 0, millions", ylabel="loss of a pair")
    for cosines, label in ((real, "held-out edges"), (false, "no edges")):
        axes[1].hist(cosines, BINS, alpha=0.6, density=True, label=label)
    axes[1].set(xlabel="cosine of two nodes' vectors", ylabel="density")
    least = min(float(real.min()), float(false.min()))
    axes[1].set_xlim(BINS[BINS <= least].max(initial=-1), 1)
    axes[1].legend()
    figure.savefig(picture, dpi=100)
    plt.close(figure)

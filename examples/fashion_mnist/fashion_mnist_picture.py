# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The picture of fashion_mnist.py: accuracy of each epoch, and what was confused."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
import numpy.typing as npt

matplotlib.use("Agg")

from matplotlib import pyplot as plt

# Zalando's names, in the order of the numbers.
NAMES = (
    *("T-shirt", "trouser", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "boot"),
)
Kinds = npt.NDArray[np.int64]


def confused(kinds: Kinds, said: Kinds) -> npt.NDArray[np.float64]:
    """Return which share of each kind (rows) was taken for which (columns)."""
    counts = np.zeros((len(NAMES), len(NAMES)))
    np.add.at(counts, (kinds, said), 1)
    found: npt.NDArray[np.float64] = counts / np.maximum(
        counts.sum(axis=1, keepdims=True), 1
    )
    return found


def draw(picture: Path, accuracies: list[float], kinds: Kinds, said: Kinds) -> None:
    """Draw the test accuracy after every epoch, and kinds against what was said.

    Args:
        picture: file to write.
        accuracies: of every epoch.
        kinds: int64 ``[n]`` of the test pictures.
        said: the same by the model.
    """
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    axes[0].plot(range(1, len(accuracies) + 1), accuracies, "o-")
    axes[0].set(xlabel="epochs", ylabel="test accuracy")
    axes[0].set_xticks(range(1, len(accuracies) + 1))
    shares = axes[1].imshow(confused(kinds, said) ** 0.5, cmap="Blues", vmin=0, vmax=1)
    places = range(len(NAMES))
    axes[1].set_xticks(places, NAMES, rotation=60, ha="right", fontsize="small")
    axes[1].set_yticks(places, NAMES, fontsize="small")
    axes[1].set(xlabel="said", ylabel="is")
    figure.colorbar(shares, label="root of the share")
    figure.savefig(picture, dpi=100)
    plt.close(figure)

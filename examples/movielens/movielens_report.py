# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The picture of movielens.py: what is found per epoch, and a map of the movies."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
import numpy.typing as npt

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator

MOST_GENRES = 6


def plane(vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the two directions ``[n, 2]`` in which vectors differ most (PCA)."""
    centred = vectors - vectors.mean(axis=0)
    _, _, directions = np.linalg.svd(centred, full_matrices=False)
    found: npt.NDArray[np.float32] = centred @ directions[:2].T
    return found


def draw(
    picture: Path,
    points: list[dict[str, float]],
    baseline: dict[str, float],
    vectors: npt.NDArray[np.float32],
    genres: list[str],
) -> None:
    """Draw the values of each epoch beside the baseline, and the movies by genre.

    Args:
        picture: file to write.
        points: values of every epoch, by name.
        baseline: the same of the most popular movies.
        vectors: ``[items, dim]`` of movies that were liked often.
        genres: the genre of each.
    """
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    epochs = [point["epoch"] for point in points]
    for name, colour in zip(baseline, ("C0", "C1"), strict=True):
        axes[0].plot(epochs, [p[name] for p in points], "o-", color=colour, label=name)
        label = f"{name}, most popular"
        axes[0].axhline(baseline[name], color=colour, linestyle="--", label=label)
    axes[0].set(xlabel="epochs", ylabel="of later likes", ylim=(0, None))
    axes[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0].legend()
    found = plane(vectors)
    names = np.array(genres)
    kinds, counts = np.unique(names, return_counts=True)
    for kind in kinds[np.argsort(-counts)][:MOST_GENRES]:
        axes[1].scatter(*found[names == kind].T, s=12, label=str(kind))
    axes[1].set(xticks=[], yticks=[], xlabel="movies, by what users like together")
    # Beside the movies: there is one everywhere.
    axes[1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(picture, dpi=100)
    plt.close(figure)

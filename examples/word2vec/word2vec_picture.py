# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The picture of word2vec.py: the loss, and a map of some words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
import numpy.typing as npt

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.text import Text
from matplotlib.transforms import BboxBase

# Of a label, in points, and in which order other lines are tried.
LINE = 9
MOVES = (0, 1, -1, 2, -2, 3, -3, 4, -4)
# Words that most English texts have, by what they have in common.
MILLION = 1e6
GROUPS = {
    "animals": "horse dog cat cow sheep goat",
    "metals": "gold silver iron copper lead tin",
    "food": "bread milk butter cheese wine sugar",
    "of the body": "head hand foot eye ear mouth",
    "at sea": "ship sail mast anchor vessel boat",
    "law": "court judge crime prison law trial",
}


def chosen(words: Sequence[str]) -> tuple[list[int], list[str]]:
    """Return the numbers of the words to draw that there are, and their groups."""
    number = {word: row for row, word in enumerate(words)}
    rows, groups = [], []
    for group, members in GROUPS.items():
        for word in members.split():
            if word in number:
                rows.append(number[word])
                groups.append(group)
    return rows, groups


def plane(vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the two directions ``[n, 2]`` in which vectors differ most (PCA)."""
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    centred = unit - unit.mean(axis=0)
    _, _, directions = np.linalg.svd(centred, full_matrices=False)
    found: npt.NDArray[np.float32] = centred @ directions[:2].T
    return found


def label(axis: Axes, places: npt.NDArray[np.float32], names: Sequence[str]) -> None:
    """Write each name beside its place, a line higher or lower where one is already."""
    taken: list[BboxBase] = []
    for place, name in zip(places, names, strict=True):
        text = axis.annotate(
            name,
            tuple(map(float, place)),
            xytext=(5, 0),
            textcoords="offset points",
            fontsize="small",
            arrowprops={"arrowstyle": "-", "linewidth": 0.4, "color": "0.5"},
        )
        for move in MOVES:
            text.set_position((5, move * LINE))
            text.get_window_extent()  # with its line; and has the text where it belongs
            box = Text.get_window_extent(text)
            if not any(box.overlaps(other) for other in taken):
                break
        taken.append(box)


def draw(
    picture: Path,
    points: list[dict[str, float]],
    words: Sequence[str],
    vectors: npt.NDArray[np.float32],
) -> None:
    """Draw the loss over the words of trainer 0, and words by their vectors.

    Args:
        picture: file to write.
        points: words and loss, in order.
        words: the vocabulary.
        vectors: ``[words, dim]``.
    """
    figure, axes = plt.subplots(
        1, 2, figsize=(11, 5), layout="constrained", width_ratios=[2, 3]
    )
    seen = [point["words"] / MILLION for point in points]
    axes[0].plot(seen, [p["loss"] for p in points], "o-")
    axes[0].set(xlabel="words of trainer 0, millions", ylabel="loss of a pair")
    rows, groups = chosen(words)
    if len(rows) > 2:
        found = plane(vectors[rows])
        for group in dict.fromkeys(groups):
            mine = [i for i, one in enumerate(groups) if one == group]
            axes[1].scatter(*found[mine].T, s=12, label=group)
        axes[1].legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
        axes[1].margins(x=0.1)
    axes[1].set(xticks=[], yticks=[], xlabel="words, by what stands around them")
    figure.draw_without_rendering()  # from here on the axes stay where they are
    if len(rows) > 2:
        label(axes[1], found, [words[row] for row in rows])
    figure.savefig(picture, dpi=100)
    plt.close(figure)

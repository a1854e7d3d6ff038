# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What ``update`` of a metric is given, checked once for all of a collection."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from torch_cpudist.errors import InvalidArgumentError

Array = NDArray[np.float64]
# Below float64 a probability next to 1 is this far from it, as scikit-learn has it.
_FLOAT32_EPS = float(np.finfo(np.float32).eps)
_FLOAT64_EPS = float(np.finfo(np.float64).eps)


@dataclass
class Samples:
    """Predictions, labels and weights of one update: ``[n]``, finite.

    Attributes:
        scores: predictions as they were given.
        labels: as they were given.
        weights: at least 0; ``None``: all 1.
        eps: distance of the given type's neighbours of 1, for clipping.
        groups: whole numbers, of which samples of one group have the same one;
            ``None``: there are no groups.
    """

    scores: Array
    labels: Array
    weights: Array | None
    eps: float
    groups: NDArray[np.int64] | None = None

    def probabilities(self, from_logits: bool) -> Array:
        """The predictions in 0 to 1.

        Raises:
            InvalidArgumentError: they are not, and not declared to be logits.
        """
        return self._sigmoids if from_logits else self._checked_scores

    def predictions(self, from_logits: bool) -> Array:
        """The predictions: any numbers, or sigmoids of logits."""
        return self._sigmoids if from_logits else self.scores

    @cached_property
    def _sigmoids(self) -> Array:
        return np.asarray(np.exp(-np.logaddexp(0.0, -self.scores)))

    @cached_property
    def _checked_scores(self) -> Array:
        _check(
            (self.scores >= 0) & (self.scores <= 1),
            self.scores,
            "predictions must be probabilities, 0 to 1",
            " Pass from_logits=True to the metric if they are logits.",
        )
        return self.scores

    @cached_property
    def soft_labels(self) -> Array:
        """The labels, if they are probabilities."""
        inside = (self.labels >= 0) & (self.labels <= 1)
        _check(inside, self.labels, "labels must be in 0 to 1")
        return self.labels

    @cached_property
    def gains(self) -> Array:
        """The labels, if none is negative."""
        _check(self.labels >= 0, self.labels, "labels must be gains, at least 0")
        return self.labels

    @property
    def needed_groups(self) -> NDArray[np.int64]:
        """The groups, if they were given.

        Raises:
            InvalidArgumentError: they were not.
        """
        if self.groups is None:
            raise InvalidArgumentError(
                "metric: GAUC, NDCG and Recall need the group of each sample. Use "
                "update(predictions, labels, groups=users)."
            )
        return self.groups

    @cached_property
    def clicked(self) -> NDArray[np.bool_]:
        """Which labels are 1, if all are 0 or 1."""
        found = np.asarray(self.labels == 1)
        _check(found | (self.labels == 0), self.labels, "labels must be 0 or 1")
        return found


def _check(good: NDArray[np.bool_], values: Array, rule: str, hint: str = "") -> None:
    if not good.all():
        where = int(np.argmin(good))
        raise InvalidArgumentError(
            f"metric: {rule}; found {values[where]!s} at position {where}.{hint}"
        )


def _flat(name: str, given: Any) -> tuple[Array, tuple[int, ...], float]:
    """Numbers as float64 ``[n]``, their shape, and the eps of their type."""
    if isinstance(given, torch.Tensor):
        if given.is_complex() or given.layout != torch.strided:
            raise InvalidArgumentError(
                f"metric: {name} must be real and dense, found {given.dtype} in "
                f"{given.layout}."
            )
        single = given.dtype != torch.float64
        array = given.detach().to("cpu", torch.float64).numpy()
    else:
        plain = np.asarray(given)
        if plain.dtype.kind not in "biuf":
            raise InvalidArgumentError(
                f"metric: {name} must be numbers, found {plain.dtype}."
            )
        single = plain.dtype.kind == "f" and plain.dtype.itemsize < 8
        array = plain.astype(np.float64)
    flat = array.reshape(-1)
    _check(np.isfinite(flat), flat, f"{name} must be finite")
    return flat, tuple(array.shape), _FLOAT32_EPS if single else _FLOAT64_EPS


def _whole(given: Any) -> tuple[NDArray[np.int64], tuple[int, ...]]:
    """Groups as int64 ``[n]``, and their shape."""
    if isinstance(given, torch.Tensor):
        good = given.layout == torch.strided and not (
            given.is_floating_point() or given.is_complex()
        )
        kind = f"{given.dtype} in {given.layout}"
        plain = given.detach().cpu().numpy() if good else np.empty(0)
    else:
        plain = np.asarray(given)
        good, kind = plain.dtype.kind in "biu" or not plain.size, str(plain.dtype)
    if not good:
        raise InvalidArgumentError(
            f"metric: groups must be whole numbers, found {kind}. "
            "torch_cpudist.hash_keys makes them of texts."
        )
    return plain.reshape(-1).astype(np.int64), tuple(plain.shape)


def samples_of(
    predictions: Any, labels: Any, weights: Any, groups: Any = None
) -> Samples:
    """Checks what ``update`` was given. Local; copies nothing that is float64 already.

    Args:
        predictions: tensor, array or list of any shape and real type.
        labels: as many; booleans, whole numbers or floats.
        weights: as many, at least 0; or ``None``.
        groups: as many whole numbers; or ``None``.

    Raises:
        InvalidArgumentError: shapes that do not flatten equally, a value that is no
            finite number, or a group that is no whole one.
    """
    scores, shape, eps = _flat("predictions", predictions)
    flat_labels, label_shape, _ = _flat("labels", labels)
    _check_shapes(shape, label_shape, "labels")
    flat_weights = None
    if weights is not None:
        flat_weights, weight_shape, _ = _flat("weights", weights)
        _check_shapes(shape, weight_shape, "weights")
        _check(flat_weights >= 0, flat_weights, "weights must be at least 0")
    flat_groups = None
    if groups is not None:
        flat_groups, group_shape = _whole(groups)
        _check_shapes(shape, group_shape, "groups")
    return Samples(scores, flat_labels, flat_weights, eps, flat_groups)


def _check_shapes(
    predictions: tuple[int, ...], other: tuple[int, ...], name: str
) -> None:
    """Refuses other shapes; dimensions of size 1 do not count: ``[n]``, ``[n, 1]``."""
    if [n for n in predictions if n != 1] != [n for n in other if n != 1]:
        raise InvalidArgumentError(
            f"metric: predictions have shape {predictions}, {name} {other}. Pass one "
            f"of {name} for each prediction, in the same order."
        )

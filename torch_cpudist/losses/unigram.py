# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A sampler for classes whose frequencies were counted."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from torch_cpudist.errors import InvalidArgumentError
from torch_cpudist.losses.sampling import Sampler


class UnigramSampler(Sampler):
    """Draws class c with probability counts[c]**power / the sum over all classes.

    ``power=0.75`` is that of word2vec (Mikolov et al., NIPS 2013, section 2.2), 1 draws
    as data do, 0 draws all alike. Memory: 16 bytes per class. A draw is a binary
    search.

    Args:
        counts: ``[classes]``, how often each comes, at least 0. A class of 0 is never
            drawn, and can be no target.
        power: at least 0.
        seed: of the draws; default: drawn from torch's generator.

    Raises:
        InvalidArgumentError: counts are no finite numbers of one dimension, or none is
            above 0; ``power`` or ``seed`` is out of range.
    """

    def __init__(
        self,
        counts: torch.Tensor | npt.ArrayLike,
        power: float = 0.75,
        *,
        seed: int | None = None,
    ) -> None:
        """See the class."""
        given = torch.as_tensor(np.asarray(counts)).double()
        good = given.dim() == 1 and bool((torch.isfinite(given) & (given >= 0)).all())
        if not good or not float(given.sum()) > 0:
            raise InvalidArgumentError(
                "UnigramSampler: expected counts of one dimension, finite, at least 0 "
                f"and one of them above, got shape {list(given.shape)}"
            )
        if not 0 <= power < float("inf"):
            raise InvalidArgumentError(
                f"UnigramSampler: power must be at least 0 and finite, got {power!r}"
            )
        super().__init__(len(given), seed=seed)
        # By the largest: large counts to a large power stay finite.
        parts = torch.where(given > 0, (given / given.max()) ** power, 0.0)
        self._parts = parts
        self._ends = torch.cumsum(parts, dim=0)
        self._last = int(torch.nonzero(parts)[-1])

    def log_probability(self, ids: torch.Tensor) -> torch.Tensor:
        """Log of the probability of each class in one draw, float64.

        Args:
            ids: int64, classes.
        """
        return torch.log(self._parts[ids.long()] / self._ends[-1])

    def _drawn(self, uniform: torch.Tensor) -> torch.Tensor:
        found = torch.searchsorted(self._ends, uniform * self._ends[-1], right=True)
        return found.clamp_(max=self._last)  # but for rounding

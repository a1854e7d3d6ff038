# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A sampler for classes that are numbered by falling frequency."""

from __future__ import annotations

import math

import torch

from torch_cpudist.losses.sampling import Sampler


class LogUniformSampler(Sampler):
    """Draws class c with probability log((c + 2) / (c + 1)) / log(classes + 1).

    About Zipf's law for classes that are numbered by falling frequency, as vocabularies
    are; nothing is stored. The distribution of TensorFlow's
    ``log_uniform_candidate_sampler``.

    Example::

        sampler = cpudist.losses.LogUniformSampler(words, seed=1)
        negatives = sampler.draw(1000, targets)
        loss = cpudist.losses.sampled_softmax(hidden, table, targets, negatives)
    """

    def log_probability(self, ids: torch.Tensor) -> torch.Tensor:
        """Log of the probability of each class in one draw, float64.

        Args:
            ids: int64, classes.
        """
        share = torch.log1p(1 / (ids.double() + 1))
        return torch.log(share) - math.log(math.log1p(self.classes))

    def _drawn(self, uniform: torch.Tensor) -> torch.Tensor:
        found = torch.exp(uniform * math.log1p(self.classes)).long() - 1
        return found.clamp_(0, self.classes - 1)  # but for rounding

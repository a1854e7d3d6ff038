# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Softmax losses over samples of a large table, and samplers of known probabilities.

``in_batch_softmax`` takes the other items of a batch as negatives, ``sampled_softmax``
those that a sampler has drawn. See docs/losses.md.
"""

from torch_cpudist.losses.in_batch import in_batch_softmax
from torch_cpudist.losses.log_uniform import LogUniformSampler
from torch_cpudist.losses.sampled import sampled_softmax
from torch_cpudist.losses.sampling import Negatives, Sampler
from torch_cpudist.losses.unigram import UnigramSampler

__all__ = [
    "LogUniformSampler",
    "Negatives",
    "Sampler",
    "UnigramSampler",
    "in_batch_softmax",
    "sampled_softmax",
]

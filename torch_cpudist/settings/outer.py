# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Settings of an optimizer that steps on what trainers moved, not on gradients."""

from __future__ import annotations

from dataclasses import field

from torch_cpudist.errors import ConfigurationError
from torch_cpudist.settings.fields import check, settings


@settings
class Outer:
    """SGD over the mean of the trainers' movements: local SGD with an outer optimizer.

    The movement of a trainer since its last exchange, negated, is the gradient. With
    the defaults of ``momentum`` and ``lr`` the weights become the mean of the
    trainers'. Source: Stich, "Local SGD Converges Fast and Communicates Little", 2019
    (arXiv:1805.09767); with Nesterov momentum Douillard et al., "DiLoCo", 2023
    (arXiv:2311.08105), who take ``lr=0.7, momentum=0.9, nesterov=True``. In
    ``CPUDIST_*`` any variable of this class switches it on.

    Attributes:
        lr: learning rate, above 0; 1 takes the mean movement as it is.
            ``CPUDIST_OUTER_LR``.
        momentum: what stays of the last outer step, from 0 to 1.
            ``CPUDIST_OUTER_MOMENTUM``.
        nesterov: as in ``torch.optim.SGD``; needs ``momentum``.
            ``CPUDIST_OUTER_NESTEROV``.
    """

    lr: float = field(
        default=1.0,
        metadata={"least": 1e-6, "most": 1e6, "unit": "share of the mean movement"},
    )
    momentum: float = field(
        default=0.0, metadata={"least": 0.0, "most": 1.0, "unit": "share"}
    )
    nesterov: bool = False

    def __post_init__(self) -> None:
        """Checks the fields."""
        check(self)

    def check_whole(self) -> None:
        """Checks that the fields fit together, once all of them are known.

        Raises:
            ConfigurationError: ``nesterov`` without ``momentum``.
        """
        if self.nesterov and self.momentum == 0.0:
            raise ConfigurationError(
                "Outer(nesterov=True) needs a momentum above 0; set momentum=0.9, or "
                "leave nesterov at False."
            )

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Settings of the correction of late gradients."""

from __future__ import annotations

import sys
from dataclasses import field

from torch_cpudist.errors import ConfigurationError
from torch_cpudist.settings.fields import check, settings

_FACTOR, _ADAPTIVE_FACTOR = 0.04, 2.0
_MOMENTUM = 0.95
_EPSILON = 1e-7


@settings
class DelayCompensation:
    """How a late gradient makes up for the updates that it missed (DC-ASGD).

    The server adds ``factor * g * g * (w - w_read)`` to a gradient ``g``, element by
    element: ``w`` is the weight now, ``w_read`` the one that the gradient was computed
    on. Source: Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay
    Compensation", ICML 2017 (arXiv:1609.08326), algorithms 1 and 2. In ``CPUDIST_*``
    any variable of this class switches it on.

    Attributes:
        factor: the strength, lambda; in units of 1 / loss, as g * g stands for the
            curvature. 0 changes nothing. ``None`` is 0.04, and 2 if ``adaptive``.
            ``CPUDIST_DELAYCOMPENSATION_FACTOR``.
        adaptive: divide ``factor`` by ``sqrt(mean + epsilon)``, ``mean`` being the
            running mean of g * g of this element over all trainers; its unit is then
            that of 1 / weight. ``CPUDIST_DELAYCOMPENSATION_ADAPTIVE``.
        momentum: of the running mean, what stays of it at each gradient; ``adaptive``
            only, where ``None`` is 0.95. ``CPUDIST_DELAYCOMPENSATION_MOMENTUM``.
        epsilon: added to the running mean; ``adaptive`` only, where ``None`` is 1e-7.
            ``CPUDIST_DELAYCOMPENSATION_EPSILON``.
    """

    factor: float | None = field(
        default=None,
        metadata={"least": 0.0, "most": sys.float_info.max, "unit": "1 / loss"},
    )
    adaptive: bool = False
    momentum: float | None = field(
        default=None, metadata={"least": 0.0, "most": 0.9999, "unit": "share"}
    )
    epsilon: float | None = field(
        default=None, metadata={"least": 1e-30, "most": 1.0, "unit": "gradient squared"}
    )

    def __post_init__(self) -> None:
        """Checks the fields; whole numbers are accepted."""
        for name in ("factor", "momentum", "epsilon"):
            if type(getattr(self, name)) is int:
                object.__setattr__(self, name, float(getattr(self, name)))
        check(self)

    def check_whole(self) -> None:
        """Checks that the fields fit together, once all of them are known.

        Raises:
            ConfigurationError: ``momentum`` or ``epsilon`` without ``adaptive``.
        """
        if self.adaptive:
            return
        for name in ("momentum", "epsilon"):
            value = getattr(self, name)
            if value is not None:
                raise ConfigurationError(
                    f"DelayCompensation({name}={value!r}) without adaptive: it belongs "
                    f"to the running mean, which only adaptive=True has: set that too, "
                    f"or leave {name} at None; a constant lambda is set by factor."
                )

    def resolved(self) -> tuple[float, bool, float, float]:
        """The four fields, with what ``None`` stands for.

        A constant lambda has neither mean nor ``epsilon``: theirs are not read.
        """
        default = _ADAPTIVE_FACTOR if self.adaptive else _FACTOR
        return (
            default if self.factor is None else self.factor,
            self.adaptive,
            _MOMENTUM if self.momentum is None else self.momentum,
            _EPSILON if self.epsilon is None else self.epsilon,
        )

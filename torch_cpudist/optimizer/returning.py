# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Whether a trainer that has left rounds may come back to them by a step."""

from __future__ import annotations

from torch_cpudist.drivers.base import Driver
from torch_cpudist.errors import InvalidArgumentError
from torch_cpudist.launch.run import Run


def check_return(run: Run, driver: Driver) -> None:
    """Refuses it beside other optimizers whose steps are rounds of all trainers.

    Servers take a trainer in at the round after the present one of each set. Which
    steps of several optimizers belong together only the script knows.

    Args:
        run: of the optimizers.
        driver: of the one that is about to step.

    Raises:
        InvalidArgumentError: this trainer has left, and there are others.
    """
    if not driver.is_away or run.trainer_count == 1:
        return
    if sum(one.round_steps() is not None for one in run.participants()) > 1:
        raise InvalidArgumentError(
            "step() after leave(): several optimizers of this run step in rounds, and "
            "servers would take this trainer in at another step of each, so that all "
            "trainers would wait for each other. Nothing was sent. Call "
            "cpudist.barrier() on all trainers, which takes everybody in at once."
        )

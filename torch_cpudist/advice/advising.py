# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``advise``: which knob would make this run faster."""

from __future__ import annotations

from torch_cpudist.advice.advice import Advice
from torch_cpudist.advice.judging import judge
from torch_cpudist.advice.reading import figures_of
from torch_cpudist.errors import InvalidArgumentError, TooFewStepsError
from torch_cpudist.launch import context
from torch_cpudist.launch.baseline import WARM_UP_STEPS
from torch_cpudist.optimizer.distributed import DistributedOptimizer

# With the warm-up, which does not count.
LEAST_STEPS = 20


def advise(opt: DistributedOptimizer) -> list[Advice]:
    """Says which knobs would make training faster, and why, from what was counted.

    Of this trainer's steps since the fifth. Call it in the loop, on any one trainer, in
    the thread that steps: what comes between steps (evaluation, say) counts as time.
    ``for one in cpudist.advise(opt): print(one)``. What it looks at: docs/tuning.md.

    Cost: ``opt.stats()``, some 20 us for each thread of this process, and two requests
    to the store per dedicated server. It waits for no trainer and no server, and
    changes nothing.

    Args:
        opt: an open optimizer of this thread's run.

    Returns:
        In the order in which knobs are turned; empty where nothing would help.

    Raises:
        TooFewStepsError: it has made fewer than 20 steps in this process.
        InvalidArgumentError: it is no ``DistributedOptimizer``.
        ClosedError: it is closed, or the run is.
        NotInitializedError: ``cpudist.init()`` was not called in this thread.
    """
    if not isinstance(opt, DistributedOptimizer):
        raise InvalidArgumentError(
            f"advise: expected a DistributedOptimizer, found {type(opt).__name__}. "
            "Pass what wraps the torch optimizer."
        )
    run = context.current()
    steps, then = opt.baseline.steps, opt.baseline.then
    if then is None or steps < LEAST_STEPS:
        raise TooFewStepsError(
            f"advise: expected at least {LEAST_STEPS} steps of this optimizer in this "
            f"process, of which {WARM_UP_STEPS} are the warm-up, found {steps}. Call "
            "it later in the loop."
        )
    return judge(figures_of(opt, run, then))

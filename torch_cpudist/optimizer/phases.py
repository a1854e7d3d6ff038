# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What an optimizer counts: steps, and where their time goes.

That is data, forward, backward, push, and waiting. Every moment from the first forward
or step on is of one of them. A clock is read where one begins, never in between. What
calls it is the model's own forward, the first node of a backward through what that
returned, and ``step``.
"""

from __future__ import annotations

import itertools
import operator
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn

from torch_cpudist.drivers.base import Driver
from torch_cpudist.errors import Error
from torch_cpudist.launch.run import Run
from torch_cpudist.served.base import Trained
from torch_cpudist.tables.forwards import HookedForwards

DATA, FORWARD, BACKWARD, PUSH, WAIT = "data", "forward", "backward", "push", "wait"
# Of what a forward returns, so many levels of containers are looked into.
_DEPTH = 3
_MOST = 16


def _nodes(found: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """Where backwards through these results begin."""
    if isinstance(found, torch.Tensor):
        if found.grad_fn is not None:
            yield found.grad_fn
        return
    if depth == 0:
        return
    inner: Any = ()
    if isinstance(found, (tuple, list)):
        inner = found
    elif isinstance(found, Mapping):
        inner = found.values()
    elif is_dataclass(found):
        inner = [getattr(found, one.name, None) for one in fields(found)]
    for one in inner:
        yield from _nodes(one, depth - 1)


class _Backward:
    """Backwards through what one forward returned."""

    def __init__(self, phases: Phases) -> None:
        self._phases = phases
        self._runs = False

    def __call__(self, _gradients: Any) -> None:
        """One gets to the first of the results."""
        if self._runs:
            return
        self._runs = True
        self._phases.backward_begins()
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._end)

    def _end(self) -> None:
        self._runs = False
        self._phases.backward_ends()


class Phases:
    """Seconds of one optimizer's phases. Thread safety: all methods.

    Where several replicas compute at once, it is forward from the first one's forward
    on, and backward from the first backward's beginning to the last one's end.

    Args:
        model: whose forward is called; a compiled one and what it compiles, either.
        waited: seconds that this trainer has been blocked so far.
    """

    def __init__(self, model: nn.Module, waited: Callable[[], float]) -> None:
        """Hooks the model."""
        self._waited = waited
        self._lock = threading.Lock()
        self._seconds = dict.fromkeys((DATA, FORWARD, BACKWARD, PUSH, WAIT), 0.0)
        self._phase: str | None = None
        self._since_s = self._blocked_s = 0.0
        self._backwards = 0  # under way
        self._computed = False  # a backward, since the last step
        # Hooks inside of a graph do not run, and those of a compiled one are outside.
        callable_ones = dict.fromkeys((model, getattr(model, "_orig_mod", model)))
        self._hooks = [
            HookedForwards(
                one,
                lambda *_: self.forward_begins(),
                lambda _module, _args, result: self.forward_ends(result),
            )
            for one in callable_ones
            if not isinstance(one, torch.jit.ScriptModule)
        ]

    def _enter(self, phase: str, backwards: int = 0, look: bool = True) -> None:
        """Another phase begins now.

        Args:
            phase: which.
            backwards: by how many more are under way; 0: none is any more.
            look: whether there may have been waiting since the last one began; else
                what there was counts when there is a look again.
        """
        now_s = time.perf_counter()
        blocked_s = self._blocked_s
        if look:
            # Else what has them is closed: they stay as they are.
            try:  # several times a step, and suppress() costs more
                blocked_s = self._waited()
            except Error:
                pass
        with self._lock:
            self._backwards = max(self._backwards + backwards, 0) if backwards else 0
            if self._backwards and phase != BACKWARD:
                return
            if self._phase is not None:
                spent_s = max(now_s - self._since_s, 0.0)
                # Several threads may have waited, and counters begin anew.
                waited_s = min(max(blocked_s - self._blocked_s, 0.0), spent_s)
                self._seconds[self._phase] += spent_s - waited_s
                self._seconds[WAIT] += waited_s
            self._phase, self._since_s, self._blocked_s = phase, now_s, blocked_s

    # -- the model ---------------------------------------------------------------------

    def forward_begins(self) -> None:
        """Of the model, or of what trains it; without gradients it is none."""
        if torch.is_grad_enabled() and not self._backwards:
            self._enter(FORWARD)

    def forward_ends(self, result: Any) -> None:
        """There are results, through which a backward may go.

        Args:
            result: a tensor, or tensors in tuples, lists, dicts and dataclasses.
        """
        if not torch.is_grad_enabled() or torch._C._is_tracing():
            return
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return
        told = _Backward(self)
        for node in itertools.islice(_nodes(result), _MOST):
            node.register_prehook(told)

    def backward_begins(self) -> None:
        """Of one forward's results."""
        self._computed = True
        self._enter(BACKWARD, 1)

    def backward_ends(self) -> None:
        """Of one forward's results."""
        self._enter(DATA, -1, look=False)

    # -- the optimizer -----------------------------------------------------------------

    def step_begins(self) -> None:
        """``step`` has gradients to hand on."""
        self._enter(PUSH, look=not self._computed)

    def step_ends(self) -> None:
        """``step`` is over. One that fails goes on up to the next forward."""
        self._computed = False
        self._enter(DATA)

    def stats(self) -> dict[str, float]:
        """Seconds by phase, up to where the present one began."""
        with self._lock:
            return dict(self._seconds)

    def close(self) -> None:
        """Leaves the model as it was. Idempotent."""
        for hooked in self._hooks:
            hooked.remove()


def waited_by(
    opened: Callable[[], Trained], driver: Driver, run: Run
) -> Callable[[], float]:
    """What says for how many seconds a trainer has been blocked.

    Args:
        opened: what is trained; raises ``ClosedError`` when that is over.
        driver: of its strategy.
        run: knows of the waits for servers that were to come back.
    """
    return lambda: opened().client.waited_s() + run.outlived_s() + driver.waited_s()


class Counted:
    """Steps of one optimizer. Thread safety: reading; all else where it steps.

    Attributes:
        phases: where their time goes; ``None`` where nobody asked for it.
        steps: of this trainer in all, those before a snapshot too.
        samples: of these, as they were told.
        rounds: updates behind the dense values as of the last one.
        said_left: whether ``leave`` was called since the last one.
    """

    def __init__(
        self, model: nn.Module, waited: Callable[[], float], phases: bool
    ) -> None:
        """Nothing was done yet.

        Args:
            model: as of ``Phases``.
            waited: as of ``Phases``.
            phases: whether they count already.
        """
        self._made_of = (model, waited)
        self.phases: Phases | None = None
        self.steps = self.samples = self.rounds = 0
        self.said_left = False
        self._step_s = 0.0
        self._since_barrier = 0
        if phases:
            self.count_phases()

    def count_phases(self) -> None:
        """Hooks the model. Idempotent."""
        if self.phases is None:
            self.phases = Phases(*self._made_of)

    def step_begins(self) -> float:
        """``step`` has gradients to hand on; returns when."""
        if self.phases is not None:
            self.phases.step_begins()
        return time.perf_counter()

    def step_ends(self, began_s: float, samples: int) -> None:
        """It has handed them on.

        Args:
            began_s: when it began to.
            samples: behind them.
        """
        self._step_s += time.perf_counter() - began_s
        self.steps += 1
        self._since_barrier += 1
        self.said_left = False
        self.samples += operator.index(samples)

    def step_is_over(self) -> None:
        """Behind what is done after that: a snapshot's part, say."""
        if self.phases is not None:
            self.phases.step_ends()

    def since_barrier(self) -> dict[str, Any]:
        """Of the steps since the last barrier, what trainers compare there."""
        return {"steps": self._since_barrier, "left": self.said_left}

    def barrier(self) -> None:
        """One is over."""
        self._since_barrier = 0
        self.said_left = False

    def stats(self) -> dict[str, Any]:
        """Of ``DistributedOptimizer.stats``, what is counted here."""
        phases = {} if self.phases is None else {"phase_s": self.phases.stats()}
        return {
            "steps": self.steps,
            "samples": self.samples,
            "step_s": self._step_s,
            **phases,
        }

    def counters(self) -> dict[str, int]:
        """What a snapshot has of it."""
        return {"steps": self.steps, "samples": self.samples, "rounds": self.rounds}

    def set_counters(self, saved: Mapping[str, int]) -> None:
        """Goes on counting from there."""
        self.steps, self.samples = saved["steps"], saved["samples"]
        self.rounds = saved["rounds"]

    def close(self) -> None:
        """Leaves the model as it was. Idempotent."""
        if self.phases is not None:
            self.phases.close()

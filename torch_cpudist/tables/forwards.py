# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The forwards of a model in which lookups are foreseen: hooks, and whose turn it is.

The model is hooked, and every module in it that has several tables, because a model may
compute ids and hand all of them to one of these. The outermost that foresees lookups
does so for all that are inside it.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from torch_cpudist.errors import UnsupportedModelError
from torch_cpudist.tables.binding import TableBinding
from torch_cpudist.tables.learned import Guessing, Learner, Tables, Watching
from torch_cpudist.tables.local import binding_of, plain_class

# A module with fewer asks for no more than its lookups do.
_LEAST_TABLES = 2


def _outside_graphs(function: Callable[..., Any]) -> None:
    """Keeps torch.compile from compiling a function, and what it calls, by itself."""
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(
        function.__code__,
        frames._FrameExecStrategy(skip, skip),
    )


class ForwardHook:
    """A hook of a module's forward, without effect in copies and saved models."""

    def __init__(self, call: Callable[..., None]) -> None:
        """Calls ``call`` with what torch calls it with, outside of graphs."""
        self._call = call

    def __call__(self, *arguments: Any) -> None:
        """Runs in eager mode only: in a graph each lookup pulls by itself."""
        if torch.compiler.is_compiling():
            return
        self._call(*arguments)

    def __reduce__(self) -> Any:
        """What does nothing, as a copy or a saved model is nobody's to foresee.

        Of the standard library: a saved model loads without this package.
        """
        return getattr, (contextlib.nullcontext(), "__exit__")


_outside_graphs(ForwardHook.__call__)

# What is called in the place of a module's method of this name.
_REDUCE = "__reduce_ex__"
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


class _WithoutHooks:
    """What copies and saves a module that is hooked: as if it were not.

    It is found in a module's own dictionary, and told nothing of the module. Whoever
    copies that dictionary has it in two; so it knows none, and looks for who is meant.
    """

    def __call__(self, protocol: Any) -> Any:
        module = self._copied(sys._getframe(1))
        kind: Any = type(module)
        made = kind.__reduce_ex__(module, protocol)
        if not isinstance(made, tuple) or len(made) < 3 or type(made[2]) is not dict:
            return made
        state = {name: value for name, value in made[2].items() if name != _REDUCE}
        for name in _HOOKS:
            if name in state:
                state[name] = OrderedDict(
                    (number, hook)
                    for number, hook in state[name].items()
                    if not isinstance(hook, ForwardHook)
                )
        return (*made[:2], state, *made[3:])

    def _is_in(self, found: Any) -> bool:
        return isinstance(found, nn.Module) and vars(found).get(_REDUCE) is self

    def _copied(self, caller: FrameType) -> nn.Module:
        """The module that is copied or saved.

        Raises:
            UnsupportedModelError: it is saved, and could be several.
        """
        if caller.f_code is copy.deepcopy.__code__:
            found = caller.f_locals.get("x")
            if self._is_in(found):
                return cast(nn.Module, found)
        holders = gc.get_referrers(self)
        holders += [
            owner
            for holder in holders
            if type(holder) is dict and holder.get(_REDUCE) is self
            for owner in gc.get_referrers(holder)
        ]
        owners = {id(one): one for one in holders if self._is_in(one)}
        if len(owners) == 1:
            return cast(nn.Module, owners.popitem()[1])
        raise UnsupportedModelError(
            f"{len(owners)} modules have one __dict__[{_REDUCE!r}], as one was made "
            "with the __dict__ of another while a DistributedOptimizer had that; which "
            f"of them is saved cannot be known. Call vars(copy).pop({_REDUCE!r}) after "
            "such a copy, or copy with copy.deepcopy."
        )


def _copies_by_default(module: nn.Module) -> bool:
    """Whether nobody but torch says how a module is copied and saved."""
    kind = plain_class(module)
    return all(
        getattr(kind, name, None) is getattr(nn.Module, name, None)
        for name in (_REDUCE, "__reduce__", "__getstate__", "__deepcopy__", "__copy__")
    )


Hooked = tuple[ForwardHook, ForwardHook]


class HookedForwards:
    """One module's forwards, of which somebody is told; its copies have no hooks.

    Args:
        module: whose.
        begin: called with the module, arguments and named arguments.
        end: called with the module, arguments and what came of it; ``None`` also where
            it has failed.
    """

    def __init__(
        self,
        module: nn.Module,
        begin: Callable[..., None],
        end: Callable[..., None],
    ) -> None:
        """See the class."""
        self._module = module
        self._handles = _hook(module, (ForwardHook(begin), ForwardHook(end)))
        # Else its hooks copy and save themselves as what does nothing.
        if _copies_by_default(module):
            vars(module).setdefault(_REDUCE, _WithoutHooks())

    def remove(self) -> None:
        """Leaves the module as it was. Idempotent."""
        for handle in self._handles:
            handle.remove()
        hooks = [h for name in _HOOKS for h in getattr(self._module, name).values()]
        if not any(isinstance(hook, ForwardHook) for hook in hooks):
            vars(self._module).pop(_REDUCE, None)


def _hook(module: nn.Module, hooks: Hooked) -> list[RemovableHandle]:
    before, after = hooks
    return [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, always_call=True),
    ]


def hook_copy(model: nn.Module, made: nn.Module) -> None:
    """Gives a copy that trains with its model the hooks that this module put there.

    Args:
        model: any module.
        made: a copy of it, of the same structure.
    """
    for module, copied in zip(model.modules(), made.modules(), strict=True):
        own = [
            hook
            for name in _HOOKS
            for hook in getattr(module, name).values()
            if isinstance(hook, ForwardHook)
        ]
        for before, after in zip(
            own[: len(own) // 2], own[len(own) // 2 :], strict=True
        ):
            _hook(copied, (before, after))


class _Now(threading.local):
    """The forward that a thread is in."""

    record: Watching | Guessing | None = None
    owner: _Watched | None = None
    # What was being handled when it began, as forwards run in handlers too.
    handled: BaseException | None = None


class _Watched:
    """One module whose forwards are hooked."""

    def __init__(self, module: nn.Module, tables: Tables, now: _Now) -> None:
        self.module = module
        self.outer: set[_Watched] = set()
        self._learner = Learner(tables)
        self._tables = tables
        self._now = now
        self._hooks = HookedForwards(module, self._begin, self._end)

    @property
    def covered(self) -> int:
        return self._learner.covered

    def _begin(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        now = self._now
        if now.record is not None:
            if now.owner in self.outer:
                return
            now.record = None
        if self._learner.passes(module.training) or not self._tables.are_here():
            return
        if torch._C._is_tracing():
            return
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return
        now.record = self._learner.begin(module.training, args, kwargs)
        now.owner = self
        now.handled = sys.exception()

    def _end(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        now = self._now
        if now.owner is not self:
            return
        record, now.record, now.owner = now.record, None, None
        handled, now.handled = now.handled, None
        # Of a forward that has failed, torch tells no result, in the handler of that.
        failed = result is None and sys.exception() is not handled
        if record is not None and not failed:
            self._learner.end(record)

    def remove(self) -> None:
        self._hooks.remove()


def _with_several(model: nn.Module, tables: set[int]) -> list[nn.Module]:
    """The model and the modules in it that have several of these tables' modules."""
    found = [model]
    for module in model.modules():
        inside = [
            binding
            for part in module.modules()
            if (binding := binding_of(part)) is not None and id(binding) in tables
        ]
        if module is not model and len(inside) >= _LEAST_TABLES:
            found.append(module)
    return found


class ForeseenLookups:
    """Foresees the lookups of one optimizer's tables; see ``docs/mechanisms.md``.

    Thread safety: forwards and lookups from any thread, the rest as the optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        bindings: Sequence[TableBinding],
        tables: Tables,
    ) -> None:
        """Hooks ``model``, which has the modules of these tables.

        Args:
            model: whose forward is called; a compiled one stands for what it compiles.
            bindings: the tables' bindings.
            tables: the same, as learners use them.
        """
        model = getattr(model, "_orig_mod", model)
        self._bindings = bindings
        self._tables = tables
        self._now = _Now()
        modules = _with_several(model, {id(binding) for binding in bindings})
        self._watched = [_Watched(module, tables, self._now) for module in modules]
        for one in self._watched:
            inside = set(one.module.modules())
            for other in self._watched:
                if other is not one and other.module in inside:
                    other.outer.add(one)
        for binding in bindings:
            binding.told = self._saw

    def _saw(self, table: int, ids: torch.Tensor, asked: int) -> None:
        if asked:
            self._tables.count_alone()
        record = self._now.record
        if record is not None:
            record.saw(table, ids, asked)

    def forget_forward(self) -> None:
        """A step ends the forward that this thread is in, if an interrupt left one."""
        self._now.record = self._now.owner = self._now.handled = None

    def stats(self) -> dict[str, int]:
        """Counters; see ``DistributedOptimizer.stats``."""
        counts = self._tables.counts
        return {
            "together": counts.together,
            "tables": max(one.covered for one in self._watched),
            "alone": counts.alone,
            "in_vain": counts.in_vain,
        }

    def close(self) -> None:
        """Removes the hooks. Idempotent."""
        for binding in self._bindings:
            binding.told = None
        for one in self._watched:
            one.remove()
        self._tables.close()

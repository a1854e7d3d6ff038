# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
# long: one state machine, from what was seen to what is asked for
"""What the lookups of a module's forward are given: learned, then asked for at once.

For each structure of arguments there is a plan. It watches a few forwards, and if at
least two lookups were given parts of the arguments it has their rows pulled together
whenever a further forward begins. A lookup that is given something else pulls its rows
itself, so that a plan that is wrong costs rows, not results; it is dropped then, and
learned anew after a while, which doubles each time.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_cpudist.log import logger
from torch_cpudist.tables import inputs
from torch_cpudist.tables.binding import TableBinding
from torch_cpudist.tables.parts import Part, find, meet_all

# A lookup: its table, and which one of this table's in a forward.
Lookup = tuple[int, int]
# (table, address of the first id, what ids are, sizes, strides), as the core takes it.
Guess = tuple[int, int, int, list[int], list[int]]

_WATCHED = 3  # forwards before a plan is made
_STRIKES = 3  # more wrong guesses than right ones, and a lookup is not guessed any more
_MOST_PLANS = 8
_FIRST_REST, _LONGEST_REST = 32, 4096  # forwards before a plan is made anew
# Fewer are no request less.
_LEAST_LOOKUPS = 2


@dataclass
class Counts:
    """What was asked for together, and what not; see ``DistributedOptimizer.stats``."""

    together: int = 0
    alone: int = 0
    in_vain: int = 0


@dataclass
class _Entry:
    """A lookup whose ids are a known part of the arguments."""

    table: int
    leaf: int
    ranges: tuple[slice, ...]
    strikes: int = 0
    # For arguments of these sizes and strides: where the part begins, how large it is.
    form: tuple[Any, Any] | None = None
    begin: int = 0
    count: int = 0
    sizes: list[int] = field(default_factory=list)
    strides: list[int] = field(default_factory=list)

    def guess(self, tensor: torch.Tensor) -> Guess:
        """Where in these arguments the ids are."""
        form = tensor.shape, tensor.stride()
        if form != self.form:
            self._fit(*form)
        address = tensor.data_ptr() + self.begin * tensor.element_size()
        kind = inputs.ID_TYPES[tensor.dtype]
        return self.table, address, kind, self.sizes, self.strides

    def _fit(self, shape: Sequence[int], strides: Sequence[int]) -> None:
        self.form = shape, strides
        self.begin, self.count = 0, 1
        self.sizes = []
        for own, size, stride in zip(self.ranges, shape, strides, strict=True):
            low, high, _ = own.indices(size)
            self.begin += low * stride
            self.sizes.append(max(high - low, 0))
            self.count *= self.sizes[-1]
        self.strides = list(strides)


@dataclass
class _Plan:
    """What is known of forwards with one structure of arguments."""

    watched: int = 0
    # By lookup; ``None`` where it was given no ids yet, empty where they are no part.
    seen: dict[Lookup, list[Part] | None] = field(default_factory=dict)
    entries: list[_Entry] = field(default_factory=list)
    made: bool = False
    rest: int = 0  # forwards that pass before it is made anew; 0: not at all
    next_rest: int = _FIRST_REST

    def watch(self, found: Mapping[Lookup, list[Part] | None]) -> None:
        """Takes in what the lookups of one more forward were given."""
        if not self.watched:
            self.seen = dict(found)
        else:
            for lookup in self.seen.keys() | found.keys():
                before = self.seen.get(lookup, [])
                now = found.get(lookup, [])
                if before is None or now is None:
                    self.seen[lookup] = now if before is None else before
                else:
                    self.seen[lookup] = meet_all(before, now)
        self.watched += 1
        if self.watched == _WATCHED:
            self._make()
            logger.debug("%d lookups are foreseen", len(self.entries))

    def _make(self) -> None:
        self.entries = [
            _Entry(table, parts[0].leaf, _slices(parts[0]))
            for (table, _), parts in sorted(self.seen.items())
            if parts
        ]
        self.seen = {}
        self.watched = 0
        self.made = True
        if len(self.entries) < _LEAST_LOOKUPS:
            self.entries = []
            self.pause()

    def judge(self, wrong: Sequence[_Entry], right: Sequence[_Entry]) -> int:
        """Notes which guesses were right; returns how many are made no more."""
        for entry in right:
            entry.strikes = max(entry.strikes - 1, 0)
        before = len(self.entries)
        for entry in wrong:
            entry.strikes += 1
        if not wrong:
            self.next_rest = max(self.next_rest - 1, _FIRST_REST)
        kept = [entry for entry in self.entries if entry.strikes < _STRIKES]
        if len(kept) == before:
            return 0
        self.entries = kept if len(kept) >= _LEAST_LOOKUPS else []
        self.pause()
        return before - len(kept)

    def pause(self) -> None:
        """Goes on as it is for a while, before it is made anew."""
        self.rest = self.next_rest
        self.next_rest = min(2 * self.rest, _LONGEST_REST)

    def pass_one(self) -> None:
        """A forward begins."""
        if self.rest:
            self.rest -= 1
            self.made = self.rest > 0


def _slices(part: Part) -> tuple[slice, ...]:
    return tuple(slice(*ranges[0]) for ranges in part.ranges)


class Tables:
    """The tables of one parameter set, as learners use them. Any thread."""

    def __init__(
        self,
        bindings: Sequence[TableBinding],
        pull_together: Callable[[Sequence[Guess]], Sequence[int]],
        takes_part: Callable[[], bool],
    ) -> None:
        """Takes open tables.

        Args:
            bindings: theirs.
            pull_together: pulls what is guessed; returns how many rows of each.
            takes_part: whether rows that are pulled now are not asked for anew.
        """
        self._bindings = {binding.table: binding for binding in bindings}
        self._pull = pull_together
        self._takes_part = takes_part
        self._closed = False
        self._lock = threading.Lock()
        self.counts = Counts()

    def are_here(self) -> bool:
        """Whether it is of use to ask for rows before lookups do."""
        return not self._closed and self._takes_part()

    def open_tables(self, tables: set[int]) -> set[int]:
        """Those of which rows can be pulled; of the others a lookup says why not."""
        return {table for table in tables if self._bindings[table].can_pull()}

    def ask(self, guesses: Sequence[Guess]) -> Sequence[int]:
        """Pulls what is guessed; returns how many rows were asked for, of each."""
        asked = self._pull(guesses)
        if any(asked):
            with self._lock:
                self.counts.together += 1
        return asked

    def count_alone(self) -> None:
        """A lookup has pulled by itself."""
        with self._lock:
            self.counts.alone += 1

    def count_in_vain(self, rows: int) -> None:
        """Rows were asked for that no lookup wanted."""
        with self._lock:
            self.counts.in_vain += rows

    def close(self) -> None:
        """Nothing is asked for any more."""
        self._closed = True


class Watching:
    """A forward of which is seen what its lookups are given. Keeps its arguments."""

    def __init__(self, plan: _Plan, arguments: list[torch.Tensor]) -> None:
        self.plan = plan
        self._arguments = arguments
        self._counts: dict[int, int] = {}
        self.found: dict[Lookup, list[Part] | None] = {}

    def saw(self, table: int, ids: torch.Tensor, asked: int) -> None:
        """A lookup was given ``ids``."""
        number = self._counts.get(table, 0)
        self._counts[table] = number + 1
        parts = find(ids, self._arguments) if ids.numel() else None
        self.found[table, number] = parts


class Guessing:
    """A forward whose rows were asked for. Keeps addresses only."""

    def __init__(
        self, plan: _Plan, entries: Sequence[_Entry], guesses: Sequence[Guess]
    ) -> None:
        self.plan = plan
        self.asked: Sequence[int] = [0] * len(entries)
        self._entries = entries
        # By table, of what no lookup was given yet: its place, address and count.
        self._open: dict[int, list[tuple[int, int, int]]] = {}
        for i, (entry, guess) in enumerate(zip(entries, guesses, strict=True)):
            if entry.count:
                place = i, guess[1], entry.count
                self._open.setdefault(entry.table, []).append(place)

    def saw(self, table: int, ids: torch.Tensor, asked: int) -> None:
        """A lookup was given ``ids``, of which it asked for ``asked`` rows itself."""
        waiting = self._open.get(table)
        if not waiting:
            return
        count = ids.numel()
        address = ids.data_ptr()
        same = [place for place in waiting if place[1:] == (address, count)]
        if not same and not asked:
            # A copy or a cast, as it seems: all its rows were there.
            same = [place for place in waiting if place[2] == count]
        if same:
            waiting.remove(same[0])

    def result(self) -> tuple[list[_Entry], list[_Entry], int]:
        """Wrong and right guesses, and the rows that were asked for in vain."""
        missed = {i for waiting in self._open.values() for i, _, _ in waiting}
        wrong = [self._entries[i] for i in sorted(missed)]
        right = [entry for i, entry in enumerate(self._entries) if i not in missed]
        return wrong, right, sum(self.asked[i] for i in missed)


class Learner:
    """Learns what one module's forward looks up. Thread safety: any thread."""

    def __init__(self, tables: Tables) -> None:
        """Nothing is known yet.

        Args:
            tables: whose lookups it learns.
        """
        self._tables = tables
        self._lock = threading.Lock()
        self._plans: OrderedDict[tuple[bool, Hashable], _Plan] = OrderedDict()
        # By mode, forwards that nothing is to be done for.
        self._idle = {True: 0, False: 0}

    @property
    def covered(self) -> int:
        """Tables that the plan which was used last asks for."""
        with self._lock:
            last = next(reversed(self._plans.values()), None)
            return len({e.table for e in last.entries}) if last else 0

    def passes(self, training: bool) -> bool:
        """Whether there is nothing to do for a forward in this mode, which begins."""
        if not self._idle[training]:
            return False
        self._idle[training] -= 1
        return True

    def begin(
        self, training: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Watching | Guessing | None:
        """A forward begins: asks for its rows, or prepares to see its lookups."""
        found = inputs.leaves(args, kwargs)
        if not found:
            return None
        with self._lock:
            plan = self._plan(training, inputs.signature(found))
            plan.pass_one()
            entries = list(plan.entries)
        tensors = [tensor for _, tensor in found]
        if not plan.made:
            return Watching(plan, tensors)
        if not entries:
            self._idle[training] = self._shortest_rest(training)
            return None
        return self._ask(plan, entries, tensors)

    def _ask(
        self, plan: _Plan, entries: list[_Entry], tensors: list[torch.Tensor]
    ) -> Guessing:
        open_tables = self._tables.open_tables({entry.table for entry in entries})
        entries = [entry for entry in entries if entry.table in open_tables]
        with self._lock:  # entries remember how large arguments were
            guesses = [entry.guess(tensors[entry.leaf]) for entry in entries]
            made = Guessing(plan, entries, guesses)
        made.asked = self._tables.ask(guesses)
        return made

    def end(self, forward: Watching | Guessing) -> None:
        """A forward has ended: learns of it."""
        with self._lock:
            plan = forward.plan
            if isinstance(forward, Guessing):
                wrong, right, in_vain = forward.result()
                if dropped := plan.judge(wrong, right):
                    logger.debug("%d lookups are foreseen no more", dropped)
            else:
                in_vain = 0
                if not plan.made:
                    plan.watch(forward.found)
        if in_vain:
            self._tables.count_in_vain(in_vain)

    def _plan(self, training: bool, structure: Hashable) -> _Plan:
        key = training, structure
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = _Plan()
            if len(self._plans) > _MOST_PLANS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return plan

    def _shortest_rest(self, training: bool) -> int:
        """Forwards in which no plan of this mode has anything to do."""
        with self._lock:
            plans = [
                plan for (mode, _), plan in self._plans.items() if mode == training
            ]
            if any(plan.entries or not plan.made for plan in plans):
                return 0
            passing = max(min(plan.rest for plan in plans) - 1, 0)
            for plan in plans:
                plan.rest -= passing
            return passing

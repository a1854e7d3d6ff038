# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A run: what it calls at barriers and at its end, and what ends with it."""

from __future__ import annotations

import pytest

import torch_cpudist as cpudist
from torch_cpudist.launch.run import Participant, Run


class Noted(Participant):
    """Notes what a run calls, in order."""

    def __init__(self, name, calls):
        self.optimizer = self
        self.name = name
        self.calls = calls

    def note(self, what):
        self.calls.append(f"{self.name} {what}")

    def before_barrier(self):
        self.note("before")

    def after_barrier(self):
        self.note("after")

    def leave(self):
        self.note("leaves")

    def take_home(self, pull):
        self.note(f"takes {pull} home")

    def close(self, tell_servers=True):
        self.note("closes" if tell_servers else "is dropped")

    def global_step(self):
        return len(self.calls)

    def trained_parameters(self):
        return []


class Closing:
    def __init__(self, name, calls):
        self.optimizer = self
        self.name = name
        self.calls = calls

    def close(self):
        self.calls.append(f"{self.name} closes")


@pytest.fixture
def context():
    opened = cpudist.init(variables={})
    yield opened
    opened.abort("the test ends")


def taking_part(context, calls):
    both = [Noted(name, calls) for name in ("a", "b")]
    for one in both:
        context.add_participant(one)
    return both


def test_a_barrier_tells_all_before_and_after(context):
    calls = []
    taking_part(context, calls)
    context.barrier()
    assert calls == ["a before", "b before", "a after", "b after"]


def test_a_good_end_takes_home_and_closes_oldest_first(context):
    calls = []
    taking_part(context, calls)
    context.shutdown("dense")
    assert calls[:6] == [
        *("a leaves", "a takes dense home", "a closes"),
        *("b leaves", "b takes dense home", "b closes"),
    ]
    assert set(calls[6:]) <= {"a is dropped", "b is dropped"}


def test_who_was_removed_is_not_called(context):
    calls = []
    first, second = taking_part(context, calls)
    context.remove_participant(first)
    context.remove_participant(first)  # a second time does nothing
    assert context.participants() == (second,)
    assert context.optimizers() == [second]
    context.abort("enough")
    assert calls == ["b is dropped"]


def test_the_newest_says_the_global_step(context):
    assert context.global_step() == 0
    calls = []
    first, _ = taking_part(context, calls)
    first.note("x")
    assert context.global_step() == 1


def test_what_a_run_owns_is_made_once_and_ends_with_it(context):
    calls = []
    made = context.owned("one", lambda: Closing("one", calls))
    assert context.owned("one", lambda: pytest.fail("made twice")) is made
    context.owned("two", lambda: Closing("two", calls))
    assert calls == []
    context.shutdown()
    assert calls == ["two closes", "one closes"]
    with pytest.raises(cpudist.ClosedError):
        context.owned("three", lambda: Closing("three", calls))
    context.close_owned()  # a second time does nothing
    assert calls == ["two closes", "one closes"]


def test_what_cannot_be_made_is_not_owned(context):
    def fail():
        raise ValueError("not today")

    with pytest.raises(ValueError, match="not today"):
        context.owned("one", fail)
    calls = []
    assert context.owned("one", lambda: Closing("one", calls)).name == "one"


def test_a_context_is_a_run(context):
    run: Run = context
    assert (run.role, run.rank, run.trainer_rank, run.shard_id) == ("trainer", 0, 0, 0)
    assert run.trainers().count == run.trainer_count == run.server_count == 1
    first, second = run.next_opening(), run.next_opening()
    assert first != second
    assert first.startswith(f"{run.run_id}/")

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Ends that are no good ends, and what every trainer is told."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from optimizer_cases import linear, sgd, step_on, wrapped
from patience import PATIENCE_S
from sync_cases import run

import torch_cpudist as cpudist


def step_for_ever(model, optimizer):
    while True:
        step_on(model, optimizer)


def fail_and_shut_down(context):
    try:
        raise ValueError("bad sample")
    finally:
        context.shutdown()


def test_shutdown_in_finally_does_not_pass_for_the_end_of_the_work():
    """The others must not train on with a smaller divisor."""

    def body(context):
        model = linear()
        optimizer = wrapped(model)
        step_on(model, optimizer)
        if context.trainer_rank == 0:
            with pytest.raises(cpudist.PeerLostError, match="bad sample"):
                step_for_ever(model, optimizer)
        else:
            with pytest.raises(ValueError, match="bad sample"):
                fail_and_shut_down(context)

    with pytest.raises(cpudist.PeerLostError):  # out of trainer 0's own shutdown
        run(body, 2)


def shut_down_at_the_end_of_a_loop(context):
    try:
        next(iter([]))
    except StopIteration:
        context.shutdown()


def shut_down_where_it_is_dealt_with(context):
    try:
        raise ValueError("known")
    except ValueError:
        context.shutdown(failed=False)


@pytest.mark.parametrize(
    "shut_down", [shut_down_at_the_end_of_a_loop, shut_down_where_it_is_dealt_with]
)
def test_shutdown_where_an_exception_was_handled_is_a_good_end(shut_down):
    def body(context):
        model = linear()
        optimizer = wrapped(model)
        step_on(model, optimizer)
        if context.trainer_rank == 1:
            shut_down(context)
            assert context.closed
            return 1
        for _ in range(3):
            step_on(model, optimizer)
        return optimizer.rounds

    assert run(body, 2) == [4, 1]


def interrupted(context):
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        context.shutdown()


def fail_while_a_failure_is_handled(context):
    try:
        raise ValueError("bad sample")
    except ValueError:
        shut_down_at_the_end_of_a_loop(context)


def say_so(context):
    context.shutdown(failed=True)


@pytest.mark.parametrize(
    ("shut_down", "says"),
    [
        (fail_while_a_failure_is_handled, "bad sample"),
        (say_so, r"shutdown\(failed=True\)"),
        (interrupted, r"KeyboardInterrupt(?!:)"),
    ],
)
def test_a_failure_is_a_loss_whatever_else_has_ended(shut_down, says):
    def body(context):
        model = linear()
        optimizer = wrapped(model)
        step_on(model, optimizer)
        if context.trainer_rank == 1:
            shut_down(context)
            return
        with pytest.raises(cpudist.PeerLostError, match=says):
            step_for_ever(model, optimizer)

    with pytest.raises(cpudist.PeerLostError, match=says):  # of trainer 0's shutdown
        run(body, 2)


def test_a_wrong_argument_changes_nothing():
    def body(context):
        model = linear()
        optimizer = wrapped(model)
        with pytest.raises(cpudist.InvalidArgumentError, match="shutdown: pull must"):
            context.shutdown("sparse")
        step_on(model, optimizer)
        assert optimizer.rounds == 1

    run(body, 2)


def wrapped_and_stepped(model):
    """Trainer 0 waits for nobody when it wraps, but for all in a step."""
    with contextlib.closing(wrapped(model, sgd(model))) as optimizer:
        optimizer.step()


def test_every_trainer_is_told_of_models_that_differ():
    def body(context):
        model = torch.nn.Linear(3 + context.trainer_rank, 1)
        with pytest.raises(cpudist.ConfigMismatchError, match="elements: "):
            wrapped_and_stepped(model)

    run(body, 3)


def in_a_new_thread(body):
    """Where ``init()`` was never called; returns what was raised."""
    raised = []

    def caught():
        try:
            body()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=caught, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    return raised


def init_in_vain():
    try:
        cpudist.init(rank=3)
    finally:
        cpudist.shutdown()


def test_shutdown_without_init_is_no_error_that_hides_the_first():
    (first,) = in_a_new_thread(init_in_vain)
    assert isinstance(first, cpudist.ConfigurationError)
    assert "init() was given rank but not" in str(first)
    assert in_a_new_thread(cpudist.shutdown) == []

    def after_a_failure():
        with contextlib.suppress(cpudist.ConfigurationError):
            cpudist.init(rank=3)
        cpudist.shutdown()
        cpudist.init()
        cpudist.shutdown()

    assert in_a_new_thread(after_a_failure) == []
    (wrong,) = in_a_new_thread(lambda: cpudist.shutdown("sparse"))
    assert isinstance(wrong, cpudist.InvalidArgumentError)


def test_shutdown_in_another_thread_than_init_is_told():
    """It would end nothing, and the process would count as lost at its end."""
    context = cpudist.init()
    try:
        (found,) = in_a_new_thread(cpudist.shutdown)
        assert isinstance(found, cpudist.NotInitializedError)
        assert not context.closed
        # But a failed init() there is what went wrong.
        (first,) = in_a_new_thread(init_in_vain)
        assert isinstance(first, cpudist.ConfigurationError)
    finally:
        context.shutdown()

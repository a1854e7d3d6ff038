# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Forwards and deltas wait for each other, and for nobody who never ends."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from patience import PATIENCE_S
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.errors import (
    ClosedError,
    InvalidArgumentError,
    OperationTimeoutError,
)
from torch_cpudist.inference import forward_guard
from torch_cpudist.inference.shared_lock import SharedLock

HURRY_S = 0.3


class Linear(nn.Module):
    """Whose forwards do what a test says."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([value]))
        self.within = lambda: None

    def forward(self) -> torch.Tensor:
        before = self.weight.detach().clone()
        self.within()
        return torch.stack([before, self.weight.detach()]).flatten()


@pytest.fixture
def reader(tmp_path):
    """A loaded model of version 0, with deltas that make 1 and 2 of it."""
    cpudist.export(Linear(0.0), tmp_path / "0")
    cpudist.export(Linear(1.0), tmp_path / "1", base=tmp_path / "0")
    cpudist.export(Linear(2.0), tmp_path / "2", base=tmp_path / "1")
    model = Linear()
    with cpudist.load_for_inference(model, tmp_path / "0") as found:
        found.model, found.folder = model, tmp_path
        yield found


def applied(reader, name: str) -> None:
    """Applies a delta in another thread, which nothing holds up."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(
            reader.apply_delta, reader.folder / name, timeout_s=PATIENCE_S
        ).result()


def test_threads_within_a_reading_may_wait_for_forwards_of_others(reader) -> None:
    with ThreadPoolExecutor(4) as pool:
        with reader.reading() as loaded:
            delta = pool.submit(
                reader.apply_delta, reader.folder / "1", timeout_s=PATIENCE_S
            )
            for _ in range(3):
                # The delta has begun to hold others back, or will.
                found = list(pool.map(lambda _: reader.model().tolist(), range(3)))
                assert found == [[0.0, 0.0]] * 3
                assert loaded.name == "0"
        assert delta.result(PATIENCE_S).name == "1"
    assert reader.model().tolist() == [1.0, 1.0]


def test_a_long_reading_holds_nobody_up(reader) -> None:
    with ThreadPoolExecutor(2) as pool:
        with reader.reading():
            delta = pool.submit(reader.apply_delta, reader.folder / "1", timeout_s=1)
            ends = threading.Event()
            times = 0
            delta.add_done_callback(lambda _: ends.set())
            while not ends.is_set():
                assert pool.submit(reader.model).result(PATIENCE_S)[0] == 0
                times += 1
            with pytest.raises(OperationTimeoutError, match="Nothing was changed"):
                delta.result()
        assert times > 0
        assert reader.loaded.name == "0"
        pool.submit(reader.apply_delta, reader.folder / "1").result(PATIENCE_S)


def test_two_readers_may_be_entered_in_either_order(tmp_path, reader) -> None:
    other = cpudist.load_for_inference(Linear(), tmp_path / "0")
    inside = threading.Barrier(2)

    def nested(first, second) -> str:
        with first.reading():
            inside.wait(PATIENCE_S)
            with second.reading() as loaded:
                return loaded.name

    with ThreadPoolExecutor(4) as pool:
        deltas = []
        for name in ("1", "2"):
            names = [
                pool.submit(nested, *pair)
                for pair in ((reader, other), (other, reader))
            ]
            deltas = [
                pool.submit(one.apply_delta, tmp_path / name, timeout_s=PATIENCE_S)
                for one in (reader, other)
            ]
            assert len({one.result(PATIENCE_S) for one in names}) <= 2
            for delta in deltas:
                assert delta.result(PATIENCE_S).name == name
    other.close()


def test_forwards_without_a_pause_leave_room_for_a_delta(reader) -> None:
    done = threading.Event()

    def forwards() -> list[list[float]]:
        found = []
        while not done.is_set():
            found.append(reader.model().tolist())
        return found

    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(forwards) for _ in range(3)]
        try:
            for name in ("1", "2"):
                reader.apply_delta(reader.folder / name, timeout_s=PATIENCE_S)
        finally:
            done.set()
        for one in running:
            assert all(low == high for low, high in one.result(PATIENCE_S))


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_ends_a_forward_ends_its_share(reader, error) -> None:
    def end() -> None:
        raise error

    reader.model.within = end
    for _ in range(3):
        with pytest.raises(error):
            reader.model()
    reader.model.within = lambda: None
    applied(reader, "1")
    reader.apply_delta(reader.folder / "2")
    assert reader.model().tolist() == [2.0, 2.0]


def test_an_interrupt_is_not_hidden_by_the_end_of_the_block(tmp_path, reader) -> None:
    model = Linear()

    def end() -> None:
        raise KeyboardInterrupt

    model.within = end
    with pytest.raises(KeyboardInterrupt):
        with cpudist.load_for_inference(model, tmp_path / "0"):
            model()
    other = cpudist.load_for_inference(Linear(), tmp_path / "0")
    entered = other.reading()
    entered.__enter__()
    with pytest.raises(KeyboardInterrupt), other:
        raise KeyboardInterrupt
    with pytest.raises(InvalidArgumentError, match="inside"), other:
        pass
    entered.__exit__(None, None, None)
    other.close()


def test_closing_waits_so_long_and_no_longer(reader) -> None:
    with pytest.raises(InvalidArgumentError, match="close: timeout_s"):
        reader.close(timeout_s=0)
    entered = reader.reading()
    with ThreadPoolExecutor(1) as pool, ThreadPoolExecutor(1) as other:
        pool.submit(entered.__enter__).result(PATIENCE_S)
        with pytest.raises(OperationTimeoutError, match=r"close: forwards .* open"):
            reader.close(timeout_s=HURRY_S)
        reader.model()  # it is open, and nobody is held back
        # A delta has its turn, and waits for the reading.
        begun = threading.Event()
        delta = other.submit(
            lambda: (begun.set(), reader.apply_delta(reader.folder / "1"))
        )
        begun.wait(PATIENCE_S)
        with pytest.raises(OperationTimeoutError, match=r"close: .* open"):
            reader.close(timeout_s=HURRY_S)
        pool.submit(entered.__exit__, None, None, None).result(PATIENCE_S)
        delta.result(PATIENCE_S)
    reader.close(timeout_s=PATIENCE_S)
    reader.close(timeout_s=PATIENCE_S)
    with pytest.raises(ClosedError):
        reader.verify()


def test_a_reading_may_end_in_another_thread(reader) -> None:
    entered = reader.reading()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(entered.__enter__).result(PATIENCE_S)
        with pytest.raises(OperationTimeoutError):
            reader.apply_delta(reader.folder / "1", timeout_s=HURRY_S)
        entered.__exit__(None, None, None)
        reader.apply_delta(reader.folder / "1", timeout_s=PATIENCE_S)
        # The thread that entered it is inside of nothing any more.
        pool.submit(reader.apply_delta, reader.folder / "2").result(PATIENCE_S)


def test_a_hook_that_raises_first_ends_no_reading(reader) -> None:
    def bad(module, arguments) -> None:
        raise ValueError("bad input")

    handle = reader.model.register_forward_pre_hook(bad, prepend=True)
    with reader.reading():
        with pytest.raises(ValueError, match="bad input"):
            reader.model()
        with ThreadPoolExecutor(1) as pool, pytest.raises(OperationTimeoutError):
            pool.submit(
                reader.apply_delta, reader.folder / "1", timeout_s=HURRY_S
            ).result(PATIENCE_S)
    # Nor the forward around one of the same model.
    inner = []

    def again() -> None:
        reader.model.within = lambda: None
        guard = reader.model.register_forward_pre_hook(bad, prepend=True)
        with pytest.raises(ValueError, match="bad input"):
            reader.model()
        guard.remove()
        with ThreadPoolExecutor(1) as pool, pytest.raises(OperationTimeoutError):
            pool.submit(
                reader.apply_delta, reader.folder / "1", timeout_s=HURRY_S
            ).result(PATIENCE_S)
        inner.append(1)

    handle.remove()
    reader.model.within = again
    assert reader.model().tolist() == [0.0, 0.0]
    assert inner == [1]
    reader.apply_delta(reader.folder / "1")


def test_compiled_forwards_that_raise_hold_nobody_up(reader) -> None:
    def end() -> None:
        raise ValueError("within")

    compiled = torch.compile(reader.model, backend="eager")
    assert compiled().tolist() == [0.0, 0.0]
    reader.model.within = end
    with pytest.raises(ValueError, match="within"):
        compiled()
    applied(reader, "1")
    reader.model.within = lambda: None
    assert compiled().tolist() == [1.0, 1.0]
    reader.apply_delta(reader.folder / "2")
    assert compiled().tolist() == [2.0, 2.0]


def test_what_is_passed_over_between_a_hook_and_its_caller_is_there() -> None:
    """Else compiled forwards would end with the function that calls their hooks."""
    from torch_cpudist.tables import graphs  # which imports the compiler

    assert graphs.__file__ in forward_guard.BETWEEN
    assert torch._dynamo.__file__.startswith(forward_guard.BETWEEN)
    assert all(os.path.exists(name) for name in forward_guard.BETWEEN)


def test_who_wants_it_alone_gets_it_when_all_have_left() -> None:
    lock = SharedLock()
    first = lock.enter()
    with pytest.raises(OperationTimeoutError), lock.alone(0.01):
        pass
    second = lock.enter()
    assert lock.depth == 2
    lock.leave(first)
    lock.leave(first)
    assert lock.depth == 1
    lock.leave(second)
    assert lock.depth == 0
    with ThreadPoolExecutor(1) as pool:
        with lock.alone(PATIENCE_S):
            waiting = pool.submit(lock.enter)
            assert not waiting.done()
        lock.leave(waiting.result(PATIENCE_S))

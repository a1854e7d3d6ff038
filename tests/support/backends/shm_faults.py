# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What ranks of backend shm run that ends with errors, or spans hosts."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from shm_cases import averages, messages, outstanding, uneven
from shm_ranks import (
    TIMEOUT,
    Tell,
    check,
    reduced,
    values_of,
)
from torch.distributed import distributed_c10d

from torch_cpudist.backends import shm

# -- what goes wrong -----------------------------------------------------------------


# Longer than a busy machine keeps a rank waiting.
STOPPED_S = 4.0


def note(call: Callable[[], Any]) -> dict[str, str]:
    try:
        call()
    except BaseException as error:
        return {"type": type(error).__name__, "text": str(error)}
    return {"type": "nothing", "text": ""}


def mismatches(rank: int, size: int, _tell: Tell) -> dict[str, dict[str, str]]:
    """Each in a group of its own, which is broken afterwards."""
    found = {}

    def case(name: str, call: Callable[[dist.ProcessGroup], Any]) -> None:
        group = dist.new_group(backend="shm", timeout=TIMEOUT)
        found[name] = note(lambda: call(group))
        found[f"{name} again"] = note(lambda: dist.barrier(group))

    odd = rank == size - 1
    case("size", lambda g: dist.all_reduce(torch.ones(5 + odd), group=g))
    dtype = torch.float64 if odd else torch.float32
    case("dtype", lambda g: dist.all_reduce(torch.ones(5, dtype=dtype), group=g))
    op = dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM
    case("op", lambda g: dist.all_reduce(torch.ones(5), op, group=g))
    case(
        "kind",
        lambda g: dist.barrier(g) if odd else dist.broadcast(torch.ones(5), 0, group=g),
    )
    case(
        "dtype of op",
        lambda g: dist.all_reduce(torch.ones(5), dist.ReduceOp.BXOR, group=g),
    )
    late = dist.new_group(backend="shm", timeout=timedelta(seconds=0.3))
    if not odd:
        began = time.monotonic()
        found["late"] = note(lambda: dist.all_reduce(torch.ones(5), group=late))
        found["late"]["after_s"] = str(time.monotonic() - began)
    dist.barrier()
    pid = os.fork()
    if pid == 0:
        refused = note(lambda: dist.all_reduce(torch.ones(2)))
        os._exit(0 if "after fork" in refused["text"] else 1)
    found["forked"] = {"type": str(os.waitpid(pid, 0)[1]), "text": ""}
    return found


def until_killed(rank: int, size: int, tell: Tell) -> None:
    """Collectives without end."""
    until_lost(tell, TIMEOUT)


def until_stopped(rank: int, size: int, tell: Tell) -> None:
    """The same with the time after which a rank that has stopped is lost."""
    until_lost(tell, timedelta(seconds=STOPPED_S))


def until_lost(tell: Tell, timeout: timedelta) -> None:
    group = dist.new_group(backend="shm", timeout=timeout)
    for i in itertools.count():
        dist.all_reduce(torch.ones(1000), group=group)
        if i == 10:
            tell(os.getpid())


def messages_until_lost(rank: int, size: int, tell: Tell) -> None:
    """The last rank receives for ever; the others wait for it."""
    tell(os.getpid())
    if rank == size - 1:
        dist.recv(torch.ones(3), 0, tag=1)
    dist.recv(torch.ones(3), size - 1, tag=2)


def anybody_until_lost(rank: int, size: int, _tell: Tell) -> dict[str, Any]:
    """Rank 0 receives from anybody, while the others end one after the other."""
    second = dist.new_group(backend="shm", timeout=TIMEOUT)
    store = distributed_c10d._get_default_store()
    dist.barrier(second)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        store.wait(["rank 0 has seen the end of rank 1"], TIMEOUT)
        dist.send(torch.tensor([2.0]), 0)
        os.kill(os.getpid(), signal.SIGKILL)
    value = torch.zeros(1)

    def see() -> None:  # beside the receive below, which goes on
        seen = note(lambda: dist.recv(torch.zeros(1), 1, group=second))
        store.set("rank 0 has seen the end of rank 1", seen["type"])

    seeing = threading.Thread(target=see)
    seeing.start()
    assert dist.recv(value) == 2
    seeing.join(TIMEOUT.total_seconds())
    assert store.get("rank 0 has seen the end of rank 1") == b"PeerLostError"
    assert value.item() == 2.0
    began = time.monotonic()
    found = {
        "recv": note(lambda: dist.recv(value)),
        "again": note(lambda: dist.recv(value)),
        "send": note(lambda: dist.send(value, 1, group=second)),
        "after_s": time.monotonic() - began,
    }
    return found


def unlike_messages(rank: int, size: int, _tell: Tell) -> dict[str, Any]:
    """Each in a group of its own, which is broken afterwards."""
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    found = {}
    for peer in (-1, size):
        found[str(peer)] = note(lambda p=peer: backend.send([torch.ones(1)], p, 0))
    dtype = torch.int32 if rank else torch.float32
    for name, tensor in (
        ("size", torch.ones(3 + rank)),
        ("dtype", torch.ones(3, dtype=dtype)),
    ):
        group = dist.new_group(backend="shm", timeout=TIMEOUT)
        if rank:
            found[name] = note(lambda t=tensor, g=group: dist.recv(t, 0, group=g))
        else:
            dist.send(tensor, 1, group=group)
            found[name] = note(lambda g=group: dist.barrier(g))
    dist.barrier()
    return found


def on_two_hosts(rank: int, size: int, _tell: Tell) -> dict[str, Any]:
    """Everything in a group whose ranks say that they are on two hosts, 2 and 1."""
    options = shm.Options(host=f"host {rank // 2}")
    group = dist.new_group(backend="shm", pg_options=options, timeout=TIMEOUT)
    assert shm.hosts(group) == [[0, 1], [2]]
    world = dist.group.WORLD
    dist.group.WORLD = group
    try:
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.int16):
            several_hosts(rank, size, dtype)
        averages(rank, size)
        outstanding(rank, size)
        messages(rank, size)
        uneven(rank, size)
        mixed(rank, size)
        into_parameters(rank, size)
    finally:
        dist.group.WORLD = world
    left_while_waiting(rank, options)
    lost = dist.new_group(backend="shm", pg_options=options, timeout=TIMEOUT)
    dist.barrier(lost)
    found = {}
    if rank != 1:
        found = note(lambda: dist.all_reduce(torch.ones(3), group=lost))
        message = note(lambda: dist.recv(torch.ones(3), 1, group=lost))
        assert message["type"] == "PeerLostError", message
        assert "rank 1 (process" in message["text"], message
    else:
        dist.destroy_process_group(lost)
    refused_messages(rank, options)
    dist.barrier()
    return found


def refused_messages(rank: int, options: shm.Options) -> None:
    """Of a group over hosts: no such rank, nobody who sends."""
    limit = timedelta(seconds=1)
    dist.barrier()
    group = dist.new_group(backend="shm", pg_options=options, timeout=limit)
    backend = group._get_backend(torch.device("cpu"))
    for peer in (-1, rank, 7):
        found = note(lambda peer=peer: backend.send([torch.ones(1)], peer, 0))
        assert found["type"] == "InvalidArgumentError", found
    truth = torch.ones(3, dtype=torch.bool)
    found = note(lambda: dist.all_reduce(truth, dist.ReduceOp.AVG, group=group))
    assert found["type"] == "InvalidArgumentError", found
    found = note(lambda: backend.send([torch.ones(1)], (rank + 1) % 3, -1))
    assert found["type"] == "InvalidArgumentError", found
    one = torch.ones(1)
    for lists in ([[one], [], [one]], [[one, one]] * 3, [[one]]):
        found = note(lambda lists=lists: backend.allgather_coalesced(lists, [one]))
        assert found["type"] == "InvalidArgumentError", found
    if rank == 0:
        found = note(lambda: dist.recv(torch.ones(1), 1, group))
        assert found["type"] == "OperationTimeoutError", found
        # That made gloo close all links of this rank.
        found = note(lambda: dist.recv(torch.ones(1), None, group))
        assert found["type"] in ("OperationTimeoutError", "PeerLostError"), found


def mixed(rank: int, size: int) -> None:
    """Calls of all kinds at once, which each rank begins at its own times."""
    for turn in range(12):

        def pause(place: int, turn: int = turn) -> None:
            if (turn + place) % (size + 1) == rank:
                time.sleep(0.01)

        whole = torch.arange(5.0 * size) + 100 * rank
        sent = [part + 1000 for part in whole.split(5)]
        lists = [torch.empty(5) for _ in sent]
        flat = torch.empty(5 * size)
        root = turn % size
        got = [torch.empty(5 * size) for _ in sent] if rank == root else None
        own = torch.empty(5)
        sparse = torch.eye(size)[rank].to_sparse()
        message, to = torch.empty(5 * size), (rank + 1) % size
        works = [dist.all_to_all(lists, sent, async_op=True)]
        pause(0)
        works.append(dist.all_to_all_single(flat, whole, async_op=True))
        received = dist.irecv(message, (rank - 1) % size)
        pause(1)
        works.append(dist.gather(whole, got, root, async_op=True))
        works.append(dist.all_reduce(sparse, async_op=True))
        pause(2)
        works.append(
            dist.scatter(own, sent if rank == root else None, root, async_op=True)
        )
        total = whole.clone()
        works.append(dist.all_reduce(total, async_op=True))
        # Messages do not wait for the collectives that were begun before.
        works.append(dist.isend(whole, to))
        received.wait()
        for work in works:
            work.wait()
        wholes = [torch.arange(5.0 * size) + 100 * r for r in range(size)]
        parts = [one.split(5)[rank] for one in wholes]
        check(torch.cat(lists), torch.cat(parts) + 1000, "mixed: all_to_all")
        check(flat, torch.cat(parts), "mixed: all_to_all_single")
        check(message, wholes[rank - 1], "mixed: messages")
        if got is not None:
            check(torch.cat(got), torch.cat(wholes), "mixed: gather")
        check(sparse.to_dense(), torch.ones(size), "mixed: sparse all_reduce")
        check(own, wholes[root].split(5)[rank] + 1000, "mixed: scatter")
        check(total, torch.stack(wholes).sum(0), "mixed: all_reduce")


def into_parameters(rank: int, size: int) -> None:
    """Results in parameters, in a thread that would record gradients."""
    works, found = [], []
    for _ in range(2):
        parameter = torch.full((4, 3), float(rank)).t().requires_grad_()
        outputs = [torch.zeros(3, requires_grad=True) for _ in range(size)]
        works.append(dist.all_reduce(parameter, async_op=True))
        own = torch.full((3,), float(rank))
        works.append(dist.all_gather(outputs, own, async_op=True))
        found.append((parameter, outputs))
    for work in works:
        work.wait()
    for parameter, outputs in found:
        expected = torch.full((3, 4), float(sum(range(size))))
        check(parameter.detach(), expected, "parameters: all_reduce")
        for r, output in enumerate(outputs):
            check(output.detach(), torch.full((3,), float(r)), "parameters: all_gather")
        assert parameter.is_leaf


def until_threads_wait() -> None:
    """Until every other thread of this process sleeps: it has begun what it was given.

    Who is woken is no sleeper from then on, so that there is nothing to wait for first.
    """
    own, until = threading.get_native_id(), time.monotonic() + TIMEOUT.total_seconds()
    while True:
        states = {}
        for task in os.listdir("/proc/self/task"):
            text = Path(f"/proc/self/task/{task}/stat").read_text()
            states[int(task)] = text.rpartition(")")[2].split()[0]
        del states[own]
        if set(states.values()) <= {"S"}:
            return
        assert time.monotonic() < until, states
        time.sleep(0.001)


def left_while_waiting(rank: int, options: shm.Options) -> None:
    """Rank 2 waits for the other host, and destroys its group."""
    group = dist.new_group(backend="shm", pg_options=options, timeout=TIMEOUT)
    dist.barrier(group)
    if rank == 2:
        first = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        second = dist.all_to_all(
            list(torch.empty(3, 1)), list(torch.ones(3, 1)), group=group, async_op=True
        )
        until_threads_wait()  # the first has begun
        began = time.monotonic()
        dist.destroy_process_group(group)
        assert time.monotonic() - began < TIMEOUT.total_seconds() / 4
        for work in (first, second):
            found = note(work.wait)
            assert found["type"] == "ClosedError", found
            assert "before this call had ended" in found["text"]
    dist.barrier()
    if rank != 2:

        def twice() -> None:  # gloo may still have had the first of rank 2
            dist.all_reduce(torch.ones(3), group=group)
            dist.all_reduce(torch.ones(3), group=group)

        found = note(twice)
        assert found["type"] == "PeerLostError", found
        words = ("rank 2 destroyed its group", "lost a rank on another host")
        assert any(one in found["text"] for one in words), found


def several_hosts(rank: int, size: int, dtype: torch.dtype) -> None:
    for count in (0, 1, 40_001):
        # Whole numbers: sums are exact, so that the order between hosts does not count.
        parts = [
            values_of(r, count, torch.float32).mul(4).round().to(dtype)
            for r in range(size)
        ]
        own = parts[rank]
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.AVG):
            found = own.clone()
            dist.all_reduce(found, op)
            check(found, reduced(op, parts), f"hosts: all_reduce {dtype} {op}")
        for root in range(size):
            found = own.clone()
            dist.broadcast(found, root)
            check(found, parts[root], "hosts: broadcast")
            found = own.clone()
            dist.reduce(found, root)
            total = reduced(dist.ReduceOp.SUM, parts)
            check(found, total if rank == root else own, "hosts: reduce")
        lists = [torch.empty_like(own) for _ in parts]
        dist.all_gather(lists, own)
        for one, part in zip(lists, parts, strict=True):
            check(one, part, "hosts: all_gather")
        sent = [own.roll(q) for q in range(size)]
        flat = own.new_empty(count * size)
        dist.all_gather_into_tensor(flat, own)
        check(flat, torch.cat(parts), "hosts: all_gather_into_tensor")
        lists = [torch.empty_like(own) for _ in parts]
        dist.all_to_all(lists, sent)
        for one, part in zip(lists, parts, strict=True):
            check(one, part.roll(rank), "hosts: all_to_all")
        expected = reduced(dist.ReduceOp.SUM, [p.roll(rank) for p in parts])
        for scatter, given in (
            (dist.reduce_scatter, sent),
            (dist.reduce_scatter_tensor, torch.cat(sent)),
        ):
            found = torch.empty_like(own)
            scatter(found, given)
            check(found, expected, "hosts: reduce_scatter")
        lists = [torch.empty_like(own) for _ in parts]
        dist.gather(own, lists if rank == 0 else None)
        if rank == 0:
            check(torch.stack(lists), torch.stack(parts), "hosts: gather")
        found = torch.empty_like(own)
        dist.scatter(found, parts if rank == 0 else None)
        check(found, own, "hosts: scatter")

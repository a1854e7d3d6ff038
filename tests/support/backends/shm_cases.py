# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What ranks of backend shm run that ends well, against plain torch and gloo."""

from __future__ import annotations

import itertools
import threading

import torch
import torch.distributed as dist
from patience import PATIENCE_S
from shm_ranks import (
    COUNTS,
    FLOATS,
    INTEGERS,
    LARGE,
    Tell,
    check,
    ops_of,
    reduced,
    values_of,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torch_cpudist.backends import shm


def all_reduces(rank: int, size: int) -> None:
    for dtype in (*FLOATS, *INTEGERS):
        for op, count in itertools.product(ops_of(dtype), COUNTS):
            parts = [values_of(r, count, dtype) for r in range(size)]
            found = parts[rank].clone()
            dist.all_reduce(found, op)
            check(found, reduced(op, parts), f"all_reduce {dtype} {op} {count}")
    for dtype, op in ((FLOATS[0], dist.ReduceOp.SUM), (FLOATS[2], dist.ReduceOp.AVG)):
        parts = [values_of(r, LARGE, dtype) for r in range(size)]
        found = parts[rank].clone()
        dist.all_reduce(found, op)
        check(found, reduced(op, parts), f"all_reduce {dtype} {op} large")
    truth = values_of(rank, 50, torch.bool).clone()
    parts = [values_of(r, 50, torch.bool) for r in range(size)]
    dist.all_reduce(truth, dist.ReduceOp.SUM)
    check(truth, torch.stack(parts).any(0), "booleans")
    tensors = [values_of(rank, count, torch.float32).clone() for count in COUNTS]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    for tensor, count in zip(tensors, COUNTS, strict=True):
        parts = [values_of(r, count, torch.float32) for r in range(size)]
        check(tensor, reduced(dist.ReduceOp.SUM, parts), "coalesced")
    crossed = torch.full((4, 3), float(rank)).t()
    dist.all_reduce(crossed)
    check(crossed, torch.full((3, 4), float(sum(range(size)))), "not contiguous")
    sparse = torch.eye(size)[rank].to_sparse()
    dist.all_reduce(sparse)
    check(sparse.to_dense(), torch.ones(size), "sparse")


def moves(rank: int, size: int) -> None:
    """All collectives that move elements, and those that also reduce."""
    for dtype, count in (
        *itertools.product((torch.float32, torch.bfloat16), COUNTS),
        (torch.int64, 7),
        (torch.complex64, 9),
        (torch.bool, 5),
        (torch.float32, LARGE),
    ):
        floats = dtype not in (torch.complex64, torch.bool)
        parts = [values_of(r, count, torch.float32).to(dtype) for r in range(size)]
        own, what = parts[rank], f"{dtype} {count}"
        for root in {0, size - 1} if count != LARGE else {1}:
            found = own.clone()
            dist.broadcast(found, root)
            check(found, parts[root], f"broadcast {what}")
            lists = [torch.empty_like(own) for _ in parts] if rank == root else None
            dist.gather(own, lists, root)
            for one, part in zip(lists or [], parts, strict=False):
                check(one, part, f"gather {what}")
            found = torch.empty_like(own)
            dist.scatter(found, parts if rank == root else None, root)
            check(found, parts[rank], f"scatter {what}")
            if floats:
                found = own.clone()
                dist.reduce(found, root)
                wanted = reduced(dist.ReduceOp.SUM, parts) if rank == root else own
                check(found, wanted, f"reduce {what}")
        lists = [torch.empty_like(own) for _ in parts]
        dist.all_gather(lists, own)
        for one, part in zip(lists, parts, strict=True):
            check(one, part, f"all_gather {what}")
        flat = own.new_empty(count * size)
        dist.all_gather_into_tensor(flat, own)
        check(flat, torch.cat(parts), f"all_gather_into_tensor {what}")
        # What rank r sends to rank q is its own values, rolled by q.
        sent = [own.roll(q) for q in range(size)]
        lists = [torch.empty_like(own) for _ in parts]
        dist.all_to_all(lists, sent)
        for one, part in zip(lists, parts, strict=True):
            check(one, part.roll(rank), f"all_to_all {what}")
        dist.all_to_all_single(flat, torch.cat(sent))
        check(flat, torch.cat([p.roll(rank) for p in parts]), f"single {what}")
        if floats:
            expected = reduced(dist.ReduceOp.SUM, [p.roll(rank) for p in parts])
            found = torch.empty_like(own)
            dist.reduce_scatter(found, sent)
            check(found, expected, f"reduce_scatter {what}")
            found = torch.empty_like(own)
            dist.reduce_scatter_tensor(found, torch.cat(sent))
            check(found, expected, f"reduce_scatter_tensor {what}")


def averages(rank: int, size: int) -> None:
    """Averages of integers whose sums their type does not hold, in whole numbers."""
    op = dist.ReduceOp.AVG
    for dtype in INTEGERS:
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        rows = [
            [
                high,
                low,
                high - (r > 0),
                low + (r == 1),
                r - 1 if low else r,
                high * (r % 2),
            ]
            for r in range(size)
        ]
        sums = [sum(column) for column in zip(*rows, strict=True)]
        wanted = [abs(one) // size * (1 if one > 0 else -1) for one in sums]
        expected, own = torch.tensor(wanted, dtype=dtype), rows[rank]
        found = torch.tensor(own, dtype=dtype)
        dist.all_reduce(found, op)
        check(found, expected, f"averages: all_reduce {dtype}")
        found = torch.tensor(own, dtype=dtype)
        dist.reduce(found, size - 1, op)
        mine = expected if rank == size - 1 else torch.tensor(own, dtype=dtype)
        check(found, mine, f"averages: reduce {dtype}")
        found = torch.zeros_like(expected)
        dist.reduce_scatter_tensor(found, torch.tensor(own * size, dtype=dtype), op)
        check(found, expected, f"averages: reduce_scatter {dtype}")


def uneven(rank: int, size: int) -> None:
    """Rank r sends (r + q) rows to rank q."""
    rows = (
        torch.arange(sum(rank + q for q in range(size)) * 2.0).view(-1, 2) + 1000 * rank
    )
    splits = [rank + q for q in range(size)]
    found = torch.empty(sum(splits), 2)
    dist.all_to_all_single(found, rows, splits, splits)
    expected = []
    for r in range(size):
        of_r = (
            torch.arange(sum(r + q for q in range(size)) * 2.0).view(-1, 2) + 1000 * r
        )
        expected.append(of_r.split([r + q for q in range(size)])[rank])
    check(found, torch.cat(expected), "uneven all_to_all_single")


def messages(rank: int, size: int) -> None:
    """A ring of messages, tags out of order, any source, batches."""
    to, source = (rank + 1) % size, (rank - 1) % size
    for count in (3, LARGE):
        out, found = torch.full((count,), float(rank)), torch.empty(count)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, out, to), dist.P2POp(dist.irecv, found, source)]
        )
        for work in works:
            work.wait()
        check(found, torch.full((count,), float(source)), "ring")
    works = [
        dist.isend(torch.tensor([10 * rank + tag]), to, tag=tag) for tag in range(4)
    ]
    for tag in (2, 0, 3, 1):
        found = torch.zeros(1, dtype=torch.int64)
        dist.recv(found, source, tag=tag)
        check(found, torch.tensor([10 * source + tag]), "tags")
    for work in works:
        work.wait()
    if rank == 0:
        sources = set()
        for _ in range(size - 1):
            found = torch.zeros(1, dtype=torch.int64)
            sender = dist.recv(found, tag=9)
            check(found, torch.tensor([sender]), "any source")
            sources.add(sender)
        assert sources == set(range(1, size))
    else:
        dist.send(torch.tensor([rank]), 0, tag=9)


# -- groups, asynchronous calls, shared tensors --------------------------------------


def outstanding(rank: int, size: int) -> None:
    counts = [10 + 999 * (i % 5) for i in range(50)]
    tensors = [values_of(rank, count, torch.float32).clone() for count in counts]
    parts = [
        [values_of(r, t.numel(), torch.float32) for r in range(size)] for t in tensors
    ]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    futures = [work.get_future() for work in works[::7]]
    for work in reversed(works):
        assert work.wait()
        assert work.is_completed()
    for tensor, part in zip(tensors, parts, strict=True):
        check(tensor, reduced(dist.ReduceOp.SUM, part), "outstanding")
    for future, tensor in zip(futures, tensors[::7], strict=True):
        check(future.wait()[0], tensor, "future")
    seen: list[float] = []
    tensor = torch.ones(3)
    work = dist.all_reduce(tensor, async_op=True)
    after = work.get_future().then(lambda done: seen.append(done.value()[0][0].item()))
    after.wait()
    assert seen == [float(size)]


def two_groups(rank: int, size: int) -> None:
    """Two threads, each with a group of its own, and a group of some ranks."""
    groups = [dist.new_group(backend="shm") for _ in range(2)]
    failures: list[BaseException] = []

    def use(group: dist.ProcessGroup, factor: int) -> None:
        try:
            for i in range(100):
                tensor = torch.full((1 + 37 * (i % 9),), float(factor + i))
                dist.all_reduce(tensor, group=group)
                check(
                    tensor, torch.full_like(tensor, float(size * (factor + i))), "group"
                )
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=use, args=(group, 1000 * i))
        for i, group in enumerate(groups)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    if failures:
        raise failures[0]
    some = list(range(1, size))
    part = dist.new_group(some, backend="shm")
    if rank in some:
        tensor = torch.ones(5)
        dist.all_reduce(tensor, group=part)
        check(tensor, torch.full((5,), float(len(some))), "subset")
    dist.barrier()


def shared_tensors(rank: int, size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        tensor = shm.empty(None, LARGE, dtype)
        parts = [values_of(r, LARGE, dtype) for r in range(size)]
        tensor.copy_(parts[rank])
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        check(tensor, reduced(dist.ReduceOp.AVG, parts), "shared tensor")
        # A part of it, and one rank whose tensor is not in shared memory.
        for mixed in (False, True):
            begin, count = 128, 70_000
            parts = [values_of(r, count, dtype) for r in range(size)]
            own = tensor[begin : begin + count]
            if mixed and rank == size - 1:
                own = torch.empty(count, dtype=dtype)
            own.copy_(parts[rank])
            dist.all_reduce(own)
            check(own, reduced(dist.ReduceOp.SUM, parts), f"part, mixed: {mixed}")


def like_gloo(rank: int, size: int) -> None:
    """DDP and FSDP2 over shm and over gloo: the same parameters."""
    from torch.distributed.fsdp import fully_shard  # slow

    gloo = dist.new_group(backend="gloo")
    found: dict[str, list[torch.Tensor]] = {}
    for name, group in (("gloo", gloo), ("shm", dist.group.WORLD)):
        for wrapped in ("ddp", "fsdp"):
            torch.manual_seed(3)
            model = nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 3))
            if wrapped == "ddp":
                run: nn.Module = nn.parallel.DistributedDataParallel(
                    model, process_group=group, bucket_cap_mb=0.001
                )
            else:
                run = fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            for step in range(4):
                generator = torch.Generator().manual_seed(10 * step + rank)
                x = torch.randn(8, 20, generator=generator)
                optimizer.zero_grad()
                run(x).square().mean().backward()
                optimizer.step()
            whole = [
                getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()
            ]
            found[f"{name} {wrapped}"] = [p.detach().clone() for p in whole]
    for wrapped in ("ddp", "fsdp"):
        for a, b in zip(found[f"gloo {wrapped}"], found[f"shm {wrapped}"], strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-6), wrapped


def everything(rank: int, size: int, _tell: Tell) -> None:
    all_reduces(rank, size)
    moves(rank, size)
    averages(rank, size)
    uneven(rank, size)
    messages(rank, size)
    shared_tensors(rank, size)
    if size == 2:
        outstanding(rank, size)
        like_gloo(rank, size)
    if size == 3:
        two_groups(rank, size)
    tensors = [torch.empty(0), torch.ones(())]
    for tensor in tensors:
        dist.all_reduce(tensor)
    check(tensors[1], torch.tensor(float(size)), "scalar")
    dist.barrier()

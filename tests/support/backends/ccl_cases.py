# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What ranks of the tests of the oneCCL backend run, against a group of gloo."""

from __future__ import annotations

import copy
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from collective_cases import (
    Dense,
    adam,
    batch_of,
    difference,
    loss_of,
    same_bits,
    until_lost,
)
from patience import PATIENCE_S
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.log import logger

SUM, AVG, OPS = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
Group = Any


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(31 * rank + 7)
    made = torch.randint(1, 5, shape, generator=generator).to(dtype)
    return made - 2 if dtype.is_floating_point else made


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return "no error"


def reduced(all_of: list[torch.Tensor], op: Any) -> torch.Tensor:
    """What a reduction is to be: small whole numbers, exact in every dtype."""
    whole = torch.stack([one.double() for one in all_of])
    if op in (SUM, AVG):
        result = whole.sum(0) / (len(all_of) if op == AVG else 1)
    elif op == OPS.PRODUCT:
        result = whole.prod(0)
    else:
        result = whole.amax(0) if op == OPS.MAX else whole.amin(0)
    return result.to(all_of[0].dtype)


def reductions(rank: int, n: int) -> list[str]:
    """Reductions whose result is wrong."""
    wrong = []
    pairs = [(dtype, op) for dtype in (*FLOATS, *INTEGERS) for op in (SUM, OPS.MAX)]
    pairs += [(torch.float32, op) for op in (AVG, OPS.MIN, OPS.PRODUCT)]
    pairs += [(torch.int64, OPS.PRODUCT), (torch.bfloat16, AVG)]
    for dtype, op in pairs:
        for shape in ((3,), (70, 31)):
            own = values(rank, shape, dtype)
            found, at_root = own.clone(), own.clone()
            expected = reduced([values(r, shape, dtype) for r in range(n)], op)
            dist.all_reduce(found, op)
            dist.reduce(at_root, 1, op)
            if not torch.equal(found, expected):
                wrong.append(f"all_reduce {dtype} {op} {shape}")
            if not torch.equal(at_root, expected if rank == 1 else own):
                wrong.append(f"reduce {dtype} {op} {shape}")
    truth = torch.tensor([rank == 0, True, False])
    dist.all_reduce(truth, OPS.PRODUCT)
    if truth.tolist() != [False, True, False]:
        wrong.append("bool")
    turned = torch.full((2, 3), 1.0 + rank).t()
    dist.all_reduce(turned)
    complex_one = torch.full((2,), complex(rank, 1))
    dist.all_reduce(complex_one)
    total = sum(range(n))
    if not turned.eq(n + total).all() or not complex_one.eq(complex(total, n)).all():
        wrong.append("strided or complex")
    whole = [values(r, (5, 2), torch.float32) for r in range(n)]
    parts = [whole[rank] + i for i in range(n)]
    expected = reduced(whole, SUM) + n * rank
    out = torch.empty(5, 2)
    dist.reduce_scatter(out, parts)
    single = torch.empty(5, 2)
    dist.reduce_scatter_tensor(single, torch.cat(parts), AVG)
    if not (torch.equal(out, expected) and torch.equal(single, expected / n)):
        wrong.append("reduce_scatter")
    return wrong


def movements(rank: int, n: int) -> list[str]:
    """Collectives that move data, and messages, whose result is wrong."""
    wrong = []
    for dtype in (torch.float32, torch.bool, torch.int64, torch.complex64):
        own = torch.full((4, 3), rank + 1).to(dtype)
        all_of = [torch.full((4, 3), r + 1).to(dtype) for r in range(n)]
        found = [torch.empty_like(own) for _ in range(n)]
        dist.all_gather(found, own)
        flat = torch.empty(4 * n, 3, dtype=dtype)
        dist.all_gather_into_tensor(flat, own)
        at_root = [torch.empty_like(own) for _ in range(n)] if rank == n - 1 else None
        dist.gather(own, at_root, dst=n - 1)
        given = torch.empty_like(own)
        dist.scatter(given, all_of if rank == 0 else None, src=0)
        sent = own.clone() if rank == 1 else torch.empty_like(own)
        dist.broadcast(sent, 1)
        checks = {
            "all_gather": all(map(torch.equal, found, all_of)),
            "all_gather_into_tensor": torch.equal(flat, torch.cat(all_of)),
            "gather": at_root is None or all(map(torch.equal, at_root, all_of)),
            "scatter": torch.equal(given, own),
            "broadcast": torch.equal(sent, all_of[1]),
        }
        wrong += [f"{name} {dtype}" for name, right in checks.items() if not right]
    lists = [torch.full((rank + 1, 2), 10.0 * rank + peer) for peer in range(n)]
    got = [torch.empty(peer + 1, 2) for peer in range(n)]
    dist.all_to_all(got, lists)
    if any(not g.eq(10.0 * peer + rank).all() for peer, g in enumerate(got)):
        wrong.append("all_to_all")
    rows = torch.arange(2.0 * n).view(2 * n, 1) + 100 * rank
    exchanged = torch.empty_like(rows)
    dist.all_to_all_single(exchanged, rows)
    if exchanged[0] != 2.0 * rank or exchanged[2] != 100 + 2.0 * rank:
        wrong.append("all_to_all_single")
    objects: list[Any] = [None] * n
    dist.all_gather_object(objects, {"rank": rank})
    if objects != [{"rank": r} for r in range(n)]:
        wrong.append("objects")
    empty = torch.empty(0)
    dist.all_reduce(empty)
    dist.barrier()
    return wrong


def messages(rank: int, n: int) -> list[str]:
    """Messages both ways at once, larger than any buffer; the order between two."""
    wrong = []
    peer = (rank + 1) % n
    before = (rank - 1) % n
    out, into = torch.full((1_000_000,), float(rank)), torch.empty(1_000_000)
    works = [dist.isend(out, peer), dist.irecv(into, before)]
    for work in works:
        work.wait()
    if not into.eq(before).all():
        wrong.append("both ways")
    if rank == 0:
        for i in range(20):
            dist.send(torch.tensor([float(i)]), 1)
    elif rank == 1:
        found = torch.empty(1)
        for i in range(20):
            dist.recv(found, 0)
            if found != i:
                wrong.append(f"message {i}")
    return wrong


def many_at_once(n: int) -> list[str]:
    """Many operations in flight, and two threads with a group each."""
    wrong = []
    tensors = [torch.full((1000 + i,), float(i)) for i in range(50)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for i, (tensor, work) in enumerate(zip(tensors, works, strict=True)):
        work.wait()
        if not tensor.eq(n * i).all():
            wrong.append(f"in flight {i}")
    groups = [dist.new_group(backend="ccl") for _ in range(2)]

    def repeat(which: int) -> None:
        for _ in range(50):
            one = torch.ones(2000)
            dist.all_reduce(one, group=groups[which])
            if not one.eq(n).all():
                wrong.append(f"thread {which}")

    threads = [threading.Thread(target=repeat, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    for group in groups:
        dist.destroy_process_group(group)
    return wrong


def refusals(rank: int, n: int) -> dict[str, str]:
    one = torch.ones(2)
    peer = (rank + 1) % n
    return {
        "tag": error_of(lambda: dist.send(one, peer, tag=3)),
        "any": error_of(lambda: dist.recv(one)),
        "bits": error_of(lambda: dist.all_reduce(one.to(torch.int32), OPS.BAND)),
        "dtype": error_of(lambda: dist.all_reduce(torch.ones(2, dtype=torch.uint32))),
        "average": error_of(lambda: dist.all_reduce(one.to(torch.int32), AVG)),
        "sparse": error_of(lambda: dist.all_reduce(one.to_sparse())),
        "list": error_of(lambda: dist.all_gather([torch.empty(3)] * n, one)),
    }


def ddp(rank: int, gloo: Group) -> float:
    """How far DDP over ccl is from DDP over gloo after some steps."""
    models = [Dense() for _ in range(2)]
    for model, group in zip(models, (None, gloo), strict=True):
        wrapped = nn.parallel.DistributedDataParallel(
            model, process_group=group, bucket_cap_mb=0.0002
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        for step in range(6):
            optimizer.zero_grad()
            batch = batch_of(step, rank, 4, torch.float32)
            loss_of(wrapped, batch, (0, 1, 2)).backward()
            optimizer.step()
    return difference(*models)


def fsdp(rank: int, n: int) -> float:
    """How far FSDP2 over ccl is from FSDP2 over gloo after some steps."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    found = []
    for backend in ("ccl", "gloo"):
        group = dist.new_group(backend=backend)
        model = Dense()
        fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            batch = batch_of(step, rank, 4, torch.float32)
            loss_of(model, batch, (0, 1, 2)).backward()
            optimizer.step()
        found.append([p.full_tensor().detach() for p in model.parameters()])
    pairs = zip(*found, strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def strategy(context: cpudist.Context) -> dict[str, Any]:
    """AllReduce over ccl against a model that sees all trainers' batches."""
    ours, plain = Dense(), Dense()
    reference = adam(plain)
    optimizer = cpudist.DistributedOptimizer(adam(ours), ours, "allreduce")
    n, rank = context.trainer_count, context.trainer_rank
    for step in range(4):
        optimizer.zero_grad()
        loss_of(ours, batch_of(step, rank, 3, torch.float32), (0, 1)).backward()
        optimizer.step()
        reference.zero_grad()
        for other in range(n):
            batch = batch_of(step, other, 3, torch.float32)
            (loss_of(plain, batch, (0, 1)) / n).backward()
        reference.step()
    result = {"worst": difference(ours, plain), "bits": same_bits(ours)}
    optimizer.close()
    return result


def disagreeing(rank: int) -> dict[str, str]:
    """What is compared in groups that are made while debugging."""
    level = logger.level
    if rank == 0:  # one that debugs makes all compare
        logger.setLevel(logging.DEBUG)
    group = dist.new_group(backend="ccl")
    logger.setLevel(level)
    roots = rank % 2
    rows = torch.ones(4, 1)
    splits = [2, 2] if rank == 0 else [1, 3]
    return {
        "size": error_of(lambda: dist.all_reduce(torch.ones(2 + rank), group=group)),
        "dtype": error_of(
            lambda: dist.all_reduce(
                torch.ones(2, dtype=(torch.int32, torch.float32)[rank]), group=group
            )
        ),
        "root": error_of(lambda: dist.broadcast(torch.ones(2), roots, group=group)),
        "call": error_of(
            lambda: (
                dist.barrier(group=group)
                if rank
                else dist.all_reduce(torch.ones(2), group=group)
            )
        ),
        "splits": error_of(
            lambda: dist.all_to_all_single(rows.clone(), rows, [2, 2], splits, group)
        ),
        "right": error_of(lambda: dist.all_reduce(torch.ones(2), group=group)),
    }


def everything(context: cpudist.Context, _report: Any) -> dict[str, Any]:
    rank, n = context.trainer_rank, context.trainer_count
    gloo = dist.new_group(backend="gloo")
    plain = copy.copy(dict(os.environ))
    return {
        "backend": [dist.get_backend(), context.backend],
        "environment": {k: v for k, v in plain.items() if k.startswith(("CCL", "FI_"))},
        "wrong": reductions(rank, n)
        + movements(rank, n)
        + messages(rank, n)
        + many_at_once(n),
        "refused": refusals(rank, n),
        "ddp": ddp(rank, gloo),
        "fsdp": fsdp(rank, n),
        "strategy": strategy(context),
        "disagree": disagreeing(rank),
    }


def late_and_lost(context: cpudist.Context, report: Any) -> None:
    """Groups of some ranks; one that is late; then a rank is killed."""
    from datetime import timedelta

    rank = context.trainer_rank
    ring = [dist.new_group([i, (i + 1) % 4], backend="ccl") for i in range(4)]
    mine = [group for group in ring if dist.get_rank(group) >= 0]
    sums = [torch.tensor([float(rank)]) for _ in mine]
    works = [
        dist.all_reduce(one, group=group, async_op=True)
        for one, group in zip(sums, mine, strict=True)
    ]
    for work in works:
        work.wait()
    patience = timedelta(seconds=1.0)
    short = dist.new_group(backend="ccl", timeout=patience)
    began = time.monotonic()
    late = again = ""
    if rank != 3:
        late = error_of(lambda: dist.all_reduce(torch.ones(4), group=short))
        again = error_of(lambda: dist.all_reduce(torch.ones(4), group=short))
    waited_s = time.monotonic() - began
    dist.all_reduce(torch.ones(1))
    report(
        {
            "sums": sorted(float(one) for one in sums),
            "late": late,
            "again": again,
            "waited_s": waited_s,
        }
    )
    until_lost(context, report)

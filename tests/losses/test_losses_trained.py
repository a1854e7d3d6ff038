# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Softmax losses over tables of servers: which trainers are one process, which not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from remote_cases import remote_model, rows_now, static_model
from sync_cases import assert_same_bits, run
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist import losses

ITEMS, USERS, DIM, BATCH, STEPS = 60, 50, 4, 16, 8


class Towers(nn.Module):
    """A table for queries, and one for what they ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(USERS, DIM)
        self.items = nn.Embedding(ITEMS, DIM)


Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
Rows = dict[str, torch.Tensor]


def in_batch(model: nn.Module, users: torch.Tensor, items: torch.Tensor):
    log_q = torch.log1p(items.float())
    return losses.in_batch_softmax(
        model.users(users), model.items(items), log_q=log_q, ids=items
    )


def sampled(seed: int) -> Loss:
    sampler = losses.LogUniformSampler(ITEMS, seed=seed)

    def loss(model: nn.Module, users: torch.Tensor, items: torch.Tensor):
        negatives = sampler.draw(20, items)
        return losses.sampled_softmax(model.users(users), model.items, items, negatives)

    return loss


def batches(rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    draws = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        yield (
            torch.randint(USERS, (BATCH,), generator=draws),
            torch.randint(ITEMS, (BATCH,), generator=draws),
        )


def wrapped(model: nn.Module) -> cpudist.DistributedOptimizer:
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    return cpudist.DistributedOptimizer(inner, model)


def two_trainers(loss_of: Callable[[int], Loss], remote: bool = False) -> Rows:
    # Not in their threads, which share torch's generator.
    models = [(remote_model if remote else static_model)(make=towers) for _ in "ab"]

    def body(context: cpudist.Context) -> Rows:
        model, rank = models[context.trainer_rank], context.trainer_rank
        optimizer = wrapped(model)
        loss = loss_of(rank)
        for users, items in batches(rank):
            optimizer.zero_grad()
            loss(model, users, items).backward()
            optimizer.step()
        context.barrier()
        return rows_now(optimizer)

    first, second = run(body, 2)
    assert_same_bits(first, second)
    return first


def towers() -> nn.Module:
    return Towers()


def one_process(loss: Loss, joined: bool) -> Rows:
    """On the joined batch, or on the mean of its parts' losses; plain torch."""
    model = static_model(make=towers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for first, second in zip(batches(0), batches(1), strict=True):
        optimizer.zero_grad()
        if joined:
            users, items = (torch.cat(both) for both in zip(first, second, strict=True))
            loss(model, users, items).backward()
        else:
            (loss(model, *first) / 2 + loss(model, *second) / 2).backward()
        optimizer.step()
    return {name: rows.detach() for name, rows in model.named_parameters()}


def difference(first: Rows, second: Rows) -> float:
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def test_trainers_of_the_same_negatives_are_one_process_on_the_joined_batch() -> None:
    found = two_trainers(lambda rank: sampled(5))
    assert difference(found, one_process(sampled(5), joined=True)) < 1e-5
    assert difference(found, one_process(sampled(6), joined=True)) > 0.01


def test_trainers_of_their_own_negatives_are_not() -> None:
    found = two_trainers(lambda rank: sampled(5 + rank))
    assert difference(found, one_process(sampled(5), joined=True)) > 0.01


def test_negatives_of_a_batch_are_those_of_its_trainer() -> None:
    found = two_trainers(lambda rank: in_batch)
    assert difference(found, one_process(in_batch, joined=False)) < 1e-5
    assert difference(found, one_process(in_batch, joined=True)) > 0.01


@pytest.mark.parametrize("loss", [lambda rank: sampled(5), lambda rank: in_batch])
def test_remote_tables_learn_the_same(loss: Callable[[int], Loss]) -> None:
    assert_same_bits(two_trainers(loss, remote=True), two_trainers(loss))

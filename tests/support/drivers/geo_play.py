# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Schedules of trainers under Geo, played beside the plain model of its algebra."""

from __future__ import annotations

import random
import threading

import pytest
from geo_cases import (
    Moving,
    Turns,
    exchange,
    geo,
    gradients,
    put_gradients,
    wrapped,
)
from geo_model import Sections, Servers, SlotTrainer, Trainer, rows_of
from patience import PATIENCE_S
from sync_cases import run
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist import _core
from torch_cpudist.tables.remote_weight import is_remote

NEVER = 2**31 - 1
OPS = {"step": 10, "advance": 12, "finish": 2, "flush": 1, "leave": 1, "barrier": 1}


def schedule(seed, trainers, length=90, most=6):
    """Operations of trainers in turn; few exchanges, so that all stays exact.

    A fraction gets log2(N) bits longer with every exchange of its trainer.
    """
    chance = random.Random(seed)
    names, weights = list(OPS), list(OPS.values())
    begun = [0] * trainers
    plan = []
    for _ in range(length):
        rank = chance.randrange(trainers)
        op = chance.choices(names, weights)[0]
        if op == "barrier":
            plan += [(r, op, 0) for r in range(trainers)]
            begun = [0] * trainers
            continue
        if op == "leave" and trainers == 4:
            op = "step"  # thirds of the remaining three are not exact
        if op == "advance" and chance.random() < 0.2:
            op = "begin"
        if op in ("begin", "flush"):
            begun[rank] += 1
            if begun[rank] > most:
                op = "step"
        plan.append((rank, op, chance.randrange(1000)))
    plan += [(r, "leave", 0) for r in range(trainers)]
    return plan + [(r, "flush", 0) for r in range(trainers)]


class Pair:
    """A trainer and what stands for it in the plain model."""

    def __init__(self, rank, model, opt, twin):
        self.rank, self.model, self.opt, self.twin = rank, model, opt, twin

    def _look_up(self, found):
        """As a forward has looked up the rows that its gradients name."""
        for module in self.model.children():
            gradient = found.get(f"{name_of(self.model, module)}.weight")
            if gradient is not None and is_remote(module.weight):
                ids = gradient._indices()[0]
                bags = isinstance(module, nn.EmbeddingBag)
                module(ids.reshape(-1, 1) if bags else ids)

    def step(self, seed):
        found = gradients(seed, missing=True)
        self._look_up(found)
        put_gradients(self.model, found)
        self.opt.step()
        self.twin.step(gradients(seed, missing=True))

    def begin(self, seed):
        if self.twin.phase != "idle" or self.rank not in self.twin.servers.members:
            return
        if self.opt.trained.alone:
            return  # there is nobody to exchange with
        self.opt.trained.exchange.begin(
            whole=False,
            step=self.opt.driver.outer_step,
            steps=1,
            samples=0,
        )
        self.twin.begin()

    def advance(self, seed):
        for _ in range(1 + seed % 8):
            done = exchange(self.opt, "advance", budget_s=0.0)
            assert done == self.twin.advance()
            if self.twin.phase == "travel":
                self.opt.trained.opened.drain()

    def finish(self, seed):
        exchange(self.opt, "finish")
        self.twin.finish()

    def flush(self, seed):
        self.opt.flush()
        self.twin.flush()

    def leave(self, seed):
        self.opt.leave()
        self.twin.leave()

    def barrier(self, seed):
        """This trainer's part before it waits."""
        parts = cpudist.current().participants()
        (part,) = (one for one in parts if one.optimizer is self.opt)
        part.before_barrier()
        if self.rank in self.twin.servers.members:
            self.twin.exchange(whole=True)

    def check(self, turn, op, tolerance):
        found = rows_of(self.model, self.twin.servers.sections.tables)
        for key in self.twin.x:
            for ours, theirs in zip(found[key], self.twin.value(key), strict=True):
                assert abs(ours - theirs) <= tolerance, (turn, op, key)
        if isinstance(self.twin, SlotTrainer):
            stats = self.opt.stats()["exchange"]
            assert stats["slot_rows"] == len(self.twin.ages), (turn, op)
            assert stats["retired_rows"] == self.twin.retired, (turn, op)


def name_of(model, module):
    return next(name for name, one in model.named_children() if one is module)


def twin_of(rank, servers, step, cap):
    if cap is None:
        return Trainer(rank, servers, step)
    return SlotTrainer(rank, servers, step, cap)


def play(context, plan, turns, shared, tolerance, step, cap):
    """One trainer's part of a schedule; ``cap``: of remote tables' rows, in bytes."""
    rank, trainers = context.trainer_rank, context.trainer_count
    model = Moving()
    values = rows_of(model, ["first.weight", "second.weight"])
    given = {"outer_step": step if isinstance(step, float) else None}
    if cap is not None:
        cpudist.shard_tables(model, remote=["first", "second"])
        given["cache_bytes"] = cap
    rule = "auto" if step is None else "mean"
    opt = wrapped(model, geo(NEVER, communicator={"merge_rule": rule}, **given))
    if step == "root":
        # That of optimizers whose steps this model could not repeat.
        opt.driver.outer_step = (_core.ROOT_STEP, 1.0)
    with shared["lock"]:
        if "servers" not in shared:
            sections = Sections(opt, context.server_count)
            shared["servers"] = Servers(values, sections, trainers)
        pair = Pair(rank, model, opt, twin_of(rank, shared["servers"], step, cap))
    shared["ready"].wait(PATIENCE_S)
    for turn, (owner, op, seed) in enumerate(plan):
        if owner == rank:
            with turns.at(turn):
                getattr(pair, op)(seed)
                pair.check(turn, op, tolerance)
        if op == "barrier" and owner == trainers - 1:
            # Each has handed all on; the rest of a barrier is done by all at once.
            shared["ready"].wait(PATIENCE_S)
            context.barrier()
            with shared["lock"]:
                if rank in shared["servers"].members:
                    pair.twin.exchange(whole=True)
            shared["ready"].wait(PATIENCE_S)
            shared["servers"].members.add(rank)
            pair.check(turn, "after barrier", tolerance)
            shared["ready"].wait(PATIENCE_S)
    moved = rows_of(model, shared["servers"].sections.tables)
    for key, row in shared["servers"].z.items():
        assert moved[key] == pytest.approx(row, abs=tolerance), key
    return 0 if cap is None else pair.twin.retired


def play_all(seed, trainers, servers, tolerance=0.0, step=None, cap=None):
    """Plays a schedule and compares every number after each of its operations.

    Args:
        seed: of the schedule.
        trainers, servers: of the run.
        tolerance: of numbers that are not exact.
        step: see ``Trainer``.
        cap: tables are remote, and each trainer's rows of them within so many bytes.

    Returns:
        How many rows the trainers have given up for that.
    """
    plan, turns = schedule(seed, trainers), Turns()
    ready = threading.Barrier(trainers)
    shared = {"lock": threading.Lock(), "ready": ready}

    def body(context):
        try:
            return play(context, plan, turns, shared, tolerance, step, cap)
        except BaseException:
            ready.abort()
            raise

    return sum(run(body, trainers, servers))

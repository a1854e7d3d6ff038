# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What Geo's exchanges do to every number, against the same algebra in plain Python."""

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
from geo_model import Sections, Servers, Trainer, rows_of
from patience import PATIENCE_S
from sync_cases import run

from torch_cpudist import _core

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

    def step(self, seed):
        put_gradients(self.model, gradients(seed, missing=True))
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
        self.opt.before_barrier()
        if self.rank in self.twin.servers.members:
            self.twin.exchange(whole=True)

    def check(self, turn, op, tolerance):
        found = rows_of(self.model, self.twin.servers.sections.tables)
        for key, row in self.twin.x.items():
            for ours, theirs in zip(found[key], row, strict=True):
                assert abs(ours - theirs) <= tolerance, (turn, op, key)


def play(context, plan, turns, shared, tolerance, step):
    """One trainer's part of a schedule."""
    rank, trainers = context.trainer_rank, context.trainer_count
    model = Moving()
    given = {"outer_step": step if isinstance(step, float) else None}
    rule = "auto" if step is None else "mean"
    opt = wrapped(model, geo(NEVER, communicator={"merge_rule": rule}, **given))
    if step == "root":
        # That of optimizers whose steps this model could not repeat.
        opt.driver.outer_step = (_core.ROOT_STEP, 1.0)
    with shared["lock"]:
        if "servers" not in shared:
            sections = Sections(opt, context.server_count)
            values = rows_of(model, sections.tables)
            shared["servers"] = Servers(values, sections, trainers)
        pair = Pair(rank, model, opt, Trainer(rank, shared["servers"], step))
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


def play_all(seed, trainers, servers, tolerance=0.0, step=None):
    plan, turns = schedule(seed, trainers), Turns()
    ready = threading.Barrier(trainers)
    shared = {"lock": threading.Lock(), "ready": ready}

    def body(context):
        try:
            play(context, plan, turns, shared, tolerance, step)
        except BaseException:
            ready.abort()
            raise

    run(body, trainers, servers)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("trainers", "servers"), [(2, 1), (2, 0), (2, 3), (4, 2)])
def test_every_number_is_that_of_the_algebra(trainers, servers, seed):
    play_all(seed, trainers, servers)


@pytest.mark.parametrize("step", [None, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_of_three_trainers_up_to_rounding(seed, step):
    play_all(seed, 3, 2, 1e-3, step)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("trainers", "servers"), [(2, 0), (2, 3), (4, 2)])
def test_every_number_is_that_of_the_algebra_of_means(trainers, servers, seed):
    play_all(seed, trainers, servers, step=1.0)


@pytest.mark.parametrize("step", ["root", 2.0])
@pytest.mark.parametrize(
    ("trainers", "servers"), [(1, 0), (1, 2), (2, 1), (2, 3), (3, 1), (3, 3), (4, 2)]
)
def test_outer_steps_are_those_of_the_algebra(trainers, servers, step):
    """Twice the mean of two is their sum, the root of four twice their mean."""
    exact = trainers in (1, 4) or (step, trainers) == (2.0, 2)
    for seed in range(2):
        play_all(seed, trainers, servers, 0.0 if exact else 1e-3, step)

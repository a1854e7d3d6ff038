# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What of a snapshot goes where: by names, patterns, new names, shapes and rules."""

from __future__ import annotations

import dataclasses
import re

import pytest

import torch_cpudist as cpudist
from torch_cpudist.snapshot import names
from torch_cpudist.snapshot.choice import Begins, Choice, Target
from torch_cpudist.snapshot.entries import Base
from torch_cpudist.snapshot.manifest import (
    Block,
    Dense,
    DenseState,
    File,
    Manifest,
    Rule,
    StateSlice,
    Table,
    Version,
)

SUM = (StateSlice("sum", 0, 1),)


def table(name, rows=10, dim=4, remote=False):
    salt = names.table_salt(name)
    rule = Rule("row_wise_adagrad")
    return Table(name, rows, dim, remote, salt, 0, (), (), rule, SUM, 3)


def dense(name, shape=(2, 3), rule="sgd"):
    state = (DenseState("momentum_buffer"),)
    blocks = (Block(name, 0, 6, 0, 1),)
    return Dense(name, shape, "F32", 3, Rule(rule), state, blocks)


SAVED = Manifest(
    name="here",
    number=1,
    strategy="sync",
    version=Version(5, 0, 5),
    servers=1,
    tables=(table("users.weight"), table("items.weight", 20)),
    dense=(dense("top.weight"), dense("old.a"), dense("old.b")),
    files=(File("s000-t000-0000.safetensors", 10, 0, 7, (0,)),),
)


def target(name, **changes):
    if name.endswith(("users.weight", "items.weight")):
        shape = (20, 4) if "items" in name else (10, 4)
        made = Target(name, True, shape, SUM, "row_wise_adagrad")
    else:
        made = Target(name, False, (2, 3), (DenseState("momentum_buffer"),), "sgd")
    return dataclasses.replace(made, **changes)


OWN = [target(n) for n in ("users.weight", "items.weight", "top.weight")]
ALL = [*OWN, target("old.a"), target("old.b")]


def taken(plan):
    return {name: one.source for name, one in plan.taken.items()}


def test_all_of_it_as_it_is():
    plan = Choice.of(None, None).plan(SAVED, ALL)
    assert plan.whole
    assert taken(plan) == {one.name: one.name for one in ALL}
    assert (plan.missing, plan.unused) == ({}, ())
    assert plan.lines() == [
        "table 'users.weight': 7 rows",
        "table 'items.weight': 0 rows",
    ]


def test_what_came_and_what_went():
    plan = Choice.of(None, None).plan(SAVED, [*OWN[1:], target("new.weight")])
    assert set(plan.missing) == {"new.weight"}
    assert plan.unused == ("users.weight", "old.a", "old.b")
    assert plan.lines() == [
        "table 'items.weight': 0 rows",
        "parameter 'new.weight' is not in the snapshot and stays as it is",
        "'users.weight' of the snapshot is not in the model",
        "'old.a' of the snapshot is not in the model",
        "'old.b' of the snapshot is not in the model",
    ]


def test_names_and_patterns():
    plan = Choice.of(["users.weight", "t*"], None).plan(SAVED, OWN)
    assert not plan.whole
    assert set(plan.taken) == {"users.weight", "top.weight"}
    # Of a pattern only what is there.
    plan = Choice.of(["[tn]*"], None).plan(SAVED, [*OWN, target("new.weight")])
    assert (set(plan.taken), set(plan.missing)) == ({"top.weight"}, {"new.weight"})
    assert plan.lines() == [
        "parameter 'new.weight' is not in the snapshot and stays as it is"
    ]


def test_new_names():
    own = [target("people.users.weight"), target("new.a"), target("new.c")]
    moves = {"users.weight": "people.users.weight", "old.": "new."}
    plan = Choice.of(None, moves).plan(SAVED, own)
    assert taken(plan) == {
        "people.users.weight": "users.weight",
        "new.a": "old.a",
    }
    assert set(plan.missing) == {"new.c"}
    assert "table 'people.users.weight': 7 rows from 'users.weight'" in plan.lines()
    assert "parameter 'new.a' from 'old.a'" in plan.lines()
    assert Choice.of(["new.*"], moves).kept({"old.x": 1, "y": 2}) == {"new.x": 1}


def test_names_that_change_places():
    plan = Choice.of(None, {"old.a": "old.b", "old.b": "old.a"}).plan(SAVED, ALL)
    assert taken(plan)["old.a"] == "old.b"
    assert taken(plan)["old.b"] == "old.a"
    # What had the name before is not taken twice.
    plan = Choice.of(None, {"old.a": "old.b"}).plan(SAVED, ALL)
    assert taken(plan)["old.b"] == "old.a"
    assert set(plan.missing) == {"old.a"}
    assert plan.unused == ("old.b",)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"shape": (10, 5)}, "was 10 rows of 4, is 10 of 5: it stays as it is"),
        ({"shape": (9, 4)}, "was 10 rows of 4, is 9 of 4: it stays as it is"),
        (
            {"table": False, "shape": (10, 5)},
            r"was a table, \[10, 4\] of F32, is \[10, 5\] of F32: it stays as it is",
        ),
    ],
)
def test_what_does_not_fit(changes, told):
    own = [target("users.weight", **changes), *OWN[1:]]
    plan = Choice.of(None, None).plan(SAVED, own)
    assert re.search(told, plan.missing["users.weight"])
    assert plan.missing["users.weight"] in plan.lines()
    for choice in (
        Choice.of(["users.weight"], None),
        Choice.of(None, {"users.weight": "users.weight"}),
    ):
        with pytest.raises(cpudist.SnapshotError, match="nothing was changed"):
            choice.plan(SAVED, own)


def test_other_rules_take_values_alone():
    own = [
        target("users.weight", state=(StateSlice("sum", 0, 4),), rule="adagrad"),
        target("top.weight", rule="adam"),
    ]
    plan = Choice.of(None, None).plan(SAVED, own)
    assert [one.state for one in plan.taken.values()] == [False, False]
    assert plan.warnings() == plan.lines()[:2]
    assert plan.lines()[:2] == [
        "table 'users.weight': 7 rows, without their optimizer state, which is of "
        "row_wise_adagrad and begins anew",
        "parameter 'top.weight', without its optimizer state, which is of sgd and "
        "begins anew",
    ]


def test_tables_and_dense_parameters_become_each_other():
    own = [
        target("users.weight", table=False, shape=(10, 4)),
        target("top.weight", table=True, shape=(2, 3), begins=Begins((), (), 9)),
    ]
    plan = Choice.of(None, None).plan(SAVED, own)
    assert [one.crosses for one in plan.taken.values()] == [True, True]
    assert [one.seed for one in plan.taken.values()] == [0, 9]
    assert plan.lines()[:2] == [
        "parameter 'users.weight', without its optimizer state, which is of "
        "row_wise_adagrad and begins anew, from a table",
        "table 'top.weight': 2 rows, without their optimizer state, which is of sgd "
        "and begins anew, from a dense parameter",
    ]


def test_rows_of_a_chain_are_not_counted():
    changes = dataclasses.replace(SAVED, base=Base("before", 0))
    plan = Choice.of(None, None).plan(changes, OWN[:1])
    assert plan.lines()[0] == "table 'users.weight': its rows"


def test_values_of_another_width():
    plan = Choice.of(None, None).plan(SAVED, [target("top.weight", dtype="F64")])
    assert plan.lines()[0] == "parameter 'top.weight', as F64, and was F32"
    assert plan.warnings() == plan.lines()[:1]


NORMAL = (("normal", 0.0, 1.0),)


@pytest.mark.parametrize(
    ("begins", "rest"),
    [(None, "stay as they are"), (Begins(NORMAL, (), 5), "begin anew")],
)
def test_tables_that_have_grown(begins, rest):
    own = [target("users.weight", shape=(12, 4), begins=begins)]
    plan = Choice.of(None, None).plan(SAVED, own)
    assert plan.lines()[0] == (
        f"table 'users.weight': 7 rows, rows from 10 on are not in it and {rest}"
    )


def test_rows_that_nobody_had_trained_begin_as_before():
    saved = dataclasses.replace(table("users.weight", remote=True), seed=7)
    saved = dataclasses.replace(saved, initial=NORMAL)
    manifest = dataclasses.replace(SAVED, tables=(saved,), files=())

    def plan_of(begins, name="users.weight"):
        own = [target(name, begins=begins)]
        moves = {"users.weight": name}
        return Choice.of(None, moves).plan(manifest, own).taken[name]

    assert plan_of(Begins(NORMAL, (), 5)).seed == 7
    # The same bits by another name's salt.
    other = plan_of(Begins(NORMAL, (), 5), "my.users.weight").seed
    assert other ^ names.table_salt("my.users.weight") == 7 ^ saved.salt
    changed = plan_of(Begins((("fill", 1.0, 0.0),), (), 5))
    assert changed.seed == 5
    assert "nobody had trained begin as this model says" in changed.line()
    # A static one has no rows that are not there.
    static = dataclasses.replace(manifest, tables=(table("users.weight"),))
    own = [target("users.weight", begins=Begins(NORMAL, (), 5))]
    assert Choice.of(None, None).plan(static, own).taken["users.weight"].seed == 5


@pytest.mark.parametrize(
    ("only", "moves", "told"),
    [
        (["user.weight"], None, "there are 'users.weight'"),
        (["x*"], None, "no parameter of the model"),
        (None, {"user.weight": "users.weight"}, "there are 'users.weight'"),
        (None, {"users.weight": "user.weight"}, "there are 'users.weight'"),
        (None, {"x.": "y."}, "no such name"),
        (None, {"old.": "y."}, "the model has no such"),
        (None, {"old.a": "old.b", "top.weight": "old.b"}, "both 'old.a' and"),
    ],
)
def test_names_that_nothing_has(only, moves, told):
    with pytest.raises(cpudist.SnapshotError, match=told) as caught:
        Choice.of(only, moves).plan(SAVED, ALL)
    assert "nothing was changed" in str(caught.value).lower()


def test_nothing_of_this_model():
    with pytest.raises(cpudist.SnapshotError, match="nothing of this model"):
        Choice.of(None, None).plan(SAVED, [target("other")])


@pytest.mark.parametrize(
    ("only", "moves"),
    [
        ("users.*", None),
        ([], None),
        ([1], None),
        (None, ["a"]),
        (None, {"a": 1}),
        (None, {"": "a"}),
        (None, {"a.": "b"}),
    ],
)
def test_arguments_that_cannot_be(only, moves):
    with pytest.raises(cpudist.InvalidArgumentError, match="load_snapshot: "):
        Choice.of(only, moves)


def test_buffers_go_the_way_of_parameters():
    saved = {"old.mean": 1, "tower.mean": 2, "top.mean": 3, "a.mean": 4, "b.mean": 5}
    assert Choice.of(None, {"old.": "tower."}).kept(saved) == {
        "tower.mean": 1,
        "top.mean": 3,
        "a.mean": 4,
        "b.mean": 5,
    }
    swapped = Choice.of(None, {"a.": "b.", "b.": "a."}).kept(saved)
    assert (swapped["a.mean"], swapped["b.mean"]) == (5, 4)
    assert Choice.of(["top.*"], {"a.": "top."}).kept(saved) == {"top.mean": 4}

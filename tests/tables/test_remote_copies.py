# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Remote weights that are copies of others begin with the others' rows."""

from __future__ import annotations

import copy
import io
import logging
import pickle

import pytest
import torch
from remote_cases import DIM, ROWS, remote, remote_embedding, rows_now, wrap
from table_cases import alone
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist import _core
from torch_cpudist.tables.initial import salt_of
from torch_cpudist.tables.remote_weight import table_of


def deep(first):
    return copy.deepcopy(first)


def cloned(first):
    made = copy.deepcopy(first)
    made.weight = nn.Parameter(first.weight.detach().clone())
    return made


def copied(first):
    made = nn.Embedding(ROWS, 4)
    with torch.no_grad():
        made.weight.copy_(first.weight)
    return made


def assigned(first):
    made = nn.Embedding(ROWS, 4)
    made.weight.data = first.weight.data
    return made


def copy_of_copy(first):
    return copied(deep(first))


WAYS = [deep, cloned, copied, assigned, copy_of_copy]


def rows_of(model):
    """The rows of all tables of a model that nobody has trained."""
    return alone(lambda: rows_now(wrap(model)))


@pytest.mark.parametrize("make", WAYS)
def test_copies_in_a_model_begin_alike(make):
    def build():
        first = nn.Embedding(ROWS, 4, padding_idx=2)
        return nn.ModuleDict({"a": first, "b": make(first), "c": copied(first)})

    for model in (remote(build), nn.Sequential(remote(build))):
        first, second, third = rows_of(model).values()
        assert torch.equal(first, second)
        assert torch.equal(first, third)
        assert first[2].eq(0).all()
        assert first[3].std() > 0


def test_what_is_done_to_a_copy_is_its_own():
    def build():
        first = nn.Embedding(ROWS, 4)
        again, scaled = copied(first), copied(first)
        nn.init.normal_(again.weight)
        scaled.weight.data.mul_(2)
        return nn.ModuleDict({"a": first, "again": again, "scaled": scaled})

    model = remote(build)
    first, again, scaled = rows_of(model).values()
    assert not torch.equal(first, again)
    assert torch.equal(2 * first, scaled)


def test_copies_of_models_and_saved_ones_begin_as_these_whatever_they_are_called():
    model = remote(lambda: nn.ModuleDict({"a": nn.Embedding(ROWS, 4)}))
    model["b"] = copy.deepcopy(model["a"])
    (first, second) = rows_of(nn.Sequential(model)).values()
    made = copy.deepcopy(model)
    loaded = pickle.loads(pickle.dumps(model))  # noqa: S301
    for one in (nn.Sequential(made), made, nn.Sequential(loaded)):
        for rows in rows_of(one).values():
            assert torch.equal(rows, first)
            assert torch.equal(rows, second)


def refused(model):
    """What wrapping it says."""
    with pytest.raises(cpudist.RemoteTableError, match="none here to begin") as told:
        wrap(model)
    assert "shard_tables(model, remote=['weight'], initial=" in str(told.value)
    return str(told.value)


def test_copies_of_stored_tables_are_told_that_the_original_has_the_rows():
    model = cpudist.shard_tables(nn.Embedding(ROWS, DIM), ROWS, remote=True)
    values = table_of(model.weight).values.clone()
    before = copy.deepcopy(model)

    def body():
        optimizer = wrap(model)
        made = copy.deepcopy(model)
        for one in (made, copy.deepcopy(made)):
            said = refused(one)
            assert "the model that this one is a copy of, which is open" in said
            assert "closed" not in said
            assert "train and look up the original itself" in said
        saved = pickle.loads(pickle.dumps(model))  # noqa: S301
        said = refused(saved)
        assert "the optimizer of the model that was saved" in said
        assert "closed" not in said
        optimizer.close()
        assert "which is open" not in refused(made)
        assert "an optimizer that is closed" in refused(model)
        # The ways out that it names.
        assert torch.equal(rows_now(wrap(before))["weight"], values)
        cpudist.shard_tables(made, remote=["weight"], initial=cpudist.Constant(2))
        assert rows_now(wrap(made))["weight"].eq(2).all()

    alone(body)


def test_lookups_in_a_copy_are_told_of_the_original():
    model = remote_embedding()

    def body():
        wrap(model)
        with pytest.raises(cpudist.RemoteTableError, match="Wrap the opt") as told:
            copy.deepcopy(model)(torch.tensor([1]))
        assert "a copy of table 'weight' of 40 rows on the servers" in str(told.value)
        assert "looked up in the original" in str(told.value)

    alone(body)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("data", [False, True])
def test_weights_without_rows_are_not_loaded_over_others(assign, data):
    model, static = remote_embedding(), nn.Embedding(ROWS, DIM)
    weight = static.weight
    rows = weight.detach().clone()
    state = {"weight": model.weight.data if data else model.weight}
    with pytest.raises(RuntimeError, match=r"rows are not here|has no rows") as told:
        static.load_state_dict(state, assign=assign)
    assert "table 'weight' of 40 rows on the servers" in str(told.value)
    assert "cpudist.export and cpudist.load_for_inference" in str(told.value)
    assert "initialiser" not in str(told.value)
    assert static.weight is weight
    assert torch.equal(weight, rows)
    # What has no rows either is no loss.
    remote_embedding().load_state_dict(state, assign=assign)


@pytest.mark.parametrize("strict", [True, False])
def test_states_without_rows_say_so_where_a_static_table_is_loaded(strict, caplog):
    state = nn.Sequential(remote_embedding()).state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    static = cpudist.shard_tables(nn.Sequential(nn.Embedding(ROWS, DIM)), ROWS)

    def body():
        wrap(static)
        if strict:
            with pytest.raises(RuntimeError, match=r'Missing key.*"0\.weight"'):
                static.load_state_dict(state)
        else:
            static.load_state_dict(state, strict=False)
            static.load_state_dict(static.state_dict(), strict=False)

    with caplog.at_level(logging.WARNING, logger="torch_cpudist"):
        alone(body)
    said = [r.getMessage() for r in caplog.records if "has no rows" in r.message]
    assert len(said) == 1
    assert "'0.weight' is remote" in said[0]
    assert "opt.load_snapshot" in said[0]


@pytest.mark.parametrize("name", ["weight", "a.weight", "größe.weight"])
def test_names_count_as_servers_count_them(name):
    keys = torch.arange(3)

    def rows(spec_name, seed):
        made = torch.empty(3, 2)
        spec = _core.TableSpec(
            spec_name,
            rows=10,
            dim=2,
            remote=True,
            seed=seed,
            initial=[("uniform", 0.0, 1.0)],
        )
        _core.initial_rows(spec, keys.data_ptr(), 3, made.data_ptr())
        return made

    changed = 5 ^ salt_of(name) ^ salt_of("other")
    assert torch.equal(rows(name, 5), rows("other", changed))
    assert not torch.equal(rows(name, 5), rows("other", 5))

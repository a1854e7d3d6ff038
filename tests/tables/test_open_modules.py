# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Embeddings of any key, before anything trains them: what they are, say and refuse."""

from __future__ import annotations

import contextlib
import copy
import math
import pickle

import pytest
import torch
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.settings.open_table import OpenTable
from torch_cpudist.tables.remote_weight import is_remote, table_of

KINDS = [cpudist.Embedding, cpudist.EmbeddingBag]
TOLD = {
    "unknown": "zeros",
    "admission": cpudist.CountFilter(3, sketch_bytes=128),
    "eviction": cpudist.Evict(unseen_steps=4, min_count=2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_torchs_modules_of_a_remote_weight(kind):
    module = kind(6, padding_key=-1)
    assert isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    assert is_remote(module.weight)
    assert isinstance(module.weight, nn.Parameter)
    assert module.weight.shape == (2**54, 6)
    assert module.weight.requires_grad
    assert module.sparse
    assert module.padding_idx == -1
    assert module.embedding_dim == 6
    assert list(module.state_dict()) == []
    module.load_state_dict({}, strict=True)


BY_ROWS = [
    nn.init.xavier_uniform_,
    nn.init.xavier_normal_,
    lambda weight: nn.init.kaiming_normal_(weight, mode="fan_out"),
    lambda weight: nn.init.kaiming_uniform_(weight, mode="fan_out"),
]


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("initialise", BY_ROWS)
def test_initialisers_that_scale_by_the_number_of_rows_are_refused(initialise, device):
    """As models call them for all that has a weight; there is no such number."""
    module = cpudist.Embedding(6)
    before = table_of(module.weight).program
    modes = contextlib.nullcontext() if device is None else torch.device(device)
    with modes, pytest.raises(cpudist.UnsupportedModelError) as told:
        initialise(module.weight)
    assert "number of rows" in str(told.value)
    assert "initial=" in str(told.value)
    assert table_of(module.weight).program == before
    with modes:
        nn.init.kaiming_normal_(module.weight)
        nn.init.kaiming_uniform_(module.weight)
        nn.init.normal_(module.weight, std=0.1)
    assert table_of(module.weight).program.steps == (("normal", 0.0, 0.1),)


def test_no_dim_is_too_large_for_a_shape():
    for dim in (1, 64, 65, 128, 2**16):
        weight = cpudist.Embedding(dim).weight
        assert weight.numel() <= 2**60
        assert weight.nbytes == 4 * weight.numel()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_begin_as_said(kind):
    table = table_of(kind(4, initial=cpudist.Uniform(-1, 2), seed=9).weight)
    assert table.program.steps == (("uniform", -1.0, 2.0),)
    assert table.program.overrides == ()
    assert table.program.seed == 9
    table = table_of(kind(4, padding_key=-5).weight)
    assert table.program.steps == (("normal", 0.0, 1.0),)
    assert table.program.overrides == ((2**64 - 5, 2**64 - 4, 0.0),)
    last = table_of(kind(4, padding_key=-1).weight)
    assert last.program.overrides == ((2**64 - 1, 0, 0.0),)
    largest = table_of(kind(4, padding_key=2**63 - 1).weight)
    assert largest.program.overrides == ((2**63 - 1, 2**63, 0.0),)


def test_seeds_are_drawn_as_initialisers_draw():
    seeds = []
    for _ in range(2):
        torch.manual_seed(4)
        seeds.append([table_of(cpudist.Embedding(4).weight).program.seed for _ in "ab"])
    assert seeds[0] == seeds[1]
    assert seeds[0][0] != seeds[0][1]


def test_initialisers_are_recorded_by_key():
    module = cpudist.Embedding(4, padding_key=-3)
    module.reset_parameters()
    nn.init.uniform_(module.weight, -1, 1)
    with torch.no_grad():
        module.weight[7].fill_(2)
        module.weight[-1] = 3
        module.weight[-(2**63)] = 4
        module.weight[-1] = 5
    program = table_of(module.weight).program
    assert program.steps == (("uniform", -1.0, 1.0),)
    assert program.overrides == (
        (7, 8, 2.0),
        (2**63, 2**63 + 1, 4.0),
        (2**64 - 1, 0, 5.0),
    )
    for index in (slice(0, 4), slice(None), ..., 2**63):
        with pytest.raises(cpudist.UnsupportedModelError):
            module.weight[index] = 1


def test_shard_tables_replaces_how_rows_begin():
    model = nn.ModuleDict({"any": cpudist.Embedding(4, padding_key=-2, **TOLD)})
    said: list[str] = []
    cpudist.shard_tables(
        model, remote=["any"], initial=cpudist.Constant(1), report=said.append
    )
    table = table_of(model["any"].weight)
    assert table.program.steps == (("fill", 1.0, 0.0),)
    assert table.program.overrides == ((2**64 - 2, 2**64 - 1, 0.0),)
    assert table.open == OpenTable(**TOLD)
    assert "any key" in said[0]


def test_remote_tables_leaves_them_as_they_are():
    with cpudist.remote_tables(names=["plain"]):
        model = nn.ModuleDict(
            {"plain": nn.Embedding(9, 4), "any": cpudist.Embedding(4, **TOLD)}
        )
    assert table_of(model["plain"].weight).open is None
    assert table_of(model["any"].weight).open == OpenTable(**TOLD)


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_saved_modules_are_alike(kind):
    module = kind(4, padding_key=-2, initial=cpudist.Uniform(0, 1), **TOLD)
    saved = pickle.dumps(module)
    for made in (copy.deepcopy(module), pickle.loads(saved)):  # noqa: S301
        assert type(made) is kind
        assert made.weight is not module.weight
        assert made.padding_idx == -2
        own, other = table_of(made.weight), table_of(module.weight)
        assert own is not other
        assert (own.open, own.program) == (other.open, other.program)
        assert (own.rows, own.dim) == (other.rows, other.dim)
        assert list(made.state_dict()) == []
    assert table_of(module.weight.clone()).open == OpenTable(**TOLD)


@pytest.mark.parametrize("kind", KINDS)
def test_a_lookup_before_wrapping_says_what_to_do(kind):
    with pytest.raises(cpudist.RemoteTableError, match=r"any key.*Wrap the optimizer"):
        kind(4)(torch.tensor([[1, -7]]))


def test_two_modules_may_share_a_weight():
    model = nn.Module()
    model.first = cpudist.Embedding(4)
    model.bag = cpudist.EmbeddingBag(4)
    model.bag.weight = model.first.weight
    assert len(list(model.parameters())) == 1


def test_what_they_say_of_themselves():
    assert repr(cpudist.Embedding(4)) == "Embedding(4, any key)"
    module = cpudist.EmbeddingBag(4, mode="sum", padding_key=-1, max_rows=10)
    assert repr(module) == (
        "EmbeddingBag(4, any key, padding_key=-1, max_rows=10, mode='sum')"
    )
    said = repr(cpudist.Embedding(4, **TOLD))
    assert "unknown='zeros'" in said
    assert "CountFilter(n=3, sketch_bytes=128)" in said
    assert "RemoteWeight(any key, dim=4" in repr(module.weight)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dim": 0}, "dim must be"),
        ({"dim": 2**16 + 1}, "dim must be"),
        ({"dim": 2.0}, "dim must be"),
        ({"padding_key": 2**63}, "padding_key must be an int64"),
        ({"padding_key": "a"}, "padding_key must be an int64"),
        ({"initial": 0.5}, "initial must be"),
        ({"seed": -1}, "seed must be"),
        ({"unknown": "nan"}, "unknown must be"),
        ({"max_rows": 0}, "max_rows must be"),
        ({"max_rows": 2**62}, "max_rows must be"),
        ({"admission": 3}, "admission must be"),
        ({"eviction": 3}, "eviction must be"),
        (
            {"max_rows": 9, "eviction": cpudist.Evict(max_rows=8)},
            r"max_rows=9 refuses.*Evict\(max_rows=8\)",
        ),
    ],
)
def test_arguments_are_checked(kind, options, said):
    with pytest.raises(
        cpudist.InvalidArgumentError, match=f"{kind.__name__}: .*{said}"
    ):
        kind(**{"dim": 4, **options})


def test_an_unknown_mode_is_refused():
    with pytest.raises(cpudist.InvalidArgumentError, match="sum, mean, max"):
        cpudist.EmbeddingBag(4, mode="min")


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_this_process_cannot_be_given(kind):
    with pytest.raises(cpudist.UnsupportedModelError, match="load_snapshot"):
        kind.from_pretrained(torch.zeros(3, 4))


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: cpudist.CountFilter(0), "1 to 15"),
        (lambda: cpudist.CountFilter(16), "1 to 15"),
        (lambda: cpudist.CountFilter(True), "1 to 15"),
        (lambda: cpudist.CountFilter(2, sketch_bytes=63), "sketch_bytes must be 64"),
        (lambda: cpudist.CountFilter(2, sketch_bytes=2**41), "sketch_bytes must be"),
        (lambda: cpudist.Probability(0), "> 0 and <= 1"),
        (lambda: cpudist.Probability(1.5), "> 0 and <= 1"),
        (lambda: cpudist.Probability(math.nan), "> 0 and <= 1"),
        (lambda: cpudist.Probability("x"), "> 0 and <= 1"),
        (lambda: cpudist.Evict(), "nothing is ever evicted"),
        (lambda: cpudist.Evict(min_count=3), "before its key could come"),
        (lambda: cpudist.Evict(min_count=3, max_rows=9), "min_count=3 without"),
        (lambda: cpudist.Evict(unseen_steps=0), "unseen_steps must be"),
        (lambda: cpudist.Evict(unseen_steps=1.5), "unseen_steps must be"),
        (lambda: cpudist.Evict(unseen_steps=2**31), "unseen_steps must be"),
        (lambda: cpudist.Evict(unseen_s=0), "unseen_s must be"),
        (lambda: cpudist.Evict(unseen_s=math.inf), "unseen_s must be"),
        (lambda: cpudist.Evict(unseen_s=2**32), "and at most 4294967295, got 42949672"),
        (lambda: cpudist.Evict(max_rows=-1), "max_rows must be"),
        (lambda: cpudist.Evict(unseen_s=1, min_count=2**32), "min_count must be"),
        (lambda: cpudist.Evict(max_rows=1, order="fifo"), "'lru' or 'lfu'"),
        (lambda: cpudist.Evict(unseen_s=1, order="lfu"), "max_rows=, which is not"),
    ],
)
def test_settings_are_checked(made, said):
    with pytest.raises(cpudist.InvalidArgumentError, match=said):
        made()


def test_seconds_are_told_as_milliseconds():
    assert cpudist.Evict(unseen_s=0.25).unseen_ms == 250
    assert cpudist.Evict(unseen_s=1e-9).unseen_ms == 1
    assert cpudist.Evict(unseen_s=2**32 - 1).unseen_ms == 1000 * (2**32 - 1)
    assert cpudist.Evict(unseen_steps=1).unseen_ms == 0

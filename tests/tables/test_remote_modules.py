# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Lookups of remote tables: bags, shapes, compiled code, what stands above."""

from __future__ import annotations

import pytest
import torch
from remote_cases import (
    DIM,
    ROWS,
    Ranking,
    initial_rows,
    remote,
    remote_embedding,
    rows_now,
    wrap,
)
from staging_cases import stage_always
from table_cases import alone, sgd
from torch import nn

import torch_cpudist as cpudist

# ---- bags against torch's ------------------------------------------------------------

FORMS = {
    "sum": {"mode": "sum"},
    "mean": {"mode": "mean"},
    "max": {"mode": "max"},
    "sum-padded": {"mode": "sum", "padding_idx": 2},
    "mean-padded": {"mode": "mean", "padding_idx": -1},
    "max-padded": {"mode": "max", "padding_idx": 2},
    "last-offset": {"mode": "mean", "include_last_offset": True},
}


def bags(form, dtype):
    """Arguments of a bag: with empty bags, duplicates, padding."""
    ids = torch.tensor([2, 5, 5, 39, 2, 7, 1, 5], dtype=dtype)
    ends = [len(ids)] if form == "last-offset" else []
    yield ids, torch.tensor([0, 3, 3, 5, *ends], dtype=dtype), None
    if form == "last-offset":
        return
    yield ids.view(2, 4), None, None
    yield ids[:0], torch.tensor([0, 0], dtype=dtype), None
    yield ids[:0].view(0, 4), None, None
    if form.startswith("sum"):
        weights = torch.linspace(-1, 1, len(ids))
        yield ids, torch.tensor([0, 3], dtype=dtype), weights
        yield ids.view(4, 2), None, weights.view(4, 2)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("form", FORMS)
def test_bags_are_those_of_torch(form, dtype):
    """Values and gradients of rows and of the samples' weights."""
    module = remote(lambda: nn.EmbeddingBag(ROWS, DIM, **FORMS[form]))
    sparse = not form.startswith("max")  # which torch has not
    plain = nn.EmbeddingBag(ROWS, DIM, sparse=sparse, **FORMS[form])
    with torch.no_grad():
        plain.weight.copy_(initial_rows("weight", module.weight))

    def body():
        wrap(module)
        for ids, offsets, weights in bags(form, dtype):
            found, expected = [], []
            for one, results in ((module, found), (plain, expected)):
                own = None
                if weights is not None:
                    own = weights.clone().requires_grad_()
                one.zero_grad()
                pooled = one(ids, offsets, own)
                results.append(pooled.detach())
                factors = torch.arange(pooled.numel()).view(pooled.shape) + 1.0
                (pooled * factors).sum().backward()
                results.append(None if own is None else own.grad)
                grad = one.weight.grad
                results.append(grad.to_dense() if grad is not None else None)
            assert found[0].shape == expected[0].shape
            for ours, theirs in zip(found, expected, strict=True):
                assert (ours is None) == (theirs is None)
                assert ours is None or torch.equal(ours, theirs)

    alone(body)


def test_a_bag_of_maxima_trains():
    model = remote(lambda: nn.EmbeddingBag(ROWS, DIM, mode="max"))
    begins = initial_rows("weight", model.weight)
    plain = nn.EmbeddingBag.from_pretrained(begins, freeze=False, mode="max")
    inner = sgd(plain, lr=0.5)
    batches = [torch.randint(0, ROWS, (6, 3)) for _ in range(5)]

    def body():
        optimizer = wrap(model, optimizer=sgd(model, lr=0.5))
        for ids in batches:
            for one, trained_by in ((model, optimizer), (plain, inner)):
                trained_by.zero_grad()
                one(ids).square().mean().backward()
                trained_by.step()
        found = rows_now(optimizer)["weight"]
        assert torch.allclose(found, plain.weight.detach(), atol=1e-6)

    alone(body)


# ---- forwards ------------------------------------------------------------------------


def test_lookups_of_any_shape_and_type():
    module = remote_embedding(padding_idx=3)
    rows = initial_rows("weight", module.weight)

    def body():
        wrap(module)
        for ids in (
            torch.tensor(5),
            torch.tensor([], dtype=torch.int64),
            torch.tensor([[1, 2, 1], [3, 39, 0]], dtype=torch.int32),
            torch.arange(24).view(2, 3, 4)[:, :, ::2],
        ):
            found = module(ids)
            assert found.dtype == torch.float32
            assert torch.equal(found, rows[ids.long()])
        with pytest.raises(cpudist.RowOutOfRangeError, match="table 'weight'"):
            module(torch.tensor([ROWS]))
        with pytest.raises(cpudist.IdTypeError, match=r"ids\.long"):
            module(torch.tensor([1.0]))

    alone(body)


def test_padding_gets_no_gradient():
    module = remote_embedding(padding_idx=3)

    def body():
        wrap(module)
        module(torch.tensor([3, 4, 3])).sum().backward()
        return module.weight.grad.coalesce().indices().tolist()

    assert alone(body) == [[4]]


@pytest.mark.parametrize(
    "backend",
    ["aot_eager", pytest.param("inductor", marks=pytest.mark.processes)],
)
def test_compiled_models_are_one_graph_and_equal_to_the_bit(backend):
    batches = [torch.randint(0, ROWS, (4, 3)) for _ in range(4)]

    def train(how):
        model = remote(Ranking)

        def body():
            optimizer = wrap(model, optimizer=sgd(model, lr=0.1))
            called = how(model)
            for ids in batches:
                optimizer.zero_grad()
                called(ids).square().sum().backward()
                optimizer.step()
            with torch.no_grad():
                return called(batches[0]), rows_now(optimizer)

        return alone(body)

    torch._dynamo.reset()
    with torch._inductor.config.patch(compile_threads=1):
        output, rows = train(
            lambda model: torch.compile(model, backend=backend, fullgraph=True)
        )
    torch._dynamo.reset()
    plain_output, plain_rows = train(lambda model: model)
    torch.testing.assert_close(output, plain_output, rtol=1e-5, atol=1e-6)
    for name, values in plain_rows.items():
        torch.testing.assert_close(rows[name], values, rtol=1e-5, atol=1e-6)


def test_autocast_leaves_rows_in_float32():
    model = remote(Ranking)

    def body():
        optimizer = wrap(model)
        with torch.autocast("cpu", torch.bfloat16):
            assert model.word(torch.tensor([1])).dtype == torch.float32
            assert model.slots(torch.tensor([[1, 2]])).dtype == torch.float32
            loss = model(torch.tensor([[1, 2, 3]])).float().sum()
        loss.backward()
        assert model.word.weight.grad.dtype == torch.float32
        optimizer.step()

    alone(body)


def test_vmap_looks_up_all_its_calls():
    model = remote_embedding()
    rows = initial_rows("weight", model.weight)

    def body():
        wrap(model)
        ids = torch.tensor([[1, 2], [3, 4]])
        with torch.no_grad():
            return torch.vmap(model)(ids)

    assert torch.equal(alone(body), rows[torch.tensor([[1, 2], [3, 4]])])


class Scaled(nn.Embedding):
    """A module of the user's own that changes ids and results."""

    def forward(self, ids):
        return 2 * super().forward(ids % ROWS)


def test_a_forward_of_the_users_own_stands_above():
    model = remote(lambda: Scaled(ROWS, DIM))
    rows = initial_rows("weight", model.weight)

    def body():
        wrap(model)
        return model(torch.tensor([ROWS + 1]))

    assert torch.equal(alone(body)[0], 2 * rows[1])
    assert type(model) is Scaled


@pytest.mark.parametrize("form", ["remote", "static", "staged"])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_ids_that_are_no_tensor_and_a_weight_that_is_gone_are_told_by_name(
    kind, form, monkeypatch
):
    module = remote(lambda: kind(ROWS, DIM))
    if form == "static":
        module = kind(ROWS, DIM, sparse=True)
    if form == "staged":
        stage_always(monkeypatch)

    def body():
        wrap(module)
        for ids in ([[1, 2]], torch.tensor([[1, 2]]).numpy()):
            with pytest.raises(cpudist.IdTypeError) as told:
                module(ids)
            assert "'weight': ids must be a tensor" in str(told.value)
            assert f"got {type(ids).__name__}" in str(told.value)
        if form != "staged":
            module.weight = None
            with pytest.raises(cpudist.ModelChangedError, match="or none"):
                module(torch.tensor([[1, 2]]))

    alone(body)

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""torch's transforms and wrappers over a table: supported, or told by their names."""

from __future__ import annotations

import copy

import pytest
import torch
from sync_cases import assert_same_bits, copy_of, run
from table_cases import (
    DIM,
    ROWS,
    alone,
    bag,
    embedding,
    ids,
    sgd,
    train,
    weight_of,
    wrap,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_cpudist as cpudist

PLAIN = r"opt\.flush\(\), then .* copy\.deepcopy\(model\), which is a plain model"


def model_of(kind=nn.Embedding):
    model = nn.Sequential(embedding() if kind is nn.Embedding else bag())
    model.append(weight_of(nn.Linear(DIM, 1, bias=False)))
    return model


# ---- graphs and other parameters ---------------------------------------------------


def exported(model, batch):
    return torch.export.export(model, (batch,)).module()(batch)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_exported_graph_is_refused_and_that_of_a_copy_is_not(kind):
    def body():
        batch = torch.tensor([[1, 2], [3, 4]])
        model = model_of(kind)
        optimizer = wrap(model)
        train(model, optimizer, [batch], lambda m, b: m(b))
        words = rf"table '0\.weight': torch\.export cannot record .*{PLAIN}"
        with pytest.raises(cpudist.UnsupportedModelError, match=words):
            exported(model, batch)
        optimizer.flush()
        assert torch.equal(exported(copy.deepcopy(model), batch), model(batch))
        optimizer.close()
        assert torch.equal(exported(model, batch), model(batch))

    alone(body)


def test_a_strict_export_has_the_reason_among_what_dynamo_says():
    def body():
        model = model_of()
        wrap(model)
        with pytest.raises(Exception, match=r"torch\.export cannot record"):
            torch.export.export(model, (ids(1, 2),), strict=True)

    alone(body)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_other_parameters_are_refused_and_those_of_a_copy_are_not(kind):
    def called(model, batch):
        parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
        return torch.func.functional_call(model, parameters, (batch,))

    def gradients(model, batch):
        def loss(parameters):
            return torch.func.functional_call(model, parameters, (batch,)).sum()

        return torch.func.grad(loss)(dict(model.named_parameters()))

    def body():
        batch = torch.tensor([[1, 2], [3, 4]])
        model = model_of(kind)
        optimizer = wrap(model)
        train(model, optimizer, [batch], lambda m, b: m(b))
        for one in (called, gradients):
            words = rf"table '0\.weight': torch\.func\.functional_call .*{PLAIN}"
            with pytest.raises(cpudist.UnsupportedModelError, match=words):
                one(model, batch)
        # With the parameters that it has a call is as any other.
        own = dict(model.named_parameters())
        found = torch.func.functional_call(model, own, (batch,))
        optimizer.flush()
        assert torch.equal(called(copy.deepcopy(model), batch), found)
        train(model, optimizer, [batch], lambda m, b: m(b))

    alone(body)


def test_a_weight_that_was_replaced_for_good_is_told_so_as_before():
    def body():
        model = model_of()
        wrap(model)
        model[0].weight = nn.Parameter(torch.zeros(ROWS, DIM))
        with pytest.raises(cpudist.ModelChangedError, match="another parameter"):
            model(ids(1))

    alone(body)


# ---- vmap --------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_vmap_over_a_table_pulls_the_rows_of_all_its_calls(kind):
    """As the loop that it stands for, also where another trainer moved the rows."""
    batch = torch.tensor([[[1, 2]], [[3, 1]], [[7, 7]]])

    def trained(each):
        def body(context):
            model = model_of(kind)
            optimizer = wrap(model)
            for _ in range(3):
                optimizer.zero_grad()
                mine = batch + context.trainer_rank
                (each(model, mine).square().mean()).backward()
                optimizer.step()
            cpudist.barrier()
            optimizer.flush()
            return copy_of(model)

        return run(body, 2)

    looped = trained(lambda m, b: torch.stack([m(one) for one in b]))
    at_once = trained(lambda m, b: torch.vmap(m)(b))
    assert_same_bits(at_once[0], at_once[1])
    for name, value in looped[0].items():
        assert torch.allclose(at_once[0][name], value, atol=1e-6), name
    start = copy_of(model_of(kind))
    rows = (at_once[0]["0.weight"] != start["0.weight"]).any(dim=1).nonzero()
    assert rows.flatten().tolist() == [1, 2, 3, 4, 7, 8]


# ---- DistributedDataParallel -------------------------------------------------------


def test_a_lookup_inside_ddp_names_ddp():
    def body():
        model = model_of()
        optimizer = wrap(model)
        outer = DistributedDataParallel(model)
        words = r"table '0\.weight' is looked up inside a DistributedDataParallel "
        words += r"\(Accelerate's prepare\(model\).*Train the module inside it"
        with pytest.raises(cpudist.UnsupportedModelError, match=words):
            outer(ids(1, 2))
        # What the wrapper wrote when it was made is told with it, too.
        with pytest.raises(cpudist.ModelChangedError, match="in a DistributedDataPar"):
            optimizer.step()
        optimizer.flush(overwrite=True)
        del outer
        train(model, optimizer, [ids(1, 2)], lambda m, b: m(b))

    in_a_group(body)


def test_ddp_around_dense_parameters_is_named():
    def body():
        model = nn.Linear(2, 1)
        optimizer = wrap(model)

        class Own(DistributedDataParallel):
            """Named like its base."""

        outer = Own(model)
        outer(torch.ones(1, 2)).sum().backward()
        words = "They are in a DistributedDataParallel .* Train the module inside it"
        with pytest.raises(cpudist.ModelChangedError, match=words):
            optimizer.step()

    in_a_group(body)


def test_writes_of_others_do_not_blame_ddp():
    def body():
        other = DistributedDataParallel(nn.Linear(2, 1))
        model = nn.Linear(2, 1)
        optimizer = wrap(model)
        with torch.no_grad():
            model.weight.zero_()
        with pytest.raises(cpudist.ModelChangedError) as caught:
            optimizer.step()
        assert "DistributedDataParallel" not in str(caught.value)
        assert other.module.weight.requires_grad

    in_a_group(body)


def test_a_table_that_ddp_leaves_out_is_looked_up_inside_it():
    def body():
        model = model_of()
        ignored = ["0.weight"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            model, ignored
        )
        outer = DistributedDataParallel(model)
        optimizer = wrap(model, sgd(model[0]))
        before = copy_of(model)
        outer(ids(1, 2)).sum().backward()
        optimizer.step()
        optimizer.flush()
        assert not torch.equal(copy_of(model)["0.weight"], before["0.weight"])

    in_a_group(body)


def in_a_group(body):
    """In a world of one with torch's default group, as ``init()`` of a script has."""
    cpudist.init()
    try:
        body()
    finally:
        cpudist.current().abort("seen")

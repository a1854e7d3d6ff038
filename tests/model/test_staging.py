# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The host side of models on CUDA devices, run with the CPU as the device.

All of it is what runs for a CUDA device, but that memory is not pinned and that there
is nothing to wait for.
"""

from __future__ import annotations

import copy

import async_cases
import pytest
import torch
from staging_cases import DIM, ROWS, Lookups, ids_of, stage_always, trained
from sync_cases import assert_same_bits, copy_of
from table_cases import alone, sgd, wrap
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.drivers.registry import check_device
from torch_cpudist.machine import staging
from torch_cpudist.model import device as devices
from torch_cpudist.model.dense_memory import check_kept
from torch_cpudist.model.placement import DenseParameter, PlacedTable, Placement
from torch_cpudist.tables.found import FoundTable
from torch_cpudist.tables.local import is_staged


@pytest.fixture
def staged(monkeypatch):
    stage_always(monkeypatch)


# ---- equal to training without staging ---------------------------------------------


@pytest.mark.parametrize("strategy", ["sync", "half_async"])
def test_staged_training_is_the_same_bits(strategy, monkeypatch):
    expected = trained(strategy)
    stage_always(monkeypatch)
    for prefetch in (False, True):
        for found, plain in zip(
            trained(strategy, prefetch=prefetch), expected, strict=True
        ):
            assert_same_bits(found, plain)


def test_async_applies_every_staged_gradient_once(staged):
    found = async_cases.train_counts(2, 2, {"send_queue_size": 3}, steps=12)
    expected = async_cases.model_sum(async_cases.all_seeds(2, 12))
    for values, _ in found:
        assert_same_bits(values, expected)


def test_hybrid_stages_tables_only(monkeypatch):
    def body():
        model = Lookups()
        optimizer = cpudist.DistributedOptimizer(
            sgd(model), model, cpudist.Hybrid(sparse=cpudist.Sync())
        )
        for step in range(3):
            optimizer.zero_grad()
            model(step, ids_of(step, 0)).square().mean().backward()
            optimizer.step()
        optimizer.flush()
        return copy_of(model)

    expected = alone(body)
    stage_always(monkeypatch)
    assert_same_bits(alone(body), expected)


def test_a_staged_gradient_is_what_torch_makes():
    for padding_idx in (None, 2):
        weight = nn.Parameter(torch.randn(6, 3))
        other = nn.Parameter(weight.detach().clone())
        ids = torch.tensor([[2, 5], [2, 0]])
        grad = torch.randn(2, 2, 3)
        torch.nn.functional.embedding(ids, weight, padding_idx, sparse=True).backward(
            grad
        )
        staging.rows_on(torch.device("cpu"), other, ids, padding_idx).backward(grad)
        assert torch.equal(other.grad._indices(), weight.grad._indices())
        assert torch.equal(other.grad._values(), weight.grad._values())
        assert other.grad.shape == weight.grad.shape


def test_gradients_of_gradients_are_refused():
    weight = nn.Parameter(torch.randn(6, 3))
    found = staging.rows_on(torch.device("cpu"), weight, torch.tensor([1]), None)
    (grad,) = torch.autograd.grad(found.square().sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.coalesce().values().sum().backward()


# ---- the life of a model -----------------------------------------------------------


def test_values_written_by_others_reach_the_servers_and_come_back(staged):
    def body():
        model = Lookups()
        optimizer = wrap(model)
        model(0, ids_of(0, 0)).sum().backward()
        optimizer.step()
        optimizer.flush()
        loaded = {name: value + 1 for name, value in copy_of(model).items()}
        model.load_state_dict(loaded)
        with pytest.raises(cpudist.ModelChangedError):
            optimizer.step()
        optimizer.store_model(all_rows=True)
        optimizer.flush()
        assert_same_bits(copy_of(model), loaded)
        with torch.no_grad():
            model.first.weight.zero_()
        optimizer.flush(overwrite=True)
        assert_same_bits(copy_of(model), loaded)
        # Nothing has a gradient: values stay, whatever travels.
        optimizer.zero_grad()
        optimizer.step()
        assert_same_bits(copy_of(model), loaded)

    alone(body)


def test_modules_are_plain_again_and_copies_are(staged):
    def body():
        model = Lookups()
        optimizer = wrap(model)
        assert all(is_staged(m) for m in model.modules() if hasattr(m, "sparse"))
        copied = copy.deepcopy(model)
        assert type(copied.plain) is nn.Embedding
        copied(0, ids_of(0, 0))
        optimizer.close()
        assert type(model.sums) is nn.EmbeddingBag
        assert not [name for name in vars(model.plain) if "cpudist" in name]

    alone(body)


def test_a_table_stays_when_the_model_moves_to_where_it_is(staged):
    def body():
        model = Lookups()
        wrap(model)
        model(0, ids_of(0, 0)).sum().backward()
        address, grad = model.plain.weight.data_ptr(), model.plain.weight.grad
        moved = []
        model.plain._apply(lambda tensor: moved.append(tensor.shape) or tensor)
        assert moved == [(0, DIM)]  # the probe, neither the weight nor its gradient
        assert model.to("cpu").plain.weight.data_ptr() == address
        assert model.plain.weight.grad is grad
        model(0, ids_of(0, 0))

    alone(body)


def test_a_model_that_moves_after_wrapping_is_refused(staged):
    def body():
        model = Lookups()
        wrap(model)
        model.plain.to("meta")
        with pytest.raises(cpudist.ModelChangedError, match="moved to meta"):
            model.plain(torch.tensor([1]))

    alone(body)


def test_a_dense_parameter_that_moves_is_refused():
    says = r"'w' is now .* on cpu, expected .* on cuda:0 as when its optimizer"
    with pytest.raises(cpudist.ModelChangedError, match=says):
        check_kept([dense_on(CUDA)])


def test_compiled_models_look_up_outside_their_graphs(staged):
    def body():
        model = nn.Sequential(nn.Embedding(ROWS, DIM, sparse=True), nn.Linear(DIM, 1))
        plain = copy.deepcopy(model)
        optimizer, other = wrap(model), sgd(plain)
        compiled = torch.compile(model, backend="eager")
        for step in range(2):
            ids = ids_of(step, 0)
            for one, trained_by in ((compiled, optimizer), (plain, other)):
                trained_by.zero_grad()
                one(ids).square().sum().backward()
                trained_by.step()
        optimizer.flush()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, plain.state_dict()[name])

    alone(body)


# ---- refusals ----------------------------------------------------------------------


def test_ids_on_another_device_are_refused_by_name(staged):
    def body():
        model = Lookups()
        wrap(model)
        for module in (model.plain, model.sums):
            with pytest.raises(cpudist.UnsupportedModelError, match="got meta"):
                module(torch.zeros(2, 3, dtype=torch.int64, device="meta"))

    alone(body)


def test_replicas_are_refused(staged):
    def body():
        model = nn.Sequential(nn.Embedding(ROWS, DIM, sparse=True))
        optimizer = wrap(model)
        with pytest.raises(cpudist.UnsupportedModelError, match="another device"):
            cpudist.ReplicaExecutor(model, nn.MSELoss(), optimizer, replicas=2)

    alone(body)


CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("strategy", "tables", "says"),
    [
        (cpudist.Geo(), True, "Geo trains models on CPUs, this one is on cuda:0"),
        (cpudist.Reduce(), False, "Reduce trains"),
        (cpudist.LocalSGD(), False, "LocalSGD trains"),
        (cpudist.Hybrid(sparse=cpudist.Geo()), True, "Geo trains"),
        (cpudist.AllReduce(), True, "'t' under AllReduce on cuda:0"),
        *((strategy(), True, None) for strategy in (cpudist.Sync, cpudist.Async)),
        (cpudist.HalfAsync(), True, None),
        (cpudist.AllReduce(), False, None),
        (cpudist.Hybrid(), True, None),
    ],
)
def test_strategies_that_train_on_cpus_refuse_a_device(strategy, tables, says):
    table = PlacedTable(0, FoundTable("t", nn.Parameter(torch.zeros(4, 2))), 0)
    placement = Placement([table] if tables else [], [], None, [], CUDA)
    if says is None:
        check_device(strategy, placement)
    else:
        with pytest.raises(cpudist.UnsupportedModelError, match=says):
            check_device(strategy, placement)


def dense_on(device, name="w"):
    weight = nn.Parameter(torch.zeros(2))
    return DenseParameter(0, name, weight, 0, weight.dtype, weight.shape, device)


def device_of(*dense):
    return [(entry.name, entry.device) for entry in dense]


def test_the_device_of_a_model_is_that_of_its_dense_parameters():
    here = FoundTable("t", nn.Parameter(torch.zeros(4, 2)))
    cpu = torch.device("cpu")
    nothing = nn.Module()
    assert devices.model_device(nothing, [here], device_of(dense_on(CUDA))) == CUDA
    assert devices.model_device(nothing, [here], device_of(dense_on(cpu))) == cpu
    assert devices.model_device(nothing, [here], []) == cpu
    several = device_of(dense_on(CUDA, "there"), dense_on(cpu, "here"))
    says = "'here' on cpu, 'there' on cuda:0"
    with pytest.raises(cpudist.UnsupportedModelError, match=says):
        devices.model_device(nothing, [], several)


@pytest.mark.parametrize("table", [False, True])
def test_parameters_on_other_devices_are_refused_at_wrapping(table):
    def body():
        model = nn.Embedding(4, 2, sparse=table, device="meta")
        with pytest.raises(
            cpudist.UnsupportedModelError, match=r"on meta; expected cpu or a CUDA"
        ) as refused:
            wrap(model)
        # What the message says to do can be done.
        with pytest.raises(NotImplementedError):
            model.to("cpu")
        assert "model.to('cpu')" not in str(refused.value)
        assert "model.to_empty(device='cpu')" in str(refused.value)
        model.to_empty(device="cpu")
        model.reset_parameters()
        wrap(model)

    alone(body)


def test_state_goes_where_torch_would_load_it():
    weight = nn.Parameter(torch.zeros(2, device="meta"))
    state = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(2), "n": 3}
    for fused, where in ((False, "cpu"), (True, "meta")):
        inner = torch.optim.Adam([weight], capturable=False)
        inner.param_groups[0]["fused"] = fused
        found = devices.state_beside(inner, weight, state)
        assert found["exp_avg"].device.type == "meta"
        assert found["step"].device.type == where
        assert found["n"] == 3

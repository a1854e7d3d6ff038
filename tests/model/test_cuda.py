# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Models on a CUDA device with their tables on CPU servers; for machines with one."""

from __future__ import annotations

import pytest
import torch
from patience import PATIENCE_S
from staging_cases import STEPS, Lookups, ids_of, train
from sync_cases import ONE_THREAD, copy_of, largest_difference, run
from table_cases import alone, sgd, wrap
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.testing import ProcessRanks

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device"
)
DEVICE = "cuda:0"
# Sums of the device are taken in another order.
TOLERANCE = 1e-4


def losses(context, strategy):
    model = Lookups().to(DEVICE)
    optimizer = cpudist.DistributedOptimizer(sgd(model, lr=0.02), model, strategy)
    found = []
    for step in range(6 * STEPS):
        optimizer.zero_grad()
        loss = model(0, ids_of(step % STEPS, context.trainer_rank)).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    cpudist.barrier()
    optimizer.flush()
    return found


@pytest.mark.parametrize("there", [False, True])
def test_sync_equals_training_on_the_cpu(there):
    expected = run(lambda context: train(context, "sync", exact=False), 2, 2)
    found = run(lambda c: train(c, "sync", DEVICE, ids_there=there, exact=False), 2, 2)
    for values, plain in zip(found, expected, strict=True):
        moved = {name: value.cpu() for name, value in values.items()}
        assert largest_difference(moved, plain) < TOLERANCE
    for name in expected[0]:
        assert torch.equal(found[0][name], found[1][name])


@pytest.mark.parametrize("strategy", ["async", "half_async", "sync"])
def test_it_learns(strategy):
    for found in run(lambda context: losses(context, strategy), 2, 2):
        assert sum(found[-STEPS:]) < 0.8 * sum(found[:STEPS])


def test_hybrid_and_allreduce_of_one_trainer_equal_plain_torch():
    def body():
        for strategy in (
            cpudist.Hybrid(sparse=cpudist.Sync()),
            cpudist.AllReduce(),
        ):
            tables = isinstance(strategy, cpudist.Hybrid)
            embedding = nn.Embedding(20, 4, sparse=tables)
            model = nn.Sequential(embedding, nn.Linear(4, 1)).to(DEVICE)
            plain = nn.Sequential(nn.Embedding(20, 4), nn.Linear(4, 1)).to(DEVICE)
            plain.load_state_dict(model.state_dict())
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer = cpudist.DistributedOptimizer(inner, model, strategy)
            other = sgd(plain)
            for step in range(STEPS):
                ids = ids_of(step, 0).to(DEVICE)
                for one, trained_by in ((model, optimizer), (plain, other)):
                    trained_by.zero_grad()
                    one(ids).square().mean().backward()
                    trained_by.step()
            optimizer.flush()
            for name, value in model.state_dict().items():
                torch.testing.assert_close(value.cpu(), plain.state_dict()[name].cpu())
            optimizer.close()

    alone(body)


def test_a_table_is_on_the_host_while_its_optimizer_is_wrapped():
    def body():
        model = Lookups().to(DEVICE)
        before = copy_of(model)
        model(0, ids_of(0, 0).to(DEVICE)).sum().backward()
        for _ in range(2):  # the second one takes over
            optimizer = wrap(model)
            assert model.plain.weight.device.type == "cpu"
            assert model.plain.weight.grad.device.type == "cpu"
            model.to(DEVICE)
            assert model.plain.weight.device.type == "cpu"
            found = model(0, ids_of(0, 0))
            assert found.device == torch.device(DEVICE)
        model.cpu()
        with pytest.raises(cpudist.ModelChangedError, match="moved to cpu"):
            model.plain(ids_of(0, 0))
        with pytest.raises(cpudist.ModelChangedError, match="on cuda:0 as when"):
            optimizer.flush()
        model.to(DEVICE)
        optimizer.close()
        assert model.plain.weight.device == torch.device(DEVICE)
        for name, value in copy_of(model).items():
            assert torch.equal(value, before[name])

    alone(body)


def over_nccl(context, _report):
    """Dense parameters over NCCL, tables on servers: what a trainer ends with."""
    device = torch.device("cuda", context.trainer_rank)
    torch.cuda.set_device(device)
    found = train(context, cpudist.Hybrid(sparse=cpudist.Sync()), device, exact=False)
    same = nn.Linear(2, 2).to("cuda:0")
    with pytest.raises(cpudist.ConfigurationError, match="both on cuda:0"):
        cpudist.DistributedOptimizer(sgd(same), same, cpudist.AllReduce())
    return {name: value.cpu().tolist() for name, value in found.items()}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("backend", ["auto", "nccl"])
def test_dense_gradients_are_summed_by_nccl(backend):
    expected = run(lambda context: train(context, "sync", exact=False), 2, 2)[0]
    variables = {**ONE_THREAD, "CPUDIST_BACKEND": backend}
    with ProcessRanks(over_nccl, 2, variables=variables) as ranks:
        first, second = ranks.results(PATIENCE_S)
    assert first == second
    found = {name: torch.tensor(value) for name, value in first.items()}
    assert largest_difference(found, expected) < TOLERANCE

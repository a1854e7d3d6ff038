# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Models on a CUDA device with their tables on CPU servers; for machines with one."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from patience import PATIENCE_S
from staging_cases import STEPS, Lookups, ids_of, train
from sync_cases import ONE_THREAD, copy_of, largest_difference, run
from table_cases import alone, sgd, wrap
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.machine import host
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


def pretend_a_host_of_its_own(rank):
    """NCCL and this package take ranks of one machine for those of several."""
    identity = host.identity()
    host.identity = lambda: f"{identity}/{rank}"
    os.environ.update(
        NCCL_HOSTID=f"host-{rank}",
        NCCL_SOCKET_IFNAME="lo",
        GLOO_SOCKET_IFNAME="lo",
        CPUDIST_BIND="127.0.0.1",
    )


def over_one_device(context, _report):
    """Both ranks on one device: what a trainer ends with, and losses of AllReduce."""
    torch.cuda.set_device(0)
    found = train(context, cpudist.Hybrid(sparse=cpudist.Sync()), DEVICE, exact=False)
    torch.manual_seed(1)
    model = nn.Linear(4, 1).to(DEVICE)
    optimizer = cpudist.DistributedOptimizer(sgd(model), model, cpudist.AllReduce())
    generator = torch.Generator().manual_seed(context.trainer_rank)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(
            torch.randn(8, 4, generator=generator).to(DEVICE)
        ).square().mean().backward()
        optimizer.step()
    total = torch.full((3,), context.trainer_rank + 1.0, device=DEVICE)
    dist.all_reduce(total)
    return {
        "hybrid": {name: value.cpu().tolist() for name, value in found.items()},
        "allreduce": [value.cpu().tolist() for value in model.parameters()],
        "sum": total.tolist(),
        "backend": dist.get_backend(),
    }


def one_process_on_both_batches():
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    optimizer = sgd(model)
    generators = [torch.Generator().manual_seed(rank) for rank in range(2)]
    for _ in range(STEPS):
        optimizer.zero_grad()
        both = [torch.randn(8, 4, generator=generator) for generator in generators]
        model(torch.cat(both)).square().mean().backward()
        optimizer.step()
    return [value.detach() for value in model.parameters()]


def test_nccl_sums_for_ranks_of_two_hosts_that_share_a_device():
    expected = run(lambda context: train(context, "sync", exact=False), 2, 2)[0]
    with ProcessRanks(
        over_one_device, 2, variables=ONE_THREAD, prepare=pretend_a_host_of_its_own
    ) as ranks:
        first, second = ranks.results(PATIENCE_S)
    assert first == second
    assert "nccl" in first["backend"] or first["backend"] == "undefined"
    assert first["sum"] == [3.0, 3.0, 3.0]
    found = {name: torch.tensor(value) for name, value in first["hybrid"].items()}
    assert largest_difference(found, expected) < TOLERANCE
    for value, plain in zip(
        first["allreduce"], one_process_on_both_batches(), strict=True
    ):
        torch.testing.assert_close(torch.tensor(value), plain, rtol=1e-4, atol=1e-5)


def refused_on_one_device(_context, _report):
    model = nn.Linear(2, 2).to(DEVICE)
    with pytest.raises(cpudist.BackendUnavailableError, match="for every trainer"):
        cpudist.DistributedOptimizer(sgd(model), model, cpudist.AllReduce())
    return True


@pytest.mark.skipif(torch.cuda.device_count() != 1, reason="needs one CUDA device")
def test_two_trainers_of_a_host_need_two_devices_for_nccl():
    with ProcessRanks(refused_on_one_device, 2, variables=ONE_THREAD) as ranks:
        assert ranks.results(PATIENCE_S) == [True, True]


class Dropping(nn.Module):
    """Draws on the device in every step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.table = nn.Embedding(20, 4, sparse=True)
        self.first = nn.Linear(4, 16)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(16, 1)

    def forward(self, ids):
        return self.last(self.drop(torch.relu(self.first(self.table(ids)))))


def dropping_steps(optimizer, model, steps):
    for step in steps:
        optimizer.zero_grad()
        model(ids_of(step, 0)).square().mean().backward()
        optimizer.step()


def test_a_resumed_job_draws_on_the_device_what_it_would_have_drawn(tmp_path):
    def body(steps, folder):
        torch.cuda.manual_seed(5)
        model = Dropping().to(DEVICE)
        optimizer = wrap(model)
        started = optimizer.resume(folder, every_steps=3)
        dropping_steps(optimizer, model, range(started.step, steps))
        optimizer.flush()
        values = {name: value.cpu() for name, value in copy_of(model).items()}
        optimizer.close()
        return started.step, values

    _, whole = alone(lambda: body(7, tmp_path / "whole"))
    alone(lambda: body(4, tmp_path / "half"))
    step, found = alone(lambda: body(7, tmp_path / "half"))
    assert step == 3
    for name, value in whole.items():
        assert torch.equal(found[name], value)


def test_an_exported_model_scores_on_cpus_and_on_the_device(tmp_path):
    def body():
        model = Dropping().to(DEVICE)
        optimizer = wrap(model)
        dropping_steps(optimizer, model, range(STEPS))
        model.eval()
        with torch.no_grad():
            scores = model(ids_of(9, 0)).cpu()
        cpudist.export(model, tmp_path / "model")
        optimizer.close()
        return scores

    expected = alone(body)
    for device in ("cpu", DEVICE):
        plain = Dropping().eval()
        cpudist.load_for_inference(plain, tmp_path / "model")
        plain.to(device)
        with torch.no_grad():
            found = plain(ids_of(9, 0).to(device)).cpu()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_compiled_autocast_prefetched_and_clipped(strategy):
    def body(context):
        torch.manual_seed(3)
        model = Dropping().to(DEVICE)
        optimizer = cpudist.DistributedOptimizer(
            torch.optim.Adagrad(model.parameters(), lr=0.1),
            model,
            strategy,
            clip=cpudist.ClipNorm(1.0),
        )
        compiled = torch.compile(model, backend="aot_eager")
        found = []
        for step in range(4 * STEPS):
            ids = ids_of(step % STEPS, context.trainer_rank)
            optimizer.prefetch({model.table: ids})
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = (compiled(ids).float() - 1).square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    for found in run(body, 1, 1):
        assert sum(found[-STEPS:]) < 0.8 * sum(found[:STEPS])

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a wrapped model with remote tables keeps, saves and leaves behind."""

from __future__ import annotations

import copy
import io
import logging
import pickle

import pytest
import torch
from remote_cases import (
    DIM,
    ROWS,
    Case,
    Ranking,
    assert_remote_equals_static,
    initial_rows,
    remote,
    remote_embedding,
    remote_model,
    rows_now,
    static_model,
    wrap,
)
from staging_cases import stage_always
from sync_cases import run
from table_cases import alone, sgd
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.tables.local import binding_of
from torch_cpudist.tables.remote_weight import is_remote, table_of


def test_without_gradients_nothing_is_kept():
    model = remote_embedding()

    def body():
        optimizer = wrap(model)
        with torch.no_grad():
            model(torch.arange(ROWS))
        with torch.inference_mode():
            model(torch.arange(ROWS))
        # No lookup has pulled it for a gradient.
        model.weight.grad = torch.sparse_coo_tensor(
            torch.tensor([[5]]), torch.ones(1, DIM), (ROWS, DIM)
        )
        with pytest.raises(cpudist.UnpulledRowError):
            optimizer.step()
        model.zero_grad()
        model(torch.tensor([5])).sum().backward()
        optimizer.step()

    alone(body)


def rows_on_servers(context):
    return context.server.stats()["rows"]


def test_rows_come_into_being_with_their_first_gradient():
    model = remote_embedding()

    def body(context):
        optimizer = wrap(model)
        counts = [rows_on_servers(context)]
        model(torch.arange(20))
        with torch.no_grad():
            model(torch.arange(ROWS))
        counts.append(rows_on_servers(context))
        model(torch.tensor([1, 2, 2])).sum().backward()
        optimizer.step()
        counts.append(rows_on_servers(context))
        return counts

    assert run(body, 1)[0] == [0, 0, 2]


def test_state_dicts_name_what_they_leave_out_and_load(caplog):
    model = remote(Ranking)

    def body():
        optimizer = wrap(model, optimizer=torch.optim.Adagrad(model.parameters()))
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.tensor([[1, 2, 3]])).sum().backward()
            optimizer.step()
        state, told = model.state_dict(), optimizer.state_dict()
        assert list(state) == ["fc.weight", "fc.bias"]
        assert told["remote"] == ["word.weight", "slots.weight"]
        assert sorted(told["state"]) == [2, 3]
        before = rows_now(optimizer)
        with torch.no_grad():
            model.fc.weight.zero_()
        optimizer.flush(overwrite=True)
        model.load_state_dict(state, strict=True)
        optimizer.store_model()
        optimizer.load_state_dict(told)
        for name, rows in rows_now(optimizer).items():
            assert torch.equal(rows, before[name])
        file = io.BytesIO()
        torch.save([state, told], file)
        file.seek(0)
        torch.load(file, weights_only=True)
        plain = copy.deepcopy(told)
        plain["state"][0] = {"step": torch.tensor(2.0), "sum": torch.ones(ROWS, DIM)}
        with pytest.raises(cpudist.InvalidArgumentError, match="remote table 'word"):
            optimizer.load_state_dict(plain)

    with caplog.at_level(logging.INFO, logger="torch_cpudist"):
        alone(body, variables={"CPUDIST_LOG": "info"})
    said = [r.getMessage() for r in caplog.records if "snapshot" in r.message]
    assert (
        sum("'word.weight'" in one for one in said) == 3
    )  # a state_dict, its load, the end


def test_copies_of_wrapped_models_are_unwrapped():
    model = remote(Ranking)

    def body():
        wrap(model)
        saved = pickle.dumps(model)
        for made in (copy.deepcopy(model), pickle.loads(saved)):  # noqa: S301
            assert type(made.word) is nn.Embedding
            assert is_remote(made.word.weight)
            assert binding_of(made.word) is None
            with pytest.raises(cpudist.RemoteTableError, match="Wrap the optimizer"):
                made(torch.tensor([[1, 2, 3]]))
        return copy.deepcopy(model)

    made = alone(body)
    assert table_of(made.word.weight).program == table_of(model.word.weight).program
    # And can be trained by themselves.
    assert torch.equal(
        alone(lambda: rows_now(wrap(made))["word.weight"]),
        initial_rows("word.weight", model.word.weight),
    )


def test_flush_leave_barrier_and_store_model():
    model = remote_embedding()

    def body():
        optimizer = wrap(model, cpudist.Async())
        for pull in ("all", "dense", "none"):
            model(torch.tensor([1])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.flush(pull)
        optimizer.leave()
        cpudist.barrier()
        optimizer.store_model()
        model(torch.tensor([1])).sum().backward()
        optimizer.step()
        cpudist.barrier()
        return rows_now(optimizer)["weight"]

    begins = initial_rows("weight", model.weight)
    found = alone(body)
    assert torch.equal(found[1], begins[1] - 1 - 1 - 1 - 1)
    assert torch.equal(found[2:], begins[2:])


def test_averages_of_rows_come_by_lookups():
    model = remote_embedding()
    begins = initial_rows("weight", model.weight)

    def body():
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = cpudist.DistributedOptimizer(inner, model, average=cpudist.EMA(0.5))
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.tensor([1])).sum().backward()
            optimizer.step()
        with optimizer.averaged():
            averaged = rows_now(optimizer)["weight"]
        return averaged, rows_now(optimizer)["weight"]

    averaged, values = alone(body)
    torch.testing.assert_close(averaged[1], begins[1] - 1.5)
    torch.testing.assert_close(values[1], begins[1] - 2)
    assert torch.equal(averaged[2:], begins[2:])


def test_wrapped_again_a_table_begins_anew(caplog):
    model = remote_embedding()
    begins = initial_rows("weight", model.weight)

    def body():
        first = wrap(model)
        model(torch.tensor([1])).sum().backward()
        first.step()
        with pytest.raises(cpudist.RemoteTableError, match="no trainer can take over"):
            wrap(model)
        assert not torch.equal(rows_now(first)["weight"], begins)
        first.close()
        assert type(model) is nn.Embedding
        with pytest.raises(cpudist.RemoteTableError, match="Wrap the optimizer"):
            model(torch.tensor([1]))
        second = wrap(model)
        return rows_now(second)["weight"]

    with caplog.at_level(logging.WARNING, logger="torch_cpudist"):
        assert torch.equal(alone(body), begins)
    assert (
        "'weight', whatever they have learned since the last snapshot, go with the "
        "servers" in caplog.text
    )


def test_stored_values_are_not_there_for_a_second_time():
    model = cpudist.shard_tables(nn.Embedding(ROWS, DIM), ROWS, remote=True)
    values = table_of(model.weight).values.clone()

    def body():
        optimizer = wrap(model)
        assert torch.equal(rows_now(optimizer)["weight"], values)
        assert table_of(model.weight).values is None
        optimizer.close()
        with pytest.raises(cpudist.RemoteTableError, match="to begin with again"):
            wrap(model)
        cpudist.shard_tables(model, initial=cpudist.Constant(2))
        return rows_now(wrap(model))["weight"]

    assert torch.equal(alone(body), torch.full((ROWS, DIM), 2.0))


def test_two_tables_of_one_optimizer_are_drawn_apart():
    model = remote(lambda: nn.ModuleList([nn.Embedding(ROWS, DIM) for _ in range(2)]))
    found = alone(lambda: rows_now(wrap(model)))
    assert not torch.equal(found["0.weight"], found["1.weight"])


# ---- replicas and devices ------------------------------------------------------------


def test_replicas_share_the_tables():
    case = Case(cpudist.Sync)

    def train(model):
        def body():
            optimizer = cpudist.DistributedOptimizer(
                torch.optim.Adagrad(model.parameters(), lr=0.1), model
            )

            def loss(replica, batch):
                ids, weights, target = batch
                return (replica(ids, weights) - target).square().mean()

            with cpudist.ReplicaExecutor(model, loss, optimizer, 2) as executor:
                for batch in case.batches(0):
                    executor.run(batch)
            return rows_now(optimizer)

        return alone(body)

    expected = train(static_model())
    for name, rows in train(remote_model()).items():
        assert torch.equal(rows, expected[name])


def test_replicas_without_servers_are_refused():
    model = remote_embedding()
    with pytest.raises(cpudist.UnsupportedModelError, match="DistributedOptimizer"):
        cpudist.ReplicaExecutor(model, lambda m, b: m(b), sgd(model), 1)


def test_staged_models_train_alike(monkeypatch):
    stage_always(monkeypatch)
    assert_remote_equals_static(Case(cpudist.Sync, 2, 2))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_models_on_a_cuda_device():
    def train(device):
        model = remote(Ranking)

        def body():
            model.to(device)
            optimizer = wrap(model, optimizer=sgd(model, lr=0.1))
            for step in range(4):
                ids = torch.arange(6).view(2, 3) + step
                optimizer.zero_grad()
                found = model(ids.to(device))
                assert found.device.type == device
                found.square().sum().backward()
                optimizer.step()
            assert model.word.weight.device.type == "cpu"
            return {name: rows.cpu() for name, rows in rows_now(optimizer).items()}

        return alone(body)

    expected = train("cpu")
    for name, rows in train("cuda").items():
        torch.testing.assert_close(rows, expected[name], rtol=1e-4, atol=1e-4)

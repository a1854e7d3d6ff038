# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
# long: one table of ways to read and to write a weight, and what comes of each
"""A table's weight read after a step, by whoever reads it: the rows are current."""

from __future__ import annotations

import logging
import threading

import pytest
import torch
import torch.nn.functional as F
from patience import PATIENCE_S
from sync_cases import (
    DIM,
    ROWS,
    RULES,
    Batches,
    Model,
    loss_of,
    run,
    train_plain,
)
from torch import nn
from weight_readers import READERS, looked_up

import torch_cpudist as cpudist
from torch_cpudist.tables.weight import as_it_stands

STEPS = 6


def trained(context, *, steps=STEPS, strategy="sync", **options):
    """A model and its optimizer after some steps, with rows that nobody looked up."""
    model = Model()
    optimizer = cpudist.DistributedOptimizer(
        RULES["sgd"].dense(model.parameters()), model, strategy, **options
    )
    batches = Batches(context.trainer_count, steps=steps)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, batches.part(step, context.trainer_rank)).backward()
        optimizer.step()
    return model, optimizer


def expected(trainers=1):
    return train_plain(RULES["sgd"], Batches(trainers, steps=STEPS))["bag.weight"]


def pulled(optimizer):
    return optimizer.stats()["rows_pulled"]


# ---- what is read is what the servers have -------------------------------------------


@pytest.mark.parametrize("how", READERS)
def test_rows_are_current_however_they_are_read(how):
    def body(context):
        model, _ = trained(context)
        return READERS[how](model).detach()

    (found,) = run(body, 1)
    assert float((found - expected()).abs().max()) <= 1e-6
    start = Model().bag.weight
    assert float((found - start).abs().max()) > 0.01


def test_one_of_two_trainers_reads_alone():
    def body(context):
        model, optimizer = trained(context)
        if context.trainer_rank == 0:
            return None
        before = pulled(optimizer)
        read = model.bag.weight.clone().detach()
        assert 0 < pulled(optimizer) - before <= ROWS
        assert torch.equal(read, looked_up(model))
        return read

    _, found = run(body, 2, 2)
    assert float((found - expected(2)).abs().max()) <= 1e-6


def test_every_trainer_reads_the_values_of_the_same_round():
    def body(context):
        return trained(context)[0].bag.weight.clone().detach()

    one, other = run(body, 2)
    assert torch.equal(one, other)
    assert float((one - expected(2)).abs().max()) <= 1e-6


def test_rows_that_others_moved_are_read_after_a_barrier():
    """The one that has fewer batches has taken no step of its own since it read."""

    def body(context):
        model, optimizer = trained(context)
        model.bag.weight.clone()
        if context.trainer_rank == 0:
            step_alone(model, optimizer)
        cpudist.barrier()
        read = model.bag.weight.clone().detach()
        assert torch.equal(read, looked_up(model))
        return read

    one, other = run(body, 2)
    assert torch.equal(one, other)


def test_rows_that_others_moved_are_read_after_leaving():
    meeting = threading.Barrier(2)

    def body(context):
        model, optimizer = trained(context)
        before = model.bag.weight.clone().detach()
        if context.trainer_rank == 1:
            optimizer.leave()
        else:
            step_alone(model, optimizer)
        meeting.wait(PATIENCE_S)
        read = model.bag.weight.clone().detach()
        assert torch.equal(read, looked_up(model))
        assert not torch.equal(read, before)
        meeting.wait(PATIENCE_S)
        return read

    one, other = run(body, 2)
    assert torch.equal(one, other)


def step_alone(model, optimizer):
    optimizer.zero_grad()
    loss_of(model, Batches(1).part(7, 0)).backward()
    optimizer.step()


def test_an_alias_taken_before_is_read_with_what_steps_did():
    def body(context):
        model, optimizer = trained(context)
        aliases = [model.bag.weight.detach(), model.bag.weight.data]
        optimizer.zero_grad()
        loss_of(model, Batches(1).part(7, 0)).backward()
        optimizer.step()
        for alias in aliases:
            assert torch.equal(alias.clone(), looked_up(model))

    run(body, 1)


def test_a_read_of_some_rows_asks_for_these_alone():
    def body(context):
        model, optimizer = trained(context)
        weight = model.bag.weight
        truth = expected()
        counts = []
        for read, rows in (
            (lambda: weight[3], [3]),
            (lambda: weight[-1], [ROWS - 1]),
            (lambda: weight[4:10:3], [4, 7]),
            (lambda: weight[torch.tensor([2, 5, 2])], [2, 5, 2]),
            (lambda: weight[torch.tensor([1, 8]), 0:2][:, :2], [1, 8]),
            (lambda: F.embedding(torch.tensor([0, 6, 6]), weight), [0, 6, 6]),
        ):
            before = pulled(optimizer)
            with torch.no_grad():
                found = read()
            counts.append(pulled(optimizer) - before)
            wanted = truth[rows][..., : found.shape[-1]].reshape(found.shape)
            assert float((found - wanted).abs().max()) <= 1e-6
        with pytest.raises(IndexError):
            weight[ROWS]
        return counts

    assert run(body, 1) == [[1, 1, 2, 2, 2, 2]]


def test_rounded_pulls_are_read_exactly():
    def body(context):
        communicator = {"pull_dtype": "bf16"}
        strategy = {"name": "sync", "communicator": communicator}
        model, optimizer = trained(context, strategy=strategy)
        model(*Batches(1).part(0, 0)[:2])  # brings rounded rows
        read = model.bag.weight.clone()
        model(*Batches(1).part(0, 0)[:2])
        again = model.bag.weight.clone()
        optimizer.flush()
        assert torch.equal(read, model.bag.weight)
        assert torch.equal(again, model.bag.weight)
        assert not torch.equal(read, read.bfloat16().float())

    run(body, 1)


def test_another_thread_reads_while_this_one_trains():
    """Rows are whole, of some step: a mean over columns that are equal shows it."""

    def body(context):
        table = nn.Embedding(ROWS, DIM, sparse=True)
        nn.init.zeros_(table.weight)
        optimizer = cpudist.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=1.0), table
        )
        done = threading.Event()
        read = []

        def watch():
            while not done.is_set():
                read.append(table.weight.clone().detach())

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            for step in range(60):
                optimizer.zero_grad()
                table(torch.tensor([step % ROWS, 1])).sum().backward()
                optimizer.step()
        finally:
            done.set()
            thread.join()
        assert table.weight[1].tolist() == [-60.0 - 2] * DIM
        return read

    (read,) = run(body, 1)
    assert read
    for one in read:
        assert torch.equal(one, one[:, :1].expand_as(one))
    sums = [float(one.sum()) for one in read]
    assert sums == sorted(sums, reverse=True)


# ---- what is not read ----------------------------------------------------------------


def test_what_looks_at_no_values_asks_nobody():
    def body(context):
        model, optimizer = trained(context)
        before = pulled(optimizer)
        weight = model.bag.weight
        optimizer.zero_grad()
        model.zero_grad()
        model.float()
        model.cpu()
        model.to(torch.float32)
        model.requires_grad_(True)
        model.train()
        repr(model)
        optimizer.zero_grad(set_to_none=False)
        sum(p.numel() for p in model.parameters())
        torch.optim.SGD(model.parameters(), lr=1.0)
        alias = weight.detach()
        same = weight.data
        assert alias.data_ptr() == same.data_ptr() == weight.data_ptr()
        for one in (weight, alias):
            assert (one.shape, one.dim()) == ((ROWS, DIM), 2)
            assert (one.size(0), len(one)) == (ROWS, ROWS)
            assert (one.dtype, one.device) == (torch.float32, torch.device("cpu"))
            assert one.is_contiguous()
            assert one.stride() == (DIM, 1)
            assert torch.zeros_like(one).shape == one.new_zeros(ROWS, DIM).shape
        assert weight.is_leaf
        assert weight.requires_grad
        assert not alias.requires_grad
        assert weight.grad_fn is None
        assert isinstance(weight, nn.Parameter)
        assert not isinstance(alias, nn.Parameter)
        assert pulled(optimizer) == before
        assert weight.clone() is not None
        assert pulled(optimizer) > before

    run(body, 1)


def test_what_was_written_is_what_is_read():
    def body(context):
        model, optimizer = trained(context)
        with torch.no_grad():
            model.bag.weight.fill_(5.0)
        assert model.bag.weight.eq(5.0).all()
        assert model.state_dict()["bag.weight"].eq(5.0).all()
        with pytest.raises(cpudist.ModelChangedError, match=r"flush\(\) before"):
            optimizer.store_model()
        optimizer.store_model(all_rows=True)
        assert looked_up(model).eq(5.0).all()

    run(body, 1)


WRITES = {
    "data.copy_": lambda w: w.data.copy_(torch.ones(ROWS, DIM)),
    "detach().fill_": lambda w: w.detach().fill_(1.0),
    "data.mul_": lambda w: w.data.mul_(2.0),
    "data *=": lambda w: w.data.__imul__(2.0),
    "data[...] =": lambda w: w.data.__setitem__(3, 1.0),
    "foreach": lambda w: torch._foreach_add_([w.data], 1.0),
    "out": lambda w: torch.mul(w.data, 2.0, out=w.data),
    "data[0].fill_": lambda w: w.data[0].fill_(5.0),
    "data[0:3].zero_": lambda w: w.data[0:3].zero_(),
    "data.view.mul_": lambda w: w.data.view(-1).mul_(2.0),
    "data.T.zero_": lambda w: w.data.T.zero_(),
    "data =": lambda w: setattr(w, "data", torch.ones(ROWS, DIM)),
}


@pytest.mark.parametrize("how", WRITES)
def test_what_writes_through_an_alias_is_noticed(how):
    """Swapping averaged weights in would else be undone, row by row, by lookups."""

    def body(context):
        model, optimizer = trained(context)
        WRITES[how](model.bag.weight)
        with pytest.raises(cpudist.ModelChangedError, match=r"bag\.weight"):
            looked_up(model)
        with pytest.raises(cpudist.ModelChangedError, match=r"bag\.weight"):
            optimizer.flush()
        optimizer.flush(overwrite=True)
        assert float((looked_up(model) - expected()).abs().max()) <= 1e-6

    run(body, 1)


def test_memory_of_its_own_with_the_same_values_is_no_write():
    def body(context):
        model, _optimizer = trained(context)
        model.bag.weight.data = model.bag.weight.data.clone()
        assert float((looked_up(model) - expected()).abs().max()) <= 1e-6
        model.to(torch.float64).to(torch.float32)
        assert float((looked_up(model) - expected()).abs().max()) <= 1e-6

    run(body, 1)


@pytest.mark.parametrize(
    "memory", [torch.ones(ROWS - 1, DIM), torch._neg_view(torch.ones(ROWS, DIM))]
)
def test_memory_that_cannot_have_the_rows_is_refused(memory):
    def body(context):
        model, _optimizer = trained(context)
        with as_it_stands():  # not seen as a write
            model.bag.weight.data = memory
        with pytest.raises(cpudist.ModelChangedError, match=r"bag\.weight"):
            looked_up(model)

    run(body, 1)


def test_rows_that_were_read_may_be_written_one_by_one():
    """Unlike rows that were not: all the others are the servers'."""

    def body(context):
        model, optimizer = trained(context)
        before = model.bag.weight.clone().detach()
        with torch.no_grad():
            model.bag.weight[3] = 7.0
            before[3] = 7.0
        optimizer.store_model()
        assert torch.equal(looked_up(model), before)

    run(body, 1)


def test_a_gradient_of_rows_that_were_only_read_is_refused():
    def body(context):
        model, optimizer = trained(context)
        whole = model.bag.weight.clone().detach()
        optimizer.zero_grad()
        ids = torch.tensor([1, 2])
        found = F.embedding(ids, model.bag.weight, sparse=True)
        assert torch.equal(found, whole[ids])
        found.sum().backward()
        with pytest.raises(cpudist.UnpulledRowError, match=r"bag\.weight"):
            optimizer.step()

    run(body, 1)


def test_steps_are_those_of_who_reads_nothing():
    """Bit for bit, with a read between forward and backward, too."""

    def body(context, reads):
        model = Model()
        optimizer = cpudist.DistributedOptimizer(
            RULES["adagrad"].dense(model.parameters()), model
        )
        batches = Batches(context.trainer_count, steps=STEPS)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = loss_of(model, batches.part(step, context.trainer_rank))
            if reads:
                model.bag.weight.norm()
            loss.backward()
            optimizer.step()
            if reads and context.trainer_rank == 0:
                model.state_dict()
        optimizer.flush()
        return model.bag.weight.clone().detach()

    plain = run(lambda context: body(context, False), 2)
    reading = run(lambda context: body(context, True), 2)
    assert torch.equal(plain[0], reading[0])
    assert torch.equal(plain[1], reading[1])


# ---- kinds of tensors ----------------------------------------------------------------


class Tagged(torch.Tensor):
    """Ids of a class of the user's own, which results have, too."""


def test_ids_of_another_class_keep_it():
    def body(context):
        model, _ = trained(context)
        ids = torch.arange(ROWS)[:, None]
        plain = model.bag(ids)
        tagged = model.bag(ids.as_subclass(Tagged))
        assert type(tagged) is Tagged
        assert torch.equal(tagged.as_subclass(torch.Tensor), plain)
        tagged.as_subclass(torch.Tensor).sum().backward()
        assert model.bag.weight.grad.is_sparse

    run(body, 1)


def test_copies_are_plain_and_the_end_makes_the_weight_plain():
    def body(context):
        model, optimizer = trained(context)
        weight = model.bag.weight
        saved = model.state_dict()["bag.weight"]
        assert type(saved) is torch.Tensor
        assert saved.data_ptr() == weight.data_ptr()
        alias = weight.detach()
        optimizer.close()
        assert model.bag.weight is weight
        assert type(weight) is nn.Parameter
        assert vars(weight) == {}
        weight.data.fill_(2.0)
        assert alias.eq(2.0).all()

    run(body, 1)


def test_a_compiled_function_reads_the_weight_outside_of_its_graph():
    def body(context):
        model, _ = trained(context)

        def norm():
            return model.bag.weight.norm()

        eager = torch.compile(norm, backend="aot_eager")()
        assert torch.equal(eager, looked_up(model).norm())
        torch._dynamo.reset()
        with pytest.raises(Exception, match="the weight of a table is read"):
            torch.compile(norm, backend="aot_eager", fullgraph=True)()

    try:
        run(body, 1)
    finally:
        torch._dynamo.reset()


def test_the_first_read_of_a_whole_table_says_what_it_costs(caplog):
    def body(context):
        model, _ = trained(context)
        model.bag.weight[3].clone()
        assert caplog.text == ""
        model.bag.weight.norm()
        model.state_dict()

    with caplog.at_level(logging.WARNING, "torch_cpudist"):
        run(body, 1)
    assert caplog.text.count("opt.flush() before") == 1
    assert "'bag.weight' is read" in caplog.text
    assert f"its {ROWS} rows come from the servers first" in caplog.text

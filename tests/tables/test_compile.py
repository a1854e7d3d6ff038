# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
# long: one compiler, which each test has to itself
"""Compiled models pull their rows too and train like one process.

Each test compiles a plain copy first: a compiled graph of the plain class must not be
used again for the wrapped one.
"""

from __future__ import annotations

import copy
import functools
import importlib
import threading
import time

import pytest
import table_cases
import torch
from sync_cases import copy_of, largest_difference
from sync_cases import run as run_trainers
from table_cases import DIM, ROWS, bag, embedding, ids, train, wrap
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.tables.local import binding_of

# It starts the C++ compiler.
INDUCTOR = pytest.param("inductor", marks=pytest.mark.processes)
# Compilers take many times longer beside other programs. A rank that fails ends at once
# all the same.
COMPILED_S = 400.0
run = functools.partial(run_trainers, timeout_s=COMPILED_S)
alone = functools.partial(table_cases.alone, timeout_s=COMPILED_S)


class Ranking(nn.Module):
    """Both kinds of tables, one of them shared, and a dense layer.

    ``shared``: torch's own inductor cannot add two sparse gradients of one weight.
    """

    def __init__(self, shared=True):
        super().__init__()
        self.word = embedding()
        self.bag = bag(mode="sum")
        if shared:
            self.bag.weight = self.word.weight
        self.slots = bag(mode="mean")
        self.fc = nn.Linear(DIM, 2)
        with torch.no_grad():
            for parameter in self.fc.parameters():
                parameter.fill_(0.3)

    def forward(self, batch):
        hidden = self.word(batch[:, 0]) + self.bag(batch) * self.slots(batch)
        return self.fc(torch.tanh(hidden))


def adagrad(model):
    return torch.optim.Adagrad(model.parameters(), lr=0.1)


BATCHES = [
    ids([1, 2, 2], [4, 1, 9]),
    ids([2, 2, 2], [0, 1, 2]),
    ids([9, 0, 1], [1, 4, 2]),
]


def hide(optimizer):
    """What the trainer holds must not be used: every row has to come from a server."""
    with torch.no_grad():
        for table in optimizer.trained.placement.tables:
            table.found.weight.fill_(torch.nan)
    optimizer.trained.accept_changes()


@pytest.fixture(autouse=True)
def _fresh_compiler():
    """The compiler is one for all threads: nobody else may be at it."""
    importlib.import_module("torch._inductor.config")  # slow
    torch._dynamo.reset()
    # Nothing here is large enough for compilers as processes, each of which would
    # import torch.
    with torch._inductor.config.patch(compile_threads=1):
        yield
    wait_for_ranks(COMPILED_S)
    torch._dynamo.reset()


def wait_for_ranks(timeout_s):
    """A test that fails leaves ranks behind that compile: they end when they can."""
    deadline = time.monotonic() + timeout_s
    for thread in threading.enumerate():
        if thread.name.startswith("rank "):
            thread.join(max(0.0, deadline - time.monotonic()))


def test_a_rank_that_is_late_is_not_at_the_compiler_when_the_next_test_begins():
    """As beside busy programs: the deadline passes while a rank compiles."""
    compiles, go_on = threading.Event(), threading.Event()
    errors = []

    def backend(graph, inputs):
        compiles.set()
        go_on.wait(COMPILED_S)
        return graph.forward

    def body():
        try:
            torch.compile(Ranking(), backend=backend)(BATCHES[0])
        except BaseException as error:
            errors.append(error)
            raise

    with pytest.raises(cpudist.OperationTimeoutError, match="did not end within"):
        # The deadline is for all but the start: a rank that has not begun to compile
        # fails in the same way.
        table_cases.alone(body, timeout_s=5.0)
    go_on.set()
    wait_for_ranks(COMPILED_S)
    assert [t for t in threading.enumerate() if t.name.startswith("rank ")] == []
    torch._dynamo.reset()
    test_the_whole_model_is_one_graph()
    assert errors == []


@pytest.mark.parametrize("backend", ["eager", "aot_eager", INDUCTOR])
def test_equals_one_process(backend):
    def body():
        model = Ranking(shared=backend != "inductor")
        plain = copy.deepcopy(model)
        compiled_plain = torch.compile(plain, backend=backend)
        optimizer = adagrad(plain)
        train(compiled_plain, optimizer, BATCHES, lambda m, b: m(b))
        optimizer = wrap(model, adagrad(model))
        hide(optimizer)
        compiled = torch.compile(model, backend=backend)
        train(compiled, optimizer, BATCHES, lambda m, b: m(b))
        optimizer.flush()
        assert largest_difference(copy_of(model), copy_of(plain)) <= 1e-6

    alone(body)


class Repeated(nn.Module):
    """One weight that is looked up three times, by two modules."""

    def __init__(self):
        super().__init__()
        self.word = embedding(padding_idx=1)
        self.bag = bag(mode="sum")
        self.bag.weight = self.word.weight

    def forward(self, batch):
        hidden = self.word(batch[:, 0]) * self.word(batch[:, 1]) + self.bag(batch)
        return torch.tanh(hidden)


@pytest.mark.parametrize("remote", [True, False])
@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
def test_one_weight_is_looked_up_several_times_in_one_graph(backend, remote):
    def trained(compile_it):
        model = cpudist.shard_tables(Repeated(), 1, remote=remote)
        optimizer = wrap(model, adagrad(model))
        made = torch.compile(model, backend=backend, fullgraph=True)
        train(made if compile_it else model, optimizer, BATCHES, lambda m, b: m(b))
        with torch.no_grad():
            rows = model.word(torch.arange(ROWS)).clone()
        optimizer.close()
        return rows

    def body():
        # A backward of other code must not be found in the cache on the disk.
        with torch._inductor.config.patch(force_disable_caches=True):
            torch.testing.assert_close(trained(True), trained(False))

    alone(body)


def test_two_trainers_with_a_compiled_model_each():
    """Compiled one after the other: the compiler itself is not for several threads."""
    plain = Ranking()
    optimizer = adagrad(plain)
    train(plain, optimizer, BATCHES, lambda m, b: m(b))

    def body(context):
        model = Ranking()
        optimizer = wrap(model, adagrad(model))
        hide(optimizer)
        compiled = torch.compile(model, backend="aot_eager")
        for turn in range(2):
            if turn == context.trainer_rank:
                compiled(BATCHES[0]).square().sum().backward()
            cpudist.barrier()
        train(model, optimizer, BATCHES[:1], lambda m, b: compiled(b))
        train(model, optimizer, BATCHES[1:], lambda m, b: m(b))
        optimizer.flush()
        return copy_of(model)

    for state in run(body, 2):
        assert largest_difference(state, copy_of(plain)) <= 1e-6


def test_the_whole_model_is_one_graph():
    """No break at a lookup: fullgraph refuses any."""

    def body():
        model = Ranking()
        optimizer = wrap(model, adagrad(model))
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        train(compiled, optimizer, BATCHES, lambda m, b: m(b))

    alone(body)


def test_a_graph_made_before_wrapping_is_not_used():
    """The class is guarded, so the model compiles again and pulls."""

    def body():
        model = Ranking()
        compiled = torch.compile(model, backend="aot_eager")
        compiled(BATCHES[0])
        optimizer = wrap(model, adagrad(model))
        hide(optimizer)
        train(compiled, optimizer, BATCHES, lambda m, b: m(b))
        optimizer.flush()
        plain = Ranking()
        train(plain, adagrad(plain), BATCHES, lambda m, b: m(b))
        assert largest_difference(copy_of(model), copy_of(plain)) <= 1e-6

    alone(body)


def test_a_graph_is_not_used_after_close_and_wrapping_again():
    def body():
        model = Ranking()
        compiled = torch.compile(model, backend="aot_eager")
        plain = Ranking()
        optimizer = wrap(model, adagrad(model))
        train(compiled, optimizer, BATCHES, lambda m, b: m(b))
        train(plain, adagrad(plain), BATCHES, lambda m, b: m(b))
        optimizer.flush()
        optimizer.close()
        assert torch.equal(compiled(BATCHES[0]), model(BATCHES[0]))
        optimizer = wrap(model, adagrad(model))
        hide(optimizer)
        train(compiled, optimizer, BATCHES, lambda m, b: m(b))
        train(plain, adagrad(plain), BATCHES, lambda m, b: m(b))
        optimizer.flush()
        assert largest_difference(copy_of(model), copy_of(plain)) <= 1e-6

    alone(body)


def test_the_op_passes_the_checks_of_torch():
    def body():
        model = embedding()
        wrap(model)
        binding = binding_of(model)
        assert binding is not None
        handle = binding.handle
        weight = model.weight.detach().clone().requires_grad_()
        for keys in (ids(1, 2), ids([1], [2]), ids().long(), ids(3, 3).int()):
            torch.library.opcheck(torch.ops.torch_cpudist.pull, (keys, handle))
            arguments = (weight, keys, handle, 2)
            torch.library.opcheck(torch.ops.torch_cpudist.lookup, arguments)
            gradient = torch.ones(*keys.shape, DIM)
            arguments = (gradient, keys, ROWS, 2)
            torch.library.opcheck(torch.ops.torch_cpudist.lookup_grad, arguments)

    alone(body)


@pytest.mark.parametrize("padding_idx", [None, 2])
def test_a_compiled_lookup_has_the_gradient_of_torch(padding_idx):
    def body():
        model = embedding(padding_idx=padding_idx)
        plain = copy.deepcopy(model)
        wrap(model)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        keys = ids([1, 2, 2], [4, 1, 9])
        for module, forward in ((model, compiled), (plain, plain)):
            forward(keys).square().sum().backward()
            assert module.weight.grad.is_sparse
        torch.testing.assert_close(
            model.weight.grad.coalesce(), plain.weight.grad.coalesce()
        )

    alone(body)


class Hashed(nn.Embedding):
    """Looks up other ids than those it is given."""

    def forward(self, ids):
        return super().forward((ids + 3) % ROWS) * 2


class HashedBags(nn.EmbeddingBag):
    def forward(self, ids, scale=1.0):
        return super().forward((ids + 3) % ROWS) * scale


@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
@pytest.mark.parametrize("kind", [Hashed, HashedBags])
def test_a_module_class_of_ones_own_is_compiled_too(kind, backend):
    def body():
        model = kind(ROWS, DIM, sparse=True)
        plain = copy.deepcopy(model)
        compiled_plain = torch.compile(plain, backend=backend)
        train(compiled_plain, adagrad(plain), BATCHES, lambda m, b: m(b))
        optimizer = wrap(model, adagrad(model))
        hide(optimizer)
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        train(compiled, optimizer, BATCHES, lambda m, b: m(b))
        optimizer.flush()
        assert largest_difference(copy_of(model), copy_of(plain)) <= 1e-6

    alone(body)


@pytest.mark.parametrize("make", [embedding, bag])
def test_a_graph_notices_that_the_weight_was_replaced(make):
    def body():
        model = make()
        optimizer = wrap(model)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        train(compiled, optimizer, BATCHES, lambda m, b: m(b))
        model.load_state_dict(model.state_dict(), assign=True)
        with pytest.raises(cpudist.ModelChangedError, match="assign=True"):
            compiled(BATCHES[0])

    alone(body)


def test_a_graph_of_an_optimizer_that_is_gone_says_so():
    with pytest.raises(cpudist.ClosedError, match="is gone"):
        torch.ops.torch_cpudist.pull(ids(1), 1 << 40)


class Several(nn.Module):
    """Each table is looked up with a column, one of them after a cast."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(embedding() for _ in range(4))

    def forward(self, batch):
        columns = [batch[:, 0], batch[:, 1].int(), batch[:, 2], batch]
        found = [
            table(ids).view(len(batch), -1, DIM).sum(1)
            for table, ids in zip(self.tables, columns, strict=True)
        ]
        return torch.tanh(torch.stack(found)).sum(0)


@pytest.mark.parametrize("inner", [False, True], ids=["whole", "inside"])
@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
def test_lookups_of_a_graph_are_foreseen(backend, inner):
    """Hooks run outside of a graph of the model; inside one, lookups pull alone."""

    def body():
        model = Several()
        optimizer = wrap(model, adagrad(model))
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        if inner:

            @torch.compile(backend=backend, fullgraph=True)
            def compiled(batch):
                return model(batch) * 1.0

        requests = []
        for batch in [*BATCHES, *BATCHES]:
            before = optimizer.stats()["requests"]
            optimizer.zero_grad()
            compiled(batch).square().sum().backward()
            optimizer.step()
            requests.append(optimizer.stats()["requests"] - before)
        optimizer.flush()
        return copy_of(model), requests, optimizer.stats()["lookups"]

    def eager():
        model = Several()
        optimizer = wrap(model, adagrad(model))
        for batch in [*BATCHES, *BATCHES]:
            optimizer.zero_grad()
            model(batch).square().sum().backward()
            optimizer.step()
        optimizer.flush()
        return copy_of(model)

    found, requests, lookups = alone(body)
    assert largest_difference(found, alone(eager)) <= 1e-6
    assert requests == ([5] * 6 if inner else [5, 5, 5, 2, 2, 2])
    assert lookups["together"] == (0 if inner else 3)
    assert lookups["in_vain"] == 0


@pytest.mark.parametrize("make", [embedding, bag])
def test_a_compiled_lookup_brings_its_rows_only(make):
    def body(context):
        model = make()
        optimizer = cpudist.DistributedOptimizer(adagrad(model), model)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        pulled = []
        for batch in BATCHES:
            before = optimizer.stats()["rows_pulled"]
            optimizer.zero_grad()
            compiled(batch).sum().backward()
            optimizer.step()
            pulled.append(optimizer.stats()["rows_pulled"] - before)
        return pulled

    (pulled,) = run(body, 1)
    assert pulled == [len(batch.unique()) for batch in BATCHES]

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Modules in replicas: dropout, batch norm, compiled code, modes, own state."""

from __future__ import annotations

import threading

import pytest
import torch
from patience import PATIENCE_S
from replica_cases import batch_of, loss_of
from sync_cases import RULES, Model, assert_same_bits, build, copy_of, run
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.replicas.dropout import drawing_from, generator_of, own_dropout

KINDS = {
    "Dropout": (nn.Dropout, (4000,)),
    "Dropout1d": (nn.Dropout1d, (50, 40, 3)),
    "Dropout1d unbatched": (nn.Dropout1d, (40, 3)),
    "Dropout2d": (nn.Dropout2d, (50, 40, 2, 3)),
    "Dropout2d of three": (nn.Dropout2d, (50, 40, 3)),
    "Dropout3d": (nn.Dropout3d, (50, 40, 2, 1, 3)),
    "Dropout3d unbatched": (nn.Dropout3d, (40, 2, 1, 3)),
    "AlphaDropout": (nn.AlphaDropout, (4000,)),
    "FeatureAlphaDropout": (nn.FeatureAlphaDropout, (50, 40, 3)),
}


def ours(module, seed=0):
    own_dropout(module)

    def forward(x):
        with drawing_from(generator_of(seed, 0, 0)):
            return module(x)

    return forward


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.filterwarnings("ignore:dropout2d")
def test_dropout_modules_do_what_torchs_do(name):
    kind, shape = KINDS[name]
    x = torch.ones(shape, requires_grad=True)
    found = ours(kind(0.3))(x)
    torch.manual_seed(0)
    plain = kind(0.3)(x)
    # The same two values, of the same number, and whole channels alike.
    values = plain.detach().unique()
    assert torch.allclose(found.detach().unique(), values)
    kept = (found == found.max()).float()
    assert abs(kept.mean() - 0.7) < (0.02 if kept.numel() >= 4000 else 0.2)
    if "channels" not in name and plain.dim() > 1:
        channels = plain.flatten(2 if plain.shape[0] == 50 else 1)
        own = found.flatten(2 if plain.shape[0] == 50 else 1)
        assert bool((channels == channels[..., :1]).all())
        assert bool((own == own[..., :1]).all())
    gradient = torch.autograd.grad(found.sum(), x)[0]
    scale = torch.autograd.grad(plain.sum(), x)[0].max()
    assert torch.allclose(gradient, kept * scale, atol=1e-5)


@pytest.mark.parametrize("kind", [nn.Dropout, nn.AlphaDropout])
def test_dropout_at_its_ends(kind):
    x = torch.randn(6)
    assert torch.equal(ours(kind(0.0))(x), x)
    assert torch.equal(ours(kind(1.0))(x), torch.zeros(6))
    assert torch.equal(ours(kind(0.5).eval())(x), x)
    y = x.clone()
    assert ours(kind(0.5, inplace=True))(y) is y
    assert not torch.equal(x, y)


def test_a_forward_of_the_users_own_stays_above():
    class Doubled(nn.Dropout):
        def forward(self, input):
            return 2 * super().forward(input)

    module = Doubled(0.5)
    found = ours(module)(torch.ones(100))
    assert set(found.tolist()) == {0.0, 4.0}
    assert torch.equal(found, ours(Doubled(0.5))(torch.ones(100)))


def masks(replicas, deterministic=True, seed=3, steps=2, net=None):
    """Where dropout kept values, by step and replica."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)) if net is None else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    found = []

    def loss_fn(model, x):
        out = model(x * 0 + model[0].weight[0, 0])
        return out.sum(), (model[1](torch.ones(16)) > 0).int()

    with cpudist.ReplicaExecutor(
        net, loss_fn, optimizer, replicas, seed=seed, deterministic=deterministic
    ) as executor:
        for _ in range(steps):
            found.append([out[1].tolist() for out in executor.run(torch.ones(8, 2))])
    return found


def test_dropout_is_independent_and_comes_again():
    first, second = masks(3), masks(3)
    assert first == second
    drawn = [tuple(mask) for step in first for mask in step]
    assert len(set(drawn)) == len(drawn)
    assert masks(3, seed=4) != first


def test_dropout_of_two_trainers_is_independent():
    found = run(lambda _: masks(2, deterministic=False), 2)
    assert found[0] != found[1]


def test_functional_dropout_is_refused_where_runs_are_to_be_equal():
    net = nn.Linear(2, 2)
    before = copy_of(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)

    def loss_fn(model, x):
        return nn.functional.dropout(model(x), 0.5).sum()

    with cpudist.ReplicaExecutor(
        net, loss_fn, optimizer, 2, deterministic=True
    ) as executor:
        with pytest.raises(cpudist.GlobalRandomError, match=r"nn\.Dropout"):
            executor.run(torch.ones(4, 2))
        assert_same_bits(copy_of(net), before)
    with cpudist.ReplicaExecutor(net, loss_fn, optimizer, 2) as executor:
        executor.run(torch.ones(4, 2))


def test_batch_norm_keeps_the_first_replicas_statistics():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    other.load_state_dict(model.state_dict())
    x = torch.randn(9, 3)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other)]
    with cpudist.ReplicaExecutor(
        model, lambda net, x: net(x).square().mean(), optimizers[0], 2
    ) as executor:
        for _ in range(3):
            executor.run(x)
            statistics = copy_of(other[1])
            optimizers[1].zero_grad()
            # Each part is normalised by itself; buffers are of the first.
            for part in (x[:4], x[4:]):
                loss = other(part).square().mean() * len(part) / 9
                loss.backward()
                if len(part) == 4:
                    statistics = {
                        name: value
                        for name, value in copy_of(other[1]).items()
                        if "running" in name or "num" in name
                    }
            other[1].load_state_dict({**copy_of(other[1]), **statistics})
            optimizers[1].step()
        for name, value in model.state_dict().items():
            assert torch.allclose(value, other.state_dict()[name], atol=1e-6), name
        model.eval()
        with torch.no_grad():
            assert torch.allclose(executor.predict(x), model(x), atol=1e-6)


def test_modules_are_the_replicas_own():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 1)
            self.register_buffer("seen", torch.zeros(()))
            self.factor = 1.0

        def forward(self, x):
            self.last = x  # would be another replica's on a shared module
            barrier.wait(PATIENCE_S)
            self.seen = self.seen + len(x)
            return self.factor * self.layer(self.last)

    barrier = threading.Barrier(2)
    model = Counts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.arange(5.0)[:, None]
    with cpudist.ReplicaExecutor(
        model, lambda net, part: (net(part).mean(), net.last), optimizer, 2
    ) as executor:
        assert torch.equal(executor.join(executor.run(x))[1], x)
        assert model.seen == 2  # the first replica's part
        assert not hasattr(model, "last")
        model.factor = 0.0
        assert executor.run(x)[0][0] == 0.0
        model.layer.weight.data = torch.full((1, 1), 7.0)
        model.layer.bias.requires_grad_(False)
        model.factor = 1.0
        barrier.reset()
        executor.run(x)
        assert model.layer.bias.grad is None
        out = executor.predict(x, lambda net, part: net.layer(part))
        assert torch.equal(out, model.layer(x))


def test_the_callers_modes_are_the_replicas():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen = []

    def loss_fn(net, x):
        out = net(x)
        seen.append((out.dtype, torch.is_grad_enabled()))
        return out.float().sum()

    x = torch.ones(4, 2)
    with cpudist.ReplicaExecutor(model, loss_fn, optimizer, 2) as executor:
        executor.run(x)
        with torch.autocast("cpu", torch.bfloat16):
            executor.run(x)
        executor.evaluate(x)
        with torch.inference_mode():
            executor.evaluate(x)
        with torch.no_grad(), pytest.raises(cpudist.InvalidArgumentError, match="grad"):
            executor.run(x)
    single, half = torch.float32, torch.bfloat16
    assert [dtype for dtype, _ in seen] == [single] * 2 + [half] * 2 + [single] * 4
    assert [grad for _, grad in seen] == [True] * 4 + [False] * 4


def test_the_context_is_the_callers():
    def body(context):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

        def loss_fn(net, x):
            assert cpudist.trainer_rank() == context.trainer_rank
            return net(x).mean()

        with cpudist.ReplicaExecutor(model, loss_fn, optimizer, 2) as executor:
            executor.run(torch.ones(4, 1))

    run(body, 2)


def test_compiled_models_with_tables_on_servers():
    def train(compile_model):
        def body(_):
            model = Model()
            net = torch.compile(model, backend="aot_eager") if compile_model else model
            optimizer = cpudist.DistributedOptimizer(
                build(RULES["sgd"], model), model, "sync"
            )
            with cpudist.ReplicaExecutor(net, loss_of, optimizer, 2) as executor:
                for step in range(4):
                    executor.run(batch_of(step, 8 + step % 2))
                predicted = executor.predict(batch_of(0, 8)[:2])
            optimizer.flush()
            return {**copy_of(model), "predicted": predicted}

        return run(body, 1)[0]

    torch._dynamo.reset()
    plain, compiled = train(False), train(True)
    for name, value in plain.items():
        assert torch.allclose(value, compiled[name], atol=1e-5), name


def test_compiled_dropout_draws_from_the_replicas_generators():
    torch._dynamo.reset()
    net = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.Dropout(0.5))

    def train(module):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        x = torch.ones(64, 2)
        with cpudist.ReplicaExecutor(
            module,
            lambda model, part: (model(part).sum(), model(part)),
            optimizer,
            2,
            seed=1,
            deterministic=True,
        ) as executor:
            return executor.join([executor.join(executor.run(x)) for _ in range(2)])

    plain = train(net)
    compiled = train(torch.compile(net, backend="aot_eager"))
    assert torch.allclose(plain[1], compiled[1])
    assert torch.allclose(plain[0], compiled[0])


def test_models_that_cannot_be_replicated():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(cpudist.UnsupportedOptimizerError, match="not in the model"):
        cpudist.ReplicaExecutor(nn.Linear(1, 1), loss_of, optimizer, 2)
    model = nn.Linear(1, 1)
    with pytest.raises(cpudist.UnsupportedOptimizerError, match=r"LBFGS.*closure"):
        cpudist.ReplicaExecutor(
            model, loss_of, torch.optim.LBFGS(model.parameters()), 2
        )
    scripted = torch.jit.script(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(scripted.parameters(), lr=0.1)
    with pytest.raises(cpudist.UnsupportedModelError, match=r"torch\.compile"):
        cpudist.ReplicaExecutor(scripted, loss_of, optimizer, 2)
    model = nn.Sequential(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with cpudist.ReplicaExecutor(
        model, lambda _, x: model(x).mean(), optimizer, 2
    ) as executor:
        with pytest.raises(cpudist.UnsupportedModelError, match="first argument"):
            executor.run(torch.ones(2, 1))
        model[0].weight = nn.Parameter(torch.zeros(1, 1))
        with pytest.raises(cpudist.ModelChangedError, match=r"Linear\.weight"):
            executor.run(torch.ones(2, 1))


SEEN = {
    "register_hook": lambda p: p.register_hook(torch.zeros_like),
    "register_post_accumulate_grad_hook": lambda p: (
        p.register_post_accumulate_grad_hook(lambda q: q.grad.zero_())
    ),
}


@pytest.mark.parametrize("name", SEEN)
def test_hooks_of_parameters_are_refused(name):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    refused = rf"'1\.weight' has a hook \({name}\).*before_update"

    def executor():
        return cpudist.ReplicaExecutor(
            model, lambda net, x: net(x).mean(), optimizer, 2
        )

    hook = SEEN[name](model[1].weight)
    with pytest.raises(cpudist.UnsupportedModelError, match=refused):
        executor()
    hook.remove()
    with executor() as made:
        made.run(torch.ones(4, 2))
        before = copy_of(model)
        hook = SEEN[name](model[1].weight)
        with pytest.raises(cpudist.UnsupportedModelError, match=refused):
            made.run(torch.ones(4, 2))
        assert_same_bits(copy_of(model), before)
        hook.remove()
        made.run(torch.ones(4, 2))


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
def test_module_hooks_are_copied_or_told(kind):
    model = nn.Sequential(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = []
    add = getattr(model[0], f"register_{kind}_hook")
    hook = add(lambda *_: calls.append(1))
    with cpudist.ReplicaExecutor(
        model, lambda net, x: net(x).mean(), optimizer, 2
    ) as executor:
        executor.run(torch.ones(4, 2))
        assert len(calls) == 2
        hook.remove()
        add(lambda *_: None)
        with pytest.raises(cpudist.ModelChangedError, match="Linear has other"):
            executor.run(torch.ones(4, 2))

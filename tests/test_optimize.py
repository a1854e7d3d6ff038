# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``optimize``: torch's autocast and layouts without a change of the training loop."""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from sync_cases import assert_same_bits, copy_of, largest_difference, run
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist import precision

ROWS, DIM, STEPS = 40, 8, 4
READ_INSTRUCTIONS = precision.bf16_instructions


class Scores(nn.Module):
    """A table, a dense layer, and an output that says what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, DIM, sparse=True)
        self.hidden = nn.Linear(4 * DIM, 16)
        self.last = nn.Linear(16, 1)

    def forward(self, ids, *, scale=1.0):
        """Forward of the user's own."""
        rows = self.table(ids)
        scores = self.last(F.relu(self.hidden(rows.flatten(1)))).squeeze(1)
        return OrderedDict(scores=scores * scale, rows=rows, ids=ids)


class Images(nn.Module):
    def __init__(self, channels: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, 8, 3)
        self.second = nn.Conv2d(8, 16, 3)
        self.last = nn.Linear(16 * 4 * 4, 3)
        self.strides: list[tuple[int, ...]] = []

    def forward(self, images):
        inner = self.first(images).relu()
        self.strides = [images.stride(), inner.stride()]
        return self.last(self.second(inner).relu().flatten(1))


def make(kind=Scores, **options):
    torch.manual_seed(3)
    return kind(**options)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def batches(rank=0):
    generator = torch.Generator().manual_seed(rank)
    draws = [torch.randint(0, ROWS, (8, 4), generator=generator) for _ in range(STEPS)]
    return [(ids, (ids.sum(1) % 2).float()) for ids in draws]


def train(model, optimizer, samples, scores=lambda model, ids: model(ids)["scores"]):
    for ids, target in samples:
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(scores(model, ids), target).backward()
        optimizer.step()


def under_autocast(model, ids):
    with torch.autocast("cpu", torch.bfloat16):
        found = model(ids)["scores"]
    return found.float()


@pytest.fixture(autouse=True)
def _any_cpu(monkeypatch):
    """What is tested is no matter of the CPU it is tested on."""
    monkeypatch.setattr(precision, "bf16_instructions", lambda: "amx_bf16")
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)


def test_trains_as_under_autocast_to_the_bit():
    plain, model = make(), make()
    train(plain, sgd(plain), batches(), under_autocast)
    names = list(model.state_dict())
    same, optimizer, done = cpudist.optimize(model, given := sgd(model))
    assert same is model
    assert optimizer is given
    train(model, optimizer, batches())
    assert list(model.state_dict()) == names
    assert_same_bits(copy_of(model), copy_of(plain))
    assert (done.dtype, done.autocast, done.channels_last) == (
        *(torch.bfloat16, True, False),
    )
    assert done.tables == ("table.weight",)
    assert done.compiled is None
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_layers_compute_in_bfloat16_and_outputs_and_tables_are_float32():
    model = make()
    cpudist.optimize(model, sgd(model))
    seen = []
    model.hidden.register_forward_hook(lambda m, i, o: seen.append(o.dtype))
    found = model(batches()[0][0], scale=2.0)
    assert seen == [torch.bfloat16]
    assert type(found) is OrderedDict
    assert found["scores"].dtype == found["rows"].dtype == torch.float32
    assert found["ids"].dtype == torch.int64
    found["scores"].sum().backward()
    assert model.table.weight.grad.dtype == torch.float32
    assert model.hidden.weight.grad.dtype == torch.float32


def test_float32_changes_no_number_and_undoes_bfloat16():
    plain, model = make(), make()
    cpudist.optimize(model, sgd(model))
    _, optimizer, done = cpudist.optimize(model, sgd(model), dtype=torch.float32)
    assert type(model) is Scores
    train(plain, sgd(plain), batches())
    train(model, optimizer, batches())
    assert_same_bits(copy_of(model), copy_of(plain))
    assert (done.dtype, done.autocast) == (torch.float32, False)


def test_copies_and_saved_models_stay_optimized():
    model = make()
    cpudist.optimize(model, sgd(model))
    ids = batches()[0][0]
    # What a saved model is made of again: by classes that can be found by their names.
    make_again, arguments, state, *_ = model.__reduce_ex__(2)
    assert arguments[0] is Scores
    saved = make_again(*arguments)
    saved.__setstate__(copy.deepcopy(state))
    for other in (copy.deepcopy(model), saved):
        assert isinstance(other, Scores)
        assert type(other) is type(model)
        assert other.hidden.weight is not model.hidden.weight
        assert torch.equal(other(ids)["scores"], model(ids)["scores"])
    assert model.forward.__doc__ == "Forward of the user's own."


@pytest.mark.parametrize("channels", [1, 3])
def test_images_reach_every_convolution_with_channels_innermost(channels):
    plain, model = make(Images, channels=channels), make(Images, channels=channels)
    _, _, done = cpudist.optimize(model, sgd(model))
    assert done.channels_last
    images = torch.rand(2, channels, 8, 8)
    found = model(images)
    assert model.strides == [
        (64 * channels, 1, 8 * channels, channels),
        (8 * 36, 1, 6 * 8, 8),
    ]
    assert all(p.is_contiguous() for p in model.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(images)
    torch.testing.assert_close(found, expected.float(), rtol=0.02, atol=0.02)
    assert images.stride() == (64 * channels, 64, 8, 1)


def test_layout_alone_is_on_request_and_needs_convolutions():
    plain, model = make(Images), make(Images)
    images = torch.rand(2, 1, 8, 8)
    _, _, done = cpudist.optimize(model, sgd(model), torch.float32)
    assert not done.channels_last
    assert "channels_last=True is faster" in done.notes[0]
    assert torch.equal(model(images), plain(images))
    cpudist.optimize(model, sgd(model), torch.float32, channels_last=True)
    torch.testing.assert_close(model(images), plain(images), rtol=1e-5, atol=1e-6)
    assert model.strides[0] == (64, 1, 8, 1)
    cpudist.optimize(model, sgd(model), channels_last=False)
    assert model(images).shape == (2, 3)
    assert model.strides[0] == (64, 64, 8, 1)


@pytest.mark.parametrize("first", ["optimize", "wrap"])
def test_a_world_of_one_trains_the_same(first):
    plain = make()
    train(plain, sgd(plain), batches(), under_autocast)

    def body(context):
        model = make()
        inner = sgd(model)
        if first == "optimize":
            cpudist.optimize(model, inner)
        optimizer = cpudist.DistributedOptimizer(inner, model)
        if first == "wrap":
            model, optimizer, _ = cpudist.optimize(model, optimizer)
        train(model, optimizer, batches())
        optimizer.flush()
        return copy_of(model)

    assert largest_difference(run(body, 1)[0], copy_of(plain)) <= 1e-6


def test_two_trainers_equal_the_joined_batch_under_autocast():
    plain = make()
    pairs = zip(batches(0), batches(1), strict=True)
    joined = [tuple(map(torch.cat, zip(*pair, strict=True))) for pair in pairs]
    train(plain, sgd(plain), joined, under_autocast)

    # Not in the ranks' threads: torch's generator is one for all of them.
    models = [make(), make()]

    def body(context):
        model = cpudist.shard_tables(models[context.trainer_rank], 10)
        model, inner, _ = cpudist.optimize(model, sgd(model))
        optimizer = cpudist.DistributedOptimizer(inner, model)
        train(model, optimizer, batches(context.trainer_rank))
        optimizer.flush()
        return copy_of(model)

    # Sums over a batch are rounded to eight bits in both, but in other parts.
    for state in run(body, 2):
        assert largest_difference(state, copy_of(plain)) <= 2e-3


def test_replicas_are_optimized_as_their_model_is():
    model = make(Images)
    _, optimizer, _ = cpudist.optimize(model, sgd(model))
    seen = []

    def loss_of(replica, images):
        logits = replica(images)
        seen.append((type(replica), logits.dtype, replica.strides[0]))
        return logits.square().mean()

    with cpudist.ReplicaExecutor(model, loss_of, optimizer, 2, num_threads=1) as both:
        both.run(torch.rand(4, 1, 8, 8))
    assert seen == [(type(model), torch.float32, (64, 1, 8, 1))] * 2


def test_compiled_in_place_on_request():
    torch._dynamo.reset()
    model = make(Images)
    names = list(model.state_dict())
    _, optimizer, done = cpudist.optimize(model, sgd(model), compile="aot_eager")
    assert done.compiled == "aot_eager"
    eager = make(Images)
    cpudist.optimize(eager, sgd(eager))
    images = torch.rand(2, 1, 8, 8)
    torch.testing.assert_close(model(images), eager(images), rtol=0.02, atol=0.02)
    model(images).sum().backward()
    optimizer.step()
    assert list(model.state_dict()) == names
    torch._dynamo.reset()


def test_a_cpu_without_bfloat16_says_so_and_keeps_float32(monkeypatch, caplog):
    monkeypatch.setattr(precision, "bf16_instructions", lambda: None)
    model = make()
    with caplog.at_level(logging.INFO, "torch_cpudist"):
        _, _, done = cpudist.optimize(model, sgd(model))
    assert (done.dtype, done.instructions) == (torch.float32, None)
    assert type(model) is Scores
    assert "no instructions for it" in caplog.text
    assert caplog.records[0].levelno == logging.WARNING
    said = []
    _, _, done = cpudist.optimize(model, sgd(model), force=True, report=said.append)
    assert done.autocast
    assert said == [f"optimize: {done}"]
    assert "autocast to bfloat16 (this CPU: no bfloat16); 1 table(s)" in said[0]


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"ONEDNN_MAX_CPU_ISA": "AVX2"}, "ONEDNN_MAX_CPU_ISA=AVX2 keeps oneDNN from"),
        ({"DNNL_MAX_CPU_ISA": "avx512_core_vnni"}, "DNNL_MAX_CPU_ISA=avx512_core_vnni"),
        ({"ONEDNN_MAX_CPU_ISA": "avx2_vnni_2"}, "ONEDNN_MAX_CPU_ISA=avx2_vnni_2 keeps"),
        ({"ONEDNN_MAX_CPU_ISA": "ALL", "DNNL_MAX_CPU_ISA": "AVX2"}, None),
        ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, None),
        ({"ONEDNN_MAX_CPU_ISA": ""}, None),
    ],
)
def test_a_limit_of_onednn_below_bfloat16_says_so_and_keeps_float32(
    monkeypatch, caplog, limits, words
):
    for name, value in limits.items():
        monkeypatch.setenv(name, value)
    model = make()
    with caplog.at_level(logging.WARNING, "torch_cpudist"):
        _, _, done = cpudist.optimize(model, sgd(model))
    assert done.autocast == (words is None)
    assert done.instructions == "amx_bf16"
    assert (words or "") in caplog.text
    assert bool(caplog.records) == (words is not None)
    _, _, done = cpudist.optimize(model, sgd(model), force=True)
    assert done.autocast


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_onednn_switched_off_says_so_and_keeps_float32():
    model = make()
    with torch.backends.mkldnn.flags(enabled=False):
        _, _, done = cpudist.optimize(model, sgd(model), report=lambda _line: None)
        assert not done.autocast
        assert (
            "oneDNN, which would use amx_bf16 for torch, is switched" in done.notes[0]
        )
        *_, done = cpudist.optimize(model, sgd(model), dtype=torch.float32)
        assert done.notes == ()
    *_, done = cpudist.optimize(model, sgd(model))
    assert done.autocast


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("flags\t\t: fpu avx512_bf16 amx_bf16\n", "amx_bf16"),
        ("model name: x\nflags : fpu avx512_bf16\n", "avx512_bf16"),
        ("Features\t: fp asimd bf16\n", "bf16"),
        ("flags : fpu avx2\nbugs : amx_bf16\n", None),
        ("", None),
    ],
)
def test_instructions_are_those_the_kernel_lists(tmp_path, text, found):
    path = tmp_path / "cpuinfo"
    path.write_text(text)
    assert READ_INSTRUCTIONS(path) == found


def _refused(case):
    model = make(Images)
    optimizer, options, error, words = sgd(model), {}, cpudist.UnsupportedModelError, ""
    match case:
        case "float16":
            options, words = {"dtype": torch.float16}, "losses scaled"
            error = cpudist.InvalidArgumentError
        case "no module":
            model, words = [model], "expected a torch.nn.Module, found list"
            error = cpudist.InvalidArgumentError
        case "no optimizer":
            optimizer, words = model.parameters, "expected a torch.optim optimizer"
            error = cpudist.InvalidArgumentError
        case "another model":
            optimizer, words = sgd(make()), "no parameter of this model"
            error = cpudist.InvalidArgumentError
        case "no convolution":
            model = make()
            optimizer, options = sgd(model), {"channels_last": True}
            error, words = cpudist.InvalidArgumentError, "no nn.Conv2d"
        case "bfloat16 parameters":
            model.bfloat16()
            words = "small updates are lost"
        case "float64":
            model.double()
            words = "float64"
        case "meta":
            model = Images().to("meta")
            optimizer, words = sgd(model), "is on meta"
        case "own forward":
            model.forward = lambda images: images
            words = "forward was replaced"
        case "compiled":
            model, words = torch.compile(model, backend="eager"), "compiled already"
        case "script":
            model = torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2))
            optimizer, words = sgd(model), "compiled by torch.jit"
        case "embedding":
            model = nn.Embedding(3, 2)
            optimizer, words = sgd(model), "a lone Embedding"
        case "backend":
            options, words = {"compile": "nonesuch"}, "expected True or one of"
            error = cpudist.ConfigurationError
        case "compiler":
            options, words = {"compile": True}, "nonesuch-c"
            error = cpudist.ConfigurationError
    return model, optimizer, options, error, words


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "case",
    [
        *("float16", "no module", "no optimizer", "another model", "no convolution"),
        *("bfloat16 parameters", "float64", "meta", "own forward", "compiled"),
        *("script", "embedding", "backend", "compiler"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_changed(case, monkeypatch):
    monkeypatch.setenv("CXX", "nonesuch-c++")
    model, optimizer, options, error, words = _refused(case)
    before = type(model)
    with pytest.raises(error, match=words):
        cpudist.optimize(model, optimizer, **options)
    assert type(model) is before

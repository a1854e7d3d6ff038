# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""torch's clipping of a table's gradient is told what clips here."""

from __future__ import annotations

import copy

import pytest
import torch
from sync_cases import copy_of, largest_difference
from table_cases import alone, embedding, ids, sgd, train, wrap
from torch import nn

import torch_cpudist as cpudist

CLIPS = [
    lambda p: nn.utils.clip_grad_norm_(p, 1.0),
    lambda p: nn.utils.clip_grad_norm_(p, 1.0, foreach=True),
    lambda p: nn.utils.clip_grad_value_(p, 1.0),
    lambda p: nn.utils.clip_grad_value_(p, 1.0, foreach=True),
]


def model_of():
    return nn.Sequential(embedding(), nn.Linear(3, 1))


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("strategy", ["sync", "async", "geo", "allreduce"])
def test_torch_clipping_names_the_setting_that_clips(clip, strategy):
    def body():
        model = model_of()
        optimizer = cpudist.DistributedOptimizer(sgd(model), model, strategy)
        # Also where gradients are added up before.
        for _ in range(2):
            model(ids(1, 1, 2)).sum().backward()
        with pytest.raises(cpudist.SparseGradientError) as caught:
            clip(model.parameters())
        text = str(caught.value)
        assert text.startswith("table '0.weight': torch has no ")
        assert "clip=cpudist.ClipNorm(max_norm)" in text
        assert "ClipValue(value)" in text
        assert "cpudist.clip_grad_norm_" in text
        assert "SparseCPU" not in text
        assert isinstance(caught.value, NotImplementedError)
        assert caught.value.__suppress_context__
        cpudist.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

    alone(body)


def test_gradients_are_used_as_any_others():
    """Copies are plain, results are plain, and the memory is autograd's own."""

    def body():
        model = model_of()
        optimizer = wrap(model)
        model(ids(1, 1, 2)).sum().backward()
        grad = model[0].weight.grad
        for made in (grad * 2, grad.coalesce(), grad.clone(), copy.deepcopy(grad)):
            assert type(made) is torch.Tensor
        assert torch.equal(copy.deepcopy(grad).to_dense(), grad.to_dense())
        assert grad.norm().item() > 0
        assert repr(grad).startswith("tensor(indices=")
        optimizer.zero_grad(set_to_none=False)
        assert grad._nnz() == 0

    alone(body)


def test_after_the_first_step_gradients_are_torchs_own():
    def body():
        model = model_of()
        optimizer = wrap(model)
        assert len(model[0].weight._post_accumulate_grad_hooks) == 1
        train(model, optimizer, [ids(1, 2)], lambda m, b: m(b))
        assert not model[0].weight._post_accumulate_grad_hooks
        optimizer.zero_grad()
        model(ids(1, 2)).sum().backward()
        assert type(model[0].weight.grad) is torch.Tensor
        optimizer.close()
        wrap(model).close()
        assert not model[0].weight._post_accumulate_grad_hooks

    alone(body)


@pytest.mark.parametrize("strategy", ["sync", "geo", "allreduce"])
def test_the_first_step_is_as_the_others(strategy):
    """Two lookups that add up, against the sum of plain torch."""

    def body():
        model = nn.Sequential(embedding())
        optimizer = cpudist.DistributedOptimizer(sgd(model), model, strategy)
        for _ in range(2):
            model(ids(1, 1, 2)).sum().backward()
        optimizer.step()
        optimizer.flush()
        return copy_of(model)

    plain = nn.Sequential(embedding())
    for _ in range(2):
        plain(ids(1, 1, 2)).sum().backward()
    sgd(plain).step()
    assert largest_difference(alone(body), copy_of(plain)) <= 1e-6

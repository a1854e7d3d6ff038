# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Softmax losses over samples, against their formulas and a softmax over all rows."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torch_cpudist import losses
from torch_cpudist.errors import InvalidArgumentError

# Tensors this small only wait for torch's other threads.
torch.set_num_threads(1)

CLASSES, DIM, BATCH = 12, 5, 4


def drawn(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def total(terms: list[float]) -> float:
    return math.log(sum(math.exp(term) for term in terms))


def in_batch_formula(queries, items, log_q, ids, weights, temperature):
    """Section 3 of Yi et al., sample by sample, without what is the same item."""
    found = 0.0
    for i in range(len(queries)):

        def score(j, i=i):
            return float(queries[i] @ items[j]) / temperature - float(log_q[j])

        others = [j for j in range(len(items)) if j == i or ids[j] != ids[i]]
        chance = score(i) - total([score(j) for j in others])
        found -= float(weights[i]) * chance
    return found / len(queries)


@pytest.mark.parametrize("more", [0, 3])
def test_in_batch_softmax_is_its_formula(more: int) -> None:
    queries, items = drawn(1, BATCH, DIM), drawn(2, BATCH + more, DIM)
    log_q, weights = drawn(3, BATCH + more), drawn(4, BATCH).abs()
    ids = torch.tensor([7, 3, 7, 8, 3, 9, 7])[: BATCH + more]
    expected = in_batch_formula(queries, items, log_q, ids, weights, 0.7)
    given = {"log_q": log_q, "ids": ids, "weights": weights, "temperature": 0.7}
    found = losses.in_batch_softmax(queries, items, **given)
    assert found.item() == pytest.approx(expected, rel=1e-12)
    each = losses.in_batch_softmax(queries, items, **given, reduction="none")
    assert each.shape == (BATCH,)
    summed = losses.in_batch_softmax(queries, items, **given, reduction="sum")
    assert each.sum().item() == pytest.approx(summed.item(), rel=1e-12)
    assert summed.item() == pytest.approx(BATCH * expected, rel=1e-12)
    moved = losses.in_batch_softmax(queries, items, **given | {"log_q": log_q + 5})
    assert moved.item() == pytest.approx(expected, rel=1e-12)


def test_gradients_are_those_of_differences() -> None:
    queries = drawn(1, BATCH, DIM).requires_grad_()
    items = drawn(2, BATCH + 2, DIM).requires_grad_()
    log_q, ids = drawn(3, BATCH + 2), torch.tensor([1, 2, 1, 3, 2, 4])
    weights = drawn(4, BATCH).abs().requires_grad_()

    def in_batch(queries, items, weights):
        given = {"log_q": log_q, "ids": ids, "weights": weights}
        return losses.in_batch_softmax(queries, items, **given, temperature=0.5)

    assert torch.autograd.gradcheck(in_batch, (queries, items, weights))
    weight, bias = drawn(5, CLASSES, DIM), drawn(6, CLASSES, 1)
    targets = torch.tensor([0, 3, 3, 11])
    sampler = losses.LogUniformSampler(CLASSES, seed=1)
    negatives = sampler.draw(9, targets, unique=False)
    assert len(negatives.ids.unique()) < 9  # a row has several gradients
    assert (negatives.ids[None] == targets[:, None]).any()

    def sampled(hidden, weight, bias):
        return losses.sampled_softmax(
            hidden, lambda i: weight[i], targets, negatives, bias=lambda i: bias[i]
        )

    inputs = [one.requires_grad_() for one in (queries.detach(), weight, bias)]
    assert torch.autograd.gradcheck(sampled, inputs)


@pytest.mark.parametrize("remove", [True, False])
def test_sampled_softmax_is_its_formula(remove: bool) -> None:
    hidden, weight, bias = drawn(1, BATCH, DIM), drawn(2, CLASSES, DIM), drawn(3, 12, 1)
    targets, ids = torch.tensor([0, 3, 3, 11]), torch.tensor([3, 1, 3, 11, 5])
    counts, of_targets = drawn(4, 5), drawn(5, BATCH)
    expected = 0.0
    for i, target in enumerate(targets.tolist()):

        def score(c, i=i):
            return float(hidden[i] @ weight[c] + bias[c, 0])

        near = score(target) - float(of_targets[i])
        far = [
            score(c) - float(counts[n])
            for n, c in enumerate(ids.tolist())
            if c != target or not remove
        ]
        expected += (total([near, *far]) - near) / BATCH
    found = losses.sampled_softmax(
        hidden,
        lambda i: weight[i],
        targets,
        losses.Negatives(ids, counts, of_targets),
        bias=lambda i: bias[i],
        remove_accidental_hits=remove,
    )
    assert found.item() == pytest.approx(expected, rel=1e-12)


def test_with_all_classes_it_is_the_whole_softmax() -> None:
    hidden, weight = drawn(1, BATCH, DIM), drawn(2, CLASSES, DIM)
    targets = torch.tensor([0, 3, 3, 11])
    sampler = losses.UnigramSampler(torch.ones(CLASSES), seed=1)
    negatives = sampler.draw(CLASSES, targets)
    negatives = negatives._replace(
        log_counts=torch.zeros(CLASSES), target_log_counts=torch.zeros(BATCH)
    )
    found = losses.sampled_softmax(hidden, lambda i: weight[i], targets, negatives)
    expected = F.cross_entropy(hidden @ weight.T, targets)
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)


def test_the_table_has_a_sparse_gradient_of_the_rows_that_were_looked_up() -> None:
    table = nn.Embedding(CLASSES, DIM, sparse=True, dtype=torch.float64)
    calls = []
    table.register_forward_hook(lambda module, ids, rows: calls.append(ids[0]))
    hidden, targets = drawn(1, BATCH, DIM), torch.tensor([0, 3, 3, 11])
    negatives = losses.LogUniformSampler(CLASSES, seed=2).draw(3, targets)
    losses.sampled_softmax(hidden, table, targets, negatives).backward()
    assert len(calls) == 1  # one pull
    gradient = table.weight.grad
    assert gradient.is_sparse
    looked_up = {*targets.tolist(), *negatives.ids.tolist()}
    assert set(gradient.coalesce().indices()[0].tolist()) == looked_up
    plain = table.weight.detach().clone().requires_grad_()
    losses.sampled_softmax(hidden, lambda i: plain[i], targets, negatives).backward()
    torch.testing.assert_close(gradient.to_dense(), plain.grad)


def test_more_different_negatives_come_closer_to_the_whole_softmax() -> None:
    classes = 200
    hidden, weight = drawn(1, 64, DIM), drawn(2, classes, DIM)
    sampler = losses.LogUniformSampler(classes, seed=3)
    targets = torch.randint(classes, (64,), generator=torch.Generator().manual_seed(1))
    whole = F.cross_entropy(hidden @ weight.T, targets).item()

    def off(count: int) -> float:
        negatives = sampler.draw(count, targets)
        found = losses.sampled_softmax(hidden, lambda i: weight[i], targets, negatives)
        return abs(found.item() - whole)

    assert off(199) < 0.02 < 0.2 < off(20)


def scores_learned(
    loss: Callable[[nn.Embedding, torch.Tensor], torch.Tensor], chances: torch.Tensor
) -> torch.Tensor:
    """One score per class, when classes come with these chances; about their mean."""
    draws = torch.Generator().manual_seed(1)
    table = nn.Embedding(len(chances), 1)
    nn.init.zeros_(table.weight)
    optimizer = torch.optim.Adam(table.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, 400)
    for _ in range(400):
        targets = torch.multinomial(chances, 256, replacement=True, generator=draws)
        optimizer.zero_grad()
        loss(table, targets).backward()
        optimizer.step()
        schedule.step()
    found = table.weight.detach()[:, 0]
    return found - found.mean()


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("kind", ["in_batch", "sampled"])
def test_corrected_scores_are_those_of_the_whole_softmax(
    kind: str, corrected: bool
) -> None:
    """That learns log P of each class; without the correction log(P / Q) is learned."""
    classes = 60
    chances = torch.arange(1, classes + 1) ** -0.5 / 14.2
    sampler = losses.LogUniformSampler(classes, seed=3)
    if kind == "in_batch":
        drawn_with = chances.log()  # a batch is drawn as targets are
    else:
        chances = chances.flip(0)
        drawn_with = sampler.draw(15, torch.arange(classes)).target_log_counts.float()

    def in_batch(table: nn.Embedding, targets: torch.Tensor) -> torch.Tensor:
        log_q = drawn_with[targets] if corrected else None
        ones = torch.ones(len(targets), 1)
        return losses.in_batch_softmax(ones, table(targets), log_q=log_q)

    def sampled(table: nn.Embedding, targets: torch.Tensor) -> torch.Tensor:
        negatives = sampler.draw(15, targets)
        if not corrected:
            negatives = negatives._replace(
                log_counts=torch.zeros(15), target_log_counts=torch.zeros(len(targets))
            )
        ones = torch.ones(len(targets), 1)
        return losses.sampled_softmax(ones, table, targets, negatives)

    found = scores_learned(in_batch if kind == "in_batch" else sampled, chances)
    expected = chances.log() - (0.0 if corrected else drawn_with)
    expected = expected - expected.mean()
    other = chances.log() - (drawn_with if corrected else 0.0)
    away = (found - expected).square().mean().sqrt()
    assert away < 0.25
    assert (found - other + other.mean()).square().mean().sqrt() > 0.4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_low_precision_is_summed_in_float32(dtype: torch.dtype) -> None:
    queries, items = drawn(1, BATCH, DIM).to(dtype), drawn(2, BATCH, DIM).to(dtype)
    found = losses.in_batch_softmax(queries, items)
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    exact = losses.in_batch_softmax(queries.double(), items.double())
    assert found.item() == pytest.approx(exact.item(), rel=0.02)


def test_autocast_changes_no_score() -> None:
    queries, items = drawn(1, BATCH, DIM).float(), drawn(2, BATCH, DIM).float()
    table = nn.Embedding(CLASSES, DIM, sparse=True)
    targets = torch.arange(BATCH)
    negatives = losses.LogUniformSampler(CLASSES, seed=1).draw(6, targets)

    def both() -> list[torch.Tensor]:
        return [
            losses.in_batch_softmax(queries, items, temperature=0.05),
            losses.sampled_softmax(queries, table, targets, negatives),
        ]

    exact = both()
    with torch.autocast("cpu", torch.bfloat16):
        found = both()
    assert [one.dtype for one in found] == [torch.float32] * 2
    assert found == exact


def test_an_empty_batch_has_no_loss_and_no_gradient() -> None:
    queries = torch.zeros(0, DIM, requires_grad=True)
    losses.in_batch_softmax(queries, torch.zeros(0, DIM)).backward()
    assert queries.grad.shape == (0, DIM)
    table = nn.Embedding(CLASSES, DIM, sparse=True)
    nobody = torch.zeros(0, dtype=torch.int64)
    negatives = losses.LogUniformSampler(CLASSES, seed=1).draw(3, nobody)
    loss = losses.sampled_softmax(torch.zeros(0, DIM), table, nobody, negatives)
    loss.backward()
    assert loss.item() == 0
    assert not table.weight.grad.to_dense().any()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"items": torch.zeros(3, DIM)}, "an item for each of 4 queries"),
        ({"items": torch.zeros(4, 2)}, r"items: expected .* \[any, 5\], got \[4, 2\]"),
        ({"queries": torch.zeros(4)}, r"queries: expected .* \[any, any\], got \[4\]"),
        ({"log_q": torch.zeros(3)}, r"log_q: expected .* \[4\], got \[3\]"),
        ({"ids": torch.zeros(4)}, "ids: expected int64 ids, got torch.float32"),
        ({"weights": torch.zeros(5)}, r"weights: expected .* \[4\], got \[5\]"),
        ({"temperature": 0.0}, "temperature must be above 0, got 0.0"),
        ({"reduction": "max"}, "one of mean, sum, none, got 'max'"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict, words: str) -> None:
    given = {"queries": torch.zeros(4, DIM), "items": torch.zeros(4, DIM)} | changed
    with pytest.raises(InvalidArgumentError, match=words):
        losses.in_batch_softmax(given.pop("queries"), given.pop("items"), **given)


def test_a_table_of_another_shape_is_refused() -> None:
    hidden, targets = torch.zeros(BATCH, DIM), torch.zeros(BATCH, dtype=torch.int64)
    negatives = losses.LogUniformSampler(CLASSES, seed=1).draw(3, targets)
    with pytest.raises(InvalidArgumentError, match=r"table: expected .* \[7, 5\]"):
        losses.sampled_softmax(hidden, nn.Embedding(CLASSES, 2), targets, negatives)
    table = nn.Embedding(CLASSES, DIM)
    with pytest.raises(InvalidArgumentError, match=r"bias: expected .* \[7, 1\]"):
        losses.sampled_softmax(hidden, table, targets, negatives, bias=table)
    short = negatives._replace(target_log_counts=torch.zeros(2))
    with pytest.raises(InvalidArgumentError, match=r"target_log_counts: .* \[4\]"):
        losses.sampled_softmax(hidden, table, targets, short)

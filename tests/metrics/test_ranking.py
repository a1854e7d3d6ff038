# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Metrics within groups, and normalised entropy, against others' and plain formulas."""

from __future__ import annotations

import itertools
import math
import re

import numpy as np
import pytest
import torch
from lazily import Lazily
from metrics_cases import grouped_part, ranked

import torch_cpudist as cpudist

METRICS = cpudist.metrics
RNG = np.random.default_rng
SKLEARN = Lazily("sklearn.metrics")
TORCHMETRICS = Lazily("torchmetrics.retrieval")


def within_groups(p, y, groups, value):
    """What a function finds in every group, and the sizes of those where it does."""
    found = []
    for group in np.unique(groups):
        mine = groups == group
        one = value(p[mine], y[mine])
        if not math.isnan(one):
            found.append((one, mine.sum()))
    return np.array(found).T


def updated(metric, *given, parts=1, **named):
    """The metric after samples in so many batches."""
    for i in range(parts):
        of = [a[i::parts] for a in given]
        metric.update(*of, **{name: a[i::parts] for name, a in named.items()})
    return metric


@pytest.mark.parametrize("ties", [False, True])
def test_gauc_is_the_mean_of_groups_that_scikit_learn_finds(ties):
    p, y, groups = grouped_part(0)
    p = np.round(p, 1) if ties else p

    def auc(scores, labels):
        both = 0 < labels.sum() < len(labels)
        return SKLEARN.roc_auc_score(labels, scores) if both else math.nan

    values, sizes = within_groups(p, y, groups, auc)
    assert 0 < len(values) < len(np.unique(groups))  # some have one label only
    found = updated(METRICS.GAUC(), p, y, groups=groups, parts=7)
    assert found.compute() == pytest.approx((values * sizes).sum() / sizes.sum())
    # Any scores of that order.
    logits = torch.from_numpy(np.log(p + 0.01) * 3)
    other = METRICS.GAUC()
    other.update(logits, torch.from_numpy(y) > 0, groups=torch.from_numpy(groups))
    assert other.compute() == found.compute()


def test_gauc_takes_weights():
    p, y, groups = grouped_part(1)
    w = RNG(5).integers(0, 4, len(p))
    whole = METRICS.GAUC()
    whole.update(p, y, w, groups=groups)
    repeated = [np.repeat(a, w) for a in (p, y, groups)]
    expected = updated(METRICS.GAUC(), *repeated[:2], groups=repeated[2])
    assert whole.compute() == expected.compute()
    halves = METRICS.GAUC()
    halves.update(p, y, w * 0.3, groups=groups)
    assert halves.compute() == pytest.approx(expected.compute(), rel=1e-12)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("k", [1, 3, 10, 1000])
def test_ndcg_is_the_mean_of_groups_that_scikit_learn_finds(k, ties):
    p, y, groups = grouped_part(2)
    p = np.round(p, 1) if ties else p
    gains = y * RNG(3).integers(1, 4, len(y))

    def ndcg(scores, labels):
        if not labels.any():
            return math.nan
        if len(labels) == 1:
            return 1.0  # which scikit-learn refuses to say
        return SKLEARN.ndcg_score(labels[None], scores[None], k=k)

    values, _ = within_groups(p, gains, groups, ndcg)
    assert 0 < len(values) < len(np.unique(groups))
    found = updated(METRICS.NDCG(k), p, gains, groups=groups, parts=3)
    assert found.compute() == pytest.approx(values.mean(), rel=1e-12)


@pytest.mark.integrations
@pytest.mark.parametrize("k", [1, 4, 50])
def test_recall_and_ndcg_are_those_of_torchmetrics(k):
    p, y, groups = grouped_part(3)
    given = torch.from_numpy(p), torch.from_numpy(y).long()
    indexes = torch.from_numpy(groups)
    for mine, theirs in (
        (METRICS.Recall(k), TORCHMETRICS.RetrievalRecall),
        (METRICS.NDCG(k), TORCHMETRICS.RetrievalNormalizedDCG),
    ):
        other = theirs(empty_target_action="skip", top_k=k)
        other.update(*given, indexes=indexes)
        found = updated(mine, *given, groups=indexes, parts=4)
        assert found.compute() == pytest.approx(float(other.compute()), rel=1e-5)


def test_of_equal_scores_recall_is_the_mean_over_all_orders():
    scores, labels = [0.9, 0.5, 0.5, 0.5, 0.1], [1, 0, 1, 1, 1]
    found = []
    for order in itertools.permutations(range(5)):
        if [scores[i] for i in order] == scores:
            found.append([sum(labels[i] for i in order[:k]) / 4 for k in range(1, 6)])
    assert len(found) == 6
    for k, expected in enumerate(np.mean(found, axis=0), 1):
        metric = METRICS.Recall(k)
        metric.update(scores, labels, groups=[7] * 5)
        assert metric.compute() == pytest.approx(expected, rel=1e-15)


def test_any_split_has_the_same_bits_and_so_has_a_share_of_the_groups():
    p, y, groups = grouped_part(4)
    gains = y * 2
    for samples in (1 << 20, 1 << 9):
        make = {
            "gauc": METRICS.GAUC(samples=samples),
            "ndcg": METRICS.NDCG(5, samples=samples),
            "recall": METRICS.Recall(5, samples=samples),
        }
        for name, metric in make.items():
            labels = gains if name == "ndcg" else y
            whole = updated(metric, p, labels, groups=groups)
            assert (whole.kept_share() < 1) == (samples < len(p))
            order = RNG(9).permutation(len(p))
            merged = whole.empty()
            for rank in range(3):
                one, mine = whole.empty(), order[rank::3]
                updated(one, p[mine], labels[mine], groups=groups[mine], parts=5)
                merged.merge(one)
            assert merged.compute() == whole.compute()
            assert merged.kept_share() == whole.kept_share()
            assert merged.standard_error() == whole.standard_error()
            again = whole.empty()
            again.load_state_dict(whole.state_dict())
            assert again.compute() == whole.compute()


def test_beyond_what_is_kept_it_is_near_and_says_how_near(caplog):
    p, y, groups = grouped_part(0, users=4000, most=9)
    exact = updated(METRICS.GAUC(), p, y, groups=groups)
    assert exact.standard_error() == 0
    assert exact.kept_share() == 1
    assert not caplog.records
    few = updated(METRICS.GAUC(samples=len(p) // 5), p, y, groups=groups, parts=3)
    assert few.kept_share() == 1 / 8
    assert 0.005 < few.standard_error() < 0.05
    assert abs(few.compute() - exact.compute()) < 4 * few.standard_error()
    assert [record.message for record in caplog.records] == [
        f"GAUC(samples={len(p) // 5}): more distinct samples than it may keep: from "
        "now on its value is that of a share of the groups, chosen by hash "
        "(kept_share(), standard_error()). samples= keeps more."
    ]
    # One group of more than that cannot be kept.
    one = METRICS.Recall(3, samples=16)
    one.update(np.arange(17), np.ones(17), groups=np.zeros(17, int))
    assert math.isnan(one.compute())
    assert math.isnan(one.standard_error())


def test_where_no_group_has_a_value_it_is_nan():
    for metric in (METRICS.GAUC(), METRICS.NDCG(2), METRICS.Recall(2)):
        assert math.isnan(metric.compute())
        metric.update([0.1, 0.2], [0, 0], groups=[1, 2])
        assert math.isnan(metric.compute())
        metric.update([], [], groups=[])
        metric.update([0.3, 0.2], [1, 0], groups=[3, 3])
        assert metric.compute() == 1
        metric.reset()
        assert math.isnan(metric.compute())


def test_groups_are_any_whole_numbers():
    far = np.array([-(2**63), 2**63 - 1, 2**53, 2**53 + 1])
    # The highest one of each pair is the wrong one, but for the last pair.
    p = [[0.2, 0.1], [0.2, 0.1], [0.2, 0.1], [0.1, 0.2]]
    y = [[0, 1]] * 4
    found = METRICS.GAUC()
    found.update(p, y, groups=np.stack([far, far], axis=1))
    assert found.compute() == 0.25
    named = METRICS.GAUC()
    keys = cpudist.hash_keys(["ann", "ann", "bob", "bob"])
    named.update([1.0, 2.0, 1.0, 2.0], [0, 1, 1, 0], groups=keys)
    assert named.compute() == 0.5


def test_normalised_entropy_is_the_formula():
    p, y, _ = grouped_part(1)
    rate = y.mean()
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
    found = updated(METRICS.NormalizedEntropy(), p, y, parts=3)
    assert found.compute() == pytest.approx(SKLEARN.log_loss(y, p) / entropy)
    same = METRICS.NormalizedEntropy()
    same.update(np.full(len(y), rate), y)
    assert same.compute() == pytest.approx(1, rel=1e-12)
    logits = METRICS.NormalizedEntropy(from_logits=True)
    logits.update(np.log(p / (1 - p)), y)
    assert logits.compute() == pytest.approx(found.compute(), rel=1e-9)
    w = RNG(2).integers(0, 3, len(p))
    weighted, repeated = METRICS.NormalizedEntropy(), METRICS.NormalizedEntropy()
    weighted.update(p, y, w)
    repeated.update(np.repeat(p, w), np.repeat(y, w))
    assert weighted.compute() == repeated.compute()
    again = found.empty()
    assert math.isnan(again.compute())
    again.merge(found)
    assert again.compute() == found.compute()
    one = METRICS.NormalizedEntropy()
    one.update([0.5, 0.4], [1, 1])
    assert math.isnan(one.compute())


@pytest.mark.parametrize(
    ("metric", "given", "groups", "message"),
    [
        (METRICS.GAUC(), ([0.1], [0]), None, "need the group of each sample"),
        (METRICS.GAUC(), ([0.1], [0]), [1, 2], "groups (2,)"),
        (METRICS.GAUC(), ([0.1], [0]), [1.0], "whole numbers, found float64"),
        (METRICS.GAUC(), ([0.1], [0]), ["a"], "hash_keys makes them of texts"),
        (METRICS.GAUC(), ([0.1], [0]), torch.ones(1), "found torch.float32"),
        (METRICS.GAUC(), ([0.1], [0.5]), [1], "labels must be 0 or 1"),
        (METRICS.GAUC(), ([math.inf], [0]), [1], "predictions must be finite"),
        (METRICS.NDCG(3), ([0.1], [-1]), [1], "gains, at least 0; found -1.0"),
        (METRICS.NDCG(3), ([0.1], [1], [2]), [1], "NDCG(k=3, samples=1048576) has no"),
        (METRICS.Recall(3), ([0.1], [2]), [1], "labels must be 0 or 1"),
        (METRICS.NormalizedEntropy(), ([1.5], [1]), None, "Pass from_logits"),
        (METRICS.NormalizedEntropy(), ([0.5], [1]), [1], "knows no groups"),
    ],
)
def test_what_has_no_order_is_refused(metric, given, groups, message):
    with pytest.raises(cpudist.InvalidArgumentError, match=re.escape(message)):
        metric.update(*given, groups=groups)
    assert math.isnan(metric.compute())


def test_options_and_states_of_others_are_refused():
    for make in (
        lambda: METRICS.GAUC(samples=8),
        lambda: METRICS.NDCG(0),
        lambda: METRICS.NDCG(True),
        lambda: METRICS.Recall(2.0),
        lambda: METRICS.Recall(3, samples=1 << 40),
        lambda: METRICS.GAUC().merge(METRICS.GAUC(samples=16)),
        lambda: METRICS.Recall(3).merge(METRICS.Recall(4)),
    ):
        with pytest.raises(cpudist.InvalidArgumentError):
            make()
    p, y, groups = grouped_part(0)
    good = updated(METRICS.GAUC(samples=64), p, y, groups=groups)
    words = good.packed()
    value, share = good.compute(), good.kept_share()
    assert share < 1
    more = words.copy()
    more[0] += 1  # what it has would not be kept at that level
    for damaged in (words[:0], words[:-1], words[::-1].copy(), more):
        with pytest.raises(cpudist.InvalidArgumentError, match="not the state of"):
            good.merge_packed(damaged)
    assert (good.compute(), good.kept_share()) == pytest.approx(
        (value, share), nan_ok=1
    )


def test_a_collection_gives_groups_to_those_that_have_them():
    p, y, groups = grouped_part(0)
    found = ranked()
    assert found.grouped
    with pytest.raises(cpudist.InvalidArgumentError, match="need the group"):
        found.update(p, y)
    assert all(math.isnan(value) for value in found.compute().values())
    found.update(p, y, groups=groups)
    assert found["gauc"].compute() != found["auc"].compute()
    plain = METRICS.Metrics({"auc": METRICS.AUC()})
    with pytest.raises(cpudist.InvalidArgumentError, match="knows no groups"):
        plain.update(p, y, groups=groups)


def test_the_loop_over_a_dataset_hands_groups_on():
    p, y, groups = grouped_part(0)
    batches = [(p[:300], y[:300], groups[:300]), (p[300:], y[300:], groups[300:])]

    def step(batch):
        return dict(zip(("predictions", "labels", "groups"), batch, strict=True))

    expected = ranked()
    expected.update(p, y, groups=groups)
    count = {"count_samples": lambda batch: len(batch[0]), "print_every": None}
    run = cpudist.infer_from_dataset(step, batches, metrics=ranked(), **count)
    assert run.metrics == expected.compute()
    # Metrics without groups do not mind them.
    run = cpudist.infer_from_dataset(step, batches, metrics=METRICS.AUC(), **count)
    assert run.metrics["AUC"] == expected["auc"].compute()

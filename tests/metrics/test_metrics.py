# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``cpudist.metrics``: values against scikit-learn, splits, threads, states, errors."""

from __future__ import annotations

import importlib
import math
import re
import signal
import threading

import numpy as np
import pytest
import torch
from metrics_cases import (
    collection,
    flat,
    grouped_part,
    over_trainers,
    part_of,
    ranked,
    samples,
)
from patience import PATIENCE_S
from sync_cases import ONE_THREAD
from sync_cases import run as run_trainers

import torch_cpudist as cpudist
from torch_cpudist import testing
from torch_cpudist.metrics.exact import ExactSum

METRICS = cpudist.metrics
RNG = np.random.default_rng


@pytest.fixture(scope="module")
def reference():
    """scikit-learn's metrics: loaded where they are needed, not by every worker."""
    return importlib.import_module("sklearn.metrics")


def narrow(n):
    return RNG(0).uniform(0.02, 0.0201, n)


def rare(n):  # click rates of one in a thousand
    return np.clip(RNG(1).lognormal(-7.2, 0.8, n), 0, 1)


def tied(n):
    return RNG(2).integers(0, 7, n) / 10


def steep(n):
    return RNG(3).uniform(-50, 50, n)


def near_one(n):
    return 1 - 2.0 ** RNG(4).uniform(-40, -1, n)


def both_signs(n):
    return RNG(5).normal(0, 1, n) ** 3


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("make", [narrow, rare, tied, steep, near_one, both_signs])
def test_auc_is_that_of_scikit_learn(make, dtype, reference):
    n = 60_000
    scores = make(n).astype(dtype)
    wide = scores.astype(np.float64)
    # Half of the order is planted, so that the value is far from 0.5 and from 1.
    rank = np.argsort(np.argsort(wide)) / n
    rate = 0.001 if make is rare else 0.3
    labels = RNG(6).uniform(size=n) < rate * (0.2 + 1.6 * rank)
    expected = reference.roc_auc_score(labels, wide)
    assert 0.55 < expected < 0.9
    for buckets, error in ((1 << 18, 1e-12), (1 << 14, 2e-5)):
        found = METRICS.AUC(from_logits=any(wide < 0), buckets=buckets)
        for begin in range(0, n, 25_000):
            part = slice(begin, begin + 25_000)
            found.update(torch.from_numpy(scores[part]), torch.from_numpy(labels[part]))
        assert found.compute() == pytest.approx(expected, abs=error)
        assert abs(found.compute() - expected) <= found.error_bound() + 1e-12
        assert found.error_bound() < 1e-4 or buckets < 1 << 18


def test_auc_where_every_bucket_is_the_worst_one(reference):
    # Labels alternate from one score to the next: sharing a bucket costs all it can.
    n = 1 << 19
    scores = 0.02 + np.arange(n) * 1e-4 / n
    labels = np.arange(n) % 2
    found = METRICS.AUC()
    found.update(scores, labels)
    expected = reference.roc_auc_score(labels, scores)
    assert abs(found.compute() - expected) <= found.error_bound() < 1e-4
    few = METRICS.AUC(buckets=64)
    few.update(scores, labels)
    assert few.error_bound() > 1e-3
    assert abs(few.compute() - expected) <= few.error_bound()


def test_auc_of_equal_scores_and_of_one_label(reference):
    same = METRICS.AUC()
    same.update(torch.full((1000,), 0.5), torch.arange(1000) % 10 == 0)
    assert same.compute() == 0.5
    one = METRICS.AUC()
    assert math.isnan(one.compute())
    one.update([0.1, 0.9], [1, 1])
    assert math.isnan(one.compute())
    assert math.isnan(one.error_bound())
    one.update([0.5], [0])
    assert one.compute() == 0.5
    exact = METRICS.AUC(from_logits=True)
    exact.update([-1.0, -0.0, 0.0, 2.0], [0, 1, 0, 1])
    assert exact.compute() == reference.roc_auc_score([0, 1, 0, 1], [-1, 0, 0, 2])


def test_weights_count_as_samples(reference):
    p, y, w = samples(5000)
    whole = np.ceil(4 * w)
    found, repeated = collection(), collection()
    found.update(p, y, whole)
    times = whole.astype(int)
    repeated.update(np.repeat(p, times), np.repeat(y, times))
    values, other = found.compute(), repeated.compute()
    assert values.pop("calibration").copc == pytest.approx(other["calibration"].copc)
    assert all(values[name] == pytest.approx(other[name]) for name in values)
    assert values["auc"] == other["auc"]
    found.reset()
    found.update(p, y, w)
    values = found.compute()
    expected = reference.roc_auc_score(y, p, sample_weight=w)
    assert values["auc"] == pytest.approx(expected, abs=1e-9)
    expected = reference.log_loss(y, p, sample_weight=w)
    assert values["loss"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_means_are_those_of_scikit_learn(dtype, reference):
    given, y, _ = samples(20_000)
    p = torch.from_numpy(given).to(dtype)[:, None]
    found = collection()
    found.update(p, torch.from_numpy(y))
    values = found.compute()
    plain = p.double().numpy()[:, 0]
    assert values["loss"] == pytest.approx(reference.log_loss(y, plain), rel=1e-9)
    assert values["mae"] == pytest.approx(reference.mean_absolute_error(y, plain))
    assert values["mse"] == pytest.approx(reference.mean_squared_error(y, plain))
    assert values["rmse"] == math.sqrt(values["mse"])
    assert values["accuracy"] == reference.accuracy_score(y, plain >= 0.5)
    report = values["calibration"]
    assert report.calibration == pytest.approx(plain.sum() / y.sum())
    assert report.copc == pytest.approx(y.sum() / plain.sum())
    assert report.predicted_ctr == pytest.approx(plain.mean())
    assert report.actual_ctr == y.mean()
    assert report.samples == len(y)


def test_logits_equal_their_probabilities(reference):
    z = RNG(0).normal(0, 4, 10_000)
    y = RNG(1).uniform(size=len(z)) < 0.3
    logits, plain = collection({}, from_logits=True), collection()
    logits.update(z, y)
    plain.update(1 / (1 + np.exp(-z)), y)
    found, expected = logits.compute(), plain.compute()
    report, other = found.pop("calibration"), expected.pop("calibration")
    assert found == pytest.approx(expected, rel=1e-9)
    assert report.copc == pytest.approx(other.copc, rel=1e-12)
    far = METRICS.LogLoss(from_logits=True)
    far.update([-800.0, 800.0], [1, 1])
    assert far.compute() == 400.0
    sure = METRICS.LogLoss()
    sure.update(torch.tensor([1.0]), [0])
    expected = reference.log_loss([0], np.array([1.0], np.float32), labels=[0, 1])
    assert sure.compute() == pytest.approx(expected)


def test_accuracy_of_classes():
    found = METRICS.Accuracy(threshold=None)
    found.update(torch.tensor([2, 0, 1, 1]), torch.tensor([2, 0, 0, 1]))
    assert found.compute() == 0.75


def test_the_error_of_groups_that_are_predicted_alike():
    n = 200_000
    p = RNG(0).uniform(0.05, 0.5, n)
    y = RNG(1).uniform(size=n) < p
    good, twice, few = (METRICS.Calibration() for _ in range(3))
    good.update(p, y)
    twice.update(p / 2, y)
    few.update([0.001] * 10, [0] * 10)
    assert good.compute().bucket_error < 0.05
    assert good.compute().copc == pytest.approx(1, abs=0.02)
    assert twice.compute().bucket_error == pytest.approx(1.0, abs=0.1)
    assert twice.compute().calibration == pytest.approx(0.5, abs=0.01)
    # Nothing is known of rates so low from ten samples.
    assert math.isnan(few.compute().bucket_error)


def test_any_split_gives_the_same_bits():
    p, y, _ = samples(100_000)
    few = {"buckets": 1 << 10}
    whole = collection(few)
    whole.update(p, y)
    expected = whole.compute()
    rounding = expected.pop("calibration").bucket_error
    assert whole["auc"].error_bound() > 0
    order = RNG(9).permutation(len(p))
    for parts in (2, 7):
        merged = collection(few)
        for rank in range(parts):
            one = collection(few)
            for mine in np.array_split(order[rank::parts], 5):
                one.update(p[mine], y[mine])
            merged.merge(one)
        found = merged.compute()
        assert found.pop("calibration").bucket_error == pytest.approx(rounding, 1e-9)
        assert found == expected


def test_threads_update_at_once():
    p, y, _ = samples(20_000)
    found, expected = collection(), collection()
    expected.update(p, y)

    def work(rank):
        for begin in range(rank * 100, len(p), 400):
            found.update(p[begin : begin + 100], y[begin : begin + 100])

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert found["auc"].compute() == expected["auc"].compute()
    assert found["mse"].compute() == expected["mse"].compute()


def test_state_is_saved_and_loaded(tmp_path):
    found = collection()
    found.update(*part_of(0))
    torch.save(found.state_dict(), tmp_path / "metrics.pt")
    state = torch.load(tmp_path / "metrics.pt", weights_only=True)
    loaded = collection()
    loaded.update(*part_of(1))
    loaded.load_state_dict(state)
    assert loaded.compute() == found.compute()
    loaded.update(*part_of(1))
    found.update(*part_of(1))
    assert loaded.compute() == found.compute()
    found.reset()
    assert all(math.isnan(found[name].compute()) for name in ("auc", "loss", "rmse"))

    for damaged in (
        {"metric": repr(METRICS.AUC()), "words": state["words"]},
        {"metric": repr(loaded), "words": state["words"][:-1]},
        {"metric": repr(loaded), "words": state["words"].flip(0)},
        {"metric": repr(loaded), "words": state["words"].float()},
    ):
        before = loaded.compute()
        with pytest.raises(cpudist.InvalidArgumentError):
            loaded.load_state_dict(damaged)
        assert loaded.compute() == before
    with pytest.raises(cpudist.InvalidArgumentError, match="cannot take"):
        loaded.merge(METRICS.AUC())
    with pytest.raises(cpudist.InvalidArgumentError, match="cannot take"):
        METRICS.AUC().merge(METRICS.AUC(buckets=64))


@pytest.mark.parametrize(
    ("metric", "given", "message"),
    [
        ("AUC", ([0.1, 0.2], [0]), r"shape (2,), labels (1,)"),
        ("AUC", (torch.ones(2, 3) / 2, torch.ones(3, 2)), "shape (2, 3)"),
        ("AUC", ([0.1], [0], [1, 2]), "weights (2,)"),
        ("AUC", ([0.1, 0.2], [0, 2]), "must be 0 or 1; found 2.0 at position 1"),
        ("AUC", ([0.1, 0.2], [0, 0.5]), "must be 0 or 1; found 0.5"),
        ("AUC", ([0.1, math.nan], [0, 1]), "predictions must be finite; found nan"),
        ("MAE", ([0.1], [math.inf]), "labels must be finite"),
        ("AUC", ([0.1, 1.5], [0, 1]), "found 1.5 at position 1. Pass from_logits"),
        ("LogLoss", ([-0.1], [0]), "probabilities"),
        ("LogLoss", ([0.1], [1.2]), "in 0 to 1"),
        ("Calibration", ([0.1], [-1]), "in 0 to 1"),
        ("Accuracy", ([3.0], [1]), "probabilities"),
        ("MSE", ([0.1], [0], [-1]), "weights must be at least 0; found -1.0"),
        ("MSE", ([1e300], [0]), "beyond float64"),
        ("MAE", (["a"], [0]), "must be numbers"),
        ("MAE", (torch.ones(1, dtype=torch.complex64), [0]), "real"),
    ],
)
def test_what_cannot_be_measured_is_refused(metric, given, message):
    found = getattr(METRICS, metric)()
    both = METRICS.Metrics({"mae": METRICS.MAE(), "other": found})
    with pytest.raises(cpudist.InvalidArgumentError, match=re.escape(message)):
        both.update(*given)
    assert math.isnan(both["mae"].compute())  # nothing was added anywhere


def test_options_are_checked():
    for make in (
        lambda: METRICS.AUC(buckets=8),
        lambda: METRICS.AUC(buckets=1e5),
        lambda: METRICS.AUC(from_logits=1),
        lambda: METRICS.Accuracy(threshold=2),
        lambda: METRICS.Accuracy(threshold=None, from_logits=True),
        lambda: METRICS.Metrics({}),
        lambda: METRICS.Metrics({"a": 1}),
        lambda: METRICS.Metrics(dict.fromkeys("ab", METRICS.AUC())),
    ):
        with pytest.raises(cpudist.InvalidArgumentError):
            make()


def test_sums_do_not_round():
    values = np.array([1e308, 1.0, 5e-324, -1e308, 2.0**-1000, -1.0, 3.5])
    total = ExactSum()
    for part in (values[:3], values[3:]):
        total.add(part)
    assert float(total) == math.fsum(values) == 3.5
    total.add(np.full(1000, 0.1))
    assert float(total) == math.fsum([*values, *[0.1] * 1000])
    again = ExactSum()
    again.merge(total.pack())
    assert again.units == total.units


@pytest.mark.processes
def test_without_other_trainers_all_is_this_one():
    found = collection()
    found.update(*part_of(0))
    assert found.compute_all() == found.compute()
    cpudist.init(variables={})
    try:
        assert found.compute_all() == found.compute()
    finally:
        cpudist.shutdown()
    assert found.compute_all() == found.compute()


def test_sums_over_trainers():
    whole, squares = collection({"buckets": 1 << 10}), METRICS.MSE()
    within = ranked()
    for rank in (0, 2):
        whole.update(*part_of(rank))
    for rank in range(3):
        squares.update(*part_of(rank))
        p, y, groups = grouped_part(rank)
        within.update(p, y, groups=groups)
    with testing.ProcessRanks(over_trainers, 3, variables=ONE_THREAD) as ranks:
        found = [ranks.expect(rank, "report", PATIENCE_S)["value"] for rank in range(3)]
        killed_s = ranks.signal(2, signal.SIGKILL)
        lost = [ranks.expect(rank, "error", PATIENCE_S) for rank in range(2)]
    expected = flat(whole.compute())
    expected["calibration"].pop("bucket_error")
    for rank, one in enumerate(found):
        assert one["none"] == "nan"
        assert one["all"] == one["again"] == found[0]["all"]
        assert one["thread"] == "NotInitializedError"
        assert "trainer 2 has other metrics than trainer 0" in one["mismatch"]
        assert one["run"] == squares.compute()
        assert one["ranked"] == within.compute()
        assert one["line"].startswith(f"trainer {rank}: batch 1: MSE ")
    assert found[0]["own"] != found[0]["all"]
    found[0]["all"]["calibration"].pop("bucket_error")
    assert found[0]["all"] == expected
    for one in lost:
        assert one["value"]["type"] == "PeerLostError", one
        assert one["time_s"] - killed_s < 10


def test_trainers_that_have_no_group():
    def body(context):
        with pytest.raises(cpudist.BackendUnavailableError, match="in-process network"):
            METRICS.AUC().compute_all()

    run_trainers(body, 2)

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``train_from_dataset``, ``infer_from_dataset``: steps, lines, handlers, ends."""

from __future__ import annotations

import itertools
import sys
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_cpudist as cpudist
from torch_cpudist import metrics
from torch_cpudist.data import Bags

ROWS, DIM = 50, 4


class Tower(nn.Module):
    """Bags, one id and dense numbers to a logit."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.words = nn.EmbeddingBag(
            ROWS, DIM, mode="sum", sparse=True, include_last_offset=True
        )
        self.item = nn.Embedding(ROWS, DIM, sparse=True)
        self.last = nn.Linear(2 * DIM + 2, 1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)

    def forward(self, words, item, dense):
        pooled = [self.words(*words), self.item(item.ids), dense]
        return self.last(torch.cat(pooled, dim=1)).squeeze(1)


def batch_of(number, size):
    rng = torch.Generator().manual_seed(number)
    counts = torch.randint(0, 4, (size,), generator=rng)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    words = torch.randint(0, ROWS, (int(offsets[-1]),), generator=rng)
    item = torch.randint(0, ROWS, (size,), generator=rng)
    dense = torch.randn(size, 2, generator=rng)
    return {
        "words": Bags(words, offsets),
        "item": Bags(item, torch.arange(size + 1)),
        "dense": dense,
        "label": (dense[:, 0] > 0).float(),
    }


class Batches:
    """Batches of different sizes, anew for each epoch; notes when it is closed."""

    def __init__(self, sizes, fails_at=None):
        self.sizes = sizes
        self.fails_at = fails_at
        self.closed = 0

    def __iter__(self):
        try:
            for number, size in enumerate(self.sizes):
                if number == self.fails_at:
                    raise OSError("no such file")
                yield batch_of(number, size)
        finally:
            self.closed += 1


def loss_of(model, batch):
    logits = model(batch["words"], batch["item"], batch["dense"])
    loss = F.binary_cross_entropy_with_logits(logits, batch["label"])
    return {"loss": loss, "predictions": logits, "labels": batch["label"]}


def stepper(model, opt):
    def step(batch):
        opt.zero_grad()
        found = loss_of(model, batch)
        found["loss"].backward()
        opt.step()
        return found

    return step


def made(lr=0.1):
    model = Tower()
    return model, torch.optim.SGD(model.parameters(), lr=lr)


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def auc():
    return metrics.AUC(from_logits=True)


def test_a_run_counts_prints_and_measures():
    model, opt = made()
    sizes = [8, 16, 4, 8, 12]
    dataset = Batches(sizes)
    losses, lines = [], []
    step = stepper(model, opt)

    def noting(batch):
        found = step(batch)
        losses.append((found["loss"].item(), len(batch["label"])))
        return found

    run = cpudist.train_from_dataset(
        noting,
        dataset,
        epochs=2,
        fetch={"loss": "log loss"},
        print_every=3,
        log=lines.append,
        metrics={"auc": auc(), "loss": metrics.LogLoss(from_logits=True)},
    )
    assert (run.epochs, run.batches, run.steps, run.samples) == (2, 10, 10, 96)
    mean = sum(loss * n for loss, n in losses) / 96
    assert run.values == pytest.approx({"loss": mean})
    assert run.metrics["loss"] == pytest.approx(mean, rel=1e-5)
    assert 0 <= run.metrics["auc"] <= 1
    assert run.samples_per_s == pytest.approx(96 / run.seconds)
    assert 0 < run.waiting_share < 1
    assert dataset.closed == 2
    assert [line.split(":")[0] for line in lines] == [
        "epoch 1, batch 3",
        "epoch 2, batch 6",
        "epoch 2, batch 9",
    ]
    first = sum(loss * n for loss, n in losses[3:6]) / sum(n for _, n in losses[3:6])
    assert f"log loss {first:.6g}, auc 0." in lines[1]
    assert "samples/s, waiting " in lines[1]


@pytest.mark.parametrize("reduce", ["reduce", "allreduce"])
@pytest.mark.parametrize("sizes", [[6, 5, 7, 4], [6, 5, 7, 4, 3], [3, 5]])
def test_replicas_get_a_batch_each_and_no_sample_is_left_out(reduce, sizes):
    model, opt = made()
    plain, plain_opt = made()
    executor = cpudist.ReplicaExecutor(model, loss_of, opt, 3, reduce)
    with executor:
        found, lines = auc(), []
        run = cpudist.train_from_dataset(
            executor, Batches(sizes), metrics=found, print_every=1, log=lines.append
        )
    # By hand: the mean over all samples of the batches of a step.
    expected = auc()
    for begin in range(0, len(sizes), 3):
        plain_opt.zero_grad()
        group = range(begin, min(begin + 3, len(sizes)))
        total = sum(sizes[i] for i in group)
        for i in group:
            one = loss_of(plain, batch_of(i, sizes[i]))
            expected.update(one["predictions"], one["labels"])
            (one["loss"] * sizes[i] / total).backward()
        plain_opt.step()
    assert torch.allclose(flat(model), flat(plain), rtol=0, atol=1e-6)
    assert run.metrics["AUC"] == pytest.approx(expected.compute(), abs=1e-3)
    assert (run.batches, run.steps) == (len(sizes), (len(sizes) + 2) // 3)
    assert run.samples == sum(sizes)
    assert len(lines) == run.steps


def test_inference_trains_nothing():
    model, opt = made()
    before = flat(model)
    sizes = [6, 5, 7, 4]

    def step(batch):
        assert torch.is_inference_mode_enabled()
        return loss_of(model, batch)

    alone = cpudist.infer_from_dataset(step, Batches(sizes), metrics=auc())
    model.train()
    with cpudist.ReplicaExecutor(model, loss_of, opt, 3) as executor:
        shared = cpudist.infer_from_dataset(executor, Batches(sizes), metrics=auc())
    assert torch.equal(flat(model), before)
    assert alone.metrics == pytest.approx(shared.metrics, abs=1e-6)
    assert alone.values == pytest.approx(shared.values, rel=1e-5)
    assert (alone.steps, shared.steps) == (4, 2)

    class Made:
        """Makes its batches when they are asked for, and keeps them."""

        def __init__(self):
            self.kept = []

        def __iter__(self):
            self.kept.append(torch.ones(2))
            yield from self.kept

    data = Made()
    cpudist.infer_from_dataset(lambda x: None, data)
    assert not data.kept[0].is_inference()


def test_a_model_that_is_wrapped():
    cpudist.init(variables={"CPUDIST_THREADS": "1"})
    try:
        model, inner = made()
        plain, plain_opt = made()
        opt = cpudist.DistributedOptimizer(inner, model, strategy=cpudist.Sync())
        sizes = [6, 5, 7]
        with cpudist.ReplicaExecutor(model, loss_of, opt, 2) as executor:
            cpudist.train_from_dataset(executor, Batches(sizes))
            pushed = opt.rounds
            cpudist.infer_from_dataset(executor, Batches(sizes))
            assert opt.rounds == pushed == 2
        with cpudist.ReplicaExecutor(plain, loss_of, plain_opt, 2) as executor:
            cpudist.train_from_dataset(executor, Batches(sizes))
        opt.flush()
        assert torch.allclose(flat(model), flat(plain), rtol=0, atol=1e-6)
    finally:
        cpudist.shutdown()


def test_what_a_step_may_return():
    for returned, values in (
        (torch.tensor(2.0, requires_grad=True), {"loss": 2.0}),
        (3, {"loss": 3.0}),
        ((torch.tensor([2.0]), "text"), {"loss": 2.0}),
        ({"a": 1, "b": torch.ones(5), "c": "text", "labels": [1]}, {"a": 1.0}),
        (None, {}),
    ):
        run = cpudist.train_from_dataset(lambda x, r=returned: r, [torch.ones(4)])
        assert run.values == values
    run = cpudist.train_from_dataset(
        lambda x: {"x": x, "y": 1}, [torch.arange(4.0)], fetch=["x"]
    )
    assert run.values == {"x": 1.5}


def test_the_number_of_batches_is_limited():
    dataset = Batches([4] * 5)
    seen = []
    run = cpudist.train_from_dataset(
        lambda batch: seen.append(1), dataset, epochs=3, max_batches=7
    )
    assert (run.batches, run.epochs, len(seen), dataset.closed) == (7, 1, 7, 2)
    nothing = cpudist.train_from_dataset(lambda batch: 1, [])
    assert (nothing.batches, nothing.samples, nothing.values) == (0, 0, {})
    assert nothing.samples_per_s == 0.0


def test_exceptions_and_interrupts_close_the_reader():
    dataset = Batches([4] * 5, fails_at=3)
    seen = []
    with pytest.raises(OSError, match="no such file"):
        cpudist.train_from_dataset(lambda batch: seen.append(1), dataset)
    assert len(seen) == 3
    for error in (KeyboardInterrupt, KeyError):

        def step(batch, error=error):
            raise error

        dataset = Batches([4] * 5)
        with pytest.raises(error):
            cpudist.train_from_dataset(step, dataset, handler=print)
        assert dataset.closed == 1
    assert "cpudist-handler" not in {t.name for t in threading.enumerate()}


def endless():
    for number in range(1_000_000):
        yield torch.full((2,), float(number))


def test_a_handler_gets_the_newest_values():
    seen, enough = [], threading.Event()

    def handler(values):
        seen.append(values["loss"])
        if len(seen) == 3:
            enough.set()

    def batches():
        return itertools.takewhile(lambda batch: not enough.is_set(), endless())

    run = cpudist.train_from_dataset(
        lambda x: x.mean(), batches(), handler=handler, handler_period_s=0.01
    )
    assert len(seen) >= 3
    assert seen == sorted(seen)
    assert seen[-1] <= run.batches - 1
    assert "cpudist-handler" not in {t.name for t in threading.enumerate()}


def test_what_a_handler_raises_ends_the_run():
    def handler(values):
        raise KeyError("of the handler")

    with pytest.raises(KeyError, match="of the handler"):
        cpudist.train_from_dataset(
            lambda x: x.mean(), endless(), handler=handler, handler_period_s=0.01
        )


def test_a_bar_shows_the_speed(capsys, monkeypatch):
    step = torch.mean
    cpudist.train_from_dataset(step, [torch.ones(2)] * 4, progress=True, print_every=2)
    seen = capsys.readouterr()
    assert "training: 100%" in seen.err
    assert "4/4" in seen.err
    assert "samples/s, waiting " in seen.err
    assert seen.out.startswith("batch 2: loss 1, ")
    assert seen.out.count("\n") == 2
    cpudist.train_from_dataset(step, [torch.ones(2)] * 4)
    assert capsys.readouterr().err == ""
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(cpudist.BackendUnavailableError, match="pip install tqdm"):
        cpudist.train_from_dataset(step, [torch.ones(2)], progress=True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    cpudist.train_from_dataset(step, [torch.ones(2)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs must"),
        ({"epochs": None}, "epochs must"),
        ({"max_batches": 1.5}, "max_batches must"),
        ({"print_every": 0}, "print_every must"),
        ({"handler_period_s": 0}, "handler_period_s must"),
        ({"handler": 1}, "handler must be a function"),
        ({"log": None}, "log must be a function"),
        ({"fetch": "loss"}, "list of names"),
        ({"fetch": ["los"]}, "as 'los'; it returned ..loss.."),
        ({"all_trainers": True}, "metrics="),
        ({"metrics": {"auc": 1}}, "names and metrics"),
        ({"metrics": metrics.AUC()}, '"predictions" and "labels"'),
    ],
)
def test_arguments_are_checked(options, message):
    with pytest.raises(cpudist.InvalidArgumentError, match=message):
        cpudist.train_from_dataset(lambda x: x.mean(), [torch.ones(2)], **options)


def test_steps_and_datasets_are_checked():
    with pytest.raises(cpudist.InvalidArgumentError, match="found int"):
        cpudist.train_from_dataset(3, [])
    with pytest.raises(cpudist.InvalidArgumentError, match="read once"):
        cpudist.train_from_dataset(print, iter([]), epochs=2)
    odd = [(torch.ones(2), torch.ones(3))]
    with pytest.raises(cpudist.InvalidArgumentError, match=r"\[2, 3\] samples"):
        cpudist.train_from_dataset(lambda x: None, odd)
    run = cpudist.train_from_dataset(lambda x: None, odd, count_samples=lambda x: 9)
    assert run.samples == 9


def test_executors_cut_bags_by_rows():
    model, opt = made()
    plain, plain_opt = made()
    batch = batch_of(0, 11)
    with cpudist.ReplicaExecutor(model, loss_of, opt, 3) as executor:
        results = executor.run(batch)
        joined = executor.predict({k: batch[k] for k in ("words", "item", "dense")})
        bags = executor.predict(batch, lambda net, part: part["words"])
        with pytest.raises(cpudist.InvalidArgumentError, match="4 parts for 3"):
            executor.run_parts([batch] * 4, fewer=True)
        with pytest.raises(cpudist.InvalidArgumentError, match="0 parts for 3"):
            executor.evaluate_parts([])
    assert [len(r["labels"]) for r in results] == [3, 3, 5]
    loss = loss_of(plain, batch)["loss"]
    loss.backward()
    plain_opt.step()
    assert torch.allclose(flat(model), flat(plain), rtol=0, atol=1e-6)
    with torch.no_grad():
        expected = plain(batch["words"], batch["item"], batch["dense"])
    assert torch.allclose(joined, expected, atol=1e-5)
    assert [x.tolist() for x in bags] == [x.tolist() for x in batch["words"]]

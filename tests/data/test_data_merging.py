# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Records of one instance id as one, and what a slot is worth."""

from __future__ import annotations

import json
import os
import random

import pytest
import torch
from merging_cases import SLOTS, loaded, merged, read, write
from patience import PATIENCE_S
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist import metrics, testing
from torch_cpudist.data import InMemoryDataset, Slot

LINES = [
    ("a", (1, 2), 10, 0.5), ("b", (), 20, 1.5), ("a", (3,), 30, 2.5),
    ("c", (4,), 40, 3.5), ("b", (5, 6), 50, 4.5), ("a", (), 60, 5.5),
]  # fmt: skip


def test_records_of_one_instance_become_one(tmp_path):
    dataset = loaded([write(tmp_path / "a", LINES)])
    dataset.local_shuffle(seed=3)
    assert dataset.merge_by_id() == 0
    merged = [([1, 2, 3], 10, 0.5), ([5, 6], 20, 1.5), ([4], 40, 3.5)]
    assert read(dataset) == merged
    assert dataset.records == 3
    dataset.local_shuffle(seed=1)
    iterator = iter(dataset)
    next(iterator)
    state = json.loads(json.dumps(dataset.state_dict()))
    again = loaded([tmp_path / "a"])
    again.load_state_dict(state)
    assert again.records == 3
    assert read(again) == []
    assert sorted(read(again)) == sorted(merged)


def test_instances_of_another_number_of_records_are_left_out(tmp_path, caplog):
    dataset = loaded([write(tmp_path / "a", LINES)])
    assert dataset.merge_by_id(size=2) == 4
    assert read(dataset) == [([5, 6], 20, 1.5)]
    assert "4 records left out" in caplog.text


def test_merging_checks_what_it_needs(tmp_path):
    path = write(tmp_path / "a", LINES)
    dataset = loaded([path], share=(0, 2))
    with pytest.raises(cpudist.InvalidArgumentError, match="global_shuffle"):
        dataset.merge_by_id()
    dataset = loaded([path])
    for wrong in (0, -1, "2", True, 1.5):
        with pytest.raises(cpudist.InvalidArgumentError, match="size="):
            dataset.merge_by_id(size=wrong)
    dataset.shuffle_slots(["bag"])
    with pytest.raises(cpudist.InvalidArgumentError, match="restore_slots"):
        dataset.merge_by_id()
    plain = InMemoryDataset([path], [Slot("name"), *SLOTS])
    with pytest.raises(cpudist.ClosedError, match="load"):
        plain.merge_by_id()
    tmp_path.joinpath("b").write_text("1 7 1 8 1 9 1 0\n")
    plain = InMemoryDataset([tmp_path / "b"], [Slot("name"), *SLOTS])
    plain.load()
    with pytest.raises(cpudist.InvalidArgumentError, match="instance_ids=True"):
        plain.merge_by_id()


@pytest.mark.processes
def test_all_records_of_an_instance_meet_on_one_trainer(tmp_path):
    """With a global shuffle by their id before; by anything else it is refused."""
    drawn = random.Random(1)
    lines = [(f"name-{i % 300}", (i,), i % 300, i % 300) for i in range(900)]
    drawn.shuffle(lines)
    files = [write(tmp_path / str(k), lines[k::4]) for k in range(4)]
    variables = {
        "OMP_NUM_THREADS": "1",
        "MERGED_FILES": os.pathsep.join(map(str, files)),
    }
    with testing.ProcessRanks(merged, 2, variables=variables) as ranks:
        found = ranks.results(PATIENCE_S)
    records = []
    for refused, left_out, own in found:
        assert len(refused) == 2
        assert all("key='instance_id'" in text for text in refused)
        assert left_out == 0
        assert len(own) > 100
        records += own
    assert len(records) == 300
    for bag, one, label in records:
        assert sorted(bag) == [one, one + 300, one + 600]
        assert label == one


def clicks(path, count=4000):
    """The label depends on the slot "one", and not at all on the bag."""
    drawn = random.Random(7)
    lines = []
    for i in range(count):
        one = drawn.randrange(20)
        likely = 0.9 if one % 2 else 0.1
        bag = tuple(drawn.randrange(20) for _ in range(2))
        lines.append((str(i), bag, one, int(drawn.random() < likely)))
    return write(path, lines)


def test_a_slot_is_worth_what_the_auc_loses_without_it(tmp_path):
    dataset = loaded([clicks(tmp_path / "a")], batch_size=200)
    torch.manual_seed(0)
    bag, one = nn.EmbeddingBag(20, 1, mode="sum"), nn.Embedding(20, 1)
    optimizer = torch.optim.Adam([*bag.parameters(), *one.parameters()], lr=0.1)

    def score(batch):
        values, offsets = batch["bag"]
        return bag(values, offsets[:-1]) + one(batch["one"].ids)

    for _ in range(8):
        for batch in dataset:
            loss = nn.functional.binary_cross_entropy_with_logits(
                score(batch), batch["label"]
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def auc():
        measured = metrics.AUC()
        with torch.no_grad():
            for batch in dataset:
                measured.update(score(batch).sigmoid(), batch["label"])
        return float(measured.compute())

    whole = auc()
    assert whole > 0.85
    dataset.shuffle_slots(["one"], seed=1)
    without = auc()
    assert abs(without - 0.5) < 0.05
    dataset.shuffle_slots(["bag"], seed=1)
    assert abs(auc() - whole) < 0.02
    dataset.shuffle_slots(["one"], seed=1)
    assert auc() == without
    dataset.restore_slots()
    assert auc() == whole


def test_shuffled_slots_are_exchanged_together_and_come_back(tmp_path):
    lines = [(str(i), (i, i), i, i) for i in range(1000)]
    dataset = loaded([write(tmp_path / "a", lines)])
    dataset.local_shuffle(seed=4)
    before = read(dataset)
    dataset.shuffle_slots(["bag", "label"], seed=2)
    after = read(dataset)
    assert [one for _, one, _ in after] == [one for _, one, _ in before]
    assert sorted(label for *_, label in after) == list(range(1000))
    assert all(bag == [label, label] for bag, _, label in after)
    assert sum(one == label for _, one, label in after) < 20
    with pytest.raises(cpudist.InvalidArgumentError, match="restore_slots"):
        dataset.state_dict()
    with pytest.raises(cpudist.InvalidArgumentError, match="restore_slots"):
        dataset.global_shuffle()
    dataset.restore_slots()
    assert read(dataset) == before
    for wrong in ([], ["x"], ["bag", "bag"], "b"):
        with pytest.raises(cpudist.InvalidArgumentError, match="used slots"):
            dataset.shuffle_slots(wrong)

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What help() and editors show of the arguments of datasets and of loops over them."""

from __future__ import annotations

import inspect
import pydoc

import pytest

from torch_cpudist.data import (
    InMemoryDataset,
    QueueDataset,
    infer_from_dataset,
    train_from_dataset,
)


def shown(thing):
    """The line of help() that has the arguments of a class or a function."""
    lines = pydoc.render_doc(thing, renderer=pydoc.plaintext).splitlines()
    wanted = f" {thing.__name__}("
    return next(one for one in lines if wanted in f" {one}" and ":" in one)


def test_help_of_a_dataset_names_every_argument():
    queue, memory = (
        inspect.signature(one).parameters for one in (QueueDataset, InMemoryDataset)
    )
    assert set(queue) == {*memory, "shuffle_records"}
    assert all(queue[name] == memory[name] for name in memory)
    line = shown(QueueDataset)
    for words in (
        "shuffle_records: 'int' = 65536",
        "line_limit_bytes: 'int' = 16777216",
    ):
        assert words in line
    assert "**" not in line


def test_help_of_a_loop_over_a_dataset_names_every_argument():
    train, infer = map(inspect.signature, (train_from_dataset, infer_from_dataset))
    assert train == infer
    assert list(train.parameters)[:3] == ["step", "dataset", "epochs"]
    assert train.parameters["print_every"].default == 100
    line = shown(infer_from_dataset)
    assert "handler_period_s: 'float' = 60.0" in line
    assert "**" not in line


def test_what_is_no_argument_is_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'shuffle_size'"):
        QueueDataset([], [], shuffle_size=3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'epoch'"):
        train_from_dataset(print, [], epoch=3)

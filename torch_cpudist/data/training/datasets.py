# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``train_from_dataset`` and ``infer_from_dataset``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Unpack

import torch

from torch_cpudist.data.arguments import passes_on_to
from torch_cpudist.data.training.loop import (
    Arguments,
    Compute,
    DatasetLoop,
    DatasetRun,
    Options,
)
from torch_cpudist.errors import InvalidArgumentError
from torch_cpudist.replicas.executor import ReplicaExecutor

Step = Callable[[Any], Any] | ReplicaExecutor


@passes_on_to(Options)
def train_from_dataset(
    step: Step,
    dataset: Iterable[Any],
    **options: Unpack[Arguments],
) -> DatasetRun:
    """Trains on every batch of a dataset; shows how it goes, returns what it measured.

    See docs/data_training.md. Thread safety: one thread; a handler runs in another,
    which has ended when this returns. Messages: those of ``step`` and ``all_trainers``.

    Args:
        step: a function of a batch that trains on it and returns a loss, a dict of
            values, a tuple that begins with the loss, or ``None``. Or an executor:
            each replica gets a batch, the last step of an epoch those that are left.
        dataset: any iterable of batches; iterated anew for each epoch.
        epochs: how often.
        max_batches: ends the run after so many, over all epochs.
        fetch: names of values to show and return, or ``{name: label}``; of a tensor its
            mean. Default: all that are one number. A loss by itself is ``"loss"``.
        print_every: batches between lines; ``None``: no lines.
        log: gets the lines.
        metrics: updated with ``"predictions"``, ``"labels"`` and, if they are there,
            ``"weights"`` and, where the metrics are of groups, ``"groups"`` of the dict
            that ``step`` returns. Not reset before.
        all_trainers: the metrics at the end are those of all trainers; collective.
        handler: called with the newest values, by name, from a thread of its own.
        handler_period_s: seconds between its calls.
        progress: a bar of tqdm; default: on a terminal, if it is installed.
        count_samples: how many samples a batch has.

    Raises:
        InvalidArgumentError: an argument is wrong, a value is not there, or samples
            cannot be counted.
        BackendUnavailableError: ``progress=True`` without tqdm.
        OperationTimeoutError: the handler did not end in time.
        BaseException: what ``step``, ``dataset`` or ``handler`` raised. The iterator is
            closed first.
    """
    if isinstance(step, ReplicaExecutor):
        compute: Compute = functools.partial(step.run_parts, fewer=True)
    else:
        compute = _in_turn(step)
    return DatasetLoop("training", compute, _width(step), Options(**options)).run(
        dataset
    )


@passes_on_to(Options)
def infer_from_dataset(
    step: Step,
    dataset: Iterable[Any],
    **options: Unpack[Arguments],
) -> DatasetRun:
    """``train_from_dataset`` under ``torch.inference_mode``: nothing is trained.

    An executor computes its ``loss_fn`` by its replicas in evaluation mode. A function
    is called as it is: put its model into evaluation mode before. Rows of tables are
    pulled, nothing is pushed; without ``all_trainers`` one trainer may call it alone.
    Arguments and errors: those of ``train_from_dataset``.
    """
    found = step.evaluate_parts if isinstance(step, ReplicaExecutor) else _in_turn(step)

    def compute(parts: Sequence[Any]) -> Sequence[Any]:
        # Around the step alone: what a dataset makes may be trained on later.
        with torch.inference_mode():
            return found(parts)

    return DatasetLoop("inference", compute, _width(step), Options(**options)).run(
        dataset
    )


def _width(step: Step) -> int:
    """Batches of a step."""
    return step.replicas if isinstance(step, ReplicaExecutor) else 1


def _in_turn(step: Callable[[Any], Any]) -> Compute:
    if not callable(step):
        raise InvalidArgumentError(
            "step: expected a function of a batch or a ReplicaExecutor, found "
            f"{type(step).__name__}."
        )
    return lambda parts: [step(part) for part in parts]

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The part of ``ReplicaExecutor`` that computes without training."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from torch_cpudist.errors import InvalidArgumentError
from torch_cpudist.replicas import dropout, losses, splitting
from torch_cpudist.replicas.models import ReplicaModels
from torch_cpudist.replicas.pool import ReplicaThreads


class Applying(abc.ABC):
    """Replicas that compute a function of their models, without gradients."""

    replicas: int
    _models: ReplicaModels
    _loss_fn: Callable[[nn.Module, Any], Any]
    _generators: Sequence[torch.Generator]

    @abc.abstractmethod
    def _open(self) -> ReplicaThreads: ...

    @abc.abstractmethod
    def _in_turn(self, name: str, parts: Sequence[Any]) -> bool: ...

    def evaluate(self, batch: Any) -> list[Any]:
        """What ``loss_fn`` returns for each replica's part, without gradients.

        In the mode that the model is in. Else as ``run``; a batch with fewer samples
        than replicas is computed by fewer.
        """
        return self._apply("evaluate", self._loss_fn, self._parts(batch), None)

    def evaluate_parts(self, parts: Sequence[Any]) -> list[Any]:
        """``evaluate`` of 1 to R parts, in evaluation mode, of any form.

        Raises:
            InvalidArgumentError: there are more parts than replicas, or none.
        """
        if not 1 <= len(parts) <= self.replicas:
            raise InvalidArgumentError(
                f"evaluate_parts: found {len(parts)} parts for {self.replicas} "
                "replicas (CPU_NUM). Pass one for each at most."
            )
        return self._apply("predict", self._loss_fn, parts, False)

    def predict(
        self, batch: Any, fn: Callable[[nn.Module, Any], Any] | None = None
    ) -> Any:
        """The model's outputs for a batch, joined along dim 0, in the parameters as is.

        In evaluation mode, without gradients; under ``torch.inference_mode`` in that.

        Args:
            batch: as of ``run``; also with fewer samples than replicas.
            fn: of a replica's model and its part; default: ``model(part)``, of a
                tuple or list ``model(*part)``, of a dict ``model(**part)``.
        """
        fn = fn or losses.call_model
        return splitting.join(self._apply("predict", fn, self._parts(batch), False))

    def _parts(self, batch: Any) -> Sequence[Any]:
        samples = splitting.sample_count(batch)
        count = min(self.replicas, max(samples, 1))
        return splitting.split(batch, count) if samples else [batch]

    def _apply(
        self,
        name: str,
        fn: Callable[[nn.Module, Any], Any],
        parts: Sequence[Any],
        training: bool | None,
    ) -> list[Any]:
        def call(replica: int) -> Any:
            with dropout.drawing_from(self._generators[replica]):
                return fn(self._models.modules[replica], parts[replica])

        threads = self._open()
        with threads.session(), torch.no_grad():
            self._models.follow(training)
            calls = [functools.partial(call, replica) for replica in range(len(parts))]
            results = threads.run(calls, self._in_turn(name, parts))
        return [splitting.detached(result) for result in results]

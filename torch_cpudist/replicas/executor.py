# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
# long: one class, whose constructor and docstring are what users read
"""``ReplicaExecutor``: data parallelism in one process, by threads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from torch_cpudist.errors import (
    ClosedError,
    InvalidArgumentError,
    UnsupportedModelError,
)
from torch_cpudist.log import logger
from torch_cpudist.optimizer.distributed import DistributedOptimizer
from torch_cpudist.replicas import cores, dropout, losses, reduction, splitting, updates
from torch_cpudist.replicas.models import ReplicaModels
from torch_cpudist.replicas.pool import ReplicaThreads
from torch_cpudist.settings import fields

GradientScale = Literal["mean", "equal", "sum", "custom"]
LossFn = Callable[[nn.Module, Any], Any]


class ReplicaExecutor:
    """Trains a model by several threads of this process, each on a part of a batch.

    A replica has modules and gradients of its own; parameters are shared (``"reduce"``)
    or copied (``"allreduce"``). The sums of gradients are in the ``grad`` of the
    model's parameters after ``run``. Sums are made in replica order, whoever comes
    first. Plain torch optimizers run in the replicas' threads, a
    ``DistributedOptimizer`` pushes once per step. How, and when it is worth it:
    docs/replicas.md.

    Environment over argument over the strategy's ``Replicas``: ``CPU_NUM`` or
    ``CPUDIST_REPLICAS_COUNT``, ``CPUDIST_REPLICAS_REDUCE`` and
    ``CPUDIST_REPLICAS_NUM_THREADS``.

    Thread safety: from one thread at a time. Usable as a context manager.

    Args:
        model: trained in place; also a compiled one. Attributes that are numbers or
            texts, modes and buffers are followed, other changes need a new executor.
        loss_fn: ``loss_fn(model, part)`` of a replica's model and its part of the batch
            returns the mean loss of the part; or a tuple or list that begins with it,
            or a dict that has it as ``"loss"``. Called in several threads at once.
        optimizer: over parameters of ``model``; or a list.
        replicas: how many; default: this process's share of the cores.
        reduce: ``"reduce"`` or ``"allreduce"``.
        num_threads: torch threads of each replica; default: its share of the cores.
        gradient_scale: ``"mean"`` weighs replicas by their samples, so that a step
            equals one on the whole batch; ``"equal"`` weighs them all alike, ``"sum"``
            adds them; with ``"custom"`` backward begins with ``run(loss_gradient=)``.
        by_samples: ``DistributedOptimizer.step`` weighs this trainer by its samples.
        deterministic: refuse what would make two runs differ: draws from torch's global
            generator, as functional dropout makes them.
        seed: of ``nn.Dropout*`` modules; default: torch's initial seed.
        before_update: called by the calling thread when all sums are there, to clip
            them, say.

    Raises:
        ConfigurationError: a setting is out of range, or ``CPUDIST_PIN=1`` with more
            replicas than cores.
        UnsupportedModelError: the model cannot be replicated, or a parameter has hooks.
        UnsupportedOptimizerError: the optimizer has parameters that are not the
            model's, or needs a closure.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        optimizer: Optimizer | Sequence[Optimizer],
        replicas: int | None = None,
        reduce: str | None = None,
        num_threads: int | None = None,
        *,
        gradient_scale: GradientScale = "mean",
        by_samples: bool = False,
        deterministic: bool = False,
        seed: int | None = None,
        before_update: Callable[[], None] | None = None,
    ) -> None:
        """See the class."""
        self._optimizers = (
            [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        )
        place = cores.find(self._optimizers, replicas, reduce, num_threads)
        self.replicas = place.count
        self.reduce = place.reduce
        self.num_threads = place.num_threads
        if gradient_scale not in losses.SCALES:
            hint = fields.nearest(str(gradient_scale), losses.SCALES)
            raise InvalidArgumentError(f"gradient_scale={gradient_scale!r}: {hint}")
        self._scale = gradient_scale
        self._by_samples = by_samples
        self._deterministic = deterministic
        self._before_update = before_update
        self._loss_fn = loss_fn
        self._served = [
            o for o in self._optimizers if isinstance(o, DistributedOptimizer)
        ]
        updates.check_optimizers(self._optimizers, model)
        if by_samples and not self._served:
            raise InvalidArgumentError(
                "by_samples=True weighs trainers, which only a DistributedOptimizer "
                "has. Replicas are weighed by samples anyhow."
            )
        copied = updates.copied(self._optimizers, model, self.reduce)
        self._models = ReplicaModels(model, self.replicas, copied)
        self._owned = reduction.deal_owners(
            self._models.parameters, self._models.sparse_weights(), self.replicas
        )
        self._update = updates.choose(
            self._optimizers, self._models, self.reduce, self._owned
        )
        seed = torch.initial_seed() if seed is None else seed
        self._generators = [
            dropout.generator_of(seed, place.trainer, replica)
            for replica in range(self.replicas)
        ]
        for served in self._served:
            served.add_generators(self._generators)
            served.baseline.replicas = (self.replicas, self.num_threads)
        self._compiled = self._models.compiled or hasattr(
            loss_fn, "_torchdynamo_orig_callable"
        )
        self._seen: set[Any] = set()
        self._samples = 0  # since the last step
        self._threads: ReplicaThreads | None = ReplicaThreads(
            self.replicas, self.num_threads, place.cores
        )
        logger.info("%s", place)

    # -- training ----------------------------------------------------------------------

    def run(
        self, batch: Any, *, loss_gradient: Any = None, step: bool = True
    ) -> list[Any]:
        """One step on a batch, which is cut along dim 0; the last part is the longest.

        Cost: every replica computes its part; then each parameter's gradients are
        summed and it is updated, by one thread. Under a ``DistributedOptimizer`` one
        push, as ``step`` of it.

        Args:
            batch: tensors and arrays ``[samples, ...]`` in tuples, lists and dicts,
                nested. Tensors without dimensions, numbers and texts go to all.
            loss_gradient: with ``gradient_scale="custom"`` what backward begins with:
                a number, a list with one per replica, or a tensor ``[samples, ...]`` of
                the form of the losses, to be cut as the batch.
            step: ``False`` only adds to the gradients, for a later step.

        Returns:
            By replica, what ``loss_fn`` returned, detached. ``join`` joins them.

        Raises:
            BatchTooSmallError: there are fewer samples than replicas.
            InvalidArgumentError: the batch cannot be cut, ``loss_fn`` returned no loss,
                or gradients are switched off.
            GlobalRandomError: see ``deterministic``; nothing was updated.
            BaseException: what ``loss_fn`` raised in the first replica that failed,
                when all have ended. Nothing was updated; gradients are dropped.
        """
        parts = splitting.split(batch, self.replicas)
        return self.run_parts(parts, loss_gradient=loss_gradient, step=step)

    def run_parts(
        self,
        parts: Sequence[Any],
        *,
        loss_gradient: Any = None,
        step: bool = True,
        fewer: bool = False,
    ) -> list[Any]:
        """``run`` on a batch that is cut already: one part per replica, of any form.

        Where a part's samples cannot be counted (``gradient_scale="mean"``,
        ``by_samples``), use ``gradient_scale="equal"``. With ``fewer=True`` there may
        be fewer parts, but one; the last replicas only take part in the update.
        """
        if len(parts) != self.replicas and not (
            fewer and 1 <= len(parts) < self.replicas
        ):
            raise InvalidArgumentError(
                f"run_parts: found {len(parts)} parts for {self.replicas} replicas "
                "(CPU_NUM). Pass one for each."
            )
        if not torch.is_grad_enabled():
            raise InvalidArgumentError(
                "run() trains, but gradients are switched off (no_grad, "
                "inference_mode). Use evaluate() or predict()."
            )
        counts = self._counts(parts)
        seeds = losses.backward_seeds(self._scale, counts, len(parts), loss_gradient)
        threads = self._open()
        with threads.session():
            self._models.follow()
            if not self._samples:
                self._models.clear_gradients()
            results = self._compute(threads, parts, seeds, step)
            self._samples += sum(counts) if counts else len(parts)
            if step:
                samples = self._samples if self._by_samples else None
                self._samples = 0
                self._step(threads, samples)
        return results

    def _counts(self, parts: Sequence[Any]) -> list[int]:
        """Samples of each part, if somebody wants to know; else empty."""
        if self._scale != "mean" and not self._by_samples:
            return []
        return [splitting.sample_count(part) for part in parts]

    def _compute(
        self,
        threads: ReplicaThreads,
        parts: Sequence[Any],
        seeds: Sequence[Any],
        compact: bool,
    ) -> list[Any]:
        """Forward and backward of all replicas."""
        state = torch.default_generator.get_state() if self._deterministic else None
        calls = [
            functools.partial(self._learn, replica, part, seed, compact)
            for replica, (part, seed) in enumerate(zip(parts, seeds, strict=True))
        ]
        try:
            results = threads.run(calls, self._in_turn("learn", parts))
            if state is not None:
                dropout.check_untouched(state)
            self._check_used()
        except BaseException:
            self._samples = 0
            raise
        self._models.take_buffers()
        return results

    def _learn(self, replica: int, part: Any, seed: Any, compact: bool) -> Any:
        """What a replica's thread does of ``run``, but for sums."""
        with dropout.drawing_from(self._generators[replica]):
            returned = self._loss_fn(self._models.modules[replica], part)
            losses.backward(losses.loss_of(returned), seed)
        if compact:
            reduction.compact_all(self._models, replica)
        return splitting.detached(returned)

    def _step(self, threads: ReplicaThreads, samples: int | None) -> None:
        everyone = range(self.replicas)
        # Nobody has to see all sums before the first parameter is updated.
        at_once = self._before_update is None
        if at_once:
            self._update.prepare(at_once)
        threads.run([functools.partial(self._sum, r, at_once) for r in everyone])
        if self._before_update is not None:
            self._before_update()
            self._update.prepare(at_once)
            update = self._update.by_owner
            threads.run([functools.partial(update, r) for r in everyone])
        self._update.by_caller(samples)
        if self._update.in_replicas:
            last = self._update.by_replica
            threads.run([functools.partial(last, r) for r in everyone])
        self._update.finish()

    def _sum(self, owner: int, update: bool) -> None:
        """Sums an owner's gradients into the model; updates its parameters."""
        owned, sums_itself = self._owned[owner], self._update.sums_itself
        indices = [index for index in owned if not sums_itself(index)]
        reduction.sum_into(self._models, indices, self._update.wants_sorted)
        if update:
            self._update.by_owner(owner)

    # -- without gradients -------------------------------------------------------------

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

    # -- checks ------------------------------------------------------------------------

    def _in_turn(self, name: str, parts: Sequence[Any]) -> bool:
        """Whether code may have to be compiled, which one thread at a time can do."""
        if not self._compiled:
            return False
        key = losses.signature(name, self._models.model.training, parts)
        new = key not in self._seen
        self._seen.add(key)
        return new

    def _check_used(self) -> None:
        models = self._models
        past = any(parameter.grad is not None for parameter in models.parameters)
        if past or not models.has_gradients:
            models.clear_gradients()
            raise UnsupportedModelError(
                "loss_fn(model, part) has not computed its loss with the model that it "
                "was given, which is the replica's. Use its first argument, not the "
                "model from outside."
            )

    # -- the end -----------------------------------------------------------------------

    def _open(self) -> ReplicaThreads:
        if self._threads is None:
            raise ClosedError("this ReplicaExecutor is closed. Make a new one.")
        return self._threads

    @staticmethod
    def join(results: Sequence[Any]) -> Any:
        """Joins what ``run`` or ``evaluate`` returned: along dim 0, losses as a vector.

        See ``replicas.splitting.join``.
        """
        return splitting.join(results)

    def close(self) -> None:
        """Ends the threads; model and optimizer stay as they are. Idempotent."""
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.close()
            for served in self._served:
                served.baseline.replicas = None

    def __enter__(self) -> ReplicaExecutor:
        """Returns itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends the threads."""
        self.close()

    def stats(self) -> Mapping[str, int]:
        """Bytes of tensors of this process, each counted once.

        Returns:
            ``parameter_bytes`` (of the model), ``copy_bytes`` (of replicas' parameters
            of their own), ``gradient_bytes`` (there now, of replicas and model),
            ``state_bytes`` (of all optimizers' state that torch keeps here).
        """
        return cores.memory(self._models, self._update)

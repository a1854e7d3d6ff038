# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What is a trainer's own in a snapshot: how it is taken, and how it is put back.

Random generators, the model's buffers, options of parameter groups, and the objects
that the script has named: data, schedules of the learning rate, what it likes.
"""

from __future__ import annotations

import collections
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from torch_cpudist.errors import (
    ConfigMismatchError,
    InvalidArgumentError,
    SnapshotError,
)
from torch_cpudist.log import logger
from torch_cpudist.resuming import random_state
from torch_cpudist.resuming.schedules import schedules_of

_KEPT = ("params", "param_names")
# Options that schedules of torch add to a group.
_OF_SCHEDULES = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"}


class ReadsAhead(Protocol):
    """Reads batches of a dataset before they are trained."""

    @property
    def ahead(self) -> int:
        """How many were read and not handed out."""

    def reads(self, source: object) -> bool:
        """Whether it reads this dataset."""


def copied(value: Any) -> Any:
    """A copy of nested dicts, lists and tuples, whose tensors are copied to the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(device="cpu", copy=True)
    if isinstance(value, np.ndarray | collections.Counter):
        return value.copy()
    if isinstance(value, collections.OrderedDict):
        return collections.OrderedDict((key, copied(one)) for key, one in value.items())
    if isinstance(value, Mapping):
        return {key: copied(one) for key, one in value.items()}
    if isinstance(value, list):
        return [copied(one) for one in value]
    if isinstance(value, tuple):
        return tuple(copied(one) for one in value)
    return value


def check_objects(objects: object) -> dict[str, Any]:
    """Checks what ``resume(state=)`` was given.

    Raises:
        InvalidArgumentError: no mapping of names to objects with state.
    """
    if objects is None:
        return {}
    if not isinstance(objects, Mapping):
        raise InvalidArgumentError(
            f"resume: state is a {type(objects).__name__}, expected a dict such as "
            '{"data": dataset, "schedule": scheduler}.'
        )
    for name, one in objects.items():
        if not isinstance(name, str) or not name:
            raise InvalidArgumentError(
                f"resume: state has the name {name!r}, expected a text."
            )
        whole = all(
            callable(getattr(one, method, None))
            for method in ("state_dict", "load_state_dict")
        )
        if not (whole or isinstance(one, torch.Generator)):
            raise InvalidArgumentError(
                f"resume: state[{name!r}] is a {type(one).__name__}, expected an "
                "object with state_dict() and load_state_dict(), or a torch.Generator."
            )
    return dict(objects)


class OwnState:
    """A trainer's own state. From the thread that steps."""

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[dict[str, Any]],
        objects: Mapping[str, Any],
        readers: Sequence[ReadsAhead],
        generators: list[torch.Generator],
    ) -> None:
        """Captures nothing yet.

        Args:
            model: whose buffers belong to it.
            groups: of the optimizer.
            objects: from ``check_objects``.
            readers: what reads ahead, as of when it is captured.
            generators: of replicas, as of then.
        """
        self._model = model
        self._groups = groups
        self._objects = objects
        self._readers = readers
        self._generators = generators
        # Of a snapshot, for replicas that are made after it was loaded.
        self._loaded: list[torch.Tensor] = []
        self._schedules = schedules_of(objects)

    # -- saving ------------------------------------------------------------------------

    def capture(self) -> dict[str, Any]:
        """Copies all of it. Cost: the bytes of buffers and of the objects' states.

        Raises:
            SnapshotError: an object cannot tell its state less what was read ahead.
        """
        return {
            "random": random_state.capture(),
            "replicas": [one.get_state() for one in self._generators],
            "buffers": {n: copied(b) for n, b in self._model.named_buffers()},
            "groups": self.options(),
            "objects": {name: self.object_state(name) for name in self._objects},
        }

    def options(self) -> list[dict[str, Any]]:
        """Options of the parameter groups, without their parameters."""
        return [
            {k: copied(v) for k, v in group.items() if k not in _KEPT}
            for group in self._groups
        ]

    def object_state(self, name: str) -> Any:
        """A copy of the state of one of the objects.

        Raises:
            SnapshotError: it cannot tell it less what was read ahead.
        """
        one = self._objects[name]
        if isinstance(one, torch.Generator):
            return one.get_state()
        unused = sum(reader.ahead for reader in self._readers if reader.reads(one))
        if not unused:
            return copied(one.state_dict())
        if "unused" not in inspect.signature(one.state_dict).parameters:
            raise SnapshotError(
                f"state[{name!r}]: {unused} batches were read ahead by "
                f"cpudist.data.prefetch, and state_dict() of {type(one).__name__} has "
                "no argument unused= by which they would come again. Use a dataset of "
                "cpudist.data, or do not prefetch."
            )
        return copied(one.state_dict(unused=unused))

    # -- loading -----------------------------------------------------------------------

    def restore(self, tree: Mapping[str, Any], own: bool, equal: bool) -> list[str]:
        """Puts everything where ``capture`` found it.

        Args:
            tree: what it returned.
            own: this trainer has saved it; else trainer 0 has, and what differs between
                trainers is left as it is: data, random generators.
            equal: as many trainers have saved as there are now.

        Returns:
            What could not be put back, as sentences.

        Raises:
            ConfigMismatchError: data are others than those of the snapshot.
        """
        missing = self._restore_buffers(tree["buffers"])
        missing += self._restore_options(tree["groups"])
        missing += self._restore_objects(tree["objects"], own, equal)
        if own:
            self._loaded = list(tree["replicas"])
            missing += self.seed_replicas()
            # Last: what is above may draw.
            random_state.restore(tree["random"])
        else:
            missing.append(
                "this trainer was not there: its random generators and its data begin "
                "anew"
            )
        return missing

    def seed_replicas(self) -> list[str]:
        """Gives replicas' generators the states that were loaded, once they are there.

        Returns:
            What could not be put back.
        """
        if not self._loaded or not self._generators:
            return []
        loaded, self._loaded = self._loaded, []
        if len(loaded) != len(self._generators):
            return [
                f"{len(loaded)} replicas were saved, here are "
                f"{len(self._generators)}: their generators begin anew"
            ]
        for generator, state in zip(self._generators, loaded, strict=True):
            generator.set_state(state)
        return []

    @torch.no_grad()
    def restore_some_buffers(self, saved: Mapping[str, torch.Tensor]) -> list[str]:
        """Gives those of the model's buffers that are in ``saved`` their values.

        Returns:
            Which have another shape and stay as they are.
        """
        other = []
        for name, buffer in self._model.named_buffers():
            if name not in saved:
                continue
            if saved[name].shape == buffer.shape:
                buffer.copy_(saved[name])
            else:
                other.append(
                    f"buffer {name!r} was {list(saved[name].shape)}, is "
                    f"{list(buffer.shape)}: it stays as it is"
                )
        return other

    @torch.no_grad()
    def _restore_buffers(self, saved: Mapping[str, torch.Tensor]) -> list[str]:
        missing = []
        found = dict(self._model.named_buffers())
        for name, buffer in found.items():
            if name not in saved or saved[name].shape != buffer.shape:
                missing.append(f"buffer {name!r} is not in it, or has another shape")
            else:
                buffer.copy_(saved[name])
        gone = [name for name in saved if name not in found]
        return missing + [f"buffer {name!r} is not in the model" for name in gone]

    def _restore_options(self, saved: Sequence[Mapping[str, Any]]) -> list[str]:
        if len(saved) != len(self._groups):
            return [
                f"{len(saved)} parameter groups were saved, here are "
                f"{len(self._groups)}: options stay as the script has set them"
            ]
        added = _OF_SCHEDULES | set(_KEPT)
        for group, options in zip(self._groups, saved, strict=True):
            if set(group) - added - set(options):
                return [
                    "the options of its parameter groups are another optimizer's: they "
                    "stay as the script has set them"
                ]
        for group, options in zip(self._groups, saved, strict=True):
            # Schedules hold the dicts, so the values go into the same ones.
            group.update(copied(options))
        return []

    def _restore_objects(
        self, saved: Mapping[str, Any], own: bool, equal: bool
    ) -> list[str]:
        missing = [f"state[{n!r}] is not used" for n in saved if n not in self._objects]
        for name, one in self._objects.items():
            if name not in saved:
                missing.append(f"state[{name!r}] is not in it and begins anew")
            elif name in self._schedules:
                one.load_state_dict(saved[name])
            elif not own:
                missing.append(f"state[{name!r}] is of another trainer: begins anew")
            elif isinstance(one, torch.Generator):
                one.set_state(saved[name])
            else:
                missing += _load(name, one, saved[name], equal)
        return missing


def _load(name: str, one: Any, state: Any, equal: bool) -> list[str]:
    try:
        one.load_state_dict(state)
    except ConfigMismatchError as error:
        if equal:
            raise
        logger.debug("state[%r]: %s", name, error)
        return [
            f"state[{name!r}] was saved by another number of trainers, which have "
            "other shares of the data: begins anew"
        ]
    return []

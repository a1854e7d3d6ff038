# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Settings of the HalfAsync strategy."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import field
from typing import Any, ClassVar

from torch_cpudist.errors import ConfigurationError
from torch_cpudist.settings.communicator import (
    ROUND_FIELDS,
    Communicator,
    check_without_queue,
)
from torch_cpudist.settings.fields import settings
from torch_cpudist.settings.updates import Trainers, Updates
from torch_cpudist.strategies.base import Strategy

Groups = tuple[tuple[int, ...], ...]

_MOST_TRAINERS = 65535
_FORM = "a list of lists of trainer ranks, as [[0, 1], [2, 3]]"


def _refuse(group: Any, what: str) -> ConfigurationError:
    return ConfigurationError(f"HalfAsync(group={group!r}): {what}.")


def _rank(group: Any, value: Any) -> int:
    try:
        rank = operator.index(value)
    except TypeError:
        rank = -1
    if isinstance(value, bool) or not 0 <= rank < _MOST_TRAINERS:
        raise _refuse(group, f"{value!r} is no trainer rank; expected {_FORM}")
    return rank


def _items(group: Any, value: Any) -> list[Any]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise _refuse(group, f"found {value!r}, expected {_FORM}")
    items = list(value)
    if not items:
        raise _refuse(group, f"a group is empty; expected {_FORM}")
    return items


def checked_groups(group: Any) -> Groups:
    """Checks groups of trainers, as far as is possible without knowing all of them.

    Returns:
        Each in the order of ranks, the groups in the order of their lowest ranks.

    Raises:
        ConfigurationError: no list of lists of ranks; an empty group; a rank twice.
    """
    made = [
        sorted(_rank(group, rank) for rank in _items(group, one))
        for one in _items(group, group)
    ]
    seen: set[int] = set()
    for rank in (rank for one in made for rank in one):
        if rank in seen:
            raise _refuse(group, f"trainer {rank} is there twice; expected {_FORM}")
        seen.add(rank)
    return tuple(sorted(tuple(one) for one in made))


def _parse(variable: str, text: str) -> Groups | None:
    """Reads ``"0,1;2,3"`` or ``"none"``."""
    if text.strip().lower() == "none":
        return None
    try:
        groups = [[int(rank) for rank in one.split(",")] for one in text.split(";")]
    except ValueError:
        raise ConfigurationError(
            f"{variable}={text!r}: expected trainer ranks with commas between them, "
            "groups with semicolons, as 0,1;2,3; or none."
        ) from None
    try:
        return checked_groups(groups)
    except ConfigurationError as error:
        raise ConfigurationError(f"{variable}={text!r}: {error}") from None


@settings
class HalfAsync(Strategy):
    """Trainers of a group share rounds, as under Sync; no group waits for another.

    Inside a group it equals ``Sync``, across groups ``Async``: servers apply the mean
    of a group's gradients as soon as its members have pushed. Cost per step: that of
    ``Sync``, and every dense value comes back, not only those that the round updated.

    Attributes:
        group: trainer ranks, a list per group, each trainer in one; as a variable
            ``0,1;2,3``. ``None``: the trainers of a host are a group.
            ``CPUDIST_HALFASYNC_GROUP``.
        communicator: what values travel as: all but what is of a
            queue; a dict is accepted.
    """

    name: ClassVar[str] = "half_async"
    keeps_averages: ClassVar[bool] = True
    takes_devices: ClassVar[bool] = True
    takes_remote_tables: ClassVar[bool] = True

    group: Sequence[Sequence[int]] | None = field(
        default=None, metadata={"parse": _parse, "type": "lists of ranks"}
    )
    communicator: Communicator = field(
        default_factory=Communicator, metadata={"section": True, "only": ROUND_FIELDS}
    )

    def __post_init__(self) -> None:
        """Checks the fields."""
        super().__post_init__()
        check_without_queue(self, ROUND_FIELDS)
        if self.group is not None:
            object.__setattr__(self, "group", checked_groups(self.group))

    @property
    def learns_lookups(self) -> bool:
        """Whether the communicator says so."""
        return self.communicator.learn_lookups

    def updates(self, trainers: Trainers) -> Updates:
        """When the servers apply this strategy's gradients."""
        if self.group is not None:
            groups = self._numbered(trainers.count)
            return Updates(groups=groups, communicator=self.communicator)
        if trainers.hosts is None:
            raise ConfigurationError(
                "HalfAsync(): trainers in jobs of their own do not know who shares a "
                "host. Pass group=, or set CPUDIST_HALFASYNC_GROUP=0,1;2,3."
            )
        hosts = list(dict.fromkeys(trainers.hosts))
        groups = tuple(hosts.index(host) for host in trainers.hosts)
        return Updates(groups=groups, communicator=self.communicator)

    def _numbered(self, trainer_count: int) -> tuple[int, ...]:
        """The number of the group of every trainer."""
        number_of = {
            rank: number for number, one in enumerate(self.group or ()) for rank in one
        }
        everyone = range(trainer_count)
        missing = sorted(set(everyone) - set(number_of))
        unknown = sorted(set(number_of) - set(everyone))
        if missing or unknown:
            what = f"no group has {missing}" if missing else f"there is no {unknown}"
            raise _refuse(
                self.group,
                f"the trainers are 0 to {trainer_count - 1}, {what}. Name each once",
            )
        return tuple(number_of[rank] for rank in everyone)

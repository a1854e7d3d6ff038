# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Settings of the Hybrid strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field, replace
from typing import Any, ClassVar

from torch_cpudist.errors import ConfigurationError, UnsupportedOptimizerError
from torch_cpudist.settings import fields
from torch_cpudist.settings.clip import Clip, ClipNorm
from torch_cpudist.settings.fields import settings
from torch_cpudist.settings.replicas import Replicas
from torch_cpudist.settings.server import Server
from torch_cpudist.settings.sharding import Sharding
from torch_cpudist.settings.updates import Trainers, Updates
from torch_cpudist.strategies.allreduce import AllReduce
from torch_cpudist.strategies.asynchronous import Async
from torch_cpudist.strategies.base import Strategy, kind_named
from torch_cpudist.strategies.geo import Geo
from torch_cpudist.strategies.local_sgd import LocalSGD
from torch_cpudist.strategies.reduce import Reduce
from torch_cpudist.strategies.sync import Sync

_CHOICES: dict[str, tuple[type[Strategy], ...]] = {
    "dense": (AllReduce, Reduce, Sync, LocalSGD),
    "sparse": (Sync, Async, Geo),
}
# What the parts have in common is told to the whole.
_SHARED = ("CPUDIST_SHARDING_", "CPUDIST_SERVER_", "CPUDIST_REPLICAS_")


def _named(part: str, where: str, name: str) -> type[Strategy]:
    kind = kind_named(name, _CHOICES[part])
    if kind is None:
        names = [kind.name for kind in _CHOICES[part]]
        raise ConfigurationError(f"{where}: {fields.nearest(name, names)}")
    return kind


def _made(part: str, value: Any) -> Strategy:
    """A part as a strategy: given as one, by name, or as a dict with ``name``."""
    where = f"Hybrid({part}={value!r})"
    if isinstance(value, str):
        return _named(part, where, value)()
    if isinstance(value, Mapping) and isinstance(value.get("name"), str):
        options = {key: other for key, other in value.items() if key != "name"}
        return fields.from_mapping(_named(part, where, value["name"]), options)
    if type(value) not in _CHOICES[part]:
        kinds = ", ".join(f"{kind.__name__}()" for kind in _CHOICES[part])
        raise ConfigurationError(f"{where}: expected one of {kinds}.")
    made: Strategy = value
    return made


def _reads(part: str) -> Callable[[str, str], Strategy]:
    def parse(variable: str, text: str) -> Strategy:
        return _named(part, f"{variable}={text!r}", text)()

    return parse


def _overrides(part: str) -> Callable[[Any, Mapping[str, Any]], Strategy]:
    def override(value: Strategy, given: Mapping[str, Any]) -> Strategy:
        named: Strategy | None = given.get(f"CPUDIST_HYBRID_{part.upper()}")
        if named is not None and type(value) is not type(named):
            value = named
        own = {k: v for k, v in given.items() if not k.startswith(_SHARED)}
        return fields.with_environment(value, own)

    return override


def _part(part: str, default: Callable[[], Strategy]) -> Any:
    return field(
        default_factory=default,
        metadata={
            "parse": _reads(part),
            "override": _overrides(part),
            "choices": tuple(kind.name for kind in _CHOICES[part]),
        },
    )


@settings
class Hybrid(Strategy):
    """Dense parameters by one strategy, tables by another.

    Dense parameters stay synchronous while tables, whose rows seldom meet, need not
    wait. Per part all is as its strategy says; ``sharding``, ``server`` and
    ``replicas`` are those of the whole. In ``CPUDIST_*`` a part is a name, and its
    fields have the variables of its class.

    Attributes:
        dense: ``AllReduce()``, ``Reduce()``, ``Sync()`` or ``LocalSGD()``; a name or a
            dict is accepted. ``CPUDIST_HYBRID_DENSE``.
        sparse: ``Async()``, ``Sync()`` or ``Geo()``, for tables; a name or a dict is
            accepted. ``CPUDIST_HYBRID_SPARSE``.
    """

    name: ClassVar[str] = "hybrid"

    dense: Strategy = _part("dense", AllReduce)
    sparse: Strategy = _part("sparse", Async)

    def __post_init__(self) -> None:
        """Turns names and dicts into strategies, and checks them."""
        super().__post_init__()
        for part in _CHOICES:
            made = _made(part, getattr(self, part))
            for shared in (Sharding, Server, Replicas):
                section = shared.__name__.lower()
                if getattr(made, section) not in (shared(), getattr(self, section)):
                    raise ConfigurationError(
                        f"Hybrid({part}={type(made).__name__}({section}=...)): both "
                        f"parts have the same. Pass {section}= to Hybrid."
                    )
            made = replace(
                made, sharding=Sharding(), server=Server(), replicas=Replicas()
            )
            object.__setattr__(self, part, made)
        if getattr(self.sparse, "outer", None) is not None and not self.dense.local:
            raise ConfigurationError(
                "Hybrid(dense=Sync(), sparse=Geo(outer=...)): both wait for the other "
                "trainers, each for another step of theirs. Use dense=AllReduce(), or "
                "Geo without outer."
            )

    @property
    def of_tables(self) -> Strategy:
        """The sparse part."""
        return self.sparse

    @property
    def dense_part(self) -> Strategy:
        """``dense``, with the placement of the whole where it has one of its own."""
        if isinstance(self.dense, Reduce):
            return replace(self.dense, sharding=self.sharding)
        return self.dense

    @property
    def shows_state(self) -> bool:
        """Whether that of the dense part does."""
        return self.dense.shows_state

    @property
    def local(self) -> bool:
        """Whether the optimizer of dense parameters runs on the trainer."""
        return self.dense.local

    @property
    def keeps_state(self) -> bool:
        """Whether either part keeps state on the trainer."""
        return self.dense.keeps_state or self.sparse.keeps_state

    @property
    def learns_lookups(self) -> bool:
        """Whether the sparse part does."""
        return self.sparse.learns_lookups

    def check_clip(self, clip: Clip | None) -> None:
        """Refuses a norm over both parts, which nobody knows, and what one refuses."""
        if isinstance(clip, ClipNorm):
            raise UnsupportedOptimizerError(
                f"{clip} under Hybrid: the norm is over dense parameters and tables "
                "together, which are not averaged at one time and place. Use "
                "ClipValue, or a strategy for both, such as Sync."
            )
        self.dense.check_clip(clip)
        self.sparse.check_clip(clip)

    def updates(self, trainers: Trainers) -> Updates:
        """When servers apply the gradients of tables."""
        return self.sparse.updates(trainers)

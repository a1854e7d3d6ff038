# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The strategies there are, by name, and every class of settings that has variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_cpudist.errors import ConfigurationError
from torch_cpudist.log import logger
from torch_cpudist.settings import fields
from torch_cpudist.settings.communicator import Communicator
from torch_cpudist.settings.delay_compensation import DelayCompensation
from torch_cpudist.settings.outer import Outer
from torch_cpudist.settings.replicas import Replicas
from torch_cpudist.settings.server import Server
from torch_cpudist.settings.sharding import Sharding
from torch_cpudist.strategies.allreduce import AllReduce
from torch_cpudist.strategies.asynchronous import Async
from torch_cpudist.strategies.base import Strategy, kind_named
from torch_cpudist.strategies.geo import Geo
from torch_cpudist.strategies.half_async import HalfAsync
from torch_cpudist.strategies.hybrid import Hybrid
from torch_cpudist.strategies.local_sgd import LocalSGD
from torch_cpudist.strategies.reduce import Reduce
from torch_cpudist.strategies.sync import Sync

# Whose fields have environment variables.
SETTINGS: tuple[type, ...] = (
    Sharding,
    Server,
    Communicator,
    DelayCompensation,
    Outer,
    Replicas,
    Strategy,
    AllReduce,
    Async,
    Geo,
    HalfAsync,
    LocalSGD,
    Reduce,
    Sync,
    Hybrid,
)

_BY_NAME: dict[str, type[Strategy]] = {
    kind.name: kind
    for kind in (Sync, HalfAsync, Async, Geo, AllReduce, Reduce, LocalSGD, Hybrid)
}


def names() -> list[str]:
    """The names of the strategies there are."""
    return sorted(_BY_NAME)


def strategy(name: str, **options: Any) -> Strategy:
    """Makes a strategy by name.

    Args:
        name: that of a strategy (``names()``); upper and lower case, ``-`` and ``_``
            do not matter.
        options: fields of its class.

    Raises:
        ConfigurationError: there is no such strategy or field.
    """
    if not isinstance(name, str):
        raise ConfigurationError(f"strategy: expected a name, found {name!r}.")
    kind = kind_named(name, _BY_NAME.values())
    if kind is None:
        raise ConfigurationError(
            f"there is no strategy {name!r} in this version: "
            f"{fields.nearest(name, _BY_NAME)}"
        )
    return fields.from_mapping(kind, options)


def resolve(
    chosen: Strategy | str | Mapping[str, Any] | None,
    named: str | None,
    given: Mapping[str, Any],
    running: Server,
) -> Strategy:
    """Returns the strategy that runs: environment over argument over ``Sync()``.

    Args:
        chosen: a strategy, its name, a dict with ``name`` and fields, or ``None``.
        named: by the environment: it replaces ``chosen`` unless that is of the same
            class, then the chosen arguments stay.
        given: values of the environment by variable; each replaces a field.
        running: settings that servers were started with.

    Raises:
        ConfigurationError: unknown name or field, or server settings other than those
            that the servers were started with.
    """
    if chosen is None:
        made: Strategy = Sync()
    elif isinstance(chosen, str):
        made = strategy(chosen)
    elif isinstance(chosen, Mapping):
        if "name" not in chosen:
            raise ConfigurationError(
                f"a strategy given as a dict needs 'name': {dict(chosen)}"
            )
        made = strategy(
            chosen["name"], **{k: v for k, v in chosen.items() if k != "name"}
        )
    elif isinstance(chosen, Strategy):
        made = chosen
    else:
        hint = ""
        if isinstance(chosen, type) and issubclass(chosen, Strategy):
            hint = f" Pass an object of the class: {chosen.__name__}()."
        raise ConfigurationError(
            f"strategy: expected a strategy, its name or a dict, found {chosen!r}."
            + hint
        )
    if named is not None:
        other = strategy(named)
        made = made if type(made) is type(other) else other
    if made.server not in (Server(), running):
        raise ConfigurationError(
            f"{type(made).__name__}(server={made.server}): servers were started by "
            f"init() with {running}. Pass it there, init(server=...), or set "
            "CPUDIST_SERVER_*."
        )
    # Not refused: another optimizer of the script may have a strategy that reads them.
    made = fields.with_environment(made, given)
    for variable in fields.unused(SETTINGS, made, given):
        logger.warning(
            "%s is set, but %s does not use it", variable, type(made).__name__
        )
    return made

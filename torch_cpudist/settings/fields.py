# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Settings of strategies: frozen dataclasses, checked, with environment overrides.

Every field has a variable ``CPUDIST_<CLASS>_<FIELD>``. The environment wins over the
argument, the argument over the default. Dicts are accepted wherever a settings object
is.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar, dataclass_transform, get_args, get_type_hints

from torch_cpudist.errors import ConfigurationError, InvalidArgumentError

T = TypeVar("T")
_WORDS = {"1": True, "true": True, "yes": True, "on": True}
_WORDS |= {"0": False, "false": False, "no": False, "off": False}

MAX_THREADS = 1024
MAX_BYTES = 2**63 - 1
# Of gradients that travel together: torch's DistributedDataParallel found it enough.
DEFAULT_BUCKET_BYTES = 25 << 20
# Words less alike are no slip of each other: a wrong hint is worse than none.
_ALIKE = 0.7


def nearest(word: str, valid: Iterable[str], prefix: str = "", page: str = "") -> str:
    """A hint for a message: the valid word much like ``word``, if any, then all.

    Args:
        word: what was found.
        valid: what could have been meant.
        prefix: what all words begin with; only the rest is compared.
        page: that lists all of them, where a message cannot: they are many.
    """
    words = sorted(valid)
    rests = {known.removeprefix(prefix): known for known in words}
    close = difflib.get_close_matches(
        word.removeprefix(prefix), rests, n=1, cutoff=_ALIKE
    )
    hint = f"did you mean {rests[close[0]]}? " if close else ""
    if page:
        return f"{hint}{page} lists all {len(words)}."
    return f"{hint}Valid: {', '.join(words)}."


def check_range(
    where: str, value: float, least: float | None, most: float | None
) -> None:
    """Checks a number against limits; ``None`` is no limit.

    Raises:
        ConfigurationError: names ``where`` and the limit.
    """
    # In this form a nan passes neither.
    if least is not None and not value >= least:
        raise ConfigurationError(f"{where}: must be at least {least}.")
    if most is not None and not value <= most:
        raise ConfigurationError(f"{where}: must be at most {most}.")


def check_pull(caller: str, pull: str) -> None:
    """Raises ``InvalidArgumentError`` for what ``flush`` does not take."""
    if pull not in ("all", "dense", "none"):
        raise InvalidArgumentError(
            f"{caller}: pull must be 'all', 'dense' or 'none', got {pull!r}"
        )


def whole_number(where: str, value: Any, least: int, most: int) -> int:
    """An argument that must be a whole number; numpy's and torch's are accepted.

    Raises:
        ConfigurationError: it is none, or out of range.
    """
    where = f"{where}={value!r}"
    try:
        number = operator.index(value)
    except TypeError:
        raise ConfigurationError(
            f"{where}: expected a whole number, found {type(value).__name__}."
        ) from None
    check_range(where, number, least, most)
    return number


def _refuse_mutation(self: Any, name: str, value: object = None) -> NoReturn:
    kind = type(self).__name__
    raise ConfigurationError(
        f"{kind} is immutable: {name} cannot be set. Make a changed copy: "
        f"dataclasses.replace(settings, {name}=...)"
    )


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def settings(cls: type[T]) -> type[T]:
    """Makes a frozen dataclass whose mutation says what to do instead."""
    made: Any = dataclass(frozen=True)(cls)
    made.__setattr__ = _refuse_mutation
    made.__delattr__ = _refuse_mutation
    return made  # type: ignore[no-any-return]


def scalar_fields(cls: type) -> list[dataclasses.Field[Any]]:
    """The fields of a settings class that hold a plain value, not other settings."""
    return [f for f in dataclasses.fields(cls) if "section" not in f.metadata]


def variable_of(cls: type, name: str) -> str:
    """The environment variable of a field."""
    return f"CPUDIST_{cls.__name__.upper()}_{name.upper()}"


@functools.cache
def _hints(cls: type[Any]) -> dict[str, Any]:
    """The types of a class's fields, which are texts until somebody evaluates them."""
    return get_type_hints(cls)


def check(instance: Any) -> None:
    """Checks type and range of every plain field; for ``__post_init__``.

    A field whose metadata has ``parse``, which reads its variable, is left to its
    class.

    Raises:
        ConfigurationError: names class, field, value and what is allowed.
    """
    hints = _hints(instance.__class__)
    for entry in scalar_fields(type(instance)):
        if "parse" in entry.metadata:
            continue  # its class checks it
        value: Any = getattr(instance, entry.name)
        where = f"{type(instance).__name__}({entry.name}={value!r})"
        kind, optional = _kind(hints[entry.name])
        if value is None and optional:
            continue
        if kind is float and type(value) is int:
            value = float(value)
            object.__setattr__(instance, entry.name, value)
        if type(value) is not kind:
            raise ConfigurationError(
                f"{where}: expected {kind.__name__}, found {type(value).__name__}."
            )
        limits = entry.metadata
        if isinstance(value, (int, float)):
            check_range(where, value, limits.get("least"), limits.get("most"))
        choices = entry.metadata.get("choices")
        if choices is not None and value not in choices:
            raise ConfigurationError(f"{where}: {nearest(str(value), choices)}")


@functools.cache
def _kind(hint: Any) -> tuple[type, bool]:
    """The type of a field, and whether it may be ``None``."""
    kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    return (kinds[0], True) if kinds else (hint, False)


def from_mapping(cls: type[T], values: T | Mapping[str, Any]) -> T:
    """Makes a settings object of a dict; one that is made already is returned as it is.

    Raises:
        ConfigurationError: unknown key (the message names the nearest one), or neither.
    """
    if isinstance(values, cls):
        return values
    if not isinstance(values, Mapping):
        raise ConfigurationError(
            f"expected {cls.__name__} or a dict of its fields, found {values!r}."
        )
    names = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for key in values:
        if key not in names:
            raise ConfigurationError(
                f"{cls.__name__} has no field {key!r}: {nearest(str(key), names)}"
            )
    return cls(**values)


def parse_text(variable: str, text: str, hint: Any) -> Any:
    """Reads a variable as ``bool``, ``int``, ``float``, ``str``, or ``none``.

    Raises:
        ConfigurationError: the text is not one.
    """
    kind, optional = _kind(hint)
    if optional and text.strip().lower() == "none":
        return None
    try:
        if kind is bool:
            return _WORDS[text.strip().lower()]
        return kind(text.strip())
    except (ValueError, KeyError):
        expected = (
            "1 or 0"
            if kind is bool
            else {"int": "a whole number"}.get(kind.__name__, f"a {kind.__name__}")
        )
        raise ConfigurationError(f"{variable}={text!r}: expected {expected}.") from None


def read(classes: Iterable[type], texts: Mapping[str, str]) -> dict[str, Any]:
    """What the variables of settings classes say, each text read once.

    Args:
        classes: whose variables are read.
        texts: by variable; those of others are left out.

    Returns:
        Values by variable, of the types of their fields; not yet checked for range.

    Raises:
        ConfigurationError: a text cannot be read; names the variable.
    """
    values: dict[str, Any] = {}
    for cls in classes:
        hints = _hints(cls)
        for entry in scalar_fields(cls):
            variable = variable_of(cls, entry.name)
            if variable not in texts:
                continue
            parse = entry.metadata.get("parse")
            values[variable] = (
                parse(variable, texts[variable])
                if parse is not None
                else parse_text(variable, texts[variable], hints[entry.name])
            )
    return values


def _from_variables(cls: Any, given: Mapping[str, Any]) -> Any:
    """Settings that are off, switched on by any variable of theirs; else ``None``."""
    names = (variable_of(cls, entry.name) for entry in scalar_fields(cls))
    return cls() if any(name in given for name in names) else None


def _own_variables(
    entry: dataclasses.Field[Any], section: Any, given: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The variables that a section may read: all, or those of its ``only`` fields."""
    if "only" not in entry.metadata:
        return given
    names = {variable_of(type(section), name) for name in entry.metadata["only"]}
    return {name: value for name, value in given.items() if name in names}


def with_environment(instance: T, given: Mapping[str, Any]) -> T:
    """Returns ``instance``, or a copy with every field replaced whose variable is set.

    Args:
        instance: settings.
        given: values by variable; see ``read``.

    Raises:
        ConfigurationError: a value is out of range; names the variable.
    """
    cls: Any = type(instance)
    changes: dict[str, Any] = {}
    for entry in dataclasses.fields(cls):
        if "section" in entry.metadata:
            value = getattr(instance, entry.name)
            if value is None:
                value = _from_variables(entry.metadata["section"], given)
            if value is not None:
                own = _own_variables(entry, value, given)
                changes[entry.name] = with_environment(value, own)
            continue
        if "override" in entry.metadata:
            override = entry.metadata["override"]
            changes[entry.name] = override(getattr(instance, entry.name), given)
            continue
        variable = variable_of(cls, entry.name)
        if variable in given:
            value = given[variable]
            try:
                # With what was read before it: one may only be valid with the other.
                dataclasses.replace(instance, **changes, **{entry.name: value})  # type: ignore[type-var]
            except ConfigurationError as error:
                # What is wrong without this variable is not its fault.
                dataclasses.replace(instance, **changes)  # type: ignore[type-var]
                raise ConfigurationError(f"{variable}: {error}") from None
            changes[entry.name] = value
    if all(getattr(instance, name) is value for name, value in changes.items()):
        return instance
    return dataclasses.replace(instance, **changes)  # type: ignore[type-var]


def unused(classes: Iterable[type], instance: Any, given: Iterable[str]) -> list[str]:
    """The variables of settings ``classes`` that are given, but not ``instance``'s."""
    return sorted((variables(classes) & set(given)) - _variables_of(instance))


def _variables_of(instance: Any) -> frozenset[str]:
    """The variables of an object's fields, and of the settings in them."""
    if not dataclasses.is_dataclass(instance):
        return frozenset()
    own = {variable_of(type(instance), f.name) for f in scalar_fields(type(instance))}
    for entry in dataclasses.fields(instance):
        part = getattr(instance, entry.name)
        own |= _own_variables(
            entry, part, dict.fromkeys(_variables_of(part), "")
        ).keys()
    return frozenset(own)


def variables(classes: Iterable[type]) -> frozenset[str]:
    """The environment variables of settings classes."""
    return frozenset(
        variable_of(cls, entry.name) for cls in classes for entry in scalar_fields(cls)
    )

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The key by which the processes of a run prove that they belong to it."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

from torch_cpudist import _core
from torch_cpudist.errors import ConfigurationError
from torch_cpudist.settings import fields

NAMES = ("CPUDIST_AUTH", "CPUDIST_SECRET", "CPUDIST_SECRET_FILE")
BYTES_MIN = 32
_BYTES_MAX = 4096
# Besides this process's own: those that a container has mounted, which root made for a
# group that this process is in (mode 0440), and only root can.
_ROOT = 0
_NOT_OF_OWNER = 0o077
_NOT_OF_ROOT = 0o037
_MAKE_ONE = "head -c 32 /dev/urandom | base64 > FILE; chmod 600 FILE"


def required(variables: Mapping[str, str]) -> bool:
    """Whether nothing may start without a key."""
    text = variables.get("CPUDIST_AUTH", "optional").strip().lower()
    valid = ("optional", "require")
    if text not in valid:
        raise ConfigurationError(
            f"CPUDIST_AUTH={text!r}: {fields.nearest(text, valid)}"
        )
    return text == "require"


def read(variables: Mapping[str, str]) -> _core.Secret | None:
    """Reads the key: of ``CPUDIST_SECRET_FILE``, else ``CPUDIST_SECRET``.

    No message has a byte of it.

    Raises:
        ConfigurationError: the file cannot be read, others may read it, the key is
            short, or there is none and ``CPUDIST_AUTH=require``.
    """
    if path := variables.get("CPUDIST_SECRET_FILE"):
        return _checked(f"CPUDIST_SECRET_FILE={path}", _of_file(path))
    if "CPUDIST_SECRET_FILE" in variables:
        raise ConfigurationError(
            f"CPUDIST_SECRET_FILE is empty: expected a file ({_MAKE_ONE}). Set one, or "
            "unset it."
        )
    if "CPUDIST_SECRET" in variables:
        key = variables["CPUDIST_SECRET"].encode("utf-8", "surrogateescape")
        return _checked("CPUDIST_SECRET", key)
    if required(variables):
        raise ConfigurationError(
            "CPUDIST_AUTH=require, and there is no key. Set CPUDIST_SECRET_FILE to a "
            f"file that every process of the run has a copy of ({_MAKE_ONE}), or unset "
            "CPUDIST_AUTH."
        )
    return None


def _of_file(path: str) -> bytes:
    where = f"CPUDIST_SECRET_FILE={path}"
    try:
        # Of a pipe nobody may ever write to, an open would wait for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise _unreadable(where, error) from error
    try:
        _check_file(where, os.fstat(descriptor))
        key = os.read(descriptor, _BYTES_MAX + 2)
    except OSError as error:
        raise _unreadable(where, error) from error
    finally:
        os.close(descriptor)
    return key.removesuffix(b"\n").removesuffix(b"\r")


def _unreadable(where: str, error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"{where}: it cannot be read ({error}). Expected a file with the key, of this "
        f"user and mode 0600 ({_MAKE_ONE})."
    )


def _check_file(where: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ConfigurationError(f"{where}: expected a file with the key.")
    mode = stat.S_IMODE(status.st_mode)
    mounted = status.st_uid == _ROOT and status.st_uid != os.geteuid()
    if mode & (_NOT_OF_ROOT if mounted else _NOT_OF_OWNER):
        raise ConfigurationError(
            f"{where}: its mode is {mode:04o}, by which others than its owner may use "
            "it: expected 0600 (of root at most 0640). chmod 600 it, and make another "
            "key if others could read it."
        )
    if status.st_uid not in (os.geteuid(), _ROOT):
        raise ConfigurationError(
            f"{where}: it belongs to user {status.st_uid}, expected {os.geteuid()}, "
            "this process's."
        )


def _checked(where: str, key: bytes) -> _core.Secret:
    if len(key) < BYTES_MIN:
        raise ConfigurationError(
            f"{where}: a key of {len(key)} bytes, expected at least {BYTES_MIN} that "
            f"nobody can guess ({_MAKE_ONE})."
        )
    if len(key) > _BYTES_MAX:
        raise ConfigurationError(
            f"{where}: a key of more than {_BYTES_MAX} bytes; is it another file?"
        )
    return _core.Secret(key)

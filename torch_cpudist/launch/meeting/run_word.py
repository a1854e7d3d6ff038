# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What trainers find of a run and of its jobs, field by field.

Without a key anybody may have written it.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch_cpudist.backends.meeting import RUN_ID_MAX, whole
from torch_cpudist.errors import ProtocolError
from torch_cpudist.launch.meeting.frames import parsed

RANKS_MAX = 2**16 - 1  # as frames have them


def run_of(text: str) -> dict[str, Any]:
    """What a word says of a run: ``run_id``, ``trainers`` (how many), and the others.

    ``servers`` has the addresses of each, ``hosts`` where it is, ``settings`` what must
    be equal on trainers.

    Raises:
        ProtocolError: a field is not what servers write; the message names it.
    """
    run = parsed("what stands there of a run", text)
    if not isinstance(run, dict):
        _refuse("the run", run, "an object")
    whole("the run's id", run.get("run_id"), 1, RUN_ID_MAX)
    whole("the number of trainers", run.get("trainers"), 1, RANKS_MAX)
    servers, hosts, settings = (run.get(n) for n in ("servers", "hosts", "settings"))
    if not (isinstance(servers, list) and 1 <= len(servers) <= RANKS_MAX):
        _refuse("'servers'", servers, "the addresses of each server")
    for shard, addresses in enumerate(servers):
        if not (isinstance(addresses, list) and addresses and _texts(addresses)):
            _refuse(f"'servers'[{shard}]", addresses, "addresses")
    if not (isinstance(hosts, list) and len(hosts) == len(servers) and _texts(hosts)):
        _refuse("'hosts'", hosts, f"{len(servers)} texts")
    if not (isinstance(settings, dict) and _texts(settings.values())):
        _refuse("'settings'", settings, "texts by name")
    return run


def job_of(text: str) -> tuple[int, int]:
    """A job's first trainer id, and its number of ranks.

    Raises:
        ProtocolError: the word says neither.
    """
    found = parsed("what stands there of this job", text)
    if not (isinstance(found, list) and len(found) == 2):
        _refuse("this job", found, "its first id and its ranks")
    return (
        whole("this trainer's id", found[0], 0, RANKS_MAX),
        whole("its job's number of ranks", found[1], 1, RANKS_MAX),
    )


def _texts(values: Any) -> bool:
    return all(isinstance(one, str) for one in values)


def _refuse(name: str, found: object, expected: str) -> NoReturn:
    raise ProtocolError(
        f"what stands there of the run: {name} is of {type(found).__name__}, expected "
        f"{expected}. Somebody else writes to it: give the run a meeting point of its "
        "own (SECURITY.md)."
    )

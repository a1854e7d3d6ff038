# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What snapshots and their files are called, and where rows live by their keys."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torch_cpudist.errors import InvalidArgumentError

MANIFEST = "manifest.json"
SNAPSHOT = r"[a-z0-9][a-z0-9-]{0,63}"
#: Of names that are made here and not by users.
AUTOMATIC = "snap-"
#: Of places for rows on their way to servers: no snapshot's name has a dot.
STAGED = "staged."
_STAGED_ROWS = "rows-"
TOKEN = "token-"  # noqa: S105  a prefix of file names
_RUN_TOKEN = re.compile(r"token-([0-9a-f]{16})-[0-9].*")
_STAGED = re.compile(r"staged\.[0-9a-f]{16}")
#: Behind the name of one that was put together from a chain.
COMPACTED = "-full"
# Of the run there were 4 digits once.
_NUMBERED = re.compile(
    r"snap-([0-9]{12,20})-([0-9a-f]{4}|[0-9a-f]{8})(-s[0-9]+)?(-full)?"
)
_PART = re.compile(r"s([0-9]{3,10})-t([0-9]{3,10})-([0-9]{4,10})\.safetensors")
_DENSE = re.compile(r"s([0-9]{3,10})-dense\.safetensors")
#: Directories of what trainers have left behind, which no snapshot is called.
LEFT = "left_"
_GONE = re.compile(r"s([0-9]{3,10})-gone\.safetensors")
_TRAINER = re.compile(r"trainer-([0-9]{3,10})\.(json|safetensors)")

#: Every table's rows are spread over so many buckets, which are dealt to servers.
BUCKETS = 4096


def snapshot_name(number: int, run_id: int, param_set: int = 0) -> str:
    """The name of a snapshot that the user gave none.

    Args:
        number: of its cut.
        run_id: the run's.
        param_set: which of the run's optimizers; those after the first have a suffix.
    """
    suffix = f"-s{param_set}" if param_set else ""
    return f"{AUTOMATIC}{number:012d}-{run_id & 0xFFFFFFFF:08x}{suffix}"


def number_of(name: str) -> int | None:
    """The number in a name that ``snapshot_name`` made; ``None`` in a user's."""
    found = _NUMBERED.fullmatch(name)
    return int(found.group(1)) if found else None


def same_origin(one: str, other: str) -> bool:
    """Whether one optimizer of one run may have made both names."""
    first, second = _NUMBERED.fullmatch(one), _NUMBERED.fullmatch(other)
    if first is None or second is None:
        return False
    return first.group(2, 3) == second.group(2, 3)


def may_be_going_on(name: str, run_id: int, param_set: int) -> bool:
    """Whether another optimizer of a run may be writing what ``snapshot_name`` named.

    Args:
        name: of the directory.
        run_id: of the run that goes on.
        param_set: the optimizer that asks, which writes nothing yet.
    """
    found = _NUMBERED.fullmatch(name)
    if found is None or found.group(2) != f"{run_id & 0xFFFFFFFF:08x}":
        return False
    return int((found.group(3) or "-s0")[2:]) != param_set


def is_name(text: str) -> bool:
    """Whether a snapshot can be called so."""
    return re.fullmatch(SNAPSHOT, text) is not None


def check_name(name: str) -> str:
    """Returns the name of a snapshot as a user gave it.

    Raises:
        InvalidArgumentError: it cannot be one.
    """
    if not isinstance(name, str) or not re.fullmatch(SNAPSHOT, name):
        raise InvalidArgumentError(
            f"a snapshot cannot be called {name!r}: expected 1 to 64 of a-z, 0-9 and "
            "-, and no - in front"
        )
    return name


@dataclass(frozen=True)
class PartName:
    """Whose rows a file has: from its name alone.

    Attributes:
        server: which one wrote it, of those there were.
        table: index of the table; ``None`` for the server's dense blocks.
        part: counted from 0 for each server and table.
        gone: it has keys without a row any more, of all tables, and no dense blocks.
    """

    server: int
    table: int | None
    part: int = 0
    gone: bool = False

    def __str__(self) -> str:
        """The file's name."""
        if self.table is None:
            what = "gone" if self.gone else "dense"
            return f"s{self.server:03d}-{what}.safetensors"
        return f"s{self.server:03d}-t{self.table:03d}-{self.part:04d}.safetensors"


def part_name(text: str) -> PartName | None:
    """What the name of a server's file says; ``None`` for others."""
    if found := _PART.fullmatch(text):
        server, table, part = (int(number) for number in found.groups())
        name = PartName(server, table, part)
    elif found := _DENSE.fullmatch(text):
        name = PartName(int(found.group(1)), None)
    elif found := _GONE.fullmatch(text):
        name = PartName(int(found.group(1)), None, gone=True)
    else:
        return None
    return name if str(name) == text else None


def staged_file(number: int) -> str:
    """A file of rows in such a place; another one each time."""
    return f"{_STAGED_ROWS}{number:06d}.safetensors"


def is_staged_file(name: str) -> bool:
    """Whether ``staged_file`` makes such names."""
    return name.startswith(_STAGED_ROWS)


def is_staged(text: str) -> bool:
    """Whether a directory is a place for rows on their way to servers."""
    return _STAGED.fullmatch(text) is not None


def trainer_name(rank: int, suffix: str = "json") -> str:
    """The file of a trainer's own state; ``safetensors`` has its tensors."""
    return f"trainer-{rank:03d}.{suffix}"


def left_name(run_id: int, param_set: int) -> str:
    """Where the trainers of a run that have left put their states."""
    return f"{LEFT}{run_text(run_id)}_{param_set}"


def run_token(run_id: int, which: str) -> str:
    """A small file of a run in the directory of its snapshots."""
    return f"{TOKEN}{run_text(run_id)}-{which}"


def begun_name(run_id: int, param_set: int) -> str:
    """What says what values of an optimizer have grown from, where trainers go."""
    return run_token(run_id, f"{param_set}-begun")


def begun_number(text: str, run_id: int) -> int | None:
    """Which optimizer of a run that file is of; ``None`` for others."""
    found = re.fullmatch(rf"token-{run_text(run_id)}-([0-9]+)-begun", text)
    return int(found.group(1)) if found else None


def wanted_name(run_id: int, param_set: int) -> str:
    """What says that a server wants a snapshot of an optimizer before it ends."""
    return run_token(run_id, f"{param_set}-wanted")


def is_run_token(text: str, run_id: int) -> bool | None:
    """Whether a token is of that run; ``None`` if it names no run."""
    found = _RUN_TOKEN.fullmatch(text)
    return found.group(1) == run_text(run_id) if found else None


def run_text(run_id: int) -> str:
    """A run's id as it stands in files and their names: 16 hexadecimal digits."""
    return f"{run_id % 2**64:016x}"


def gone_keys(table: int) -> str:
    """What the tensor of a table's keys is called in a file of those that have gone."""
    return f"t{table:03d}.keys"


def is_own(text: str) -> bool:
    """Whether a file in the directory of a snapshot is one that is made here."""
    whole = text.removesuffix(".tmp")
    known = (_PART, _DENSE, _GONE, _TRAINER)
    return whole == MANIFEST or any(one.fullmatch(whole) for one in known)


def server_buckets(server: int, servers: int) -> tuple[int, int]:
    """The run of buckets that a server owns, its end excluded.

    Bucket b is of server ``b * servers // 4096``, in the core as here.
    """
    if not 0 <= server < servers:
        raise InvalidArgumentError(f"server {server} of {servers}")
    return -(-server * BUCKETS // servers), -(-(server + 1) * BUCKETS // servers)


def mix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A bijection of 64 bits that mixes them well; as ``csrc/kernels/hash.h``."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def buckets_of(keys: npt.NDArray[np.int64], salt: int) -> npt.NDArray[np.uint64]:
    """The bucket of each key, in a table of that salt."""
    hashed = mix64(keys.astype(np.int64).view(np.uint64) ^ np.uint64(salt))
    return hashed % np.uint64(BUCKETS)


def table_salt(name: str) -> int:
    """The salt of a table of that name, 64 bits."""
    salt = 0xCBF29CE484222325
    for byte in name.encode():
        salt = (salt ^ byte) * 0x100000001B3 % 2**64
    return int(mix64(np.array([salt], dtype=np.uint64))[0])

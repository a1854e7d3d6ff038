# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Where snapshots are, as ``resume``, ``load_snapshot`` and the environment say."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from torch_cpudist.errors import (
    ConfigurationError,
    InvalidArgumentError,
    SnapshotError,
)
from torch_cpudist.log import logger
from torch_cpudist.machine.urls import is_url
from torch_cpudist.snapshot import names
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.staging import Stage
from torch_cpudist.snapshot.store import Store


def checked_place(
    path: object, staging: object, said: str | None
) -> tuple[str | Path, str | None]:
    """A directory for snapshots, and the URL of a store that they are copied to.

    Args:
        path: as ``resume`` was given it.
        staging: likewise.
        said: by ``CPUDIST_SNAPSHOT_DIR``.

    Raises:
        ConfigurationError: nobody has said where, or the variable is a URL.
        InvalidArgumentError: an argument is wrong.
    """
    if said is not None and is_url(said):
        raise ConfigurationError(
            f"CPUDIST_SNAPSHOT_DIR={said}: servers write to a directory. Name one, and "
            "pass the URL to resume()."
        )
    if isinstance(path, Path) and re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(path)):
        raise InvalidArgumentError(
            f"resume: path={path!r} was a URL, and a Path is none: pass it as a text"
        )
    url = path if isinstance(path, str) and is_url(path) else None
    if url is None and staging is not None:
        raise InvalidArgumentError(
            f"resume: staging={staging!r} is for a URL, as s3://bucket/prefix is; "
            f"path={path!r} is none"
        )
    found = staging if url is not None else path
    if found is None and said is None:
        what = "resume: nobody has said where snapshots are. Pass"
        if url is not None:
            what = f"resume({url!r}): servers write to a directory first. Pass staging="
        raise ConfigurationError(
            f"{what} a directory that all processes share, or set CPUDIST_SNAPSHOT_DIR."
        )
    found = said if found is None else found
    if not isinstance(found, (str, Path)) or not str(found):
        raise InvalidArgumentError(
            f"resume: {'path' if url is None else 'staging'}={found!r}, expected the "
            "name of a directory"
        )
    return found, url


def check_new_name(
    name: str, directory: Directory, store: Store | None, url: str | None
) -> None:
    """Sees that a user's name can be that of a snapshot, and is new.

    Where the store cannot be asked nothing is said: who copies will say so.

    Args:
        name: of the snapshot.
        directory: where it is to be.
        store: that it is to be copied to.
        url: of that.

    Raises:
        InvalidArgumentError: it is no name, or one that is made here.
        SnapshotError: it is there already.
    """
    names.check_name(name)
    if names.number_of(name) is not None:
        raise InvalidArgumentError(
            f"save_snapshot: {name!r} is like a name that is made here: take another"
        )
    if name in directory.names():
        raise SnapshotError(
            f"snapshot {name!r} is in {directory.path} already, and none is ever "
            "overwritten. Take another name, or remove its directory."
        )
    there = False
    if store is not None:
        with contextlib.suppress(SnapshotError):
            there = store.has(name)
    if there:
        raise SnapshotError(
            f"snapshot {name!r} is in {url} already, and none is ever overwritten. "
            "Take another name, or remove it there."
        )


def located(source: str | os.PathLike[str], directory: Directory) -> Path | str:
    """The directory of a snapshot, here or elsewhere; or its URL.

    Args:
        source: as ``load_snapshot`` was given it.
        directory: of this run's snapshots.

    Raises:
        InvalidArgumentError: it cannot be one.
    """
    if isinstance(source, str) and is_url(source):
        names.check_name(source.rstrip("/").rpartition("/")[2])
        return source.rstrip("/")
    if isinstance(source, str) and os.sep not in source:
        return directory.folder(source)
    text = os.fspath(source) if isinstance(source, (str, os.PathLike)) else ""
    if not isinstance(text, str) or not text:
        raise InvalidArgumentError(
            f"load_snapshot: {source!r}, expected the name of a snapshot, its "
            "directory or URL"
        )
    path = Path(text).expanduser().absolute()
    return Directory(path.parent).folder(path.name)


def brought(
    where: Path | str, stage: Stage, directory: Directory, store: Store | None
) -> Path:
    """Where a snapshot is, copied here if it was not.

    Args:
        where: as ``located`` has returned.
        stage: for what comes from elsewhere.
        directory: of this run's snapshots.
        store: that they are copied to.
    """
    if isinstance(where, str):
        url, _, name = where.rpartition("/")
        Store(url).get(stage.inside, name)
        return stage.inside.folder(name)
    own = where.parent == directory.path
    if store is not None and own and where.name not in directory.names():
        store.get(directory, where.name)
    return where


def mended(folder: Path, directory: Directory, store: Store | None) -> bool:
    """Whether a store had what is damaged of a snapshot of this directory.

    Args:
        folder: of the snapshot.
        directory: of this run's snapshots.
        store: that they are copied to.
    """
    if store is None or folder.parent != directory.path:
        return False
    try:
        return store.mend(directory, folder.name)
    except SnapshotError as error:
        logger.warning("snapshot %s is damaged, and %s", folder.name, error)
        return False


def nothing_to_load(directory: Directory) -> SnapshotError:
    """The error of a trainer whose servers came back, and have nothing to load."""
    return SnapshotError(
        "servers have come back without values, and there is no snapshot in "
        f"{directory.path} to load: none was saved before they were lost. Start all "
        "trainers' jobs again, which begin anew, with every_steps= or every_s=."
    )

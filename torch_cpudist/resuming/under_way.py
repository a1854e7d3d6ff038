# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a run began with, where its trainers come and go: no barrier would hold them.

Trainer 0 loads the newest snapshot before anybody trains, and leaves a file that says
so, of this run and this optimizer, in the directory of snapshots. Whoever resumes waits
for that file: at the start until the values are there, and one that comes back, or
comes later, not at all. So values are loaded once, however often trainers are started.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_cpudist.drivers.saving import Saving
from torch_cpudist.errors import (
    ConfigMismatchError,
    Error,
    OperationTimeoutError,
    PeerLostError,
    SnapshotCorruptError,
    SnapshotError,
    describe,
)
from torch_cpudist.log import logger
from torch_cpudist.resuming.trainer_tree import read_tree
from torch_cpudist.snapshot import names
from torch_cpudist.snapshot.checked_json import Fields, Malformed, parse
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.files import reported
from torch_cpudist.snapshot.manifest import Manifest, Trainer

if TYPE_CHECKING:
    from torch_cpudist.launch.run import Run

_POLL_S = 0.02
_RETRY_S = 0.2
_SHARED = (
    "Name the same directory by resume(path) or CPUDIST_SNAPSHOT_DIR, and by "
    "CPUDIST_SNAPSHOT_DIR for the servers."
)


@dataclass(frozen=True)
class Begun:
    """What the values on the servers have grown from.

    Attributes:
        name: of a snapshot in the directory; ``None``: of none there.
        commit: of the newest one when that was loaded; later ones are of this run.
    """

    name: str | None
    commit: int


def _packed(entry: dict[str, Any]) -> bytes:
    return json.dumps(entry).encode()


class UnderWay:
    """Of one optimizer of one run. No method waits for what another trainer calls.

    Args:
        run: this trainer's.
        directory: as this trainer understands it.
        number: which of the run's optimizers it is.
        patience_s: how long from now on a disk may refuse what has to be written.
    """

    def __init__(
        self, run: Run, directory: Directory, number: int, patience_s: float = 0.0
    ) -> None:
        self._run = run
        self._directory = directory
        self._number = number
        self._patience_s = patience_s
        self._patient_until = time.monotonic() + patience_s
        self._file = names.begun_name(run.run_id, number)
        #: It was in this run before, or comes when others have trained for long.
        self.comes_late = run.incarnation > 1 or run.trainer_rank >= run.trainer_count

    def check(self, saving: Saving) -> None:
        """Sees that servers mean the directory of this trainer.

        Raises:
            ConfigMismatchError: names those that do not.
            SnapshotError: it cannot be written.
        """
        run = self._run
        which = f"{self._number}-of-{run.trainer_rank}-{run.incarnation}"
        token = names.run_token(run.run_id, which)
        saving.use(self._directory.path)
        self._write(token, b"")  # nothing in it: a disk that is full has names left
        try:
            blind = saving.sees(token)
        finally:
            self._remove(token)
        if blind:
            raise ConfigMismatchError(
                "snapshots need one directory that all processes see and can write "
                f"to; that of trainer {run.trainer_rank} is {self._directory.path}. "
                f"Not so: {'; '.join(blind)}. {_SHARED}"
            )

    # -- trainer 0 ---------------------------------------------------------------------

    def begin(self, load: Callable[[], Any]) -> None:
        """Has values loaded, unless the run has begun with some; on trainer 0 alone.

        Args:
            load: loads them, and calls ``loading`` and ``loaded``.

        Raises:
            Error: as it does; the others are told.
        """
        if self._read() is not None:
            return
        self._directory.sweep(self._run.run_id, self._number)
        try:
            load()
        except PeerLostError:
            raise  # as when it is killed: the others see it, or wait for its return
        except Error as error:
            told = _packed({"error": describe(error)})
            with contextlib.suppress(SnapshotError):  # their wait ends all the same
                self._directory.write_word(self._file, told)
            raise

    def grown(self, folder: Path | None, whole: bool = True) -> Begun:
        """What values will have grown from once a snapshot is loaded; on trainer 0.

        Args:
            folder: where it is; ``None``: there is none.
            whole: the run goes back to it; else values change and states stay.
        """
        if not whole and (before := self._read()) is not None:
            return before
        here = folder is not None and folder.parent == self._directory.path
        commits = [one.manifest.commit for one in self._committed()]
        name = folder.name if folder is not None and here else None
        return Begun(name, max(commits, default=0))

    def loading(self) -> None:
        """Values begin to change: who comes now waits; on trainer 0."""
        self._remove(self._file)

    def loaded(self, begun: Begun) -> None:
        """They are there; on trainer 0."""
        entry = {"name": begun.name, "commit": begun.commit}
        self._write(self._file, _packed(entry))

    def clear(self, saving: Saving) -> int:
        """Drops what trainer 0 had begun before it ended, and counts beyond it.

        Returns:
            A number that no later cut may have, nor one below it.
        """
        newest = 0
        for name in [*self._directory.names(), *self._directory.uncommitted()]:
            newest = max(newest, names.number_of(name) or 0)
        for name in self._directory.uncommitted():
            number = names.number_of(name)
            own = number is not None and name == names.snapshot_name(
                number, self._run.run_id, self._number
            )
            if own and number is not None:
                saving.abandon(number)
                self._directory.remove(name)
        return newest

    # -- all ---------------------------------------------------------------------------

    def wait(self, limit_s: float, after_loss: bool = False) -> Begun:
        """Returns when values are there.

        Args:
            limit_s: how long that may take.
            after_loss: servers have come back without values.

        Raises:
            SnapshotError: trainer 0 could not load them.
            OperationTimeoutError: it has not in time.
        """
        until = time.monotonic() + limit_s
        while (found := self._read(failures=True)) is None:
            self._run.trainer_client().check()
            if time.monotonic() > until:
                raise OperationTimeoutError(self._too_late(limit_s, after_loss))
            time.sleep(_POLL_S)
        return found

    def _too_late(self, limit_s: float, after_loss: bool) -> str:
        found = (
            f"within {limit_s:g} s: {self._directory.path / self._file} is not there"
        )
        if after_loss:
            return (
                "servers have come back without values, and trainer 0, which alone "
                f"loads them, has not {found}. If trainer 0 has ended, start its job "
                "again, and then this one; if it still loads, CPUDIST_REJOIN_S is too "
                f"short. {_SHARED}"
            )
        return (
            f"resume: trainer 0 has not loaded or begun anything {found}. Every "
            "trainer has to call resume(); see that trainer 0 runs, and that it means "
            f"this directory. {_SHARED}"
        )

    def own_state(self, begun: Begun) -> tuple[Manifest | None, bool]:
        """The newest snapshot whose moment is behind the values on the servers.

        Returns:
            The newest that has this trainer's own state, else the newest one; whether
            it has it.
        """
        rank = self._run.trainer_rank
        found = self._grown_from(begun)
        for manifest in found:
            trainer = next((t for t in manifest.trainers if t.rank == rank), None)
            if trainer is None:
                continue
            folder = self._directory.folder(manifest.name)
            try:
                read_tree(folder, trainer, self._directory.files)
            except SnapshotCorruptError as error:
                logger.warning("%s It is passed over.", error)
            else:
                return manifest, True
        return (found[0] if found else None), False

    def states(self, rank: int) -> list[tuple[Path, Trainer]]:
        """Own states of a trainer, with their snapshots' directories, newest first.

        Of snapshots whose moment is behind the values on the servers. Any thread.
        """
        begun = self._read()
        return [
            (self._directory.folder(manifest.name), trainer)
            for manifest in ([] if begun is None else self._grown_from(begun))
            for trainer in manifest.trainers
            if trainer.rank == rank
        ]

    def _grown_from(self, begun: Begun) -> list[Manifest]:
        return [
            one.manifest
            for one in self._committed()
            if one.manifest.commit > begun.commit or one.name == begun.name
        ]

    def told(self, name: str | None, step: int, own: bool) -> str:
        """What a trainer that comes late goes on from, for people."""
        run = self._run
        back = run.incarnation > 1
        came = f"is back, started for the {run.incarnation}. time" if back else "is new"
        text = (
            f"trainer {run.trainer_rank} {came}, in a run that has gone on: values are "
            "those on the servers"
        )
        if not own:
            text += ", and no snapshot of this run has a state of its own: it begins "
            text += f"at step {step}"
            text += f" of trainer 0 in snapshot {name}" if name is not None else ""
        else:
            text += f", its own state is that at step {step}, of snapshot {name}"
        if back:
            text += ". What it may have pushed after that is in the values already"
        return text

    def _committed(self) -> list[Any]:
        found = self._directory.committed(self._number)
        return [one for one in found if one.damage is None]

    def _read(self, failures: bool = False) -> Begun | None:
        path = self._directory.path / self._file
        with reported(f"cannot read {path}", _SHARED):
            if self._directory.files.size(path) is None:
                return None
            try:
                contents = self._directory.files.read(path)
            except FileNotFoundError:  # values change again
                return None
        try:
            fields = Fields(parse(contents), "begun")
            if fields.has("error"):
                if failures:
                    raise SnapshotError(f"trainer 0: {fields.text('error')}")
                return None
            name = fields.take("name")
            if name is not None and not names.is_name(str(name)):
                raise Malformed(f"begun.name: {name!r} is no snapshot's")
            return Begun(name, fields.number("commit", 0, 2**53))
        except Malformed as error:
            raise SnapshotCorruptError(
                f"{path} is damaged: {error}. Start all jobs anew.", self._file
            ) from error

    def _write(self, name: str, contents: bytes) -> None:
        """Writes a file; again and again, while there is patience.

        Raises:
            SnapshotError: the disk refuses it.
            PeerLostError: the servers are lost meanwhile.
        """
        warned = False
        while True:
            try:
                return self._directory.write_word(name, contents)
            except SnapshotError as error:
                left_s = self._patient_until - time.monotonic()
                if left_s <= 0:
                    if not warned:
                        raise
                    raise SnapshotError(
                        f"{error} It was tried for {self._patience_s:g} s "
                        "(CPUDIST_REJOIN_S) to come back to servers, which needs that."
                    ) from error
                if not warned:
                    logger.warning(
                        "%s Without it this trainer cannot come back to servers: it "
                        "tries again for %.0f s (CPUDIST_REJOIN_S).",
                        error,
                        left_s,
                    )
                warned = True
            self._run.trainer_client().check()
            time.sleep(_RETRY_S)

    def _remove(self, name: str) -> None:
        """Removes a file, or says that it may be seen still.

        Raises:
            SnapshotError: the file system refuses.
        """
        with reported(f"cannot remove {self._directory.path / name}", _SHARED):
            self._directory.remove_word(name)

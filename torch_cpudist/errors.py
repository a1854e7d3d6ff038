# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Typed errors: one class per cause, all derived from ``Error`` but ``PreemptedError``.

The compiled core raises the classes of its own causes by name (``csrc/core/errors.h``);
the others come from Python. Each docstring says in which state the call leaves things
and whether the caller may retry.
"""

from __future__ import annotations

import signal


class Error(RuntimeError):
    """Base of every error of this package."""


class InternalError(Error):
    """A bug in this package. The context is unusable; please report the message."""


class InvalidArgumentError(Error, ValueError):
    """An argument is wrong or out of range. Nothing was sent; fix it and retry."""


class IdTypeError(InvalidArgumentError, TypeError):
    """Ids of a lookup are of a type that names no rows. Nothing was sent."""


class PeerLostError(Error):
    """A server or trainer died or froze; the message names role, rank and address.

    Every later call that needs the lost process raises it again. The current round may
    have been applied on some servers and not on others: do not retry, restart the run.
    Under Async and Geo in jobs of their own ``CPUDIST_REJOIN_S`` has trainers wait for
    servers, and a trainer that was itself counted as lost goes on.
    """


class OperationTimeoutError(Error, TimeoutError):
    """A live peer did not get there before the deadline; the message names it.

    The request stays in flight and is applied at most once; the next call waits for it
    again. Retry, raise the deadline named in the message, or end the run.
    """


class ProtocolError(Error):
    """Bytes that this protocol does not know: another program or version, or a bug.

    That connection is closed; do not retry.
    """


class ConfigMismatchError(Error):
    """Trainers or servers disagree about a setting; the message names values and ranks.

    Nothing of the request was applied. Make the settings equal and start again.
    """


class TooFewStepsError(Error):
    """Advice was asked for before there were steps enough to measure.

    The message says how many it takes. Nothing was sent; go on and ask again.
    """


class UnpulledRowError(Error):
    """A gradient names a row that was not pulled since its last update.

    Nothing was sent. Read tables through their modules, and compile a model only after
    wrapping its optimizer.
    """


class FencedError(Error):
    """A newer incarnation of this trainer took its place. End this process.

    Attributes:
        incarnation: the newer one, where this process was not let in; else 0.
    """

    incarnation = 0


class OverloadedError(Error):
    """A memory cap of a server is reached. Nothing of the request was applied there.

    The message says whether pushes under way fill it, which passes, or what is kept
    does, which needs a higher cap or more servers.
    """


class NonFiniteGradientError(Error, ArithmeticError):
    """A gradient is infinite or NaN, and servers do not apply such.

    The message names the trainer, the parameter or table, and the element or id. Under
    ``Sync``, and in a group of ``HalfAsync``, all trainers of the round get it; under
    ``Async`` its sender, once, and may go on. The server that says so applied nothing
    of that push, others may have applied theirs: go back to a snapshot where that
    matters.
    """


class TableFullError(Error):
    """A push would make more rows of a table than its ``max_rows`` allows.

    Nothing of the push was applied on the server that says so. Under ``Sync``, and in a
    group of ``HalfAsync``, all trainers of the round get it. Raise ``max_rows``, or let
    rows that are not used any more make room: ``Evict(max_rows=)``.
    """


class OutOfMemoryError(Error, MemoryError):
    """A rank has less memory than tables need; the message names both, and the limit.

    Raised at wrapping, on all trainers, before anything is sent. A server that runs out
    of memory all the same says so, and its parameters may be stored in part: end the
    run.
    """


class ClosedError(Error):
    """Used after ``shutdown()``, ``close()`` or an abort. Nothing was sent."""


class ForkedProcessError(ClosedError):
    """Used in a forked child of the process that called ``init()``.

    Sockets and threads belong to the parent. Nothing was sent; do the work there.
    """


class RowOutOfRangeError(Error, IndexError):
    """An id is outside its table. Nothing was sent; fix the ids and retry."""


class AddressError(Error):
    """An address cannot be bound, resolved or connected; the message says why."""


class AuthenticationError(Error):
    """An end of a link has not proven the run's key, or this process cannot prove it.

    The message names the address and the cause: no key here, no key there, or a wrong
    key. Nothing else was said on that link. Give every process of the run the same
    ``CPUDIST_SECRET_FILE`` and start those again that have another.
    """


class NotInitializedError(Error):
    """``cpudist.init()`` was not called in this thread. Call it first."""


class ConfigurationError(Error, ValueError):
    """An environment variable or argument is missing, wrong or contradicts another.

    Nothing was started. The message says what to set.
    """


class UnsupportedOptimizerError(Error):
    """The strategy cannot run this optimizer or option. Nothing was changed."""


class UnsupportedModelError(Error):
    """A parameter or module cannot be trained as it is. Nothing was changed."""


class RemoteTableError(Error):
    """Rows of a remote table would be needed on the trainer, which has none of them.

    The message names the table, what was asked of it and the way out. Nothing was
    changed or sent.
    """


class DenseGradientError(Error):
    """A table has a strided gradient; the message names the table and the usual causes.

    Nothing was sent. Lookups alone may use a table's weight, or build it with
    ``sparse=False``.
    """


class SparseGradientError(Error, NotImplementedError):
    """torch has no such operation for the sparse gradient of a table.

    It did nothing to that gradient; the message says what clips gradients instead.
    """


class ModelChangedError(Error):
    """Something else than the optimizer wrote a parameter. Nothing was sent."""


class BackendUnavailableError(Error):
    """The backend that was asked for cannot be loaded; there is no silent fallback."""


class RankFailedError(Error):
    """A process that ``launch`` started has failed; the message has its traceback.

    The other processes were ended.
    """

    rank: int = -1  # which one


class BatchTooSmallError(Error, ValueError):
    """A batch has fewer samples than there are replicas. Nothing was computed."""


class GlobalRandomError(Error):
    """A replica drew from torch's global generator, in deterministic mode.

    Nothing was updated. ``nn.Dropout`` modules have generators of their own.
    """


class BadRecordError(Error, ValueError):
    """A line of data is not what the schema says; the message names file, line, column.

    Nothing of the line was delivered. Mend the file or the schema, or choose another
    policy for bad lines.
    """


class DataFileError(Error, OSError):
    """A file of data is missing, cannot be read to its end, or its command failed.

    The message names the file and the cause. Batches delivered before are whole.
    """


class PreemptedError(SystemExit):
    """SIGTERM has come, and this trainer has left its run; its process ends.

    A ``SystemExit`` of status 143, as shells tell of a process that SIGTERM has ended:
    what catches errors lets it pass. What this trainer has pushed is applied.
    """

    def __init__(self) -> None:
        """Of the status that launchers know."""
        super().__init__(128 + signal.SIGTERM)


class SnapshotError(Error):
    """A snapshot cannot be saved, listed, read or loaded; the message says why.

    Saving: training is as before, and what was there stays. Loading: where values were
    changed already the message says so, and steps and saves raise it again until a
    whole snapshot is loaded.

    Attributes:
        partly_loaded: values were changed.
    """

    partly_loaded = False


class SnapshotCorruptError(SnapshotError):
    """A file of a snapshot is not what was written: missing, cut short or changed.

    Nothing of the damaged part was used. Take another snapshot, or bring the file back
    from a copy.

    Attributes:
        file: its name within the snapshot.
        table: whose rows it has; empty where it is of no table.
    """

    def __init__(self, message: str = "", file: str = "", table: str = "") -> None:
        """Says which file and table it is about."""
        super().__init__(message)
        self.file = file
        self.table = table


def describe(error: BaseException) -> str:
    """An error as the reason that peers are told; one without a text by its name."""
    text, kind = str(error), type(error).__name__
    return f"{kind}: {text}" if text else kind

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``cpudist.launch``: a function in several processes of this machine, from a notebook.

Each process is started anew: a fork of one that computes with torch may hang. What it
runs comes to it as its standard input, from its own parent, by value (cloudpickle), so
that a function of a notebook's cell does. What it returns is data only: numbers, text,
tensors and lists, tuples and dicts of them, read by ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from torch_cpudist.errors import (
    BackendUnavailableError,
    ConfigurationError,
    InvalidArgumentError,
    OperationTimeoutError,
    RankFailedError,
)

_MOST = 65535
_GRACE_S = 5.0  # from being asked to end until it is made to
_CAUSE_S = 1.0  # in which the cause of a lost peer is looked for
_HERE = "127.0.0.1"
_LENGTH_BYTES = 8
_PR_SET_PDEATHSIG = 1
_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from torch_cpudist.launcher import run; run(int(sys.argv[2]))"
)


def launch(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    *,
    nprocs: int,
    timeout_s: float | None = None,
) -> list[Any]:
    """Runs ``fn(*args)`` in ``nprocs`` new processes of this machine.

    For notebooks and scripts that are no launch themselves. In each process ``fn`` does
    what a script under torchrun does: ``cpudist.init()``, training, ``shutdown()``. The
    environment has its rank and a rendezvous of their own, on the loopback; other
    variables (``CPUDIST_*``, ``CPUDIST_SERVERS`` too) are the caller's. ``fn`` may be
    of a notebook's cell: function and arguments are copied by value. What the processes
    print is shown line by line, with the rank. Needs the extra ``notebook``.

    Cost: starting Python and importing torch in every process, some seconds. Thread
    safety: may be called by several threads; signals reach the main thread's only.

    Args:
        fn: called in each process.
        args: what with.
        nprocs: how many processes.
        timeout_s: longest time for everything; ``None``: no limit.

    Returns:
        What each rank's ``fn`` returned, by rank: numbers, text, tensors, ``None``, and
        lists, tuples and dicts of them.

    Raises:
        RankFailedError: names the first rank that failed, with its traceback. The
            others were ended, as after every other error.
        OperationTimeoutError: names the ranks that did not end in time.
        InvalidArgumentError: an argument is wrong, or cannot be copied; or a rank
            returned something else.
        ConfigurationError: called by a rank of a launch.
        BackendUnavailableError: cloudpickle is not installed.
    """
    if type(nprocs) is not int or not 1 <= nprocs <= _MOST:
        raise InvalidArgumentError(
            f"launch(nprocs={nprocs!r}): expected a whole number from 1 to {_MOST}"
        )
    if timeout_s is not None and not timeout_s > 0:
        raise InvalidArgumentError(f"launch(timeout_s={timeout_s!r}): must be above 0")
    if "RANK" in os.environ:
        raise ConfigurationError(
            f"launch() in rank {os.environ['RANK']} of a launch: its processes would "
            "be as many again. Call fn, or start the script without torchrun."
        )
    code = _by_value(fn, tuple(args))
    with contextlib.ExitStack() as ended:
        file = os.memfd_create("cpudist-launch")
        ended.callback(os.close, file)
        with open(file, "wb", closefd=False) as written:
            written.write(code)
        store = _open_store()
        variables = _variables(nprocs, store.port)
        ranks: list[_Rank] = []
        ended.callback(_end, ranks)
        for rank in range(nprocs):
            ranks.append(_Rank(rank, file, variables))
        _follow(ranks, timeout_s)
        return [one.result() for one in ranks]


def _by_value(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    if not callable(fn):
        raise InvalidArgumentError(
            f"launch: expected a function, found {type(fn).__name__}"
        )
    cloudpickle = _cloudpickle()
    try:
        return bytes(cloudpickle.dumps((fn, args)))
    except Exception as error:
        raise InvalidArgumentError(
            "launch: fn and its arguments cannot be copied to other processes: "
            f"{error}. Make models, datasets and files inside fn."
        ) from error


def _cloudpickle() -> Any:
    try:
        import cloudpickle
    except ImportError as error:
        raise BackendUnavailableError(
            "launch() copies functions with cloudpickle, which is not installed: "
            "pip install torch-cpudist[notebook]."
        ) from error
    return cloudpickle


def _open_store() -> TCPStore:
    """The rendezvous of the processes, kept by this one, as torchrun's agent does."""
    listener = socket.create_server((_HERE, 0), backlog=1024)
    port = listener.getsockname()[1]
    return TCPStore(
        _HERE,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
        master_listen_fd=listener.detach(),
    )


def _variables(nprocs: int, port: int) -> dict[str, str]:
    """What every rank has in its environment: this one's, and what torchrun sets."""
    return os.environ | {
        "MASTER_ADDR": _HERE,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(nprocs),
        "LOCAL_WORLD_SIZE": str(nprocs),
        "GROUP_RANK": "0",
        "ROLE_NAME": "default",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
    }


class _Rank:
    """One process, what it prints and what it tells."""

    def __init__(self, rank: int, file: int, variables: dict[str, str]) -> None:
        self.rank = rank
        self.told = bytearray()  # length and message
        self.failure: tuple[float, str] | None = None  # when, and what
        self._line = b""
        ours, theirs = os.pipe()
        code = os.open(f"/proc/self/fd/{file}", os.O_RDONLY)
        where = json.dumps([os.path.abspath(one) for one in sys.path])
        try:
            self.process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-u", "-c", _CHILD, where, str(theirs)],
                env=variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=code,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs],
                start_new_session=True,  # Ctrl-C is this process's to pass on
            )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(code)
            os.close(theirs)
        assert self.process.stdout is not None  # noqa: S101  a pipe, as asked for
        self.output = self.process.stdout.fileno()
        self.messages = ours
        self.end = os.pidfd_open(self.process.pid)
        self.open = {self.output, self.messages}
        for one in self.open:
            os.set_blocking(one, False)

    def read(self) -> None:
        """Takes what is there; shows whole lines."""
        status = self.process.poll()  # before, so that all it has said is read
        for chunk in self._chunks(self.output):
            *lines, self._line = (self._line + chunk).split(b"\n")
            for line in lines:
                self._show(line)
        for chunk in self._chunks(self.messages):
            self.told += chunk
        length = int.from_bytes(self.told[:_LENGTH_BYTES], "little")
        whole = len(self.told) >= _LENGTH_BYTES + length > _LENGTH_BYTES
        if status is not None and self._line:
            self._show(self._line)
            self._line = b""
        if self.failure is not None:
            return
        said: dict[str, Any] = {}
        with contextlib.suppress(InvalidArgumentError):  # told by result(), at the end
            said = self._message() if whole else {}
        if "error" in said:
            self.failure = (said["time_s"], said["error"])
        elif status is not None and (status != 0 or not whole):
            named = f"status {status}"
            if status < 0:
                named = f"signal {-status} ({signal.Signals(-status).name})"
            # Before the others' errors, of which it is the cause.
            self.failure = (0.0, f"its process ended with {named}")

    def _chunks(self, pipe: int) -> Iterator[bytes]:
        """What a pipe has now."""
        while pipe in self.open:
            try:
                chunk = os.read(pipe, 1 << 16)
            except BlockingIOError:
                return
            if not chunk:
                self.open.discard(pipe)
            yield chunk

    def _show(self, line: bytes) -> None:
        print(f"[rank {self.rank}] {line.decode(errors='replace')}", flush=True)

    def _message(self) -> dict[str, Any]:
        data = io.BytesIO(memoryview(self.told)[_LENGTH_BYTES:])
        try:
            found: dict[str, Any] = torch.load(data, weights_only=True)
        except Exception as error:
            raise InvalidArgumentError(
                f"launch: rank {self.rank} returned something else than numbers, text, "
                "tensors, None, and lists, tuples and dicts of them. Return such, "
                "or save it to a file in fn."
            ) from error
        return found

    def result(self) -> Any:
        """What ``fn`` returned."""
        return self._message()["result"]

    def close(self) -> None:
        """Shows what is left, gives files back; the process has been waited for."""
        self.read()
        assert self.process.stdout is not None  # noqa: S101
        self.process.stdout.close()
        os.close(self.messages)
        os.close(self.end)


def _follow(ranks: Sequence[_Rank], timeout_s: float | None) -> None:
    """Shows what is printed until all have ended well, or one has failed."""
    until = None if timeout_s is None else time.monotonic() + timeout_s
    while running := [one for one in ranks if one.process.returncode is None]:
        left = None if until is None else until - time.monotonic()
        if left is not None and left <= 0:
            late = [one.rank for one in running]
            raise OperationTimeoutError(
                f"launch: ranks {late} of {len(ranks)} did not end within "
                f"{timeout_s:g} s; they were ended. Raise timeout_s."
            )
        _look(running, left)
        if any(one.failure for one in ranks):
            _raise_cause(ranks)


def _look(running: Sequence[_Rank], timeout_s: float | None) -> None:
    """Waits until one of them has printed, told something or ended, and takes it."""
    with selectors.DefaultSelector() as selector:
        for one in running:
            for file in (one.end, *one.open):
                selector.register(file, selectors.EVENT_READ, one)
        for key, _ in selector.select(timeout_s):
            key.data.read()


def _raise_cause(ranks: Sequence[_Rank]) -> None:
    """Raises for the rank that failed first; one that lost a peer did not."""
    until = time.monotonic() + _CAUSE_S
    while True:
        for one in ranks:
            one.read()
        failed = [(*one.failure, one.rank) for one in ranks if one.failure]
        _, text, rank = min(failed)
        if "PeerLostError" not in text or time.monotonic() > until:
            break
        time.sleep(0.01)
    error = RankFailedError(
        f"launch: rank {rank} of {len(ranks)} failed, the others were ended: {text}"
    )
    error.rank = rank
    raise error


def _end(ranks: Sequence[_Rank]) -> None:
    """Ends who still runs, and all they have started; leaves no zombies."""
    for number, patience_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, None)):
        for one in ranks:
            if one.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(one.process.pid, number)
        until = None if patience_s is None else time.monotonic() + patience_s
        for one in ranks:
            left = None if until is None else max(0.0, until - time.monotonic())
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.process.wait(left)
    for one in ranks:
        one.close()


# -- in a process that was started -----------------------------------------------------


def run(pipe: int) -> None:
    """What a process of ``launch`` runs: its standard input; tells what came of it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    status = 0
    try:
        fn, args = _cloudpickle().loads(sys.stdin.buffer.read())
        message = _packed({"result": fn(*args)})
    except BaseException as error:
        status = 1
        inner = error.__traceback__.tb_next if error.__traceback__ else None
        lines = traceback.format_exception(error.with_traceback(inner))
        text = "".join(lines).strip()
        message = _packed({"error": text, "time_s": time.monotonic()})
    with open(pipe, "wb") as told:
        told.write(len(message).to_bytes(_LENGTH_BYTES, "little") + message)
    sys.exit(status)


def _packed(message: dict[str, Any]) -> bytes:
    data = io.BytesIO()
    torch.save(message, data)
    return data.getvalue()

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Programs that begin with torch imported: `python` and `torchrun` as forks of one.

A launch costs an import of torch per process, of torchrun and of each rank, which is
nearly all that it costs. Here one process imports, and what `Preloaded.environment()`
puts in front of PATH hands command line, environment, folder, files and namespaces to
it; a fork of it takes them over and runs the script as `__main__`. Everything else is
as of a process that was started: signals go through, the exit status comes back.

Run as a program it is that process: ``python preloaded.py SOCKET``.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from patience import PATIENCE_S
from preloaded_client import SETTINGS

IMPORTED = ("torch.distributed.run", "torch._dynamo", "torch_cpudist", "frozen")
CLIENT = Path(__file__).with_name("preloaded_client.py")
PR_SET_PDEATHSIG = 1


class Preloaded:
    """The process that has imported, and programs that begin as forks of it."""

    def __init__(self, environment):
        self.folder = Path(tempfile.mkdtemp(prefix="cpudist-preloaded-"))
        self.socket = self.folder / "socket"
        settings = {n: environment[n] for n in environment if n.startswith(SETTINGS)}
        for name in ("python", "torchrun"):
            program = self.folder / name
            words = [sys.executable, "-IS", CLIENT, self.socket, json.dumps(settings)]
            quoted = " ".join(f"'{word}'" for word in (*words, name))
            program.write_text(f'#!/bin/sh\nexec {quoted} "$@"\n')
            program.chmod(0o755)
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(self.socket)],
            env=environment,
            stdin=subprocess.PIPE,  # it ends when this does
            stdout=subprocess.DEVNULL,
        )

    def environment(self):
        """What a program is started with; waits until the imports are done."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.socket.exists():
            assert self.process.poll() is None, "the process that imports has ended"
            assert time.monotonic() < deadline, f"no imports within {PATIENCE_S} s"
            time.sleep(0.02)
        return {
            "PATH": os.pathsep.join([str(self.folder), os.environ["PATH"]]),
            "PYTHON_EXEC": str(self.folder / "python"),  # torchrun's ranks
        }

    def end(self):
        self.process.stdin.close()
        self.process.wait(PATIENCE_S)
        shutil.rmtree(self.folder)


class Forks:
    """Forks for whoever connects, and tells each how its fork ends."""

    def __init__(self, listener):
        self.listener = listener
        self.waiting = {}  # the connection of each process id
        self.selector = selectors.DefaultSelector()
        ours, woken = socket.socketpair()
        woken.setblocking(False)
        self.kept = [ours, woken]
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(woken.fileno())
        for what in (listener, ours, sys.stdin):
            self.selector.register(what, selectors.EVENT_READ)

    def serve(self):
        """Returns in forks only, with what to run; ends with the tests otherwise."""
        while True:
            for key, _ in self.selector.select():
                if key.fileobj is self.listener:
                    request = self.begin()
                    if request is not None:
                        return request
                elif key.fileobj is self.kept[0]:
                    self.kept[0].recv(100)
                    self.reap()
                elif key.fileobj is sys.stdin:
                    os._exit(0)
                else:
                    self.pass_on(key.fileobj)

    def begin(self):
        connection, _ = self.listener.accept()
        data, files, _, _ = socket.recv_fds(connection, 1 << 16, 5)
        while data and not data.endswith(b"\n"):
            data += connection.recv(1 << 16)
        if not data:  # ended before it had asked
            connection.close()
            return None
        assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose threads"
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for one in (*self.waiting.values(), *self.kept, self.listener, connection):
                one.close()
            self.selector.close()
            return json.loads(data), files
        for one in files:
            os.close(one)
        self.waiting[pid] = connection
        self.selector.register(connection, selectors.EVENT_READ)
        with contextlib.suppress(BrokenPipeError):  # who has asked is gone already
            connection.sendall(b"\n")
        return None

    def reap(self):
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
                pid, status = ended
                connection = self.waiting.pop(pid)
                with contextlib.suppress(KeyError):
                    self.selector.unregister(connection)
                with contextlib.suppress(OSError):
                    connection.sendall(f"{status}\n".encode())
                connection.close()

    def pass_on(self, connection):
        """Signals of the program that was started; its end is one that kills."""
        if connection not in self.waiting.values():
            return
        (pid,) = [one for one, other in self.waiting.items() if other is connection]
        numbers = b""
        with contextlib.suppress(ConnectionResetError):
            numbers = connection.recv(100)
        if not numbers:
            self.selector.unregister(connection)
        for number in numbers or [signal.SIGKILL]:
            os.kill(pid, number)


def take_over(request, files):
    """Becomes the process that asks: namespaces, files, folder, environment, path."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for own, file in enumerate(files[:3]):
        os.dup2(file, own)
    for name, file in zip(("net", "mnt"), files[3:], strict=True):
        if os.fstat(file).st_ino != os.stat(f"/proc/self/ns/{name}").st_ino:
            assert libc.setns(file, 0) == 0, os.strerror(ctypes.get_errno())
    for file in files:
        os.close(file)
    os.chdir(request["folder"])
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    rest = [one for one in sys.path[1:] if one not in before]
    os.environ.clear()
    os.environ.update(request["environment"])
    added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:] = [one for one in added if one] + rest
    sys.stdout.reconfigure(write_through=True)


def main():
    for name in IMPORTED:
        __import__(name)
    address = sys.argv[1]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{address}.new")
        listener.listen(64)
        os.rename(f"{address}.new", address)
        request, files = Forks(listener).serve()
    take_over(request, files)
    program, *arguments = request["command"]
    if program == "torchrun":
        sys.argv = [program, *arguments]
        sys.modules["torch.distributed.run"].main()
        return
    arguments = [one for one in arguments if one != "-u"]
    sys.argv = arguments
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()

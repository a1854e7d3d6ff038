# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What `python` and `torchrun` are for programs that begin with torch imported.

Usage: python -IS preloaded_client.py SOCKET SETTINGS NAME ARGUMENT... Imports little:
it is started where an import of torch is to be saved. Where the environment has
settings that are read while torch is loaded, and are not those of the process that has
loaded it, the real program is started.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

SETTINGS = (
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "LD_",
    "MALLOC_",
    "TORCH_LOGS",
)


PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def ask(path: str, command: list[str]) -> int:
    """The status, as of ``waitpid``, of a fork that runs the command."""
    # From here on there may be a fork, which what comes now is for.
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    namespaces = [
        os.open(f"/proc/self/ns/{one}", os.O_RDONLY) for one in ("net", "mnt")
    ]
    request = {
        "command": command,
        "folder": os.getcwd(),
        "environment": dict(os.environ),
    }
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        data = json.dumps(request).encode() + b"\n"
        sent = socket.send_fds(connection, [data], [0, 1, 2, *namespaces])
        connection.sendall(data[sent:])
        reply = connection.makefile()
        if reply.readline() != "\n":
            return 1 << 8
        for number in PASSED_ON:
            signal.signal(number, lambda n, _: connection.send(bytes([n])))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        return int(reply.readline() or signal.SIGKILL)


def main() -> None:
    path, settings, name, *arguments = sys.argv[1:]
    found = {n: text for n, text in os.environ.items() if n.startswith(SETTINGS)}
    plain = [one for one in arguments if one != "-u"]
    if found != json.loads(settings) or (name == "python" and plain[0][0] == "-"):
        own = ["-m", "torch.distributed.run"] if name == "torchrun" else []
        os.execv(sys.executable, [sys.executable, *own, *arguments])
    status = ask(path, [name, *arguments])
    if os.WIFSIGNALED(status):
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()

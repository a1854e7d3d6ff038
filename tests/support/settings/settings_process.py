# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How to see that a variable of the process has an effect: one function per variable.

As ``settings_cases``, for the variables of no settings class, under
``@variable(name, changed=text)``; ``plain`` is "not set" unless given.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import core_alone
import torch
import torch.distributed as dist
from async_cases import Counting, wrapped
from patience import PATIENCE_S
from ports import free_port, listens
from settings_cases import Given, Observer, See, push_ones
from sync_cases import ONE_THREAD, run

import torch_cpudist as cpudist
from torch_cpudist import _core

VARIABLES: dict[str, Observer] = {}


def variable(name: str, **values: Any) -> Callable[[See], See]:
    """Notes what sees a variable."""

    def note(see: See) -> See:
        VARIABLES[f"CPUDIST_{name}"] = Observer(
            see, values.get("plain"), values["changed"], values["changed"]
        )
        return see

    return note


# Stands for a port that is free when it is used.
_A_PORT = "PORT"


def _filled(variables: Mapping[str, str], port: int) -> dict[str, str]:
    """The variables with this port in its place."""
    return {name: text.replace(_A_PORT, str(port)) for name, text in variables.items()}


@contextlib.contextmanager
def _started(variables: Mapping[str, str], **options: Any) -> Iterator[cpudist.Context]:
    """A rank of this process with real sockets."""
    context = cpudist.init(variables={**ONE_THREAD, **variables}, **options)
    try:
        yield context
    finally:
        context.abort("the observation is over")


def _refused(see: Callable[[], Any], kind: type[BaseException]) -> bool:
    try:
        see()
    except kind:
        return True
    return False


# -- one rank ----------------------------------------------------------------------


@variable("THREADS", plain="1", changed="3")
def _torch_threads(given: Given) -> Any:
    with _started(given.variables):
        return torch.get_num_threads()


@variable("BACKEND", plain="gloo", changed="mpi")
def _default_group(given: Given) -> Any:
    with (
        contextlib.suppress(cpudist.BackendUnavailableError),
        _started(given.variables),
    ):
        return dist.get_backend()


@variable("TRANSPORT", plain="tcp", changed="c10d")
def _transport(given: Given) -> Any:
    def see() -> None:
        run(lambda _: None, 1, variables=given.variables)

    # Ranks that are threads have no group for it.
    return _refused(see, cpudist.ConfigurationError)


@variable("STRATEGY", changed="async")
def _strategy(given: Given) -> Any:
    def body(_: cpudist.Context) -> Any:
        model = Counting()
        optimizer = wrapped(model, "sync")
        push_ones(optimizer, model, 1)
        optimizer.flush()
        return optimizer.stats()["staleness"]["pushes"]

    return run(body, 1, variables=given.variables)


# A file, below which there is nothing.
@variable("SNAPSHOT_DIR", changed="/dev/null/snapshots")
def _snapshots(given: Given) -> Any:
    def body(_: cpudist.Context) -> Any:
        model = torch.nn.Linear(2, 1)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = cpudist.DistributedOptimizer(inner, model, strategy="allreduce")
        try:
            optimizer.resume()
        except cpudist.Error as error:
            return type(error).__name__

    return run(body, 1, variables=given.variables)


@variable("LOG", changed="debug")
def _logged(given: Given) -> Any:
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torch_cpudist")
    level = logger.level
    logger.addHandler(handler)
    try:

        def body(_: cpudist.Context) -> None:
            model = Counting()
            push_ones(wrapped(model, "sync"), model, 1)

        run(body, 1, variables=given.variables)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    beginnings = ("table table: 40 rows", "block dense: elements 0 to 50", "step 1:")
    return [any(line.startswith(text) for line in found) for text in beginnings]


@variable("GRACE_S", changed="0")
def _who_handles_sigterm(given: Given) -> Any:
    with _started(given.variables):
        return signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@variable("METRICS", changed=_A_PORT)
def _page(given: Given) -> Any:
    port = free_port()
    try:
        with _started(_filled(given.variables, port)):
            return listens(port)
    except cpudist.BackendUnavailableError as error:
        return str(error)  # of the extra that is not installed


# The lowest; where there is no other, one that the processor refuses.
@variable("SIMD", changed="avx512" if _core.simd_level() == "scalar" else "scalar")
def _vector_level(given: Given) -> Any:
    if not given.variables:
        return _core.simd_level()
    # Read once per process, so in another.
    program = subprocess.run(
        core_alone.command("print(core.simd_level())"),
        env=core_alone.environment(**given.variables),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert program.returncode == 0 or "CPUDIST_SIMD" in program.stderr
    return program.stdout.strip()


# -- several ranks -----------------------------------------------------------------


@variable("SERVERS", changed="1")
def _who_serves(given: Given) -> Any:
    servers = given.fields.get("servers", 0)
    body = lambda context: (context.server_count, context.trainer_count)  # noqa: E731
    return run(body, 2 - servers, servers, variables=given.variables)[-1]


def _idle_partner(variables: Mapping[str, str], within_s: float) -> str:
    """What a trainer's step under Sync says while the other one makes none."""
    said = ""

    def body(context: cpudist.Context) -> None:
        nonlocal said
        try:
            model = Counting()
            optimizer = wrapped(model, "sync")  # may be late on a busy machine
            if context.trainer_rank == 0:
                push_ones(optimizer, model, 1)
            until = time.monotonic() + within_s
            while not said and time.monotonic() < until:
                time.sleep(0.005)
        except cpudist.OperationTimeoutError as error:
            said = str(error)
        context.abort("the observation is over")

    with contextlib.suppress(cpudist.Error):
        run(body, 2, variables=variables)
    return said


@variable("ROUND_DEADLINE_MS", changed="150")
def _patience_with_a_peer(given: Given) -> Any:
    within_s = 20.0 if given.variables else 0.3
    return "CPUDIST_ROUND_DEADLINE_MS" in _idle_partner(given.variables, within_s)


@variable("RPC_DEADLINE_MS", changed="4")
def _patience_with_a_request(given: Given) -> Any:
    plan = _core.FaultPlan(delay=1.0, delay_ms_max=40, seed=3)
    try:
        run(
            lambda context: None,
            1,
            1,
            variables=given.variables,
            network=_core.InprocNetwork(plan),
        )
    except cpudist.Error as error:
        return "CPUDIST_RPC_DEADLINE_MS" in str(error)
    return False


@variable("RPC_RETRIES", plain="1000", changed="0")
def _broken_links(given: Given) -> Any:
    def body(_: cpudist.Context) -> None:
        model = Counting()
        optimizer = wrapped(model, "sync")
        push_ones(optimizer, model, 100)

    network = _core.InprocNetwork(_core.FaultPlan(cut=0.05, seed=7))
    try:
        run(body, 1, 1, variables=given.variables, network=network)
    except cpudist.PeerLostError as error:
        return "CPUDIST_RPC_RETRIES is 0" in str(error)
    assert network.counts().cut > 0
    return False


@variable("LIVENESS_MS", changed="100")
def _heartbeats(given: Given) -> Any:
    def body(context: cpudist.Context) -> bool:
        # Ten of 64 bytes: 0.2 s at 5 per 100 ms, 6 s at 5 per 3000 ms.
        client = context.trainer_client()
        enough = client.stats()["bytes_sent"] + 10 * 64
        until = time.monotonic() + (20.0 if given.variables else 0.3)
        while client.stats()["bytes_sent"] < enough and time.monotonic() < until:
            time.sleep(0.01)
        return client.stats()["bytes_sent"] >= enough

    try:
        return run(body, 1, variables=given.variables)
    except cpudist.PeerLostError as error:
        # Nobody ran for that long on a busy machine.
        if given.variables and "silent for 100 ms" in str(error):
            return [True]
        raise


@variable("RECONNECT_MS", changed="100")
def _broken_link(given: Given) -> Any:
    def body(context: cpudist.Context) -> None:
        context.abort("the observation is over")

    try:
        run(body, 1, 1, variables=given.variables)
    except cpudist.PeerLostError as error:
        return "not replaced within 0.1 s" in str(error)
    return False


# -- a job of servers --------------------------------------------------------------


@contextlib.contextmanager
def _group(
    variables: Mapping[str, str], port: int | None = None
) -> Iterator[cpudist.Context]:
    port = port or free_port()
    job = {
        "CPUDIST_ROLE": "server",
        "CPUDIST_RENDEZVOUS": f"127.0.0.1:{port}",
        "CPUDIST_TRAINERS": "1",
    }
    with _started(job | dict(variables), timeout_s=PATIENCE_S) as context:
        yield context


@variable("ROLE", plain="server", changed="trainer")
def _role(given: Given) -> Any:
    found: list[str] = []
    port = free_port()
    where = None if given.variables["CPUDIST_ROLE"] == "server" else port

    def join() -> None:
        with _group(given.variables, where) as context:
            found.append(context.role)

    with _group({}, port):
        thread = threading.Thread(target=join)
        thread.start()
        thread.join(PATIENCE_S)
    return found


@variable("RENDEZVOUS", changed=f"127.0.0.1:{_A_PORT}")
def _where_trainers_come(given: Given) -> Any:
    ports = {"by default": free_port(), "as it says": free_port()}
    variables = _filled(given.variables, ports["as it says"])
    with _group(variables, ports["by default"]):
        for which, port in ports.items():
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 5).close()
                return which


@variable("TRAINERS", changed="3")
def _how_many_train(given: Given) -> Any:
    with _group(given.variables) as context:
        return context.trainer_count


@variable("REJOIN_S", changed="0")
def _how_long_servers_wait(given: Given) -> Any:
    with _group(given.variables) as context:
        assert context.server is not None
        return context.server.wait_done(20.0 if given.variables else 0.3)


@variable("BIND", changed="127.0.0.2")
def _address(given: Given) -> Any:
    with _group(given.variables) as context:
        return [a for a in context.addresses() if a.startswith("tcp:127.0.0.2:")]


@variable("PORTS", changed=_A_PORT)
def _ports(given: Given) -> Any:
    port = free_port()
    with _group(_filled(given.variables, port)) as context:
        return [a for a in context.addresses() if a.endswith(f":{port}")]


def _connects_without_a_key(variables: Mapping[str, str]) -> bool:
    with _group(variables) as context:
        client = _core.Client(
            run_id=context.run_id, trainer_count=1, servers=[context.addresses()]
        )
        refused = _refused(client.connect, cpudist.AuthenticationError)
        client.abort("the observation is over")
        return not refused


@variable("SECRET", changed="a key of at least thirty-two bytes")
def _key(given: Given) -> Any:
    return _connects_without_a_key(given.variables)


# Stands for a file with a key, which is made when it is used.
@variable("SECRET_FILE", changed="FILE")
def _key_of_a_file(given: Given) -> Any:
    with tempfile.NamedTemporaryFile() as file:  # of mode 0600
        file.write(b"a key of at least thirty-two bytes\n")
        file.flush()
        return _connects_without_a_key({name: file.name for name in given.variables})


@variable("AUTH", changed="require")
def _start_without_a_key(given: Given) -> Any:
    def see() -> None:
        with _started(given.variables):
            pass

    return _refused(see, cpudist.ConfigurationError)

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What happens when processes die, freeze, dawdle, fork, or are sent rubbish."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
from endings import lose_rank
from loss_cases import (
    INTERRUPTED_S,
    KILLED_S,
    LOSSES,
    PROMISED_S,
    STOPPED_S,
    check_ended,
    check_loss,
    make,
    step,
    train_forever,
)
from patience import PATIENCE_S

import torch_cpudist as cpudist
from torch_cpudist.testing import ProcessRanks

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("number", "limit_s"), [(signal.SIGKILL, KILLED_S), (signal.SIGSTOP, STOPPED_S)]
)
def test_a_lost_colocated_rank_is_named_by_every_survivor(number, limit_s):
    """With the clocks as they are by default."""
    with ProcessRanks(train_forever, 3) as ranks:
        for rank in range(3):
            ranks.expect(rank, "report", PATIENCE_S)
        lost_s = lose_rank(ranks, 1, number)
        for rank in (0, 2):
            entry = ranks.expect(rank, "error", PATIENCE_S)
            check_loss(entry, lost_s, limit_s, r"(trainer|server) 1\b")


def test_a_killed_rank_is_named_within_a_second():
    """By every survivor; beside other processes one of several tries is enough."""
    took_s = []
    while not took_s or (min(took_s) > PROMISED_S and len(took_s) < 5):
        with ProcessRanks(train_forever, 3) as ranks:
            for rank in range(3):
                ranks.expect(rank, "report", PATIENCE_S)
            lost_s = lose_rank(ranks, 1, signal.SIGKILL)
            told = [ranks.expect(rank, "error", PATIENCE_S) for rank in (0, 2)]
        took_s.append(max(entry["time_s"] for entry in told) - lost_s)
    assert min(took_s) <= PROMISED_S, took_s


@pytest.mark.parametrize(("number", "clocks", "limit_s"), LOSSES)
def test_a_lost_server_is_named_by_every_trainer(number, clocks, limit_s):
    with ProcessRanks(train_forever, 4, servers=2, variables=clocks) as ranks:
        for rank in (2, 3):
            ranks.expect(rank, "report", PATIENCE_S)
        lost_s = lose_rank(ranks, 0, number)
        for rank in (2, 3):
            entry = ranks.expect(rank, "error", PATIENCE_S)
            check_loss(entry, lost_s, limit_s, r"server 0\b")
            if number == signal.SIGKILL:
                check_ended(entry)


@pytest.mark.parametrize(("number", "clocks", "limit_s"), LOSSES)
def test_a_lost_trainer_is_named_by_servers_and_trainers(number, clocks, limit_s):
    with ProcessRanks(train_forever, 3, servers=1, variables=clocks) as ranks:
        for rank in (1, 2):
            ranks.expect(rank, "report", PATIENCE_S)
        ranks.expect(0, "serving", PATIENCE_S)
        lost_s = lose_rank(ranks, 2, number)
        for rank in (0, 1):
            entry = ranks.expect(rank, "error", PATIENCE_S)
            check_loss(entry, lost_s, limit_s, r"trainer 1\b")
            if number == signal.SIGKILL:
                check_ended(entry)


def fork_then_train(context, report):
    if context.trainer_rank == 1:
        model, opt = make()
        step(model, opt)
        child = os.fork()
        if child == 0:
            time.sleep(PATIENCE_S)
            os._exit(0)
        report(child)
        while True:
            step(model, opt)
    train_forever(context, report)


def test_a_forked_child_does_not_hide_the_death_of_its_parent():
    with ProcessRanks(fork_then_train, 2) as ranks:
        child = ranks.expect(1, "report", PATIENCE_S)["value"]
        try:
            ranks.expect(0, "report", PATIENCE_S)
            lost_s = lose_rank(ranks, 1, signal.SIGKILL)
            entry = ranks.expect(0, "error", PATIENCE_S)
            check_loss(entry, lost_s, KILLED_S, r"(trainer|server) 1\b")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


def evaluate_long(context, report):
    """Trainer 0 keeps the GIL, and everybody waiting, longer than two of the clocks."""
    model, opt = make()
    for turn in range(3):
        step(model, opt)
        if context.trainer_rank == 0 and turn == 1:
            model.eval()(torch.randint(50, (8, 3)))
            ctypes.PyDLL(None).usleep(3_600_000)
            opt.state_dict()
            model.train()
    return cpudist.global_step()


def test_a_long_evaluation_on_trainer_0_fails_nobody():
    clocks = {"CPUDIST_RPC_DEADLINE_MS": "3000", "CPUDIST_LIVENESS_MS": "3000"}
    with ProcessRanks(evaluate_long, 2, variables=clocks) as ranks:
        assert ranks.results(PATIENCE_S) == [3, 3]


def dawdle(context, report):
    model, opt = make()
    step(model, opt)
    if context.trainer_rank == 1:
        report("dawdling")
        time.sleep(PATIENCE_S)
    step(model, opt)


def test_a_live_peer_that_does_not_come_is_a_timeout_that_names_it():
    clocks = {"CPUDIST_ROUND_DEADLINE_MS": "3000"}
    with ProcessRanks(dawdle, 2, variables=clocks) as ranks:
        since_s = ranks.expect(1, "report", PATIENCE_S)["time_s"]
        entry = ranks.expect(0, "error", PATIENCE_S)
        assert entry["value"]["type"] == "OperationTimeoutError"
        assert "CPUDIST_ROUND_DEADLINE_MS" in entry["value"]["text"]
        assert re.search(r"trainers? \[?1\b", entry["value"]["text"])
        assert 1.0 <= entry["time_s"] - since_s <= 10.0


def wait_in_barrier(context, report):
    if context.trainer_rank == 1:
        report("late")
        time.sleep(PATIENCE_S)
    report("waiting")
    context.barrier()


def test_a_wait_can_be_interrupted():
    with ProcessRanks(wait_in_barrier, 2) as ranks:
        ranks.expect(0, "report", PATIENCE_S)
        ranks.expect(1, "report", PATIENCE_S)
        began_s = ranks.signal(0, signal.SIGINT)
        entry = ranks.expect(0, "error", PATIENCE_S)
        assert entry["value"]["type"] == "KeyboardInterrupt"
        assert entry["time_s"] - began_s <= INTERRUPTED_S


# -- strangers ---------------------------------------------------------------------


def train_until_told(context, report):
    model, opt = make()
    step(model, opt)
    report(sorted(context.addresses()))
    stop = Path(os.environ["TEST_STOP_FILE"])
    steps = 0
    while not stop.exists():
        step(model, opt)
        steps += 1
    context.barrier()  # nobody has left yet
    links = context.server.stats()["connections"]
    context.barrier()
    return {"steps": steps, "links": links}


RUBBISH = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"\0" * 200,
    "zeros": b"\0" * 4096,
    "ones": b"\xff" * 4096,
    "random": os.urandom(4096),
    "half a frame": b"\0" * 7,
}


def send_rubbish(address, data):
    """Sends bytes and waits until the server has closed the connection."""
    kind, _, rest = address.partition(":")
    if kind == "unix":
        link = socket.socket(socket.AF_UNIX)
        link.connect("\0" + rest.partition("#")[0].removeprefix("@"))
    else:
        host, _, port = rest.rpartition(":")
        link = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
    with link:
        link.settimeout(PATIENCE_S)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            link.sendall(data)
            while link.recv(4096):
                pass


def test_rubbish_closes_that_connection_only(tmp_path):
    stop = tmp_path / "stop"
    variables = {"TEST_STOP_FILE": str(stop)}
    with ProcessRanks(train_until_told, 2, variables=variables) as ranks:
        addresses = ranks.expect(0, "report", PATIENCE_S)["value"]
        ranks.expect(1, "report", PATIENCE_S)
        assert {a.partition(":")[0] for a in addresses} == {"unix", "tcp"}
        senders = [
            threading.Thread(target=send_rubbish, args=pair, daemon=True)
            for pair in itertools.product(addresses, RUBBISH.values())
        ]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join(PATIENCE_S)
            assert not sender.is_alive()
        stop.touch()
        found = ranks.results(PATIENCE_S)
        assert found[0]["steps"] > 0
        # Only the trainers' links: one inside the process, one over a socket.
        assert [entry["links"] for entry in found] == [2, 2]


def report_listening(context, report):
    inodes = set()
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{entry}")
            inodes.update(re.findall(r"socket:\[(\d+)\]", target))
    context.barrier()
    found = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
            rows = [line.split() for line in lines]
            found += [r[1] for r in rows if r[3] == "0A" and r[9] in inodes]
    return found


def test_sockets_are_loopback_when_all_ranks_share_a_host():
    with ProcessRanks(report_listening, 2) as ranks:
        for listening in ranks.results(PATIENCE_S):
            assert listening
            assert {address.split(":")[0] for address in listening} == {"0100007F"}


# -- forks -------------------------------------------------------------------------


class UsesThePackage(torch.utils.data.Dataset):
    """Tells which error each kind of use raises in a worker."""

    def __init__(self, model, opt):
        self.uses = [
            cpudist.trainer_rank,
            cpudist.barrier,
            lambda: cpudist.split_files(["a"]),
            lambda: model(torch.zeros(1, 1, dtype=torch.int64)),
            opt.step,
            opt.state_dict,
            cpudist.shutdown,
        ]

    def __len__(self):
        return len(self.uses)

    def __getitem__(self, index):
        try:
            self.uses[index]()
        except cpudist.ForkedProcessError as error:
            return "DataLoader worker" in str(error)
        return False


def test_a_forked_dataloader_worker_gets_a_typed_error():
    cpudist.init()
    model, opt = make()
    step(model, opt)
    loader = torch.utils.data.DataLoader(
        UsesThePackage(model, opt),
        batch_size=None,
        num_workers=2,
        multiprocessing_context="fork",
        timeout=PATIENCE_S,
    )
    assert list(loader) == [True] * 7
    step(model, opt)  # the parent is none the worse
    cpudist.shutdown()


def test_a_forked_process_of_the_script_is_not_told_of_data_loaders():
    cpudist.init()
    model, opt = make()
    step(model, opt)
    inside, outside = os.pipe()
    child = os.fork()
    if child == 0:
        said = []
        for use in UsesThePackage(model, opt).uses:
            try:
                use()
            except cpudist.ForkedProcessError as error:
                said.append(str(error))
        os.write(outside, "\n".join(said).encode())
        os._exit(0)
    os.close(outside)
    with os.fdopen(inside) as told:
        said = told.read().splitlines()
    os.waitpid(child, 0)
    assert len(said) == 7
    for text in said:
        assert "neither a DataLoader worker nor another process" in text or (
            "spawn" in text and "DataLoader" not in text
        )
    step(model, opt)  # the parent is none the worse
    cpudist.shutdown()


def test_workers_that_only_read_data_are_fine():
    cpudist.init()
    model, opt = make()
    data = torch.arange(12).reshape(12, 1)
    loader = torch.utils.data.DataLoader(
        data,
        batch_size=4,
        num_workers=2,
        multiprocessing_context="fork",
        timeout=PATIENCE_S,
    )
    for batch in loader:
        opt.zero_grad()
        model(batch).sum().backward()
        opt.step()
    assert cpudist.global_step() == 3
    cpudist.shutdown()

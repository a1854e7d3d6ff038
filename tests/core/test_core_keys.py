# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A key between servers and trainers over TCP, through the binding."""

from __future__ import annotations

import contextlib
import socket
import threading

import numpy as np
import pytest
from core_cluster import DIM, HIDDEN, Cluster, run_all
from patience import PATIENCE_S
from snapshot_cases import until

from torch_cpudist import _core, errors

KEY = _core.Secret(b"k" * 32)
OTHER = _core.Secret(b"K" * 32)


class TcpCluster(Cluster):
    """Servers at loopback's TCP, and trainers that know this key."""

    def __init__(self, key, trainers=2, servers=2):
        self.network = None
        self.options = {"secret": key}
        self.config = _core.OptimizerConfig("sgd", lr=0.5)
        self.servers = [
            _core.Server(
                run_id=7,
                shard_id=shard,
                server_count=servers,
                trainer_count=trainers,
                reconnect_grace_ms=60000,
                secret=key,
            )
            for shard in range(servers)
        ]
        self.addresses = [
            server.listen_tcp(unix_socket=False) for server in self.servers
        ]
        self.make_trainers(trainers, servers)


def refused_by(server):
    stats = server.stats()
    return stats["unauthenticated"] + stats["turned_away"]


def train(cluster):
    def steps(trainer):
        rng = np.random.default_rng(trainer.rank)
        for _ in range(20):
            keys = np.unique(rng.integers(0, 40, 9))
            trainer.pull(keys)
            rows = rng.standard_normal((len(keys), DIM)).astype(np.float32)
            dense = rng.standard_normal(HIDDEN).astype(np.float32)
            trainer.push(keys, rows, dense)

    cluster.run(steps)
    return cluster.trainers[0].fetch()


def test_training_with_a_key_computes_the_same_bits():
    found = []
    for key in (None, KEY):
        with TcpCluster(key).start() as cluster:
            found.append(train(cluster))
    (table, dense), (keyed_table, keyed_dense) = found
    assert table.tobytes() == keyed_table.tobytes()
    assert dense.tobytes() == keyed_dense.tobytes()


@pytest.mark.parametrize(
    ("servers_key", "key", "says"),
    [
        (KEY, OTHER, "wrong key"),
        (KEY, None, "no key here"),
        (None, KEY, "no key there"),
    ],
)
def test_a_trainer_with_another_key_is_refused_and_counted(servers_key, key, says):
    with TcpCluster(servers_key, trainers=1, servers=1) as cluster:
        stranger = cluster.make_client(0, 1, secret=key)
        address = cluster.addresses[0][0]
        with pytest.raises(errors.AuthenticationError, match=says) as caught:
            stranger.connect()
        assert address in str(caught.value)
        newest, count = cluster.servers[0].take_refusals(PATIENCE_S)
        assert len(newest) == count > 0
        assert cluster.servers[0].stats()["unauthenticated"] > 0
        # Who has the key is not kept from it.
        cluster.start()
        train(cluster)


def test_strangers_of_all_kinds_are_counted_while_training_goes_on():
    with TcpCluster(KEY).start() as cluster:
        host, port = cluster.addresses[0][0].removeprefix("tcp:").split(":")
        done = threading.Event()

        def disturb():
            sent = [b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 64, bytes(range(256)) * 20]
            count, spoke = 0, 0
            while not done.is_set() or count < 40:
                words = sent[count % len(sent)]
                with socket.create_connection((host, int(port)), PATIENCE_S) as raw:
                    # It may be over before that.
                    with contextlib.suppress(OSError):
                        raw.sendall(words)
                count += 1
                spoke += bool(words)  # who only looks is no stranger
            return spoke

        def work():
            try:
                return train(cluster)
            finally:
                done.set()

        count, values = run_all([disturb, work])
        server = cluster.servers[0]
        until(lambda: refused_by(server) >= count, PATIENCE_S)
        with TcpCluster(None).start() as plain:
            alone = train(plain)
    assert values[0].tobytes() == alone[0].tobytes()


def test_who_waits_for_refusals_goes_when_the_server_stops():
    server = _core.Server(run_id=7, secret=KEY)
    server.listen_tcp()
    found = run_all([lambda: server.take_refusals(3600.0), server.stop])
    assert found[0] == ([], 0)


def test_a_false_address_leads_to_nobody_who_can_prove_the_key():
    """Somebody in between hands on every byte, from where no server listens."""
    with TcpCluster(KEY, trainers=1, servers=1) as cluster:
        host, port = cluster.addresses[0][0].removeprefix("tcp:").split(":")
        with relay((host, int(port))) as (false_port, carried):
            false = f"tcp:{host}:{false_port}"
            misled = cluster.make_client(0, 1, servers=[[false]])
            with pytest.raises(errors.AuthenticationError, match="another address"):
                misled.connect()
            newest, _ = cluster.servers[0].take_refusals(PATIENCE_S)
            assert any("another address" in why for _, why in newest)
            assert cluster.servers[0].stats()["trainers"] == 0
            assert carried.is_set()
        cluster.start()
        train(cluster)


@contextlib.contextmanager
def relay(to):
    """A port from which all goes on to ``to``; says which, and that something has."""
    carried, ending = threading.Event(), threading.Event()
    threads = []

    def carry(source, target):
        with contextlib.suppress(OSError):
            while some := source.recv(65536):
                carried.set()
                target.sendall(some)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def accept():
        while not ending.is_set():
            with contextlib.suppress(TimeoutError):
                here, _ = listener.accept()
                there = socket.create_connection(to, PATIENCE_S)
                ends.enter_context(here)
                ends.enter_context(there)
                begin(lambda here=here, there=there: carry(here, there))
                begin(lambda here=here, there=there: carry(there, here))

    def begin(work):
        threads.append(threading.Thread(target=work, daemon=True))
        threads[-1].start()

    with contextlib.ExitStack() as ends:
        listener = ends.enter_context(socket.create_server(("127.0.0.1", 0)))
        listener.settimeout(0.05)
        begin(accept)
        yield listener.getsockname()[1], carried
        ending.set()
        threads[0].join(PATIENCE_S)
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()

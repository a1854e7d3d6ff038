# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Ranks find each other in a store, also in one that an earlier run has used."""

from __future__ import annotations

import json
import socket
import threading
import time

import pytest
from patience import PATIENCE_S
from ports import free_port, listens
from rank_threads import in_threads
from torch.distributed import FileStore, HashStore, TCPStore

from torch_cpudist import _core
from torch_cpudist.errors import (
    AddressError,
    AuthenticationError,
    OperationTimeoutError,
)
from torch_cpudist.launch import environment, rendezvous
from torch_cpudist.launch.layout import Member
from torch_cpudist.launch.rendezvous import Rendezvous, open_store
from torch_cpudist.settings.words import Words


def member(rank):
    return Member(rank, rank, 0, "default", "host", f"host pid {rank}", {})


# For ranks that meet in vain: longer than a thread that is ready waits for a core.
IN_VAIN_S = 1.0


def meet(store, rank, world_size, timeout_s=10.0, together=None):
    """``together``: a barrier of the ranks whose time begins at once."""
    if together is not None:
        together.wait(PATIENCE_S)
    rendezvous = Rendezvous(store, rank, world_size, timeout_s)
    return rendezvous, rendezvous.meet_members(member(rank))


@pytest.mark.parametrize("kind", ["hash", "file"])
def test_all_ranks_get_the_same_roster(kind, tmp_path):
    shared = HashStore()

    def body(rank):
        store = shared if kind == "hash" else FileStore(str(tmp_path / "store"), 4)
        rendezvous, found = meet(store, rank, 4)
        return rendezvous.run_id, found

    outcomes = in_threads(4, body)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    run_id, found = outcomes[0]
    assert found == [member(rank) for rank in range(4)]
    assert 0 < run_id < 2**63


def test_meeting_again_in_the_same_store_is_a_new_run():
    store = HashStore()
    runs = [in_threads(3, lambda r: meet(store, r, 3)[0].run_id) for _ in range(3)]
    assert all(len(set(ids)) == 1 for ids in runs)
    assert len({ids[0] for ids in runs}) == 3


KEY, OTHER = (
    _core.Secret(word + b" key of at least thirty-two bytes") for word in (b"a", b"an")
)


def test_ranks_with_one_key_meet_and_a_word_of_somebody_else_is_refused():
    store, words = HashStore(), Words(KEY)

    def body(rank):
        here = Rendezvous(store, rank, 2, PATIENCE_S, words)
        found = here.meet_members(member(rank))
        if rank == 0:
            here.publish(0, ["tcp:127.0.0.1:1"])
        return here, found, here.addresses([0])

    outcomes = in_threads(2, body)
    for here, found, addresses in outcomes:
        assert found == [member(rank) for rank in range(2)]
        assert addresses == [["tcp:127.0.0.1:1"]]
        name = f"torch_cpudist/{here.run_id}/server/0"
        forged = json.dumps({"addresses": ["tcp:127.0.0.1:2"]})
        for word in (forged, Words(OTHER).sign(name, forged)):
            store.set(name, word)
            with pytest.raises(AuthenticationError, match="/server/0' is refused"):
                here.addresses([0])
        store.set(name, words.sign(name, forged))
        assert here.addresses([0]) == [["tcp:127.0.0.1:2"]]


@pytest.mark.parametrize(("keys", "why"), [
    ((KEY, None), "no key there"), ((KEY, OTHER), "wrong key"),
    ((None, KEY), "no key here"),
])  # fmt: skip
def test_ranks_with_other_keys_do_not_meet(keys, why):
    store = HashStore()
    Rendezvous(store, 1, 2, 10.0, Words(keys[1])).put("here/1", {"nonce": "1"})
    rendezvous = Rendezvous(store, 0, 2, PATIENCE_S, Words(keys[0]))
    with pytest.raises(AuthenticationError, match=f"/here/1' is refused, {why}"):
        rendezvous.meet_members(member(0))


def test_what_a_dead_run_left_behind_is_not_taken_for_this_one():
    store = HashStore()
    first = in_threads(3, lambda r: meet(store, r, 3)[0].run_id)

    # Rank 0 is back first and finds the others' old values; they come later.
    def body(rank):
        time.sleep(0.3 * rank)
        return meet(store, rank, 3)[0].run_id

    again = in_threads(3, body)
    assert len(set(again)) == 1
    assert again[0] != first[0]


class Late:
    """A client of a store: what it sets comes in with its next question only.

    As with a ``TCPStore``, which waits for no answer to what it sets.
    """

    def __init__(self, store):
        self._store, self._set = store, []

    def set(self, key, value):
        self._set.append((key, value))

    def check(self, keys):
        for key, value in self._set:
            self._store.set(key, value)
        self._set.clear()
        return self._store.check(keys)

    def get(self, key):
        assert self.check([key])
        return self._store.get(key)


def test_what_was_shown_is_seen_by_who_is_told_otherwise():
    store = HashStore()
    first, second = (Rendezvous(Late(store), rank, 2, 10.0) for rank in range(2))
    for value in ("here", ""):
        first.show("some/key", value)  # and says so by another way than the store
        assert second.shown("some/key") == value


def test_missing_ranks_are_named():
    store = HashStore()
    together = threading.Barrier(3)
    outcomes = in_threads(3, lambda r: meet(store, 2 * r, 6, IN_VAIN_S, together))
    for outcome in outcomes:
        assert isinstance(outcome, OperationTimeoutError)
        assert "ranks [1, 3, 5] of 6 did not come" in str(outcome)


def test_a_rank_that_left_old_values_only_is_named():
    store = HashStore()
    in_threads(3, lambda r: meet(store, r, 3))
    together = threading.Barrier(2)
    outcomes = in_threads(2, lambda r: meet(store, r, 3, IN_VAIN_S, together))
    assert isinstance(outcomes[0], OperationTimeoutError)
    assert "ranks [2] did not come" in str(outcomes[0])
    assert isinstance(outcomes[1], OperationTimeoutError)


def test_addresses_and_failures_reach_everybody():
    store = HashStore()

    def body(rank):
        rendezvous, _ = meet(store, rank, 2)
        rendezvous.publish(rank, [f"tcp:127.0.0.1:{rank + 1}"])
        return rendezvous.addresses([0, 1])

    expected = [["tcp:127.0.0.1:1"], ["tcp:127.0.0.1:2"]]
    assert in_threads(2, body) == [expected, expected]

    def failing(rank):
        rendezvous, _ = meet(store, rank, 2)
        if rank == 1:
            rendezvous.publish_failure(1, "port 80: permission denied")
        else:
            rendezvous.publish(0, ["tcp:127.0.0.1:1"])
        return rendezvous.addresses([0, 1])

    for outcome in in_threads(2, failing):
        assert isinstance(outcome, AddressError)
        assert "server 1 (rank 1) cannot listen: port 80" in str(outcome)


def test_a_server_without_an_address_is_named():
    rendezvous, _ = meet(HashStore(), 0, 1, timeout_s=0.3)
    with pytest.raises(
        OperationTimeoutError, match=r"no address of server 0 \(rank 7\)"
    ):
        rendezvous.addresses([7])


def test_over_the_store_that_torchrun_uses():
    master = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def body(rank):
        made = environment.Environment(
            rank=rank,
            world_size=5,
            master_addr="127.0.0.1",
            master_port=master.port,
            launched=True,
            agent_store=True,
        )
        store = open_store(made, 10)
        rendezvous, found = meet(store, rank, 5)
        return rendezvous.run_id, len(found)

    outcomes = in_threads(5, body)
    assert len(set(outcomes)) == 1, outcomes
    assert outcomes[0][1] == 5


def test_over_a_store_that_rank_0_keeps():
    """Ranks that something else than torchrun has started."""
    port = free_port()
    stores = []
    together = threading.Barrier(2)

    def body(rank):
        made = environment.Environment(
            rank=rank,
            world_size=3,
            master_addr="127.0.0.1",
            master_port=port,
            launched=True,
        )
        store = open_store(made, 10)
        stores.append(store)
        if rank == 2:
            return None
        with pytest.raises(OperationTimeoutError, match=r"ranks \[2\] of 3 did not"):
            meet(store, rank, 3, IN_VAIN_S, together)
        return rank

    assert in_threads(3, body) == [0, 1, None]


EVERYWHERE = {"0.0.0.0", "::"}  # noqa: S104


def own_store(port, address="127.0.0.1", **others):
    made = environment.Environment(
        rank=0,
        world_size=2,
        local_world_size=others.get("local_world_size", 2),
        local_said=others.get("local_said", True),
        master_addr=address,
        master_port=port,
        launched=True,
    )
    return open_store(made, PATIENCE_S)


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_a_store_that_rank_0_keeps_listens_on_the_named_address_only(address):
    port = free_port()
    first = own_store(port, address)
    assert listens(port) == {"127.0.0.1"}
    first.set("key", "value")
    # One process may call init() again, and its first store be there still.
    assert own_store(port, address).get("key") == b"value"
    assert listens(port) == {"127.0.0.1"}


@pytest.mark.parametrize(
    ("address", "ranks", "why"),
    [
        ("127.0.0.1", 1, "is a name of this host only"),
        ("192.0.2.1", 2, "is no address of this host"),
    ],
)
def test_a_store_that_others_may_not_reach_otherwise_listens_everywhere_and_says_so(
    address, ranks, why, caplog, monkeypatch
):
    kept = []

    def keep(at, port, **others):
        assert "master_listen_fd" not in others
        kept.append(TCPStore("127.0.0.1", port, **others))
        return kept[-1]

    monkeypatch.setattr(rendezvous, "TCPStore", keep)
    port = free_port()
    own_store(port, address, local_world_size=ranks)
    assert len(listens(port) & EVERYWHERE) == 1
    assert why in caplog.text


@pytest.mark.parametrize("name", ["node0", "127.0.0.1"])
def test_where_nobody_says_how_many_ranks_a_host_has_a_name_may_be_a_hosts_own(
    name, caplog, monkeypatch
):
    """Debian has a host's own name at 127.0.1.1, which others resolve otherwise."""
    resolve = socket.getaddrinfo

    def resolved(asked, *arguments, **named):
        return resolve("127.0.1.1" if asked == "node0" else asked, *arguments, **named)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    keep = rendezvous.TCPStore
    monkeypatch.setattr(
        rendezvous,
        "TCPStore",
        lambda at, *more, **named: keep("127.0.0.1", *more, **named),
    )
    port = free_port()
    kept = own_store(port, name, local_said=False)
    if name == "node0":
        assert len(listens(port) & EVERYWHERE) == 1
        assert "is a name of this host only" in caplog.text
    else:
        assert listens(port) == {"127.0.0.1"}
        assert not caplog.text
    del kept


def test_a_port_that_another_has_is_said():
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        with pytest.raises(AddressError, match=f"MASTER_PORT={port}.*in use"):
            own_store(port)


def test_no_store_at_the_address_is_said():
    made = environment.Environment(
        rank=1,
        world_size=2,
        master_addr="127.0.0.1",
        master_port=1,
        launched=True,
    )
    began = time.monotonic()
    with pytest.raises(AddressError, match=r"MASTER_ADDR=127\.0\.0\.1 MASTER_PORT=1"):
        open_store(made, 1.0)
    assert time.monotonic() - began < 5


def test_a_name_that_does_not_resolve_is_said_at_once():
    made = environment.Environment(
        rank=0,
        world_size=2,
        master_addr="no-such-host.invalid",
        master_port=29500,
        launched=True,
    )
    began = time.monotonic()
    with pytest.raises(AddressError, match=r"no-such-host\.invalid .*not resolve"):
        open_store(made, 300.0)
    assert time.monotonic() - began < 5

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The environment and the layout are checked before anything starts."""

from __future__ import annotations

import pytest

from torch_cpudist.errors import (
    ConfigMismatchError,
    ConfigurationError,
)
from torch_cpudist.launch import environment, layout

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "6",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "ROLE_NAME": "default",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
GROUP = {"CPUDIST_ROLE": "trainer", "CPUDIST_RENDEZVOUS": "10.0.0.1:29600"}


def test_nothing_set_is_a_world_of_one():
    made = environment.parse({"HOME": "/root", "OMP_NUM_THREADS": "1"})
    assert (made.rank, made.world_size, made.launched) == (0, 1, False)
    assert (made.liveness_ms, made.round_deadline_ms) == (3000, 1_800_000)


def test_reads_every_variable():
    made = environment.parse(
        {
            **TORCHRUN,
            "CPUDIST_SERVERS": "2",
            "CPUDIST_BACKEND": "gloo",
            "CPUDIST_TRANSPORT": "tcp",
            "CPUDIST_BIND": "eth0",
            "CPUDIST_PORTS": "41000-41003",
            "CPUDIST_THREADS": "3",
            "CPUDIST_LIVENESS_MS": "700",
            "CPUDIST_ROUND_DEADLINE_MS": "9000",
            "CPUDIST_RPC_DEADLINE_MS": "800",
            "CPUDIST_RPC_RETRIES": "0",
            "CPUDIST_LOG": "DEBUG",
            "CPUDIST_STRATEGY": "sync",
            "CPUDIST_SHARDING_MIN_BLOCK_SIZE": "16",
            "CPUDIST_SERVER_THREADS": "4",
        }
    )
    assert (made.rank, made.world_size, made.local_rank, made.group_rank) == (
        3,
        6,
        1,
        1,
    )
    assert (made.master_addr, made.master_port) == ("10.0.0.1", 29500)
    assert (made.servers, made.backend, made.bind) == (2, "gloo", "eth0")
    assert (made.ports, made.threads, made.log) == ((41000, 41003), 3, "debug")
    assert (made.liveness_ms, made.round_deadline_ms) == (700, 9000)
    assert (made.rpc_deadline_ms, made.rpc_retries) == (800, 0)
    assert made.strategy == "sync"
    assert made.server.threads == 4
    assert made.settings["CPUDIST_SHARDING_MIN_BLOCK_SIZE"] == "16"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"RANK": "6"}, "RANK=6 with WORLD_SIZE=6"),
        ({"RANK": "-1"}, "RANK=-1"),
        ({"RANK": "three"}, "RANK='three'"),
        ({"WORLD_SIZE": None}, "not WORLD_SIZE"),
        ({"RANK": None}, "not RANK"),
        ({"MASTER_ADDR": None, "MASTER_PORT": None}, "not MASTER_ADDR, MASTER_PORT"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 with LOCAL_WORLD_SIZE=2"),
        ({"LOCAL_WORLD_SIZE": "7"}, "LOCAL_WORLD_SIZE=7 with WORLD_SIZE=6"),
        ({"CPUDIST_SERVERS": "6"}, "leaves no trainer"),
        ({"CPUDIST_SERVERS": "-2"}, "CPUDIST_SERVERS=-2"),
        ({"CPUDIST_SERVERS": "2", "ROLE_NAME": "server"}, "--role=server both say"),
        ({"CPUDIST_PORTS": "80000"}, "CPUDIST_PORTS='80000'"),
        ({"CPUDIST_PORTS": "5-4"}, "CPUDIST_PORTS='5-4'"),
        ({"CPUDIST_THREADS": "0"}, "CPUDIST_THREADS=0"),
        ({"CPUDIST_LIVENESS_MS": "1"}, "CPUDIST_LIVENESS_MS=1"),
        ({"CPUDIST_LOG": "loud"}, "Valid: debug, info, warning"),
        ({"CPUDIST_TRANSPORT": "rdma"}, "Valid: c10d, tcp"),
        ({"CPUDIST_ROLE": "server"}, "set, but not CPUDIST_RENDEZVOUS"),
        ({"CPUDIST_RENDEZVOUS": "a:1"}, "set, but not CPUDIST_ROLE"),
        ({"CPUDIST_TRAINERS": "2"}, "set, but not CPUDIST_ROLE"),
        ({**GROUP, "CPUDIST_ROLE": "sever"}, "did you mean server?"),
        ({**GROUP, "CPUDIST_RENDEZVOUS": "host"}, "expected host:port"),
        ({**GROUP, "CPUDIST_ROLE": "server"}, "needs CPUDIST_TRAINERS"),
        ({**GROUP, "CPUDIST_TRAINERS": "0"}, "CPUDIST_TRAINERS=0: must be at least 1"),
        ({**GROUP, "CPUDIST_REJOIN_S": "-1"}, "CPUDIST_REJOIN_S=-1: must be at least"),
        ({**GROUP, "CPUDIST_SERVERS": "1"}, "unset CPUDIST_SERVERS"),
        ({**GROUP, "ROLE_NAME": "trainer"}, "drop torchrun's --role"),
        ({"CPUDIST_RPC_RETRIES": "-1"}, "CPUDIST_RPC_RETRIES=-1: must be at least 0"),
        ({"CPUDIST_RPC_RETRIES": "1e3"}, "CPUDIST_RPC_RETRIES='1e3'"),
        ({"CPUDIST_PULL_THREADS": "2"}, "not available in this version"),
        ({"CPUDIST_SERVRES": "2"}, "did you mean CPUDIST_SERVERS?"),
        ({"CPUDIST_SHARDING_SLICE": "maybe"}, "CPUDIST_SHARDING_SLICE='maybe'"),
        ({"CPUDIST_SERVER_THREADS": "-1"}, "CPUDIST_SERVER_THREADS"),
        ({"CPUDIST_SERVER_THREADS": "100000"}, "must be at most 1024"),
        ({"CPUDIST_THREADS": "100000"}, "CPUDIST_THREADS=100000: must be at most 1024"),
        ({"CPUDIST_SERVER_MEMORY_CAP_BYTES": f"1{'0' * 22}"}, "must be at most 9223"),
        ({"CPUDIST_SHARDING_MIN_BLOCK_SIZE": f"1{'0' * 22}"}, "must be at most 9223"),
        ({"CPUDIST_ROUND_DEADLINE_MS": f"1{'0' * 22}"}, "must be at most 31536000000"),
        ({"CPUDIST_LIVENESS_MS": f"1{'0' * 22}"}, "must be at most 31536000000"),
        ({"CPUDIST_RPC_DEADLINE_MS": f"1{'0' * 22}"}, "must be at most 31536000000"),
        ({"WORLD_SIZE": "65536"}, "WORLD_SIZE=65536: must be at most 65535"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT=65536: must be at most 65535"),
        ({"MASTER_ADDR": " "}, "MASTER_ADDR is empty"),
        ({"CPUDIST_SERVERS": "0", "ROLE_NAME": "server"}, "--role=server both say"),
        ({"ROLE_NAME": "servers"}, "did you mean --role=server?"),
        ({"ROLE_NAME": "Trainers"}, "did you mean --role=trainer?"),
        ({"cpudist_servers": "2"}, "Set CPUDIST_SERVERS."),
        ({"Cpudist_Servrs": "2"}, "unknown variable Cpudist_Servrs"),
        ({"CPUDIST_STRATEGY": "synk"}, "CPUDIST_STRATEGY='synk': there is no strategy"),
        ({"RANK": None, "WORLD_SIZE": None}, "LOCAL_RANK, LOCAL_WORLD_SIZE set, but"),
    ],
)
def test_contradictions_name_what_to_set(changes, says):
    variables = {**TORCHRUN, **changes}
    present = {name: text for name, text in variables.items() if text is not None}
    with pytest.raises(ConfigurationError) as caught:
        environment.parse(present)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("CPUDIST_SERVRES", "CPUDIST_SERVERS"),
        ("CPUDIST_NUM_THREADS", "CPUDIST_THREADS"),
        ("cpudist_port", "CPUDIST_PORTS"),
        ("CPUDIST_GEO_PUSHEVERY", "CPUDIST_GEO_PUSH_EVERY"),
        # Alike in what all have in common only.
        ("CPUDIST_FOO", None),
        ("CPUDIST_TABLES", None),
        ("CPUDIST_", None),
    ],
)
def test_a_hint_comes_first_and_none_is_better_than_a_wrong_one(name, meant):
    with pytest.raises(ConfigurationError) as caught:
        environment.parse({name: "1"})
    text = str(caught.value)
    known = [v for v in environment.OWN_VARIABLES if v in text.split(": ", 1)[1]]
    begin = f"unknown variable {name}: "
    hint = "" if meant is None else f"did you mean {meant}? "
    assert text.startswith(f"{begin}{hint}docs/configuration.md lists all ")
    # And no list of fifty names.
    assert known in ([], [meant])


@pytest.mark.parametrize("text", ["Server", " server ", "SERVER"])
def test_a_role_is_known_in_any_case(text):
    assert environment.parse({**TORCHRUN, "ROLE_NAME": text}).role_name == "server"


@pytest.mark.parametrize("text", ["default", "worker", "train"])
def test_other_role_names_are_none_of_our_business(text):
    assert environment.parse({**TORCHRUN, "ROLE_NAME": text}).role_name == text


def test_the_longest_waits_that_are_accepted():
    year = 365 * 24 * 3600 * 1000
    made = environment.parse({"CPUDIST_ROUND_DEADLINE_MS": str(year)})
    assert made.round_deadline_ms == year


def test_equal_settings_in_other_words_agree():
    plain = environment.parse({})
    same = environment.parse({"CPUDIST_SERVERS": "0"})
    assert environment.agreed_settings(plain) == environment.agreed_settings(same)
    named = [environment.parse({"CPUDIST_STRATEGY": n}) for n in ("sync", " SYNC")]
    assert len({made.strategy for made in named}) == 1


@pytest.mark.parametrize("name", ["shm", "ccl", "nccl", "mpi"])
def test_backends_are_named(name):
    assert environment.parse({"CPUDIST_BACKEND": f" {name.upper()}"}).backend == name


def members(count, **columns):
    made = []
    for rank in range(count):
        fields = {
            "rank": rank,
            "local_rank": rank,
            "group_rank": 0,
            "role_name": "default",
            "host_id": "a",
            "host": "host-a pid 1",
            "agreed": {"CPUDIST_SERVERS": "0"},
        }
        fields.update({name: values[rank] for name, values in columns.items()})
        made.append(layout.Member(**fields))
    return made


def test_colocated_ranks_train_and_serve():
    found = layout.assign(members(3), 0)
    assert (found.servers, found.trainers, found.colocated) == (
        (0, 1, 2),
        (0, 1, 2),
        True,
    )
    assert found.one_host


def test_dedicated_servers_are_spread_over_hosts():
    # Two hosts of three ranks: one server on each, not two on the first.
    found = layout.assign(
        members(
            6,
            local_rank=[0, 1, 2, 0, 1, 2],
            group_rank=[0, 0, 0, 1, 1, 1],
            host_id=["a"] * 3 + ["b"] * 3,
        ),
        2,
    )
    assert (found.servers, found.trainers) == ((0, 3), (1, 2, 4, 5))
    assert not found.one_host
    assert found.ranks_on_host_of(4) == 3


@pytest.mark.parametrize("servers", [1, 2, 3, 4, 5])
def test_every_ratio_gives_each_rank_one_role(servers):
    found = layout.assign(members(6), servers)
    assert len(found.servers) == servers
    assert sorted(found.servers + found.trainers) == list(range(6))


def test_role_names_say_who_serves():
    found = layout.assign(
        members(4, role_name=["trainer", "server", "trainer", "server"]), 0
    )
    assert (found.servers, found.trainers) == ((1, 3), (0, 2))


@pytest.mark.parametrize(
    ("roles", "says"),
    [
        (["server", "server"], "none has --role=trainer"),
        (["trainer", "trainer"], "none has --role=server"),
        (["server", "default"], r"ranks \[1\] have torchrun --role=default"),
    ],
)
def test_roles_that_do_not_fit(roles, says):
    with pytest.raises(ConfigurationError, match=says):
        layout.assign(members(2, role_name=roles), 0)


def test_ranks_must_agree():
    found = members(3)
    found[2].agreed["CPUDIST_SERVERS"] = "1"
    with pytest.raises(
        ConfigMismatchError, match=r"CPUDIST_SERVERS: 0 on ranks \[0, 1\]; 1"
    ):
        layout.assign(found, 0)
    found[2].agreed.update(CPUDIST_SERVERS="0", CPUDIST_SHARDING_SLICE="0")
    with pytest.raises(ConfigMismatchError, match=r"\(unset\) on ranks \[0, 1\]"):
        layout.assign(found, 0)


def test_replicas_have_two_names():
    assert environment.parse({}).replicas is None
    assert environment.parse({"CPU_NUM": " "}).replicas is None
    assert environment.parse({"CPU_NUM": "4"}).replicas == 4
    both = {"CPU_NUM": "4", "CPUDIST_REPLICAS_COUNT": "3"}
    assert environment.parse(both).replicas == 3
    # Hosts need not agree about them.
    made = environment.parse(both)
    assert environment.agreed_settings(made) == environment.agreed_settings(
        environment.parse({})
    )


@pytest.mark.parametrize("text", ["0", "four", "5000"])
def test_numbers_of_replicas_that_cannot_be(text):
    with pytest.raises(ConfigurationError, match=f"CPU_NUM='?{text}"):
        environment.parse({"CPU_NUM": text})


@pytest.mark.parametrize(
    ("text", "count"), [(None, 1), ("", 1), ("0", 0), ("1", 1), ("6", 6)]
)
def test_how_many_ranks_were_launched(text, count):
    told = {} if text is None else {"WORLD_SIZE": text}
    assert environment.launched_count(told) == count


def test_a_count_of_launched_ranks_that_is_no_number():
    with pytest.raises(ConfigurationError, match="WORLD_SIZE='many'"):
        environment.launched_count({"WORLD_SIZE": "many"})

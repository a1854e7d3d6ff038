# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Settings: environment over argument over default; wrong values are refused."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil

import pytest

import torch_cpudist as cpudist
from torch_cpudist import settings as settings_package
from torch_cpudist import strategies
from torch_cpudist.errors import ConfigurationError
from torch_cpudist.launch import environment
from torch_cpudist.settings import fields
from torch_cpudist.settings.server import Server
from torch_cpudist.strategies.registry import SETTINGS


def parsed(**variables):
    return environment.parse(variables)


def resolve(chosen, made):
    return strategies.resolve(chosen, made.strategy, made.values, made.server)


def test_types_of_fields_are_evaluated_once(monkeypatch):
    """To evaluate them took most of the time of ``init()``."""
    parsed()

    def again(cls):
        raise AssertionError(f"the types of {cls.__name__} are evaluated again")

    monkeypatch.setattr(fields, "get_type_hints", again)
    assert parsed(CPUDIST_SERVER_THREADS="3").server.threads == 3


def test_default_is_sync():
    assert resolve(None, parsed()) == cpudist.Sync()


@pytest.mark.parametrize(
    "chosen",
    [
        cpudist.Sync(sharding=cpudist.Sharding(min_block_size=10)),
        cpudist.Sync(sharding={"min_block_size": 10}),
        {"name": "sync", "sharding": {"min_block_size": 10}},
        cpudist.strategy("Sync", sharding={"min_block_size": 10}),
    ],
)
def test_environment_over_argument_over_default(chosen):
    assert resolve(chosen, parsed()).sharding.min_block_size == 10
    made = resolve(
        chosen,
        parsed(CPUDIST_SHARDING_MIN_BLOCK_SIZE="20", CPUDIST_SHARDING_SLICE="off"),
    )
    assert made.sharding == cpudist.Sharding(slice=False, min_block_size=20)


def test_naming_the_same_strategy_keeps_its_arguments():
    chosen = cpudist.Sync(sharding={"split_method": "hash"})
    made = resolve(chosen, parsed(CPUDIST_STRATEGY="sync"))
    assert made.sharding.split_method == "hash"


def test_strategies_of_this_version_are_listed():
    names = "allreduce, async, geo, half_async, hybrid, local_sgd, reduce, sync"
    assert ", ".join(strategies.names()) == names
    expected = rf"no strategy 'gossip' in this version: Valid: {names}"
    with pytest.raises(ConfigurationError, match=expected):
        cpudist.strategy("gossip")
    with pytest.raises(ConfigurationError, match="no strategy 'gossip'"):
        resolve(None, parsed(CPUDIST_STRATEGY="gossip"))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: cpudist.Sync(sharding={"min_blok": 1}), "did you mean min_block_size"),
        (lambda: cpudist.strategy("sync", shards=1), "Sync has no field 'shards'"),
        (lambda: cpudist.Sharding(min_block_size=0), "must be at least 1"),
        (lambda: cpudist.Sharding(min_block_size=1.5), "expected int, found float"),
        (lambda: cpudist.Sharding(min_block_size=True), "expected int, found bool"),
        (lambda: cpudist.Sharding(split_method="rr"), "Valid: balanced, hash"),
        (lambda: Server(threads=1025), "must be at most 1024"),
        (lambda: Server(memory_cap_bytes=2**63), "must be at most 9223"),
        (lambda: cpudist.Sync(sharding=3), "expected Sharding or a dict"),
        (lambda: resolve(3, parsed()), "found 3"),
        (lambda: resolve({"slice": 1}, parsed()), "needs 'name'"),
        (lambda: parsed(CPUDIST_SHARDING_MIN_BLOCK_SIZE="0"), "CPUDIST_SHARDING_MIN_"),
    ],
)
def test_wrong_settings_say_what_is_valid(make, says):
    with pytest.raises(ConfigurationError) as caught:
        make()
    assert says in str(caught.value)


def test_server_settings_belong_to_init():
    chosen = cpudist.Sync(server={"threads": 3})
    with pytest.raises(ConfigurationError, match="CPUDIST_SERVER_"):
        resolve(chosen, parsed())
    running = parsed(CPUDIST_SERVER_THREADS="3")
    assert resolve(chosen, running).server.threads == 3


def test_mutation_shows_replace():
    sharding = cpudist.Sharding()
    with pytest.raises(
        ConfigurationError, match=r"dataclasses\.replace\(.*min_block_size"
    ):
        sharding.min_block_size = 3
    with pytest.raises(ConfigurationError, match=r"dataclasses\.replace"):
        del cpudist.Sync().sharding
    assert dataclasses.replace(sharding, min_block_size=3).min_block_size == 3


def test_every_number_has_limits():
    """A number that the core cannot hold must not get as far as the core."""
    for kind in SETTINGS:
        for entry in fields.scalar_fields(kind):
            if type(entry.default) in (int, float):
                assert {"least", "most"} <= entry.metadata.keys(), entry.name


def test_every_field_has_a_variable_in_its_docstring():
    for kind in SETTINGS:
        for entry in fields.scalar_fields(kind):
            assert fields.variable_of(kind, entry.name) in kind.__doc__


def test_variables_that_the_strategy_does_not_use_are_told(caplog):
    set_ones = parsed(CPUDIST_ASYNC_MAX_STALENESS="3", CPUDIST_SERVER_THREADS="2")
    with caplog.at_level("WARNING", "torch_cpudist"):
        resolve("async", set_ones)
        assert not caplog.records
        resolve("sync", set_ones)
    (record,) = caplog.records
    assert record.getMessage() == (
        "CPUDIST_ASYNC_MAX_STALENESS is set, but Sync does not use it"
    )


def test_a_variable_is_not_blamed_for_what_is_wrong_without_it():
    merging = cpudist.Async(communicator={"max_merge": 1}, delay_compensation={})
    variables = {
        "CPUDIST_COMMUNICATOR_MAX_MERGE": "2",
        "CPUDIST_ASYNC_MAX_STALENESS": "4",
    }
    with pytest.raises(cpudist.ConfigurationError, match="max_merge") as caught:
        fields.with_environment(merging, fields.read(SETTINGS, variables))
    assert "MAX_STALENESS" not in str(caught.value)


def test_variables_that_are_valid_together_may_both_be_set():
    queue = {"pull_every": 5}
    made = resolve(
        cpudist.Async(communicator=queue),
        parsed(CPUDIST_ASYNC_MAX_STALENESS="3", CPUDIST_COMMUNICATOR_PULL_EVERY="1"),
    )
    assert (made.max_staleness, made.communicator.pull_every) == (3, 1)


def test_settings_of_parts_count_as_used(caplog):
    chosen = {"CPUDIST_HYBRID_SPARSE": "geo", "CPUDIST_GEO_PUSH_EVERY": "7"}
    made = resolve("hybrid", parsed(**chosen))
    assert made.sparse.push_every == 7
    resolve("async", parsed(CPUDIST_DELAYCOMPENSATION_FACTOR="0.5"))
    assert "does not use" not in caplog.text
    resolve("sync", parsed(CPUDIST_GEO_PUSH_EVERY="7"))
    assert "CPUDIST_GEO_PUSH_EVERY is set, but Sync does not use it" in caplog.text


def settings_classes():
    """Every settings class that a module of the package defines."""
    found = set()
    for package in (settings_package, strategies):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            members = vars(importlib.import_module(module.name)).values()
            found |= {
                member
                for member in members
                if isinstance(member, type)
                and member.__setattr__ is cpudist.Sharding.__setattr__
            }
    return found


def test_the_table_has_every_settings_class():
    """A class that is not in it would have no variables."""
    assert settings_classes() == set(SETTINGS)
    assert len(SETTINGS) == len(set(SETTINGS))


def test_a_process_without_init_reads_what_its_replicas_follow():
    said = environment.parse_alone(
        {
            "CPU_NUM": "3",
            "CPUDIST_THREADS": "2",
            "CPUDIST_PIN": "1",
            "CPUDIST_LIVENESS_MS": "soon",
            **{"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        }
    )
    assert (said.rank, said.local_world_size) == (1, 4)
    assert (said.threads, said.pin) == (2, True)
    assert said.values == {"CPUDIST_REPLICAS_COUNT": 3}
    with pytest.raises(ConfigurationError, match="did you mean CPUDIST_REPLICAS_COUNT"):
        environment.parse_alone({"CPUDIST_REPLICA_COUNT": "3"})
    with pytest.raises(ConfigurationError, match="CPU_NUM=0"):
        environment.parse_alone({"CPU_NUM": "0"})

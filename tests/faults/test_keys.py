# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Jobs with a key: they train as without one, and who has another does not."""

# ruff: noqa: F811  (fixtures)

from __future__ import annotations

import hashlib
import re

import pytest
from group_fixtures import groups, steps_of  # noqa: F401
from patience import PATIENCE_S
from sync_cases import RULES, Batches, Model, build, copy_of, loss_of

import torch_cpudist as cpudist
from torch_cpudist import _core
from torch_cpudist.testing import ProcessRanks

pytestmark = [pytest.mark.processes, pytest.mark.own_keys]

KEY = {"CPUDIST_SECRET": "a key of at least thirty-two bytes"}
OTHER = {"CPUDIST_SECRET": "another key of at least thirty-two bytes"}
STEPS = 12


def train_in_rounds(context, report):
    """Trains a small model under Sync; tells a digest of what came of it."""
    batches = Batches(context.trainer_count, steps=STEPS)
    model = Model()
    strategy = cpudist.Sync(sharding=cpudist.Sharding(min_block_size=8))
    optimizer = cpudist.DistributedOptimizer(
        build(RULES["adagrad"], model), model, strategy=strategy
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batches.part(step, context.trainer_rank)).backward()
        optimizer.step()
    optimizer.flush()
    digest = hashlib.sha256()
    for name, value in sorted(copy_of(model).items()):
        digest.update(name.encode() + value.detach().numpy().tobytes())
    return digest.hexdigest()


def test_a_job_with_a_key_computes_the_same_bits():
    found = []
    for key in ({}, KEY | {"CPUDIST_AUTH": "require"}):
        variables = {"CPUDIST_THREADS": "1"} | key
        with ProcessRanks(train_in_rounds, 4, servers=2, variables=variables) as ranks:
            found.append(ranks.results(PATIENCE_S))
    plain, keyed = found
    assert sum(one is not None for one in plain) == 2
    assert keyed == plain


def warned(servers):
    told = servers.expect(0, "warning", PATIENCE_S)["value"]
    assert told.startswith("server 0 refused a connection from "), told
    return told


@pytest.mark.parametrize(
    ("servers_key", "trainers_key", "why"),
    [
        (KEY, OTHER, "wrong key: "),
        (KEY, {}, "no key here: "),
        ({}, KEY, "no key there: "),
    ],
)
def test_a_trainer_with_another_key_follows_no_word_of_the_servers(
    groups, servers_key, trainers_key, why
):
    groups.servers(ranks=1, **servers_key)
    stranger = groups.trainer("stranger", **trainers_key)
    error = stranger.expect(0, "error", PATIENCE_S)["value"]
    assert error["type"] == "AuthenticationError", error
    assert f" is refused, {why}" in error["text"], error


@pytest.mark.parametrize(
    ("servers_key", "trainers_key", "trainer_says", "server_says"),
    [
        (KEY, OTHER, "wrong key: ", "wrong key: "),
        (KEY, {}, "no key here: ", "no key there: "),
        ({}, KEY, "no key there: ", None),
    ],
)
def test_both_ends_say_why_a_trainer_is_refused(
    groups, servers_key, trainers_key, trainer_says, server_says
):
    """One that knows from elsewhere where servers listen."""
    servers = groups.servers(ranks=1, **servers_key)
    known = servers_key.get("CPUDIST_SECRET")
    run_id, addresses = groups.addresses(known.encode() if known else None)
    key = trainers_key.get("CPUDIST_SECRET")
    stranger = _core.Client(
        run_id=run_id,
        trainer_rank=0,
        trainer_count=2,
        servers=addresses,
        connect_deadline_ms=int(PATIENCE_S * 1000),
        secret=None if key is None else _core.Secret(key.encode()),
    )
    with pytest.raises(cpudist.AuthenticationError) as caught:
        stranger.connect()
    text = str(caught.value)
    assert re.match(r"server 0 (at |\()(unix|tcp):", text), text
    assert trainer_says in text
    while server_says and f": {server_says}" not in (told := warned(servers)):
        # On a busy machine one attempt may have taken too long, at either end, and
        # another followed.
        assert "no complete first frame" in told or "wrong key" in told, told


def test_the_job_goes_on_while_a_stranger_is_refused(groups, steps_of, tmp_path):
    servers = groups.servers(ranks=2, **KEY)
    trainers = [groups.trainer(name, **KEY) for name in "ab"]
    for name in "ab":
        steps_of(name, 3)
    stranger = groups.trainer("stranger", **OTHER)
    error = stranger.expect(0, "error", PATIENCE_S)["value"]
    assert error["type"] == "AuthenticationError", error
    for name in "ab":
        steps_of(name, steps_of(name) + 3)
    (tmp_path / "stop").touch()
    for trainer in trainers:
        trainer.expect(0, "result", PATIENCE_S)
    for rank in range(2):
        servers.expect(rank, "result", PATIENCE_S)

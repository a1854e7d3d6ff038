# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a server says of who may reach it, and of those that were refused."""

from __future__ import annotations

import logging

import pytest
from patience import PATIENCE_S
from ports import free_port

import torch_cpudist as cpudist
from torch_cpudist.launch import endpoints
from torch_cpudist.launch.endpoints import Endpoints
from torch_cpudist.launch.refusals import log_refusals

WARNING = "without a key: whoever reaches it can read and change the model"


@pytest.mark.parametrize(
    ("key", "loopback", "warns"),
    [(None, False, True), ("k" * 32, False, False), (None, True, False)],
)
def test_a_server_that_others_reach_without_a_key_warns(
    monkeypatch, caplog, key, loopback, warns
):
    variables = {
        "CPUDIST_ROLE": "server",
        "CPUDIST_RENDEZVOUS": f"127.0.0.1:{free_port()}",
        "CPUDIST_TRAINERS": "1",
        "CPUDIST_BIND": "127.0.0.1",
    }
    if key:
        variables["CPUDIST_SECRET"] = key
    # As if the address were another one: a machine may have none.
    monkeypatch.setattr(endpoints.host, "is_loopback", lambda *_: loopback)
    caplog.set_level(logging.WARNING)
    cpudist.init(variables=variables, timeout_s=PATIENCE_S).abort("the test is over")
    assert (WARNING in caplog.text) == warns


@pytest.mark.parametrize(
    ("kept", "count", "more"), [(3, 3, 0), (64, 64, 60), (64, 500, 496)]
)
def test_a_log_of_refusals_counts_those_that_it_does_not_name(
    caplog, kept, count, more
):
    newest = [(f"tcp:10.0.0.{n}:5", "wrong key") for n in range(kept)]
    caplog.set_level(logging.WARNING)
    log_refusals("server 0", newest, count)
    named = [one for one in caplog.messages if "refused a connection from" in one]
    assert named == [
        f"server 0 refused a connection from {where}: {why}"
        for where, why in newest[-4:]
    ]
    told = [one for one in caplog.messages if "more just now" in one]
    assert told == ([f"server 0 refused {more} more just now"] if more else [])


def test_a_log_that_is_slow_keeps_nobody_from_being_told_of_the_end():
    order = []

    class Part:
        def __init__(self, name):
            self.stop = self.abort = lambda *_: order.append(name)

    names = ("server", "client", "ranks", "refusals")
    Endpoints(**{name: Part(name) for name in names}).stop("the test is over")
    assert order == list(names)

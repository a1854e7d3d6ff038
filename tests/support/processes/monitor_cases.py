# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Ranks that train a little and show what they did, and how their pages are read."""

from __future__ import annotations

import contextlib
import http.client
import importlib
import json
import math
import re
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from patience import PATIENCE_S
from ports import free_port
from sync_cases import Batches, Model, loss_of

import torch_cpudist as cpudist

ROOT = Path(__file__).resolve().parents[3]
DASHBOARD = ROOT / "examples" / "monitoring" / "grafana.json"
# Where a strategy, a snapshot, a cap or servers that come back have to be there.
LATER = re.compile(
    "cpudist_(collective|exchanges|snapshot|recover|rejoin|lost_|meeting)|_cap_bytes"
)
STEPS, SAMPLES = 4, 5
Page = dict[tuple[str, frozenset[tuple[str, str]]], float]


def dashboard_queries() -> list[str]:
    """All queries of the dashboard, with its variables filled in."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    found = [target["expr"] for panel in panels for target in panel["targets"]]
    filled = [expr.replace("$__rate_interval", "1m") for expr in found]
    return [expr.replace("$instance", ".*") for expr in filled]


def asked(port: int, accept: str = "", path: str = "/metrics") -> tuple[int, str]:
    """Status and text that a page on loopback answers with."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    with contextlib.closing(connection):
        connection.request("GET", path, headers={"Accept": accept})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def fetch(port: int, accept: str = "") -> str:
    """The text of a page on loopback."""
    status, text = asked(port, accept)
    assert status == 200, text
    return text


def parsed(text: str) -> Page:
    """Values of a page by name and labels, as Prometheus' own parser reads them."""
    parser = importlib.import_module("prometheus_client.parser")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(page: Page, name: str, **labels: str) -> float:
    """One value of a page."""
    return page[name, frozenset(labels.items())]


def free_ports(count: int) -> int:
    """The first of so many that lie together: a taken one would be an error."""
    for _ in range(50):
        first = free_port()
        if all(is_free(port) for port in range(first, first + count)):
            break
    return first


def is_free(port: int) -> bool:
    """Whether nobody listens there now."""
    with socket.socket() as probe:
        return bool(probe.connect_ex(("127.0.0.1", port)))


def trainable(strategy: str) -> tuple[Model, cpudist.DistributedOptimizer]:
    """A model with a table, trained by SGD."""
    model = Model()
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, cpudist.DistributedOptimizer(inner, model, strategy=strategy)


def finite(found: Any) -> Any:
    """The same without what JSON does not have."""
    if isinstance(found, Mapping):
        return {name: finite(one) for name, one in found.items()}
    return None if isinstance(found, float) and math.isnan(found) else found


def shown_while_training(context: cpudist.Context, report: Any) -> None:
    """Trains under Async; trainer 0 fetches all pages when all have come to rest.

    Then it asks the server for rows until that is lost, and stays.
    """
    model, optimizer = trainable("async")
    batches = Batches(context.trainer_count, steps=STEPS)

    def step(batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step(samples=SAMPLES)
        return loss

    mine = [batches.part(i, context.trainer_rank) for i in range(STEPS)]
    for part in (mine[:3], mine[3:]):  # counters of loops go on
        cpudist.train_from_dataset(step, part, print_every=None)
    optimizer.flush()
    cpudist.barrier()
    address = context.environment.metrics
    assert address is not None
    found: dict[str, Any] = {"before": finite(optimizer.stats())}
    if context.trainer_rank == 0:
        ports = range(address.port, address.port + context.environment.world_size)
        found["pages"] = [fetch(port) for port in ports]
        own = address.port + context.environment.local_rank
        found["open"] = fetch(own, "application/openmetrics-text; version=1.0.0")
    found["after"] = finite(optimizer.stats())
    report(found)
    cpudist.barrier()
    optimizer.flush()
    report("asks")
    try:
        while True:
            optimizer.flush()
    except cpudist.PeerLostError:
        report("lost")
        threading.Event().wait(PATIENCE_S)

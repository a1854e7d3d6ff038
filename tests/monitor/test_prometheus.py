# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A real Prometheus scrapes a rank, and answers every query of the dashboard."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import subprocess
import time
from urllib.parse import quote

import pytest
from monitor_cases import dashboard_queries, fetch, trainable
from patience import PATIENCE_S
from ports import free_port
from sync_cases import ONE_THREAD, Batches, loss_of

import torch_cpudist as cpudist

# What only servers that have come back bring about.
RETURNED = re.compile("cpudist_(recover|lost_)")
pytestmark = [pytest.mark.integrations, pytest.mark.processes]


class Prometheus:
    """Debian's program, which scrapes one target."""

    def __init__(self, folder, target):
        program = shutil.which("prometheus")
        if program is None:
            pytest.skip("the program prometheus is missing (apt install prometheus)")
        settings = folder / "prometheus.yml"
        settings.write_text(
            "global: {scrape_interval: 1s}\n"
            "scrape_configs:\n"
            "  - job_name: torch_cpudist\n"
            f"    static_configs: [{{targets: ['127.0.0.1:{target}']}}]\n"
        )
        self.port = free_port()
        self._log = (folder / "prometheus.log").open("w+")
        self._process = subprocess.Popen(
            [
                program,
                f"--config.file={settings}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{self.port}",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def result(self, query):
        """What it answers now; ``None`` while it is not there."""
        connection = http.client.HTTPConnection(
            "127.0.0.1", self.port, timeout=PATIENCE_S
        )
        try:
            connection.request("GET", f"/api/v1/query?query={quote(query)}")
            found = json.loads(connection.getresponse().read())
        except (OSError, ValueError):
            assert self._process.poll() is None, self.said()
            return None
        finally:
            connection.close()
        assert found["status"] == "success", (query, found)
        return found["data"]["result"]

    def until_it_has(self, query):
        """Its answer, once it has one."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := self.result(query)):
            assert time.monotonic() < deadline, (query, self.said())
            time.sleep(0.2)
        return found

    def said(self):
        self._log.seek(0)
        return self._log.read()

    def end(self):
        self._process.terminate()
        self._process.wait(PATIENCE_S)
        self._log.close()


def test_every_query_of_the_dashboard_has_an_answer(tmp_path):
    pytest.importorskip("prometheus_client")
    port = free_port()
    prometheus = Prometheus(tmp_path, port)
    context = None
    try:
        variables = {**ONE_THREAD, "CPUDIST_METRICS": str(port)}
        variables["CPUDIST_SERVER_MEMORY_CAP_BYTES"] = str(1 << 30)
        context = cpudist.init(variables=variables)
        model, optimizer = trainable("async")
        # Its steps are snapshots', and collectives are of a second one.
        optimizer.resume(tmp_path / "snapshots", every_steps=1)
        batches = Batches(1)
        among, collective = trainable("allreduce")
        loss_of(among, batches.part(0, 0)).backward()
        collective.step()

        def step(batch):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step(samples=5)

        parts = [batches.part(i, 0) for i in range(3)]
        cpudist.train_from_dataset(step, parts, print_every=None)
        checked = subprocess.run(
            [shutil.which("promtool"), "check", "metrics"],
            input=fetch(port),
            text=True,
            capture_output=True,
            check=False,
        )
        assert checked.returncode == 0, checked.stdout + checked.stderr
        # Two scrapes after all of it: rates need them.
        prometheus.until_it_has('cpudist_snapshots_total{outcome="saved"} > 0')
        prometheus.until_it_has("count_over_time(cpudist_loop_batches_total[1m]) > 1")
        for query in dashboard_queries():
            found = prometheus.result(query)
            if not RETURNED.search(query):
                assert found, query
        steps = prometheus.until_it_has('cpudist_steps_total{optimizer="0"}')
        assert float(steps[0]["value"][1]) == optimizer.stats()["steps"] == 3
    finally:
        prometheus.end()
        if context is not None:
            context.abort("the test is over")

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The HTTP server that Prometheus asks, in threads of its own."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import socketserver
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

from torch_cpudist.errors import AddressError, BackendUnavailableError
from torch_cpudist.launch.environment import MetricsAddress
from torch_cpudist.log import logger
from torch_cpudist.monitor.families import Family
from torch_cpudist.monitor.visitors import Visitors

CLIENT_S = 10.0
_POLL_S = 0.1
Read = Callable[[], Sequence[Family]]


def _prometheus() -> Any:
    """The package that knows the format.

    Raises:
        BackendUnavailableError: it is not installed.
    """
    try:
        importlib.import_module("prometheus_client.core")
        return importlib.import_module("prometheus_client")
    except ImportError:
        raise BackendUnavailableError(
            "CPUDIST_METRICS needs prometheus-client: pip install prometheus-client, "
            "or this package with its extra 'monitor'; or unset CPUDIST_METRICS."
        ) from None


def _translated(prometheus: Any, family: Family) -> Any:
    """A family in the words of prometheus-client."""
    core = prometheus.core
    if family.kind == "histogram":
        made = core.HistogramMetricFamily(
            family.name, family.text, labels=family.labels
        )
        for labels, found in family.values.items():
            buckets = [(_number(size), count) for size, count in found.buckets]
            made.add_metric(labels, buckets, found.total)
        return made
    kinds = {"counter": core.CounterMetricFamily, "gauge": core.GaugeMetricFamily}
    made = kinds[family.kind](family.name, family.text, labels=family.labels)
    for labels, value in family.values.items():
        made.add_metric(labels, value)
    return made


def _number(value: float) -> str:
    return "+Inf" if value == float("inf") else repr(value)


class _Collector:
    """What prometheus-client asks for all that there is."""

    def __init__(self, prometheus: Any, read: Read) -> None:
        self._prometheus, self._read = prometheus, read
        # Of this process: seconds of its cores, memory, files.
        self._process = prometheus.ProcessCollector(registry=None)

    def collect(self) -> Iterator[Any]:
        yield from self._process.collect()
        for family in self._read():
            yield _translated(self._prometheus, family)


class _Handler(BaseHTTPRequestHandler):
    """Answers GET of ``/metrics``."""

    server: _Listener
    timeout = CLIENT_S

    def do_GET(self) -> None:
        """One scrape."""
        self.server.visitors.asked(self.connection)
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(HTTPStatus.NOT_FOUND, explain="the page is /metrics")
            return
        try:
            kind, text = self.server.page(self.headers.get("Accept", ""))
        except Exception:
            logger.exception("metrics: the page cannot be made")
            self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR)
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *arguments: object) -> None:
        """Scrapes are nothing to tell of."""


def _cut(connection: socket.socket) -> None:
    """Ends what its handler waits for: who sends a byte now and then, too."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Listener(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Listens from being made; answers once it knows what to read."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 64
    block_on_close = False

    def __init__(self, prometheus: Any, address: tuple[str, int]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._prometheus = prometheus
        self.visitors = Visitors(_cut)
        self.collector: _Collector | None = None
        super().__init__(address, _Handler)

    def page(self, accept: str) -> tuple[str, bytes]:
        """Content type and text of all metrics."""
        encode, kind = self._prometheus.exposition.choose_encoder(accept)
        return kind, encode(self.collector)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers in a thread of its own, if there is room for one."""
        if not self.visitors.come(request, client_address[0]):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self.visitors.go(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """As its base, for so long at most; gives the room back."""
        clock = threading.Timer(CLIENT_S, _cut, [request])
        clock.daemon = True
        try:
            clock.start()
            super().process_request_thread(request, client_address)
        finally:
            clock.cancel()
            self.visitors.go(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who asks may go away; nothing of that is worth a line."""


class Endpoint:
    """A page of metrics at an address, from ``init()`` to ``shutdown()``."""

    def __init__(self, address: MetricsAddress, local_rank: int) -> None:
        """Listens; nobody is answered before ``serve``.

        Args:
            address: what ``CPUDIST_METRICS`` says.
            local_rank: its port is that much higher.

        Raises:
            AddressError: it cannot be listened at.
            BackendUnavailableError: prometheus-client is not installed.
        """
        self._prometheus = _prometheus()
        port = address.port + local_rank
        self.address = address.host, port
        try:
            self._listener = _Listener(self._prometheus, self.address)
        except OSError as error:
            raise AddressError(
                f"CPUDIST_METRICS: local rank {local_rank} cannot listen at "
                f"{address.host} port {port}: {error.strerror or error}. Set "
                "CPUDIST_METRICS to a port from which on as many are free as the host "
                "has ranks, another one for each job of a host; or unset it."
            ) from error
        self._thread: threading.Thread | None = None
        _open.add(self)

    @property
    def url(self) -> str:
        """Of the page."""
        host, port = self.address
        name = f"[{host}]" if ":" in host else host
        return f"http://{name}:{port}/metrics"

    def serve(self, read: Read) -> Endpoint:
        """Answers from now on, with what ``read`` finds."""
        self._listener.collector = _Collector(self._prometheus, read)
        self._thread = threading.Thread(
            target=self._listener.serve_forever,
            kwargs={"poll_interval": _POLL_S},
            name="cpudist-metrics",
            daemon=True,
        )
        self._thread.start()
        return self

    def close(self) -> None:
        """Ends it; the port is free. Idempotent."""
        _open.discard(self)
        if self._thread is not None:
            self._listener.shutdown()
            self._thread.join(CLIENT_S)
            self._thread = None
        self._listener.server_close()

    def after_fork(self) -> None:
        """In a forked child: the port is the parent's alone."""
        self._thread = None
        self._listener.server_close()


_open: weakref.WeakSet[Endpoint] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for endpoint in list(_open):
        endpoint.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)

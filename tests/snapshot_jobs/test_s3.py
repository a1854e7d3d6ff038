# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Snapshots in a real server of S3's protocol, a process of its own."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from patience import PATIENCE_S
from ports import free_port
from snapshot_cases import until
from warm_starts import Setup, ranks, same

from torch_cpudist.errors import SnapshotError
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.store import Store

fsspec = pytest.importorskip("fsspec")
s3fs = pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

pytestmark = [pytest.mark.processes, pytest.mark.integrations]

URL = "s3://box/jobs/clicks"


def answers(url):
    with contextlib.suppress(urllib.error.URLError, ConnectionError):
        urllib.request.urlopen(url, timeout=PATIENCE_S)  # noqa: S310  our own server
        return True
    return False


@pytest.fixture
def s3(monkeypatch, tmp_path):
    """A server with one empty bucket, and the configuration that leads to it."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            stdout=log,
            stderr=log,
        )
    try:
        until(lambda: answers(url), PATIENCE_S)
        where = {"endpoint_url": url, "key": "me", "secret": "mine"}
        monkeypatch.setitem(fsspec.config.conf, "s3", where)
        s3fs.S3FileSystem.clear_instance_cache()
        fsspec.filesystem("s3").mkdir("box")
        yield fsspec.filesystem("s3")
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        server.terminate()
        server.wait(PATIENCE_S)


def test_a_run_goes_on_from_a_bucket(s3, tmp_path):
    here = tmp_path / "here"
    setup = Setup(remote=True, servers=2)

    def first(job):
        job.opt.resume(URL, staging=here, keep=2)
        for step in range(6):
            job.train(step, step + 1)
            if step % 2:
                job.opt.save_snapshot()
        stats = job.opt.stats()["snapshot"]
        assert stats["failed"] == 0
        job.train(6, 9)
        return job.values()

    expected = ranks(setup, here, first)[0]
    store = Store(URL)
    names = [found.name for found in store.committed()]
    assert len(names) == 2
    assert len({name.split("/")[3] for name in s3.find("box")}) == 2
    assert names == [found.name for found in Directory(here).committed()]
    shutil.rmtree(here)

    def again(job):
        started = job.opt.resume(URL, staging=here)
        assert (started.step, started.name) == (6, names[0])
        job.train(6, 9)
        assert same(job.values(), expected)

    ranks(setup, here, again)
    # A file that is cut off there is noticed, and the one before is taken.
    [part] = [n for n in s3.find(f"box/jobs/clicks/{names[0]}") if "s001-t001" in n]
    s3.pipe_file(part, s3.cat_file(part)[:-5])
    shutil.rmtree(here)

    def before(job):
        started = job.opt.resume(URL, staging=here)
        assert (started.step, started.name) == (4, names[1])
        job.train(4, 9)
        assert same(job.values(), expected)

    ranks(setup, here, before)


def test_a_bucket_that_is_not_there(s3, tmp_path):
    with pytest.raises(SnapshotError, match="s3://none/prefix"):
        Store("s3://none/prefix").get(Directory(tmp_path), "here")
    with pytest.raises(SnapshotError, match="cannot write in s3://none"):
        Store("s3://none/prefix").probe()
    assert not s3.exists("none")  # nobody makes a bucket of a misspelt name

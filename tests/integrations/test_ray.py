# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Ray Train's workers are trainers: a real Ray of this machine, which ends again."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import printed
import pytest
from flights_archive import make_archive
from patience import PATIENCE_S
from programs import ROOT, Launcher

pytestmark = [pytest.mark.integrations, pytest.mark.processes]

FLIGHTS = ROOT / "examples/flights"
# The example, whose workers also tell who they were to Ray and to this package.
TOLD = """
import json, os
from pathlib import Path
import flights_ray

plain = flights_ray.train

def train(options):
    import ray.train
    import torch_cpudist as cpudist
    plain(options)
    ray_rank = ray.train.get_context().get_world_rank()
    told = [cpudist.trainer_rank(), cpudist.trainer_count(), cpudist.server_count()]
    told += [int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])]
    Path(options["scores"]).with_name(f"rank-{ray_rank}").write_text(json.dumps(told))

flights_ray.train = train
flights_ray.main()
"""


def flights(path: Path) -> Path:
    """Whether they are late is what their carriers and days say, but for a few."""
    rows: list[dict[str, object]] = [
        {
            **{"day": 1 + i % 28, "carrier": "AA" if i % 3 else "UA"},
            **{"arr_delay": 60 if i % 3 and i % 11 else -5, "tailnum": f"N{i % 7}"},
        }
        for i in range(300)
    ]
    return make_archive(path, rows)


@pytest.fixture
def ray_folder() -> Iterator[str]:
    """A short path, which its sockets need; its name marks the processes, too."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:
        yield folder


def processes_with(text: str) -> list[str]:
    """Command lines of the processes whose environment has a text."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.fsencode(text) in (
                entry / "environ"
            ).read_bytes().split(b"\0"):
                found.append((entry / "cmdline").read_text(errors="replace"))
        except OSError:  # it has ended meanwhile
            continue
    return found


def test_rays_workers_train_what_torchruns_ranks_do(
    launch: Launcher,
    tmp_path: Path,
    ray_folder: str,
    eventually: Callable[..., None],
) -> None:
    pytest.importorskip(
        "ray.train", exc_type=ImportError, reason="Ray: the extra integrations"
    )
    data = flights(tmp_path / "flights.tar.gz")
    shared = ["--data", str(data), "--batch-size", "16", "--epochs", "2"]
    script = tmp_path / "told.py"
    script.write_text(TOLD)
    by_ray = launch(
        [
            *("python", str(script), *shared, "--workers", "2"),
            *("--scores", str(tmp_path / "ray.npy")),
        ],
        CPUDIST_THREADS=1,
        PYTHONPATH=os.pathsep.join([str(ROOT), str(FLIGHTS)]),
        RAY_TMPDIR=ray_folder,
        RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S=PATIENCE_S,
        RAY_USAGE_STATS_ENABLED=0,
    )
    # A dozen processes of Ray's begin first, and import it.
    assert by_ray.wait(2 * PATIENCE_S) == 0, by_ray.text()
    (line,) = re.findall(r"^\d trainers, .*$", by_ray.text(), re.MULTILINE)
    assert line.startswith("2 trainers, 34 steps each, "), line
    printed.check("flights-ray", line)
    for rank in range(2):
        told = json.loads((tmp_path / f"rank-{rank}").read_text())
        assert told == [rank, 2, 2, rank, 2]
    mark = f"RAY_TMPDIR={ray_folder}"
    eventually(
        lambda: not processes_with(mark), PATIENCE_S, "Ray's processes have ended"
    )

    by_torchrun = launch(
        [
            *("torchrun", "--standalone", "--nproc-per-node=2"),
            *(str(FLIGHTS / "flights.py"), *shared),
            *("--scores", str(tmp_path / "torchrun.npy")),
        ],
        CPUDIST_THREADS=1,
    )
    assert by_torchrun.wait(PATIENCE_S) == 0, by_torchrun.text()
    scores = np.load(tmp_path / "ray.npy")
    assert len(np.unique(scores)) > 1
    assert np.array_equal(scores, np.load(tmp_path / "torchrun.npy"))

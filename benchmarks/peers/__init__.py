# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What the case ``ctr`` can run: one entry per row name, free of torch.

A peer is one module with ``train(job, rank)``, run by ``worker.py`` in fresh processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

# Wheels that name a torch of their own, hence --no-deps; requirements.txt has the rest.
INSTALL = "pip install --no-deps -r benchmarks/requirements.txt"


@dataclass(frozen=True)
class PeerSpec:
    """How one row is run.

    ``launcher``: ``plain`` starts one process per trainer, strangers to each other;
    ``torchrun`` starts one job; ``parent`` starts one process that starts the others;
    ``ranks`` starts one process on each host, which is told its rank.
    ``trainers``: how many the row has; 0 takes ``--trainers``.
    ``replicas``: of each trainer; each has a batch. 0 are none.
    ``variables``: of the environment, for this row alone.
    ``device``: where the model computes.
    """

    module: str
    about: str
    launcher: Literal["plain", "torchrun", "parent", "ranks"]
    trainers: int = 0
    threads: int = 1
    requires: tuple[str, ...] = ()
    install: str = ""
    strategy: str = ""
    servers: bool = False
    replicas: int = 0
    variables: tuple[tuple[str, str], ...] = ()
    device: str = "cpu"


DEVICES = ("cpu", "cuda")
OWN_MODULES = ("cpudist_rank", "cpudist_tables", "replicas")
_OURS = ("torch_cpudist",)
_OURS_INSTALL = "pip install --no-build-isolation ."

PEERS: Mapping[str, PeerSpec] = {
    "torch1": PeerSpec("torch_single", "one process, one thread", "plain", 1),
    "torch2": PeerSpec("torch_single", "one process, two threads", "plain", 1, 2),
    "torch-cuda": PeerSpec(
        "torch_single",
        "one process, model and table on a CUDA device",
        "plain",
        1,
        device="cuda",
    ),
    "fbgemm": PeerSpec(
        "fbgemm_fused",
        "independent processes, fused embedding kernel",
        "plain",
        requires=("fbgemm_gpu",),
        install=INSTALL,
    ),
    "ddp": PeerSpec("ddp_gloo", "DDP over gloo, sparse gradients", "torchrun"),
    "hogwild": PeerSpec("hogwild", "processes over shared memory, no locks", "parent"),
    "torchrec": PeerSpec(
        "torchrec_tables",
        "table-wise sharding over gloo, fused kernel",
        "torchrun",
        requires=("torchrec", "fbgemm_gpu"),
        install=INSTALL,
    ),
    "world1": PeerSpec(
        "cpudist_rank",
        "this package, one process alone",
        "plain",
        1,
        requires=_OURS,
        install=_OURS_INSTALL,
        strategy="sync",
    ),
    "independent": PeerSpec(
        "cpudist_rank",
        "this package, worlds of one side by side",
        "plain",
        requires=_OURS,
        install=_OURS_INSTALL,
        strategy="sync",
    ),
    "independent-geo": PeerSpec(
        "cpudist_rank",
        "this package, worlds of one that step by themselves, side by side",
        "plain",
        requires=_OURS,
        install=_OURS_INSTALL,
        strategy="geo",
    ),
    "replicas": PeerSpec(
        "replicas",
        "this package, two replicas of one process, torch's optimizer",
        "plain",
        1,
        requires=_OURS,
        install=_OURS_INSTALL,
        replicas=2,
    ),
    "replicas-sync": PeerSpec(
        "replicas",
        "this package, two replicas of one process, a world of one",
        "plain",
        1,
        requires=_OURS,
        install=_OURS_INSTALL,
        strategy="sync",
        replicas=2,
    ),
}


def strategy_row(strategy: str) -> PeerSpec:
    """Returns the row of this package under ``strategy``.

    Raises:
        ValueError: ``device=`` is neither cpu nor cuda, ``threads=`` no number above 0.
    """
    fields = dict(option.partition("=")[::2] for option in strategy.split(":")[1:])
    device = fields.get("device", "cpu")
    if device not in DEVICES:
        raise ValueError(f"{strategy}: expected device=cpu or cuda, found {device!r}")
    threads = fields.get("threads", "1")
    if not threads.isdecimal() or int(threads) < 1:
        raise ValueError(f"{strategy}: expected threads=1 or more, found {threads!r}")
    return PeerSpec(
        "cpudist_rank",
        f"this package, {strategy}",
        "torchrun",
        threads=int(threads),
        requires=_OURS,
        install=_OURS_INSTALL,
        strategy=strategy,
        servers=True,
        device=device,
    )


def row_name(peer: str) -> str:
    """Returns the name a peer has in tables: ours carry the package's."""
    return f"cpudist-{peer}" if PEERS[peer].module in OWN_MODULES else peer

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""DeepSpeed's all-reduce through shared memory, without the rest of DeepSpeed.

Its operator is compiled when it is first loaded. It sums in place, for all ranks of one
host, and finds their memory by a name that is made of two environment variables.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import torch

ADDRESS = "cpudist-bench"
MEMORY = Path("/dev/shm")  # noqa: S108


def _operator() -> Any:
    # Read when DeepSpeed is imported.
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.accelerator import get_accelerator

    return get_accelerator().create_op_builder("ShareMemCommBuilder").load()


def missing(ranks: int) -> str:
    """Why ``ranks`` ranks cannot use it, or nothing; compiles it if they can."""
    if ranks > len(os.sched_getaffinity(0)):
        return "its ranks never give their core away while they wait: one core for each"
    if importlib.util.find_spec("deepspeed") is None:
        return (
            "not installed: DS_ACCELERATOR=cpu pip install --no-build-isolation "
            "--no-deps deepspeed, and what it imports"
        )
    try:
        _operator()
    except Exception as error:  # whatever its import and its compiler raise
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def join(rank: int, ranks: int, name: str) -> None:
    """Maps the memory of all ranks of the launch ``name``.

    The ranks must wait for each other before their first sum.
    """
    os.environ |= {
        "LOCAL_SIZE": str(ranks),
        "MASTER_ADDR": ADDRESS,
        "MASTER_PORT": name,
    }
    _operator().initialize(ranks, rank)


def all_reduce(tensor: torch.Tensor) -> None:
    """Sums ``tensor`` of all ranks into each; float32, bfloat16 or float16."""
    torch.ops.deepspeed.inference_all_reduce_(tensor)


def check(ranks: int) -> None:
    """Sums once, with all ranks.

    Raises:
        RuntimeError: a sum of ones is not the number of ranks.
    """
    ones = torch.ones(3000)
    all_reduce(ones)
    if not bool((ones == ranks).all()):
        raise RuntimeError(f"deepspeed: expected sums of {ranks}, found {ones}")


def remove_memory(name: str) -> None:
    """Removes what it leaves in shared memory of the launch ``name``."""
    for file in MEMORY.glob(f"deepspeed_allreduce_buffer_*_{ADDRESS}_{name}_*"):
        file.unlink(missing_ok=True)

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The states of the random generators of a process, as a tree of plain values."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from torch_cpudist.log import logger


def capture() -> dict[str, Any]:
    """Copies the states of torch, CUDA, ``random`` and, if it is loaded, NumPy.

    Cost: 5 kB of torch's, 5 kB of each other one. Thread safety: as the generators'.
    """
    version, words, gauss = random.getstate()
    tree: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "random": {
            "version": version,
            "words": torch.tensor(words, dtype=torch.int64, device="cpu"),
            "gauss": gauss,
        },
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        tree["cuda"] = [state.cpu() for state in torch.cuda.get_rng_state_all()]
    if "numpy" in sys.modules:
        kind, words, position, has_gauss, cached = sys.modules[
            "numpy"
        ].random.get_state()
        tree["numpy"] = {
            "kind": str(kind),
            "words": torch.tensor(words.tolist(), dtype=torch.int64, device="cpu"),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        }
    return tree


def restore(tree: Mapping[str, Any]) -> None:
    """Puts generators where ``capture`` found them."""
    torch.set_rng_state(tree["torch"])
    saved = tree["random"]
    random.setstate((saved["version"], tuple(saved["words"].tolist()), saved["gauss"]))
    if "cuda" in tree:
        _restore_cuda(tree["cuda"])
    if "numpy" in tree:
        _restore_numpy(tree["numpy"])


def _restore_cuda(states: list[torch.Tensor]) -> None:
    if torch.cuda.device_count() != len(states):
        logger.warning(
            "the snapshot has the random states of %d CUDA devices, here are %d: they "
            "begin anew.",
            len(states),
            torch.cuda.device_count(),
        )
        return
    torch.cuda.set_rng_state_all(states)


def _restore_numpy(saved: Mapping[str, Any]) -> None:
    # It was loaded when the snapshot was saved; if it is not there, nobody draws.
    try:
        import numpy
    except ImportError:
        return
    words = numpy.array(saved["words"].tolist(), dtype=numpy.uint32)
    numpy.random.set_state(
        (
            saved["kind"],
            words,
            saved["position"],
            saved["has_gauss"],
            saved["cached"],
        )
    )

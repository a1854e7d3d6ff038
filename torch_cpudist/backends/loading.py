# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Loads the compiled backends when the first group needs them."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

from torch_cpudist import _build_check
from torch_cpudist.errors import BackendUnavailableError

_MODULE = "torch_cpudist._c10d"


def load_c10d(backend: str) -> ModuleType:
    """Returns the module of the compiled backends.

    Args:
        backend: what it is for, for messages.

    Raises:
        BackendUnavailableError: it is missing, or was built for another torch.
    """
    built = importlib.import_module("torch_cpudist._build_info").TORCH_VERSION
    if _build_check.release(torch.__version__) != _build_check.release(built):
        raise BackendUnavailableError(
            f"backend {backend} needs {_MODULE}, built for torch {built}, but "
            f"torch {torch.__version__} is installed. It is built for one minor "
            "release of torch: build it again with pip install --no-build-isolation . "
            "or choose CPUDIST_BACKEND=gloo."
        )
    try:
        return importlib.import_module(_MODULE)
    except ImportError as error:
        raise BackendUnavailableError(
            f"backend {backend} needs {_MODULE}, which does not load ({error}). It is "
            "built for one minor release of torch: build it again with pip install "
            "--no-build-isolation . or choose CPUDIST_BACKEND=gloo."
        ) from error

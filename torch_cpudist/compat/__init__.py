# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Scripts for oneccl_bindings_for_pytorch and intel_extension_for_pytorch, unchanged.

Both packages have ended, at torch 2.8. ``install()`` has ``import`` find modules of
their names here instead; ``python -m torch_cpudist.compat SCRIPT`` does it before it
runs a script, under torchrun too::

    torchrun --nproc-per-node=2 -m torch_cpudist.compat train.py --epochs 3

Nothing is changed unless one of the two is called.
"""

from __future__ import annotations

from torch_cpudist.compat.modules import Installed, install

__all__ = ["Installed", "install"]

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The compiled c10d backends; built for one minor release of torch.

Load it with ``torch_cpudist.backends.load_c10d``, which says what to do where it does
not load.
"""

from typing import Any, Final

TORCH_VERSION: Final[str]

def make_rank_transport(backend: Any) -> object:
    """A capsule for ``_core.RankNetwork`` over any backend, a ``dist.Backend``.

    Takes it over: uses tag 0 of its send and recv, and lifts its time limit.
    """

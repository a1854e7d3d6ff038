# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The compiled c10d backends; built for one minor release of torch.

Load it with ``torch_cpudist.backends.load_c10d``, which says what to do where it does
not load.
"""

from typing import Final

TORCH_VERSION: Final[str]

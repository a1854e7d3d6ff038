# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Servers of a job of their own, run by torchrun; each writes down its process id."""

from __future__ import annotations

import os
from pathlib import Path

import torch_cpudist as cpudist

if __name__ == "__main__":
    context = cpudist.init(timeout_s=300)
    (Path.cwd() / f"server-{context.shard_id}.pid").write_text(str(os.getpid()))
    cpudist.serve()
    cpudist.shutdown()

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a rank does, for Prometheus and TensorBoard; docs/monitoring.md.

Nothing here counts. Counters are those of the client, the server and the optimizers,
which the training loop has anyway; they are read when somebody asks, in a thread of
this folder (``CPUDIST_METRICS``) or in that of who calls (``TensorBoardWriter``), and
what is read waits for no peer. ``families`` has names and kinds, ``trainer`` and
``server`` say what of counters becomes which, ``reading`` reads them all; ``endpoint``
answers HTTP, ``visitors`` says who may stay there, and ``opening`` puts it beside a
run.
"""

from torch_cpudist.monitor.tensorboard import TensorBoardWriter

__all__ = ["TensorBoardWriter"]

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``python -m torch_cpudist top``: a run's ranks, live, from their pages of metrics.

``addresses`` reads arguments, ``pages`` fetches, ``samples`` reads what a page has,
``cluster`` keeps the last ones of all ranks, ``figures`` are what they mean,
``screen`` draws them, ``commands`` is the command. docs/monitoring.md.
"""

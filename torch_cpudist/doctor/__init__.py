# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``python -m torch_cpudist doctor``: a machine, before a job is started on it.

``facts`` reads and measures, ``judging`` says in words what to set and knows facts
alone, ``echo`` times a link, ``commands`` prints. docs/doctor.md.
"""

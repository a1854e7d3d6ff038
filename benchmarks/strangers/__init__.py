# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Case of strangers: who come to a job's ports without its key, and what that costs."""

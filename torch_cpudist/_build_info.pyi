# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Written by the build: what the compiled core was built against."""

TORCH_VERSION: str

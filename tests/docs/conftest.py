# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What tests that run the code of a page share."""

from own_folder import in_a_folder

__all__ = ["in_a_folder"]

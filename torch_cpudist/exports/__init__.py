# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Files of exported models: their manifests, writing them, and reading them verified.

Nothing of a model or of a run. From outside, use ``writing.Writer`` and
``reading.Export``. docs/export.md has the format to the byte.
"""

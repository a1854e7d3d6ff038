# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""One engine per strategy: when to push, wait and take in; each registers itself.

Engines are imported where optimizers are made, ``torch_cpudist.optimizer``: none needs
the files of another.
"""

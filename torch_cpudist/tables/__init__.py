# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Embeddings whose rows live on servers, and how lookups bring rows in.

Which are tables say ``found`` and ``sharding``. Where the weight is a cache of rows:
``local`` is the lookup that pulls, ``forwards``, ``learned``, ``parts`` and ``inputs``
foresee it, and ``weight`` brings rows in when it is read. Where rows are on servers
only: ``remote`` builds, ``remote_weight`` is the weight without rows (what torch's
functions do with it: ``remote_calls``, ``remote_initialisers``), and ``remote_lookup``
looks up, from servers (``remote_binding``) or from files of an export
(``exported_binding``). ``open`` has tables of any key, ``hashing`` keys of texts.
"""

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Files of snapshots: their names, manifests, commit, and reading them verified.

Nothing of a run: what is saved and when is decided above. From outside, use
``directory.Directory`` (names, commit, keep), ``reading.Snapshot`` (verified contents
and load plans), ``manifest.Manifest`` and its parts, ``trees.pack`` and
``trainer_files``. ``member`` reads one directory, ``reading`` with what it is put over,
``chain`` says what that is, and ``merging`` merges its rows; ``choice`` says what goes
where in a model, ``staging`` has rows on their way to servers, ``store`` copies in
object stores. docs/snapshot.md has the format to the byte.
"""

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``load_for_inference``: a model gets its values from an export."""

from __future__ import annotations

import os

from torch import nn

from torch_cpudist.errors import InvalidArgumentError, ModelChangedError
from torch_cpudist.exports.reading import chain
from torch_cpudist.inference.forward_guard import ForwardGuard
from torch_cpudist.inference.places import check_unbound, places_of
from torch_cpudist.inference.reader import Reader


def load_for_inference(model: nn.Module, path: str | os.PathLike[str]) -> Reader:
    """Gives a model the values of an export, in one process and without servers.

    No ``init()`` is needed. Dense parameters, buffers and static tables are copied into
    the model. Embeddings that are remote in it (built in ``remote_tables``, say) take
    no memory: their lookups read the export's files, which are mapped, and of which
    every part is checked when it is looked at first. Rows that are in no file are what
    the table's initialiser makes of their keys, as in an evaluation in the cluster.
    Embeddings with rows in memory are filled, whichever kind they were in training.

    The model is put into evaluation mode. It may be used by several threads.

    Args:
        model: built as the one that was exported.
        path: the export; of a delta, those that it goes on from lie beside it.

    Returns:
        What takes in newer values: ``apply_delta``.

    Raises:
        SnapshotError: there is no export, it is of another model, or a base of a delta
            is missing; nothing was changed.
        SnapshotCorruptError: a file is not what was written. Rows are checked later, in
            lookups, or by ``Reader.verify()``.
        ModelChangedError: an optimizer trains the model, or it is loaded already.

    Cost: reads the model's file; of files of rows a few pages each.
    """
    if not isinstance(model, nn.Module):
        raise InvalidArgumentError(
            f"load_for_inference: expected a torch.nn.Module, found "
            f"{type(model).__name__}"
        )
    check_unbound(model, "load_for_inference")
    for name, module in model.named_modules():
        if ForwardGuard.holds(module):
            raise ModelChangedError(
                f"load_for_inference: {name or 'the model'!r} has been loaded before, "
                "and its reader writes to it. close() that first, or load into "
                "another model."
            )
    exports = chain(path)
    places = places_of(model, exports[-1])
    reader = Reader(model, exports, places)
    model.eval()
    return reader

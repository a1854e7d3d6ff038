# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How rows are kept: float32, or numbers of fewer bits."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from torch_cpudist import _core
from torch_cpudist.errors import InvalidArgumentError
from torch_cpudist.snapshot.parts import Array

#: What a file calls the dtype of rows.
DTYPES: Mapping[str, str] = MappingProxyType(
    {"fp32": "F32", "fp16": "F16", "bf16": "BF16", "int8": "I8"}
)
#: In memory; bfloat16, which numpy has not, as its bits.
NUMPY: Mapping[str, np.dtype] = MappingProxyType(
    {
        "fp32": np.dtype("<f4"),
        "fp16": np.dtype("<f2"),
        "bf16": np.dtype("<u2"),
        "int8": np.dtype("i1"),
    }
)


def check_dtype(dtype: object) -> str:
    """Returns the name of a dtype of rows.

    Raises:
        InvalidArgumentError: there is none such.
    """
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise InvalidArgumentError(
            f"export: dtype={dtype!r}, expected one of {', '.join(DTYPES)}"
        )
    return dtype


def narrow(rows: Array, dtype: str) -> dict[str, Array]:
    """Rows as a file has them.

    ``fp16`` and ``bf16`` are rounded to the nearest; what is finite stays so. ``int8``
    is a whole number from -127 to 127 times a scale, the bfloat16 that is nearest to
    the largest magnitude of the row divided by 127: an element is off by at most half
    of it. A row in which something is not finite becomes NaN.

    Args:
        rows: float32 ``[rows, dim]``.
        dtype: one of ``DTYPES``.

    Returns:
        ``weight`` ``[rows, dim]``, and for int8 ``scale`` ``[rows]``, float32.
    """
    given = np.ascontiguousarray(rows, dtype=np.float32)
    if dtype == "fp32":
        return {"weight": given}
    weight = np.empty(given.shape, NUMPY[dtype])
    scale = np.empty(len(given) if dtype == "int8" else 0, np.float32)
    _core.narrow_rows(
        given.ctypes.data,
        given.shape[0],
        given.shape[1],
        dtype,
        weight.ctypes.data,
        scale.ctypes.data,
    )
    return {"weight": weight, "scale": scale} if dtype == "int8" else {"weight": weight}

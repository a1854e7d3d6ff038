# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""An exported DeepFM: tables in front, its dense part by ONNX Runtime.

The dense part is made a graph by torch.export once. Its parameters are inputs of the
graph, so that a delta needs no new one: each call gives it the values that the model
has, and the rows that were looked up, of one state of the model.
"""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
import torch
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.exports.reading import chain

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "flights"))

from flights import DeepFM, logits_of
from flights_data import FIELDS

FACTORS, LINEAR = "factors.weight", "linear.weight"


class DensePart(nn.Module):
    """Logits of rows that were looked up, with parameters that are given."""

    def __init__(self, model: DeepFM) -> None:
        """Take the network's shape, and none of its values."""
        super().__init__()
        self.network = model.network
        self.names = [
            "bias",
            *(f"network.{n}" for n, _ in model.network.named_parameters()),
        ]

    def forward(
        self, factors: torch.Tensor, linear: torch.Tensor, values: list[torch.Tensor]
    ) -> torch.Tensor:
        """Return logits ``[n]``; ``values`` are those of ``names``."""
        bias, *rest = values
        names = [name.removeprefix("network.") for name in self.names[1:]]
        given = dict(zip(names, rest, strict=True))

        def network(rows: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(self.network, given, rows)

        return logits_of(factors, linear, bias, network)


def tables_of(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Return rows and dimension of an export's tables."""
    whole = chain(path)[0]
    for table in whole.manifest.tables:
        if table.name == FACTORS:
            return table.rows, table.dim
    rows, dim = whole.shapes()[FACTORS]
    return rows, dim


class Scorer:
    """Scores flights. Any number of threads may call it, beside ``apply_delta`` too."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Load an export."""
        rows, dim = tables_of(path)
        with cpudist.remote_tables(min_rows=1):
            self._model = DeepFM(rows, len(FIELDS), dim)
        self.reader = cpudist.load_for_inference(self._model, path)
        dense = DensePart(self._model)
        self._names = dense.names
        self._session = _session(dense, self._parameters(), dim)

    def _parameters(self) -> list[torch.Tensor]:
        return [self._model.get_parameter(name).detach() for name in self._names]

    def __call__(
        self, ids: npt.NDArray[np.int64]
    ) -> tuple[str, npt.NDArray[np.float32]]:
        """Return whose values these are, and scores ``[n]`` of ids ``[n, fields]``."""
        wanted = torch.from_numpy(ids)
        with self.reader.reading() as loaded:
            factors = self.reader.look_up(FACTORS, wanted)
            linear = self.reader.look_up(LINEAR, wanted)
            given = [factors, linear, *self._parameters()]
            inputs = {
                one.name: value.numpy()
                for one, value in zip(self._session.get_inputs(), given, strict=True)
            }
            (scores,) = self._session.run(None, inputs)
        return loaded.name, np.asarray(scores, dtype=np.float32)


def _session(
    dense: DensePart, values: list[torch.Tensor], dim: int
) -> onnxruntime.InferenceSession:
    """Make a graph of the dense part that takes any number of flights."""
    examples = torch.zeros(2, len(FIELDS), dim), torch.zeros(2, len(FIELDS), 1)
    flights = torch.export.Dim("flights", min=1)
    shapes: dict[str, Any] = {
        "factors": {0: flights},
        "linear": {0: flights},
        "values": [None] * len(values),
    }
    program = torch.export.export(dense, (*examples, values), dynamic_shapes=shapes)
    made = torch.onnx.export(program, dynamo=True, verbose=False)
    contents = io.BytesIO()
    made.save(contents)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(
        contents.getvalue(), options, providers=["CPUExecutionProvider"]
    )

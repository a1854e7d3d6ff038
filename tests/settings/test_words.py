# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Words in a store are taken from whoever has the key, at their own place only."""

from __future__ import annotations

import hashlib
import hmac

import pytest

from torch_cpudist import _core
from torch_cpudist.errors import AuthenticationError
from torch_cpudist.settings.words import Words

KEY = b"a key of at least thirty-two bytes"
OTHER = b"another key of at least thirty-two bytes"


def test_words_without_a_key_are_as_they_are():
    words = Words()
    assert words.sign("run", "text: \u00e9") == "text: \u00e9"
    assert words.read("run", "text: \u00e9".encode()) == "text: \u00e9"


TEXTS = ["", "text", "a:b:c", "signed:ab:", "\u00e9\n{}", "9:x"]


@pytest.mark.parametrize("text", TEXTS)
def test_a_signed_word_is_read_where_it_was_written(text):
    words = Words(_core.Secret(KEY), "run 7")
    signed = words.sign("name", text)
    assert signed.endswith(":" + text)
    assert signed != text
    assert Words(_core.Secret(KEY), "run 7").read("name", signed.encode()) == text


def test_the_signature_is_an_hmac_that_no_handshake_has():
    data = b"3:run4:name4:text"
    expected = hmac.new(KEY, b"cpudist written\0" + data, hashlib.sha256)
    signed = Words(_core.Secret(KEY), "run").sign("name", "text")
    assert signed == f"signed:{expected.hexdigest()}:text"
    assert _core.Secret(KEY).has_signed(data, expected.digest())
    assert not _core.Secret(OTHER).has_signed(data, expected.digest())
    assert not _core.Secret(KEY).has_signed(data, expected.digest()[:-1])


@pytest.mark.parametrize(
    ("of", "name", "text"),
    [
        ("run 8", "name", "text"),
        ("run 7", "name2", "text"),
        ("run 7", "name", "text2"),
        ("run 7", "nam", "etext"),
        ("run 7", "name", ""),
    ],
)
def test_a_word_of_another_place_or_text_is_refused(of, name, text):
    secret = _core.Secret(KEY)
    mac = Words(secret, "run 7").sign("name", "text").split(":")[1]
    with pytest.raises(AuthenticationError, match=f"'{name}' is refused, wrong key"):
        Words(secret, of).read(name, f"signed:{mac}:{text}")


@pytest.mark.parametrize(
    ("key", "found", "why"),
    [
        (KEY, "text", "no key there"),
        (KEY, "", "no key there"),
        (KEY, "signed:", "wrong key"),
        (KEY, "signed:" + 32 * "zz" + ":text", "wrong key"),
        (KEY, "signed:" + 64 * "0" + ":text", "wrong key"),
        (KEY, b"signed:\xff\xfe", "wrong key"),
        (None, Words(_core.Secret(KEY)).sign("name", "text"), "no key here"),
    ],
)
def test_what_nobody_with_the_key_has_written_is_refused(key, found, why):
    words = Words(None if key is None else _core.Secret(key))
    with pytest.raises(AuthenticationError, match=f"'name' is refused, {why}: .*same"):
        words.read("name", found)


def test_every_change_of_a_byte_is_refused():
    words = Words(_core.Secret(KEY))
    signed = words.sign("name", "text").encode()
    for i in range(len(signed)):
        changed = bytearray(signed)
        changed[i] ^= 1
        with pytest.raises(AuthenticationError, match="'name' is refused"):
            words.read("name", bytes(changed))

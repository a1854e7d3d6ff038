# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Where the run's key comes from, and which keys are refused."""

from __future__ import annotations

import os
import pickle
import stat
import traceback

import pytest

from torch_cpudist import _core
from torch_cpudist.errors import ConfigurationError
from torch_cpudist.launch import environment
from torch_cpudist.settings import secret

KEY = b"QmFzZTY0IG9mIHRoaXJ0eS10d28gYnl0ZXM="


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "key"

    def write(key, mode=0o600):
        path.write_bytes(key)
        path.chmod(mode)
        return {"CPUDIST_SECRET_FILE": str(path)}

    return write


def refusal(variables):
    with pytest.raises(ConfigurationError) as caught:
        environment.parse(variables)
    assert KEY.decode() not in str(caught.value)
    return str(caught.value)


def test_there_is_none_by_default():
    assert environment.parse({}).secret is None
    assert not environment.parse({"CPUDIST_AUTH": "optional"}).secret_required


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_a_file_has_the_key_and_maybe_a_newline(key_file, end):
    assert environment.parse(key_file(KEY + end)).secret == _core.Secret(KEY)
    assert environment.parse(key_file(KEY + end, 0o400)).secret == _core.Secret(KEY)


def test_the_file_wins(key_file):
    other = {"CPUDIST_SECRET": "another key of more than thirty-two bytes"}
    assert environment.parse(key_file(KEY) | other).secret == _core.Secret(KEY)
    assert environment.parse(other).secret == _core.Secret(
        other["CPUDIST_SECRET"].encode()
    )


def test_a_file_that_is_wrong_does_not_fall_back(key_file):
    other = {"CPUDIST_SECRET": KEY.decode()}
    assert "31 bytes" in refusal(key_file(b"x" * 31) | other)
    assert "is empty" in refusal({"CPUDIST_SECRET_FILE": ""} | other)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o644])
def test_a_file_that_others_may_use_is_refused(key_file, mode):
    said = refusal(key_file(KEY, mode))
    assert f"its mode is {mode:04o}" in said
    assert "cannot be read" not in said


@pytest.mark.parametrize(
    ("mode", "taken"), [(0o440, True), (0o640, True), (0o460, False), (0o444, False)]
)
def test_a_key_that_a_container_mounts_is_root_s_and_of_a_group(
    key_file, monkeypatch, mode, taken
):
    """Only root can make a file root's: its group is whom root lets read it."""
    found = key_file(KEY, 0o600)
    real = os.fstat

    def mounted(descriptor):
        values = list(real(descriptor))
        values[0], values[4] = stat.S_IFREG | mode, 0
        return os.stat_result(values)

    monkeypatch.setattr(os, "fstat", mounted)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    if taken:
        assert environment.parse(found).secret == _core.Secret(KEY)
    else:
        assert f"its mode is {mode:04o}" in refusal(found)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert f"its mode is {mode:04o}" in refusal(found)


def test_files_that_are_none(tmp_path):
    def said(path):
        return refusal({"CPUDIST_SECRET_FILE": str(path)})

    assert "cannot be read" in said(tmp_path / "missing")
    assert "expected a file" in said("/dev/null")
    assert "cannot be read" in said(f"{tmp_path}/a\0b")
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert "expected a file" in said(tmp_path / "pipe")
    tmp_path.chmod(0o700)
    assert "CPUDIST_SECRET_FILE=" in said(tmp_path)


def test_a_key_is_long_but_no_other_file(key_file):
    assert "a key of 31 bytes" in refusal({"CPUDIST_SECRET": "x" * 31})
    assert environment.parse({"CPUDIST_SECRET": "x" * 32}).secret == _core.Secret(
        b"x" * 32
    )
    assert "is it another file?" in refusal(key_file(b"x" * 5000))


def test_nothing_starts_without_a_key_where_one_is_required(key_file):
    assert "there is no key" in refusal({"CPUDIST_AUTH": "require"})
    made = environment.parse({"CPUDIST_AUTH": "Require"} | key_file(KEY))
    assert made.secret_required
    assert made.secret == _core.Secret(KEY)
    assert "did you mean require?" in refusal({"CPUDIST_AUTH": "required"})


def test_nobody_is_told_the_key(key_file):
    made = environment.parse(key_file(KEY))
    assert KEY.decode() not in repr(made)
    assert not any("SECRET" in name for name in environment.agreed_settings(made))


def test_the_core_and_the_settings_have_one_least_length():
    with pytest.raises(ValueError, match=f"at least {secret.BYTES_MIN}"):
        _core.Secret(b"x" * (secret.BYTES_MIN - 1))
    least = _core.Secret(b"x" * secret.BYTES_MIN)
    _core.Server(run_id=1, secret=least).stop()


def calls_that_fail(key):
    """Calls of the core that are refused, with the key among their arguments."""
    return [
        lambda: _core.Server(run_id=-1, secret=key),
        lambda: _core.Server(run_id=1, snapshot_dir="\udcff", secret=key),
        lambda: _core.Client(run_id=2**64, servers=[["tcp:127.0.0.1:1"]], secret=key),
        lambda: _core.DataShuffle(
            None,
            rank=-1,
            trainers=1,
            run_id=1,
            epoch=0,
            host="",
            connect_deadline_ms=1,
            liveness_ms=1,
            round_deadline_ms=1,
            secret=key,
        ),
        lambda: _core.Secret(KEY.decode()),
        lambda: _core.Secret(list(KEY)),
        lambda: pickle.dumps(key),
    ]


@pytest.mark.parametrize("number", range(7))
def test_nothing_shows_a_key(number):
    key = _core.Secret(KEY)
    with pytest.raises((TypeError, UnicodeError)) as caught:
        calls_that_fail(key)[number]()
    told = "".join(traceback.format_exception(caught.value)) + str(caught.value)
    assert KEY.decode() not in told
    assert repr(list(KEY))[1:20] not in told
    assert repr(key) == str(key) == f"{key}" == "<Secret>"


def test_keys_are_equal_or_not():
    assert _core.Secret(KEY) == _core.Secret(KEY)
    assert hash(_core.Secret(KEY)) == hash(_core.Secret(KEY))
    assert _core.Secret(KEY) != _core.Secret(KEY[:-1] + b"?")
    assert _core.Secret(KEY) != _core.Secret(KEY + b"=")
    assert _core.Secret(KEY) != KEY

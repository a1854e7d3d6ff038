# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The program that only numbers a text for the example word2vec."""

from __future__ import annotations

import sys
from pathlib import Path

import printed
import pytest
import word2vec_data as data


def test_what_is_in_a_text_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "a the of to or".split()
    lines = [" ".join(words[: 1 + i % 5]) for i in range(40)]
    (tmp_path / "text").write_text(".\n".join(lines))
    told = [
        "word2vec_data.py",
        str(tmp_path / "text"),
        "--cache",
        str(tmp_path / "kept"),
    ]
    monkeypatch.setattr(sys, "argv", told)
    data.main()
    printed.check("word2vec-data", capsys.readouterr().out)

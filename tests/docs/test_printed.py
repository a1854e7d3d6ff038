# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Every example has its command and its output on a page, which its test compares."""

from __future__ import annotations

import re
from pathlib import Path

import printed
import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
FOLDERS = sorted({path.parent.name for path in EXAMPLES.glob("*/*.*")})
COMMANDS = re.compile(r"```bash\n(.*?)```", re.DOTALL)
CHECKED = re.compile(r"printed\.check\(\s*\"([\w-]+)\"")
PICTURE = re.compile(r"!\[[^\]]*\]\((images/[^)]+)\)")
MOST_BYTES = 150_000


def commands() -> str:
    """All commands of all pages."""
    texts = [page.read_text() for page in printed.pages()]
    return "\n".join(block for text in texts for block in COMMANDS.findall(text))


def programs() -> list[str]:
    """The examples' files that are started."""
    found = []
    for path in sorted(EXAMPLES.glob("*/*.py")):
        text = path.read_text()
        if '__name__ == "__main__"' in text or "\ncpudist.init()" in text:
            found.append(str(path.relative_to(ROOT)))
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_folder_has_a_command_and_its_output(folder: str) -> None:
    assert f"examples/{folder}/" in commands()
    name = folder.replace("_", "-")
    assert any(one == name or one.startswith(f"{name}-") for one in printed.blocks())


@pytest.mark.parametrize("program", programs())
def test_every_program_is_in_a_command(program: str) -> None:
    assert program in commands()


def test_output_on_pages_is_what_tests_compare() -> None:
    checked = {
        name
        for path in (ROOT / "tests").rglob("*.py")
        for name in CHECKED.findall(path.read_text())
    }
    assert checked == set(printed.blocks())


SHOWN = """epoch 1: loss 0.5, 1,024 samples/s
epoch 2: loss 0.4, 999 samples/s
done in 3.0 s of 4.25
picture: a.png
"""


@pytest.mark.parametrize(
    "text",
    [
        SHOWN,
        SHOWN.replace("0.4", "nan").replace("999", "1,000,000"),
        SHOWN.replace("epoch 2: loss 0.4, 999 samples/s\n", ""),
        SHOWN.replace("a.png", "/some/where/b.png"),
        SHOWN.replace("done in 3.0 s ", "done in 3.0 s\n"),  # as a page may wrap it
    ],
)
def test_numbers_and_places_may_differ(text: str) -> None:
    assert printed.difference(text, SHOWN) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        SHOWN.replace("loss", "Loss"),
        SHOWN.replace("loss 0.5, 1,024 samples/s", "1,024 samples/s, loss 0.5"),
        SHOWN.replace(" of 4.25", ""),
        SHOWN.replace("picture: a.png\n", ""),
        SHOWN + "one more\n",
        "one more\n" + SHOWN,
        SHOWN.replace(".png", ".npy"),
        SHOWN.replace("done", "…\nDone"),
    ],
)
def test_words_order_and_columns_may_not(text: str) -> None:
    assert "expected, but for numbers" in str(printed.difference(text, SHOWN))


@pytest.mark.parametrize(
    "text",
    [
        SHOWN.replace("done in 3.0 s of 4.25\n", "…\n"),
        SHOWN.replace("done", "…\ndone"),
        SHOWN.replace("in 3.0 s of", "… of"),
        "…\n" + SHOWN + "…\n",
        "epoch 1: loss 0.5, 1 samples/s\n…\nepoch 2: loss 0.5, 1 samples/s\n…",
    ],
)
def test_what_is_left_out_is_marked(text: str) -> None:
    assert printed.difference(text, SHOWN) is None


def test_the_gallery_has_every_picture_and_what_makes_it() -> None:
    page = (ROOT / "docs/gallery.md").read_text()
    files = (ROOT / "docs/images").iterdir()
    pictures = {f"images/{one.name}" for one in files if one.suffix != ".json"}
    assert set(PICTURE.findall(page)) == pictures
    sections = page.split("\n## ")[1:]
    assert len(sections) == len(pictures)
    for section in sections:
        assert len(PICTURE.findall(section)) == 1, section
        assert "```bash\n" in section or "by hand" in section, section


def test_pictures_are_small() -> None:
    for path in (ROOT / "docs/images").iterdir():
        assert path.stat().st_size < MOST_BYTES, path.name

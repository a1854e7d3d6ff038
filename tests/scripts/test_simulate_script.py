# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""scripts/simulate.sh: what it runs, and that mistakes are planted in a copy only.

The script is the real one. Its build is a Python that names a folder, and its simulator
finds whatever has the word "mistake".
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE_S

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]
PYTHON = f"""
[ "$1" != -c ] || exec {sys.executable} "$@"
mkdir -p build && cp ../../simulate build/ 2>/dev/null || cp simulate build/
echo "$PWD/build"
"""
SIMULATE = """
echo "$@"
grep -q mistake "$(dirname "$0")/../csrc/one.cpp" || exit 0
echo "seed 4: it is wrong"
exit 1
"""
PATCH = """What is wrong with it.

--- a/csrc/one.cpp
+++ b/csrc/one.cpp
@@ -1 +1 @@
-{before}
+{after}
"""


class Checkout:
    """A checkout with one source and two patches of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write("csrc/one.cpp", "right\n")
        for name, after in (("found", "mistake"), ("unseen", "another")):
            text = PATCH.format(before="right", after=after)
            self.write(f"tests/simulator/mutations/{name}.patch", text)
        for name, script in ((".venv/bin/python", PYTHON), ("simulate", SIMULATE)):
            self.write(name, f"#!{shutil.which('bash')}\n{script}").chmod(0o755)
        (folder / "scripts").mkdir()
        shutil.copy(ROOT / "scripts/simulate.sh", folder / "scripts")
        for arguments in (["init", "-q"], ["add", "csrc", "scripts", "tests"]):
            subprocess.run(["git", *arguments], cwd=folder, check=True)

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def simulate(self, *options: str) -> tuple[int, list[str]]:
        """The script's status and the lines that it says."""
        done = subprocess.run(
            ["bash", "scripts/simulate.sh", *options],
            cwd=self.folder,
            env=os.environ,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        return done.returncode, done.stdout.splitlines()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_seeds_and_limits_are_handed_on(checkout: Checkout) -> None:
    options = ("--seeds", "5", "--from", "3", "--seconds", "2", "--jobs", "1")
    expected = "--from 3 --seconds 2 --seeds 5 --jobs 1"
    assert checkout.simulate(*options) == (0, [expected])


def test_one_seed_is_run_alone(checkout: Checkout) -> None:
    assert checkout.simulate("--seed", "7") == (0, ["--seed 7"])


def test_what_is_wrong_fails_it(checkout: Checkout) -> None:
    checkout.write("csrc/one.cpp", "mistake\n")
    code, said = checkout.simulate("--seeds", "5", "--jobs", "1")
    assert (code, said[-1]) == (1, "seed 4: it is wrong")


@pytest.mark.parametrize("options", [["--seeds"], ["--seed"], ["--sed", "1"], ["one"]])
def test_wrong_options_show_the_right_ones(
    options: list[str], checkout: Checkout
) -> None:
    assert checkout.simulate(*options) == (2, [])


def test_mistakes_are_planted_one_after_the_other_in_a_copy(checkout: Checkout) -> None:
    for _ in range(2):
        code, said = checkout.simulate("--mutations", "--seeds", "9", "--jobs", "1")
        assert code == 1
        assert said == [
            "found: seed 4: it is wrong",
            "unseen: NOT FOUND by 9 seeds",
            "1 found, 1 not found",
        ]
        for folder in (checkout.folder, checkout.folder / "build/mutations"):
            assert (folder / "csrc/one.cpp").read_text() == "right\n"


def test_named_mistakes_are_planted_alone(checkout: Checkout) -> None:
    code, said = checkout.simulate("--mutations", "found")
    assert (code, said[1:]) == (0, ["1 found, 0 not found"])


def test_a_patch_that_does_not_fit_is_told(checkout: Checkout) -> None:
    checkout.write("csrc/one.cpp", "changed\n")
    code, said = checkout.simulate("--mutations", "found")
    assert code == 1
    assert "found: the patch does not fit the sources" in said


@pytest.mark.parametrize(
    "patch",
    sorted((ROOT / "tests/simulator/mutations").iterdir()),
    ids=lambda p: p.stem,
)
def test_a_mistake_fits_the_sources(patch):
    """Only a run by hand plants them all."""
    done = subprocess.run(
        ["patch", "-p1", "--dry-run", "--forward", "--silent", "-i", str(patch)],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout

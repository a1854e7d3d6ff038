# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""scripts/test.sh: what each option runs, and what it makes of its outcome.

The script is the real one. What it starts is a Python that notes its arguments and ends
with the status that the test gives it.
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
EXTRAS = (
    *("plot", "docs", "test", "models", "ccl", "data", "integrations"),
    *("serving", "monitor"),
)
NO_TEST = "no test has the marker integrations: nothing was tested\n"


class Checkout:
    """A checkout whose environment is complete and whose Python runs nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(ROOT / "scripts", folder / "scripts")
        for name in ("pyproject.toml", "setup.py"):
            shutil.copy(ROOT / name, folder)
        self.log = folder / "calls"
        environment = folder / ".venv"
        (environment / "torch").mkdir(parents=True)
        (environment / "torch_root").write_text(str(environment))
        stamp = self.bash("source scripts/setup_env.sh; environment_stamp").stdout
        for extra in EXTRAS:
            (environment / f"setup-{extra}.stamp").write_text(stamp)
        note = f'echo "$(basename "$0") $*" >>{self.log}'
        self.program(".venv/bin/python", f'{note}; [ "$2" != pytest ] || exit $STATUS')
        self.program("scripts/fuzz.sh", note)
        self.program("scripts/simulate.sh", note)

    def program(self, name: str, script: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!{shutil.which('bash')}\n{script}\n")
        path.chmod(0o755)

    def bash(
        self, command: str, *arguments: str, status: int = 0
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", command, "bash", *arguments],
            cwd=self.folder,
            env=os.environ | {"STATUS": str(status)},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def fuzz(self, *options: str, status: int) -> tuple[int, str]:
        """The status and output of the script that fuzzes."""
        done = self.bash('bash scripts/fuzz.sh "$@"', *options, status=status)
        return done.returncode, done.stdout

    def test(self, option: str, status: int = 0) -> tuple[int, str, list[str]]:
        """The script's status and output, and what it has started but the build."""
        done = self.bash('bash scripts/test.sh "$@"', option, status=status)
        calls = self.log.read_text().splitlines() if self.log.exists() else []
        return done.returncode, done.stdout, [c for c in calls if "cmake" not in c]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.mark.parametrize(
    ("status", "expected", "verdict"), [(0, 0, "ok"), (1, 1, "FAILED"), (5, 1, "ok")]
)
def test_integrations_selects_by_marker_and_tells_of_no_test(
    status: int, expected: int, verdict: str, checkout: Checkout
) -> None:
    code, said, calls = checkout.test("--integrations", status)
    assert code == expected
    assert (NO_TEST in said) == (status == 5)
    line, ray = [one for one in said.splitlines() if one.startswith("pytest, ")]
    assert line.split()[-1] == verdict
    assert ray.split()[-1] == ("ok" if status == 0 else "FAILED")
    call, alone = calls
    assert call.startswith("python -m pytest ")
    assert call.endswith(" -rfEs -m integrations")
    assert "--ignore tests/integrations/test_ray.py" in call
    assert alone.endswith(" tests/integrations/test_ray.py")
    assert (
        "--may-skip CUDA device --may-skip network namespaces are not allowed" in call
    )


SKIPS = """
import pytest

@pytest.mark.parametrize("reason", ["needs a CUDA device", REASON])
def test_one(reason):
    pytest.skip(reason)

def test_other():
    pass
"""


IMPORTS = "import pytest\npytest.importorskip('not_there_at_all')\n"


@pytest.mark.parametrize(
    ("head", "reason", "expected", "workers"),
    [
        ("", "needs two CUDA devices", 0, "0"),
        ("", "could not import 'lightning'", 1, "0"),
        (IMPORTS, "CUDA device", 1, "0"),
        (IMPORTS, "CUDA device", 1, "2"),
    ],
)
def test_a_skip_that_is_not_allowed_fails_the_run(
    head: str, reason: str, expected: int, workers: str, tmp_path: Path
) -> None:
    (tmp_path / "test_it.py").write_text(SKIPS.replace("REASON", repr(reason)))
    if head:
        (tmp_path / "test_head.py").write_text(head)
    options = ["-p", "allowed_skips", "-n", workers, "-c", os.devnull]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--may-skip", "CUDA device", "."],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT / "tests" / "support" / "processes")},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == expected, done.stdout
    told = "not to be skipped here" in done.stdout
    assert told == bool(expected)
    if told:
        after = done.stdout.split("not to be skipped here")[1]
        assert ("not_there_at_all" if head else reason) in after
        assert "test_one[needs a CUDA device]" not in after


@pytest.mark.parametrize("option", ["--quick", "--integrations"])
def test_python_tests_that_fail_fail_the_script(
    option: str, checkout: Checkout
) -> None:
    assert checkout.test(option, 2)[0] == 1


def test_long_kills_often_overloads_simulates_and_fuzzes_by_millions(
    checkout: Checkout,
) -> None:
    code, said, calls = checkout.test("--long")
    kills = "python -m pytest -q -n 2 tests/snapshot_jobs/test_kills.py"
    servers = "python -m pytest -q -s tests/faults/servers_killed_often.py"
    overload = "python -m pytest -q -s tests/faults/overloaded.py"
    losses = "python -m pytest -q -s -rs tests/faults/losses_by_phase.py"
    seeds, mistakes = "simulate.sh --seeds 100000", "simulate.sh --mutations"
    fuzzing = "fuzz.sh --inputs 10000000"
    assert code == 0
    assert calls == [kills, servers, overload, losses, seeds, mistakes, fuzzing]
    assert "FAILED" not in said


def test_an_unknown_option_shows_the_others(checkout: Checkout) -> None:
    code, said, calls = checkout.test("--integration")
    assert (code, said, calls) == (2, "", [])


def test_help_and_contributing_name_options_extras_and_packages(
    checkout: Checkout,
) -> None:
    code, said, calls = checkout.test("--help")
    assert (code, calls) == (0, [])
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for text in (said, contributing):
        words = (
            "--quick",
            "--integrations",
            "--long",
            "models",
            "ccl",
            "iproute2",
            "Jupyter",
            "Lightning",
            "Accelerate",
            "Ray",
            "serving",
        )
        assert [word for word in words if word not in text] == []


def test_the_marker_selects_what_needs_other_projects() -> None:
    models, layouts, hosts = (
        "tests/models/test_migrating_page.py",
        "tests/multiprocess/test_layouts.py",
        "tests/multiprocess/test_network_namespaces.py",
    )
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q"]
    done = subprocess.run(
        [*command, "-m", "integrations", models, layouts, hosts],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    found = {one.split("::")[0] for one in done.stdout.splitlines() if "::" in one}
    assert found == {models, hosts}


FUZZER = """
name=$(basename "$0")
echo "$name $*"
while [ "$name" = data_lines ] && [ ! -e ended ]; do sleep 0.01; done
[ "$name" = data_lines ] || touch ended
[ "$name" != wire_made ] || exit $STATUS
"""


@pytest.mark.parametrize("status", [0, 1])
def test_fuzzers_run_beside_each_other_and_one_that_fails_is_told(
    status: int, checkout: Checkout
) -> None:
    """The first waits for another one's end."""
    targets = sorted(one.name for one in (ROOT / "tests/fuzz/corpus").iterdir())
    for target in targets:
        (checkout.folder / "tests/fuzz/corpus" / target).mkdir(parents=True)
        checkout.program(f"build/asan/{target}", FUZZER)
    shutil.copy(ROOT / "scripts/fuzz.sh", checkout.folder / "scripts")
    checkout.program(".venv/bin/python", f"echo {checkout.folder}/build/asan")
    checkout.program(".venv/bin/nproc", "echo 2")
    code, said = checkout.fuzz("--seconds", "6", "--seed", "3", status=status)
    assert (code == 0) == (status == 0)
    expected = {
        f"{one} --seconds 6 --seed 3 tests/fuzz/corpus/{one}" for one in targets
    }
    assert set(said.splitlines()) == expected
    assert (
        set((checkout.folder / "build/fuzz.log").read_text().splitlines()) == expected
    )


def test_linters_run_beside_each_other_and_each_is_told(checkout: Checkout) -> None:
    checkout.program(".venv/bin/ruff", 'echo "ruff $1 has found this"; exit 3')
    code, said, _ = checkout.test("--quick")
    assert code == 1
    assert "== ruff check\nruff check has found this\n" in said
    verdicts = {
        line.rsplit(maxsplit=3)[0]: line.split()[-1]
        for line in said.splitlines()
        if line.endswith(("ok", "FAILED"))
    }
    assert verdicts["ruff check"] == verdicts["ruff format"] == "FAILED"
    assert verdicts["mypy --strict"] == verdicts["tidy"] == "ok"


SETUP = """
source scripts/setup_env.sh
is_current() { return 1; }
make_environment() { :; }
check_compiler() { :; }
pip_install() { echo "pip $*"; }
install_extras() { until [ -s core.pid ]; do sleep 0.01; done; return $STATUS; }
setup_env test
"""


def ended(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")")[-1].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def test_the_core_is_compiled_while_extras_are_installed(checkout: Checkout) -> None:
    checkout.program(".venv/bin/python", "echo $$ >core.pid; echo compiled")
    done = checkout.bash(SETUP)
    assert done.returncode == 0, done.stderr
    stages = [line.split("  ")[0] for line in done.stdout.splitlines()]
    assert stages == ["extras (test)", "compiled core, what is left", "package"]
    log = (checkout.folder / ".venv" / "setup.log").read_text()
    assert log == "compiled\npip --no-deps --no-build-isolation -e .\n"


def test_a_core_that_does_not_compile_is_told(checkout: Checkout) -> None:
    checkout.program(".venv/bin/python", "echo $$ >core.pid; echo an error; exit 1")
    done = checkout.bash(SETUP)
    assert done.returncode == 1
    assert "an error" in done.stderr
    assert "compiled core, what is left failed" in done.stderr


def test_extras_that_fail_end_the_compiler(checkout: Checkout, eventually) -> None:
    checkout.program(".venv/bin/python", "echo $$ >core.pid; sleep 3600; true")
    done = checkout.bash(SETUP, status=1)
    assert done.returncode == 1
    assert "extras (test) failed" in done.stderr
    process = int((checkout.folder / "core.pid").read_text())
    eventually(lambda: ended(process), PATIENCE_S, "the compiler has ended")


# The build ahead is known by its targets; each call is noted with its priority.
WHOLE = """
echo "$(nice) $*" >>calls
case "$*" in
*fuzzers*) echo $$ >ahead.pid; {ahead} ;;
*"cmake_build.py "?san*) echo {folder} ;;
*pytest*) {pytest} ;;
esac
"""


def whole(checkout: Checkout, **scripts: str) -> tuple[str, list[str]]:
    """What the whole script says and has called, with stages that do little."""
    script = WHOLE.format(folder=checkout.folder, **scripts)
    checkout.program(".venv/bin/python", script)
    checkout.program("native_tests", "exit 0")
    _, said, _ = checkout.test("")
    return said, (checkout.folder / "calls").read_text().splitlines()


def test_the_programs_of_sanitizers_are_built_behind_other_stages(
    checkout: Checkout,
) -> None:
    """pytest ends when their builds, which need it to have begun, have ended."""
    pytest_ = "touch begun; until grep -q '19 .* tsan' calls; do sleep 0.01; done"
    said, calls = whole(
        checkout, ahead="until [ -e begun ]; do sleep 0.01; done", pytest=pytest_
    )
    assert [one for one in calls if one.startswith("19 ")] == [
        "19 scripts/cmake_build.py asan native_tests fuzzers",
        "19 scripts/cmake_build.py tsan native_tests",
    ]
    for stage in ("pytest", "native tests, ASan+UBSan", "native tests, TSan"):
        (line,) = [one for one in said.splitlines() if one.startswith(f"{stage}  ")]
        assert line.endswith("ok")


def test_a_build_behind_ends_when_its_programs_are_needed(
    checkout: Checkout, eventually
) -> None:
    begun = "until [ -s ahead.pid ]; do sleep 0.01; done"
    said, calls = whole(checkout, ahead="sleep 3600; true", pytest=begun)
    process = int((checkout.folder / "ahead.pid").read_text())
    eventually(lambda: ended(process), PATIENCE_S, "the build behind has ended")
    for stage in ("native tests, ASan+UBSan", "native tests, TSan"):
        (line,) = [one for one in said.splitlines() if one.startswith(f"{stage}  ")]
        assert line.endswith("ok")
    assert len([one for one in calls if "asan" in one]) == 2

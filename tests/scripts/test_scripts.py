# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The two commands where something is missing, with bad options, and interrupted."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import PATIENCE_S

from torch_cpudist import strategies

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]
SOON_S = 60.0  # longer than fetching or compiling nothing takes on a busy machine
TOOLS = (
    *("bash", "dirname", "basename", "uname", "awk", "df", "cat", "mkdir", "tail"),
    *("sha256sum", "cut", "timeout", "g++", "rm", "pgrep", "nproc"),
)

# LocalSGD alone trains no tables, which the example has.
OFFERED = [name for name in strategies.names() if name != "local_sgd"]


class BareMachine:
    """A checkout without .venv, and a PATH with nothing but a few tools."""

    def __init__(self, folder: Path) -> None:
        self.checkout = folder / "checkout"
        self.bin = folder / "bin"
        shutil.copytree(ROOT / "scripts", self.checkout / "scripts")
        for name in ("pyproject.toml", "setup.py"):
            shutil.copy(ROOT / name, self.checkout)
        self.bin.mkdir()
        for name in TOOLS:
            found = shutil.which(name)
            assert found is not None, name
            (self.bin / name).symlink_to(found)
        self.program("python3", f'exec "{sys.executable}" "$@"')

    def program(self, name: str, script: str) -> None:
        path = self.bin / name
        path.unlink(missing_ok=True)
        path.write_text(f"#!{shutil.which('bash')}\n{script}\n")
        path.chmod(0o755)

    def python_module(self, name: str, code: str) -> None:
        """Put a module before those of every Python started by the scripts."""
        folder = self.bin / "modules"
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.py").write_text(code)
        script = f'PYTHONPATH="{folder}" exec "{sys.executable}" "$@"'
        self.program("python3", script)

    def run(self, script: str, **environment: str) -> tuple[int, str, float]:
        began = time.monotonic()
        done = subprocess.run(
            [self.bin / "bash", self.checkout / "scripts" / script],
            env={"PATH": str(self.bin), "HOME": str(self.checkout), **environment},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        return done.returncode, done.stderr.strip(), time.monotonic() - began


@pytest.fixture
def machine(tmp_path: Path) -> BareMachine:
    return BareMachine(tmp_path)


def lack_python(machine: BareMachine) -> None:
    (machine.bin / "python3").unlink()


def lack_new_python(machine: BareMachine) -> None:
    machine.program("python3", 'case "$2" in *print*) echo 3.9 ;; *) exit 1 ;; esac')


def lack_venv(machine: BareMachine) -> None:
    machine.python_module("venv", "raise ImportError")


def lack_headers(machine: BareMachine) -> None:
    patch = "import sysconfig\nsysconfig.get_path = lambda *a, **k: '/nowhere'\n"
    machine.python_module("sitecustomize", patch)


def lack_compiler(machine: BareMachine) -> None:
    (machine.bin / "g++").unlink()


def lack_new_compiler(machine: BareMachine) -> None:
    machine.program("g++", "exit 1")


def lack_disk(machine: BareMachine) -> None:
    machine.program("df", "printf 'head\\nfs 9 9 102400 99%% /\\n'")


@pytest.mark.parametrize("script", ["demo.sh", "test.sh"])
@pytest.mark.parametrize(
    ("lack", "words"),
    [
        (lack_python, "python3 is not on PATH"),
        (lack_new_python, "Python 3.11 or newer is needed, python3 is 3.9"),
        (lack_venv, "no venv module"),
        (lack_headers, "Python.h is missing"),
        (lack_compiler, "g++ is not on PATH"),
        (lack_new_compiler, "does not compile C++20"),
        (lack_disk, "100 MiB are free"),
    ],
)
def test_what_is_missing_is_said_in_one_sentence(
    script: str, lack: object, words: str, machine: BareMachine
) -> None:
    assert callable(lack)
    lack(machine)
    code, message, seconds = machine.run(script)
    assert code == 1
    assert words in message
    assert message.startswith(f"{script}: ")
    assert "\n" not in message
    assert not (machine.checkout / ".venv").exists()
    # 5 s on a machine that does nothing else.
    assert seconds < SOON_S


def test_no_network_is_said_in_one_sentence(machine: BareMachine) -> None:
    code, message, seconds = machine.run(
        "demo.sh",
        PIP_CONFIG_FILE=os.devnull,
        PIP_INDEX_URL="http://127.0.0.1:9/simple",
    )
    assert code == 1
    assert message.startswith("demo.sh: no package index answers pip")
    assert "\n" not in message
    assert seconds < SOON_S


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--trainer", "2"], "unknown option --trainer"),
        (["--trainers"], "--trainers needs a number"),
        (["--trainers", "two"], "--trainers needs a number, got 'two'"),
        (["--trainers", "0"], "--trainers must be at least 1, got 0"),
        (["--epochs", "-1"], "--epochs needs a number, got '-1'"),
        (["--servers", "1.5"], "--servers needs a number, got '1.5'"),
        (["--bf16", "3"], "unknown option 3"),
        (["--strategy"], "--strategy needs a name"),
        (["--remote", "2"], "unknown option 2"),
        (
            ["--strategy", "reduce", "--remote"],
            "--remote trains with sync, half_async, async, geo, hybrid; reduce has "
            "tables on the trainers",
        ),
        (
            ["--survive", "--strategy", "sync"],
            "--survive trains with async; trainers of sync do not outlive servers",
        ),
        (
            ["--survive", "--servers", "0"],
            "--survive has servers in a job of their own, got 0",
        ),
        (["--survive", "--kill"], "--survive and --kill exclude each other"),
    ],
)
def test_bad_options_of_the_demo(options: list[str], words: str) -> None:
    done = subprocess.run(
        ["bash", ROOT / "scripts" / "demo.sh", *options],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 2
    assert f"demo.sh: {words}\n" in done.stderr
    assert "usage: bash scripts/demo.sh" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("name", ["asinc", "", "*", "async, sync"])
def test_an_unknown_strategy_is_refused_in_one_sentence(
    name: str, machine: BareMachine
) -> None:
    package = machine.checkout / "torch_cpudist"
    shutil.copytree(ROOT / "torch_cpudist" / "strategies", package / "strategies")
    began = time.monotonic()
    done = subprocess.run(
        ["bash", machine.checkout / "scripts" / "demo.sh", "--strategy", name],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    valid = ", ".join(OFFERED)
    assert done.stderr == f"demo.sh: unknown strategy '{name}'; valid: {valid}\n"
    assert (done.returncode, done.stdout) == (2, "")
    assert time.monotonic() - began < SOON_S
    assert not (machine.checkout / ".venv").exists()


def test_help_of_the_demo_names_every_option() -> None:
    done = subprocess.run(
        ["bash", ROOT / "scripts" / "demo.sh", "--help"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    options = ("--strategy", "--trainers", "--servers", "--epochs", "--bf16", "--rows")
    for option in (*options, "--seed", "--remote", "--kill", "--survive"):
        assert option in done.stdout
    assert ", ".join(OFFERED) in done.stdout


# -- Ctrl-C ----------------------------------------------------------------------------


def environment_is_ready() -> bool:
    check = "source scripts/setup_env.sh && is_current plot"
    done = subprocess.run(
        ["bash", "-c", check], cwd=ROOT, timeout=PATIENCE_S, check=False
    )
    return done.returncode == 0


def marked_processes(mark: str) -> list[int]:
    """Return every process that has the mark in its environment."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if mark.encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                continue  # it ended, or is another user's
    return found


class Traces:
    """What a set of processes holds: listening sockets, socket files, shared memory."""

    def __init__(self, processes: list[int]) -> None:
        self.inodes: set[str] = set()
        self.files: set[Path] = set()
        for process in processes:
            self._read(Path(f"/proc/{process}"))
        table = Path("/proc/net/unix").read_text().splitlines()[1:]
        for line in table:
            words = line.split()
            named = len(words) == 8 and words[7].startswith("/")
            if named and words[6] in self.inodes:
                self.files.add(Path(words[7]))

    def _read(self, folder: Path) -> None:
        try:
            mapped = (folder / "maps").read_text()
            targets = [os.readlink(fd) for fd in (folder / "fd").iterdir()]
        except OSError:
            return
        self.inodes |= set(re.findall(r"socket:\[(\d+)\]", " ".join(targets)))
        for name in re.findall(r"/dev/shm/\S+", f"{mapped} {' '.join(targets)}"):
            self.files.add(Path(name))

    def listening(self) -> set[str]:
        """Return those of the sockets that listen on a TCP port now."""
        lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
        words = [line.split() for line in lines]
        return {row[9] for row in words if row[3] == "0A"} & self.inodes


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    if not environment_is_ready():
        pytest.skip("bash scripts/test.sh makes the environment that this test needs")
    mark = f"DEMO_TEST_MARK={uuid.uuid4()}"
    name, value = mark.split("=")
    process = subprocess.Popen(
        ["bash", "scripts/demo.sh", "--rows", "20000", "--epochs", "1000"],
        cwd=ROOT,
        env=os.environ | {name: value, "TMPDIR": str(tmp_path), "CPUDIST_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process, mark
    finally:
        for left in marked_processes(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(left, signal.SIGKILL)
        process.wait(timeout=PATIENCE_S)


def read_until(process: subprocess.Popen[str], words: str) -> str:
    """Read the screen up to the words; the test's own time limit bounds the wait."""
    assert process.stdout is not None
    screen = ""
    while words not in screen:
        piece = process.stdout.read(1)
        assert piece, f"the demo ended before {words!r}:\n{screen}"
        screen += piece
    return screen


def test_ctrl_c_leaves_nothing_behind(
    demo: tuple[subprocess.Popen[str], str], tmp_path: Path
) -> None:
    process, mark = demo
    screen = read_until(process, "B/sample")
    running = marked_processes(mark)
    traces = Traces(running)
    # bash, the launcher and two trainers, of which at least the rendezvous listens.
    assert len(running) >= 4
    assert traces.listening()

    os.killpg(process.pid, signal.SIGINT)
    rest, _ = process.communicate(timeout=PATIENCE_S)

    assert process.returncode == 130
    assert rest.strip().endswith("demo.sh: interrupted")
    assert "Traceback" not in screen + rest
    assert "OMP_NUM_THREADS" not in screen + rest
    assert marked_processes(mark) == []
    assert traces.listening() == set()
    assert [path for path in traces.files if path.exists()] == []
    left = [p for p in tmp_path.rglob("*") if stat.S_ISSOCK(p.lstat().st_mode)]
    assert left == []

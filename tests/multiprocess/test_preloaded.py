# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Programs that begin as forks of one with torch are as those that are started."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from patience import PATIENCE_S

SUPPORT = Path(__file__).parents[1] / "support"

pytestmark = pytest.mark.processes


@pytest.fixture
def launch(launch_forks):
    return launch_forks


SAYS = """
import json, os, sys
early = "torch" in sys.modules
import beside
print(json.dumps([early, sys.argv, os.getcwd(), os.environ["WHO"], __name__, sys.path]))
sys.exit(beside.STATUS)
"""


@pytest.mark.parametrize("threads", ["1", "2"])
def test_script_arguments_environment_folder_and_status(threads, launch, tmp_path):
    """With other threads than torch was loaded with it is the real program."""
    (tmp_path / "says.py").write_text(SAYS)
    (tmp_path / "beside.py").write_text("STATUS = 7")
    (tmp_path / "added").mkdir()
    program = launch(
        "python -u says.py -x 'a b'", WHO="me", OMP_NUM_THREADS=threads, PYTHONPATH="/q"
    )
    assert program.wait(PATIENCE_S) == 7, program.text()
    early, argv, folder, who, name, path = json.loads(program.text())
    assert (early, who, name) == (threads == "1", "me", "__main__")
    assert argv == ["says.py", "-x", "a b"]
    assert Path(folder) == tmp_path
    assert path[:2] == [str(tmp_path), "/q"]
    assert not [one for one in path if one.startswith(str(SUPPORT))]


def test_an_error_is_shown_and_a_failure(launch, tmp_path):
    (tmp_path / "fails.py").write_text("raise ValueError('so')")
    program = launch("python fails.py")
    assert program.wait(PATIENCE_S) == 1
    assert program.text().endswith("ValueError: so\n")


WAITS = """
import os, signal, sys
if sys.argv[1] == "own":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
print(os.getpid(), flush=True)
while True:
    signal.pause()
"""


@pytest.mark.parametrize(
    ("how", "number", "status"),
    [
        ("own", signal.SIGTERM, 3),
        ("none", signal.SIGTERM, -signal.SIGTERM),
        ("none", signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_signals_go_through(how, number, status, launch, eventually, tmp_path):
    (tmp_path / "waits.py").write_text(WAITS)
    program = launch(["python", "waits.py", how])
    eventually(
        lambda: program.text().endswith("\n"), PATIENCE_S, "the script says its id"
    )
    pid = int(program.text())
    os.kill(program.process.pid, number)
    assert program.wait(PATIENCE_S) == status
    eventually(
        lambda: not Path(f"/proc/{pid}").exists(), PATIENCE_S, "the fork has ended"
    )

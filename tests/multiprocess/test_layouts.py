# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Every one-host command line of docs/launch.md, as it stands there."""

from __future__ import annotations

import functools
import re

import launch_page
import pytest
import torch
from ahead import ahead
from patience import PATIENCE_S
from ports import free_port

import torch_cpudist as cpudist

pytestmark = pytest.mark.processes

HERE = [name for name in launch_page.examples() if not name.startswith("hosts-")]


def run_example(name, launch):
    example = launch_page.examples()[name]
    (launch.folder / "train.py").write_text(launch_page.script())
    # Two checkouts may run their tests on one machine: only the port differs from the
    # page.
    endpoint = f"localhost:{free_port()}"
    programs = [
        launch(re.sub(r"localhost:\d+", endpoint, command))
        for command in example.commands
    ]
    launch_page.check_outcome(example, programs)


def run_script(text, launch):
    """The output of a script that two ranks run, which are started again twice."""
    (launch.folder / "train.py").write_text(text)
    options = "--nproc-per-node=2 --max-restarts=2 --monitor-interval=0.1"
    program = launch(f"torchrun --standalone {options} train.py")
    assert program.wait(PATIENCE_S) == 0, program.text()
    return program.text()


def once(job):
    """A job of several tests, which is run for the first of them."""
    found = []

    def run(launch):
        if not found:
            found.append(job(launch))
        return found[0]

    return run


@pytest.fixture(scope="module")
def launched(request, tmp_path_factory):
    jobs = {
        f"test_command_line[{name}]": functools.partial(run_example, name)
        for name in HERE
    }
    # One launch for two tests: ranks that are restarted init and shut down repeatedly.
    again = once(functools.partial(run_script, RESTARTS + REPEATS))
    jobs["test_init_and_shutdown_again_under_torchrun"] = again
    jobs["test_a_restart_by_torchrun_begins_anew_and_says_so"] = again
    with ahead(request, tmp_path_factory, jobs) as launches:
        yield launches


def test_the_page_has_every_layout():
    assert set(HERE) == {
        "one-process",
        "colocated",
        "dedicated",
        "more-servers-than-parameters",
        "roles",
        "groups",
        "groups-async",
    }


@pytest.mark.parametrize("name", HERE)
def test_command_line(name, launched, request):
    launched.result(request)


def test_notebook_cells_run_again_and_again():
    names = {"cpudist": cpudist, "torch": torch}
    first, second = launch_page.cells()
    for _ in range(3):
        exec(first, names)  # noqa: S102
        exec(second, names)  # noqa: S102
        assert cpudist.get_context().closed


def test_a_new_optimizer_in_a_notebook_closes_the_old_one():
    names = {"cpudist": cpudist, "torch": torch}
    first, second = launch_page.cells()
    exec(first, names)  # noqa: S102
    earlier = names["opt"]
    names["opt"] = cpudist.DistributedOptimizer(
        torch.optim.SGD(names["model"].parameters(), lr=0.1), names["model"]
    )
    with pytest.raises(cpudist.ClosedError):
        earlier.step()
    exec(second, names)  # noqa: S102


# After the restarts, in the attempt that has got this far.
REPEATS = """
import torch
for turn in range(3):
    cpudist.init()
    model = torch.nn.Linear(4, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = cpudist.DistributedOptimizer(sgd, model)
    for _ in range(turn + 1):
        model(torch.ones(2, 4)).sum().backward()
        opt.step()
    print(f"turn {turn}: step {cpudist.global_step()}", flush=True)
    cpudist.shutdown()
"""


def test_init_and_shutdown_again_under_torchrun(launched, request):
    text = launched.result(request)
    for turn in range(3):
        assert text.count(f"turn {turn}: step {turn + 1}") == 2, text


RESTARTS = """
import os, torch_cpudist as cpudist
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if attempt == 0 and os.environ["RANK"] == "1":
    os._exit(1)  # before init(): the other rank has left its values in the store
cpudist.init(timeout_s=300)
cpudist.barrier()
if attempt == 1 and os.environ["RANK"] == "0":
    os._exit(1)  # after init()
cpudist.barrier()
print(f"attempt {attempt}", flush=True)
cpudist.shutdown()
"""


def test_a_restart_by_torchrun_begins_anew_and_says_so(launched, request):
    text = launched.result(request)
    assert text.count("attempt 2") == 2, text
    assert (
        "restart 2: training begins anew unless the script calls opt.resume()" in text
    )

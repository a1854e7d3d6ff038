# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Scripts for torch's bindings of oneCCL and for IPEX: what import finds, and does."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from patience import PATIENCE_S
from programs import Launcher, skip_without_oneccl
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist import compat, precision
from torch_cpudist.backends import ccl
from torch_cpudist.compat.__main__ import main

IPEX, ONECCL = "intel_extension_for_pytorch", "oneccl_bindings_for_pytorch"
SCRIPT = Path(__file__).with_name("chapter_script.py")


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    """No test leaves modules behind, whoever was imported first."""
    for name in (IPEX, ONECCL):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    for name in (IPEX, ONECCL):
        sys.modules.pop(name, None)


@pytest.fixture
def fast(monkeypatch):
    """A CPU that computes in bfloat16."""
    monkeypatch.setattr(precision, "bf16_instructions", lambda: "amx_bf16")


@pytest.fixture
def ipex():
    compat.install()
    return importlib.import_module(IPEX)


def small():
    """Whose numbers all depend on the inputs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def in_bfloat16(model, inputs):
    with torch.autocast("cpu", torch.bfloat16):
        return model(inputs).float()


def train(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def test_imports_find_both(caplog):
    caplog.set_level(logging.WARNING, logger="torch_cpudist")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(ONECCL)
    done = compat.install()
    assert done.modules == (ONECCL, IPEX)
    assert "backend 'ccl'" in done.notes[0]
    assert "cpudist.optimize: it is not installed" in done.notes[1]
    assert all(note in caplog.text for note in done.notes)
    for name in done.modules:
        found = importlib.import_module(name)
        assert importlib.util.find_spec(name) is found.__spec__
        assert found.__version__.startswith("0+torch_cpudist.")
        assert not hasattr(found, "xpu")
    assert "CCL" in torch.distributed.Backend.__dict__
    caplog.clear()
    assert compat.install().modules == done.modules
    assert not caplog.text, "said once"


def test_what_is_not_there_is_named(ipex):
    with pytest.raises(AttributeError, match=r"quantization is not there.*migrating"):
        _ = ipex.quantization


@pytest.mark.parametrize(
    ("version", "body", "note"),
    [
        ("2.8.0", "", "the one installed, 2.8.0, is for another torch"),
        (torch.__version__, "raise OSError('no libccl')", "cannot be imported"),
    ],
    ids=["other_torch", "broken"],
)
def test_a_real_one_that_does_not_fit_is_passed_over(
    version, body, note, tmp_path, monkeypatch
):
    stand_in(tmp_path, version, body, monkeypatch)
    done = compat.install()
    assert IPEX in done.modules
    assert note in done.notes[1]
    assert importlib.import_module(IPEX).__spec__.origin == "torch_cpudist.compat"


def test_bindings_that_were_imported_before_stay(monkeypatch):
    real = ModuleType(ONECCL)
    monkeypatch.setitem(sys.modules, ONECCL, real)
    done = compat.install()
    assert done.modules == (IPEX,)
    assert "was imported before, and stays" in done.notes[0]
    assert importlib.import_module(ONECCL) is real
    assert compat.install().modules == (IPEX,)


def test_a_real_one_that_fits_is_left(tmp_path, monkeypatch):
    stand_in(tmp_path, torch.__version__, "name = 'the real one'", monkeypatch)
    done = compat.install()
    assert done.modules == (ONECCL,)
    assert done.notes[1] == f"import {IPEX} is the one installed."
    assert importlib.import_module(IPEX).name == "the real one"
    assert compat.install().modules == (ONECCL,)


def stand_in(folder, version, body, monkeypatch):
    """A package of that name and version."""
    version = version.split("+")[0]
    (folder / IPEX).mkdir()
    (folder / IPEX / "__init__.py").write_text(body)
    known = folder / f"{IPEX}-{version}.dist-info"
    known.mkdir()
    text = f"Metadata-Version: 2.1\nName: {IPEX}\nVersion: {version}\n"
    (known / "METADATA").write_text(text)
    monkeypatch.syspath_prepend(folder)


def test_copies_are_trained_and_the_original_stays(ipex, fast):
    model, optimizer = small()
    inputs = torch.rand(8, 4)
    before = [one.detach().clone() for one in model.parameters()]
    ours, stepped = ipex.optimize(model, optimizer=optimizer, dtype=torch.bfloat16)
    assert ours is not model
    assert torch.equal(ours(inputs), in_bfloat16(model, inputs))
    assert not torch.equal(ours(inputs), model(inputs))
    train(ours, stepped)
    assert all(map(torch.equal, model.parameters(), before))
    assert not any(map(torch.equal, ours.parameters(), before))
    assert torch.equal(model(inputs), small()[0](inputs))


def test_in_place_it_is_the_same_model(ipex, fast):
    model, optimizer = small()
    inputs = torch.rand(8, 4)
    # By place, as the original has it: conv_bn_folding comes sixth, no compiling.
    first = ipex.optimize(model, torch.bfloat16, optimizer, "O1", True, True)
    assert first == (model, optimizer)
    assert torch.equal(model(inputs), in_bfloat16(small()[0], inputs))
    assert model._compiled_call_impl is None


def test_a_model_that_is_only_used(ipex, fast):
    model, _ = small()
    inputs = torch.rand(8, 4)
    used = ipex.optimize(model.eval(), dtype=torch.bfloat16)
    assert isinstance(used, nn.Module)
    assert torch.equal(used(inputs), in_bfloat16(model, inputs))
    assert not torch.equal(used(inputs), model(inputs))
    nothing = nn.ReLU()
    assert isinstance(ipex.optimize(nothing, dtype=torch.bfloat16), nn.ReLU)


def test_graph_mode_compiles(ipex, fast, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "torch_cpudist.compat.ipex.optimize_here",
        lambda model, optimizer, dtype, **options: asked.append(options["compile"]),
    )
    model, optimizer = small()
    for graph_mode in (True, False, None):
        ipex.optimize(model, optimizer=optimizer, graph_mode=graph_mode)
    assert asked == [True, False, False]


def test_float32_and_the_lowest_level_change_no_number(ipex, fast):
    model, optimizer = small()
    inputs = torch.rand(8, 4)
    for arguments in ({}, {"dtype": torch.float32}, {"level": "O0"}):
        ours, _ = ipex.optimize(model, optimizer=optimizer, **arguments)
        assert torch.equal(ours(inputs), model(inputs))
    ours, _ = ipex.optimize(
        model, optimizer=optimizer, dtype=torch.bfloat16, level="O0"
    )
    assert torch.equal(ours(inputs), model(inputs))


def test_arguments_are_named_or_refused(ipex, caplog):
    caplog.set_level(logging.WARNING, logger="torch_cpudist")
    model, optimizer = small()
    ipex.optimize(
        model,
        optimizer=optimizer,
        conv_bn_folding=True,
        sample_input=torch.ones(2, 4),
        weights_prepack=None,
    )
    assert "conv_bn_folding=True: batch norm stays" in caplog.text
    assert "sample_input=…: nothing is traced" in caplog.text
    assert "weights_prepack" not in caplog.text
    for arguments, said in (
        ({"level": "O3"}, "level='O3', expected one of O0, O1"),
        ({"dtype": torch.float16}, "expected torch.bfloat16"),
        ({"speed": 9}, "speed: the original has, once each"),
    ):
        with pytest.raises(cpudist.InvalidArgumentError, match=said):
            ipex.optimize(model, optimizer=optimizer, **arguments)
    with pytest.raises(cpudist.InvalidArgumentError, match="conv_bn_folding"):
        ipex.optimize(model, None, optimizer, "O1", False, True, conv_bn_folding=True)
    with pytest.raises(cpudist.InvalidArgumentError, match="too many arguments"):
        ipex.optimize(model, None, optimizer, "O1", False, *[None] * 12)


def test_an_optimizer_of_more_than_the_model_is_not_copied(ipex):
    model, _ = small()
    other = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(cpudist.InvalidArgumentError, match="inplace=True"):
        ipex.optimize(model, optimizer=optimizer)
    assert ipex.optimize(model, optimizer=optimizer, inplace=True)[0] is model


def test_launchers_of_others_are_replaced(monkeypatch, caplog):
    caplog.set_level(logging.WARNING, logger="torch_cpudist")
    for value, taken in (("torch", "none"), ("hydra", "none"), ("torchrun", None)):
        monkeypatch.setenv("CCL_PROCESS_LAUNCHER", value)
        caplog.clear()
        ccl.set_environment({})
        found = ccl.os.environ["CCL_PROCESS_LAUNCHER"]
        assert found == (taken or value)
        assert (f"CCL_PROCESS_LAUNCHER={value} does not work" in caplog.text) == bool(
            taken
        )


def test_the_runner_says_what_it_lacks(capsys, tmp_path):
    assert main([]) == 2
    assert main([str(tmp_path / "none.py")]) == 2
    assert "none.py: there is no such script" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "SCRIPT [ARGUMENT...]" in capsys.readouterr().out


@pytest.mark.processes
def test_the_script_of_a_chapter_runs_unchanged(tmp_path):
    skip_without_oneccl()
    launch = Launcher(tmp_path, {"CCL_PROCESS_LAUNCHER": "torch"})
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words += ["--nproc-per-node=2", "-m", "torch_cpudist.compat", str(SCRIPT)]
    try:
        program = launch(words)
        assert program.wait(PATIENCE_S) == 0, program.text()
    finally:
        launch.end()
    for rank in range(2):
        said = f"rank {rank}: same True launcher none learned True"
        assert said in program.text()
    assert "CCL_PROCESS_LAUNCHER=torch does not work" in program.text()

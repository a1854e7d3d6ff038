# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which backend is taken, and what is said where one cannot be."""

from __future__ import annotations

import importlib.metadata
import sys
import threading
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from patience import PATIENCE, PATIENCE_S
from programs import check_quick

import torch_cpudist as cpudist
from torch_cpudist.backends import ccl, ccl_runtime
from torch_cpudist.collective.group import CollectiveGroup
from torch_cpudist.launch import backend_choice, environment
from torch_cpudist.launch.layout import Layout, Member


def layout(hosts=("a", "a"), loads=True, trainers=(0, 1)):
    return Layout((), tuple(trainers), False, tuple(hosts), loads)


def chosen(name, where, monkeypatch, rank=0):
    monkeypatch.setattr(backend_choice, "CHECKS", {})
    made = environment.Environment(rank=rank, world_size=2, backend=name)
    return backend_choice.choose(made, where)


# -- selection ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (layout(), "shm"),
        (layout(loads=False), "gloo"),
        (layout(hosts=("a", "b")), "shm"),
    ],
)
def test_auto_takes_shm_where_it_loads_on_all(where, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert chosen("auto", where, monkeypatch).spec == expected


def test_auto_gives_cuda_tensors_nccl(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert chosen("auto", layout(), monkeypatch).spec == "cpu:shm,cuda:nccl"
    assert chosen("nccl", layout(), monkeypatch).spec == "cpu:gloo,cuda:nccl"
    three = layout(hosts=("a",) * 3, trainers=(0, 1, 2))
    assert chosen("auto", three, monkeypatch).spec == "shm"
    with pytest.raises(cpudist.BackendUnavailableError, match="trainer per device"):
        chosen("nccl", three, monkeypatch)


def test_a_group_for_gradients_on_a_device_is_over_nccl(monkeypatch):
    def spec(name, where):
        made = environment.Environment(rank=0, world_size=2, backend=name)
        return backend_choice.spec_for(torch.device("cuda", 0), made, where)

    monkeypatch.setattr(backend_choice, "CHECKS", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(cpudist.BackendUnavailableError, match="one trainer per device"):
        spec("auto", layout())
    with pytest.raises(cpudist.BackendUnavailableError, match="are on cuda:0"):
        spec("gloo", layout())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert spec("auto", layout()) == "cpu:shm,cuda:nccl"
    assert spec("nccl", layout()) == "cpu:gloo,cuda:nccl"
    with pytest.raises(cpudist.BackendUnavailableError, match="this host has 2"):
        spec("auto", layout(hosts=("a",) * 3, trainers=(0, 1, 2)))


@pytest.mark.parametrize("name", ["gloo", "shm", "ccl"])
def test_a_named_one_is_taken(name, monkeypatch):
    assert chosen(name, layout(loads=False), monkeypatch).spec == name


def test_members_tell_whether_shm_loads():
    def member(rank, loads):
        return Member(rank, rank, 0, "default", "a", "a pid 1", {}, loads)

    from torch_cpudist.launch.layout import assign, one_role

    for loads in (True, False):
        members = [member(0, True), member(1, loads)]
        assert assign(members, 0).shm == assign(members, 1).shm == loads
        assert one_role(members, "trainer").shm == loads


def test_a_choice_is_said(caplog):
    context = cpudist.init(variables={"CPUDIST_BACKEND": "gloo", "CPUDIST_LOG": "info"})
    try:
        assert (dist.get_backend(), context.backend) == ("gloo", "gloo")
        assert "backend gloo (CPUDIST_BACKEND), 1 trainers" in caplog.text
    finally:
        context.shutdown()


# -- refusals ----------------------------------------------------------------------


def refusal(variables):
    said = []

    def refused():
        with pytest.raises(cpudist.BackendUnavailableError) as caught:
            cpudist.init(variables=variables)
        said.append(str(caught.value))

    check_quick(refused, 1.0)
    assert not dist.is_initialized()
    return said[-1]


def test_mpi_and_nccl_are_refused_where_torch_has_none(monkeypatch):
    monkeypatch.setattr(dist, "is_mpi_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "Build torch from source" in refusal({"CPUDIST_BACKEND": "mpi"})
    assert "needs a CUDA device per rank" in refusal({"CPUDIST_BACKEND": "nccl"})


@pytest.mark.parametrize("name", ["shm", "ccl"])
def test_ours_are_refused_where_they_do_not_load(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_cpudist._c10d", None)
    assert "pip install --no-build-isolation" in refusal({"CPUDIST_BACKEND": name})
    assert not backend_choice.shm_loads()


def test_a_server_needs_no_backend(monkeypatch):
    def missing():
        raise cpudist.BackendUnavailableError("missing")

    monkeypatch.setattr(backend_choice, "CHECKS", {"ccl": missing})
    for fields in ({"role_name": "server"}, {"servers": 1}):
        backend_choice.check_early(environment.Environment(backend="ccl", **fields))
    with pytest.raises(cpudist.BackendUnavailableError):
        backend_choice.check_early(environment.Environment(backend="ccl"))


def test_an_unknown_name_is_told_the_nearest():
    with pytest.raises(cpudist.ConfigurationError, match="gloo"):
        environment.parse({"CPUDIST_BACKEND": "glo"})


# -- the runtime of ccl ------------------------------------------------------------


@pytest.fixture
def packages(monkeypatch, tmp_path):
    """Installed packages, by name: release and files."""
    have = {
        "oneccl-cpu": ("2021.16.2", ["lib/libccl.so.1"]),
        "oneccl-cpu-devel": ("2021.16.2", ["include/oneapi/ccl.hpp"]),
        "impi-rt": ("2021.18.1", ["lib/libfabric.so.1"]),
    }

    def distribution(name):
        if name not in have:
            raise importlib.metadata.PackageNotFoundError(name)
        release, files = have[name]
        for file in files:
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).touch()
        return SimpleNamespace(
            files=[Path(file) for file in files],
            version=release,
            locate_file=lambda file: tmp_path / file,
        )

    distribution("impi-rt")
    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    monkeypatch.setattr(
        importlib.metadata, "version", lambda n: distribution(n).version
    )
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.delenv("CCL_OFI_LIBRARY_PATH", raising=False)
    return have


def test_a_whole_runtime_is_found(packages, tmp_path):
    found = ccl_runtime.find()
    assert found.library == tmp_path / "lib/libccl.so.1"
    assert found.include == tmp_path / "include"


@pytest.mark.parametrize(
    ("name", "entry", "says"),
    [
        ("oneccl-cpu", None, "package oneccl-cpu is not installed"),
        ("oneccl-cpu", ("2022.1.2", ["lib/libccl.so.1"]), "2021.14 to 2021.16 work"),
        ("oneccl-cpu", ("2021.17.2", ["lib/libccl.so.1"]), "lack a library"),
        ("oneccl-cpu", ("2021.13.0", ["lib/libccl.so.1"]), "2021.14 to 2021.16 work"),
        ("oneccl-cpu", ("2021.16.2", []), "without its libccl.so.1"),
        ("oneccl-cpu-devel", None, "package oneccl-cpu-devel is not installed"),
    ],
)
def test_what_is_missing_of_the_runtime_is_said(packages, name, entry, says):
    packages.pop(name)
    if entry is not None:
        packages[name] = entry
    with pytest.raises(cpudist.BackendUnavailableError, match=says) as caught:
        ccl_runtime.find()
    assert "pip install oneccl-cpu==2021.16.2 oneccl-cpu-devel" in str(caught.value)


def test_another_processor_is_said(packages, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(cpudist.BackendUnavailableError, match="this is aarch64"):
        ccl_runtime.find()


def test_a_missing_libfabric_is_said(packages, tmp_path):
    (tmp_path / "lib/libfabric.so.1").unlink()
    with pytest.raises(cpudist.BackendUnavailableError, match="impi-rt"):
        ccl_runtime.find()


def test_the_extra_is_what_messages_say():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    extra = project["project"]["optional-dependencies"]["ccl"]
    assert [line.partition(";")[0].strip() for line in extra] == [*ccl_runtime.PINS]


def runtime(tmp_path):
    return ccl_runtime.Runtime("2021.16.2", tmp_path / "libccl.so.1", tmp_path)


def test_a_cache_of_others_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "torch_cpudist").mkdir()
    (tmp_path / "torch_cpudist").chmod(0o777)
    with pytest.raises(cpudist.BackendUnavailableError, match="somebody else"):
        ccl_runtime.shim(runtime(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    with pytest.raises(cpudist.BackendUnavailableError, match="Set XDG_CACHE_HOME"):
        ccl_runtime.shim(runtime(tmp_path))


def test_a_compiler_that_is_missing_or_fails_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(cpudist.BackendUnavailableError, match="is not on PATH"):
        ccl_runtime.shim(runtime(tmp_path))
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(cpudist.BackendUnavailableError, match="cannot compile"):
        ccl_runtime.shim(runtime(tmp_path))
    left = [file.suffix for file in (tmp_path / "cache/torch_cpudist").iterdir()]
    assert left == [".lock"]


# -- the environment of ccl --------------------------------------------------------


def member(rank, host_id, name):
    return Member(rank, 0, 0, "ccl", host_id, name, {"name": name})


def test_the_environment_of_ranks_on_one_host():
    members = [member(rank, "a", "x") for rank in range(2)]
    assert ccl.settings(1, members) == {
        "CCL_ATL_SHM": "1",
        "CCL_ATL_TRANSPORT": "ofi",
        "CCL_LOCAL_RANK": "1",
        "CCL_LOCAL_SIZE": "2",
        "CCL_LOG_LEVEL": "error",
        "CCL_PROCESS_LAUNCHER": "none",
        "CCL_WORKER_OFFLOAD": "0",
        "FI_TCP_IFACE": "lo",
    }


def test_the_environment_between_hosts(monkeypatch):
    hosts = [("a", "x"), ("b", "y"), ("a", "x"), ("b", "y")]
    members = [member(rank, *names) for rank, names in enumerate(hosts)]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7,eth8")
    made = ccl.settings(2, members)
    assert (made["CCL_LOCAL_RANK"], made["CCL_LOCAL_SIZE"]) == ("1", "2")
    assert (made["FI_TCP_IFACE"], made["CCL_ATL_SHM"]) == ("eth7", "1")
    # oneCCL takes hosts of one name for one host.
    same = [member(rank, host_id, "x") for rank, (host_id, _) in enumerate(hosts)]
    assert ccl.settings(2, same)["CCL_ATL_SHM"] == "0"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert "FI_TCP_IFACE" not in ccl.settings(2, members)


def test_ranks_that_are_threads_are_refused():
    store, found = dist.HashStore(), []

    def meet(rank):
        options = SimpleNamespace(
            store=store, group_rank=rank, group_size=2, timeout=PATIENCE
        )
        with pytest.raises(cpudist.BackendUnavailableError) as caught:
            ccl.meet(options, "2021.16.2")
        found.append(str(caught.value))

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(found) == 2
    assert all("a process per rank" in text for text in found)


def test_a_transport_that_needs_mpirun_is_refused(monkeypatch):
    monkeypatch.setenv("CCL_ATL_TRANSPORT", "mpi")
    with pytest.raises(cpudist.BackendUnavailableError, match="only ofi works"):
        ccl.set_environment({})


def test_cpu_parameters_under_nccl_are_refused():
    context = SimpleNamespace(
        trainer_rank=0,
        trainer_count=2,
        server=None,
        backend="nccl",
        process_group=object(),
        environment=environment.Environment(),
    )
    with pytest.raises(cpudist.BackendUnavailableError, match="only sums on CUDA"):
        CollectiveGroup(context, "AllReduce")

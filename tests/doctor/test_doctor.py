# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``python -m torch_cpudist doctor``: what it says of machines, and of this one."""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from patience import PATIENCE_S
from ports import free_port

import torch_cpudist as cpudist
from torch_cpudist.doctor import beats, commands, facts
from torch_cpudist.doctor.echo import Link, answering, time_link
from torch_cpudist.doctor.facts import Facts
from torch_cpudist.doctor.judging import judge, usable

GIB = 1 << 30
# A machine of which there is nothing to say but good.
SOUND = Facts(
    host="sound",
    logical_cores=32,
    physical_cores=16,
    usable_cores=32,
    openmp=("/usr/lib/libgomp.so.1",),
    allocator="jemalloc",
    open_files=65536,
    open_files_most=65536,
    memory={"MemAvailable of the host": 64 * GIB},
    shared_memory_bytes=32 * GIB,
    huge_pages="madvise",
    mtu={"eth0": 9000},
    loopback=Link(20.0, 3e9),
    peers={"10.0.0.2:9500": Link(80.0, 1.1e9)},
    instructions=("avx2", "avx512f", "amx_bf16"),
    kernels="avx512",
)


def test_of_a_sound_machine_there_is_nothing_to_set():
    findings = judge(SOUND)
    assert {finding.level for finding in findings} == {"good"}
    topics = {finding.topic for finding in findings}
    assert topics >= {"cores", "NUMA", "OpenMP", "allocator", "limits", "memory"}
    assert topics >= {"ports", "MTU", "network", "liveness", "vectors", "bfloat16"}
    assert "oneCCL" in topics
    cores = next(finding for finding in findings if finding.topic == "cores")
    assert "16 physical cores, 32 with hyper-threads" in cores.text
    assert "should be 16" in cores.text


@pytest.mark.parametrize(
    ("changed", "level", "topic", "says"),
    [
        ({"usable_cores": 4}, "hint", "cores", "leaves 4 of 16"),
        ({"variables": {"OMP_NUM_THREADS": "32"}}, "problem", "threads", "Unset it"),
        ({"variables": {"CPUDIST_THREADS": "17"}}, "problem", "threads", "at most 16"),
        ({"numa_nodes": 2}, "hint", "NUMA", "Set CPUDIST_PIN=1 and start 2 ranks"),
        ({"load": 9.0}, "problem", "load", "want 9.0 cores of 16"),
        (
            {"openmp": ("/a/libgomp.so.1", "/b/libiomp5.so")},
            "problem",
            "OpenMP",
            "2 runtimes in one process (libgomp.so.1, libiomp5.so)",
        ),
        ({"allocator": "glibc"}, "hint", "allocator", "LD_PRELOAD=libjemalloc"),
        ({"open_files": 1024}, "hint", "limits", "Set ulimit -n 65536"),
        (
            {"open_files": 256, "open_files_most": 512},
            "problem",
            "limits",
            "raise the hard limit, which is 512",
        ),
        ({"processes": 100}, "problem", "limits", "ulimit -u"),
        ({"memory": {"memory.max": GIB // 2}}, "problem", "memory", "512 MiB left"),
        ({"shared_memory_bytes": 64 << 20}, "hint", "memory", "--shm-size"),
        ({"huge_pages": "never"}, "hint", "huge pages", "to madvise"),
        (
            {"ports_asked": (20000, 20003), "ports_taken": (20001,)},
            "problem",
            "ports",
            "somebody has 20001",
        ),
        ({"ports_asked": (40000, 40003)}, "hint", "ports", "Set lower ones"),
        ({"mtu": {"tun0": 1400}}, "hint", "MTU", "tun0 sends packets of 1400"),
        ({"loopback": Link(900.0, 3e9)}, "hint", "network", "Slow for loopback"),
        ({"loopback": Link(20.0, 1e8)}, "hint", "network", "Little for loopback"),
        ({"peers": {"b:1": Link(5000.0, 1e9)}}, "hint", "network", "prefetch"),
        ({"peers": {"b:1": Link(80.0, 1e7)}}, "hint", "network", "wire_dtype"),
        (
            {"late_wake_s": 0.7},
            "hint",
            "liveness",
            "woke up to 700 ms late beside busy cores; who is silent for 3000 ms",
        ),
        ({"late_wake_s": 2.6}, "problem", "liveness", "Set CPUDIST_LIVENESS_MS=26000 "),
        (
            {"late_wake_s": 0.07, "liveness_ms": 100},
            "problem",
            "liveness",
            "Set CPUDIST_LIVENESS_MS=1000 ",
        ),
        ({"kernels": "scalar"}, "hint", "vectors", "run at scalar"),
        ({"instructions": ("avx2",)}, "hint", "bfloat16", "stay with float32"),
        ({"variables": {"CPUDIST_BACKEND": "ccl"}}, "problem", "oneCCL", "extra ccl"),
    ],
)
def test_what_is_amiss_is_said_with_what_to_set(changed, level, topic, says):
    findings = [one for one in judge(replace(SOUND, **changed)) if one.level != "good"]
    assert [(one.level, one.topic) for one in findings] == [(level, topic)]
    assert says in findings[0].text


def test_what_is_set_already_is_not_asked_for():
    pinned = replace(SOUND, numa_nodes=2, variables={"CPUDIST_PIN": "1"})
    assert {finding.level for finding in judge(pinned)} == {"good"}
    few = replace(SOUND, usable_cores=8, variables={"OMP_NUM_THREADS": "8"})
    assert usable(few) == 8
    assert [one.topic for one in judge(few) if one.level != "good"] == ["cores"]


@pytest.mark.parametrize(
    ("preload", "level"),
    [
        ("/b/libiomp5.so", "good"),
        ("/x/libjemalloc.so.2:libiomp5.so", "good"),
        ("/opt/compilers/libjemalloc.so:/x/libiomp5.so", "good"),
        ("/opt/compilers/libompi.so:/x/libiomp5.so", "good"),
        ("/a/libgomp.so.1 /b/libiomp5.so", "problem"),
        ("/x/libjemalloc.so.2", "problem"),
        ("/c/libiomp5.so.that.is.not.there", "problem"),
    ],
)
def test_a_runtime_that_is_preloaded_takes_the_calls_of_libgomp(preload, level):
    machine = replace(
        SOUND,
        openmp=("/a/libgomp.so.1", "/b/libiomp5.so"),
        variables={"LD_PRELOAD": preload},
    )
    (found,) = [one for one in judge(machine) if one.topic == "OpenMP"]
    assert found.level == level
    assert ("libiomp5.so, which was preloaded" in found.text) == (level == "good")


def test_files_of_the_kernel_are_read(tmp_path):
    maps = (
        "7f00-7f01 r-xp 0 08:01 1 /opt/torch/lib/libgomp-a34b3233.so.1\n"
        "7f01-7f02 r--p 0 08:01 1 /opt/torch/lib/libgomp-a34b3233.so.1\n"
        "7f02-7f03 r-xp 0 08:01 2 /opt/my libs/libiomp5.so\n"
        "7f03-7f04 r-xp 0 08:01 3 /usr/lib/libompi.so\n"
        "7f04-7f05 rw-p 0 00:00 0 [heap]\n"
    )
    found = facts.loaded(maps, facts.OPENMP)
    assert found == (
        "/opt/torch/lib/libgomp-a34b3233.so.1",
        "/opt/my libs/libiomp5.so",
    )
    cpuinfo = "processor\t: 0\nflags\t\t: fpu avx2 avx512f amx_bf16\n"
    assert facts.instructions(cpuinfo) == ("avx2", "avx512f", "amx_bf16")
    assert facts.instructions("") == ()
    assert facts.chosen("always [madvise] never\n") == "madvise"
    assert facts.chosen("") == ""
    for name, size, state in (("eth0", 1500, "up"), ("down0", 9000, "down")):
        folder = tmp_path / "sys/class/net" / name
        folder.mkdir(parents=True)
        (folder / "mtu").write_text(f"{size}\n")
        (folder / "operstate").write_text(f"{state}\n")
    assert facts.interfaces(tmp_path) == {"eth0": 1500}
    assert facts.given_ports(tmp_path) == (32768, 60999)
    (tmp_path / "proc/sys/net/ipv4").mkdir(parents=True)
    (tmp_path / "proc/sys/net/ipv4/ip_local_port_range").write_text("1024\t2048\n")
    assert facts.given_ports(tmp_path) == (1024, 2048)


def test_ports_that_somebody_has_are_found():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert facts.taken_ports(port, port) == (port,)
    assert facts.taken_ports(0, 0) == ()


def test_who_answers_reads_no_more_than_it_is_made_for():
    with answering("127.0.0.1", 0) as port:
        with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as link:
            link.sendall(b"\xff" * 8)
            assert link.recv(1) == b""  # the link is ended
        found = time_link("127.0.0.1", port)
        assert found.round_trip_us > 0
        assert found.bytes_per_s > 0
    with pytest.raises(cpudist.AddressError, match="doctor --listen"):
        time_link("127.0.0.1", port)
    with answering("127.0.0.1", 0) as port:
        with pytest.raises(cpudist.AddressError, match="cannot listen"):
            with answering("127.0.0.1", port):
                pass


def test_a_thread_that_is_held_up_wakes_late(monkeypatch):
    def held_up(seconds):
        turns.append(seconds)
        sleep(seconds + (0.2 if len(turns) == 2 else 0))

    turns, sleep = [], time.sleep
    monkeypatch.setattr(
        beats, "time", SimpleNamespace(monotonic=time.monotonic, sleep=held_up)
    )
    before = threading.active_count()
    assert 0.2 <= beats.latest_wake_s(0.25) < PATIENCE_S
    assert threading.active_count() == before


def test_cores_compute_meanwhile():
    began = time.thread_time(), time.process_time()
    with beats.computing():
        deadline = time.monotonic() + PATIENCE_S
        while time.process_time() - began[1] < 0.05:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert time.thread_time() - began[0] < 0.05


def test_this_machine_is_looked_at(capsys, monkeypatch):
    port = free_port()
    monkeypatch.setenv("CPUDIST_PORTS", f"{port}-{port}")
    monkeypatch.setenv("CPUDIST_LIVENESS_MS", "7000")
    with answering("127.0.0.1", 0) as peer:
        status = commands.main(["--json", "--peer", f"127.0.0.1:{peer}"])
    found = json.loads(capsys.readouterr().out)
    there = found["facts"]
    assert there["logical_cores"] == len(os.sched_getaffinity(0))
    assert 1 <= there["physical_cores"] <= there["logical_cores"]
    assert there["ports_asked"] == [port, port]
    assert there["variables"]["CPUDIST_PORTS"] == f"{port}-{port}"
    assert there["liveness_ms"] == 7000
    assert 0 < there["late_wake_s"] < PATIENCE_S
    assert there["loopback"]["round_trip_us"] > 0
    assert there["peers"][f"127.0.0.1:{peer}"]["bytes_per_s"] > 0
    assert any("gomp" in path or "omp" in path for path in there["openmp"])
    problems = [one for one in found["findings"] if one["level"] == "problem"]
    assert status == (1 if problems else 0)


def test_it_is_a_command_of_the_package(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["torch_cpudist", "doctor"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("torch_cpudist", run_name="__main__")
    assert ended.value.code in (0, 1)
    said = capsys.readouterr().out
    assert "physical cores" in said
    assert said.splitlines()[-1] in ("Nothing to mend.",) or "to mend first" in said
    monkeypatch.setattr(sys, "argv", ["torch_cpudist", "nurse"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("torch_cpudist", run_name="__main__")
    assert ended.value.code == 2
    assert "usage: python -m torch_cpudist doctor" in capsys.readouterr().out


def test_what_it_is_told_wrongly_is_an_error(capsys, monkeypatch):
    for given in (["--peer", "host"], ["--listen", "a:0"], ["--listen", "a:70000"]):
        with pytest.raises(SystemExit) as ended:
            commands.main(given)
        assert ended.value.code == 2
    capsys.readouterr()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert commands.main(["--listen", f"127.0.0.1:{port}"]) == 2
    assert "AddressError: doctor: cannot listen" in capsys.readouterr().err
    monkeypatch.setenv("CPUDIST_PORTS", "high")
    assert commands.main([]) == 2
    assert "ConfigurationError" in capsys.readouterr().err

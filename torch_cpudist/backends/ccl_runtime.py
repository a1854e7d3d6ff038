# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Finds the oneCCL runtime that is installed, and compiles the shim that calls it.

oneCCL's C++ interface needs its headers and its release: the shim, a few functions of
C, is compiled from this package's source when it is first used, into a folder of the
user, and is found there from then on. The runtime is only ever a package of its own.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import platform
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch_cpudist.errors import BackendUnavailableError
from torch_cpudist.log import logger

_PACKAGE, _HEADERS, _FABRIC = "oneccl-cpu", "oneccl-cpu-devel", "impi-rt"
# What the extra `ccl` of this package installs.
PINS = (
    f"{_PACKAGE}==2021.16.2",
    f"{_HEADERS}==2021.16.2",
    f"{_FABRIC}>=2021.16,<2021.19",
)
_INSTALL = (
    f"Run: pip install {' '.join(PINS[:2])} '{PINS[2]}' (the extra ccl of this "
    "package), or set CPUDIST_BACKEND=auto, shm or gloo"
)
# Later ones need a library that only the package for GPUs has, or one that no package
# has; earlier ones pin another libfabric.
_FIRST, _BEYOND = (2021, 14), (2021, 17)
_SOURCE = Path(__file__).parent / "ccl_shim"
_COMPILE_S = 120.0


@dataclass(frozen=True)
class Runtime:
    """Where oneCCL lies.

    Attributes:
        release: such as ``"2021.16.2"``.
        library: of oneCCL.
        include: folder of its headers.
    """

    release: str
    library: Path
    include: Path


def _file_of(package: str, name: str) -> Path | None:
    """The installed file of a package that ends in ``name``."""
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in distribution.files or ():
        if str(file).endswith(name):
            path = Path(str(distribution.locate_file(file))).resolve()
            if path.is_file():
                return path
    return None


def _release() -> str:
    if platform.machine() not in ("x86_64", "AMD64"):
        raise BackendUnavailableError(
            f"backend ccl: oneCCL's packages are for x86-64, this is "
            f"{platform.machine()}. Set CPUDIST_BACKEND=auto, shm or gloo."
        )
    try:
        return importlib.metadata.version(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise BackendUnavailableError(
            f"backend ccl needs the oneCCL runtime, and the package {_PACKAGE} is not "
            f"installed. {_INSTALL}."
        ) from None


def find() -> Runtime:
    """Finds what is installed. Reads package lists only.

    Raises:
        BackendUnavailableError: something is missing, or a release does not work.
    """
    release = _release()
    parts = release.split(".")
    numbers = tuple(int(part) if part.isdigit() else 0 for part in parts[:2])
    if not _FIRST <= numbers < _BEYOND:
        raise BackendUnavailableError(
            f"backend ccl: {_PACKAGE} {release} is installed. 2021.14 to 2021.16 work; "
            "of the later ones the CPU packages lack a library that they link. "
            f"{_INSTALL}."
        )
    library = _file_of(_PACKAGE, "libccl.so.1")
    if library is None:
        raise BackendUnavailableError(
            f"backend ccl: {_PACKAGE} {release} is installed without its libccl.so.1. "
            f"{_INSTALL}."
        )
    header = _file_of(_HEADERS, "oneapi/ccl.hpp")
    if header is None:
        raise BackendUnavailableError(
            f"backend ccl needs oneCCL's headers, and the package {_HEADERS} is not "
            f"installed. {_INSTALL}."
        )
    fabric = library.parent / "libfabric.so.1"
    if not fabric.is_file() and "CCL_OFI_LIBRARY_PATH" not in os.environ:
        raise BackendUnavailableError(
            f"backend ccl: oneCCL needs libfabric.so.1 beside {library}, where the "
            f"package {_FABRIC} puts it, or CCL_OFI_LIBRARY_PATH. {_INSTALL}."
        )
    return Runtime(release, library, header.parent.parent)


def _cache() -> Path:
    """The user's folder for compiled shims, which nobody else may write."""
    try:
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(root) / "torch_cpudist"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except (OSError, RuntimeError) as error:
        raise BackendUnavailableError(
            "backend ccl compiles a small library into the user's cache, which cannot "
            f"be made ({error}). Set XDG_CACHE_HOME to a folder that you may write."
        ) from error
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BackendUnavailableError(
            f"backend ccl: {folder} belongs to, or can be written by, somebody else, "
            "and a library in it would be loaded. Make it yours (chmod go-w), or set "
            "XDG_CACHE_HOME."
        )
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock file: of the ranks of a host, one compiles."""
    deadline = time.monotonic() + _COMPILE_S
    with path.open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BackendUnavailableError(
                        f"backend ccl: another process has held {path} for "
                        f"{_COMPILE_S:g} s. End it, and start again."
                    ) from None
                time.sleep(0.05)
        yield


def _compiler() -> str:
    asked = os.environ.get("CXX", "g++")
    found = shutil.which(asked)
    if found is None:
        raise BackendUnavailableError(
            f"backend ccl compiles a small library when it is first used, and {asked} "
            "is not on PATH. Install g++ 12 or newer, or set CXX."
        )
    return found


def _compile(compiler: str, runtime: Runtime, output: Path) -> None:
    began = time.monotonic()
    made = output.with_suffix(f".{os.getpid()}.new")
    command = [
        *(compiler, "-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden"),
        *("-isystem", str(runtime.include), str(_SOURCE / "shim.cpp")),
        *("-o", str(made), str(runtime.library)),
        f"-Wl,-rpath,{runtime.library.parent}",
    ]
    try:
        done = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, timeout=_COMPILE_S, check=False
        )
        if done.returncode != 0:
            raise BackendUnavailableError(
                f"backend ccl: {compiler} cannot compile {_SOURCE / 'shim.cpp'} "
                f"against {_HEADERS}: {done.stderr.strip()[:2000]}"
            )
        made.replace(output)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendUnavailableError(
            f"backend ccl: {compiler} did not compile the shim ({error})."
        ) from error
    finally:
        made.unlink(missing_ok=True)
    logger.info(
        "ccl: %s compiled in %.1f s", output, round(time.monotonic() - began, 1)
    )


def shim(runtime: Runtime) -> Path:
    """The library that calls this runtime; compiled if it was not before.

    Takes a few seconds the first time. Safe with any number of processes.

    Raises:
        BackendUnavailableError: no compiler, or no folder to write.
    """
    folder, compiler = _cache(), _compiler()
    digest = hashlib.sha256()
    for source in sorted(_SOURCE.glob("shim.*")):
        digest.update(source.read_bytes())
    for text in (runtime.release, runtime.library, runtime.include, compiler):
        digest.update(f"\0{text}".encode())
    output = folder / f"ccl_shim-{digest.hexdigest()[:20]}.so"
    if not output.is_file():
        with _locked(output.with_suffix(".lock")):
            if not output.is_file():
                _compile(compiler, runtime, output)
    return output

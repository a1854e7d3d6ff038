# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Builds the compiled core, the backends, native tests and fuzzers with ninja.

`extension` makes torch_cpudist/_core.*.so and torch_cpudist/_c10d.*.so, `tests` makes
build/<variant>/native_tests, `fuzz` makes build/fuzz/<target>. All write a build.ninja
with dependency files, so a rebuild compiles what changed and nothing else. A source may
ask for flags of its own in its first lines: `// build-flags: -mavx2` (x86-64 only).
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from sources import file_flags, merged, merged_by_word, sources_in, tests_threads
from toolchain import (
    BuildError,
    Torch,
    find_compiler,
    find_ninja,
    find_torch,
    python_include,
    write_if_changed,
)

ROOT = Path(__file__).resolve().parent.parent
WARNINGS = ["-Wall", "-Wextra", "-Werror"]
COMMON = ["-fPIC", "-std=c++20", "-ffp-contract=off", "-fvisibility=hidden", "-pthread"]
# Lets ccache, where CXX names it, cache what is compiled with a precompiled header.
COMMON += ["-fpch-preprocess"]
RELEASE = ["-O3", "-DNDEBUG"]
SANITIZERS = {"address,undefined": "asan", "thread": "tsan"}
# What the fuzzed parsers and decoders need.
FUZZED = (
    *("data/parse/*", "data/read/batch", "wire/*", "wire/codec/*", "base/*"),
    *("kernels/*", "kernels/levels/*"),
)
LINK = ["-shared", "-pthread", "-Wl,--as-needed", "-Wl,-rpath,$$ORIGIN/../torch/lib"]
SHIM = "shim"
LOCK_DEADLINE_S = 900


@dataclass(frozen=True)
class Objects:
    """Sources that are compiled alike, once for all targets that link them.

    gcc compiles `precompiled`, a header, once and reads it before each of them. With
    `merge`, those whose names begin with the same word are compiled as one.
    """

    sources: list[Path]
    flags: list[str]
    precompiled: Path | None = None
    merge: bool = False


@dataclass(frozen=True)
class Target:
    """One thing to link."""

    build_dir: Path
    output: Path
    objects: list[Objects]
    link_flags: list[str]
    libraries: list[str]


def core_objects(flags: list[str]) -> Objects:
    """Describe what knows nothing of torch: kernels, core, data, backends' engines."""
    csrc = ROOT / "csrc"
    folders = ("base", "kernels", "wire", "transport", "table", "server", "client")
    folders += ("data", "backends/shm")
    sources = sources_in(*(csrc / folder for folder in folders))
    sources += [csrc / f"backends/ccl/{name}.cpp" for name in ("engine", "group")]
    # What is worked on is compiled alone, so that a rebuild takes seconds.
    merge = flags != RELEASE
    flags = [*COMMON, *WARNINGS, *flags, f"-I{csrc}"]
    return Objects(sources, flags, csrc / "precompiled/standard.h", merge)


def release_dir() -> Path:
    """Return the folder of what is built to be used, and of its tests."""
    return ROOT / "build" / f"release-{sysconfig.get_config_var('SOABI')}"


def extension_target(output: Path, torch: Torch) -> Target:
    """Describe the extension module, written to `output`."""
    csrc = ROOT / "csrc"
    # pybind11's casters cost 8 s a file, precompiled or not.
    bind = merged(release_dir() / "bind.cpp", sources_in(csrc / "bind"))
    sources = [bind, csrc / "library.cpp", *sources_in(csrc / "ops")]
    flags = [*COMMON, *WARNINGS, *RELEASE, f"-I{csrc}"]
    flags += [f"-DTORCH_TARGET_VERSION={torch.target_version}"]
    flags += ["-isystem", str(torch.root / "include")]
    flags += ["-isystem", str(python_include())]
    objects = [Objects(sources, flags), core_objects(RELEASE)]
    # The interpreter loads torch's libraries before this module, so the loader finds
    # them by name; the run path serves tools that load the module by itself.
    libraries = [f"-L{torch.root / 'lib'}", "-ltorch_cpu", "-lc10"]
    return Target(release_dir(), output, objects, LINK, libraries)


def backends_target(output: Path, torch: Torch) -> Target:
    """Describe the module of the c10d backends, written to `output`.

    It uses torch's own C++ classes, which change with every minor release; that is why
    it is a module of its own, without which all else works.
    """
    csrc = ROOT / "csrc"
    include = torch.root / "include"
    flags = [*COMMON, *WARNINGS, *RELEASE, f"-I{csrc}"]
    for folder in (include, include / "torch/csrc/api/include", python_include()):
        flags += ["-isystem", str(folder)]
    core = core_objects(RELEASE)
    # The shim is compiled where it is used, against the oneCCL that is installed there.
    others = [one for one in sources_in(csrc / "backends") if one.parent.name != SHIM]
    sources = [one for one in others if one not in core.sources]
    libraries = [f"-L{torch.root / 'lib'}", "-ltorch_python", "-ltorch"]
    libraries += ["-ltorch_cpu", "-lc10"]
    own = Objects(sources, flags, csrc / "precompiled/torch.h")
    objects = [own, core]
    return Target(release_dir(), output, objects, LINK, libraries)


def tests_target(sanitize: str | None) -> Target:
    """Describe the native test program, without torch.

    Not instrumented, it tests the objects that the extension modules are made of.
    """
    native = ROOT / "tests" / "native"
    # What tests do is soon done; compiling them is not. No -O for them, and of their
    # own undefined behaviour only what breaks memory is looked for.
    flags = [*COMMON, *WARNINGS, f"-I{ROOT / 'csrc'}", f"-I{native}", "-O0"]
    if sanitize is None:
        build_dir, core, link = release_dir(), core_objects(RELEASE), ["-pthread"]
    else:
        build_dir = ROOT / "build" / SANITIZERS[sanitize]
        # Instrumented code trips gcc's flow analysis and its own note on atomic fences.
        always = ["-g1", "-fno-omit-frame-pointer", "-Wno-array-bounds"]
        always += ["-Wno-maybe-uninitialized", "-Wno-stringop-overflow"]
        always += ["-Wno-tsan"] if sanitize == "thread" else []
        instrument = [f"-fsanitize={sanitize}", "-fno-sanitize-recover=all"]
        core = core_objects(["-O1", *always, *instrument])
        flags += [*always, f"-fsanitize={sanitize.partition(',')[0]}"]
        link = ["-pthread", *instrument]
    # Without the tests that tell a thread sanitizer nothing.
    sources = [
        source
        for source in sources_in(native)
        if sanitize != "thread" or tests_threads(source)
    ]
    own = Objects(sources, flags, native / "precompiled/tests.h", merge=True)
    objects = [own, core]
    return Target(build_dir, build_dir / "native_tests", objects, link, [])


def fuzz_targets() -> list[Target]:
    """Describe the fuzzers of the parsers, one program per file of tests/fuzz.

    What they test is instrumented, also so that their driver learns which code an input
    reached; they themselves are not, so that they are fast.
    """
    folder, csrc = ROOT / "tests" / "fuzz", ROOT / "csrc"
    base = [*COMMON, *WARNINGS, f"-I{csrc}", "-g1", "-fno-omit-frame-pointer"]
    sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    tested = [path for one in FUZZED for path in sorted(csrc.glob(f"{one}.cpp"))]
    instrument = ["-O1", "-Wno-maybe-uninitialized", "-fsanitize-coverage=trace-pc"]
    parsers = Objects(tested, [*base, *instrument, *sanitize], merge=True)
    build_dir = ROOT / "build" / "fuzz"
    targets = []
    for source in sources_in(folder):
        if source.stem == "driver":
            continue
        own = Objects([source, folder / "driver.cpp"], [*base, "-O1"])
        link = ["-pthread", *sanitize]
        output = build_dir / source.stem
        targets.append(Target(build_dir, output, [own, parsers], link, []))
    return targets


def escape(path: Path | str) -> str:
    """Quote a path for build.ninja."""
    return re.sub(r"([$ :])", r"$\1", str(path))


def object_path(target: Target, source: Path, suffix: str = ".o") -> str:
    """Return where what a source is compiled to is, for build.ninja."""
    relative = source.relative_to(ROOT).with_suffix(suffix)
    return escape(target.build_dir / "obj" / relative)


def precompiles(compiler: str) -> bool:
    """Return whether the compiler is gcc: others precompile headers differently."""
    done = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, timeout=30, check=False
    )
    return "Free Software Foundation" in done.stdout


RULES = """\
rule compile
  command = $cxx -MMD -MF $out.d $flags -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = compile $in
rule precompile
  command = $cxx -MD -MF $out.d $flags -x c++-header $in -o $out
  depfile = $out.d
  deps = gcc
  description = precompile $in
rule link
  # Written beside and moved, so that a process with the old file mapped keeps it.
  command = $cxx $flags -o $out.new $in $libraries && mv -f $out.new $out
  description = link $out"""


def compile_lines(target: Target, group: Objects, said: set[str]) -> Iterator[str]:
    """Yield the lines for a group of sources, save outputs that were said before."""
    read, needed = [], ""
    if group.precompiled is not None:
        header = object_path(target, group.precompiled, ".h.gch")
        # There is no such header beside it: what does not fit is an error.
        read = ["-include", header.removesuffix(".gch"), "-Winvalid-pch"]
        needed = f" | {header}"
        if header not in said:
            said.add(header)
            yield f"build {header}: precompile {escape(group.precompiled)}"
            yield f"  flags = {' '.join(group.flags)}"
    for source in group.sources:
        built = object_path(target, source)
        if built in said:
            continue
        said.add(built)
        own = file_flags(source)
        # A header is precompiled for one set of flags.
        yield f"build {built}: compile {escape(source)}{'' if own else needed}"
        yield f"  flags = {' '.join(group.flags + (own or read))}"


def ninja_lines(targets: Sequence[Target], compiler: str) -> Iterator[str]:
    """Yield the lines of build.ninja, for targets of one build_dir."""
    yield f"cxx = {compiler}"
    yield RULES
    said: set[str] = set()
    use_precompiled = precompiles(compiler)
    for target in targets:
        linked = []
        for group in target.objects:
            if group.merge:
                folder = target.build_dir / "merged"
                units = merged_by_word(group.sources, folder, ROOT)
                group = replace(group, sources=units)
            if not use_precompiled:
                group = replace(group, precompiled=None)
            linked += [object_path(target, source) for source in group.sources]
            yield from compile_lines(target, group, said)
        yield f"build {escape(target.output)}: link {' '.join(linked)}"
        yield f"  flags = {' '.join(target.link_flags)}"
        yield f"  libraries = {' '.join(target.libraries)}"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder's lock: two ninjas in one folder would break each other's log.

    Raises:
        BuildError: another build holds it for LOCK_DEADLINE_S.
    """
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + LOCK_DEADLINE_S
    with (folder / ".lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BuildError(
                        f"another build has held {folder / '.lock'} for "
                        f"{LOCK_DEADLINE_S} s; wait for it or end it, then try again"
                    ) from None
                time.sleep(0.1)
        yield


def run_ninja(*targets: Target) -> None:
    """Build targets of one build_dir with as many jobs as cores (or MAX_JOBS).

    Raises:
        BuildError: a compiler or linker failed; its messages are on standard error.
    """
    compiler, ninja = find_compiler(), find_ninja()
    jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
    folder = targets[0].build_dir
    with locked(folder):
        for target in targets:
            target.output.parent.mkdir(parents=True, exist_ok=True)
        write_if_changed(folder / "build.ninja", ninja_lines(targets, compiler))
        command = [ninja, "-C", str(folder), "-j", jobs, "--quiet"]
        if subprocess.run(command, stdout=sys.stderr, check=False).returncode != 0:
            names = ", ".join(target.output.name for target in targets)
            raise BuildError(f"building {names} failed, see above")


def build_extension(package_dir: Path) -> list[Path]:
    """Build both extension modules into a package folder and record their torch.

    Raises:
        BuildError: something needed is missing, or the build failed.
    """
    torch = find_torch()
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    # The slowest files to compile come first, so that none is left at the end.
    targets = [
        backends_target(package_dir / f"_c10d{suffix}", torch),
        extension_target(package_dir / f"_core{suffix}", torch),
    ]
    run_ninja(*targets)
    shim = package_dir / "backends" / "ccl_shim"
    for source in sorted((ROOT / "csrc/backends/ccl" / SHIM).iterdir()):
        text = source.read_text(encoding="utf-8")
        write_if_changed(shim / source.name, text.splitlines())
    info = [
        "# Copyright (c) 2026 The torch_cpudist authors.",
        "# SPDX-License-Identifier: BSD-3-Clause",
        '"""Written by the build: what the compiled core was built against."""',
        "",
        f'TORCH_VERSION = "{torch.version}"',
    ]
    write_if_changed(package_dir / "_build_info.py", info)
    return [target.output for target in targets]


def build_tests(sanitize: str | None) -> Path:
    """Build the native tests and return the program.

    Raises:
        BuildError: something needed is missing, or the build failed.
    """
    target = tests_target(sanitize)
    run_ninja(target)
    return target.output


def build_fuzzers() -> list[Path]:
    """Build the fuzzers and return the programs.

    Raises:
        BuildError: something needed is missing, or the build failed.
    """
    targets = fuzz_targets()
    run_ninja(*targets)
    return [target.output for target in targets]


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["extension", "tests", "fuzz"])
    parser.add_argument(
        "--sanitize", choices=sorted(SANITIZERS), help="instrument the native tests"
    )
    arguments = parser.parse_args()
    if arguments.what != "tests" and arguments.sanitize:
        parser.error("--sanitize is for the native tests only")
    try:
        if arguments.what == "extension":
            print(*build_extension(ROOT / "torch_cpudist"), sep="\n")
        elif arguments.what == "fuzz":
            print(*build_fuzzers(), sep="\n")
        else:
            print(build_tests(arguments.sanitize))
    except BuildError as error:
        print(f"native_build: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

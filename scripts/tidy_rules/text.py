# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Rules of every text file: blanks, ends, banned words, lengths, license lines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tidy_rules import NATIVE, PYTHON, TEXT, Violation

# A longer file says in its first lines why: `// long: one class`.
FILE_LINES = 400
MOST_FILE_LINES = 900
LONG = re.compile(r"(?m)^(?:#|//) long: \S")
HEAD_LINES = 5
COLUMNS = {".cpp": 100, ".h": 100, ".sh": 100}
LICENSE = (
    "Copyright (c) 2026 The torch_cpudist authors.",
    "SPDX-License-Identifier: BSD-3-Clause",
)
# These two spell the banned words out.
SPELLS_RULES = {"scripts/tidy_rules/text.py", "tests/scripts/test_tidy.py"}


@dataclass(frozen=True)
class Banned:
    """A pattern that must not occur, in which files, and why."""

    rule: str
    pattern: re.Pattern[str]
    why: str
    suffixes: frozenset[str]
    folders: tuple[str, ...] = ("",)
    but: tuple[str, ...] = ()  # files and folders

    def concerns(self, name: str) -> bool:
        """Tell whether a file must be without the pattern."""
        if name.startswith(self.but) or name in SPELLS_RULES:
            return False
        return Path(name).suffix in self.suffixes and name.startswith(self.folders)


def banned(
    rule: str,
    pattern: str,
    why: str,
    suffixes: set[str],
    *folders: str,
    but: Iterable[str] = (),
) -> Banned:
    """Make one entry of the table below."""
    where = folders or ("",)
    found = re.compile(pattern, re.MULTILINE)
    return Banned(rule, found, why, frozenset(suffixes), where, tuple(but))


RUNTIME = ("torch_cpudist/", "csrc/", "examples/")
# Hands code to processes that it starts.
HANDS_CODE = "torch_cpudist/launcher.py"
# Of csrc, those that are made of torch and Python.
OF_TORCH = ("csrc/ops/", "csrc/bind/", "csrc/backends/c10d/", "csrc/library.cpp")
# csrc/base is the one seam through which csrc reads a clock, waits, starts threads and
# touches files, so that tests can put other times and failing disks under all of it.
SEAM = "csrc/base/"
# What waits for no thread and no time, but for the system: no test puts another one
# under it.
WAITS_FOR_THE_SYSTEM = {
    "csrc/backends/shm/futex.h": "words that other processes change",
    "csrc/bind/gil.h": "threads that Python has ended, which must never go on",
    "csrc/data/read/command_output.cpp": "pipes of a command",
    "csrc/transport/tcp/prove.cpp": "a socket",
    "csrc/transport/tcp/reactor.cpp": "sockets",
    "csrc/transport/tcp/socket.cpp": "a socket",
}
# Descriptors of no file.
READS_NO_FILE = {
    "csrc/data/read/command_output.cpp": "pipes",
    "csrc/data/read/waiting.cpp": "an eventfd",
    "csrc/transport/tcp/reactor.cpp": "an eventfd",
}
FILE_CALLS = (
    r"(?:openat|creat|p(?:read|write)v?|f(?:data)?sync|rename(?:at2?)?|unlink(?:at)?"
    r"|mkdir(?:at)?|rmdir|mkstemp)"
)
BANNED = (
    banned(
        "pickle",
        r"^\s*(?:from|import)\s+(?:cloud)?pickle\b|\bpickle\.(?:loads?|dumps?)\b",
        "bytes from elsewhere must not run code",
        PYTHON,
        *RUNTIME,
        but=(HANDS_CODE,),
    ),
    banned("pickle", r"weights_only\s*=\s*False", "use weights_only=True", PYTHON),
    banned(
        "pickle",
        r"\btorch\.(?:save|load)\(",
        "snapshots are JSON and tensors",
        PYTHON,
        "torch_cpudist/snapshot/",
        "torch_cpudist/optimizer/",
    ),
    banned("pickle", r"allow_pickle\s*=\s*True", "use allow_pickle=False", PYTHON),
    banned(
        "pickle",
        r"\b(?:broadcast_object_list|all_gather_object|gather_object"
        r"|scatter_object_list|(?:send|recv)_object_list)\b",
        "object collectives pickle; send tensors",
        PYTHON,
        *RUNTIME,
    ),
    banned(
        "eval",
        r"(?<![\w.])(?:eval|exec)\(",
        "bytes from elsewhere must not run code",
        PYTHON,
        *RUNTIME,
    ),
    banned(
        "bind-all",
        r"\b0\.0\.0\.0\b|\bINADDR_ANY\b",
        "listen on one named address",
        PYTHON | NATIVE,
        *RUNTIME,
    ),
    banned(
        "include",
        r"#\s*include\s*[<\"]torch/extension\.h",
        "costs 80 s and 1.6 GB a file; use the stable ABI",
        NATIVE,
    ),
    banned(
        "include",
        r"#\s*include\s*[<\"](?:torch|ATen|c10|pybind11|Python\.h)",
        "the core and the kernels know nothing of torch or Python",
        NATIVE,
        "csrc/",
        "tests/native/",
        but=OF_TORCH,
    ),
    banned(
        "seam",
        r"\b(?:steady|system|high_resolution|utc|tai|gps|file)_clock\b"
        r"|\bclock_gettime\(|\bgettimeofday\(|std::(?:time|clock)\("
        r"|(?<![\w:>.])::time\(|\btime\((?:nullptr|NULL|0)\)",
        "read the time by base/clock.h",
        NATIVE,
        "csrc/",
        but=(SEAM,),
    ),
    banned(
        "seam",
        r"std::condition_variable|\bsleep_(?:for|until)\(|\b(?:u|nano)?sleep\("
        r"|std::(?:shared_)?future\b|std::(?:promise|packaged_task)\b"
        r"|std::(?:counting_semaphore|binary_semaphore|latch|barrier)\b"
        r"|\bsem_\w*wait\(|\bpthread_cond_|\bSYS_futex\b|(?<![\w:>.])::pause\("
        r"|\b(?:p?poll|p?select|epoll_p?wait2?)\((?!\))",
        "wait by base/wait.h",
        NATIVE,
        "csrc/",
        but=(SEAM, *WAITS_FOR_THE_SYSTEM),
    ),
    banned(
        "seam",
        r"std::thread(?:\s+\w+)?\s*[({]|std::(?:jthread|async)\b|\bpthread_create\(",
        "start threads by base/threads.h",
        NATIVE,
        "csrc/",
        but=(SEAM,),
    ),
    banned(
        "seam",
        # A member may be called as the shorter ones of them.
        rf"(?<![\w:>.])(?:std::|::)?{FILE_CALLS}\((?!\))"
        r"|(?<![\w:>.])::(?:open|read|write)\(|(?<![\w:>.])open\([^;]*\bO_[A-Z]"
        r"|(?<![\w:>.])(?:read|write)\((?:\w*fd|\w*descriptor_?|[\w.>-]+\.get\(\)),"
        r"|std::[io]?fstream\b|std::filesystem\b|\bf(?:re)?open\(|\btmpfile\(",
        "touch files by base/files.h",
        NATIVE,
        "csrc/",
        but=(SEAM, *READS_NO_FILE),
    ),
    banned("fast-math", r"-ffast-math\b", "results must be bit-equal", TEXT - {".md"}),
    banned("unfinished", r"\b(?:TODO|FIXME|XXX)\b", "finish it or leave it out", TEXT),
    banned(
        "machine-path",
        r"(?<![\w.$}/])/(?:root|home|work|Users|farm)/\w",
        "a path of one machine",
        TEXT,
    ),
)


def check_text(name: str, text: str) -> Iterator[Violation]:
    """Check what holds for every text file: blanks, ends, banned words."""
    suffix = Path(name).suffix
    if text and not text.endswith("\n"):
        last = text.count("\n") + 1
        yield Violation(name, last, "end", "the last line has no newline")
    # What is in no line is not looked for in each.
    concerning = (ban for ban in BANNED if ban.concerns(name))
    bans = [ban for ban in concerning if ban.pattern.search(text)]
    for number, line in enumerate(text.split("\n"), start=1):
        if line != line.rstrip() and suffix != ".md":
            yield Violation(name, number, "blank", "trailing blanks")
        if "\t" in line:
            yield Violation(name, number, "blank", "a tab")
        if len(line) > COLUMNS.get(suffix, len(line)):
            what = f"{len(line)} columns, at most {COLUMNS[suffix]}"
            yield Violation(name, number, "columns", what)
        for ban in bans:
            if found := ban.pattern.search(line):
                what = f"{found.group().strip()!r}: {ban.why}"
                yield Violation(name, number, ban.rule, what)


def check_size(name: str, text: str) -> Iterator[Violation]:
    """Check the length of a source file."""
    lines = text.split("\n")
    explained = LONG.search("\n".join(lines[:HEAD_LINES])) is not None
    most = MOST_FILE_LINES if explained else FILE_LINES
    if len(lines) - 1 > most:
        what = f"{len(lines) - 1} lines, at most {most}"
        if not explained:
            what += ", or a reason (`long: …`) in the first lines"
        yield Violation(name, most + 1, "file-lines", what)


def check_license(name: str, text: str) -> Iterator[Violation]:
    """Check the two comment lines at the top, after a `#!` line."""
    lines = text.split("\n")
    first = 1 if lines[0].startswith("#!") else 0
    mark = "//" if Path(name).suffix in NATIVE else "#"
    for offset, wanted in enumerate(LICENSE):
        number = first + offset
        if number >= len(lines) or lines[number] != f"{mark} {wanted}":
            yield Violation(name, number + 1, "license", f"expected '{mark} {wanted}'")
            return


MARKDOWN_COLUMNS = 100
# What stands before the first word of a line, where no line can end.
LEAD = re.compile(r"^[ >]*(?:[-*+] |\d+[.)] |#+ |\[[^\]]*\]: )*\s*")


def check_markdown(name: str, text: str) -> Iterator[Violation]:
    """Check that a text is wrapped, where a line can: not in tables and in code."""
    fence = ""
    for number, line in enumerate(text.split("\n"), start=1):
        mark = re.match(r"\s*(```+|~~~+)", line)
        if mark and (not fence or mark.group(1).startswith(fence)):
            fence = "" if fence else mark.group(1)
            continue
        if fence or line.lstrip(" >").startswith("|") or line.startswith("#"):
            continue
        if len(line) > MARKDOWN_COLUMNS:
            lead = LEAD.match(line)
            first = lead.end() if lead else 0
            if " " in line[first : MARKDOWN_COLUMNS + 1]:
                what = f"{len(line)} columns, at most {MARKDOWN_COLUMNS}"
                yield Violation(name, number, "columns", what)

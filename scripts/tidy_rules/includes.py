# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which headers C++ files include: every one has a user, every use its header."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from tidy_rules import NATIVE, Sources, Violation, within
from tidy_rules.functions import blank_out


def check_headers(sources: Sources) -> Iterator[Violation]:
    """Check that every C++ header is included by somebody."""
    pattern = re.compile(r'#\s*include\s*"([^"]+)"')
    native = [name for name in sorted(sources) if Path(name).suffix in NATIVE]
    included = {
        Path(found).name for name in native for found in pattern.findall(sources[name])
    }
    for name in native:
        path = Path(name)
        # Those that are precompiled are read by the build.
        read = path.name in included or path.parent.name == "precompiled"
        if path.suffix == ".h" and not read:
            yield Violation(name, 1, "dead-file", "no file includes this header")


# gcc reads the precompiled headers before every source, so it misses no #include.
STANDARD = {
    "algorithm": r"(?:sort|stable_sort|min|max|clamp|copy|copy_n|fill|fill_n|find"
    r"|find_if|all_of|any_of|none_of|equal|lower_bound|upper_bound|max_element)",
    "array": r"array",
    "atomic": r"(?:atomic|atomic_\w+|memory_order\w*)",
    "bit": r"(?:bit_cast|endian|bit_ceil|bit_width|countr_zero|popcount)",
    "chrono": r"chrono",
    "cmath": r"(?:sqrt|isfinite|isnan|pow|ldexp|ceil|floor|fabs)",
    "condition_variable": r"condition_variable",
    "cstdint": r"u?int(?:8|16|32|64)_t",
    "cstring": r"(?:memcpy|memcmp|memset|memmove|strlen|strerror)",
    "deque": r"deque",
    "functional": r"function",
    "limits": r"numeric_limits",
    "map": r"map",
    "memory": r"(?:unique_ptr|shared_ptr|weak_ptr|make_unique|make_shared)",
    "mutex": r"(?:mutex|lock_guard|unique_lock|scoped_lock|once_flag|call_once)",
    "optional": r"(?:optional|nullopt)",
    "set": r"set",
    "span": r"(?:span|as_bytes|as_writable_bytes)",
    "string": r"(?:string|to_string)",
    "string_view": r"string_view",
    "thread": r"(?:thread|this_thread)",
    "utility": r"(?:pair|exchange|swap)",
    "vector": r"vector",
}
USES = {one: re.compile(rf"\bstd::{names}\b") for one, names in STANDARD.items()}
INCLUDE = re.compile(r"^\s*#\s*include\s*([<\"])([^>\"]+)", re.MULTILINE)


def check_includes(sources: Sources) -> Iterator[Violation]:
    """Check that what is used of the standard library is included, however deep."""
    folders = ("csrc", "tests/native")
    names = [n for n in within(sources, *folders) if Path(n).suffix in NATIVE]
    texts = {name: sources[name] for name in names}
    for name, text in texts.items():
        reached, seen = [name], set()
        for one in reached:
            beside = str(PurePosixPath(one).parent)
            for kind, what in INCLUDE.findall(texts[one]):
                local = [f"{folder}/{what}" for folder in (*folders, beside)]
                reached += [n for n in local if n in texts and n not in reached]
                seen.add(what if kind == "<" else "")
        code = blank_out(text)
        for header, uses in USES.items():
            if header not in seen and (found := uses.search(code)):
                line = code.count("\n", 0, found.start()) + 1
                what = f"{found.group()} is used without #include <{header}>"
                yield Violation(name, line, "includes", what)

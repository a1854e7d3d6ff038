# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A file system in memory that forgets what was not synchronised when it crashes.

What a crash may leave is all that POSIX allows: names of a directory as they are or as
they were when it was synchronised last, each for itself; contents of a file likewise,
or a part of them, or zeros.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch_cpudist.snapshot.files import Files

Choose = Callable[[Sequence[Any]], Any]


class Crash(BaseException):
    """The program ends here: nothing of it runs any more."""


class Node:
    """A file."""

    def __init__(self, contents: bytes = b"") -> None:
        self.now = contents
        self.kept = b""


class Folder:
    """A directory."""

    def __init__(self) -> None:
        self.now: dict[str, Node | Folder] = {}
        self.kept: dict[str, Node | Folder] = {}


class ModelFiles(Files):
    """Files in memory.

    Args:
        before: called before each call with its name and whether it changes
            anything; what it raises is what the call raises.
    """

    def __init__(self, before: Callable[[str, bool], None] | None = None) -> None:
        self.root = Folder()
        self.before = before or (lambda name, changes: None)
        self._open: dict[int, Node] = {}
        self._next = 100

    def _find(self, path: Path) -> Node | Folder | None:
        at: Node | Folder | None = self.root
        for part in path.parts[1:]:
            at = at.now.get(part) if isinstance(at, Folder) else None
        return at

    def _folder(self, path: Path) -> Folder:
        found = self._find(path)
        if not isinstance(found, Folder):
            raise FileNotFoundError(errno.ENOENT, "No such directory", str(path))
        return found

    def make_directory(self, path: Path) -> None:
        self.before("make_directory", True)
        at = self.root
        for part in path.parts[1:]:
            found = at.now.setdefault(part, Folder())
            assert isinstance(found, Folder)
            at = found

    def remove_directory(self, path: Path) -> None:
        self.before("remove_directory", True)
        if self._folder(path).now:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))
        del self._folder(path.parent).now[path.name]

    def list(self, path: Path) -> list[str]:
        self.before("list", False)
        found = self._find(path)
        return sorted(found.now) if isinstance(found, Folder) else []

    def size(self, path: Path) -> int | None:
        self.before("size", False)
        found = self._find(path)
        return len(found.now) if isinstance(found, Node) else None

    def create(self, path: Path) -> int:
        self.before("create", True)
        folder = self._folder(path.parent)
        node = folder.now.setdefault(path.name, Node())
        assert isinstance(node, Node)
        node.now = b""
        self._next += 1
        self._open[self._next] = node
        return self._next

    def write(self, file: int, contents: bytes | bytearray | memoryview) -> None:
        node, added = self._open[file], bytes(contents)
        before = node.now
        node.now = before + added[: len(added) // 2]
        self.before("write", True)
        node.now = before + added

    def sync(self, file: int) -> None:
        self.before("sync", True)
        self._open[file].kept = self._open[file].now

    def close(self, file: int) -> None:
        self.before("close", False)
        del self._open[file]

    def sync_directory(self, path: Path) -> None:
        self.before("sync_directory", True)
        folder = self._folder(path)
        folder.kept = dict(folder.now)

    def rename(self, old: Path, new: Path) -> None:
        self.before("rename", True)
        node = self._folder(old.parent).now.pop(old.name)
        self._folder(new.parent).now[new.name] = node

    def unlink(self, path: Path) -> None:
        self.before("unlink", True)
        folder = self._folder(path.parent)
        if path.name not in folder.now:
            raise FileNotFoundError(errno.ENOENT, "No such file", str(path))
        del folder.now[path.name]

    def read(self, path: Path) -> bytes:
        self.before("read", False)
        found = self._find(path)
        if not isinstance(found, Node):
            raise FileNotFoundError(errno.ENOENT, "No such file", str(path))
        return found.now

    def map(self, path: Path) -> memoryview:
        return memoryview(self.read(path))

    def after_crash(self, choose: Choose) -> ModelFiles:
        """What a machine finds that starts again; all of it is on the disk, then.

        Args:
            choose: picks one of what may be left: the newest first, the oldest second.
        """
        left = ModelFiles()
        left.root = _left_of(self.root, choose)
        return left

    def settled(self) -> ModelFiles:
        """A copy, all of which is on the disk."""
        return self.after_crash(lambda options: options[0])


def _left_of(folder: Folder, choose: Choose) -> Folder:
    left = Folder()
    for name in sorted(folder.now.keys() | folder.kept.keys()):
        now, kept = folder.now.get(name), folder.kept.get(name)
        one = now if now is kept else choose([now, kept])
        if isinstance(one, Folder):
            left.now[name] = _left_of(one, choose)
        elif one is not None:
            node = Node(one.now)
            if one.now != one.kept:
                half, zeros = one.now[: len(one.now) // 2], bytes(len(one.now))
                node.now = choose([one.now, one.kept, half, zeros])
            node.kept = node.now
            left.now[name] = node
    left.kept = dict(left.now)
    return left

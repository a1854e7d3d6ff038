# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What the errors of backends mean to a group of a collective strategy."""

from __future__ import annotations

import pytest
import torch.distributed as dist

import torch_cpudist as cpudist
from torch_cpudist import errors
from torch_cpudist.backends.loading import load_c10d
from torch_cpudist.collective.group import CollectiveGroup

# What a backend of ours says does not count, its type does.
MISLEADING = "backend: timed out, mismatch: ranks disagree, Connection closed by peer"
ALL_TYPES = [
    one
    for one in vars(errors).values()
    if isinstance(one, type) and issubclass(one, errors.Error)
]


@pytest.fixture(name="group")
def _group():
    context = cpudist.init(variables={"CPUDIST_BACKEND": "gloo"})
    group = CollectiveGroup(context, "AllReduce")
    group.prefix, group.store = "test", dist.HashStore()
    yield group
    context.shutdown()


def test_errors_of_our_backends_keep_their_types(group):
    assert len(ALL_TYPES) > 20
    for kind in ALL_TYPES:
        assert type(group.error_of(kind(MISLEADING))) is kind
        # A rank that was frozen is lost, one that is late is not: the code says which.
        told = (
            "backend shm: rank 1 (process 7, stopped by a signal) did not come to ..."
        )
        assert type(group.error_of(kind(told))) is kind


def test_what_errors_of_our_backends_say(group):
    late = group.error_of(errors.OperationTimeoutError("ccl: all_reduce timed out"))
    assert "AllReduce: a collective did not end within" in str(late)
    told = errors.ConfigMismatchError("ccl: ranks disagree about what they call: ...")
    assert "trainers called different collectives: ccl: ranks" in str(
        group.error_of(told)
    )
    told = errors.PeerLostError("ccl: rank 1 has ended. Restart the run.")
    lost = group.error_of(told)
    assert str(lost).endswith(
        "to another trainer: ccl: rank 1 has ended. Restart the run."
    )
    assert "rank 1 has ended" in group.store.get(f"test/failed/{group.rank}").decode()
    full = group.error_of(errors.OverloadedError("no memory"))
    assert str(full) == "AllReduce: no memory"


WITH_WORDS = ("PeerLostError", "OperationTimeoutError", "ConfigMismatchError")


@pytest.mark.parametrize("kind", ALL_TYPES, ids=lambda kind: kind.__name__)
def test_who_is_told_what_of_an_error_of_each_type(group, kind):
    found = group.error_of(kind("backend: why"))
    told = group.store.check([f"test/failed/{group.rank}"])
    assert told == (kind is errors.PeerLostError)
    assert (str(found) == "AllReduce: backend: why") == (
        kind.__name__ not in WITH_WORDS
    )
    assert str(found).startswith("AllReduce: ")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Timed out waiting 1000ms for recv operation", "OperationTimeoutError"),
        ("op.preamble.length <= op.nbytes. 8 vs 4", "ConfigMismatchError"),
        ("Connection closed by peer [127.0.0.1]:9", "PeerLostError"),
        ("Work timed out in blocking wait.", "OperationTimeoutError"),
        ("NCCL error: remote process exited", "PeerLostError"),
        ("The client socket has timed out after 60s", "OperationTimeoutError"),
        ("Detected mismatch between collectives on ranks", "ConfigMismatchError"),
    ],
)
def test_errors_of_other_libraries_have_types(group, text, kind):
    place = f"[/src/gloo/pair.cc:81] {text}. This is typically caused by ...\nframe #0"
    for said in (text, place):
        failed = group.error_of(RuntimeError(said))
        assert type(failed).__name__ == kind
        assert "pair.cc" not in str(failed)
        assert "typically" not in str(failed)


def test_a_library_that_does_not_load_is_refused():
    with pytest.raises(cpudist.InvalidArgumentError, match="cannot load it"):
        load_c10d("ccl").CclEngine("/nowhere/libshim.so")

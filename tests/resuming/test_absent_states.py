# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which state a snapshot has of a trainer that has no part in it, and when it waits."""

from __future__ import annotations

import pytest

from torch_cpudist.drivers.saving import Presence
from torch_cpudist.resuming.absent import Absent, NotOfAll
from torch_cpudist.snapshot.files import Files
from torch_cpudist.snapshot.left_files import LeftFiles
from torch_cpudist.snapshot.manifest import Trainer
from torch_cpudist.snapshot.trainer_files import write_trainer
from torch_cpudist.snapshot.trees import pack

OWN = Trainer(0, "trainer-0000.json", 1, 1, 10)  # of the one that commits


class Servers:
    """Say who takes part and whom they wait for."""

    comes_and_goes = True

    def __init__(self, present=(), lost=()):
        self.said = Presence(frozenset(present), frozenset(lost))

    def members(self, number):
        return (0,)

    def presence(self):
        return self.said


class Case:
    """Two trainers, of which 1 is absent; ``earlier``: of its steps in snapshots."""

    def __init__(self, folder, earlier=(), **said):
        self.folder = folder
        self.servers = Servers(**said)
        self.left = LeftFiles(folder, 7, 0, Files())
        self.earlier = [
            (folder / f"of{steps}", self.state(folder / f"of{steps}", steps, run=6))
            for steps in earlier
        ]
        self.absent = Absent(self.servers, 2, self.left, lambda rank: self.earlier)

    def state(self, folder, steps, run):
        packed = pack({"n": steps}, "state")
        return write_trainer(folder, 1, packed, steps, Files(), 1, run)

    def leave(self, steps):
        self.left.write(1, pack({"n": steps}, "state"), steps)

    def save(self, number, steps):
        """Steps of both in the manifest of a snapshot of so many in all."""
        folder = self.folder / f"snap{number}"
        brought = self.absent.bring(number, folder)
        trainers = [OWN, *brought.left.values(), *brought.kept.values()]
        found = self.absent.settle(number, folder, steps, trainers, brought)
        return [one.steps for one in found]


def test_who_has_left_is_taken_as_it_was_at_the_cut(tmp_path):
    case = Case(tmp_path, present=[0, 1])
    case.leave(5)
    assert case.save(1, 15) == [10, 5]
    case.leave(6)
    for _ in range(2):
        with pytest.raises(NotOfAll, match=r"\[1\] have left .* have left again"):
            case.save(2, 15)


def test_who_is_lost_holds_it_up_until_it_is_given_up(tmp_path):
    case = Case(tmp_path, earlier=(5, 3), lost=[1])
    with pytest.raises(NotOfAll, match=r"\[1\] were lost, .* CPUDIST_REJOIN_S"):
        case.save(1, 17)
    case.servers.said = Presence(frozenset([0]), frozenset())
    assert case.save(2, 17) == [10, 5]
    assert case.absent.uncounted == 2


def test_a_state_that_is_damaged_is_passed_over(tmp_path):
    case = Case(tmp_path, earlier=(5, 3))
    (tmp_path / "of5" / case.earlier[0][1].file).write_text("{}")
    assert case.save(1, 15) == [10, 3]
    case.earlier = []
    assert case.save(2, 15) == [10]


@pytest.mark.parametrize(("earlier", "taken"), [((), 5), ((4,), 5), ((8,), 8)])
def test_a_state_of_no_known_moment_is_taken_if_it_stays(earlier, taken, tmp_path):
    """Of a trainer that is gone for good: nothing can have made it newer meanwhile."""
    case = Case(tmp_path, earlier=earlier)
    case.absent.uncounted = None
    case.leave(4)
    with pytest.raises(NotOfAll, match="the next snapshot"):
        case.save(1, 20)
    case.leave(5)
    with pytest.raises(NotOfAll, match="the next snapshot"):
        case.save(2, 20)
    assert case.save(3, 20) == [10, taken]
    assert case.save(4, 20) == [10, taken]


def test_strategies_that_wait_for_all_go_on_without_none(tmp_path):
    case = Case(tmp_path, earlier=(5,))
    case.servers.comes_and_goes = False
    with pytest.raises(NotOfAll, match="they had left"):
        case.save(1, 15)

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Lightning's checkpoints with snapshots: fit(ckpt_path=) goes on bit for bit."""

from __future__ import annotations

import logging
import shutil

import pytest
import torch
from lazily import Lazily
from patience import PATIENCE_S
from sync_cases import ONE_THREAD, assert_same_bits

import torch_cpudist as cpudist
from torch_cpudist.errors import ConfigurationError, SnapshotError
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.testing import ProcessRanks

cases = Lazily("lightning_cases", load=lambda _: pytest.importorskip("lightning"))
kept = Lazily("lightning_kept", load=lambda _: pytest.importorskip("lightning"))
pytestmark = [
    pytest.mark.integrations,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("in_a_folder"),
]


@pytest.fixture
def run():
    """Runs something as a script of its own: with a run that it begins and ends."""

    def within(body, *given, **named):
        cpudist.init()
        found = body(*given, **named)
        cpudist.shutdown()
        return found

    return within


@pytest.mark.parametrize("kind", ["sync", "allreduce"])
def test_a_resumed_run_is_the_undisturbed_one(kind, run, tmp_path):
    """Remote rows with their state, dropout's generator, the order of the data."""
    remote = kind == "sync"
    whole = run(kept.fitted, "whole", kind, remote, epochs=3)
    run(kept.fitted, "parts", kind, remote, epochs=1)
    torch.manual_seed(99)  # what the snapshot has comes in the place of this
    again = run(kept.fitted, "parts", kind, remote, epochs=3, ckpt_path="last")
    assert again["steps"] == whole["steps"] == 36
    assert again["seen"] < whole["seen"]
    assert_same_bits(again["values"], whole["values"])
    assert kept.rows_of("parts") == kept.rows_of("whole")


def test_without_a_checkpoint_a_fit_begins_anew(run):
    first = run(kept.fitted, "one", "sync", True, epochs=1)
    again = run(kept.fitted, "one", "sync", True, epochs=1)
    assert_same_bits(again["values"], first["values"])


def test_snapshots_come_and_go_with_their_files(run, tmp_path):
    """Of the best two; of a file that is saved again; what others have saved stays."""
    (tmp_path / "kept-snapshots" / "ckpt-of-a-user").mkdir(parents=True)
    run(kept.fitted, "kept", "sync", True, epochs=4, save_top_k=2, monitor="val")
    files = sorted((tmp_path / "kept").glob("*.ckpt"))
    assert len(files) == 3  # the last one, too
    named = [name for file in files for name in kept.record_of(file)["names"]]
    directory = Directory(tmp_path / "kept-snapshots")
    assert sorted(directory.names()) == sorted(named)
    assert directory.uncommitted() == ["ckpt-of-a-user"]


def test_a_file_that_is_written_later_keeps_the_old_one_whole(run, tmp_path):
    """As AsyncCheckpointIO does: until it is there, the old one has its snapshots."""
    found = run(kept.saved_late, "late", PATIENCE_S)
    assert found["before"] == found["first"]
    assert found["first"] < found["held"]
    (named,) = kept.record_of(tmp_path / "late.ckpt")["names"]
    assert Directory(tmp_path / "late-snapshots").names() == [named]
    assert {named} == found["held"] - found["first"]


def test_a_file_that_is_removed_before_it_is_written_goes_whole(run):
    """Else it would be there afterwards, without its snapshots."""
    found = run(kept.removed_late, "gone", PATIENCE_S)
    assert found == {"held": 1, "left": 0, "there": False}


def test_test_and_predict_have_the_rows_of_the_best(run):
    def fit_and_test():
        found = kept.fitted("best", "sync", True, epochs=3, monitor="rises")
        made, module = found["trainer"], found["module"]
        (tested,) = made.test(module, cases.loader(8, 2), "best", verbose=False)
        return found["best"], tested["val"], found["val"]

    file, tested, ended = run(fit_and_test)
    assert "epoch=0" in file
    assert tested != ended

    def test_alone():
        module, made = kept.module(True), kept.trainer("best", "sync")
        (found,) = made.test(module, cases.loader(8, 2), file, verbose=False)
        return found["val"]

    assert run(test_alone) == tested


@pytest.mark.parametrize("weights_only", [False, True], ids=["whole", "weights_only"])
def test_predict_has_the_rows_of_a_file(weights_only, run):
    """Also of one without the optimizer's state, which has rows in a snapshot, too."""

    def fit_and_predict():
        found = kept.fitted(
            "one",
            "sync",
            True,
            epochs=3,
            monitor="rises",
            save_weights_only=weights_only,
        )
        made, module = found["trainer"], found["module"]
        with torch.no_grad():
            ended = torch.cat([module(ids) for ids, _ in cases.loader(8, 2)])
        return found["best"], kept.predicted(made, module, found["best"]), ended

    file, best, ended = run(fit_and_predict)
    assert "epoch=0" in file
    assert not torch.equal(best, ended)
    assert ("optimizer_states" in torch.load(file, weights_only=True)) != weights_only

    def predict_alone():
        return kept.predicted(kept.trainer("one", "sync"), kept.module(True), file)

    assert torch.equal(run(predict_alone), best)


def test_weights_of_static_tables_alone_need_no_snapshot(run):
    """The file has all of them; a fit goes on from it only where there is state."""

    def fit_and_predict():
        found = kept.fitted("static", "sync", False, epochs=2, save_weights_only=True)
        made, module = found["trainer"], found["module"]
        return found["best"], kept.predicted(made, module, found["best"])

    file, best = run(fit_and_predict)
    assert "cpudist_snapshots" not in torch.load(file, weights_only=True)
    assert list(Directory("static-snapshots").names()) == []

    def predict_alone():
        return kept.predicted(kept.trainer("new", "sync"), kept.module(False), file)

    assert torch.equal(run(predict_alone), best)

    def fit_on():
        kept.fitted("static", "sync", False, epochs=3, ckpt_path=file)

    with pytest.raises(KeyError, match="optimizer"):
        run(fit_on)
    cpudist.shutdown("none")


def test_a_second_fit_in_a_run_goes_back(run):
    def twice():
        found = kept.fitted("twice", "sync", True, epochs=2, monitor="rises")
        made, module = found["trainer"], found["module"]
        made.fit_loop.max_epochs = 3
        made.fit(module, kept.loader(), cases.loader(8, 2), ckpt_path=found["best"])
        return kept.all_values(made, module), made.global_step

    values, steps = run(twice)
    whole = run(kept.fitted, "whole", "sync", True, epochs=3)
    assert steps == whole["steps"]
    assert_same_bits(values, whole["values"])


def test_the_lr_finder_gives_remote_rows_back(run):
    def find():
        module, made = kept.module(True), kept.trainer("found", "sync")
        module.lr = 0.1
        cases.Tuner(made).lr_find(
            module, kept.loader(), num_training=8, update_attr=False
        )
        return kept.all_values(made, module)

    def untouched():
        module, made = kept.module(True), kept.trainer("new", "sync", max_epochs=0)
        made.fit(module, kept.loader())
        return kept.all_values(made, module)

    assert_same_bits(run(find), run(untouched))
    assert not list(Directory("found-snapshots").names())


def test_what_is_missing_is_said(run, tmp_path, caplog):
    run(kept.fitted, "said", "sync", True, epochs=1)
    (file,) = (tmp_path / "said").glob("last.ckpt")
    with caplog.at_level(logging.WARNING, logger="torch_cpudist"):
        run(kept.fitted, "without", "sync", True, epochs=1, snapshots=False)
    (bare,) = (tmp_path / "without").glob("last.ckpt")
    assert "without the rows of remote table 'bag.weight'" in caplog.text

    def refused(error, text, path, **options):
        with pytest.raises(error, match=text):
            kept.fitted("said", "sync", True, epochs=2, ckpt_path=path, **options)
        cpudist.shutdown("none")

    cpudist.init()
    refused(
        ConfigurationError, r"Set CpudistStrategy\(snapshot_dir", file, snapshots=False
    )
    cpudist.init()
    refused(SnapshotError, "the checkpoint names no snapshot", bare)
    (name,) = kept.record_of(file)["names"]
    # Elsewhere it is found where it was saved; then nowhere.
    moved = run(kept.fitted, "moved", "sync", True, epochs=1, ckpt_path=file)
    assert moved["steps"] == 12
    shutil.rmtree(tmp_path / "said-snapshots" / name)
    cpudist.init()
    refused(SnapshotError, rf"expected .*said-snapshots/{name}", file)


def test_static_tables_go_on_without_the_directory(run):
    """A checkpoint is whole then by itself, as before."""
    whole = run(kept.fitted, "whole", "sync", False, epochs=2)
    run(kept.fitted, "parts", "sync", False, epochs=1)
    bare = {"epochs": 2, "ckpt_path": "last", "snapshots": False}
    again = run(kept.fitted, "parts", "sync", False, **bare)
    assert again["steps"] == whole["steps"]


@pytest.mark.parametrize("given", ["s3://bucket/here", "", 7])
def test_a_directory_is_wanted(given):
    with pytest.raises(ValueError, match="snapshot_dir="):
        cases.CpudistStrategy(snapshot_dir=given)


def test_a_strategy_without_snapshots_says_so(run):
    strategy = cpudist.Hybrid(sparse=cpudist.Geo(outer=cpudist.Outer()))
    with pytest.raises(SnapshotError, match="has no snapshots"):
        run(kept.fitted, "none", strategy, False, epochs=1)
    cpudist.shutdown("none")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "servers"), [("sync", 0), ("sync", 1), ("async", 0), ("groups", 0)]
)
def test_two_trainers_go_on_where_they_were(kind, servers, tmp_path):
    variables = {
        **ONE_THREAD,
        "KIND": kind,
        "CPUDIST_SNAPSHOT_DIR": str(tmp_path / "snapshots"),
    }
    with ProcessRanks(
        kept.fit_in_parts, 2 + servers, servers=servers, variables=variables
    ) as ranks:
        first, second = [one for one in ranks.results(PATIENCE_S) if one]
    for found in (first, second):
        assert found["same_rows"]
        assert found["steps"] == [6, 12]
        assert found["went_on"] == (True if kind == "sync" else None)
    assert first["names"] == second["names"]

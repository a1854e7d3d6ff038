# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The example movielens, on a small wheel of the same form."""

from __future__ import annotations

import argparse
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import movielens
import movielens_data as data
import numpy as np
import printed
import pytest
import torch
from patience import PATIENCE_S
from sync_cases import ONE_THREAD, run

import torch_cpudist as cpudist
from torch_cpudist.testing import ProcessRanks, Report

TASTES, USERS, ITEMS, LIKES = 4, 80, 60, 12
USER_HEADER = "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token"
ITEM_HEADER = (
    "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq"
)
HEADER = "user_id:token\titem_id:token\trating:float\ttimestamp:float"
# What two trainers are told.
WAYS = {
    "remote": ["--strategy", "sync", "--remote"],
    "async": ["--strategy", "async"],
    "geo": ["--strategy", "geo"],
    "allreduce": ["--strategy", "allreduce"],
}


def make_wheel(
    path: Path, ratings: list[str], users: list[str], items: list[str]
) -> Path:
    texts = {"inter": [HEADER, *ratings], "user": [USER_HEADER, *users]}
    texts["item"] = [ITEM_HEADER, *items]
    with zipfile.ZipFile(path, "w") as wheel:
        for name, lines in texts.items():
            wheel.writestr(data.FOLDER + name, "\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Users of four tastes; a movie of the own taste is liked, some by many."""
    draws = np.random.default_rng(1)
    share = 1 / np.arange(1, ITEMS // TASTES + 1) ** 0.5
    share /= share.sum()
    ratings = []
    for user in range(USERS):
        picked = draws.choice(len(share), LIKES, replace=False, p=share)
        for time, item in enumerate(picked * TASTES + user % TASTES):
            ratings.append(f"u{user}\ti{item}\t{4 + time % 2}.0\t{time}")
        ratings.append(f"u{user}\ti{draws.integers(ITEMS)}\t1.0\t99")
    users = [f"u{i}\t{20 + i % 30}\tF\tnone\t0" for i in range(USERS)]
    items = [f"i{i}\tTitle {i}\t199{i % 10}\tDrama" for i in range(ITEMS)]
    folder = tmp_path_factory.mktemp("movielens")
    return make_wheel(folder / "recbole.whl", ratings, users, items)


def told(wheel: Path, *more: str) -> argparse.Namespace:
    numbers = ["--dim", "8", "--batch-size", "128", "--k", "5", "--epochs", "12"]
    return movielens.parse_arguments(["--data", str(wheel), *numbers, *more])


def test_the_latest_fifth_of_a_users_likes_is_the_test(tmp_path: Path) -> None:
    stars = [5, 4, 3, 5, 4, 4, 1]  # five likes, of which one is the test
    ratings = [f"7\t{10 + i}\t{s}\t{100 - i}" for i, s in enumerate(stars)]
    ratings += ["8\t10\t4\t5", "8\t11\t4\t5"]  # too few to test
    users = ["8\t24\tM\twriter\t0", "7\t53\tF\tother\t0"]
    items = [f"{10 + i}\tA Title\t1995\tAction Comedy" for i in range(6)]
    items.append("16\tOther\t1967\tComedy")
    found = data.load(make_wheel(tmp_path / "a.whl", ratings, users, items))
    assert found.test.tolist() == [[1, 0]]  # the highest time stamp
    train = sorted(found.train.tolist())
    assert train == [[0, 0], [0, 1], [1, 1], [1, 3], [1, 4], [1, 5]]
    assert np.flatnonzero(found.seen[1]).tolist() == [1, 2, 3, 4, 5, 6]
    assert found.popularity().tolist() == [1, 2, 0, 1, 1, 1, 0]
    assert np.argwhere(found.relevant()).tolist() == [[1, 0]]
    # Facts: three of a user each; a decade and genres of a movie, filled up with none.
    assert found.user_facts.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert found.item_facts[0].tolist() == [7, 8, 9]
    assert found.item_facts[6].tolist() == [10, 9, data.NO_FACT]
    assert found.facts == 11
    assert found.genres[5:] == ["Action", "Comedy"]


def test_a_bad_wheel_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "recbole.whl"
    with pytest.raises(data.DataError, match="missing: get it by `pip download"):
        data.load(path)
    path.write_text("no wheel")
    with pytest.raises(data.DataError, match=r"inter, user and item in a wheel"):
        data.load(path)
    make_wheel(path, [], [], [])
    with pytest.raises(data.DataError, match=r"expected columns user_id, .*found 'us"):
        data.load(path)
    with pytest.raises(SystemExit, match=r"movielens: .*expected columns"):
        movielens.read_data(told(path))


def random_scores() -> torch.Tensor:
    return torch.randn(USERS, ITEMS, generator=torch.Generator().manual_seed(1))


def expected_ranking(likes: data.Likes, k: int) -> dict[str, float]:
    """What is found of each user's list of those scores, sorted as a whole."""
    scores = random_scores()
    recalls, gains = [], []
    for user in range(USERS):
        wanted = set(likes.test[likes.test[:, 0] == user][:, 1].tolist())
        order = scores[user].argsort(descending=True).tolist()
        shown = [item for item in order if not likes.seen[user, item]][:k]
        hits = [1 / np.log2(place + 2) for place, i in enumerate(shown) if i in wanted]
        recalls.append(len(hits) / len(wanted))
        best = sum(1 / np.log2(place + 2) for place in range(min(k, len(wanted))))
        gains.append(sum(hits) / best)
    return {f"Recall@{k}": float(np.mean(recalls)), f"NDCG@{k}": float(np.mean(gains))}


def trained(options: argparse.Namespace) -> dict[str, Any]:
    """Train in this process alone."""
    likes = movielens.read_data(options)
    return run(lambda context: movielens.train(options, likes), 1)[0]


def quality(found: dict[str, Any]) -> float:
    """How many times as much is found as by the most popular movies."""
    return float(found["Recall@5"] / found["baseline"]["Recall@5"])


def test_one_process_learns_tastes_and_is_repeatable(
    wheel: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(movielens, "DRAWN_LIKES", 5)
    results, picture = tmp_path / "results.json", tmp_path / "movies.png"
    paths = ["--results", str(results), "--picture", str(picture)]
    found = trained(told(wheel, *paths))
    assert quality(found) > 5
    assert found["points"][-1]["loss"] < found["points"][0]["loss"]
    assert json.loads(results.read_text()) == found
    assert picture.read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "epoch 12: loss" in shown
    assert "sync, 1 trainer(s) on 1 server(s): Recall@5 0." in shown
    assert "the most popular movies for all: Recall@5 0." in shown
    printed.check("movielens", shown)
    again = trained(told(wheel, "--epochs", "3"))
    assert again["points"] == found["points"][:3]


def trains_with_each(context: cpudist.Context, report: Report) -> dict[str, Any]:
    """What a trainer of several finds: of scores that are given, and by training."""
    wheel = Path(os.environ["MOVIELENS_WHEEL"])
    likes = movielens.read_data(told(wheel))
    mine = random_scores()[context.trainer_rank :: 2]
    found: dict[str, Any] = {"ranked": movielens.ranked(likes, mine, 5)}
    for name, more in WAYS.items():
        found[name] = movielens.train(told(wheel, *more), likes)
    return found


@pytest.mark.processes
def test_two_trainers_rank_all_users_and_learn_tastes(wheel: Path) -> None:
    variables = {**ONE_THREAD, "MOVIELENS_WHEEL": str(wheel)}
    with ProcessRanks(trains_with_each, 2, variables=variables) as ranks:
        first, second = ranks.results(PATIENCE_S)
    likes = movielens.read_data(told(wheel))
    assert first["ranked"] == second["ranked"]
    assert first["ranked"] == pytest.approx(expected_ranking(likes, 5))
    for name, more in WAYS.items():
        assert quality(first[name]) > 5, name
        assert first[name]["Recall@5"] == second[name]["Recall@5"]
        assert (first[name]["strategy"], first[name]["trainers"]) == (more[1], 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--k", "0"], "--k must be at least 1, got 0"),
        (["--batch-size", "0"], "--batch-size must be at least 1"),
        (["--temperature", "0"], "--temperature and --lr must be above 0"),
        (["--strategy", "local_sgd"], "invalid choice: 'local_sgd'"),
        (["--strategy", "reduce", "--remote"], "--remote needs one of sync"),
    ],
)
def test_options_that_cannot_work_are_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        movielens.parse_arguments(["--data", "none", *arguments])
    assert words in capsys.readouterr().err

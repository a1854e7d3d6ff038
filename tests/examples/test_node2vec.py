# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The example node2vec, on small graphs: walks, held-out edges, what is learned."""

from __future__ import annotations

import gzip
import importlib
import json
import struct
from pathlib import Path
from typing import Any

import node2vec
import node2vec_graph as graphs
import numpy as np
import printed
import pytest
from lazily import Lazily
from sync_cases import run

report = Lazily("node2vec_report", importlib.import_module)  # matplotlib

GROUPS, SIZE = 8, 40
# A triangle 0 1 2, a square on one side of it, and a leaf.
SMALL = np.array([[0, 1], [1, 2], [2, 0], [2, 3], [3, 4], [4, 1], [4, 5]])


def write_gt(path: Path, neighbours: list[list[int]], order: str = "<") -> Path:
    """A file of graph-tool; of an undirected edge it has one end."""
    text = graphs.MAGIC + bytes([1, order == ">"])
    text += struct.pack(order + "Q", 4) + b"note" + b"\0"
    text += struct.pack(order + "Q", len(neighbours))
    for ends in neighbours:
        text += struct.pack(f"{order}Q{len(ends)}B", len(ends), *ends)
    path.write_bytes(gzip.compress(text))
    return path


@pytest.fixture(scope="module")
def communities(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Groups whose members are often joined, and others seldom."""
    draws = np.random.default_rng(1)
    first, second = np.triu_indices(GROUPS * SIZE, k=1)
    same = first // SIZE == second // SIZE
    edges = draws.random(len(first)) < np.where(same, 0.3, 0.003)
    path = tmp_path_factory.mktemp("graph") / "edges.txt"
    np.savetxt(path, np.stack([first[edges], second[edges]], axis=1), fmt="%d")
    return path


@pytest.mark.parametrize("order", ["<", ">"])
def test_graphs_are_read_from_graph_tools_files(tmp_path: Path, order: str) -> None:
    path = write_gt(tmp_path / "a.gt.gz", [[1, 2, 2], [1], [], [0]], order)
    graph = graphs.load(path)
    assert graph.nodes == 4
    assert graph.edges.tolist() == [[0, 1], [0, 2], [0, 3]]  # no loop, none twice
    assert graph.degrees.tolist() == [3, 1, 1, 1]
    text = tmp_path / "edges.txt"
    text.write_text("3 0\n0 1\n\n2 0\n")
    assert graphs.load(text).edges.tolist() == graph.edges.tolist()
    pairs = np.array([[0, 3], [3, 0], [1, 2], [3, 3]])
    assert graph.joins(*pairs.T).tolist() == [True, True, False, False]


def test_bad_files_are_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "graph"
    with pytest.raises(graphs.DataError, match="apt-get download python3-graph-tool"):
        graphs.load(path)
    whole = gzip.decompress(write_gt(path, [[1], [0]]).read_bytes())
    path.write_bytes(whole[:-3])
    with pytest.raises(graphs.DataError, match="expected a graph of graph-tool, or"):
        graphs.load(path)
    for text in ("1 2 3", "1 x", "-1 2"):
        path.write_text(text)
        with pytest.raises(graphs.DataError, match="two node numbers a line, found"):
            graphs.load(path)
    path.write_text("")
    options = node2vec.parse_arguments(["--data", str(path)])
    with pytest.raises(SystemExit, match=r"node2vec: .*with edges, found none"):
        node2vec.read_data(options)


def test_held_out_edges_leave_every_node_a_neighbour(communities: Path) -> None:
    graph = graphs.load(communities)
    held = graphs.hold_out(graph, 0.2, 1)
    count = len(graph.edges)
    assert len(held.real) == round(0.2 * count)
    assert len(held.train.edges) == count - len(held.real)
    assert held.train.degrees.min() >= 1
    assert graph.joins(*held.real.T).all()
    assert not held.train.joins(*held.real.T).any()
    assert not graph.joins(*held.false.T).any()
    assert len(held.false) > 0.8 * len(held.real)
    # The same degrees: most second ends are there as often as in real edges.
    ends = [
        np.bincount(p[:, 1], minlength=graph.nodes) for p in (held.real, held.false)
    ]
    assert (ends[0] >= ends[1]).all()
    assert not np.array_equal(graphs.hold_out(graph, 0.2, 2).real, held.real)
    tree = graphs.make_graph(np.array([[0, 1], [0, 2], [0, 3]]), 4)
    assert len(graphs.hold_out(tree, 0.9, 1).real) == 0


@pytest.mark.parametrize(("p", "q"), [(1.0, 1.0), (0.25, 4.0), (4.0, 0.5)])
def test_walks_take_each_step_as_often_as_the_definition_says(
    p: float, q: float
) -> None:
    graph = graphs.make_graph(SMALL, 6)
    draws = np.random.default_rng(1)
    found = graphs.walks(graph, np.full(60_000, 2), 4, p, q, draws)
    neighbours = {v: set() for v in range(6)}
    for first, second in SMALL.tolist():
        neighbours[first].add(second)
        neighbours[second].add(first)
    assert (found[:, 0] == 2).all()
    firsts = np.bincount(found[:, 1], minlength=6) / len(found)
    assert firsts == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3, 0, 0], abs=0.01)
    checked = 0
    for came in range(6):
        for at in range(6):
            here = (found[:, 1] == came) & (found[:, 2] == at)
            if not here.any():
                continue
            weights = np.zeros(6)
            for x in neighbours[at]:
                weights[x] = (
                    1 / p if x == came else 1 if x in neighbours[came] else 1 / q
                )
            expected = weights / weights.sum()
            shares = np.bincount(found[here, 3], minlength=6) / here.sum()
            # Five standard deviations.
            off = 5 * np.sqrt(expected * (1 - expected) / here.sum())
            assert (np.abs(shares - expected) <= off + 1e-12).all(), (came, at)
            checked += 1
    assert checked > 6


def test_a_dead_end_is_left_by_where_it_was_entered() -> None:
    graph = graphs.make_graph(np.array([[0, 1]]), 2)
    begins, steepest = np.zeros(100, np.int64), graphs.STEEPEST
    draws = np.random.default_rng(1)
    found = graphs.walks(graph, begins, 5, steepest, 1 / steepest, draws)
    assert (found == [0, 1, 0, 1, 0]).all()


def told(path: Path, *more: str):
    numbers = ["--dim", "16", "--length", "20", "--batch-size", "256"]
    return node2vec.parse_arguments(["--data", str(path), *numbers, *more])


def test_trainers_share_the_nodes_that_walks_begin_at(communities: Path) -> None:
    options = told(communities)
    graph = graphs.load(communities)
    parts = [node2vec.walked(options, graph, rank, 3) for rank in range(3)]
    begins = np.concatenate([part.tokens[:: options.length] for part in parts])
    counts = np.bincount(begins, minlength=graph.nodes)
    assert counts.tolist() == [options.walks] * graph.nodes
    steps = node2vec.common_steps(options, graph, 3)
    fewest = min(len(part.tokens) for part in parts)
    assert steps == fewest // options.batch_size
    assert graph.joins(parts[0].tokens[:19], parts[0].tokens[1:20]).all()


def learned(path: Path, trainers: int, *more: str) -> dict[str, Any]:
    options = told(path, *more)
    graph = node2vec.read_data(options)
    return run(lambda context: node2vec.train(options, graph), trainers)[0]


def test_one_process_tells_edges_and_is_repeatable(
    communities: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, picture = tmp_path / "results.json", tmp_path / "nodes.png"
    paths = ["--results", str(results), "--picture", str(picture)]
    found = learned(communities, 1, "--p", "0.5", "--q", "2", *paths)
    assert found["auc"] > 0.85
    assert abs(found["auc_of_degrees"] - 0.5) < 0.1
    assert found["points"][-1]["loss"] < found["points"][0]["loss"]
    assert json.loads(results.read_text())["auc"] == found["auc"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert f"sync, 1 trainer(s) on 1 server(s): AUC {found['auc']:.4f} of " in shown
    assert "nodes/s" in shown
    printed.check("node2vec", shown)
    again = learned(communities, 1, "--p", "0.5", "--q", "2")
    assert again["auc"] == found["auc"]


@pytest.fixture(scope="module")
def alone(communities: Path) -> float:
    """The AUC of one process."""
    return float(learned(communities, 1)["auc"])


@pytest.mark.parametrize("strategy", ["sync", "async", "geo"])
def test_two_trainers_tell_edges_as_one_process_does(
    communities: Path, strategy: str, alone: float
) -> None:
    found = learned(communities, 2, "--strategy", strategy)
    assert (found["strategy"], found["trainers"]) == (strategy, 2)
    assert found["auc"] > alone - 0.05


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--p", "0"], "--p must be from 1/64 to 64"),
        (["--q", "65"], "--q must be from 1/64 to 64"),
        (["--length", "1"], "--length must be at least 2"),
        (["--walks", "0"], "--walks must be at least 1, got 0"),
        (["--held-out", "1"], "--held-out must be above 0 and below 1"),
        (["--batch-size", "100"], "multiple of 32"),
        (["--window", "17"], "at most 16"),
    ],
)
def test_options_that_cannot_work_are_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        node2vec.parse_arguments(arguments)
    assert words in capsys.readouterr().err

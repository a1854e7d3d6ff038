# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A graph, some of its edges held out, and biased walks over the others.

Reads the undirected graphs of Debian's package python3-graph-tool, as cond-mat-2005,
physicists who have written a paper together (Newman, "The structure of scientific
collaboration networks", PNAS 2001), and texts of two node numbers a line.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]

PACKAGE = "python3-graph-tool"
COLLECTION = Path("usr/lib/python3/dist-packages/graph_tool/collection")
NAME = "cond-mat-2005.gt.gz"
MAGIC = "⛾ gt".encode()
GZIP_MAGIC = b"\x1f\x8b"
# Of p and q, and of what they are divided by: beyond, hardly a proposal is taken.
STEEPEST = 64.0


class DataError(Exception):
    """A file is missing or not what it should be; the message says what to do."""


@dataclass(frozen=True)
class Graph:
    """Undirected, without loops; the neighbours of each node in order.

    Attributes:
        starts: int64 ``[nodes + 1]``, where the neighbours of each begin.
        neighbours: int64 ``[2 * edges]``.
    """

    starts: Integers
    neighbours: Integers

    @property
    def nodes(self) -> int:
        """How many there are."""
        return len(self.starts) - 1

    @property
    def degrees(self) -> Integers:
        """Return ``[nodes]``: how many neighbours each has."""
        return np.diff(self.starts)

    @property
    def edges(self) -> Integers:
        """Return ``[edges, 2]``, the smaller node first."""
        sources = np.repeat(np.arange(self.nodes), self.degrees)
        both = np.stack([sources, self.neighbours], axis=1)
        return both[both[:, 0] < both[:, 1]]

    def joins(self, first: Integers, second: Integers) -> npt.NDArray[np.bool_]:
        """Tell which pairs are edges."""
        keys = np.repeat(np.arange(self.nodes), self.degrees) * self.nodes
        keys += self.neighbours
        return contains(keys, first * self.nodes + second)


def contains(keys: Integers, wanted: Integers) -> npt.NDArray[np.bool_]:
    """Tell which of the wanted are among the keys, which are in order."""
    if not len(keys):
        return np.zeros(len(wanted), np.bool_)
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    found: npt.NDArray[np.bool_] = keys[place] == wanted
    return found


def make_graph(edges: Integers, nodes: int) -> Graph:
    """Make a graph of edges ``[n, 2]``; loops and repeated ones are left out."""
    edges = edges[edges[:, 0] != edges[:, 1]]
    both = np.concatenate([edges, edges[:, ::-1]])
    keys = np.unique(both[:, 0] * nodes + both[:, 1])
    degrees = np.bincount(keys // nodes, minlength=nodes)
    starts = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64)
    return Graph(starts, keys % nodes)


def read_gt(data: bytes) -> tuple[Integers, int]:
    """Return the edges and the number of nodes of a file in graph-tool's format.

    Raises:
        struct.error, ValueError: it is cut off.
    """
    place = len(MAGIC) + 2  # and the version, and the order of bytes
    order = ">" if data[place - 1] else "<"
    (comment,) = struct.unpack_from(order + "Q", data, place)
    place += 8 + comment + 1  # and whether it is directed
    (nodes,) = struct.unpack_from(order + "Q", data, place)
    place += 8
    kind = np.dtype(
        order + ("u1" if nodes <= 2**8 else "u2" if nodes <= 2**16 else "u4")
    )
    found, counts = [], np.zeros(nodes, np.int64)
    for node in range(nodes):
        (count,) = struct.unpack_from(order + "Q", data, place)
        found.append(np.frombuffer(data, kind, count, place + 8))
        counts[node] = count
        place += 8 + count * kind.itemsize
    ends = np.concatenate(found).astype(np.int64)
    return np.stack([np.repeat(np.arange(nodes), counts), ends], axis=1), nodes


def load(path: Path) -> Graph:
    """Read a graph.

    Raises:
        DataError: the file is missing, cut off, or has no edges.
    """
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if data.startswith(GZIP_MAGIC) else data
        if data.startswith(MAGIC):
            edges, nodes = read_gt(data)
        else:
            numbers = np.array(data.decode("ascii").split(), np.int64)
            edges = numbers.reshape(-1, 2)
            nodes = int(edges.max(initial=-1)) + 1
            if edges.min(initial=0) < 0:
                raise ValueError(f"node {edges.min()}")
        graph = make_graph(edges, nodes)
    except FileNotFoundError:
        raise DataError(
            f"{path} is missing: get graphs without root by `apt-get download "
            f"{PACKAGE} && dpkg-deb -x {PACKAGE}_*.deb graphs` and pass --data "
            f"graphs/{COLLECTION / NAME}; a text with two node numbers a line will do, "
            "too"
        ) from None
    except (OSError, EOFError, zlib.error, struct.error, ValueError) as error:
        raise DataError(
            f"{path}: expected a graph of graph-tool, or two node numbers a line, "
            f"found: {error}"
        ) from None
    if not len(graph.neighbours):
        raise DataError(f"{path}: expected a graph with edges, found none")
    return graph


@dataclass(frozen=True)
class Held:
    """A graph without some of its edges, and these.

    Attributes:
        train: what is left; every node that had a neighbour has one.
        real: int64 ``[n, 2]``, the edges that were held out.
        false: int64 ``[n or fewer, 2]``, their first nodes with the second ones of
            others: pairs of the same degrees that are no edges.
    """

    train: Graph
    real: Integers
    false: Integers


def hold_out(graph: Graph, share: float, seed: int) -> Held:
    """Hold out a share of the edges, or as many as leave every node a neighbour."""
    draws = np.random.default_rng((seed, 1))
    edges = draws.permutation(graph.edges)
    turned = draws.random(len(edges)) < 0.5  # no end is always the smaller number
    edges[turned] = edges[turned, ::-1]
    # The first edge of each node stays.
    stays = np.zeros(len(edges), np.bool_)
    _, firsts = np.unique(edges.reshape(-1), return_index=True)
    stays[firsts // 2] = True
    out = np.flatnonzero(~stays)[: round(share * len(edges))]
    real = edges[out]
    false = np.stack([real[:, 0], draws.permutation(real[:, 1])], axis=1)
    no_edge = (false[:, 0] != false[:, 1]) & ~graph.joins(*false.T)
    train = make_graph(np.delete(edges, out, axis=0), graph.nodes)
    return Held(train, real, false[no_edge])


def walks(
    graph: Graph,
    begins: Integers,
    length: int,
    p: float,
    q: float,
    draws: np.random.Generator,
) -> Integers:
    """Return a walk ``[len(begins), length]`` from every node that is given.

    From v, having come from t, the next node is x with a probability that is 1/p for
    x = t, 1 for neighbours of t, and 1/q for all others, up to one factor (Grover,
    Leskovec, "node2vec: scalable feature learning for networks", KDD 2016, section
    3.2). Neighbours are proposed evenly and taken with that probability over the
    largest; all walks take a step at once.
    """
    degrees = graph.degrees
    keys = np.repeat(np.arange(graph.nodes), degrees) * graph.nodes + graph.neighbours
    found = np.empty((len(begins), length), np.int64)
    found[:, 0] = begins
    highest = max(1 / p, 1.0, 1 / q)
    for step in range(1, length):
        here = found[:, step - 1]
        waiting = np.arange(len(begins))
        while len(waiting):
            at = here[waiting]
            pick = (draws.random(len(at)) * degrees[at]).astype(np.int64)
            proposed = graph.neighbours[graph.starts[at] + pick]
            found[waiting, step] = proposed
            if step == 1 or p == q == 1:
                break
            came = found[waiting, step - 2]
            chance = np.full(len(at), 1 / q)
            chance[contains(keys, came * graph.nodes + proposed)] = 1.0
            chance[proposed == came] = 1 / p
            chance[degrees[at] == 1] = highest  # there is nothing to choose
            waiting = waiting[draws.random(len(at)) * highest >= chance]
    return found

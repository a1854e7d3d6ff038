# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Serves an exported DeepFM over HTTP, and takes deltas in while requests come.

    python examples/serving/server.py /models/flights-1
    curl -X POST localhost:8000/score -H 'content-type: application/json' \
        -d '{"ids": [[3, 1000, ...]]}'
    curl -X POST localhost:8000/deltas/flights-2

Every answer names the export whose values it is of; none is of two.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import numpy as np
import uvicorn
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel

import torch_cpudist as cpudist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "flights"))

from flights_data import FIELDS
from scoring import Scorer

# What a delta may be called: its directory lies beside the export's, and nowhere else.
NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}")


class Flights(BaseModel):
    """Flights to be scored: 17 ids of each."""

    ids: list[list[int]]


class Scores(BaseModel):
    """Logits, and which export they are of."""

    version: str
    scores: list[float]


def make_app(path: Path) -> FastAPI:
    """Make the server of an export."""
    app = FastAPI()
    scorer = Scorer(path)

    @app.get("/version")
    def version() -> dict[str, str | int]:
        """Say which values are served."""
        loaded = scorer.reader.loaded
        return {"version": loaded.name, "update": loaded.version.round}

    # Not async: calls that take their time run in threads of the server's own.
    @app.post("/score")
    def score(flights: Flights) -> Scores:
        """Score flights."""
        if not flights.ids or any(len(one) != len(FIELDS) for one in flights.ids):
            raise HTTPException(422, f"expected {len(FIELDS)} ids of each flight")
        try:
            name, scores = scorer(np.array(flights.ids, dtype=np.int64))
        except (cpudist.RowOutOfRangeError, OverflowError) as error:
            raise HTTPException(422, str(error)) from error
        return Scores(version=name, scores=scores.tolist())

    @app.post("/deltas/{name}")
    def apply(name: str) -> dict[str, str]:
        """Take a delta in, by the name of its directory."""
        if not NAME.fullmatch(name):
            raise HTTPException(422, f"no export is called {name!r}")
        try:
            return {"version": scorer.reader.apply_delta(path.parent / name).name}
        except cpudist.SnapshotError as error:
            raise HTTPException(409, str(error)) from error

    return app


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("export", type=Path, help="what cpudist.export has written")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    uvicorn.run(
        make_app(options.export.absolute()), host=options.host, port=options.port
    )


if __name__ == "__main__":
    main()

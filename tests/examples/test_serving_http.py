# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The HTTP server: answers while deltas come, each of one version."""

from __future__ import annotations

import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import printed
import pytest
import torch
from flights import DeepFM
from flights_data import FIELDS
from patience import PATIENCE_S
from programs import ROOT, Program, clean_environment

import torch_cpudist as cpudist

pytestmark = pytest.mark.integrations
httpx = pytest.importorskip("httpx")
uvicorn = pytest.importorskip("uvicorn")
for name in ("fastapi", "onnx", "onnxscript", "onnxruntime"):
    pytest.importorskip(name)
server = pytest.importorskip("server")

ROWS, DIM, SWAPS = 400, 4, 100


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    """Exports, each a delta of the one before, and what each says of some flights."""
    folder = tmp_path_factory.mktemp("models")
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, ROWS, (5, len(FIELDS)), generator=generator)
    torch.manual_seed(1)
    model = DeepFM(ROWS, len(FIELDS), DIM)
    expected = {}
    base = None
    for number in range(SWAPS + 1):
        path = folder / f"v{number:03}"
        with torch.no_grad():
            model.bias.fill_(float(number))
            model.linear.weight.fill_(number / 17)
            model.factors.weight[::3].add_(0.01)
            expected[path.name] = model(ids).numpy()
        cpudist.export(model, path, base=base)
        base = path
    return folder, ids, expected


@pytest.fixture
def address(versions):
    """A server of the first one, in a thread."""
    config = uvicorn.Config(
        server.make_app(versions[0] / "v000"), port=0, log_level="warning"
    )
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run)
    thread.start()
    ticker = threading.Event()
    for _ in range(int(PATIENCE_S * 20)):
        if running.started or ticker.wait(0.05):
            break
    assert running.started
    port = running.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    running.should_exit = True
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_no_answer_fails_or_is_of_two_versions(versions, address) -> None:
    _, ids, expected = versions
    done = threading.Event()
    seen: list[set[str]] = [set() for _ in range(3)]
    problems: list[str] = []

    def ask(mine: set[str]) -> None:
        with httpx.Client(base_url=address, timeout=PATIENCE_S) as client:
            while not done.is_set():
                answer = client.post("/score", json={"ids": ids.tolist()})
                if answer.status_code != 200:
                    problems.append(answer.text)
                    continue
                found = answer.json()
                wanted = expected[found["version"]]
                if np.abs(np.array(found["scores"]) - wanted).max() > 1e-3:
                    problems.append(f"{found} and not {wanted}")
                mine.add(found["version"])

    pool = ThreadPoolExecutor(len(seen))
    asking = [pool.submit(ask, mine) for mine in seen]
    try:
        with httpx.Client(base_url=address, timeout=PATIENCE_S) as client:
            for number in range(1, SWAPS + 1):
                answer = client.post(f"/deltas/v{number:03}")
                assert answer.json() == {"version": f"v{number:03}"}
            assert client.get("/version").json()["version"] == f"v{SWAPS:03}"
    finally:
        done.set()
        pool.shutdown()
    for one in asking:
        one.result()  # what has ended a thread fails the test
    assert problems == []
    assert len(set.union(*seen)) > 10


def test_what_cannot_be_answered_is_said(versions, address) -> None:
    with httpx.Client(base_url=address, timeout=PATIENCE_S) as client:
        for words, code in (
            ({"ids": [[1, 2]]}, 422),
            ({"ids": []}, 422),
            ({"ids": [[ROWS] * len(FIELDS)]}, 422),
            ({"ids": [[2**63] * len(FIELDS)]}, 422),
            ({"ids": [[-(2**70)] * len(FIELDS)]}, 422),
        ):
            assert client.post("/score", json=words).status_code == code
        assert client.post("/deltas/v005").status_code == 409
        assert client.post("/deltas/..").status_code in (404, 405, 422)
        assert client.post("/deltas/.hidden").status_code == 422
        answer = client.post("/score", json={"ids": versions[1].tolist()})
        wanted = versions[2]["v000"]
        np.testing.assert_allclose(answer.json()["scores"], wanted, atol=1e-5)


def test_the_program_starts_as_its_page_says(versions, tmp_path) -> None:
    words = [sys.executable, str(ROOT / "examples" / "serving" / "server.py")]
    program = Program(
        [*words, str(versions[0] / "v000"), "--port", "0"],
        ROOT,
        clean_environment() | {"CPUDIST_THREADS": "1"},
        tmp_path / "log",
    )
    try:
        ticker, running = threading.Event(), None
        for _ in range(int(PATIENCE_S * 20)):
            running = re.search(
                r"running on (http://127[0-9.]+:[0-9]+)", program.text()
            )
            if running or program.process.poll() is not None or ticker.wait(0.05):
                break
        assert running, program.text()
        address = running.group(1)
        with httpx.Client(base_url=address, timeout=PATIENCE_S) as client:
            answer = client.post("/score", json={"ids": versions[1].tolist()})
            wanted = versions[2]["v000"]
            np.testing.assert_allclose(answer.json()["scores"], wanted, atol=1e-5)
            taken = client.post("/deltas/v001")
            assert taken.json() == {"version": "v001"}
            one = client.post("/score", json={"ids": versions[1][:1].tolist()})
            said = "\n".join([client.get("/version").text, one.text, taken.text])
            printed.check("serving-answers", said.replace("v001", "flights-2"))
        # Beside warnings of torch's exporter, and before the requests.
        said = re.findall(r"^INFO: +[A-Z].*$", program.text(), re.MULTILINE)
        printed.check("serving-server", "\n".join(said))
    finally:
        program.end()

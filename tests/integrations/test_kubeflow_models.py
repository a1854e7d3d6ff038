# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The manifests of examples/kubernetes, by models that Kubeflow makes of its schemas.

The models drop what they do not know: what does not come back was misspelt, or is of
another version.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from programs import ROOT

MANIFESTS = ROOT / "examples/kubernetes"
pytestmark = pytest.mark.integrations


def through_pytorchjob(job):
    training = pytest.importorskip("kubeflow.training", exc_type=ImportError)
    client = training.ApiClient()
    answer = SimpleNamespace(data=json.dumps(job))
    made = client.deserialize(answer, "KubeflowOrgV1PyTorchJob")
    return client.sanitize_for_serialization(made)


def through_trainjob(job):
    models = pytest.importorskip("kubeflow_trainer_api.models", exc_type=ImportError)
    return models.TrainerV1alpha1TrainJob.from_dict(job).to_dict()


THROUGH = {"PyTorchJob": through_pytorchjob, "TrainJob": through_trainjob}


def jobs_of(path: Path):
    yaml = pytest.importorskip("yaml", exc_type=ImportError)
    return list(yaml.safe_load_all(path.read_text()))


@pytest.mark.parametrize("name", sorted(path.name for path in MANIFESTS.iterdir()))
def test_what_a_manifest_says_is_known(name):
    jobs = jobs_of(MANIFESTS / name)
    assert jobs
    for job in jobs:
        assert THROUGH[job["kind"]](job) == job


WRONG = [
    ("pytorchjob.yaml", ["pytorchReplicaSpecs", "Master"], "replica"),
    (
        "pytorchjob.yaml",
        ["pytorchReplicaSpecs", "Worker", "template", "spec"],
        "contai",
    ),
    ("trainjob.yaml", ["trainer"], "numProcsPerNode"),
    ("trainjob.yaml", [], "runtimeReference"),
]


@pytest.mark.parametrize(("name", "path", "unknown"), WRONG)
def test_what_is_misspelt_is_found(name, path, unknown):
    (job,) = jobs_of(MANIFESTS / name)
    wrong = copy.deepcopy(job)
    place = wrong["spec"]
    for key in path:
        place = place[key]
    place[unknown] = 1
    assert THROUGH[job["kind"]](wrong) != wrong

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Parameter-server training for PyTorch on CPUs.

``init()``, wrap the optimizer in ``DistributedOptimizer``, train, ``shutdown()``;
launch with torchrun. See README.md.
"""

# ruff: noqa: E402
from torch_cpudist import _build_check

# Before the others, because it explains in one sentence why they would fail.
_build_check.check()

from torch_cpudist import (
    backends,
    data,
    errors,
    integrations,
    losses,
    metrics,
    monitor,
    optim,
)
from torch_cpudist._version import __version__ as __version__
from torch_cpudist.advice.advice import Advice
from torch_cpudist.advice.advising import advise
from torch_cpudist.data import infer_from_dataset, train_from_dataset
from torch_cpudist.errors import (
    AddressError,
    AuthenticationError,
    BackendUnavailableError,
    BadRecordError,
    BatchTooSmallError,
    ClosedError,
    ConfigMismatchError,
    ConfigurationError,
    DataFileError,
    DenseGradientError,
    Error,
    FencedError,
    ForkedProcessError,
    GlobalRandomError,
    IdTypeError,
    InternalError,
    InvalidArgumentError,
    ModelChangedError,
    NonFiniteGradientError,
    NotInitializedError,
    OperationTimeoutError,
    OutOfMemoryError,
    OverloadedError,
    PeerLostError,
    PreemptedError,
    ProtocolError,
    RankFailedError,
    RemoteTableError,
    RowOutOfRangeError,
    SnapshotCorruptError,
    SnapshotError,
    SparseGradientError,
    TableFullError,
    TooFewStepsError,
    UnpulledRowError,
    UnsupportedModelError,
    UnsupportedOptimizerError,
)
from torch_cpudist.inference.exporting import export
from torch_cpudist.inference.loading import load_for_inference
from torch_cpudist.inference.reader import Reader
from torch_cpudist.launch.context import Context, current, get_context
from torch_cpudist.launcher import launch
from torch_cpudist.model.clipping import clip_grad_norm_
from torch_cpudist.optimizer.distributed import DistributedOptimizer
from torch_cpudist.precision import Optimization, optimize
from torch_cpudist.replicas import ReplicaExecutor
from torch_cpudist.runtime import (
    barrier,
    global_step,
    init,
    is_server,
    is_trainer,
    serve,
    server_count,
    shutdown,
    split_files,
    trainer_count,
    trainer_rank,
)
from torch_cpudist.settings.admission import CountFilter, Probability
from torch_cpudist.settings.average import EMA
from torch_cpudist.settings.clip import ClipNorm, ClipTensorNorm, ClipValue
from torch_cpudist.settings.communicator import Communicator
from torch_cpudist.settings.delay_compensation import DelayCompensation
from torch_cpudist.settings.eviction import Evict
from torch_cpudist.settings.outer import Outer
from torch_cpudist.settings.replicas import Replicas
from torch_cpudist.settings.server import Server
from torch_cpudist.settings.sharding import Sharding
from torch_cpudist.strategies import (
    AllReduce,
    Async,
    Geo,
    HalfAsync,
    Hybrid,
    LocalSGD,
    Reduce,
    Strategy,
    Sync,
    strategy,
)
from torch_cpudist.tables.hashing import hash_keys
from torch_cpudist.tables.initial import Constant, Normal, Uniform
from torch_cpudist.tables.open import Embedding, EmbeddingBag
from torch_cpudist.tables.remote import remote_tables
from torch_cpudist.tables.remote_weight import RemoteWeight
from torch_cpudist.tables.sharding import shard_tables

__all__ = [
    "EMA",
    "AddressError",
    "Advice",
    "AllReduce",
    "Async",
    "AuthenticationError",
    "BackendUnavailableError",
    "BadRecordError",
    "BatchTooSmallError",
    "ClipNorm",
    "ClipTensorNorm",
    "ClipValue",
    "ClosedError",
    "Communicator",
    "ConfigMismatchError",
    "ConfigurationError",
    "Constant",
    "Context",
    "CountFilter",
    "DataFileError",
    "DelayCompensation",
    "DenseGradientError",
    "DistributedOptimizer",
    "Embedding",
    "EmbeddingBag",
    "Error",
    "Evict",
    "FencedError",
    "ForkedProcessError",
    "Geo",
    "GlobalRandomError",
    "HalfAsync",
    "Hybrid",
    "IdTypeError",
    "InternalError",
    "InvalidArgumentError",
    "LocalSGD",
    "ModelChangedError",
    "NonFiniteGradientError",
    "Normal",
    "NotInitializedError",
    "OperationTimeoutError",
    "Optimization",
    "OutOfMemoryError",
    "Outer",
    "OverloadedError",
    "PeerLostError",
    "PreemptedError",
    "Probability",
    "ProtocolError",
    "RankFailedError",
    "Reader",
    "Reduce",
    "RemoteTableError",
    "RemoteWeight",
    "ReplicaExecutor",
    "Replicas",
    "RowOutOfRangeError",
    "Server",
    "Sharding",
    "SnapshotCorruptError",
    "SnapshotError",
    "SparseGradientError",
    "Strategy",
    "Sync",
    "TableFullError",
    "TooFewStepsError",
    "Uniform",
    "UnpulledRowError",
    "UnsupportedModelError",
    "UnsupportedOptimizerError",
    "advise",
    "backends",
    "barrier",
    "clip_grad_norm_",
    "current",
    "data",
    "errors",
    "export",
    "get_context",
    "global_step",
    "hash_keys",
    "infer_from_dataset",
    "init",
    "integrations",
    "is_server",
    "is_trainer",
    "launch",
    "load_for_inference",
    "losses",
    "metrics",
    "monitor",
    "optim",
    "optimize",
    "remote_tables",
    "serve",
    "server_count",
    "shard_tables",
    "shutdown",
    "split_files",
    "strategy",
    "train_from_dataset",
    "trainer_count",
    "trainer_rank",
]

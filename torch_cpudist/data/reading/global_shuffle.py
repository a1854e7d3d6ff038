# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Global shuffle: trainers give each other their records, over the core's channels."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torch_cpudist import _core
from torch_cpudist.collective.shared_group import shared_group
from torch_cpudist.data.reading.settings import Reading
from torch_cpudist.data.reading.sharing import Share
from torch_cpudist.errors import ConfigMismatchError, ConfigurationError
from torch_cpudist.launch import context
from torch_cpudist.launch.endpoints import own_address, reachable
from torch_cpudist.launch.refusals import log_refusals
from torch_cpudist.launch.run import Run
from torch_cpudist.machine import host

INSTANCE_KEY = -1
_TOLD_BYTES = 2048  # of addresses, as text
_EPOCH_MASK = 2**32 - 1


def exchange_records(
    store: _core.DataStore, reading: Reading, share: Share, seed: int, key: int | None
) -> None:
    """Replaces a store's records by those that are drawn for this trainer.

    Collective. Messages: one of about 1 MiB per MiB of records to another trainer, and
    two gathers over the trainers' group for addresses and arguments.

    Args:
        store: loaded; empty if this raises.
        reading: of the dataset.
        share: of the dataset: this trainer's rank and the number of trainers.
        seed: of the draw.
        key: ``None`` for records by themselves, ``INSTANCE_KEY``, or a used slot.

    Raises:
        ConfigurationError: the share is not the trainer's own, or links go over a
            collective backend, which trainers have none of between them.
        ConfigMismatchError: trainers have other arguments or slots.
        PeerLostError, OperationTimeoutError: a trainer died or does not come.
        AuthenticationError: a trainer has not proven the run's key.
    """
    here = context.current()
    _check(here, share)
    environment = here.environment
    shuffle = _core.DataShuffle(
        reading.core_schema(),
        rank=here.trainer_rank,
        trainers=here.trainer_count,
        run_id=here.run_id,
        epoch=seed & _EPOCH_MASK,
        host=host.description(),
        connect_deadline_ms=environment.rpc_deadline_ms,
        liveness_ms=environment.liveness_ms,
        round_deadline_ms=environment.round_deadline_ms,
        secret=environment.secret,
    )
    first, last = environment.ports
    addresses = shuffle.listen(
        bind=own_address(environment, here.layout), port_first=first, port_last=last
    )
    told = {
        "addresses": addresses,
        "host": here.layout.hosts[here.rank],
        "arguments": _digest(reading, seed, key),
    }
    found = _gather(here, told)
    if any(one["arguments"] != told["arguments"] for one in found):
        ranks = [rank for rank, one in enumerate(found)
                 if one["arguments"] != found[0]["arguments"]]  # fmt: skip
        raise ConfigMismatchError(
            f"global_shuffle: trainers {ranks} have another seed, key, format or slots "
            "than trainer 0. Call it with equal arguments on all."
        )
    by = "record" if key is None else "instance" if key == INSTANCE_KEY else "slot"
    try:
        shuffle.run(
            store,
            addresses=[
                reachable(one["addresses"], one["host"] == told["host"])
                for one in found
            ],
            seed=seed,
            by=by,
            used_slot=max(key or 0, 0),
        )
    finally:
        log_refusals("global_shuffle", *shuffle.take_refusals(0.0))


def _check(here: Run, share: Share) -> None:
    if share != (here.trainer_rank, here.trainer_count):
        raise ConfigurationError(
            f"global_shuffle: this dataset reads share {share}, expected the trainer's "
            f"own, {(here.trainer_rank, here.trainer_count)}. Do not pass share=."
        )
    if here.environment.transport != "tcp":
        raise ConfigurationError(
            f"global_shuffle with CPUDIST_TRANSPORT={here.environment.transport}: "
            "trainers have no links to each other there. Use tcp, or local_shuffle()."
        )


def _digest(reading: Reading, seed: int, key: int | None) -> str:
    slots = [slot.settings() for slot in reading.slots]
    facts = json.dumps([reading.format, slots, reading.instance_ids, seed, key])
    return hashlib.sha256(facts.encode()).hexdigest()


def _gather(here: Run, told: dict[str, Any]) -> list[dict[str, Any]]:
    """What all trainers tell, as JSON in words of 8 bytes."""
    text = json.dumps(told).encode()
    if len(text) > _TOLD_BYTES:
        raise ConfigurationError(
            f"global_shuffle: addresses of {len(text)} bytes, expected at most "
            f"{_TOLD_BYTES}"
        )
    words: NDArray[np.int64] = np.frombuffer(
        text.ljust(_TOLD_BYTES), dtype=np.int64
    ).copy()
    group = shared_group(here)
    return [
        json.loads(one.astype(np.int64).tobytes())
        for one in group.gather("global_shuffle()", words)
    ]

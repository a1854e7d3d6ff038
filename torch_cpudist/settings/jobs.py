# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Variables of servers and trainers that are launched apart from each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch_cpudist.errors import ConfigurationError
from torch_cpudist.settings import fields

ROLES = ("server", "trainer")
NAMES = (
    "CPUDIST_ROLE",
    "CPUDIST_RENDEZVOUS",
    "CPUDIST_TRAINERS",
    "CPUDIST_REJOIN_S",
)
_MAX_TRAINERS = 65535
_MAX_REJOIN_S = 365 * 24 * 3600
REJOIN_S = 600


@dataclass(frozen=True)
class SeparateJob:
    """What says that this rank's torchrun job is one of several of a run.

    Attributes:
        role: of every rank of this job: ``"server"`` or ``"trainer"``.
        host, port: where server 0 can be met.
        trainers: trainers to wait for at the start, in all jobs together; 0 where the
            servers say it.
        rejoin_s: seconds for which servers wait for a lost trainer to come back, and
            trainers for lost servers; 0 on trainers: not at all.
        comes_back: of a trainer: it goes on with servers that have counted it as lost,
            and are there; not where ``rejoin_s`` was set to 0.
    """

    role: str
    host: str
    port: int
    trainers: int
    rejoin_s: int
    comes_back: bool = True

    @property
    def where(self) -> str:
        """The meeting point, for messages."""
        return f"CPUDIST_RENDEZVOUS={self.host}:{self.port}"


def _endpoint(text: str) -> tuple[str, int]:
    host, colon, port = text.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise ConfigurationError(
            f"CPUDIST_RENDEZVOUS={text!r}: expected host:port of server 0, with a port "
            "between 1 and 65535, such as 10.0.0.1:29600."
        )
    return host, int(port)


def _number(
    variables: Mapping[str, str], name: str, default: int, least: int, most: int
) -> int:
    if name not in variables:
        return default
    value = fields.parse_text(name, variables[name], int)
    fields.check_range(f"{name}={value}", value, least, most)
    return int(value)


def parse(variables: Mapping[str, str]) -> SeparateJob | None:
    """Reads the variables of separate groups; ``None`` where there are none.

    Raises:
        ConfigurationError: a half of them is missing, or a value is wrong.
    """
    present = [name for name in NAMES if name in variables]
    if not present:
        return None
    for name, use in (
        ("CPUDIST_ROLE", "server or trainer"),
        ("CPUDIST_RENDEZVOUS", "host:port of server 0"),
    ):
        if name not in variables:
            raise ConfigurationError(
                f"{', '.join(present)} set, but not {name}. Set it to {use} on every "
                "group, or unset all of these to launch servers and trainers together."
            )
    role = variables["CPUDIST_ROLE"].strip().lower()
    if role not in ROLES:
        raise ConfigurationError(
            f"CPUDIST_ROLE={role!r}: {fields.nearest(role, ROLES)}"
        )
    waits_s = REJOIN_S if role == "server" else 0
    host, port = _endpoint(variables["CPUDIST_RENDEZVOUS"])
    trainers = _number(variables, "CPUDIST_TRAINERS", 0, 1, _MAX_TRAINERS)
    if role == "server" and not trainers:
        raise ConfigurationError(
            "CPUDIST_ROLE=server needs CPUDIST_TRAINERS: how many trainers, of all "
            "groups together, to wait for at the start."
        )
    rejoin_s = _number(variables, "CPUDIST_REJOIN_S", waits_s, 0, _MAX_REJOIN_S)
    return SeparateJob(
        role=role,
        host=host,
        port=port,
        trainers=trainers,
        rejoin_s=rejoin_s,
        comes_back=rejoin_s > 0 or "CPUDIST_REJOIN_S" not in variables,
    )


def job_name(variables: Mapping[str, str]) -> str | None:
    """What a torchrun job is called, over its restarts; ``None`` without torchrun.

    Static rendezvous calls every job ``none``; its address tells jobs apart.
    """
    name = variables.get("TORCHELASTIC_RUN_ID", "none")
    if name != "none":
        return name
    if "MASTER_ADDR" in variables and "RANK" in variables:
        return f"{variables['MASTER_ADDR']}:{variables.get('MASTER_PORT', '')}"
    return None

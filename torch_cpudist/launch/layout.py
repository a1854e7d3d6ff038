# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Who serves and who trains: a pure function of what every rank told about itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch_cpudist.errors import ConfigMismatchError, ConfigurationError
from torch_cpudist.settings.jobs import ROLES


@dataclass(frozen=True)
class Member:
    """What one rank tells the others.

    Attributes:
        rank: among all ranks.
        local_rank, group_rank: its place among the hosts.
        role_name: torchrun's ``--role``.
        host_id: equal for ranks that share a host; see ``host.identity``.
        host: host name and process, for messages.
        agreed: settings that must be the same on every rank, by variable.
        shm: the backend ``shm`` can be used there.
        process: of the rank; see ``processes.own``.
    """

    rank: int
    local_rank: int
    group_rank: int
    role_name: str
    host_id: str
    host: str
    agreed: dict[str, str]
    shm: bool = False
    process: str = ""


@dataclass(frozen=True)
class Numbers:
    """What one rank is in its run; see the attributes of ``Context``."""

    role: str
    trainer_rank: int
    trainer_count: int
    server_count: int
    shard_id: int


@dataclass(frozen=True)
class Layout:
    """Roles of all ranks.

    Attributes:
        servers: ranks by shard id.
        trainers: ranks by trainer rank.
        colocated: every rank does both.
        hosts: host id by rank.
        shm: the backend ``shm`` can be used on every rank.
    """

    servers: tuple[int, ...]
    trainers: tuple[int, ...]
    colocated: bool
    hosts: tuple[str, ...]
    shm: bool = False

    def numbers_of(self, rank: int) -> Numbers:
        """What ``rank`` is."""
        training, serving = rank in self.trainers, rank in self.servers
        return Numbers(
            role="trainer" if training else "server",
            trainer_rank=self.trainers.index(rank) if training else -1,
            trainer_count=len(self.trainers),
            server_count=len(self.servers),
            shard_id=self.servers.index(rank) if serving else -1,
        )

    @property
    def one_host(self) -> bool:
        """Whether all ranks share a host."""
        return len(set(self.hosts)) == 1

    def ranks_on_host_of(self, rank: int) -> int:
        """How many ranks share the host of ``rank``, itself included."""
        return self.hosts.count(self.hosts[rank])


def check_agreement(members: Sequence[Member]) -> None:
    """Raises ``ConfigMismatchError`` if members' settings differ; names the ranks."""
    for name in sorted({name for member in members for name in member.agreed}):
        by_value: dict[str, list[int]] = {}
        for member in members:
            by_value.setdefault(member.agreed.get(name, "(unset)"), []).append(
                member.rank
            )
        if len(by_value) > 1:
            found = "; ".join(
                f"{value} on ranks {ranks}" for value, ranks in by_value.items()
            )
            raise ConfigMismatchError(
                f"ranks disagree about {name}: {found}. Set it to the same value on "
                "every host."
            )


def _by_role(members: Sequence[Member]) -> tuple[list[int], list[int]]:
    roles = {role: [m.rank for m in members if m.role_name == role] for role in ROLES}
    others = [m.rank for m in members if m.role_name not in ROLES]
    if others:
        name = members[others[0]].role_name
        raise ConfigurationError(
            f"ranks {others} have torchrun --role={name}, others server or trainer. "
            "Give every torchrun of this rendezvous --role=server or --role=trainer, "
            "or none of them."
        )
    for role in ROLES:
        if not roles[role]:
            other = ROLES[1 - ROLES.index(role)]
            raise ConfigurationError(
                f"all {len(members)} ranks have --role={other}, none has "
                f"--role={role}. Start a torchrun --role={role} in this rendezvous "
                "(--nnodes counts both), or drop --role to let every rank train and "
                "serve."
            )
    return roles["server"], roles["trainer"]


def assign(members: Sequence[Member], servers: int) -> Layout:
    """Gives every rank its role.

    Args:
        members: all ranks, in order of rank.
        servers: how many dedicated servers; 0 lets every rank do both, unless
            torchrun's role names say who serves. They are spread over hosts: of the
            ranks sorted by (local rank, group rank) the first serve. Shards and
            trainers are numbered by rank.

    Raises:
        ConfigMismatchError: ranks were started with different settings.
        ConfigurationError: roles that do not fit together.
    """
    check_agreement(members)
    hosts = tuple(member.host_id for member in members)
    everyone = tuple(range(len(members)))
    shm = all(member.shm for member in members)
    if any(member.role_name in ROLES for member in members):
        serving, training = _by_role(members)
        return Layout(tuple(serving), tuple(training), False, hosts, shm)
    if servers == 0:
        return Layout(everyone, everyone, True, hosts, shm)
    spread = sorted(members, key=lambda m: (m.local_rank, m.group_rank, m.rank))
    chosen = sorted(member.rank for member in spread[:servers])
    rest = tuple(rank for rank in everyone if rank not in set(chosen))
    return Layout(tuple(chosen), rest, False, hosts, shm)


def one_role(members: Sequence[Member], role: str) -> Layout:
    """The layout of a torchrun job all of whose ranks do the same.

    Raises:
        ConfigMismatchError: ranks were started with different settings.
    """
    check_agreement(members)
    everyone = tuple(range(len(members)))
    hosts = tuple(member.host_id for member in members)
    serving, training = ((everyone, ()), ((), everyone))[role == "trainer"]
    shm = all(member.shm for member in members)
    return Layout(serving, training, False, hosts, shm)

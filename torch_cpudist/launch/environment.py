# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
# long: one reader of every CPUDIST_* variable of a run, which knows all their names
"""What the environment says: a launcher's variables and ``CPUDIST_*``, checked.

Every ``CPUDIST_*`` variable of a run is read here, but ``CPUDIST_SIMD``, which the core
reads. Variables of others that concern one file alone are read there: Gloo's interface,
oneCCL's and oneDNN's, the compiler's, and what ``launch()`` and ``ccl`` ask a launcher.

Pure functions of a mapping. A contradiction, a missing half, or a variable that this
version does not have is an error here, before anything is started.
"""

from __future__ import annotations

import difflib
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch_cpudist import _core
from torch_cpudist.errors import ConfigurationError
from torch_cpudist.launch.other_launchers import LAUNCHED_BY, as_torchrun
from torch_cpudist.log import LEVELS
from torch_cpudist.settings import fields, jobs, secret
from torch_cpudist.settings.jobs import ROLES, SeparateJob
from torch_cpudist.settings.replicas import Replicas
from torch_cpudist.settings.server import Server
from torch_cpudist.strategies.registry import SETTINGS, strategy

_LAUNCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
MAX_RANKS = 65535
# A year: as good as for ever, and it overflows no clock.
MAX_WAIT_S = 365 * 24 * 3600
_MAX_WAIT_MS = MAX_WAIT_S * 1000
_MAX_RETRIES = 2**31 - 1
_LAST_PORT = 65535
_REPLICAS = "CPUDIST_REPLICAS_COUNT"

OWN_VARIABLES = frozenset(
    "CPUDIST_" + name
    for name in (
        "BACKEND",
        "BIND",
        "GRACE_S",
        "LIVENESS_MS",
        "LOG",
        "METRICS",
        "PIN",
        "PORTS",
        "RECONNECT_MS",
        "ROUND_DEADLINE_MS",
        "RPC_DEADLINE_MS",
        "RPC_RETRIES",
        "SERVERS",
        "SIMD",
        "SNAPSHOT_DIR",
        "STRATEGY",
        "THREADS",
        "TRANSPORT",
    )
) | frozenset((*jobs.NAMES, *secret.NAMES))

_NO_POOL = (
    "unset it. A trainer has no pools: one thread of the core serves the links to all "
    "servers; servers have CPUDIST_SERVER_THREADS"
)
# Of the design, but not of this version: each with what to do instead.
_LATER = {
    "CPUDIST_SEND_THREADS": _NO_POOL,
    "CPUDIST_PULL_THREADS": _NO_POOL,
    "CPUDIST_PREFETCH_THREADS": _NO_POOL,
}
# The variables of settings classes.
_SET = fields.variables(SETTINGS)
BACKENDS = ("auto", "gloo", "shm", "ccl", "nccl", "mpi")


class MetricsAddress(NamedTuple):
    """Where ranks of a host tell what they do: the first one's address and port."""

    host: str
    port: int


@dataclass(frozen=True)
class Environment:
    """What the environment of one rank says, or ``init()``'s arguments.

    Attributes:
        rank, world_size: of all ranks, servers included.
        local_rank, local_world_size, group_rank: place of this rank among hosts.
        local_said: the environment has it; else all may be on one host, or each alone.
        restart_count: how often torchrun has restarted this rank.
        role_name: torchrun's ``--role``.
        master_addr, master_port: the store; ``None`` without a launcher.
        launched: a launcher (torchrun, srun, mpirun) set the ranks.
        agent_store: its agent keeps the store; else rank 0 does.
        servers: dedicated servers; 0 is colocated; ``None`` too, unless roles or
            ``init(servers=)`` say otherwise.
        backend: one of ``BACKENDS``.
        transport: ``tcp`` or ``c10d``.
        bind: address or interface to listen on; ``None`` chooses.
        ports: first and last port; (0, 0) is any.
        threads: torch threads of this rank; ``None`` takes the share of cores.
        openmp_threads: the same of ``OMP_NUM_THREADS``, where somebody has chosen it.
        pin: ranks and replicas have cores of their own.
        replicas: of each rank; ``None`` without ``CPU_NUM`` and the like.
        liveness_ms, reconnect_ms, round_deadline_ms, rpc_deadline_ms: the clocks.
        rpc_retries: how often a request is sent again over a new connection.
        log: ``warning``, ``info`` or ``debug``.
        strategy: name of the strategy; ``None`` leaves it to the script.
        settings: variables of settings classes (``CPUDIST_SHARDING_SLICE``, ...), as
            text.
        values: what they say, read once.
        server: how this rank's server runs.
        snapshot_dir: where snapshots are; ``None`` leaves it to ``resume(path)``.
        apart: of servers and trainers that are launched apart; else ``None``.
        job: name of this rank's torchrun job; ``None`` without one.
        metrics: where it tells what it does; ``None``: nowhere.
        grace_s: for how long the process lives on after SIGTERM; 0: not at all.
        secret: the run's key; ``None`` without one.
        secret_required: nothing may go over a link that does not prove it.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    local_said: bool = True
    group_rank: int = 0
    restart_count: int = 0
    role_name: str = "default"
    master_addr: str | None = None
    master_port: int = 0
    launched: bool = False
    agent_store: bool = False
    servers: int | None = None
    backend: str = "auto"
    transport: str = "tcp"
    bind: str | None = None
    ports: tuple[int, int] = (0, 0)
    threads: int | None = None
    openmp_threads: int | None = None
    pin: bool = False
    replicas: int | None = None
    liveness_ms: int = 3000
    reconnect_ms: int = 500
    round_deadline_ms: int = 1_800_000
    rpc_deadline_ms: int = 180_000
    rpc_retries: int = 3
    log: str = "warning"
    strategy: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    server: Server = field(default_factory=Server)
    snapshot_dir: str | None = None
    apart: SeparateJob | None = None
    job: str | None = None
    metrics: MetricsAddress | None = None
    grace_s: int = 20
    secret: _core.Secret | None = None
    secret_required: bool = False


def _integer(
    variables: Mapping[str, str],
    name: str,
    default: int,
    least: int = 0,
    most: int = MAX_RANKS,
) -> int:
    text = variables.get(name)
    if text is None:
        return default
    try:
        value = int(text)
    except ValueError:
        raise ConfigurationError(f"{name}={text!r}: expected a whole number.") from None
    fields.check_range(f"{name}={value}", value, least, most)
    return value


def _wait_ms(
    variables: Mapping[str, str], name: str, default: int, least: int = 1
) -> int:
    return _integer(variables, name, default, least, _MAX_WAIT_MS)


def _master_port(variables: Mapping[str, str]) -> int:
    return _integer(variables, "MASTER_PORT", 0, least=1, most=_LAST_PORT)


def _check_names(variables: Mapping[str, str]) -> None:
    known = OWN_VARIABLES | _SET
    for name in sorted(variables):
        if not name.upper().startswith("CPUDIST_") or name in known:
            continue
        if name.upper() in known:
            raise ConfigurationError(
                f"{name}: variables are upper case. Set {name.upper()}."
            )
        if name in _LATER:
            raise ConfigurationError(
                f"{name} is not available in this version: {_LATER[name]}."
            )
        hint = fields.nearest(
            name.upper(), known, prefix="CPUDIST_", page="docs/configuration.md"
        )
        raise ConfigurationError(f"unknown variable {name}: {hint}")


def _settings(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables of settings classes; ``CPU_NUM`` is one under another name."""
    texts = {name: text for name, text in variables.items() if name in _SET}
    text = variables.get("CPU_NUM", "").strip()
    if text and _REPLICAS not in texts:
        # Checked under its own name, which is the one that was set.
        _integer(variables, "CPU_NUM", 1, 1, fields.MAX_THREADS)
        texts[_REPLICAS] = text
    return texts


def _choice(variables: Mapping[str, str], name: str, valid: tuple[str, ...]) -> str:
    value = variables.get(name, valid[0]).strip().lower()
    if value not in valid:
        raise ConfigurationError(f"{name}={value!r}: {fields.nearest(value, valid)}")
    return value


def _ports(variables: Mapping[str, str]) -> tuple[int, int]:
    text = variables.get("CPUDIST_PORTS")
    if text is None:
        return (0, 0)
    first, _, last = text.partition("-")
    try:
        ports = (int(first), int(last or first))
    except ValueError:
        ports = (0, -1)
    if not 1 <= ports[0] <= ports[1] <= 65535:
        raise ConfigurationError(
            f"CPUDIST_PORTS={text!r}: expected a port or a range of ports, such as "
            "41000 or 41000-41015, between 1 and 65535."
        )
    return ports


def _check_launch(variables: Mapping[str, str]) -> bool:
    """Whether a launcher set the ranks; all of its variables or none."""
    present = [name for name in LAUNCHED_BY if name in variables]
    if not present:
        return False
    missing = [name for name in _LAUNCH if name not in variables]
    if missing:
        raise ConfigurationError(
            f"{', '.join(present)} set, but not {', '.join(missing)}. Start the script "
            f"with torchrun, which sets them all, or unset {', '.join(present)} for a "
            "single process."
        )
    if not variables["MASTER_ADDR"].strip():
        raise ConfigurationError(
            "MASTER_ADDR is empty: expected the name or address of the first host. "
            "Start the script with torchrun, which sets it."
        )
    return True


def _role_name(variables: Mapping[str, str]) -> str:
    """The ``--role`` of torchrun: a role in any case, or a name that is like none."""
    text = variables.get("ROLE_NAME", "default")
    folded = text.strip().lower()
    if folded in ROLES:
        return folded
    if close := difflib.get_close_matches(folded, ROLES, n=1, cutoff=0.85):
        raise ConfigurationError(
            f"torchrun --role={text}: did you mean --role={close[0]}? For ranks that "
            "train and serve choose a name less like it, or none."
        )
    return text


def _servers(variables: Mapping[str, str]) -> int | None:
    if "CPUDIST_SERVERS" not in variables:
        return None
    return _integer(variables, "CPUDIST_SERVERS", 0)


def _threads(variables: Mapping[str, str]) -> int | None:
    if "CPUDIST_THREADS" not in variables:
        return None
    return _integer(variables, "CPUDIST_THREADS", 1, 1, fields.MAX_THREADS)


def _openmp_threads(variables: Mapping[str, str], local_ranks: int) -> int | None:
    """What ``OMP_NUM_THREADS`` says; torchrun puts 1 there for several ranks.

    What OpenMP does not understand it ignores, and so does this.
    """
    text = variables.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if not (text.isascii() and text.isdecimal()):
        return None
    count = int(text)
    if count == 1 and local_ranks > 1:
        return None
    return count if 1 <= count <= fields.MAX_THREADS else None


def _pin(variables: Mapping[str, str]) -> bool:
    text = variables.get("CPUDIST_PIN", "0")
    return bool(fields.parse_text("CPUDIST_PIN", text, bool))


def _strategy(variables: Mapping[str, str]) -> str | None:
    text = variables.get("CPUDIST_STRATEGY")
    if text is None:
        return None
    try:
        return strategy(text).name
    except ConfigurationError as error:
        raise ConfigurationError(f"CPUDIST_STRATEGY={text!r}: {error}") from None


def _snapshot_dir(variables: Mapping[str, str]) -> str | None:
    text = variables.get("CPUDIST_SNAPSHOT_DIR")
    if text is not None and not text.strip():
        raise ConfigurationError(
            "CPUDIST_SNAPSHOT_DIR is empty: expected a directory that all processes "
            "share. Set one, or unset it."
        )
    return text


def _metrics(variables: Mapping[str, str]) -> MetricsAddress | None:
    text = variables.get("CPUDIST_METRICS")
    if text is None:
        return None
    host, colon, port = text.strip().rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    try:
        address = str(ipaddress.ip_address(bare)) if colon else "127.0.0.1"
        # An IPv6 address without brackets may end in something like a port.
        number = int(port) if bare == host or ":" in address else 0
        number = 0 if ":" in host and bare == host else number
    except ValueError:
        number = 0
    if not 1 <= number <= _LAST_PORT:
        raise ConfigurationError(
            f"CPUDIST_METRICS={text!r}: expected a port of 1 to {_LAST_PORT}, which is "
            "listened at on loopback, or a numeric address of this host and a port, "
            "such as 9400, 10.0.0.5:9400 or [::1]:9400."
        )
    return MetricsAddress(address, number)


def check_ranks(made: Environment) -> None:
    """Checks that ranks, sizes and roles fit together.

    Raises:
        ConfigurationError: says which contradict each other and what to set.
    """
    if made.rank >= made.world_size:
        raise ConfigurationError(
            f"RANK={made.rank} with WORLD_SIZE={made.world_size}: ranks run from 0 to "
            "WORLD_SIZE-1. Start the script with torchrun, which sets both."
        )
    if made.local_rank >= made.local_world_size:
        raise ConfigurationError(
            f"LOCAL_RANK={made.local_rank} with "
            f"LOCAL_WORLD_SIZE={made.local_world_size}: local "
            "ranks run from 0 to LOCAL_WORLD_SIZE-1. Start the script with torchrun."
        )
    if made.local_world_size > made.world_size:
        raise ConfigurationError(
            f"LOCAL_WORLD_SIZE={made.local_world_size} with "
            f"WORLD_SIZE={made.world_size}: a host cannot have more ranks than there "
            "are. Start the script with torchrun."
        )
    if made.servers and made.servers >= made.world_size:
        raise ConfigurationError(
            f"CPUDIST_SERVERS={made.servers} with WORLD_SIZE={made.world_size} leaves "
            f"no trainer. Set --nproc-per-node (and --nnodes) for at least "
            f"{made.servers + 1} ranks, or a smaller CPUDIST_SERVERS; unset it to let "
            "every rank train and serve."
        )
    if made.metrics and made.metrics.port + made.local_world_size - 1 > _LAST_PORT:
        raise ConfigurationError(
            f"CPUDIST_METRICS: port {made.metrics.port} and the next ones, up to "
            f"{made.local_world_size} for as many ranks of this host, go beyond "
            f"{_LAST_PORT}. Set a lower one."
        )
    if made.apart is not None and (made.servers is not None or made.role_name in ROLES):
        raise ConfigurationError(
            "CPUDIST_ROLE says what every rank of this torchrun job does: unset "
            "CPUDIST_SERVERS and drop torchrun's --role (init()'s servers= and role= "
            "too)."
        )
    if made.servers is not None and made.role_name in ROLES:
        raise ConfigurationError(
            f"CPUDIST_SERVERS={made.servers} and torchrun --role={made.role_name} both "
            "say who serves. Unset CPUDIST_SERVERS, or drop --role (of init()'s "
            "servers= and role=, give one)."
        )


def agreed_settings(made: Environment) -> dict[str, str]:
    """The settings that must be equal on every rank, by variable."""
    fixed = {
        "CPUDIST_BACKEND": made.backend,
        "CPUDIST_LIVENESS_MS": str(made.liveness_ms),
        "CPUDIST_RECONNECT_MS": str(made.reconnect_ms),
        "CPUDIST_ROUND_DEADLINE_MS": str(made.round_deadline_ms),
        "CPUDIST_RPC_DEADLINE_MS": str(made.rpc_deadline_ms),
        "CPUDIST_SERVERS": str(made.servers or 0),
        "CPUDIST_STRATEGY": made.strategy or "(unset)",
        "CPUDIST_TRANSPORT": made.transport,
    }
    # Hosts may have different numbers of cores, and so of replicas.
    own = "CPUDIST_REPLICAS_"
    return fixed | {k: v for k, v in made.settings.items() if not k.startswith(own)}


def parse(variables: Mapping[str, str], *, ranks_given: bool = False) -> Environment:
    """Reads and checks an environment.

    Args:
        variables: ``os.environ`` or the like; variables of others are ignored.
        ranks_given: by ``init()``: no other launcher than torchrun matters then.

    Raises:
        ConfigurationError: unknown, missing, malformed or contradictory variables.
    """
    _check_names(variables)
    variables = variables if ranks_given else as_torchrun(variables)
    launched = _check_launch(variables)
    world_size = _integer(variables, "WORLD_SIZE", 1, least=1) if launched else 1
    texts = _settings(variables)
    values = fields.read(SETTINGS, texts)
    server = fields.with_environment(Server(), values)
    for kind in SETTINGS:
        fields.with_environment(kind(), values)
    local_world_size = (
        _integer(variables, "LOCAL_WORLD_SIZE", world_size, least=1) if launched else 1
    )
    made = Environment(
        rank=_integer(variables, "RANK", 0) if launched else 0,
        world_size=world_size,
        local_rank=_integer(variables, "LOCAL_RANK", 0) if launched else 0,
        local_world_size=local_world_size,
        local_said=not launched or "LOCAL_WORLD_SIZE" in variables,
        group_rank=_integer(variables, "GROUP_RANK", 0) if launched else 0,
        restart_count=(
            _integer(variables, "TORCHELASTIC_RESTART_COUNT", 0) if launched else 0
        ),
        role_name=_role_name(variables) if launched else "default",
        master_addr=variables["MASTER_ADDR"].strip() if launched else None,
        master_port=_master_port(variables) if launched else 0,
        launched=launched,
        agent_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        servers=_servers(variables),
        backend=_choice(variables, "CPUDIST_BACKEND", BACKENDS),
        transport=_choice(variables, "CPUDIST_TRANSPORT", ("tcp", "c10d")),
        bind=variables.get("CPUDIST_BIND"),
        ports=_ports(variables),
        threads=_threads(variables),
        openmp_threads=_openmp_threads(variables, local_world_size),
        pin=_pin(variables),
        replicas=fields.with_environment(Replicas(), values).count,
        liveness_ms=_wait_ms(variables, "CPUDIST_LIVENESS_MS", 3000, least=100),
        reconnect_ms=_wait_ms(variables, "CPUDIST_RECONNECT_MS", 500),
        round_deadline_ms=_wait_ms(variables, "CPUDIST_ROUND_DEADLINE_MS", 1_800_000),
        rpc_deadline_ms=_wait_ms(variables, "CPUDIST_RPC_DEADLINE_MS", 180_000),
        rpc_retries=_integer(variables, "CPUDIST_RPC_RETRIES", 3, 0, _MAX_RETRIES),
        log=_choice(variables, "CPUDIST_LOG", tuple(LEVELS)),
        strategy=_strategy(variables),
        settings=texts,
        values=values,
        server=server,
        snapshot_dir=_snapshot_dir(variables),
        apart=jobs.parse(variables),
        job=jobs.job_name(variables),
        metrics=_metrics(variables),
        grace_s=_integer(variables, "CPUDIST_GRACE_S", 20, 0, MAX_WAIT_S),
        secret=secret.read(variables),
        secret_required=secret.required(variables),
    )
    if launched:  # else init() may be given the ranks, and checks them then
        check_ranks(made)
    return made


@dataclass(frozen=True)
class Alone:
    """What the environment says of a process that is in no run; see ``Environment``."""

    rank: int
    local_world_size: int
    threads: int | None
    pin: bool
    values: Mapping[str, Any]


def launched_count(variables: Mapping[str, str]) -> int:
    """How many ranks a launcher says that there are; 1 without one.

    Raises:
        ConfigurationError: it is no number.
    """
    return _integer(variables, "WORLD_SIZE", 1) if variables.get("WORLD_SIZE") else 1


def parse_alone(variables: Mapping[str, str]) -> Alone:
    """Reads what replicas of a process without ``init()`` follow, and nothing else.

    Raises:
        ConfigurationError: an unknown variable, or a wrong value of one that is read.
    """
    _check_names(variables)
    launched = _check_launch(variables)
    own = fields.variables([Replicas])
    texts = {k: v for k, v in _settings(variables).items() if k in own}
    local = launched and "LOCAL_WORLD_SIZE" in variables
    ranks = _integer(variables, "WORLD_SIZE", 1, least=1) if launched else 1
    return Alone(
        rank=_integer(variables, "RANK", 0) if launched else 0,
        local_world_size=(
            _integer(variables, "LOCAL_WORLD_SIZE", 1, least=1) if local else ranks
        ),
        threads=_threads(variables),
        pin=_pin(variables),
        values=fields.read([Replicas], texts),
    )

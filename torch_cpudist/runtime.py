# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
# long: one function for each call of the package, with what it promises.
"""The module-level functions: ``init``, and what acts on the thread's context."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import HashStore

from torch_cpudist import _core, log
from torch_cpudist.errors import ConfigurationError
from torch_cpudist.launch import (
    backend_choice,
    context,
    endpoints,
    environment,
    rank_network,
    separate_jobs,
)
from torch_cpudist.launch.context import Context
from torch_cpudist.launch.default_group import DefaultGroup
from torch_cpudist.launch.environment import Environment
from torch_cpudist.launch.layout import Layout, Member, Numbers, assign, one_role
from torch_cpudist.launch.rendezvous import Rendezvous, open_store
from torch_cpudist.launch.torch_threads import TorchThreads
from torch_cpudist.machine import files, host, processes
from torch_cpudist.monitor import opening as monitor
from torch_cpudist.settings import fields
from torch_cpudist.settings.jobs import ROLES
from torch_cpudist.settings.server import Server
from torch_cpudist.settings.words import Words

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_TIMEOUT_S = 300.0


def _explicit(
    made: Environment,
    rank: int | None,
    world_size: int | None,
    store: Store | None,
    network: _core.InprocNetwork | None,
) -> Environment:
    """Puts ``init``'s own rank, world size and store in the place of a launcher's."""
    given = {"rank": rank, "world_size": world_size, "store": store}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        if network is not None:
            raise ConfigurationError(
                "init(network=) also needs rank=, world_size=, store=."
            )
        return made
    if missing:
        raise ConfigurationError(
            f"init() was given {', '.join(sorted(set(given) - set(missing)))} but not "
            f"{', '.join(missing)}: pass all three, or none and start with torchrun."
        )
    most = environment.MAX_RANKS
    world_size = fields.whole_number("init(): world_size", world_size, 1, most)
    rank = fields.whole_number("init(): rank", rank, 0, world_size - 1)
    return replace(
        made,
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        group_rank=0,
        role_name="default",
        master_addr=None,
        master_port=0,
        launched=False,
    )


def _with_arguments(
    made: Environment,
    servers: int | None,
    role: str | None,
    server: Server | Mapping[str, Any] | None,
) -> Environment:
    """Adds ``init``'s other arguments; the environment wins over them."""
    roles_named = made.role_name in ROLES
    decided = roles_named or made.servers is not None or made.apart is not None
    if servers is not None:
        most = environment.MAX_RANKS
        servers = fields.whole_number("init(): servers", servers, 0, most)
        if decided:
            log.logger.info("init(servers=%d): the environment wins", servers)
        else:
            made = replace(made, servers=servers)
    if role is not None:
        if role not in ROLES:
            raise ConfigurationError(
                f"init(role={role!r}): {fields.nearest(str(role), ROLES)}"
            )
        if decided:
            log.logger.info("init(role=%r): the environment wins", role)
        else:
            made = replace(made, role_name=role)
    if server is not None:
        settings = fields.from_mapping(Server, server)
        settings = fields.with_environment(settings, made.values)
        made = replace(made, server=settings)
    environment.check_ranks(made)
    return made


def _meet(made: Environment, rendezvous: Rendezvous, threads: bool) -> Layout:
    own = Member(
        rank=made.rank,
        local_rank=made.local_rank,
        group_rank=made.group_rank,
        role_name=made.role_name,
        host_id=host.identity(),
        host=host.description(),
        agreed=environment.agreed_settings(made),
        # Ranks that are threads make no group.
        shm=not threads and made.backend == "auto" and backend_choice.shm_loads(),
        process=processes.own(),
    )
    members = rendezvous.meet_members(own)
    if made.apart is not None:
        return one_role(members, made.apart.role)
    return assign(members, made.servers or 0)


def _who(numbers: Numbers) -> str:
    if numbers.role == "trainer":
        return f"trainer {numbers.trainer_rank}"
    return f"server {numbers.shard_id}"


def _join(
    made: Environment,
    store: Store | None,
    network: _core.InprocNetwork | None,
    timeout_s: float,
) -> Context:
    """Meets the other ranks and starts what this one needs."""
    if network is None:
        backend_choice.check_early(made)
    if store is None:
        store = open_store(made, timeout_s) if made.launched else HashStore()
    words = Words(made.secret)
    rendezvous = Rendezvous(store, made.rank, made.world_size, timeout_s, words)
    group, threads, ends = DefaultGroup(), TorchThreads(), endpoints.Endpoints()
    torch_group = transport = None
    over_backend = made.transport == "c10d" and made.world_size > 1
    try:
        layout = _meet(made, rendezvous, network is not None)
        if network is None:
            rendezvous.start_together(lambda: group.check(made, layout))
        if over_backend:
            # oneCCL takes a host's ranks from a process's first group, which is to have
            # all; and makes no group while messages are awaited.
            transport = rank_network.open_transport(
                made,
                layout,
                rendezvous.group_store("transport"),
                rendezvous.remaining_s(),
                endpoints.own_address(made, layout),
            )
            torch_group = group.join(made, layout, rendezvous)
        if made.apart is not None:
            numbers, ends = separate_jobs.start(made, made.apart, layout, rendezvous)
            log.setup(made.log, _who(numbers))
        else:
            numbers = layout.numbers_of(made.rank)
            log.setup(made.log, _who(numbers))
            if made.restart_count > 0:
                log.logger.warning(
                    "restart %d: training begins anew unless the script calls "
                    "opt.resume(), which goes on from the newest snapshot",
                    made.restart_count,
                )
            ends = endpoints.start(made, layout, rendezvous, network, transport)
        ends.keep.append(store)
        ends.rendezvous = rendezvous
        if network is None:
            threads.take(made, layout)
            if not over_backend:
                torch_group = group.join(made, layout, rendezvous)
        if numbers.role == "trainer" or made.apart is not None:
            rendezvous.roll.end()  # others wait for trainers to come, in serve()
        return Context(made, layout, ends, group, torch_group, threads, numbers)
    except BaseException as error:
        rendezvous.roll.end()
        ends.stop(f"init() failed: {error}")
        group.leave()
        threads.give_back()
        raise


def _check_timeout(timeout_s: float) -> None:
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)):
        raise ConfigurationError(
            f"init(timeout_s={timeout_s!r}): expected seconds, found "
            f"{type(timeout_s).__name__}."
        )
    # In this form a nan passes neither.
    if not 0 < timeout_s <= environment.MAX_WAIT_S:
        raise ConfigurationError(
            f"init(timeout_s={timeout_s}): must be above 0 and at most "
            f"{environment.MAX_WAIT_S} (a year)."
        )


def _check_simd(asked: str) -> None:
    """Fails now, not in the middle of a step, if the kernels cannot run as asked."""
    try:
        level = _core.simd_level()
    except ValueError as error:
        raise ConfigurationError(f"{error}.") from None
    if asked not in ("", level):
        raise ConfigurationError(
            f"CPUDIST_SIMD={asked!r}, but this process runs at {level}: the variable "
            "is read once, when the first kernel runs. Set it before Python starts."
        )


def init(
    *,
    rank: int | None = None,
    world_size: int | None = None,
    store: Store | None = None,
    servers: int | None = None,
    role: str | None = None,
    network: _core.InprocNetwork | None = None,
    timeout_s: float = _TIMEOUT_S,
    server: Server | Mapping[str, Any] | None = None,
    variables: Mapping[str, str] | None = None,
) -> Context:
    """Joins the run: finds its role, starts its server, connects to all servers.

    Without arguments everything comes from ``CPUDIST_*`` and the environment of
    torchrun, srun or mpirun; without these this is a world of one. Collective: waits
    for every rank. Makes torch.distributed's default group over the trainers if there
    is none, sets torch's thread count until ``shutdown()``, and the log level. May be
    called again after ``shutdown()``.

    Cost: a few values in the store; a hello and a barrier per trainer and server.

    Args:
        rank: among all ranks, for ranks without torchrun; needs the next two.
        world_size: how many ranks.
        store: any c10d store that all ranks reach.
        servers: dedicated servers; ``CPUDIST_SERVERS`` and ``--role`` win.
        role: ``"server"`` or ``"trainer"``; torchrun's ``--role`` wins.
        network: in-process network shared by ranks that are threads of one process; no
            sockets and no process group are made, thread counts are left alone.
        timeout_s: longest wait for the other ranks, in seconds; at most a year.
        server: how this rank's server runs; ``CPUDIST_SERVER_*`` wins.
        variables: used in the place of ``os.environ``.

    Returns:
        The context, which is now the calling thread's current one.

    Raises:
        ConfigurationError: the environment or an argument is wrong, or ``init()`` was
            called before without ``shutdown()``.
        ConfigMismatchError: ranks were started with different settings.
        OperationTimeoutError: names the ranks that did not come.
        PeerLostError: names a rank that has ended while this one waited.
        AddressError: no rendezvous store, a port that is taken, an unreachable server.
        BackendUnavailableError: ``CPUDIST_BACKEND`` or ``_METRICS`` need what is not.
    """
    earlier = context.last()
    if earlier is not None and not earlier.closed:
        raise ConfigurationError(
            "init() was called before in this thread and its context is still open. "
            "Call cpudist.shutdown() first."
        )
    _check_timeout(timeout_s)
    variables = os.environ if variables is None else variables
    made = environment.parse(variables, ranks_given=rank is not None)
    _check_simd(variables.get("CPUDIST_SIMD", ""))
    made = _explicit(made, rank, world_size, store, network)
    log.setup(made.log, f"rank {made.rank}")
    made = _with_arguments(made, servers, role, server)
    rank_network.check(made, network is not None)
    opened = monitor.opened(made, lambda: _join(made, store, network, timeout_s))
    context.set_current(opened)
    return opened


def shutdown(pull: str = "all", *, failed: bool | None = None) -> None:
    """Ends this rank's part; its server serves on until all trainers have left.

    Leaves the rounds and refreshes the models, so that ``model.state_dict()`` is what
    was trained so far; a model that was written after its last step stays as it is.
    Closes the optimizers, which gives wrapped modules their own classes back, destroys
    the process group if ``init()`` made it, and restores torch's thread count. A second
    call does nothing, nor does one before ``init()`` or after one that failed. After a
    ``PeerLostError`` it ends at once and raises that again. While an exception is
    handled (``finally:``, ``except:``) and there are other trainers, this rank ends as
    a lost one: its work is not done. The end of a loop (``StopIteration`` and the like)
    is none, and ``failed`` overrules.

    Args:
        pull: as of ``flush``: ``"all"`` brings every row of every table once over the
            wire, ``"dense"`` and ``"none"`` leave rows as they were last looked up, and
            wrapped optimizers without initial state of tables that is other than zeros
            (Adagrad's ``initial_accumulator_value``): build them anew to go on.
        failed: whether this rank ends as a lost one: ``False`` in an ``except:`` whose
            exception is dealt with. ``None`` looks whether one is handled.

    Raises:
        NotInitializedError: ``init()`` was called in another thread only.
        PeerLostError: a server or a trainer that this rank still served was lost.
        OperationTimeoutError: none got on within ``CPUDIST_ROUND_DEADLINE_MS``.
    """
    fields.check_pull("shutdown", pull)
    if not context.nothing_to_end():
        context.get_context().shutdown(pull, failed=failed)


def serve() -> None:
    """Serves until every trainer has said goodbye. Only on dedicated servers.

    Raises:
        ConfigurationError: this rank is a trainer.
        PeerLostError: a trainer was lost.
        OperationTimeoutError: see ``shutdown``.
    """
    context.current().serve()


def barrier() -> None:
    """Waits until every trainer that has not shut down is here.

    Implies ``leave()`` of every optimizer: rounds of those still training go on without
    this trainer. Afterwards all are members again. Cost: one message and its reply per
    server.

    Raises:
        ConfigurationError: this rank is a dedicated server.
        PeerLostError: a trainer or server was lost.
        OperationTimeoutError: a trainer did not come within
            ``CPUDIST_ROUND_DEADLINE_MS``.
    """
    context.current().barrier()


def is_server() -> bool:
    """Whether this rank is a dedicated server and is to call ``serve()``."""
    return context.get_context().role == "server"


def is_trainer() -> bool:
    """Whether this rank trains; a colocated rank does, and serves besides."""
    return context.get_context().role == "trainer"


def trainer_rank() -> int:
    """This trainer's number among ``trainer_count()``; -1 on a dedicated server."""
    return context.get_context().trainer_rank


def trainer_count() -> int:
    """Trainers of the run."""
    return context.get_context().trainer_count


def server_count() -> int:
    """Servers of the run."""
    return context.get_context().server_count


def global_step() -> int:
    """The cluster's count of steps under the newest optimizer; 0 without one.

    What trainers do together counts once: Sync and HalfAsync count rounds (of all
    groups), as of this trainer's last step, also after a barrier or ``flush()``;
    AllReduce, Reduce, LocalSGD and a Hybrid whose dense part is one of these the steps
    of the group, each of which every trainer takes. Async and Geo count the steps of
    all trainers that this one has been told of, and all of its own.
    """
    return context.current().global_step()


def split_files(paths: Iterable[files.Path]) -> list[files.Path]:
    """Returns this trainer's share of a list of files: a run of it, in its order.

    Shares differ by one file at most, the first trainers have the larger ones; with
    more trainers than files the last ones have none. Local: no messages.

    Args:
        paths: the same files in the same order on every trainer. Sort what comes from
            a directory: ``split_files(sorted(glob.glob("part-*")))``.

    Raises:
        InvalidArgumentError: one path instead of a list, a set, or a file given twice.
        ConfigurationError: this rank is a dedicated server.
    """
    here = context.get_context()
    if here.role != "trainer":
        raise ConfigurationError(
            f"split_files() on rank {here.rank}, a dedicated server: only trainers "
            "read data."
        )
    return files.deal(paths, here.trainer_rank, here.trainer_count)

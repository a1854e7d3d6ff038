# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
# long: one class, whose methods are those that Lightning calls.
"""``Trainer(strategy=CpudistStrategy("async"))``: Lightning's loop over servers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torch_cpudist import runtime
from torch_cpudist.errors import (
    BackendUnavailableError,
    ConfigurationError,
    InvalidArgumentError,
    ModelChangedError,
    SnapshotError,
)
from torch_cpudist.integrations import data_broadcast
from torch_cpudist.integrations.checkpoint_snapshots import (
    KEY,
    CheckpointSnapshots,
    directory_of,
    remote_tables,
)
from torch_cpudist.launch import context
from torch_cpudist.log import logger
from torch_cpudist.model.bags import batch_size
from torch_cpudist.optimizer.distributed import DistributedOptimizer
from torch_cpudist.settings.average import EMA
from torch_cpudist.settings.clip import Clip, ClipNorm, ClipValue
from torch_cpudist.strategies.base import Strategy
from torch_cpudist.tables.initial import Constant
from torch_cpudist.tables.remote_weight import is_remote, table_of
from torch_cpudist.tables.sharding import shard_tables

try:
    from lightning.pytorch.accelerators import CPUAccelerator
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.strategies import ParallelStrategy
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.rank_zero import rank_zero_only
except ImportError as error:
    raise BackendUnavailableError(
        f"cpudist.integrations.lightning needs Lightning: {error}. "
        "pip install torch-cpudist[lightning]."
    ) from error

from torch_cpudist.integrations.lightning_io import forgets_after_writing
from torch_cpudist.integrations.lightning_world import Trainers

T = TypeVar("T")
_CPU = torch.device("cpu")
_MEANS = ("mean", "avg")


class CpudistStrategy(ParallelStrategy):
    """Trains an unmodified ``LightningModule`` with parameter servers.

    Every optimizer that ``configure_optimizers`` returns is wrapped in a
    ``DistributedOptimizer``; everything else is Lightning's. Processes are torchrun's:
    ``devices="auto"`` (or the trainers per host) is its world, ranks, samplers and
    ``sync_dist`` are those of the trainers. Clipping by ``gradient_clip_val`` is
    ``clip=ClipNorm`` or ``ClipValue``, of the mean gradient where the strategy makes
    one. Before validation and checkpoints trainers wait for each other, so that these
    are of what all have trained; trainer 0 saves the model's and the optimizer's plain
    ``state_dict``. With ``snapshot_dir`` every checkpoint has a snapshot of the same
    moment, which has remote tables, too, and to which ``fit(ckpt_path=)`` goes back.

    Where ``cpudist.init()`` was called before the ``Trainer``, that run is used: tables
    stay with the servers between ``fit`` and ``test``, and the script calls
    ``cpudist.shutdown()``. Else each of ``fit``, ``validate``, ``test`` and ``predict``
    calls both by itself, and leaves a plain model.

    Args:
        strategy: as of ``DistributedOptimizer``: a strategy, its name, or a dict.
        min_rows: embeddings of so many rows become tables (``shard_tables``); ``None``:
            those built with ``sparse=True``.
        clip: as of ``DistributedOptimizer``, in the place of ``gradient_clip_val``.
        average: as of ``DistributedOptimizer``.
        snapshot_dir: where snapshots of checkpoints are, one directory for all
            processes; default ``CPUDIST_SNAPSHOT_DIR``, which servers of their own
            need, and without it none are saved.
        checkpoint_io: Lightning's, for files elsewhere.

    Raises:
        ConfigurationError: ``snapshot_dir`` is a URL.
        InvalidArgumentError: it is no path.
    """

    # Properties of Lightning's.
    optimizers: list[torch.optim.Optimizer]
    parallel_devices: list[torch.device]

    def __init__(
        self,
        strategy: Strategy | str | Mapping[str, Any] | None = None,
        *,
        min_rows: int | None = None,
        clip: Clip | None = None,
        average: EMA | None = None,
        snapshot_dir: str | os.PathLike[str] | None = None,
        checkpoint_io: Any = None,
    ) -> None:
        """See the class."""
        self._world = Trainers()
        super().__init__(cluster_environment=self._world, checkpoint_io=checkpoint_io)
        self.num_nodes = 1
        self._given = strategy
        self._min_rows = min_rows
        self._clip = clip
        self._average = average
        self._given_dir = None if snapshot_dir is None else directory_of(snapshot_dir)
        self._loads = False  # a checkpoint, in what runs now
        self._record: Any = None  # of snapshots, in that
        self._told_rows = False
        self._own_run = False
        self._failed = False
        self._accumulating = False  # gradients of rows that were pulled for them

    # -- who and where -----------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        """The CPU."""
        return _CPU

    @property
    def is_distributed(self) -> bool:
        """Whether there are other trainers."""
        return self._world.place.count > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """This trainer's share of the data."""
        place = self._world.place
        return {"num_replicas": place.count, "rank": place.rank}

    def set_world_ranks(self) -> None:
        """Takes the trainers' numbers; Lightning calls it once all flags are here.

        Raises:
            ConfigurationError: a flag of the ``Trainer`` contradicts the launch, or
                cannot work here.
        """
        place = self._world.place
        if not isinstance(self.accelerator, CPUAccelerator):
            raise ConfigurationError(
                f"CpudistStrategy with {type(self.accelerator).__name__}: it trains on "
                "CPUs. Set Trainer(accelerator='cpu')."
            )
        if self._layer_sync is not None:
            raise ConfigurationError(
                "Trainer(sync_batchnorm=True): torch's SyncBatchNorm runs on CUDA "
                "devices only. Leave it out; nn.LayerNorm needs no other trainers."
            )
        for flag, found, there, torchrun in (
            (
                "devices",
                len(self.parallel_devices),
                place.local_count,
                "nproc-per-node",
            ),
            ("num_nodes", self.num_nodes, place.hosts, "nnodes"),
        ):
            # Lightning's own "auto" is 1 on CPUs.
            if found not in (1, there):
                raise ConfigurationError(
                    f"Trainer({flag}={found}), where the launch has {there}: "
                    f"CpudistStrategy starts no processes. Leave {flag} out and start "
                    f"the script with torchrun --{torchrun}={found}."
                )
        self.parallel_devices = [_CPU] * place.local_count
        self.num_nodes = place.hosts
        rank_zero_only.rank = place.rank

    def setup_environment(self) -> None:
        """Joins the run, unless the script has: first of all in ``fit`` and the like.

        Raises:
            What ``cpudist.init`` raises.
        """
        super().setup_environment()
        self._failed = self._accumulating = False
        self._loads, self._record = False, None
        opened = context.last()
        if opened is None or opened.closed:
            runtime.init()
            self._own_run = True
        self._world.look_again()
        rank_zero_only.rank = self._world.place.rank

    def model_to_device(self) -> None:
        """It is there."""

    # -- training ----------------------------------------------------------------------

    def _open(self) -> list[DistributedOptimizer]:
        """The wrapped optimizers, while servers hold their parameters."""
        return [
            one
            for one in self.optimizers
            if isinstance(one, DistributedOptimizer) and not one.closed
        ]

    def setup_optimizers(self, trainer: Any) -> None:
        """Wraps what ``configure_optimizers`` returns. Collective.

        Raises:
            What ``DistributedOptimizer`` raises; ``InvalidArgumentError`` where the
            module wraps its optimizer by itself.
            ConfigurationError: tables are remote and would end with ``fit``.
        """
        if self._min_rows is not None:
            shard_tables(self.lightning_module, self._min_rows)
        self._let_go()
        super().setup_optimizers(trainer)
        if any(isinstance(one, DistributedOptimizer) for one in self.optimizers):
            raise InvalidArgumentError(
                "configure_optimizers() returns a DistributedOptimizer, but "
                "CpudistStrategy wraps by itself: return the torch.optim optimizer, "
                "and give strategy, clip and average to CpudistStrategy."
            )
        self.optimizers = [self._wrapped(inner) for inner in self.optimizers]
        if snapshots := self._snapshots():
            for one in self._open():
                snapshots.begin(one)

    def _let_go(self) -> None:
        """Ends what an earlier ``fit`` has left open, where nothing is taken from it.

        Rows of remote tables go with it: a checkpoint's come in their place, if one is
        loaded; else who wraps them again says what to do.
        """
        earlier = self._open()
        rows_come = self._record is not None or not remote_tables(earlier)
        if earlier and rows_come and self._snapshots():
            runtime.barrier()
            for one in earlier:
                one.close()
            self._begin_stored_rows()

    def _begin_stored_rows(self) -> None:
        """Has those that the module was built with begin as anything: all of them come.

        They went to servers that have let go of them; snapshots have every one.
        """
        module = self.lightning_module
        stored = [
            name
            for name, parameter in module.named_parameters()
            if is_remote(parameter) and table_of(parameter).stored
        ]
        if stored:
            shard_tables(module, sys.maxsize, remote=stored, initial=Constant(0.0))

    def _wrapped(self, inner: torch.optim.Optimizer) -> DistributedOptimizer:
        made = DistributedOptimizer(
            inner,
            self.lightning_module,
            strategy=self._given,
            clip=self._clip,
            average=self._average,
        )
        remote = [t.found.name for t in made.trained.placement.tables if t.found.remote]
        if remote and self._own_run:
            raise ConfigurationError(
                f"remote table {remote[0]!r} has its rows on the servers only, which "
                "end with fit(). Call cpudist.init() before the Trainer, and "
                "cpudist.shutdown() at the end of the script."
            )
        return made

    def setup_precision_plugin(self) -> None:
        """Has the plug-in clip by the servers: torch's knows no sparse gradients."""
        super().setup_precision_plugin()
        self.precision_plugin.clip_gradients = self._clip_gradients

    def _clip_gradients(
        self,
        optimizer: Any,
        clip_val: float = 0.0,
        gradient_clip_algorithm: str = "norm",
    ) -> None:
        """Clips in the next ``step``, for Lightning's ``clip_gradients``.

        Raises:
            ConfigurationError: it is clipped in another way already.
        """
        if clip_val <= 0:
            return
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        kind = ClipValue if gradient_clip_algorithm == "value" else ClipNorm
        clip = kind(float(clip_val))
        if optimizer.clip not in (None, clip):
            raise ConfigurationError(
                f"gradients are to be clipped by {clip} and by {optimizer.clip}: "
                "choose one of CpudistStrategy(clip=), Trainer(gradient_clip_val=) and "
                "clip_gradients(), once a step."
            )
        optimizer.strategy.check_clip(clip)
        optimizer.clip = clip

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's; what it takes and how many samples it has is counted."""
        wrapped = self._open()
        for one in wrapped:
            if one.counted.phases is not None:
                one.counted.phases.forward_begins()
            with suppress(InvalidArgumentError):  # of no one number, or of no tensors
                one.counted.samples += batch_size(args[0] if args else kwargs["batch"])
        result = super().training_step(*args, **kwargs)
        for one in wrapped:
            if one.counted.phases is not None:
                one.counted.phases.forward_ends(result)
        return result

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        """One step; see ``DistributedOptimizer.step``."""
        try:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        finally:
            self._accumulating = False
            if isinstance(optimizer, DistributedOptimizer):
                optimizer.clip = self._clip

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """There are gradients from now on, until the step."""
        self._accumulating = True

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """While gradients are accumulated: ``no_sync`` of the optimizers."""
        with ExitStack() as entered:
            for one in self._open():
                entered.enter_context(one.no_sync())
            yield

    # -- values of all trainers --------------------------------------------------------

    def _snapshots(self) -> CheckpointSnapshots | None:
        """Those of checkpoints; ``None`` where nobody has said where they are."""
        opened, given = context.last(), self._given_dir
        if given is None and opened is not None and opened.environment.snapshot_dir:
            given = directory_of(opened.environment.snapshot_dir)
        return None if given is None else CheckpointSnapshots(given, self)

    def setup(self, trainer: Any) -> None:
        """Also where nothing is fitted: a checkpoint's remote rows need servers."""
        super().setup(trainer)
        module = self.lightning_module
        fits = trainer.state.fn == TrainerFn.FITTING
        if fits or not self._loads or self._open():
            return
        if any(is_remote(parameter) for parameter in module.parameters()):
            self.setup_optimizers(trainer)
            self._load_rows()

    def _interrupted(self) -> bool:
        """Whether this trainer ends with an error: the others may not come."""
        module = self.lightning_module
        return self._failed or (module is not None and module.trainer.interrupted)

    def _meet(self, pull: str, here: bool = True) -> None:
        """Waits until all trainers' steps are on the servers, and takes what is there.

        In the midst of accumulated batches nobody waits: the rows that their gradients
        are of would count as old.

        Args:
            pull: as of ``flush``.
            here: whether this trainer needs the values.
        """
        wrapped = self._open()
        if wrapped and not self._accumulating and not self._interrupted():
            runtime.barrier()
        for one in wrapped if here else []:
            try:
                one.flush(pull)
            except ModelChangedError as changed:
                logger.warning("the model stays as it was written: %s", changed)

    def on_validation_start(self) -> None:
        """All trainers validate the same values."""
        self._meet("dense")

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The plain model's values on trainer 0, nothing on the others. Collective."""
        self._meet("dense", self.is_global_zero)
        if not self.is_global_zero:
            return {}
        found: dict[str, Any] = super().lightning_module_state_dict()
        return found

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The plain optimizer's state on trainer 0, nothing on the others."""
        if not self.is_global_zero:
            return {}
        found: dict[str, Any] = super().optimizer_state(optimizer)
        return found

    def load_model_state_dict(
        self, checkpoint: Mapping[str, Any], strict: bool = True
    ) -> None:
        """Loads values, and stores them on the servers that hold them. Collective."""
        super().load_model_state_dict(checkpoint, strict=strict)
        self._loads, self._record = True, checkpoint.get(KEY)
        for one in self._open():
            one.store_model(all_rows=True)
        if self.lightning_module.trainer.state.fn != TrainerFn.FITTING:
            self._load_rows()

    def _load_rows(self) -> None:
        """Brings remote rows of a checkpoint, where values alone are loaded."""
        remote = remote_tables(self._open())
        if remote:
            self._needed_snapshots(remote).load(self._open(), self._record, remote)

    def _needed_snapshots(self, remote: list[str]) -> CheckpointSnapshots:
        """Those of checkpoints, where one has to have the rows of remote tables.

        Raises:
            SnapshotError: the checkpoint names none.
            ConfigurationError: nobody has said where they are.
        """
        if self._record is None:
            raise SnapshotError(
                f"the checkpoint names no snapshot, and rows of remote table "
                f"{remote[0]!r} are in no .ckpt: it was saved without "
                "CpudistStrategy(snapshot_dir=...), or after its run had ended. Take "
                "a checkpoint that has one, or opt.load_snapshot() of one that "
                "lies elsewhere."
            )
        snapshots = self._snapshots()
        if snapshots is None:
            raise ConfigurationError(
                f"rows of remote table {remote[0]!r} are in the snapshots that the "
                f"checkpoint names, {self._record}. Set CpudistStrategy(snapshot_dir="
                "...) to that directory, or CPUDIST_SNAPSHOT_DIR."
            )
        return snapshots

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Goes back to a checkpoint's snapshot; without, as Lightning. Collective.

        Raises:
            SnapshotError: it is not there; or it names none, and tables are remote.
            SnapshotCorruptError: a file of it is damaged.
            ConfigurationError: tables are remote, and nobody has said where snapshots
                are.
        """
        opened = self._open()
        remote = remote_tables(opened)
        snapshots = self._needed_snapshots(remote) if remote else self._snapshots()
        if snapshots is None or self._record is None:
            super().load_optimizer_state_dict(checkpoint)
        else:
            snapshots.load(opened, self._record)

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | os.PathLike[str],
        storage_options: Any = None,
    ) -> None:
        """Writes a checkpoint, and the snapshot of the same moment first. Collective.

        Raises:
            SnapshotError: that could not be saved; on all trainers, and no checkpoint
                was written.
            ConfigurationError: it is within accumulated batches, where trainers are at
                different steps.
        """
        snapshots, record = self._snapshots(), None
        if snapshots is not None and self._has_moment(checkpoint):
            step = int(checkpoint["global_step"])
            record = snapshots.save(self._open(), filepath, step)
            checkpoint[KEY] = record
            if self.is_global_zero:
                forgets_after_writing(self).expect(snapshots, filepath, record["names"])
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        remote = remote_tables(self._open())
        if remote and record is None and not self._told_rows:
            self._told_rows = True
            logger.warning(
                "%s is without the rows of remote table %r, which servers have. Set "
                "CpudistStrategy(snapshot_dir=...).",
                filepath,
                remote[0],
            )

    def _has_moment(self, checkpoint: Mapping[str, Any]) -> bool:
        """Whether there is something to save that the checkpoint itself has not."""
        opened = self._open()
        if not opened or self._interrupted():
            return False  # others may not come
        if "optimizer_states" not in checkpoint and not remote_tables(opened):
            return False
        together = all(one.driver.saving.together for one in opened)
        if self._accumulating and self.is_distributed and not together:
            raise ConfigurationError(
                "a checkpoint within accumulated batches: no snapshot can be of this "
                "moment, as trainers are at different steps. Validate and save after "
                "a multiple of accumulate_grad_batches, or use Sync."
            )
        return True

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Removes a checkpoint, then its snapshots; on trainer 0."""
        super().remove_checkpoint(filepath)
        snapshots = self._snapshots()
        if snapshots is not None and self.is_global_zero:
            forgets_after_writing(self).forget(snapshots, filepath)

    # -- collectives -------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        """Waits for all trainers; what servers do is no matter of it."""
        if dist.is_initialized() and not self._interrupted():
            dist.barrier()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """A tensor over all trainers.

        Args:
            tensor: of the same shape everywhere; what is no tensor stays as it is.
            group: of torch.distributed; default all trainers.
            reduce_op: a ``ReduceOp`` or its name; ``"mean"`` keeps the type.

        Raises:
            ConfigurationError: torch has no such operation.
        """
        if not isinstance(tensor, torch.Tensor) or not dist.is_initialized():
            return tensor
        mean = reduce_op == dist.ReduceOp.AVG
        if isinstance(reduce_op, str):
            mean = reduce_op.lower() in _MEANS
            named = getattr(dist.ReduceOp, reduce_op.upper(), None)
            if not mean and named is None:
                raise ConfigurationError(
                    f"reduce_op={reduce_op!r}: expected 'mean' or the name of a "
                    "torch.distributed.ReduceOp, such as 'sum' or 'max'."
                )
            reduce_op = named
        total = tensor.detach().clone()
        dist.all_reduce(total, dist.ReduceOp.SUM if mean else reduce_op, group)
        if mean:
            total = (total / dist.get_world_size(group)).to(tensor.dtype)
        return total

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Plain data of one trainer, on all; see ``data_broadcast``."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return obj
        return data_broadcast.broadcast(obj, src)

    # -- the end -----------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        """From now on this trainer waits for nobody."""
        self._failed = True

    def teardown(self) -> None:
        """Brings the values home; ends the run if it was begun here.

        After an error nothing is waited for: in a run of its own this trainer counts
        as lost then, else the script's ``shutdown()`` says what it is.
        """
        self.precision_plugin.__dict__.pop("clip_gradients", None)
        if not self._failed:
            self._meet("all", here=not self._own_run)
        if self._own_run:
            self._own_run = False
            self._end_run()
        super().teardown()

    def _end_run(self) -> None:
        """``shutdown()``, after which optimizers are plain again, with their state."""
        wrapped = self._open()
        states = []
        if self.is_global_zero and not self._failed:
            # For trainer.save_checkpoint() after fit(), which trainer 0 does.
            states = [one.state_dict() for one in wrapped]
        runtime.shutdown(failed=self._failed)
        inners: list[torch.optim.Optimizer]
        inners = [inner for one in wrapped for inner in one.inners]
        for inner, state in zip(inners, states, strict=False):
            inner.load_state_dict(state)
        if inners:
            self.optimizers = inners

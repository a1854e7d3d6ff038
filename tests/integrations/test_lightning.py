# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Lightning's Trainer over servers in a world of one: its features as without."""

from __future__ import annotations

import pytest
import torch
from lazily import Lazily
from sync_cases import assert_same_bits

import torch_cpudist as cpudist
from torch_cpudist.errors import (
    ConfigurationError,
    InvalidArgumentError,
    UnsupportedOptimizerError,
)
from torch_cpudist.launch import context

cases = Lazily("lightning_cases", load=lambda _: pytest.importorskip("lightning"))
pytestmark = [
    pytest.mark.integrations,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("in_a_folder"),
]


def over_servers(*given, **options):
    return cases.trainer(cases.CpudistStrategy(*given), **options)


def assert_close(found, expected):
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(
    ("algorithm", "strategy"),
    [
        ("norm", "sync"),
        ("value", "half_async"),
        ("norm", "allreduce"),
        ("value", "geo"),
    ],
)
def test_fit_is_that_of_one_device(algorithm, strategy):
    """Clipping, accumulation and schedules; there with dense gradients."""
    clipped = {"gradient_clip_val": 0.02, "gradient_clip_algorithm": algorithm}
    options = {"accumulate_grad_batches": 5, **clipped}
    plain, module = cases.Clicks(sparse=False), cases.Clicks()
    before = cases.values(module)
    cases.trainer("auto", **options).fit(plain, cases.loader(), cases.loader(8, 2))
    made = over_servers(strategy, **options)
    made.fit(module, cases.loader(), cases.loader(8, 2))
    assert made.global_step == 6
    assert_close(cases.values(module), cases.values(plain))
    assert not torch.equal(module.bag.weight, before["bag.weight"])
    assert type(module.bag) is torch.nn.EmbeddingBag
    assert context.last().closed


def test_samples_and_phases_are_counted_without_being_told():
    """By a module of which nobody calls forward, too."""

    class Unnamed(cases.Clicks):
        def loss(self, batch):
            ids, y = batch
            return (self.score(self.bag(ids)).squeeze(1) - y).square().mean()

        def on_train_start(self):
            (made,) = self.trainer.strategy.optimizers
            made.count_phases()

        def on_train_end(self):
            (made,) = self.trainer.strategy.optimizers
            self.said = made.stats()

    module = Unnamed()
    over_servers("sync", accumulate_grad_batches=2).fit(module, cases.loader())
    assert module.said["steps"] == cases.SAMPLES // cases.BATCH
    assert module.said["samples"] == 2 * cases.SAMPLES
    seconds = module.said["phase_s"]
    assert all(seconds[one] > 0 for one in ("data", "forward", "backward", "push"))


@pytest.mark.parametrize("clip", [None, 0.02])
def test_manual_optimization_of_two_optimizers(clip):
    plain, module = cases.ByHand(sparse=False, clip=clip), cases.ByHand(clip=clip)
    cases.trainer("auto").fit(plain, cases.loader())
    made = over_servers("sync")
    made.fit(module, cases.loader())
    assert made.global_step == 48
    assert_close(cases.values(module), cases.values(plain))


def test_a_checkpoint_is_plain_and_goes_on_where_it_was(tmp_path):
    whole, module = cases.Clicks(), cases.Clicks()
    over_servers("sync", max_epochs=3).fit(whole, cases.loader())
    saver = cases.ModelCheckpoint(tmp_path, save_last=True)
    first = over_servers(
        "sync", max_epochs=1, callbacks=[saver], enable_checkpointing=True
    )
    first.fit(module, cases.loader(), cases.loader(8, 2))
    file = saver.last_model_path
    saved = torch.load(file, weights_only=True)
    assert_same_bits(saved["state_dict"], cases.values(module))
    # It needs none of this package.
    plain = cases.Clicks.load_from_checkpoint(file, weights_only=True)
    assert_same_bits(cases.values(plain), saved["state_dict"])
    inner = plain.configure_optimizers()["optimizer"]
    inner.load_state_dict(saved["optimizer_states"][0])
    assert inner.state[plain.bag.weight]["sum"].any()
    going_on = cases.Clicks()
    over_servers("sync", max_epochs=3).fit(going_on, cases.loader(), ckpt_path=file)
    assert_same_bits(cases.values(going_on), cases.values(whole))


def test_after_fit_the_trainer_saves_and_tests(tmp_path):
    module = cases.Clicks()
    made = over_servers("geo")
    made.fit(module, cases.loader())
    made.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert_same_bits(saved["state_dict"], cases.values(module))
    assert saved["optimizer_states"][0]["state"][0]["sum"].any()
    (tested,) = made.test(module, cases.loader(8, 2), verbose=False)
    loss = module.loss(cases.data(8, 2)[:]).item()
    assert tested["val"] == pytest.approx(loss, rel=1e-5)


def test_between_accumulated_batches_it_validates_and_saves(tmp_path):
    plain, module = cases.Clicks(sparse=False), cases.Clicks()
    options = {"accumulate_grad_batches": 3, "val_check_interval": 2}
    cases.trainer("auto", **options).fit(plain, cases.loader(), cases.loader(8, 2))
    saver = cases.ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    made = over_servers("sync", callbacks=[saver], enable_checkpointing=True, **options)
    made.fit(module, cases.loader(), cases.loader(8, 2))
    assert_close(cases.values(module), cases.values(plain))
    assert len(list(tmp_path.glob("*.ckpt"))) == made.global_step == 8


def test_the_lr_finder_gives_the_values_back():
    module = cases.Clicks()
    module.lr = 0.1
    before = cases.values(module)
    cases.Tuner(over_servers("sync")).lr_find(
        module, cases.loader(), num_training=8, update_attr=False
    )
    assert_same_bits(cases.values(module), before)


def test_large_embeddings_become_tables():
    module = cases.Clicks(sparse=False)
    made = cases.trainer(cases.CpudistStrategy(min_rows=cases.ROWS))
    made.fit(module, cases.loader())
    assert module.bag.sparse
    other = cases.Clicks(sparse=False)
    made = cases.trainer(cases.CpudistStrategy(min_rows=cases.ROWS + 1))
    made.fit(other, cases.loader())
    assert not other.bag.sparse
    assert_close(cases.values(module), cases.values(other))


def test_in_the_scripts_run_remote_rows_stay_between_fit_and_test():
    def build():
        return cpudist.shard_tables(cases.Clicks(), remote=["bag.weight"])

    with pytest.raises(ConfigurationError, match=r"Call cpudist.init\(\) before the"):
        over_servers("sync").fit(build(), cases.loader())
    opened = cpudist.init()
    module, made = build(), over_servers("sync")
    made.fit(module, cases.loader(), cases.loader(8, 2))
    (tested,) = made.test(module, cases.loader(8, 2), verbose=False)
    assert tested["val"] == pytest.approx(float(made.callback_metrics["val"]))
    (opt,) = made.optimizers
    assert opt.table_stats()["bag.weight"]["rows"] > 0
    assert not opened.closed
    cpudist.shutdown()


def test_an_error_of_the_module_ends_a_run_of_its_own():
    class Broken(cases.Clicks):
        def training_step(self, batch, index):
            if index == 2:
                raise ValueError("a broken batch")
            return super().training_step(batch, index)

    module = Broken()
    with pytest.raises(ValueError, match="a broken batch"):
        over_servers("sync").fit(module, cases.loader())
    assert context.last().closed
    assert type(module.bag) is torch.nn.EmbeddingBag


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"devices": 3}, "torchrun --nproc-per-node=3"),
        ({"num_nodes": 2}, "torchrun --nnodes=2"),
        ({"sync_batchnorm": True}, "SyncBatchNorm runs on CUDA"),
    ],
)
def test_flags_that_cannot_work_are_refused(options, said):
    with pytest.raises(ConfigurationError, match=said):
        over_servers("sync", **options)


def test_other_accelerators_are_refused():
    class Pretended(cases.CUDAAccelerator):
        is_available = staticmethod(lambda: True)
        parse_devices = staticmethod(lambda devices: [0])

    with pytest.raises(ConfigurationError, match="Pretended: it trains on CPUs"):
        over_servers("sync", accelerator=Pretended(), devices=1)


def test_optimizers_that_cannot_work_are_refused():
    with pytest.raises(UnsupportedOptimizerError, match="LBFGS"):
        over_servers("sync").fit(cases.Clicks(kind="lbfgs"), cases.loader())

    class Wraps(cases.Clicks):
        def configure_optimizers(self):
            inner = self.optimizer_of(self.parameters())
            return cpudist.DistributedOptimizer(inner, self)

    with pytest.raises(InvalidArgumentError, match="CpudistStrategy wraps by itself"):
        over_servers("sync").fit(Wraps(), cases.loader())


def test_clipping_in_two_ways_is_refused():
    strategy = cases.CpudistStrategy(clip=cpudist.ClipValue(1.0))
    with pytest.raises(ConfigurationError, match=r"ClipNorm.*and by ClipValue"):
        cases.trainer(strategy, gradient_clip_val=0.5).fit(
            cases.Clicks(), cases.loader()
        )


@pytest.mark.parametrize(
    "variables",
    [
        {"CPUDIST_SERVERS": "1", "WORLD_SIZE": "2"},
        {"ROLE_NAME": "trainer", "WORLD_SIZE": "2"},
    ],
)
def test_where_some_only_serve_init_comes_first(variables, monkeypatch):
    launched = {
        **{"RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost"},
        **{"MASTER_PORT": "1"},
    }
    for name, text in (launched | variables).items():
        monkeypatch.setenv(name, text)
    with pytest.raises(ConfigurationError, match=r"Call cpudist.init\(\) first"):
        over_servers("sync")


def test_before_init_the_world_is_the_launchers(monkeypatch):
    variables = {
        **{"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},
        **{"GROUP_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
    }
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    for options in ({}, {"devices": 4, "num_nodes": 2}):
        made = over_servers("sync", **options)
        numbers = (made.global_rank, made.world_size, made.local_rank, made.node_rank)
        assert numbers == (5, 8, 1, 1)
        assert (made.num_devices, made.num_nodes) == (4, 2)
        assert not made.is_global_zero
        assert made.distributed_sampler_kwargs == {"num_replicas": 8, "rank": 5}
    with pytest.raises(ConfigurationError, match=r"devices=8.*has 4"):
        over_servers("sync", devices=8)
    # Lightning keeps it for the whole process.
    monkeypatch.undo()
    over_servers("sync")

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Weights without rows: what is recorded, what is refused, what needs no memory."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.tables.remote_weight import is_remote, table_of

ROWS, DIM = 1_000_000_000, 16


def remote(make=lambda: nn.Embedding(ROWS, DIM), **options):
    with cpudist.remote_tables(**(options or {"min_rows": 1000})):
        return make()


def steps(module):
    return table_of(module.weight).program.steps


def overrides(module):
    return table_of(module.weight).program.overrides


# ---- what is remote ------------------------------------------------------------------


def test_large_embeddings_are_remote_and_look_as_always():
    made = remote(
        lambda: nn.ModuleDict(
            {
                "large": nn.Embedding(ROWS, DIM),
                "bag": nn.EmbeddingBag(1000, DIM),
                "small": nn.Embedding(999, DIM),
                "layer": nn.Linear(DIM, 5000),
            }
        )
    )
    kinds = {name: is_remote(p) for name, p in made.named_parameters()}
    assert kinds == {
        "large.weight": True,
        "bag.weight": True,
        "small.weight": False,
        "layer.weight": False,
        "layer.bias": False,
    }
    weight = made["large"].weight
    assert isinstance(weight, nn.Parameter)
    assert weight.shape == (ROWS, DIM)
    assert weight.dtype == torch.float32
    assert weight.device.type == "cpu"
    assert weight.requires_grad
    assert weight.is_leaf
    assert weight.numel() == ROWS * DIM
    assert len(weight) == ROWS
    assert "rows=1000000000" in repr(weight)
    assert f"{weight}" == str(weight)
    assert made["large"].sparse
    assert made["bag"].sparse


def test_what_is_built_outside_is_not_remote():
    remote()
    assert not is_remote(nn.Embedding(5000, 2).weight)


def test_given_weights_and_meta_are_left_alone():
    made = remote(
        lambda: nn.ModuleList(
            [
                nn.Embedding.from_pretrained(torch.ones(2000, 2)),
                nn.Embedding(2000, 2, device="meta"),
            ]
        )
    )
    assert [type(p) for p in made.parameters()] == [nn.Parameter] * 2


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.ModuleDict({"id": nn.Embedding(30, 4)})
        self.item = nn.Sequential(nn.Embedding(50, 4, padding_idx=3))


def test_names_choose_whatever_the_size():
    torch.manual_seed(5)
    made = remote(Towers, names=["user.*"])
    assert is_remote(made.user["id"].weight)
    assert type(made.item[0].weight) is nn.Parameter
    assert made.user["id"].sparse
    assert not made.item[0].sparse
    # Filled as torch would: a normal distribution, with its padding row.
    values = made.item[0].weight.detach()
    assert torch.equal(values[3], torch.zeros(4))
    assert 0.7 < float(values[4:].std()) < 1.3
    torch.manual_seed(5)
    assert torch.equal(remote(Towers, names=["user.*"]).item[0].weight, values)


def test_modules_and_weights_can_be_named_and_sizes_added():
    assert is_remote(remote(Towers, names=("item.0",)).item[0].weight)
    assert is_remote(remote(Towers, names=("item.0.weight",)).item[0].weight)
    both = remote(Towers, names=("user.id",), min_rows=50)
    assert all(map(is_remote, both.parameters()))


def test_a_name_that_fits_nothing_is_refused():
    with pytest.raises(cpudist.InvalidArgumentError, match=r"no embedding .*'usr\.\*'"):
        remote(Towers, names=["usr.*"])


@pytest.mark.parametrize("options", [{}, {"min_rows": 0}, {"names": "user"}])
def test_the_context_checks_what_it_is_given(options):
    with (
        pytest.raises(cpudist.InvalidArgumentError, match="remote_tables"),
        cpudist.remote_tables(**options),
    ):
        pass


def test_only_float32_can_be_remote():
    with pytest.raises(cpudist.RemoteTableError, match="float64"):
        remote(lambda: nn.Embedding(5000, 2, dtype=torch.float64))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: nn.Embedding.from_pretrained(torch.ones(30, 2)),
            r"'it\.weight'.*given its weight.*shard_tables\(model, remote=\['it",
        ),
        (
            lambda: nn.EmbeddingBag.from_pretrained(torch.ones(30, 2)),
            "given its weight",
        ),
        (lambda: nn.Embedding(30, 2, dtype=torch.float64), "it is torch.float64"),
        (lambda: nn.EmbeddingBag(30, 2, dtype=torch.bfloat16), "it is torch.bfloat16"),
        (lambda: nn.Embedding(30, 2, device="meta"), "it is on meta.*initial=cpudist"),
        (
            lambda: nn.utils.parametrizations.weight_norm(
                nn.Embedding.from_pretrained(torch.ones(30, 2), freeze=False)
            ),
            "computed",
        ),
    ],
)
def test_a_name_that_fits_what_cannot_be_remote_is_refused(make, message):
    def build():
        return nn.ModuleDict({"a": nn.Embedding(30, 2), "it": make()})

    for names in (["it"], ["*"]):
        with pytest.raises(cpudist.RemoteTableError, match=message):
            remote(build, names=names)


@pytest.mark.parametrize(
    "use",
    [
        lambda module: nn.init.orthogonal_(module.weight),
        lambda module: module.weight.data.copy_(torch.ones(30, 2)),
        lambda module: nn.utils.parametrizations.weight_norm(module),
        lambda module: module(torch.tensor([1])),
    ],
)
def test_what_needs_rows_before_it_has_a_name_says_so(use):
    def build():
        made = nn.ModuleDict({"a": nn.Embedding(30, 2), "b": nn.Embedding(30, 2)})
        use(made["b"])
        return made

    words = r"remote_tables\(names=\).*is decided when the context ends.*min_rows="
    with pytest.raises(cpudist.Error, match=words):
        remote(build, names=["a"])


def test_what_no_name_fits_may_be_of_any_kind():
    made = remote(
        lambda: nn.ModuleDict(
            {
                "a": nn.Embedding(30, 2),
                "short": nn.Embedding(30, 2, dtype=torch.bfloat16),
                "given": nn.Embedding.from_pretrained(torch.ones(30, 2)),
            }
        ),
        names=["a"],
    )
    assert [is_remote(p) for p in made.parameters()] == [True, False, False]


# ---- what is read --------------------------------------------------------------------

READS = [
    (lambda w: w.sum(), "sum"),
    (lambda w: w.numpy(), "numpy"),
    (lambda w: w.tolist(), "tolist"),
    (lambda w: w + 1, "__add__|add"),
    (lambda w: w @ torch.ones(DIM), "matmul"),
    (lambda w: w.T, "T of the weight"),
    (lambda w: w[torch.tensor([1, 2])], "__getitem__"),
    (lambda w: w[:, 0], "__getitem__"),
    (lambda w: torch.stack([w]), "stack"),
    (lambda w: torch.rand_like(w), "rand_like"),
    (lambda w: w.double(), "cannot become torch.float64"),
    (lambda w: w.to(torch.bfloat16), "cannot become torch.bfloat16"),
    (lambda w: nn.functional.linear(torch.ones(1, DIM), w), "linear"),
    (
        lambda w: nn.functional.embedding(torch.tensor([1]), w),
        "no DistributedOptimizer trains it",
    ),
]


@pytest.mark.parametrize(("read", "message"), READS)
def test_reads_are_refused(read, message):
    module = remote()
    with pytest.raises(cpudist.RemoteTableError, match=message):
        read(module.weight)


def test_lookups_before_wrapping_say_what_to_do():
    for module in (remote(), remote(lambda: nn.EmbeddingBag(ROWS, DIM))):
        with pytest.raises(cpudist.RemoteTableError, match="Wrap the optimizer"):
            module(torch.tensor([[1, 2]]))


# ---- what others do with parameters --------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        torch.optim.SGD,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.RMSprop,
        cpudist.optim.RowWiseAdagrad,
        cpudist.optim.FTRL,
    ],
)
def test_optimizers_are_built_without_memory(kind):
    module = remote()
    optimizer = kind(module.parameters(), lr=0.1)
    state = optimizer.state.get(module.weight, {})
    for value in state.values():
        if isinstance(value, torch.Tensor) and value.dim():
            assert value.untyped_storage().nbytes() <= 64


def test_moves_and_modes_change_nothing():
    module = remote(lambda: nn.Sequential(nn.Embedding(ROWS, DIM), nn.Linear(DIM, 1)))
    weight = module[0].weight
    module.to("cpu").float().train().eval().requires_grad_(True).share_memory()
    module.to_empty(device="cpu")
    module.zero_grad(set_to_none=False)
    assert module[0].weight is weight
    with pytest.raises(cpudist.RemoteTableError, match=r"cannot become torch\.float64"):
        module.double()


def test_copies_begin_alike_and_are_their_own():
    module = remote()
    made = copy.deepcopy(module)
    assert is_remote(made.weight)
    assert isinstance(made.weight, nn.Parameter)
    assert made.weight.is_leaf
    assert made.weight.requires_grad
    assert table_of(made.weight).program == table_of(module.weight).program
    assert table_of(made.weight).program.seed == table_of(module.weight).program.seed
    made.weight.data.zero_()
    assert steps(made) != steps(module)


def test_whole_models_are_saved_by_their_description():
    module = remote(lambda: nn.Embedding(ROWS, DIM, padding_idx=2))
    module.weight.requires_grad_(False)
    file = io.BytesIO()
    torch.save(module, file)
    assert len(file.getvalue()) < 100_000
    made = pickle.loads(pickle.dumps(module))  # noqa: S301
    assert isinstance(made.weight, nn.Parameter)
    assert not made.weight.requires_grad
    assert table_of(made.weight).program == table_of(module.weight).program
    assert table_of(made.weight).program.seed == table_of(module.weight).program.seed
    assert made.state_dict() == {}


def test_state_dicts_are_without_them():
    module = remote(lambda: nn.ModuleDict({"t": nn.Embedding(ROWS, 1)}))
    module["layer"] = nn.Linear(1, 1)
    state = module.state_dict()
    assert list(state) == ["layer.weight", "layer.bias"]
    module.load_state_dict(state, strict=True)
    module.load_state_dict(state, strict=True, assign=True)
    assert is_remote(module["t"].weight)
    with pytest.raises(cpudist.RemoteTableError, match=r"rows for 't\.weight'"):
        module.load_state_dict({**state, "t.weight": torch.ones(1)})


def test_a_module_that_is_given_the_weight_later_leaves_it_out_too():
    first, second = remote(), nn.Embedding(4, DIM)
    second.weight = first.weight
    assert second.state_dict() == {}

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The dispatcher ops: one-line torch references, argument errors, fake kernels."""

from __future__ import annotations

import random
import subprocess
from concurrent.futures import ThreadPoolExecutor

import core_alone
import pytest
import torch
from patience import PATIENCE_S

from torch_cpudist import _core, ops
from torch_cpudist.errors import InvalidArgumentError, RowOutOfRangeError

SALT = 0xE220A8397B1DCDAF
ADAGRAD = {"lr": 0.1, "eps": 1e-10}


def make_keys(n: int, limit: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(
        limit,
        (n,),
        generator=torch.Generator().manual_seed(seed + n),
        dtype=torch.int64,
    )


def make_rows(n: int, dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(
        n, dim, generator=torch.Generator().manual_seed(n * 7 + dim), dtype=dtype
    )


def mix64(x: int) -> int:
    mask = 2**64 - 1
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & mask
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & mask
    return x ^ (x >> 31)


def hyper(config: _core.OptimizerConfig) -> tuple[int, int, list[float]]:
    return ops.config_arguments(config)


@pytest.mark.parametrize("n", [0, 1, 5, 64, 1000])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_dedupe_keys_numbers_first_occurrences(n: int, dtype: torch.dtype) -> None:
    keys = make_keys(n, 50).to(dtype)
    unique, inverse = ops.dedupe_keys(keys)
    assert unique.tolist() == list(dict.fromkeys(keys.tolist()))
    assert unique.dtype == inverse.dtype == torch.int64
    assert torch.equal(unique[inverse], keys.long())


@pytest.mark.parametrize("n", [0, 1, 300])
@pytest.mark.parametrize("dim", [0, 1, 16, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_segment_sums_add_in_batch_order(n: int, dim: int, dtype: torch.dtype) -> None:
    keys, rows = make_keys(n, 20), make_rows(n, dim, dtype)
    unique, sums = ops.dedupe_segment_sum(keys, rows)
    expected_unique, inverse = ops.dedupe_keys(keys)
    assert torch.equal(unique, expected_unique)
    # index_add_ on one thread adds in batch order too: equal to the last bit
    expected = torch.zeros(len(unique), dim, dtype=dtype)
    for i, segment in enumerate(inverse.tolist()):
        expected[segment] += rows[i]
    assert torch.equal(sums, expected)
    assert torch.equal(ops.segment_sum(rows, inverse, len(unique)), expected)


def test_segment_sum_takes_any_order_and_empty_segments() -> None:
    rows = torch.tensor([[1.0], [2.0], [4.0]])
    sums = ops.segment_sum(rows, torch.tensor([3, 0, 3]), 5)
    assert sums.flatten().tolist() == [2.0, 0.0, 0.0, 5.0, 0.0]


def test_segment_sum_reads_strided_and_expanded_rows() -> None:
    keys, rows = make_keys(40, 9), make_rows(40, 6)
    _, expected = ops.dedupe_segment_sum(keys, rows)
    wide = torch.zeros(40, 10)
    wide[:, 2:8] = rows
    assert torch.equal(ops.dedupe_segment_sum(keys, wide[:, 2:8])[1], expected)
    flipped = rows.t().contiguous().t()
    assert torch.equal(ops.dedupe_segment_sum(keys, flipped)[1], expected)
    one = rows[:1].expand(40, 6)
    repeated = ops.dedupe_segment_sum(keys, one.contiguous())[1]
    assert torch.equal(ops.dedupe_segment_sum(keys, one)[1], repeated)


@pytest.mark.parametrize("parts", [1, 3, 20])
@pytest.mark.parametrize("n", [0, 1, 500])
def test_partition_is_a_stable_sort_by_owner(parts: int, n: int) -> None:
    keys = make_keys(n, 2**40)
    owner_of = torch.arange(ops.BUCKET_COUNT) % parts
    order, offsets = ops.partition_keys(keys, owner_of, SALT, parts)
    owners = torch.tensor(
        [int(owner_of[mix64(key ^ SALT) % ops.BUCKET_COUNT]) for key in keys.tolist()],
        dtype=torch.int64,
    )
    assert torch.equal(order, torch.sort(owners, stable=True).indices)
    counts = torch.bincount(owners, minlength=parts)
    assert torch.equal(offsets, torch.cat([torch.zeros(1).long(), counts.cumsum(0)]))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]
)
@pytest.mark.parametrize("dim", [0, 1, 3, 16, 100])
def test_gather_and_scatter_equal_indexing(dtype: torch.dtype, dim: int) -> None:
    table = make_rows(50, dim).mul(3).to(dtype)
    index = torch.randperm(50)[:30]
    rows = ops.gather_rows(table, index)
    assert torch.equal(rows, table[index])
    target, expected = torch.zeros_like(table), torch.zeros_like(table)
    expected[index] = rows
    ops.scatter_rows(target, index, rows)
    assert torch.equal(target, expected)


def test_gather_reads_a_table_of_strided_rows() -> None:
    table = make_rows(20, 12)[:, 3:9]
    index = make_keys(40, 20)
    assert torch.equal(ops.gather_rows(table, index), table[index])


def test_scatter_keeps_the_last_of_equal_indices() -> None:
    target = torch.zeros(2, 1)
    ops.scatter_rows(target, torch.tensor([1, 1]), torch.tensor([[1.0], [2.0]]))
    assert target.flatten().tolist() == [0.0, 2.0]


def test_mutating_ops_are_seen_by_autograd() -> None:
    # Overwriting what backward needs must be an error, not a wrong gradient.
    weight = torch.ones(2, 2)
    factor = torch.ones(2, 2, requires_grad=True)
    product = (weight * factor).sum()
    before = weight._version
    ops.scatter_rows(weight, torch.tensor([0]), torch.zeros(1, 2))
    assert weight._version == before + 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    state, counts = torch.zeros(2, 2), torch.zeros(2, dtype=torch.int64)
    versions = [weight._version, state._version, counts._version]
    config = _core.OptimizerConfig("adagrad", **ADAGRAD)
    keys = torch.tensor([0])
    ops.update_rows(weight, state, keys, torch.ones(1, 2), config, counts=counts)
    assert [weight._version, state._version, counts._version] == [
        version + 1 for version in versions
    ]


@pytest.mark.parametrize(
    ("numel", "width", "servers", "least", "slice", "sizes"),
    [
        (0, 1, 3, 8192, True, []),
        (8191, 1, 3, 8192, True, [8191]),
        (100000, 1, 3, 8192, True, [33334, 33334, 33332]),
        (100000, 1, 3, 8192, False, [100000]),
        (171600, 400, 4, 8192, True, [43200, 43200, 43200, 42000]),
    ],
)
def test_slicing_rule(
    numel: int, width: int, servers: int, least: int, slice: bool, sizes: list[int]
) -> None:
    blocks = ops.slice_parameter(numel, width, servers, least, slice)
    assert blocks[:, 1].tolist() == sizes
    assert blocks[:, 0].tolist() == [sum(sizes[:i]) for i in range(len(sizes))]


def test_slicing_equals_the_rule_written_in_python() -> None:
    rng = random.Random(5)
    for _ in range(200):
        rows, width = rng.randint(1, 3000), rng.choice([1, 2, 16, 400])
        servers, least = rng.randint(1, 30), rng.choice([1, 100, 8192])
        total = rows * width
        wanted = min(servers, max(1, total // least))
        size = -(-total // wanted)
        size = -(-size // width) * width
        expected = [min(size, total - at) for at in range(0, total, size)]
        found = ops.slice_parameter(total, width, servers, least)
        assert found[:, 1].tolist() == expected


KEYS = torch.tensor([0, 1])
ROWS = torch.ones(2, 3)
OWNERS = torch.zeros(ops.BUCKET_COUNT, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: ops.dedupe_keys([1]), TypeError, "must be a tensor, got list"),
        (lambda: ops.dedupe_keys(ROWS[0]), TypeError, "got torch.float32"),
        (lambda: ops.dedupe_keys(KEYS[None]), InvalidArgumentError, r"shape \(1, 2\)"),
        (lambda: ops.dedupe_keys(KEYS.to("meta")), InvalidArgumentError, "meta"),
        (
            lambda: ops.dedupe_segment_sum(KEYS, ROWS[:1]),
            InvalidArgumentError,
            "must be 2, got 1",
        ),
        (
            lambda: ops.dedupe_segment_sum(KEYS, ROWS.half()),
            TypeError,
            "got torch.float16",
        ),
        (lambda: ops.segment_sum(ROWS, KEYS, 1), RowOutOfRangeError, "from 0 to 1"),
        (lambda: ops.segment_sum(ROWS, KEYS, -1), InvalidArgumentError, "got -1"),
        (
            lambda: ops.partition_keys(KEYS, OWNERS[:9], 0, 1),
            InvalidArgumentError,
            "must be 4096, got 9",
        ),
        (
            lambda: ops.partition_keys(KEYS, OWNERS + 2, 0, 2),
            RowOutOfRangeError,
            r"\[0, 2\)",
        ),
        (lambda: ops.partition_keys(KEYS, OWNERS, 0, 0), InvalidArgumentError, "got 0"),
        (
            lambda: ops.partition_keys(KEYS, OWNERS, 2**64, 1),
            InvalidArgumentError,
            "salt",
        ),
        (lambda: ops.gather_rows(ROWS, KEYS + 1), RowOutOfRangeError, "from 1 to 2"),
        (lambda: ops.gather_rows(ROWS, -KEYS), RowOutOfRangeError, "from -1 to 0"),
        (lambda: ops.gather_rows(ROWS.t(), KEYS), InvalidArgumentError, "contiguous"),
        (
            lambda: ops.scatter_rows(torch.ones(3, 2).t(), KEYS, ROWS),
            InvalidArgumentError,
            "contiguous",
        ),
        (
            lambda: ops.scatter_rows(torch.ones(2, 3), KEYS, ROWS.double()),
            TypeError,
            "got torch.float64",
        ),
        (lambda: ops.slice_parameter(5, 0, 1, 1), InvalidArgumentError, "row_width"),
        (lambda: ops.slice_parameter(-5, 1, 1, 1), InvalidArgumentError, "got -5"),
    ],
)
def test_wrong_arguments_are_named(call, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def test_update_checks_before_it_writes() -> None:
    config = _core.OptimizerConfig("adagrad", **ADAGRAD)
    weight, state = torch.ones(4, 3), torch.zeros(4, 3)
    good = {"weight": weight, "state": state, "keys": KEYS, "grads": ROWS, "step": 1}
    wrong: list[tuple[dict[str, object], type[Exception], str]] = [
        ({"state": torch.zeros(4, 2)}, InvalidArgumentError, "state must have shape"),
        ({"state": state.double()}, TypeError, "got torch.float64"),
        ({"keys": KEYS + 3}, RowOutOfRangeError, "from 3 to 4"),
        ({"grads": ROWS[:, :2]}, InvalidArgumentError, "grads must have shape"),
        ({"step": 0}, InvalidArgumentError, "got 0"),
        ({"step": None}, InvalidArgumentError, "exactly one"),
        ({"counts": torch.zeros(4).long()}, InvalidArgumentError, "exactly one"),
    ]
    for change, error, words in wrong:
        with pytest.raises(error, match=words):
            ops.update_rows(**(good | change), config=config)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="grad must have shape"):
        ops.update_dense(weight, state, torch.ones(3, 4), config, step=1)
    assert torch.equal(weight, torch.ones(4, 3))
    assert torch.equal(state, torch.zeros(4, 3))


def test_raw_ops_check_again() -> None:
    raw = torch.ops.torch_cpudist
    with pytest.raises(RuntimeError, match=r"index\[1\] must be in \[0, 1\), got 1"):
        raw.gather_rows(ROWS[:1], KEYS)
    with pytest.raises(RuntimeError, match=r"inverse\[1\]"):
        raw.segment_sum(ROWS, KEYS, 1)
    with pytest.raises(RuntimeError, match=r"bucket_owner\[0\]"):
        raw.partition_keys(KEYS, OWNERS + 1, 0, 1)
    with pytest.raises(ValueError, match="row_width"):
        raw.slice_parameter(1, 0, 1, 1, True)
    kind, flags, values = hyper(_core.OptimizerConfig("adagrad", **ADAGRAD))
    table = (torch.ones(2, 3), torch.ones(2, 3), None, KEYS, ROWS)
    with pytest.raises(RuntimeError, match="kind must be in"):
        raw.update_rows(*table, 99, flags, values, 1)
    with pytest.raises(RuntimeError, match="lr must not be negative"):
        raw.update_rows(*table, kind, flags, [-1.0, *values[1:]], 1)
    with pytest.raises(RuntimeError, match="hyper must have 13 values, got 1"):
        raw.update_rows(*table, kind, flags, [0.1], 1)


def opcheck_samples() -> list[tuple[str, str, tuple[object, ...]]]:
    adam = hyper(_core.OptimizerConfig("adam", lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8))
    batches = {
        "empty": (make_keys(0, 5), make_rows(0, 4)),
        "one row": (make_keys(1, 5), make_rows(1, 4)),
        "duplicates": (make_keys(30, 5), make_rows(30, 4)),
        "non-contiguous": (make_keys(60, 5)[::2], make_rows(60, 8)[::2, ::2]),
    }
    samples: list[tuple[str, str, tuple[object, ...]]] = []
    for case, (keys, rows) in batches.items():
        table, state = make_rows(5, 4), torch.zeros(5, 8)
        counts = torch.zeros(5, dtype=torch.int64)
        for name, arguments in {
            "dedupe_keys": (keys,),
            "segment_sum": (rows, keys, 5),
            "dedupe_segment_sum": (keys, rows),
            "partition_keys": (keys, OWNERS, 3, 2),
            "gather_rows": (table, keys),
            "scatter_rows": (table, keys, rows),
            "update_rows": (table, state, None, keys, rows, *adam, 1),
            "update_dense": (
                *(rows.clone(), rows.new_zeros(2 * rows.numel())),
                *(rows, 1, *adam, 1),
            ),
        }.items():
            samples.append((name, case, arguments))
        counted = (table, state, counts, keys, rows, *adam, 0)
        samples.append(("update_rows", f"{case}, counts", counted))
    samples.append(("slice_parameter", "sliced", (100000, 10, 3, 8192, True)))
    return samples


@pytest.mark.parametrize(
    ("name", "arguments"),
    [pytest.param(n, a, id=f"{n}-{case}") for n, case, a in opcheck_samples()],
)
def test_opcheck(name: str, arguments: tuple[object, ...]) -> None:
    torch.library.opcheck(getattr(torch.ops.torch_cpudist, name).default, arguments)


def test_threads_do_not_change_a_bit() -> None:
    config = _core.OptimizerConfig("adam", lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8)
    keys, grads = make_keys(20000, 30000), make_rows(20000, 16)
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            weight, state = make_rows(30000, 16), torch.zeros(30000, 32)
            counts = torch.zeros(30000, dtype=torch.int64)
            for _ in range(2):
                ops.update_rows(weight, state, keys, grads, config, counts=counts)
            results.append((weight, state, counts, ops.gather_rows(weight, keys)))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def ask_simd_level(value: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        core_alone.command("print(core.simd_level())"),
        env=core_alone.environment(CPUDIST_SIMD=value),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.mark.processes
def test_simd_level_can_be_lowered_from_outside() -> None:
    with ThreadPoolExecutor() as pool:
        found, wrong = pool.map(ask_simd_level, ["scalar", "sse9"])
    assert found.stdout.strip() == "scalar", found.stderr
    assert wrong.returncode != 0
    assert "expected scalar, avx2 or avx512, found 'sse9'" in wrong.stderr

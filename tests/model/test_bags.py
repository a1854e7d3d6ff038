# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``cpudist.data.Bags`` and ``batch_size``."""

from __future__ import annotations

import pytest
import torch

import torch_cpudist as cpudist
from torch_cpudist.data import Bags, batch_size


def test_bags():
    bags = Bags(torch.tensor([5, 6, 7, 8]), torch.tensor([0, 2, 2, 3, 4]))
    assert (len(bags), bags.size) == (2, 4)
    part = bags.rows(1, 3)
    assert part.values.tolist() == [7]
    assert part.offsets.tolist() == [0, 0, 1]
    joined = Bags.join([bags.rows(0, 1), bags.rows(1, 4)])
    assert [x.tolist() for x in joined] == [x.tolist() for x in bags]
    assert bags.rows(2, 4).ids.tolist() == [7, 8]
    assert bags.rows(2, 2).ids.tolist() == []
    with pytest.raises(cpudist.InvalidArgumentError, match="sample 0 has 2"):
        _ = bags.ids
    for rows in ((3, 2), (-1, 2), (0, 5)):
        with pytest.raises(cpudist.InvalidArgumentError, match="4 bags"):
            bags.rows(*rows)
    assert batch_size({"a": bags, "b": (torch.ones(4, 2), 3, "x")}) == 4
    for wrong in ({"a": bags, "b": torch.ones(3)}, {}, 3, {"a": {1, 2}}):
        with pytest.raises(cpudist.InvalidArgumentError):
            batch_size(wrong)

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Two towers: a vector for every user and one for every movie, whose product ranks."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from movielens_data import NO_FACT, Likes
from torch import nn


class Tower(nn.Module):
    """A vector of length 1 from an id's row and the mean of the rows of its facts."""

    def __init__(self, ids: int, facts: torch.Tensor, rows: int, dim: int) -> None:
        """Make two tables and a small network.

        Args:
            ids: users or items.
            facts: int64 ``[ids, n]``, what is known of each.
            rows: of the table of facts.
            dim: of rows, and of the vector.
        """
        super().__init__()
        self.row = nn.Embedding(ids, dim, sparse=True)
        self.fact = nn.EmbeddingBag(
            rows, dim, mode="mean", sparse=True, padding_idx=NO_FACT
        )
        self.network = nn.Sequential(
            nn.Linear(2 * dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim)
        )
        self.register_buffer("known", facts, persistent=False)
        for table in (self.row, self.fact):
            nn.init.normal_(table.weight, std=dim**-0.5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return vectors ``[n, dim]`` of ids ``[n]``."""
        known = cast(torch.Tensor, self.known)[ids]
        found = torch.cat([self.row(ids), self.fact(known)], dim=1)
        # The id's row once more: what no fact says of it goes straight to the product.
        return F.normalize(self.network(found) + self.row(ids), dim=1)


class TwoTowers(nn.Module):
    """One tower for users, one for movies."""

    def __init__(self, likes: Likes, dim: int) -> None:
        """Make both for the users and movies of a data set."""
        super().__init__()
        self.users = Tower(
            likes.users, torch.from_numpy(likes.user_facts), likes.facts, dim
        )
        self.items = Tower(
            likes.items, torch.from_numpy(likes.item_facts), likes.facts, dim
        )

    def forward(
        self, users: torch.Tensor, items: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the vectors of users and of items."""
        return self.users(users), self.items(items)

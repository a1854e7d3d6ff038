# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""docs/configuration.md is what its script makes, and misses no field or variable."""

from __future__ import annotations

import dataclasses

import configuration_page

from torch_cpudist.launch import environment
from torch_cpudist.settings import fields
from torch_cpudist.strategies.registry import SETTINGS


def test_the_page_is_what_the_script_makes():
    found = configuration_page.PAGE.read_text()
    assert found == configuration_page.page(), (
        "run: python scripts/configuration_page.py --write"
    )


def lines():
    """Class, field, type, unit, default, variable and meaning of every line."""
    return [[cell.strip("`") for cell in row] for row in configuration_page.rows()]


def test_the_page_has_every_line():
    text = " ".join(configuration_page.page().split())
    for row in configuration_page.rows():
        named = ", ".join(cell for cell in (row.field, row.variable) if cell != "-")
        assert f"- {named} ({row.kind}" in text, row
        assert f"; default {row.default}): {row.meaning}" in text, row


def test_every_field_and_variable_has_its_line():
    found = {(row[0], row[1]) for row in lines()}
    for cls in SETTINGS:
        for field in dataclasses.fields(cls):
            inherited = any(
                field.name in getattr(base, "__dataclass_fields__", {})
                for base in cls.__bases__
            )
            assert ((cls.__name__, field.name) in found) != inherited, (cls, field.name)
    others = {f"CPUDIST_{name}" for name in configuration_page.VARIABLES}
    assert others == environment.OWN_VARIABLES
    variables = [row[5] for row in lines() if row[5] != "-"]
    assert sorted(variables) == sorted(fields.variables(SETTINGS) | others)


def test_every_line_is_complete():
    for row in lines():
        assert len(row) == 7, row
        assert all(row), row
        number = row[2].startswith(("int`", "float`")) or row[2] in ("int", "float")
        assert (row[3] != "-") == number, f"numbers have a unit: {row}"

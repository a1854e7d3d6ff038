# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""docs/configuration.md is what its script makes, and misses no field or variable."""

from __future__ import annotations

import dataclasses

import configuration_page

from torch_cpudist import config, environment


def test_the_page_is_what_the_script_makes():
    found = configuration_page.PAGE.read_text()
    assert found == configuration_page.page(), (
        "run: python scripts/configuration_page.py --write"
    )


def test_every_field_and_variable_has_its_line():
    page = configuration_page.page()
    for cls in config.classes():
        section = page.partition(f"### {cls.__name__}\n")[2].partition("\n##")[0]
        for field in dataclasses.fields(cls):
            inherited = any(
                field.name in getattr(base, "__dataclass_fields__", {})
                for base in cls.__bases__
            )
            assert (f"| `{field.name}` |" in section) != inherited, (cls, field.name)
    others = {f"CPUDIST_{name}" for name in configuration_page.VARIABLES}
    assert others == environment._OWN
    for name in config.variables() | others:
        assert page.count(f"`{name}` |") == 1, name

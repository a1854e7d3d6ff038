# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Every field of every settings class, and every variable, has the effect it promises.

Observed on running servers and trainers, not on parsed values. A field or variable
without an observer fails.
"""

from __future__ import annotations

import dataclasses

import pytest
import settings_collective  # noqa: F401 - notes its fields
import settings_replicas  # noqa: F401 - the same
from settings_cases import FIELDS, Given
from settings_process import VARIABLES

from torch_cpudist.launch import environment
from torch_cpudist.settings.fields import scalar_fields, variable_of
from torch_cpudist.strategies.registry import SETTINGS


def test_every_setting_has_an_observer():
    fields = {(c, f.name) for c in SETTINGS for f in scalar_fields(c)}
    inherited = {
        (c, name)
        for c, name in fields
        if any((base, name) in fields for base in c.__mro__[1:])
    }
    assert set(FIELDS) == fields - inherited
    assert set(VARIABLES) == set(environment.OWN_VARIABLES)


@pytest.mark.parametrize(
    ("kind", "name"), FIELDS, ids=[f"{c.__name__}.{n}" for c, n in FIELDS]
)
def test_a_field_has_an_effect(kind, name):
    observer = FIELDS[kind, name]
    plain = Given(fields={name: observer.plain})
    changed = Given(fields={name: observer.changed})
    by_argument = observer.see(changed)
    assert by_argument != observer.see(plain)
    # Over an argument that says otherwise.
    variable = {variable_of(kind, name): observer.text}
    assert observer.see(dataclasses.replace(plain, variables=variable)) == by_argument


@pytest.mark.parametrize("name", VARIABLES)
def test_a_variable_has_an_effect(name):
    observer = VARIABLES[name]
    plain = {} if observer.plain is None else {name: observer.plain}
    before = observer.see(Given(variables=plain))
    after = observer.see(Given(variables={name: observer.changed}))
    assert after != before


def test_who_serves_can_be_an_argument_too():
    see = VARIABLES["CPUDIST_SERVERS"].see
    by_argument = see(Given(fields={"servers": 1}))
    assert by_argument == see(Given(variables={"CPUDIST_SERVERS": "1"}))
    assert by_argument != see(Given(fields={"servers": 0}))

# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Rules of the house: layers, circles, torn classes, privacy, crowds, strange files."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import tidy
from tidy_rules import layers, shape
from tidy_rules.layers import LAYERS

P = "torch_cpudist"


def found_in(sources: dict[str, str], *rules: str) -> list[str]:
    """Every violation of these rules, as printed."""
    found = tidy.check_sources(sources)
    return [str(one) for one in found if one.rule in rules]


# ---- layers --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statement", "line"),
    [
        ("import torch_cpudist.launch.run\n", 1),
        ("\nfrom torch_cpudist.launch import run\n", 2),
        ("from ..launch.run import Run\n", 1),
        ("from ..launch import run\n", 1),
        ("if TYPE_CHECKING:\n    from torch_cpudist.launch.run import Run\n", 2),
        ("def late():\n    from torch_cpudist.launch.run import Run\n", 2),
        ('importlib.import_module("torch_cpudist.launch.run")\n', 1),
        ('\nrun = import_module("torch_cpudist.launch.run").Run\n', 2),
        ('__import__("torch_cpudist.launch.run")\n', 1),
        ('importlib.util.find_spec("torch_cpudist.launch.run")\n', 1),
    ],
)
def test_an_import_upward(statement: str, line: int) -> None:
    sources = {
        f"{P}/launch/__init__.py": "",
        f"{P}/launch/run.py": "class Run: ...\n",
        f"{P}/settings/jobs.py": statement,
    }
    what = f"{P}/settings may not know {P}/launch/run.py"
    expected = [f"{P}/settings/jobs.py:{line}: layer: {what}"]
    assert found_in(sources, "layer") == expected


@pytest.mark.parametrize("statement", ["from .. import errors", "import torch_cpudist"])
def test_an_import_of_the_whole_package_is_one_upward(statement: str) -> None:
    sources = {
        f"{P}/__init__.py": "",
        f"{P}/errors.py": "",
        f"{P}/settings/jobs.py": f"{statement}\n",
    }
    upward = statement == "import torch_cpudist"
    what = f"{P}/settings/jobs.py:1: layer: {P}/settings may not know {P}/__init__.py"
    assert found_in(sources, "layer") == ([what] if upward else [])


def test_layers_beside_each_other_do_not_know_each_other() -> None:
    sources = {
        f"{P}/metrics/auc.py": f"from {P}.replicas.pool import Pool\n",
        f"{P}/replicas/pool.py": f"from {P}.metrics import auc\n",
    }
    found = found_in(sources, "layer")
    assert [one.split(": ")[0] for one in found] == [f"{name}:1" for name in sources]


@pytest.mark.parametrize(
    ("name", "header"),
    [
        ("csrc/server/server.cpp", "client/client.h"),
        ("csrc/client/geo/table.h", "server/server.h"),
        ("csrc/base/clock.h", "kernels/hash.h"),
        ("csrc/transport/tcp/channel.h", "wire/rows.h"),
        ("csrc/table/store.h", "transport/channel.h"),
        ("csrc/backends/shm/engine.h", "transport/ranks/lane.h"),
        ("csrc/client/param_set.h", "client/arrivals/queue.h"),
        ("csrc/client/rounds/push.h", "client/arrivals/queue.h"),
        ("csrc/client/push/packing.h", "client/param_set.h"),
        ("csrc/client/values/pull.h", "client/rounds/push.h"),
        ("csrc/client/arrivals/queue.h", "client/geo/table.h"),
        ("csrc/client/geo/table.h", "client/rounds/push.h"),
        ("csrc/server/param_set.cpp", "server/modes.h"),
        ("csrc/server/policy.h", "server/rounds/rounds.h"),
        ("csrc/server/rounds/group.h", "server/arrivals/arrivals.h"),
        ("csrc/server/arrivals/arrivals.h", "server/rounds/group.h"),
        ("csrc/server/geo/change_log.h", "server/arrivals/arrivals.h"),
        ("csrc/server/update/update.h", "server/policy.h"),
        ("csrc/bind/server.cpp", "server/rounds/rounds.h"),
    ],
)
def test_an_include_of_another_layer(name: str, header: str) -> None:
    sources = {name: f'\n#include "{header}"\n', f"csrc/{header}": ""}
    own = layers.layer_of(name)
    expected = [f"{name}:2: layer: {own} may not know csrc/{header}"]
    assert found_in(sources, "layer") == expected


def test_includes_of_what_a_layer_stands_on() -> None:
    sources = {
        "csrc/transport/tcp/a.h": '#include "wire/frame.h"\n#include "socket.h"\n',
        "csrc/transport/tcp/socket.h": '#include "base/errors.h"\n#include <vector>\n',
        "csrc/client/a.h": '// #include "server/server.h"\n#include "wire/rows.h"\n',
        "csrc/wire/frame.h": "",
        "csrc/wire/rows.h": "",
        "csrc/base/errors.h": "",
        "csrc/server/server.h": "",
        f"{P}/drivers/sync.py": (
            f"from {P} import _core, errors\nimport torch\n"
            f'importlib.import_module("{P}._c10d")\nimport_module("{P}.errors")\n'
            "importlib.import_module(name)\n"
        ),
        f"{P}/__init__.py": "",
        f"{P}/errors.py": "",
    }
    assert found_in(sources, "layer", "circle") == []


@pytest.mark.parametrize("name", [f"{P}/odds/a.py", "csrc/odds/a.cpp"])
def test_a_folder_without_a_layer(name: str) -> None:
    (found,) = found_in({name: ""}, "layer")
    assert found.startswith(f"{name}:1: layer: its folder has no row in LAYERS")


def test_a_row_of_a_folder_that_is_not_there() -> None:
    there = {f"{place}/a.h": "" for place in LAYERS}
    there |= {f"{place}/a.h": "" for row in LAYERS.values() for place in row}
    assert list(layers.check_rows(there)) == []
    for gone in ("csrc/server/geo", "csrc/wire/frame", f"{P}/drivers"):
        sources = {n: "" for n in there if not n.startswith(f"{gone}/")}
        (found,) = map(str, layers.check_rows(sources))
        what = f"LAYERS names {gone}, where no file is"
        assert found == f"scripts/tidy_rules/layers.py:1: layer-row: {what}"


def test_every_folder_of_the_tree_has_a_row_and_no_row_makes_a_circle() -> None:
    rows = {place: set(known) for place, known in LAYERS.items()}
    assert list(layers.circles(rows)) == []


# ---- circles -------------------------------------------------------------------------


def test_a_circle_of_modules_that_only_types_close() -> None:
    types = "if TYPE_CHECKING:\n    from torch_cpudist.model.a import A\n"
    sources = {
        f"{P}/model/a.py": "\nfrom torch_cpudist.model.b import B\n",
        f"{P}/model/b.py": "from . import c\n",
        f"{P}/model/c.py": types,
        f"{P}/model/d.py": "from . import a, b, c\n",
    }
    names = f"{P}/model/a.py, {P}/model/b.py, {P}/model/c.py"
    what = f"{P}/model/a.py:2: circle: 3 files know each other: {names}"
    assert found_in(sources, "circle") == [what]


def test_a_circle_of_headers() -> None:
    sources = {
        "csrc/wire/a.h": '#include "wire/b.h"\n',
        "csrc/wire/b.h": '\n#include "a.h"\n',
        "csrc/wire/b.cpp": '#include "wire/b.h"\n',
    }
    names = "csrc/wire/a.h, csrc/wire/b.h"
    what = f"csrc/wire/a.h:1: circle: 2 files know each other: {names}"
    assert found_in(sources, "circle") == [what]


# ---- torn classes --------------------------------------------------------------------

ONE = """
namespace cpudist {
std::vector<std::pair<int, Other::Part>> Client::parts(std::function<void(int)> f) {
  return f(1);
}
}  // namespace cpudist
"""


@pytest.mark.parametrize(
    "member",
    [
        "Client::Client(int x) : x_(std::move(x)) {}",
        "Client::~Client() {}",
        "bool Client::operator==(const Client& other) const { return true; }",
        "template <typename T>\nvoid Client::send(T&& value) {}",
        "std::shared_ptr<Client> Client::make() { return {}; }",
    ],
)
@pytest.mark.parametrize("folder", ["", "arrivals/"])
def test_a_class_in_two_files(member: str, folder: str) -> None:
    first = f"csrc/client/{folder}a.cpp"
    there = f"\nnamespace cpudist {{\n{member}\n}}  // namespace cpudist\n"
    sources = {first: ONE, "csrc/client/geo/b.cpp": there}
    (found,) = found_in(sources, "torn-class")
    where, what = found.split(": torn-class: ")
    name, line = where.split(":")
    assert name == "csrc/client/geo/b.cpp"
    assert int(line) in (3, 4)
    assert what == f"Client has members in {first}, too: one class, one file"


@pytest.mark.parametrize(
    ("opened", "member"),
    [
        ("namespace cpudist {\nnamespace client {\n", "Set"),
        ("namespace cpudist { namespace client {\n", "Set"),
        ("namespace cpudist {\nclass Buffer;\nnamespace client {\n", "Set"),
        ("namespace cpudist {\nint other() {\n  return 1;\n}\n", "client::Set"),
    ],
)
def test_a_class_in_two_files_whose_namespaces_are_written_otherwise(
    opened: str, member: str
) -> None:
    one = "namespace cpudist::client {\nvoid Set::open() {}\n}\n"
    other = f"{opened}void {member}::close() {{}}\n}}\n"
    sources = {"csrc/client/a.cpp": one, "csrc/client/b.cpp": other}
    line = opened.count("\n") + 1
    what = f"{member} has members in csrc/client/a.cpp, too: one class, one file"
    expected = [f"csrc/client/b.cpp:{line}: torn-class: {what}"]
    assert found_in(sources, "torn-class") == expected


def test_classes_of_one_name_in_namespaces_on_two_lines_are_two() -> None:
    sources = {
        f"csrc/{one}/a.cpp": (
            f"namespace cpudist {{\nnamespace {one} {{\nvoid Set::open() {{}}\n}}\n}}\n"
        )
        for one in ("client", "server")
    }
    assert found_in(sources, "torn-class") == []


def test_classes_of_one_name_and_functions_that_use_a_class() -> None:
    uses = (
        "void run() { Client::make(); }\nClient::Kind kind_of(int x) { return {}; }\n"
    )
    sources = {
        "csrc/client/a.cpp": ONE + "void Client::Impl::open() {}\n",
        "csrc/client/b.cpp": uses + "void client::leave() {}\n",
        **{
            f"csrc/backends/{one}/engine.cpp": (
                f"namespace cpudist::{one} {{\nvoid Engine::run() {{}}\n}}\n"
            )
            for one in ("ccl", "shm")
        },
    }
    assert found_in(sources, "torn-class") == []


# ---- privacy -------------------------------------------------------------------------

DRIVER = "class Driver:\n    def __init__(self):\n        self._inners = []\n"


@pytest.mark.parametrize(
    "folder", [f"{P}/replicas", "tests/drivers", "scripts", "benchmarks", "examples/a"]
)
def test_a_private_name_of_another_folder(folder: str) -> None:
    sources = {
        f"{P}/drivers/base.py": DRIVER,
        f"{folder}/a.py": "def count(driver):\n    return len(driver._inners)\n",
    }
    what = f"_inners is private to {P}/drivers"
    assert found_in(sources, "private") == [f"{folder}/a.py:2: private: {what}"]


@pytest.mark.parametrize(
    "taken",
    [
        'getattr(driver, "_inners", None)',
        'hasattr(driver, "_inners")',
        'setattr(driver, "_inners", [])',
        'delattr(driver, "_inners")',
        'monkeypatch.setattr(Driver, "_inners", [])',
        'monkeypatch.setattr("torch_cpudist.drivers.base.Driver._inners", [])',
        'monkeypatch.delattr(Driver, "_inners")',
        'mock.patch.object(Driver, "_inners")',
        'mock.patch("torch_cpudist.drivers.base.Driver._inners")',
        'operator.attrgetter("_inners")(driver)',
        'Driver.__dict__["_inners"]',
        'self.driver.__dict__["_inners"]',
        'vars(driver)["_inners"]',
        'driver.__dict__.get("_inners")',
        'vars(driver).pop("_inners")',
    ],
)
def test_a_private_name_in_a_text(taken: str) -> None:
    sources = {f"{P}/drivers/base.py": DRIVER, "tests/a/a.py": f"\nx = {taken}\n"}
    what = f"_inners is private to {P}/drivers"
    assert found_in(sources, "private") == [f"tests/a/a.py:2: private: {what}"]


def test_a_private_name_that_is_imported() -> None:
    sources = {
        f"{P}/drivers/base.py": "_LIMIT = 3\n",
        f"{P}/replicas/a.py": f"from {P}.drivers.base import _LIMIT\n",
        f"{P}/drivers/b.py": f"from {P}.drivers.base import _LIMIT\n",
    }
    what = f"_LIMIT is private to {P}/drivers"
    assert found_in(sources, "private") == [f"{P}/replicas/a.py:1: private: {what}"]


def test_private_names_of_ones_own_and_of_others() -> None:
    own = "import torch\nfrom torch_cpudist import _core\nx = self._inners\n"
    own += "y = super()._inners\nz = torch._C._jit\nw = gradient._values()\n"
    own += "v = names._fields\nu = getattr(self, '_inners')\n"
    own += "t = self.__dict__['_inners']\ns = vars(self)['_inners']\n"
    own += "r = words['_inners']\nq = words.get('_inners')\np = '_inners'\n"
    sources = {
        f"{P}/drivers/base.py": DRIVER
        + "_core = 1\ndef _values(): ...\ndef _fields(): ...\n",
        f"{P}/drivers/sync.py": "def count(driver):\n    return driver._inners\n",
        f"{P}/replicas/a.py": own,
    }
    assert found_in(sources, "private") == []


# ---- packed calls, crowds, strange files ---------------------------------------------


@pytest.mark.parametrize("call", ["f(*(1, 2))", "f(\n    a,\n    *[1, b],\n)"])
def test_a_packed_call(call: str) -> None:
    found = [str(one) for one in shape.check_packed_calls("a.py", f"x = {call}\n")]
    line = call.count("\n") or 1
    what = "a call with `*(…)` of known length: name the arguments"
    assert found == [f"a.py:{line}: star-arguments: {what}"]


def test_calls_with_what_has_its_own_length() -> None:
    text = "f(*others, *(x for x in y))\nz = [*(1, 2), *(3,)]\nw = ((1, 2), *z)\n"
    assert list(shape.check_packed_calls("a.py", text)) == []


def test_a_crowded_folder() -> None:
    sources = {f"{P}/model/a{number:02}.py": "" for number in range(25)}
    sources |= {f"{P}/model/__init__.py": "", f"{P}/model/sub/b.py": ""}
    assert found_in(sources, "crowded") == []
    sources[f"{P}/model/b.py"] = ""
    what = f"more than 25 source files in {P}/model"
    assert found_in(sources, "crowded") == [f"{P}/model/b.py:1: crowded: {what}"]


def test_two_tests_of_one_name() -> None:
    sources = {"tests/a/test_x.py": "", "tests/a/__init__.py": "", f"{P}/test_x.py": ""}
    sources["tests/b/__init__.py"] = ""
    assert found_in(sources, "twin-test") == []
    sources["tests/b/test_x.py"] = ""
    what = "tests/a/test_x.py has that name, too: pytest takes the two for one"
    assert found_in(sources, "twin-test") == [f"tests/b/test_x.py:1: twin-test: {what}"]


def test_a_tracked_file_of_a_strange_kind(tmp_path: Path) -> None:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    (tmp_path / "build").mkdir()
    for name in (".ninja_log", "notes.md", "build/a.o", ".gitignore"):
        (tmp_path / name).touch()
    assert list(tidy.check_tree(tmp_path)) == []
    for command in (["init", "--quiet"], ["add", "."]):
        subprocess.run(["git", "-C", tmp_path, *command], check=True)
    found = [str(one) for one in tidy.check_tree(tmp_path)]
    what = "1: unknown-file: tracked, but of no kind that the project has"
    assert found == [f".ninja_log:{what}", f"build/a.o:{what}"]

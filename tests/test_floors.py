"""The shape of the package: who may import whom, what an import costs, what is shipped."""

import subprocess
import sys
import tomllib

import pytest

from tools import rooms
from tools.rooms import LINES, PACKAGE, ROOT

FILES = rooms.sources()


@pytest.mark.parametrize("module", [m for m in FILES if not rooms.is_the_package(m)])
def test_imports_only_from_floors_below(module):
    assert rooms.floor_problems(FILES[module], module, FILES) == []


@pytest.mark.parametrize(
    "source, module",
    [
        ("from ..model import load", "companion.caches.base"),
        ("from companion import generate", "companion.model.load"),
        ("import companion.cli", "companion.generate.loop"),
        ("def f():\n    from ..generate import generate", "companion.model.load"),
        ("from ..rope import Rope", "companion.cost.memory"),  # same floor, another room
        ("from ..moe import route", "companion.caches.base"),  # same floor, another room
        ("import numpy", "companion.cost.memory"),
        ("import torch", "companion.paging.pool"),
        ("import torch", "companion.serving.scheduler"),
        ("import torch", "companion.live.cost"),
        ("x = 1", "companion.newroom.file"),
        ("from benchmarks.timing import best", "companion.lab.probes"),
        ("from tools.rooms import FLOORS", "companion.cli"),
        ("def f():\n    import tests.helpers.made_up", "companion.engine.engine"),
    ],
)
def test_a_forbidden_import_is_found(source, module):
    assert len(rooms.floor_problems(source, module)) == 1


@pytest.mark.parametrize(
    "source, module",
    [
        ("from .spec import ModelSpec\nfrom ..cost import models", "companion.caches.base"),
        ("import json, math\nfrom dataclasses import dataclass", "companion.cost.memory"),
        ("from companion.generate import generate\nimport torch", "companion.cli"),
        ("from ..paging import BlockManager\nimport torch", "companion.engine.engine"),
        ("if TYPE_CHECKING:\n    from ..model import Decoder", "companion.caches.base"),
    ],
)
def test_an_allowed_import_passes(source, module):
    assert rooms.floor_problems(source, module) == []


def test_the_files_of_a_room_import_one_another_in_one_direction():
    assert rooms.circles(rooms.arrows_of_files(FILES)) == []


A, B = "companion.cost.a", "companion.cost.b"


@pytest.mark.parametrize(
    "one, other",
    [
        ("from .b import f", "from .a import g"),
        ("from . import b", "import companion.cost.a"),
        ("from .b import f", "def g():\n    from .a import h"),  # hidden in a function
        ("if TYPE_CHECKING:\n    x = 1\nelse:\n    from .b import f", "from . import a"),
    ],
)
def test_a_circle_is_found(one, other):
    assert rooms.circles(rooms.arrows_of_files({A: one, B: other})) == [[A, B]]


def test_a_circle_through_the_rooms_door_is_found():
    door = "companion.cost.__init__"
    assert rooms.circles(rooms.arrows_of_files({door: "from .a import f", A: "from . import f"})) == [
        [door, A]
    ]


def test_what_a_type_checker_alone_reads_makes_no_circle():
    back = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .a import f"
    assert rooms.circles(rooms.arrows_of_files({A: "from .b import g", B: back})) == []
    assert rooms.circles(rooms.arrows_of_files({A: "from .b import g", B: "from ..paging import a"})) == []


@pytest.mark.parametrize("module", FILES)
def test_a_private_name_stays_in_its_module(module):
    assert rooms.private_problems(FILES[module], module, FILES) == []


@pytest.mark.parametrize(
    "source",
    [
        "from .b import _f",
        "from .b import f, _g as g",
        "def f():\n    from ..paging.pool import _check",
        "from . import b\nb._f()",
        "import companion.cost.b\ncompanion.cost.b._f = 1",
        "from companion import paging as p\nprint(p._x)",
    ],
)
def test_a_private_name_of_another_module_is_found(source):
    assert len(rooms.private_problems(source, A, [A, B])) == 1


@pytest.mark.parametrize(
    "source", ["from .b import f\nf._cache", "from companion import __version__", "_f = 1\nself._f = _f"]
)
def test_what_is_private_to_an_object_or_a_package_is_no_matter_of_modules(source):
    assert rooms.private_problems(source, A, [A, B]) == []


@pytest.mark.parametrize("module", FILES)
def test_a_name_is_defined_once(module):
    assert rooms.double_problems(FILES[module], module) == []


@pytest.mark.parametrize(
    "source, name",
    [
        ("class Pool:\n    x = 1\n\nclass Pool:\n    x = 1", "Pool"),  # what a merge once left
        ("def f(): ...\ndef f(): ...", "f"),
        ("def f(): ...\nf = 3", "f"),
        ("LIMIT = 3\nLIMIT: int = 4", "LIMIT"),
        ("class C:\n    def f(self): ...\n    async def f(self): ...", "f"),
        (
            "def g():\n    class C:\n        def f(self): ...\n        @property\n        def f(self): ...",
            "f",
        ),
    ],
)
def test_a_name_defined_twice_is_found(source, name):
    assert [name in p.split() for p in rooms.double_problems(source, A)] == [True]
    assert len(rooms.violations({A: source})) == 1


@pytest.mark.parametrize(
    "source",
    [
        "@overload\ndef f(x: int): ...\n@typing.overload\ndef f(x: str): ...\ndef f(x): ...",
        "class C:\n    @property\n    def x(self): ...\n    @x.setter\n    def x(self, to): ...",
        "class C:\n    def f(self): ...\nclass D:\n    def f(self): ...\ndef f(): ...",
        "if fast:\n    def f(): ...\nelse:\n    def f(): ...",  # one or the other
        "NAMES = {}\nNAMES['a'] = 1\nNAMES |= {'b': 2}",
    ],
)
def test_what_adds_to_a_definition_is_none(source):
    assert rooms.double_problems(source, A) == []


@pytest.mark.parametrize(
    "statement",
    [
        "import companion",
        "import companion.cost, companion.cost as c; c.models",
        "import companion.engine, companion.serving.scheduler; companion.engine.Scheduler",
    ],
)
def test_import_is_light(statement):
    heavy = {"torch", "numpy", "triton", "matplotlib", "transformers", "jaxtyping"}
    code = f"{statement}; import sys; print(sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_heavy_import_would_be_seen():
    code = "import numpy, sys; print('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "True\n"


@pytest.mark.parametrize("module", FILES)
def test_a_file_holds_one_idea(module):
    assert len(FILES[module].splitlines()) <= LINES == 300


def test_a_file_too_long_and_a_file_too_many_are_found():
    short, long = "pass\n" * LINES, "pass\n" * (LINES + 1)
    assert rooms.violations({A: short, B: short}, most_files=2) == []
    assert len(rooms.violations({A: long, B: short})) == 1
    assert len(rooms.violations({A: short, B: short}, most_files=1)) == 1


def test_the_rooms_are_printed_and_their_state_is_the_exit_status(capsys):
    clean = not rooms.violations(FILES)
    assert rooms.main([]) == (0 if clean else 1)
    said = capsys.readouterr().out
    assert all(f"\n{room}" in said for room in rooms.arrows_of_rooms(FILES))
    assert rooms.main(["--files", "1"]) == 1
    assert f"{len(FILES)} files, at most 1 are allowed" in capsys.readouterr().out


def test_types_and_data_are_shipped():
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert (PACKAGE / "py.typed").exists() and "py.typed" in data["companion"]
    shipped = {p for pattern in data["companion"] for p in PACKAGE.glob(pattern)}
    files = (p for p in PACKAGE.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    others = {p for p in files if p.suffix != ".py"}
    assert others <= shipped, f"not in package-data: {sorted(others - shipped)}"


def test_torch_has_no_upper_bound():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    torch = [r for rs in project["optional-dependencies"].values() for r in rs if r.startswith("torch")]
    assert torch and all(not set("<=!~").intersection(r.replace(">=", "")) for r in torch)
    assert project["dependencies"] == []  # sizing needs nothing


def test_every_pin_of_the_constraints_is_exact():
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    assert all("==" in line for line in lines if line)

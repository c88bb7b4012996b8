"""The shape of the package: who may import whom, what an import costs, what is shipped."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "companion"

# A module imports only from floors below its own. A new module gets a line here.
FLOORS = {
    "checks": 0,
    "formats": 0,
    "stats": 0,
    "cost": 1,
    "paging": 1,
    "machine": 1,
    "attention": 1,
    "rope": 1,
    "quantize": 1,
    "figures": 1,
    "serving": 2,
    "kernels": 3,
    "attend": 4,
    "caches": 5,
    "moe": 5,
    "model": 6,
    "generate": 7,
    "engine": 8,
    "parallel": 8,
    "study": 9,
    "lab": 9,
    "live": 9,
    "doctor": 9,
    "cli": 10,
}
# They also run in a reader's browser.
STANDARD_LIBRARY_ONLY = {"checks", "formats", "stats", "cost", "paging", "serving", "live"}
FILES = sorted(PACKAGE.rglob("*.py"))


def imports(source: str, module: str) -> list[tuple[str, str | None]]:
    """(room, other top-level package) of every import: exactly one of the two is given, wherever it stands.

    module: dotted name of the file, `companion.model.decoder`, or `companion.model.__init__`.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(module.split(".")[: -node.level]) if node.level else ""
            base = ".".join(p for p in (base, node.module) if p)
            names = [f"{base}.{a.name}" for a in node.names] if base == "companion" else [base]
        for name in names:
            top, *rest = name.split(".")
            if top == "companion" and rest:
                found.append((rest[0], None))
            elif top != "companion":
                found.append(("", top))
    return found


def violations(source: str, module: str) -> list[str]:
    room = module.split(".")[1]
    if room not in FLOORS:
        return [f"{module}: {room} has no floor in tests/test_floors.py"]
    problems = []
    for other, outside in imports(source, module):
        light = room in STANDARD_LIBRARY_ONLY
        if outside and light and outside not in sys.stdlib_module_names:
            problems.append(f"{module} imports {outside}, which is not in the standard library")
        if other and other != room and other.startswith("_") is False and other in FLOORS:
            if FLOORS[other] >= FLOORS[room]:
                problems.append(f"{module} (floor {FLOORS[room]}) imports {other} (floor {FLOORS[other]})")
    return problems


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_only_from_floors_below(path):
    if path.parent == PACKAGE and path.name.startswith("__"):
        return  # the package itself: its imports are measured below
    assert violations(path.read_text(encoding="utf-8"), module_name(path)) == []


@pytest.mark.parametrize(
    "source, module",
    [
        ("from ..model import load", "companion.caches.base"),
        ("from companion import generate", "companion.model.load"),
        ("import companion.cli", "companion.generate.loop"),
        ("def f():\n    from ..generate import generate", "companion.model.load"),
        ("from ..rope import Rope", "companion.cost.memory"),  # same floor, another room
        ("import numpy", "companion.cost.memory"),
        ("import torch", "companion.paging.pool"),
        ("import torch", "companion.serving.scheduler"),
        ("x = 1", "companion.newroom.file"),
    ],
)
def test_a_forbidden_import_is_found(source, module):
    assert violations(source, module)


@pytest.mark.parametrize(
    "source, module",
    [
        ("from .spec import ModelSpec\nfrom ..cost import models", "companion.caches.base"),
        ("import json, math\nfrom dataclasses import dataclass", "companion.cost.memory"),
        ("from companion.generate import generate\nimport torch", "companion.cli"),
        ("from ..paging import BlockManager\nimport torch", "companion.engine.engine"),
    ],
)
def test_an_allowed_import_passes(source, module):
    assert violations(source, module) == []


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


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_a_file_holds_one_idea(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


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

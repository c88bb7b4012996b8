"""The rooms of the package: files, lines, who imports whom, and whether the rules hold.

    python -m tools.rooms                 the table, the arrows between rooms, and every violation
    python -m tools.rooms --files 150     also at most so many files

A room is a file or a folder directly in `companion/`. The rules, tested by tests/test_floors.py:

- a module imports only from rooms on floors below its own, and some rooms use the standard library alone;
- the files of a room import one another in one direction: an import within a function counts, one under
  `if TYPE_CHECKING:` does not;
- a name that begins with an underscore stays in its module;
- nothing imports benchmarks/, tools/ or tests/;
- a file defines a top-level name once, and a class each of its names;
- a file has at most LINES lines.

Exit status 1 where a rule is broken.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "companion"
LINES = 300

# A module imports only from floors below its own. A new room gets a line here.
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
NEVER = {"benchmarks", "tools", "tests"}


@dataclass(frozen=True)
class Import:
    """One imported thing: `target` is a module of the companion, or the name of another top-level package."""

    target: str
    name: str = ""  # what is taken from the module, where that is not a module itself
    bound: str = ""  # what this file calls the module, where a module is imported


def module_name(path: Path, root: Path = ROOT) -> str:
    """`companion.model.decoder` of a file; of a folder's `__init__.py`, `companion.model.__init__`."""
    return ".".join(path.relative_to(root).with_suffix("").parts)


def sources(root: Path = ROOT) -> dict[str, str]:
    """Module name -> source of every file of the package."""
    found = sorted((root / "companion").rglob("*.py"))
    return {module_name(p, root): p.read_text(encoding="utf-8") for p in found}


def room_of(module: str) -> str:
    return module.split(".")[1]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Every node that runs: what stands under `if TYPE_CHECKING:` is for type checkers alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in (
            getattr(child.test, "id", ""),
            getattr(child.test, "attr", ""),
        ):
            for other in child.orelse:
                yield other
                yield from _walk(other)
            continue
        yield child
        yield from _walk(child)


def imports(source: str, module: str, modules: Iterable[str] = ()) -> list[Import]:
    """What a file imports, wherever it stands in the file.

    modules: the package's module names, by which `from .folder import x` is told to mean a module or a name.
    """
    known = {m.removesuffix(".__init__") for m in modules}
    found = []
    for node in _walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for a in node.names:
                ours = a.name.split(".")[0] == "companion"
                found.append(Import(a.name if ours else a.name.split(".")[0], bound=a.asname or a.name))
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(module.split(".")[: -node.level]) if node.level else ""
            base = ".".join(p for p in (base, node.module) if p)
            if base.split(".")[0] != "companion":
                found.append(Import(base.split(".")[0]))
                continue
            for a in node.names:
                whole = f"{base}.{a.name}"
                if whole in known or base == "companion":
                    found.append(Import(whole, bound=a.asname or a.name))
                else:
                    found.append(Import(base, name=a.name))
    return found


def floor_problems(source: str, module: str, modules: Iterable[str] = ()) -> list[str]:
    """Imports from a room that is not on a floor below, and of packages that a room does not use."""
    room = room_of(module)
    if room not in FLOORS:
        return [f"{module}: {room} has no floor in tools/rooms.py"]
    problems = []
    for found in imports(source, module, modules):
        top, *rest = found.target.split(".")
        if top in NEVER:
            problems.append(f"{module} imports {top}/, which is not shipped")
        elif top != "companion":
            if room in STANDARD_LIBRARY_ONLY and top not in sys.stdlib_module_names:
                problems.append(f"{module} imports {top}, which is not in the standard library")
        elif rest and rest[0] != room and rest[0] in FLOORS and FLOORS[rest[0]] >= FLOORS[room]:
            problems.append(f"{module} (floor {FLOORS[room]}) imports {rest[0]} (floor {FLOORS[rest[0]]})")
    return problems


def private_problems(source: str, module: str, modules: Iterable[str] = ()) -> list[str]:
    """Names with an underscore that are taken from another module: by import, or as `module._name`."""
    ours = [i for i in imports(source, module, modules) if i.target.split(".")[0] == "companion"]
    here = module.removesuffix(".__init__")
    problems = [
        f"{module} takes {i.name} from {i.target}" for i in ours if is_private(i.name) and i.target != here
    ]
    bound = {i.bound: i.target for i in ours if i.bound}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if (of := ast.unparse(node.value)) in bound:
                problems.append(f"{module} takes {node.attr} from {bound[of]}")
    return problems


def _defined(body: Iterable[ast.stmt]) -> Iterator[str]:
    """The names that these statements define. An overload and a property's setter add to an earlier one."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            by = {ast.unparse(d).rsplit(".", 1)[-1] for d in node.decorator_list}
            if not by & {"overload", "setter", "getter", "deleter"}:
                yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = (n for t in targets for n in ast.walk(t) if isinstance(n, ast.Name))
            yield from (n.id for n in names if isinstance(n.ctx, ast.Store))


def double_problems(source: str, module: str) -> list[str]:
    """Names that a file or a class defines twice, so that the earlier definition is lost without a word."""
    tree = ast.parse(source)
    bodies = {module: tree.body}
    bodies |= {f"{module}.{c.name}": c.body for c in ast.walk(tree) if isinstance(c, ast.ClassDef)}
    counts = {where: Counter(_defined(body)) for where, body in bodies.items()}
    return [
        f"{where} defines {name} {n} times" for where, c in counts.items() for name, n in c.items() if n > 1
    ]


def arrows_of_files(files: Mapping[str, str]) -> dict[str, set[str]]:
    """Module -> the modules of the same room that it imports; a folder is its `__init__`."""
    short = {m.removesuffix(".__init__"): m for m in files}
    return {
        module: {
            short[i.target]
            for i in imports(source, module, files)
            if i.target in short and short[i.target] != module and room_of(short[i.target]) == room_of(module)
        }
        for module, source in files.items()
        if module.count(".") > 1
    }


def circles(arrows: Mapping[str, set[str]]) -> list[list[str]]:
    """The groups of files of which each reaches each other, sorted; empty where there is an order."""

    def reached(start: str) -> set[str]:
        seen, todo = set(), [start]
        while todo:
            for other in arrows.get(todo.pop(), ()):
                if other not in seen:
                    seen.add(other)
                    todo.append(other)
        return seen

    reach = {module: reached(module) for module in arrows}
    groups = {tuple(sorted(o for o in reach[m] if m in reach.get(o, ()))) for m in arrows if m in reach[m]}
    return [list(group) for group in sorted(groups)]


def arrows_of_rooms(files: Mapping[str, str]) -> dict[str, set[str]]:
    """Room -> the rooms that its files import."""
    found: dict[str, set[str]] = {}
    for module, source in files.items():
        if module.count(".") == 1 and room_of(module).startswith("__"):
            continue
        others = {i.target.split(".")[1] for i in imports(source, module, files) if "." in i.target}
        found.setdefault(room_of(module), set()).update(others - {room_of(module)})
    return found


def is_the_package(module: str) -> bool:
    """`companion/__init__.py` and `companion/__main__.py` stand on no floor."""
    return module.count(".") == 1 and room_of(module).startswith("__")


def violations(files: Mapping[str, str], most_files: int | None = None) -> list[str]:
    """Every rule that the files break, in words."""
    problems = []
    for module, source in files.items():
        if not is_the_package(module):
            problems += floor_problems(source, module, files)
        problems += private_problems(source, module, files) + double_problems(source, module)
        if (lines := len(source.splitlines())) > LINES:
            problems.append(f"{module} has {lines} lines, at most {LINES} are allowed")
    problems += [f"a circle: {', '.join(group)}" for group in circles(arrows_of_files(files))]
    if most_files is not None and len(files) > most_files:
        problems.append(f"{len(files)} files, at most {most_files} are allowed")
    return problems


def table(files: Mapping[str, str]) -> list[str]:
    """One line a room: floor, files, lines, its longest file, what it imports."""
    arrows = arrows_of_rooms(files)
    rows = [f"{'room':<10} {'floor':>5} {'files':>5} {'lines':>6} {'longest':>7}  imports"]
    for room in sorted(arrows, key=lambda r: (FLOORS.get(r, -1), r)):
        lines = [len(s.splitlines()) for m, s in files.items() if room_of(m) == room]
        rows.append(
            f"{room:<10} {FLOORS.get(room, '?'):>5} {len(lines):>5} {sum(lines):>6} {max(lines):>7}  "
            + ", ".join(sorted(arrows[room]))
        )
    lines = [len(s.splitlines()) for s in files.values()]
    rows.append(f"{'all':<10} {'':>5} {len(files):>5} {sum(lines):>6} {max(lines):>7}")
    rows.append(f"{sum(map(len, arrows.values()))} arrows between rooms")
    return rows


def main(argv: list[str] | None = None) -> int:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("tools.rooms", description=__doc__, formatter_class=as_written)
    parser.add_argument("--files", type=int, help="at most so many files in the package")
    args = parser.parse_args(argv)
    files = sources()
    print(*table(files), sep="\n")
    problems = violations(files, args.files)
    print(
        *problems
        or ["no violation: no circle, no private name across modules, no name twice, no file too long"],
        sep="\n",
    )
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())

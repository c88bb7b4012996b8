"""The reference page: signatures and docstrings read from the source, so that a build needs no torch.

A page names a module in a comment, `<!-- api: companion.attention -->`; in its place come the module's
public functions and classes as Markdown, behind a line of their names. Under each stands where its source
is, and which chapters call it; if none does, those that its section names. Every heading has an anchor
`room-name`, for some names are in two rooms. How a docstring is read: `tools/docstrings.py`.
"""

from __future__ import annotations

import ast
import re
from copy import deepcopy
from functools import cache
from pathlib import Path

from tools.docstrings import markdown

ROOT = Path(__file__).resolve().parent.parent
MARKER = re.compile(r"^<!-- api: ([\w.]+) -->$", re.M)
OF_TORCH = {"extra_repr"}  # hooks of nn.Module that nobody calls
CHAPTER = re.compile(r"\.\./notebooks/(\d\d_\w+)\.ipynb")


def expand(text: str, source_url: str, root: Path = ROOT) -> str:
    """The page with every marker replaced by its module's reference."""
    used = uses(root / "notebooks") if MARKER.search(text) else {}

    def reference(found: re.Match) -> str:
        section = text[text.rfind("\n## ", 0, found.start()) + 1 : found.start()]
        return module(found.group(1), source_url, root, used, CHAPTER.findall(section))

    return MARKER.sub(reference, text)


def module(name: str, source_url: str, root: Path = ROOT, used=None, builders: list[str] = ()) -> str:
    """Markdown for one module or package; an unknown module or name is an error.

    used: chapters by the full name that they call, as `uses` returns. builders: chapters for all others.
    """
    base = root / name.replace(".", "/")
    path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    tree = _parsed(path)
    entries = list(public(path, tree))
    anchors = anchor_names(name, [node for _, node in entries])
    files = sorted(base.rglob("*.py")) if base.is_dir() else [path]
    room = {n.name: n for file in files for n in _parsed(file).body if isinstance(n, ast.ClassDef)}
    constants = {file: literals(_parsed(file)) for file in files}
    shared = {k: v for file in files for k, v in constants[file].items()}
    shared |= {new: shared[old] for file in files for old, new in renamed(_parsed(file)) if old in shared}
    parts = [markdown(ast.get_docstring(tree) or "")]
    parts += [" · ".join(f"[`{node.name}`](#{a})" for a, (_, node) in zip(anchors, entries))]
    for anchor, (where, node) in zip(anchors, entries):
        node = Values(shared | constants.get(where, {})).visit(deepcopy(node))
        url = f"{source_url}/{where.relative_to(root).as_posix()}#L{node.lineno}-L{node.end_lineno}"
        foot = [f"[source]({url})", *chapters((used or {}).get(f"{name}.{node.name}", []), builders)]
        text = klass(node, room) if isinstance(node, ast.ClassDef) else function(node)
        parts.append(f"({anchor})=\n{text}\n\n{' · '.join(foot)}")
    return "\n\n".join(p for p in parts if p)


def literals(tree: ast.Module) -> dict[str, ast.expr]:
    """A file's constants that are written as a number, a string or a tuple of such."""
    return {
        n.targets[0].id: n.value
        for n in tree.body
        if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name) and _is_literal(n.value)
    }


def renamed(tree: ast.Module) -> list[tuple[str, str]]:
    """(name, name here) of what a file imports under another name."""
    found = [a for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names]
    return [(a.name, a.asname) for a in found if a.asname]


def _is_literal(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) or (
        isinstance(value, ast.Tuple) and all(isinstance(v, ast.Constant) for v in value.elts)
    )


class Values(ast.NodeTransformer):
    """Defaults that are constants of a module, by their values: a reader does not see the module."""

    def __init__(self, constants: dict[str, ast.expr]):
        self.constants = constants

    def _value(self, node: ast.expr | None) -> ast.expr | None:
        return self.constants.get(node.id, node) if isinstance(node, ast.Name) else node

    def visit_arguments(self, node: ast.arguments) -> ast.arguments:
        node.defaults = [self._value(d) for d in node.defaults]
        node.kw_defaults = [self._value(d) for d in node.kw_defaults]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AnnAssign:
        node.value = self._value(node.value)
        return node


def anchor_names(module_name: str, nodes: list) -> list[str]:
    """`cost-kv_bytes`; anchors know no capitals, so a class beside a function of its name is `-class`."""
    room = module_name.removeprefix("companion.").replace(".", "-")
    functions = {n.name.lower() for n in nodes if isinstance(n, ast.FunctionDef)}
    return [
        f"{room}-{n.name.lower()}"
        + ("-class" if isinstance(n, ast.ClassDef) and n.name.lower() in functions else "")
        for n in nodes
    ]


def chapters(callers: list[str], builders: list[str]) -> list[str]:
    """Links to the chapters that call a thing, or else to those that build its room, in order."""
    links = [f"[{int(c[:2])}](../notebooks/{c}.ipynb)" for c in sorted(set(callers or builders))]
    if not links:
        return []
    return [f"{'used in' if callers else 'see'} chapter{'s' * (len(links) > 1)} {', '.join(links)}"]


def uses(folder: Path) -> dict[str, list[str]]:
    """Chapters, in order, by the full name of what of the companion their code calls or imports."""
    found: dict[str, list[str]] = {}
    for path in sorted(p for p in folder.glob("[0-9][0-9]_*.md") if p.with_suffix(".ipynb").exists()):
        cells = re.findall(
            r"^```\{code-cell\}[^\n]*\n(.*?)^```", path.read_text(encoding="utf-8"), re.M | re.S
        )
        for name in sorted(set().union(*map(_names, cells))):
            found.setdefault(name, []).append(path.stem)
    return found


def _names(cell: str) -> set[str]:
    """`companion.cost.size` for what a cell imports, or calls through `cost.` or its full name."""
    code = re.sub(r"\A---\n.*?^---\n|\A(?::\w[^\n]*\n)+", "", cell, flags=re.S | re.M)  # without options
    try:
        tree = ast.parse(re.sub(r"^\s*[%!].*$", "", code, flags=re.M))
    except SyntaxError:  # the set-up cell, without its magic
        return set()
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("companion"):
            names |= {f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Attribute):
            full = ast.unparse(node)
            names |= {full if full.startswith("companion.") else f"companion.{full}"}
    return names


def public(path: Path, tree: ast.Module):
    """(file, node) of each public function and class, those that a package takes from its files included."""
    listed = next((ast.literal_eval(n.value) for n in tree.body if _assigns(n, "__all__")), None)
    lazy = (n for node in tree.body if isinstance(node, ast.If) for n in node.body)  # for type checkers
    for node in [*tree.body, *lazy]:
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
            inside = _inside(path.parent / node.module.replace(".", "/"))
            for name in (a.name for a in node.names):
                if name in inside and (listed is None or name in listed):
                    yield inside[name]
        elif _documented(node) and (not node.name.startswith("_") if listed is None else node.name in listed):
            yield path, node


def _inside(base: Path) -> dict[str, tuple[Path, ast.stmt]]:
    """(file, node) by name: of a file everything, of a folder what its package gives."""
    if (file := base / "__init__.py").exists():
        return {node.name: (where, node) for where, node in public(file, _parsed(file))}
    file = base.with_suffix(".py")
    return {node.name: (file, node) for node in _parsed(file).body if _documented(node)}


def _assigns(node: ast.stmt, name: str) -> bool:
    return isinstance(node, ast.Assign) and any(
        isinstance(t, ast.Name) and t.id == name for t in node.targets
    )


def _documented(node: ast.stmt) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.ClassDef))


def function(node: ast.FunctionDef) -> str:
    return f"### {node.name}\n\n```python\n{signature(node)}\n```\n\n{docs(node)}"


def klass(node: ast.ClassDef, room: dict[str, ast.ClassDef]) -> str:
    """A class: its fields if it is a dataclass, how it is made, and its public methods.

    Methods without a text of their own stand in one line, with the class of the room that explains them.
    """
    lines, methods, bare = [f"class {node.name}" + _bases(node)], [], {}
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and item.target.id[0] != "_":
            lines.append(f"    {field(item)}")
        elif isinstance(item, ast.FunctionDef) and item.name == "__init__":
            lines.append("    " + signature(item).replace("\n", "\n    "))
        elif isinstance(item, ast.FunctionDef) and item.name[0] != "_" and item.name not in OF_TORCH:
            if ast.get_docstring(item):
                methods.append(f"**`{call(item)}`**\n\n{docs(item)}")
            else:
                base = explained(node, item.name, room)
                bare.setdefault(base, []).append(f"`{item.name if base else call(item)}`")
    body = f"### {node.name}\n\n```python\n" + "\n".join(lines) + f"\n```\n\n{docs(node)}"
    tail = [f"{f'As in `{base}`' if base else 'Also'}: {', '.join(names)}." for base, names in bare.items()]
    return "\n\n".join([body, *methods, *tail])


def field(item: ast.AnnAssign) -> str:
    """A field with its default; of one that says what it means, `ask(default, "text", ...)`, that too."""
    call = item.value
    if not (isinstance(call, ast.Call) and len(call.args) == 2 and isinstance(call.args[1], ast.Constant)):
        return ast.unparse(item)
    target, kind, default = map(ast.unparse, (item.target, item.annotation, call.args[0]))
    return f"{target}: {kind} = {default}  # {call.args[1].value}"


def explained(node: ast.ClassDef, method: str, room: dict[str, ast.ClassDef]) -> str:
    """The nearest class above `node` that says what its `method` does; "" if none does."""
    for base in (room[b.id] for b in node.bases if isinstance(b, ast.Name) and b.id in room):
        own = [n for n in base.body if isinstance(n, ast.FunctionDef) and n.name == method]
        if any(map(ast.get_docstring, own)):
            return base.name
        if above := explained(base, method, room):
            return above
    return ""


def _bases(node: ast.ClassDef) -> str:
    return f"({', '.join(map(ast.unparse, node.bases))}):" if node.bases else ":"


def call(node: ast.FunctionDef) -> str:
    """A method's call without the types; a property has none."""
    kinds = [ast.unparse(d) for d in node.decorator_list]
    if any("property" in k for k in kinds):
        return node.name
    first = "staticmethod" not in kinds  # self, or the class
    return f"{node.name}({', '.join(arguments(node.args, types=False)[first:])})"


def signature(node: ast.FunctionDef) -> str:
    """`name(arguments) -> type`, one argument a line when it is long."""
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    pieces = arguments(node.args, types=True)
    short = f"{node.name}({', '.join(pieces)}){returns}"
    if len(short) <= 88:
        return short
    return f"{node.name}(\n" + "".join(f"    {p},\n" for p in pieces) + f"){returns}"


def arguments(args: ast.arguments, *, types: bool) -> list[str]:
    """`name: type=default` of each, with the `/` and `*` between them."""

    def one(a: ast.arg, default: ast.expr | None = None) -> str:
        kind = f": {ast.unparse(a.annotation)}" if types and a.annotation else ""
        return a.arg + kind + (f"={ast.unparse(default)}" if default else "")

    positional = args.posonlyargs + args.args
    found = list(map(one, positional, [None] * (len(positional) - len(args.defaults)) + args.defaults))
    if args.posonlyargs:
        found.insert(len(args.posonlyargs), "/")
    found += ["*" + one(args.vararg)] if args.vararg else ["*"] if args.kwonlyargs else []
    found += map(one, args.kwonlyargs, args.kw_defaults)
    return found + (["**" + one(args.kwarg)] if args.kwarg else [])


def docs(node) -> str:
    return markdown(ast.get_docstring(node) or "")


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))

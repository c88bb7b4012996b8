"""The reference page: signatures and docstrings read from the source, so that a build needs no torch.

A page names a module in a comment, `<!-- api: companion.attention -->`; in its place come the module's
public functions and classes as Markdown. Docstrings are plain text with `code` in backticks. Under each
stands where its source is, and which chapters call it; if none does, those that its section names.
"""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_NAMES = r"`?[a-z_][\w.]*`?(?:(?:, | / )`?[a-z_][\w.]*`?)*"
ITEM = re.compile(rf"({_NAMES}): (\S.*)")  # `width: inches`
WIDE = re.compile(rf"({_NAMES}) (\S.*)")  # in a block of columns, a name that fills its column
COLUMNS = re.compile(rf"({_NAMES}) {{2,}}(\S.*)")  # `width   inches`
MARKER = re.compile(r"^<!-- api: ([\w.]+) -->$", re.M)
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
    tree = ast.parse(path.read_text(encoding="utf-8"))
    parts = [prose(ast.get_docstring(tree) or "")]
    for where, node in public(path, tree):
        url = f"{source_url}/{where.relative_to(root).as_posix()}#L{node.lineno}-L{node.end_lineno}"
        foot = [f"[source]({url})", *chapters((used or {}).get(f"{name}.{node.name}", []), builders)]
        write = klass if isinstance(node, ast.ClassDef) else function
        parts.append(write(node, " · ".join(foot)))
    return "\n\n".join(p for p in parts if p)


def chapters(callers: list[str], builders: list[str]) -> list[str]:
    """Links to the chapters that call a thing, or else to those that build its room."""
    links = [f"[{int(c[:2])}](../notebooks/{c}.ipynb)" for c in callers or builders]
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
            file = path.parent / f"{node.module.replace('.', '/')}.py"
            inside = {n.name: n for n in ast.parse(file.read_text(encoding="utf-8")).body if _documented(n)}
            for name in (a.name for a in node.names):
                if name in inside and (listed is None or name in listed):
                    yield file, inside[name]
        elif _documented(node) and (not node.name.startswith("_") if listed is None else node.name in listed):
            yield path, node


def _assigns(node: ast.stmt, name: str) -> bool:
    return isinstance(node, ast.Assign) and any(
        isinstance(t, ast.Name) and t.id == name for t in node.targets
    )


def _documented(node: ast.stmt) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.ClassDef))


def function(node: ast.FunctionDef, foot: str) -> str:
    return f"### {node.name}\n\n```python\n{signature(node)}\n```\n\n{docs(node)}\n\n{foot}"


def klass(node: ast.ClassDef, foot: str) -> str:
    """A class: its fields if it is a dataclass, how it is made, and its public methods."""
    lines, methods = [f"class {node.name}" + _bases(node)], []
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and item.target.id[0] != "_":
            lines.append(f"    {ast.unparse(item)}")
        elif isinstance(item, ast.FunctionDef) and item.name == "__init__":
            lines.append("    " + signature(item).replace("\n", "\n    "))
        elif isinstance(item, ast.FunctionDef) and not item.name.startswith("_"):
            methods.append(method(item))
    body = f"### {node.name}\n\n```python\n" + "\n".join(lines) + f"\n```\n\n{docs(node)}"
    return "\n\n".join([body, *methods, foot])


def _bases(node: ast.ClassDef) -> str:
    return f"({', '.join(map(ast.unparse, node.bases))}):" if node.bases else ":"


def method(node: ast.FunctionDef) -> str:
    """One method: its call without the types, then its docstring; a property has no call."""
    kinds = [ast.unparse(d) for d in node.decorator_list]
    call = node.name
    if not any("property" in k for k in kinds):
        call += f"({', '.join(_bare(node.args, skip_first='staticmethod' not in kinds))})"
    return f"**`{call}`**\n\n{docs(node)}"


def _bare(args: ast.arguments, *, skip_first: bool) -> list[str]:
    positional = [a.arg for a in args.posonlyargs + args.args]
    values = [f"={ast.unparse(d)}" for d in args.defaults]
    named = [a + d for a, d in zip(positional, [""] * (len(positional) - len(values)) + values)][skip_first:]
    named += [f"*{args.vararg.arg}"] if args.vararg else ["*"] if args.kwonlyargs else []
    named += [a.arg + (f"={ast.unparse(d)}" if d else "") for a, d in zip(args.kwonlyargs, args.kw_defaults)]
    return named + ([f"**{args.kwarg.arg}"] if args.kwarg else [])


def signature(node: ast.FunctionDef) -> str:
    """`name(arguments) -> type`, one argument a line when it is long."""
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    short = f"{node.name}({ast.unparse(node.args)}){returns}"
    if len(short) <= 88:
        return short
    # one argument a line: cut at the commas that are outside of brackets and quotes
    pieces, depth, quote, start, text = [], 0, "", 0, ast.unparse(node.args)
    for i, c in enumerate(text):
        if quote:
            quote = "" if c == quote else quote
        elif c in "'\"":
            quote = c
        elif c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
        elif c == "," and depth == 0:
            pieces.append(text[start:i].strip())
            start = i + 1
    pieces.append(text[start:].strip())
    return f"{node.name}(\n" + "".join(f"    {p},\n" for p in pieces) + f"){returns}"


def docs(node) -> str:
    return prose(ast.get_docstring(node) or "")


def prose(text: str) -> str:
    """A docstring as Markdown, block by block; arguments become a list, indented blocks stay code."""
    blocks = re.split(r"\n\s*\n", text.strip("\n"))
    return "\n\n".join(_block(b.splitlines(), first=i == 0) for i, b in enumerate(blocks) if b.strip())


def _block(lines: list[str], *, first: bool) -> str:
    if all(line.startswith("    ") for line in lines) and not any(COLUMNS.match(x.strip()) for x in lines):
        return "```python\n" + "\n".join(line[4:] for line in lines) + "\n```"
    columns = [COLUMNS.match(line.strip()) for line in lines]
    if not first and columns[0]:  # `name   what it is`
        return _items(lines, [c or WIDE.match(line) for c, line in zip(columns, _dedent(lines))])
    if not first and ITEM.match(lines[0]):  # `name: what it is`
        return _items(lines, [ITEM.match(line) for line in lines])
    return "\n".join(_escape(line.strip()) for line in lines)


def _dedent(lines: list[str]) -> list[str]:
    return textwrap.dedent("\n".join(lines)).splitlines()


def _items(lines: list[str], starts: list[re.Match | None]) -> str:
    out = []
    for line, start in zip(lines, starts):
        if start:
            out.append(f"- `{start.group(1).replace('`', '')}`: {_escape(start.group(2))}")
        else:
            out.append("  " + _escape(line.strip()))
    return "\n".join(out)


def _escape(line: str) -> str:
    """What Markdown would read as markup is escaped, but for code in backticks."""
    pieces = re.split(r"(`+[^`]+`+)", line)
    return "".join(p if i % 2 else re.sub(r"([*_<$|\[\]])", r"\\\1", p) for i, p in enumerate(pieces))

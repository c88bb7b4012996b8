"""Make the executed notebooks from their Markdown sources, one way: notebooks/NN_name.md -> .ipynb.

    python -m tools.notebooks make [NAME ...]      convert, execute, check the outputs, write
    python -m tools.notebooks convert [NAME ...]   convert only: stored outputs stay (for a change of prose)
    python -m tools.notebooks carry [NAME ...]     convert where only names changed: all outputs stay
    python -m tools.notebooks check [NAME ...]     what `make test` asks of every chapter

NAME is a chapter such as 04_kv_cache; without one, all of them. A notebook is written only after every cell
ran, so a failure leaves the old file as it was. Cells run in notebooks/ with one thread (OMP_NUM_THREADS=1),
here and in the comparison: the stored numbers then come from the same set-up on every machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
import time
from pathlib import Path

import jupytext
import nbformat
from jupytext.combine import combine_inputs_with_outputs

from tools.address import repository

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
CELL_TIMEOUT = 120  # seconds
FORMAT = {"extension": ".md", "format_name": "myst"}

SETUP = f"""\
try:
    import companion.doctor
except ImportError as e:  # as on Colab: add the companion and what it lacks; torch, triton and numpy stay
    assert e.name == "companion", "another package is installed as `companion`: uninstall it, then restart"
    %pip install -q --no-deps "what-a-token-costs @ git+{repository()}"
    import companion.doctor

    companion.doctor.add_missing()
import companion.figures

companion.figures.use()
print(companion.doctor.placement())"""
SETUP_TAGS = ["setup", "measurement", "nbval-ignore-output"]  # what it prints depends on the machine

# What no stored output may hold: it would differ on the next machine.
UNSTABLE = {
    "an absolute path": re.compile(r"(?<![\w./:])/(?:home|root|work|tmp|usr|opt|var|mnt|Users|content)/\w"),
    "a Windows path": re.compile(r"\b[A-Z]:\\\w"),
    "an address in memory": re.compile(r"\b0x[0-9a-fA-F]{7,}\b"),
    "a font warning": re.compile(r"findfont|Glyph \d+ .*missing"),
}


class Problem(Exception):
    """Something that a chapter's author has to change; printed without a traceback."""


def names(wanted: list[str] | None = None) -> list[str]:
    """The chapters asked for (all without a name), by file name without suffix."""
    found = sorted(p.stem for p in NOTEBOOKS.glob("[0-9][0-9]_*.md"))
    wanted = [Path(w).stem for w in wanted or found]
    if unknown := sorted(set(wanted) - set(found)):
        raise Problem(f"no such chapter: {', '.join(unknown)}; there are: {', '.join(found) or 'none'}")
    return wanted


def tags(cell) -> list[str]:
    return list(cell.metadata.get("tags", []))


def source_hash(notebook) -> str:
    """sha256 of the code cells, source and tags: prose may change without a new execution."""
    cells = [[c.source, sorted(tags(c))] for c in notebook.cells if c.cell_type == "code"]
    return hashlib.sha256(json.dumps(cells, ensure_ascii=False).encode()).hexdigest()


def read_source(md: Path):
    """The Markdown source as a notebook."""
    return jupytext.read(md)


def convert(md: Path):
    """The notebook of a source; cell ids and outputs come from the .ipynb beside it, where there is one."""
    notebook = read_source(md)
    ipynb = md.with_suffix(".ipynb")
    if ipynb.exists():
        stored = nbformat.read(ipynb, as_version=4)
        notebook = combine_inputs_with_outputs(notebook, stored, fmt=FORMAT)
        known = {c.id for c in stored.cells}
    else:
        known = set()
    for cell in notebook.cells:
        if cell.get("id") not in known:
            cell.pop("id", None)  # jupytext gives a new cell a random one
    return normalise(notebook)


def carry(md: Path):
    """The notebook of a source whose cells print what they printed: all outputs stay, in the cells' order.

    And the hash of the code as it was stored before.

    For renamed modules and functions. Whether it is true is for the comparison (`make outputs`) to say.
    """
    notebook, stored = read_source(md), nbformat.read(md.with_suffix(".ipynb"), as_version=4)
    kinds = [[c.cell_type for c in n.cells] for n in (notebook, stored)]
    if kinds[0] != kinds[1]:
        raise Problem(f"{md.stem}: cells were added or removed; use make")
    for cell, old in zip(notebook.cells, stored.cells):
        cell.id = old.id
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = old.outputs, old.execution_count
    known, now = stored.metadata.get("companion", {}).get("source_sha256"), source_hash(notebook)
    notebook.metadata["companion"] = {"source_sha256": now}
    return normalise(notebook), known


def normalise(notebook):
    """Leave only what is the same on every machine."""
    notebook.metadata["language_info"] = {"name": "python"}
    notebook.metadata["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata["jupytext"] = {"formats": "ipynb,md:myst"}
    notebook.nbformat_minor = 5
    seen: set[str] = set()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        cell.metadata.pop("trusted", None)
        if "id" not in cell or cell.id in seen:  # an id from the content: two people get the same one
            cell.id = _new_id(cell.source, seen)
        seen.add(cell.id)
    return notebook


def _new_id(source: str, seen: set[str]) -> str:
    for n in range(10_000):
        new = hashlib.sha256(f"{n}{source}".encode()).hexdigest()[:8]
        if new not in seen:
            return new
    raise Problem("ten thousand equal cells")


def execute(notebook, name: str, *, cwd: Path = NOTEBOOKS, timeout: int = CELL_TIMEOUT):
    """Run every cell in a fresh kernel; raise a Problem on an error, a slow cell or an unstable output."""
    import matplotlib.font_manager  # noqa: F401  (a first import may write to stderr: let it happen here)
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError

    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *_pythonpath()])}
    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(cwd)}},
    )
    try:
        client.execute(env=env)
    except CellExecutionError as error:
        raise Problem(f"{name}: a cell failed\n{error}") from None
    except CellTimeoutError as error:
        raise Problem(f"{name}: a cell ran longer than {timeout} s\n{error}") from None
    merge_streams(notebook)
    if problems := unstable_outputs(notebook):
        raise Problem("\n".join(f"{name}: {p}" for p in problems))
    notebook.metadata["companion"] = {"source_sha256": source_hash(notebook)}
    return normalise(notebook)


def _pythonpath() -> list[str]:
    return [p for p in [os.environ.get("PYTHONPATH")] if p]


def merge_streams(notebook) -> None:
    """Neighbouring pieces of one stream become one: how print is cut into messages depends on the moment."""
    for cell in notebook.cells:
        merged = []
        for out in cell.get("outputs", []):
            last = merged[-1] if merged else None
            if last and out.output_type == last.output_type == "stream" and out.name == last.name:
                last["text"] += out["text"]
            else:
                merged.append(out)
        if cell.cell_type == "code":
            cell.outputs = merged


def output_texts(out) -> list[str]:
    """What a reader sees as text in one output."""
    if out.output_type == "stream":
        return [out.text]
    return [v for k, v in out.get("data", {}).items() if k.startswith("text/") and isinstance(v, str)]


def unstable_outputs(notebook) -> list[str]:
    """What in the stored outputs would differ, or read badly, on another machine."""
    problems = []
    for i, cell in enumerate(notebook.cells):
        measured = "nbval-ignore-output" in tags(cell)
        for out in cell.get("outputs", []):
            if out.output_type == "error" and "raises-exception" not in tags(cell):
                problems.append(f"cell {i}: stored an error: {out.ename}: {out.evalue}")
            if out.output_type == "stream" and out.name == "stderr" and not measured:
                problems.append(f"cell {i}: wrote to stderr: {out.text.strip()[:200]}")
            for text in output_texts(out):
                for what, pattern in UNSTABLE.items():
                    if found := pattern.search(text):
                        around = text[max(0, found.start() - 40) : found.end() + 40]
                        problems.append(f"cell {i}: {what} in an output: ...{around!r}...")
    return problems


def write(notebook, path: Path) -> None:
    """Write all of it or nothing."""
    nbformat.validate(notebook)
    part = path.with_suffix(".part")
    part.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
    part.replace(path)


def main(argv: list[str] | None = None) -> int:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("tools.notebooks", description=__doc__, formatter_class=as_written)
    parser.add_argument("command", choices=["make", "convert", "carry", "check"])
    parser.add_argument("names", nargs="*", metavar="NAME")
    args = parser.parse_args(argv)
    failed = 0
    try:
        chosen = names(args.names)
    except Problem as problem:
        print(problem, file=sys.stderr)
        return 1
    for name in chosen:
        md, start = NOTEBOOKS / f"{name}.md", time.monotonic()
        if args.command == "check":
            from tools.nbcheck import check

            problems = check(md)
            print("\n".join(f"{name}: {p}" for p in problems) or f"{name}: as it should be")
            failed += bool(problems)
            continue
        try:
            notebook, known = carry(md) if args.command == "carry" else (convert(md), None)
            if args.command == "make":
                notebook = execute(notebook, name)
            took = time.monotonic() - start
            write(notebook, md.with_suffix(".ipynb"))
            if args.command == "make":
                from tools.status import record

                record(NOTEBOOKS, name, took, notebook)
            if known:
                from tools.status import carried

                carried(NOTEBOOKS, name, known, notebook.metadata["companion"]["source_sha256"])
            print(f"{name}.ipynb written ({took:.0f} s)", flush=True)
        except Problem as problem:
            print(problem, file=sys.stderr)
            failed += 1
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

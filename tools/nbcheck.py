"""What every chapter satisfies: its two files agree, its outputs are of its code, its frame is complete."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import nbformat
from jupytext.compare import NotebookDifference, compare_notebooks

from tools.notebooks import (
    NOTEBOOKS,
    ROOT,
    SETUP,
    SETUP_TAGS,
    output_texts,
    read_source,
    source_hash,
    tags,
    unstable_outputs,
)
from tools.reading import count_words

FRAME = [  # the `##` headings that every chapter has, in this order; its own come between the first two
    "Before you run it: a prediction",
    "What must hold, and what breaks if it doesn't",
    "Measure",  # a chapter may say what: "Measure: seconds per stage"
    "Takeaway",
    "Exercises",
    "What to read next",
]
WORDS = range(1500, 3001)
EXERCISES = range(3, 7)
MAX_LINES = 25
MAX_COLUMNS = 110  # the line length of the package, and what fits at 1280 px
MAX_PRINTED = 110  # a listing of the companion may be as wide as the companion is
EXERCISE = re.compile(r"^### Exercise (\d+) \((easy|medium|hard), .*minutes?\)", re.M)
# MyST that GitHub, Colab and JupyterLab would show raw
RAW = {
    "a directive": re.compile(r"^(?:```+|:::+)\{", re.M),
    "a role": re.compile(r"\{[a-z][\w:-]*\}`"),
    "a label": re.compile(r"^\([\w-]+\)=\s*$", re.M),
    "a cell break": re.compile(r"^\+\+\+", re.M),
}
MAX_DRAWN = 6  # lines of drawing; a cell with more is folded on its page
DRAWS = {"plt", "figures", "figure", "label_line"}  # where drawing begins; what comes of these draws as well
SHOWS = re.compile(r"^print\(|^plt\.show\(", re.M)
IMAGES = ("image/svg+xml", "image/png")


def check(md: Path) -> list[str]:
    """Every problem of one chapter, as sentences; an empty list when there is none."""
    ipynb = md.with_suffix(".ipynb")
    if not ipynb.exists():
        return [f"{ipynb.name} is missing: run `make notebooks NAME={md.stem}`"]
    source, notebook = read_source(md), nbformat.read(ipynb, as_version=4)
    return [
        *pair(source, notebook),
        *outputs(source, notebook),
        *unstable_outputs(notebook),
        *cells(notebook),
        *figures(notebook),
        *frame(notebook),
        *exercises(notebook),
        *links(notebook),
    ]


def pair(source, notebook) -> list[str]:
    """The Markdown and the notebook agree by content; time stamps say nothing after a checkout."""
    try:
        compare_notebooks(notebook, source, "md:myst", compare_ids=False, compare_outputs=False)
    except NotebookDifference as difference:
        return [f"the .ipynb and the .md differ: {str(difference).strip()[:400]}"]
    return []


def outputs(source, notebook) -> list[str]:
    """Outputs are stored, of this code, and come from one run from top to bottom."""
    problems = []
    recorded = notebook.metadata.get("companion", {}).get("source_sha256")
    if recorded != source_hash(source):
        problems.append("the stored outputs are older than the code: run `make notebooks`")
    code = [c for c in notebook.cells if c.cell_type == "code"]
    counts = [c.execution_count for c in code]
    if counts != list(range(1, len(code) + 1)):
        problems.append(f"not every cell was executed, or not in order: execution counts {counts}")
    for i, cell in enumerate(notebook.cells):
        if (
            cell.cell_type == "code"
            and not cell.outputs
            and re.search(r"^print\(|^plt\.show\(", cell.source, re.M)
        ):
            problems.append(f"cell {i}: prints or draws, but no output is stored")
    return problems


def cells(notebook) -> list[str]:
    """Size and tags of cells, and plain Markdown only."""
    problems = []
    code = [c for c in notebook.cells if c.cell_type == "code"]
    if not code or code[0].source.strip() != SETUP or tags(code[0]) != SETUP_TAGS:
        problems.append(
            f"the first code cell is not the set-up cell of tools/notebooks.py, tagged {SETUP_TAGS}"
        )
    for i, cell in enumerate(notebook.cells):
        if cell.cell_type == "code":
            problems += [f"cell {i}: {p}" for p in code_cell(cell)]
        elif cell.cell_type == "markdown":
            text = without_code(cell.source)
            problems += [f"cell {i}: {what} is left visible" for what, p in RAW.items() if p.search(text)]
    return problems


def code_cell(cell) -> list[str]:
    """One code cell: short enough to type, narrow enough to read, and tagged truly."""
    problems, source = [], cell.source.strip()
    if (lines := len(source.splitlines())) > MAX_LINES:
        problems.append(f"{lines} lines of code, at most {MAX_LINES}")
    if source != SETUP and (wide := widest(source)) > MAX_COLUMNS:
        problems.append(f"a line of {wide} characters, at most {MAX_COLUMNS}")
    if (wide := max((widest(t) for o in cell.outputs for t in output_texts(o)), default=0)) > MAX_PRINTED:
        problems.append(f"an output line of {wide} characters, at most {MAX_PRINTED}")
    if ("measurement" in tags(cell)) != ("nbval-ignore-output" in tags(cell)):
        problems.append(f"`measurement` and `nbval-ignore-output` go together, got {tags(cell)}")
    if not {"hide-input", "hide-cell"} & set(tags(cell)) and (drawn := len(drawing(source))) > MAX_DRAWN:
        problems.append(f"{drawn} lines draw: more than {MAX_DRAWN} are folded, by the tag hide-input")
    if "NBVAL" in source or "nbval-skip" in tags(cell):
        problems.append("a cell may not leave itself out of the run")
    return problems


def drawing(source: str) -> set[int]:
    """The lines that draw: calls of what began at one of DRAWS, and loops around nothing but such calls."""
    names, lines = set(DRAWS), set()

    def drawn(node: ast.AST) -> bool:
        return any(getattr(n, "id", getattr(n, "attr", None)) in names for n in ast.walk(node))

    def visit(body: list[ast.stmt]) -> None:
        for statement in body:
            blocks = [b for k in ("body", "orelse", "finalbody") if (b := getattr(statement, k, None))]
            targets = []
            if not blocks and drawn(statement):
                targets = getattr(statement, "targets", [])
                lines.update(range(statement.lineno, statement.end_lineno + 1))
            elif isinstance(statement, ast.For) and drawn(statement.iter):  # for ax, name in zip(axes, names)
                targets = getattr(statement.target, "elts", [statement.target])[:1]
            names.update(n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name))
            before = len(lines)
            for block in blocks:
                visit(block)
            if len(lines) > before:
                lines.update(range(statement.lineno, blocks[0][0].lineno))

    visit(ast.parse(re.sub(r"^(\s*)%.*$", r"\1pass", source, flags=re.M)).body)
    return lines


def widest(text: str) -> int:
    return max((len(line) for line in text.splitlines()), default=0)


def figures(notebook) -> list[str]:
    """Every picture says in words what it shows: alt text in its cell, and a caption below."""
    problems = []
    for i, cell in enumerate(notebook.cells):
        if not any(kind in out.get("data", {}) for out in cell.get("outputs", []) for kind in IMAGES):
            continue
        alt = cell.metadata.get("mystnb", {}).get("image", {}).get("alt", "")
        if len(alt.split()) < 5:
            problems.append(f"cell {i}: a figure without alt text (mystnb.image.alt), got {alt!r}")
        following = (c.source for c in notebook.cells[i + 1 :] if not c.source.startswith("<div data-live="))
        after = next(following, "")  # behind the place of an interactive part
        if not after.startswith("**Figure.**"):
            problems.append(f"cell {i}: a figure not followed by a paragraph that starts with **Figure.**")
        if all(t.startswith("<Figure") for j in (i - 1, i, i + 1) for t in _texts(notebook, j)):
            problems.append(f"cell {i}: the numbers that the figure draws are not printed beside it")
    return problems


def _texts(notebook, i: int) -> list[str]:
    inside = 0 <= i < len(notebook.cells)
    return [t for out in notebook.cells[i].get("outputs", []) for t in output_texts(out)] if inside else []


def frame(notebook) -> list[str]:
    """Title, question, goals, the headings in order, the takeaway, the length."""
    problems = []
    first = notebook.cells[0]
    if first.cell_type != "markdown" or not first.source.startswith("# "):
        problems.append("the first cell does not start with the title")
    text = "\n\n".join(c.source for c in notebook.cells if c.cell_type == "markdown")
    before = text.split("\n## ")[0]
    for part in ("**Question.**", "**You will be able to**"):
        if part not in before:
            problems.append(f"{part} is not said before the first heading")
    if len(re.findall(r"^# ", without_code(text), re.M)) != 1:
        problems.append("a chapter has one title (`# `)")
    found = re.findall(r"^## (.+?)\s*$", without_code(text), re.M)
    places = [next((n for n, h in enumerate(found) if h.startswith(want)), None) for want in FRAME]
    for want, place in zip(FRAME, places):
        if place is None:
            problems.append(f"the heading `## {want}` is missing")
    if None not in places and places != sorted(places):
        problems.append(f"the headings of the frame are out of order: {found}")
    if places[0] not in (0, None):
        problems.append(f"`## {FRAME[0]}` is not the first heading")
    if "> **Takeaway.**" not in text:
        problems.append("no takeaway box: a quote that starts with `> **Takeaway.**`")
    if (words := count_words(text)) not in WORDS:
        problems.append(f"{words} words of prose, accepted: {WORDS.start} to {WORDS.stop - 1}")
    return problems


def exercises(notebook) -> list[str]:
    """Three to six, numbered, with difficulty and minutes; each with an executed, asserted solution."""
    problems, numbers, solved = [], [], {}
    for i, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            numbers += [int(m.group(1)) for m in EXERCISE.finditer(cell.source)]
            heads = re.findall(r"^### Exercise.*$", cell.source, re.M)
            if len(heads) != len(EXERCISE.findall(cell.source)):
                problems.append(f"cell {i}: {heads} should read like `### Exercise 1 (easy, five minutes)`")
            if len(heads) > 1:
                problems.append(
                    f"cell {i}: two exercises in one cell, so a solution cannot stand between them"
                )
        elif "solution" in tags(cell):
            if "hide-cell" not in tags(cell) or not cell.metadata.get("jupyter", {}).get("source_hidden"):
                problems.append(f"cell {i}: a solution is tagged hide-cell and has jupyter.source_hidden")
            if numbers and re.search(r"^\s*assert ", cell.source, re.M):
                solved[numbers[-1]] = True
    if numbers != list(range(1, len(numbers) + 1)) or len(numbers) not in EXERCISES:
        problems.append(f"exercises are numbered {numbers}, accepted: 1, 2, ... with three to six of them")
    problems += [f"exercise {n} has no executed solution with an assert" for n in numbers if n not in solved]
    return problems


def links(notebook) -> list[str]:
    """Links inside the project lead somewhere, and citations to an entry of the references."""
    problems = []
    entries = anchors(ROOT / "book" / "references.md")
    for i, cell in enumerate(notebook.cells):
        if cell.cell_type != "markdown":
            continue
        for target in re.findall(r"\]\(([^)\s]+)\)", without_code(cell.source)):
            path, _, anchor = target.partition("#")
            if re.match(r"https?:|mailto:", target) or not path:
                continue
            if not (NOTEBOOKS / path).exists():
                problems.append(f"cell {i}: the link {target} leads nowhere")
            elif path.endswith("references.md") and anchor and anchor not in entries:
                problems.append(f"cell {i}: the references have no entry {anchor}")
    return problems


def anchors(page: Path) -> set[str]:
    """The targets that a page offers to links."""
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    targets = re.findall(r'<a (?:id|name)="([\w-]+)"|^\(([\w-]+)\)=', text, re.M)
    return {a or b for a, b in targets}


def without_code(text: str) -> str:
    """Markdown without its code blocks and code spans; roles such as {ref}`x` and directives stay."""
    text = re.sub(r"^(```+|~~~+)(?!\{).*?^\1\s*$", "", text, flags=re.M | re.S)
    return re.sub(r"(?<![`}])`[^`\n]+`", "", text)

"""What is known of each notebook's run: written by `make notebooks`, shown on the status and the first page.

`notebooks/status.json` has an entry for each notebook that was made: the day, the device and the versions,
the seconds, and the hash of the code that ran. How many cells are compared is counted from the notebook
itself, by the rule of notebooks/conftest.py. A page asks for a table in a comment, `<!-- status -->` or
`<!-- path ... -->`; the second may give a chapter's question in a line of its own, `05_roofline: Which ...?`.
"""

from __future__ import annotations

import json
import platform
import re
import sys
from collections import Counter
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tools import reading  # noqa: E402  (as an extension of Sphinx this file is imported from its own folder)

NOTEBOOKS = ROOT / "notebooks"
FILE = "status.json"
PACKAGES = ("torch", "triton", "numpy")
PICTURES = {"image/svg+xml", "image/png"}
KINDS = ("compared", "measured", "silent")


# --- written by `make notebooks` ---------------------------------------------------------------------------


def record(folder: Path, name: str, seconds: float, notebook) -> None:
    """Store in folder/status.json that `name` was made just now, in so many seconds, on this machine."""
    entry = {
        "made": datetime.now(UTC).date().isoformat(),
        "seconds": round(seconds),
        "device": device(),
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
        "source_sha256": notebook.metadata["companion"]["source_sha256"],
    }
    entries = {**stored(folder), name: entry}  # read last: another process may have made another notebook
    _write(folder, entries)


def _write(folder: Path, entries: dict[str, dict]) -> None:
    part = folder / f"{FILE}.part"
    part.write_text(json.dumps(dict(sorted(entries.items())), indent=1) + "\n", encoding="utf-8")
    part.replace(folder / FILE)


def carried(folder: Path, name: str, before: str, now: str) -> None:
    """The outputs of a run are now those of renamed code: its entry, if it was of them, stays theirs."""
    entries = stored(folder)
    if entries.get(name, {}).get("source_sha256") == before != now:
        entries[name]["source_sha256"] = now
        _write(folder, entries)


def stored(folder: Path = NOTEBOOKS) -> dict[str, dict]:
    """All entries, by notebook; none where the file is missing."""
    path = folder / FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def device() -> str:
    """The GPU's name, else the processor's: what kind it is, nothing of whose."""
    if find_spec("torch"):
        import torch

        if torch.cuda.is_available():
            return torch.cuda.get_device_name()
    from companion.machine import processor

    return processor()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# --- counted from the notebooks ----------------------------------------------------------------------------


def kinds(notebook) -> Counter:
    """How many code cells the comparison has as "compared", "measured", or without text ("silent")."""
    return Counter(_kind(cell) for cell in notebook.cells if cell.cell_type == "code")


def _kind(cell) -> str:
    if "nbval-ignore-output" in cell.metadata.get("tags", []):
        return "measured"
    text = any(o.output_type == "stream" or set(o.get("data", {})) - PICTURES for o in cell.outputs)
    return "compared" if text else "silent"


def chapters(folder: Path = NOTEBOOKS) -> dict[str, nbformat.NotebookNode]:
    """Every chapter's stored notebook, in order."""
    return {p.stem: nbformat.read(p, as_version=4) for p in sorted(folder.glob("[0-9][0-9]_*.ipynb"))}


def known(entries: dict[str, dict], name: str, notebook) -> dict | None:
    """The entry of a notebook, if it is of the outputs that are stored there now."""
    entry, now = entries.get(name), notebook.metadata.get("companion", {}).get("source_sha256")
    return entry if entry and entry["source_sha256"] == now else None


# --- shown in the book -------------------------------------------------------------------------------------


def link(name: str, text: str) -> str:
    return f"[{text}](../notebooks/{name}.ipynb)"


def status_table(folder: Path = NOTEBOOKS) -> str:
    """A row per notebook: when, in which environment, how long, how many cells; then the environments."""
    entries, total, seconds, letters = stored(folder), Counter(), 0, {}
    rows = [
        "| chapter | made | on | seconds | compared | measured | without text |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for name, notebook in chapters(folder).items():
        count, e = kinds(notebook), known(entries, name, notebook)
        run = ["not recorded", "", ""]
        if e:
            letter = letters.setdefault(environment(e), chr(ord("A") + len(letters)))
            run = [e["made"], letter, str(e["seconds"])]
            seconds += e["seconds"]
        label = f"{int(name[:2])}. {reading.title(notebook)}"
        rows.append(_row([link(name, label), *run, *(str(count[k]) for k in KINDS)]))
        total += count
    rows.append(_row(["all", "", "", str(seconds), *(str(total[k]) for k in KINDS)]))
    said = [f"\n**{letter}**: {text}" for text, letter in letters.items()]
    return "\n".join([*rows, *said])


def environment(entry: dict) -> str:
    """`AMD EPYC; Python 3.11.7, torch 2.13.0`: the device and the versions of an entry."""
    labels = {"python": "Python", "torch": "torch", "triton": "Triton", "numpy": "numpy"}
    return f"{entry['device']}; " + ", ".join(f"{v} {entry[k]}" for k, v in labels.items() if entry[k])


def path_table(questions: str = "", folder: Path = NOTEBOOKS) -> str:
    """One row per chapter: its question, minutes to read and for exercises, seconds to run, what it needs.

    questions: lines `NAME: question`; a chapter without one gives the question at its top.
    """
    entries, notebooks = stored(folder), chapters(folder)
    asked = dict(line.split(": ", 1) for line in questions.strip().splitlines())
    if unknown := sorted(set(asked) - set(notebooks)):
        raise ValueError(f"questions: there is no chapter {', '.join(unknown)}")
    rows = ["| no. | chapter | reading | exercises | running | needs |", "|---:|---|---:|---:|---:|---|"]
    for name, notebook in notebooks.items():
        takes, e = reading.reading(notebook), known(entries, name, notebook)
        question = asked.get(name) or reading.question(notebook)
        rows.append(
            _row(
                [
                    str(int(name[:2])),
                    f"{link(name, reading.title(notebook))}<br>{question}",
                    f"{takes.minutes} min",
                    f"{takes.exercises} min",
                    f"{e['seconds']} s" if e else "not recorded",
                    "CPU; a GPU for its clock" if reading.times_on_a_gpu(notebook) else "CPU",
                ]
            )
        )
    return "\n".join(rows)


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


MARKER = re.compile(r"^<!-- (status|path)((?:\n.*?)??) ?-->$", re.M | re.S)


def expand(text: str, folder: Path = NOTEBOOKS) -> str:
    """The page with every marker replaced by its table."""
    tables = {"status": lambda _: status_table(folder), "path": lambda said: path_table(said, folder)}
    return MARKER.sub(lambda m: tables[m.group(1)](m.group(2)), text)


def write_tables(app, docname: str, source: list[str]) -> None:
    if not docname.startswith("notebooks/"):
        source[0] = expand(source[0])


def watch_notebooks(app, env, added, changed, removed) -> set[str]:
    """The pages with a table are read again in every build."""
    pages = {name: Path(env.doc2path(name)) for name in env.all_docs}
    return {name for name, p in pages.items() if p.suffix == ".md" and MARKER.search(p.read_text("utf-8"))}


def setup(app) -> dict:
    app.connect("source-read", write_tables)
    app.connect("env-get-outdated", watch_notebooks)
    return {"parallel_read_safe": True, "env_version": 1}

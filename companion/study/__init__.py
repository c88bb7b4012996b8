"""What saved bytes cost in quality: a frozen text, hidden facts, distances between distributions.

>>> from companion.study import text
>>> len(text().split())
25054
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from ..checks import choice, require
from ..machine import describe
from .divergence import Divergence, compare
from .facts import Haystack, haystack, recall, text

__all__ = ["Divergence", "Haystack", "compare", "haystack", "recall", "store", "stored", "text"]


FOLDER = Path(__file__).parent / "results"


def stored(name: str) -> dict[str, Any]:
    """The stored result of a benchmark. Raises ValueError, listing the names, for one that is not there."""
    known = sorted(p.stem for p in FOLDER.glob("*.json"))
    choice("name", name, known)
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def store(name: str, result: dict[str, Any]) -> Path:
    """Write a result for `stored`, with the command and the machine that made it.

    Used by the scripts in benchmarks/, from a checkout. "command" and "machine" are added where `result` does
    not bring its own. Numbers that are not finite are refused (ValueError): JSON has none. The file is
    replaced in one piece, so a run that is stopped leaves the last whole result.
    """
    require(name.isidentifier(), "name", "letters, digits and underscores", name)
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = f"-m {spec.name}" if spec is not None else Path(sys.argv[0]).name
    whole = {"command": " ".join(["python", program, *sys.argv[1:]]), **result}
    if "machine" not in whole:
        whole["machine"] = describe()
    text = json.dumps(whole, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.json"
    partial = path.with_suffix(".part")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
    return path

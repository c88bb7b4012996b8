"""The evaluation text: prose of this book's chapters, frozen.

Chapters 1 to 7, 9 and 10 as they stood in November 2026, without code, tables, figures and mark-up, one
paragraph a line; formulas are left in. Written after the model was trained, so the model has not read it.
The text stays as it is when the chapters change, or numbers measured on it could not be compared.
"""

import hashlib
from functools import cache
from pathlib import Path

LICENCE = "CC BY 4.0: text of the book What a Token Costs, frozen"
SHA256 = "c90d5ca910be694adbc56d01276c020eff969a29faca8b9f810f273c377376af"
PATH = Path(__file__).parent / "data" / "text.txt"


@cache
def text() -> str:
    """The frozen text. Raises ValueError if the file is not the one that the results were measured on."""
    raw = PATH.read_bytes()
    found = hashlib.sha256(raw).hexdigest()
    if found != SHA256:
        raise ValueError(f"{PATH.name} has sha256 {found}; results were measured on {SHA256}")
    return raw.decode("utf-8")

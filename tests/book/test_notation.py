"""The translation tables: our names are the companion's, transformers' are in what is installed here."""

import inspect
import re
from pathlib import Path

import pytest

from companion import attention, caches, kernels, paging
from tools.sitecheck import ROOT

PAGE = (ROOT / "book" / "notation.md").read_text(encoding="utf-8")
TABLES = PAGE.split("## The same thing under other names")[1]
ROWS = [
    [cell.strip() for cell in line.strip("| \n").split(" | ")]
    for line in TABLES.splitlines()
    if line.startswith("| ") and not line.startswith("| here")
]
TRANSFORMERS = (
    "cache_utils.py",
    "integrations/flash_attention.py",
    "integrations/flash_paged.py",
    "integrations/sdpa_attention.py",
    "generation/continuous_batching/cache.py",
    "generation/continuous_batching/cache_allocators/cache_allocator.py",
    "models/gemma2/modeling_gemma2.py",
    "models/mixtral/modeling_mixtral.py",
)


def names(cell: str) -> list[str]:
    """Identifiers in backticks: `crop(-m)` is crop, `window_size=(left, right)` is window_size."""
    return [re.match(r"[\w.]+", code)[0] for code in re.findall(r"`([^`]+)`", cell)]


def letters(formulas: list[str]) -> set[str]:
    """`B, H_q` -> {"B", "H_q"}; commands such as \\infty are no letters, nor is Euler's e."""
    plain = [re.sub(r"\\[A-Za-z]+", " ", f) for f in formulas]
    return {re.sub("[{}]", "", x) for f in plain for x in re.findall(r"[A-Za-z](?:_\{?\w+\}?)?", f)} - {"e"}


def test_every_letter_of_the_page_is_in_its_table():
    table, rest = PAGE.split("</div>", 1)
    explained = letters(re.findall(r"^\| (\$.+?) \|", table, re.M))
    used = letters(re.findall(r"\$([^$\n]+)\$", rest))
    assert len(used) > 6 and used - explained == set()
    assert letters([r"(B, H_{kv}, D^{-1/2}), -\infty"]) == {"B", "H_kv", "D"}


def test_every_row_has_five_columns():
    assert len(ROWS) > 12 and {len(row) for row in ROWS} == {5}


@pytest.fixture(scope="module")
def installed():
    transformers = pytest.importorskip("transformers")
    folder = Path(transformers.__file__).parent
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in TRANSFORMERS)


def test_transformers_has_these_names(installed):
    wanted = [name for row in ROWS for name in names(row[4])]
    assert len(wanted) > 12
    assert [n for n in wanted if not re.search(rf"\b{n}\b", installed)] == []


def ours() -> set[str]:
    """Parameters of the calls, and methods of what the second table names."""
    calls = (attention.sdpa, attention.merge_partials, kernels.decode_attention)
    found = {p for call in calls for p in inspect.signature(call).parameters}
    for kind in (caches.ContiguousCache, paging.BlockPool):
        found |= (
            set(dir(kind)) | {f"cache.{m}" for m in dir(kind)} | {f"{kind.__name__}.{m}" for m in dir(kind)}
        )
    return found


def test_ours_are_those_of_the_companion():
    of_others = {"page_table", "return_softmax_lse", "w1", "w2"}
    wanted = {name for row in ROWS for name in names(row[0])} - of_others
    assert len(wanted) > 10 and wanted - ours() == set()


def test_a_crop_of_transformers_is_what_the_page_says():
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    cache = transformers.DynamicCache()
    cache.update(torch.zeros(1, 1, 5, 2), torch.zeros(1, 1, 5, 2), 0)
    with pytest.raises(ValueError, match="negative"):
        cache.crop(3)
    cache.crop(-2)
    assert cache.get_seq_length() == 3

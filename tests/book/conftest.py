from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def html():
    """The folder of the built book."""
    folder = ROOT / "_build" / "html"
    if not (folder / "index.html").exists():
        pytest.fail("the book is not built: run `make book` first")
    return folder


@pytest.fixture(scope="module")
def site(html):
    """The address of the built book."""
    from tools.serve import serving

    with serving(html) as address:
        yield address


@pytest.fixture(scope="module")
def browser():
    from tools.browser import Browser

    with Browser(timeout=240) as running:  # a page with axe may take minutes on a busy machine
        yield running

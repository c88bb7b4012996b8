"""What the built pages must satisfy; each function returns the problems that it finds, as sentences."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

import yaml
from bs4 import BeautifulSoup

from tools.booktools import CDN
from tools.notebooks import UNSTABLE

ROOT = Path(__file__).resolve().parent.parent
HTML = ROOT / "_build" / "html"
LOADED = {"stylesheet", "preload", "icon", "modulepreload"}  # the kinds of <link> that a browser fetches


def toc(path: Path = ROOT / "_toc.yml") -> list[str]:
    """Every page of the table of contents, the first page first, without suffixes."""
    contents = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [contents["root"], *(c["file"] for part in contents["parts"] for c in part["chapters"])]


def source(name: str, root: Path = ROOT) -> Path | None:
    """The file that a page is made from."""
    return next((p for s in (".md", ".ipynb") if (p := (root / name).with_suffix(s)).exists()), None)


def title(name: str, root: Path = ROOT) -> str:
    """The first heading of a page's source."""
    return re.search(r"^# (.+)$", source(name, root).read_text(encoding="utf-8"), re.M).group(1).strip()


def parse(path: Path) -> BeautifulSoup:
    return BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")


def article(page: BeautifulSoup) -> BeautifulSoup:
    """The part of a page that its author wrote."""
    return page.find("article") or page


def _text(node) -> str:
    return " ".join(node.get_text().replace("#", "").split())


def titles(page: BeautifulSoup, wanted: str, number: int | None) -> list[str]:
    """The page has its title in the tab and as its only h1, with the chapter's number if it has one."""
    problems = []
    wanted = wanted.replace("`", "").replace("'", "’").replace("*", "")
    heads = article(page).find_all("h1")
    if len(heads) != 1:
        return [f"{len(heads)} h1 headings"]
    shown = _text(heads[0]).replace("'", "’")
    expected = f"{number}. {wanted}" if number is not None else wanted
    if shown != expected:
        problems.append(f"the heading is {shown!r}, expected {expected!r}")
    if page.title is None or wanted not in _text(page.title).replace("'", "’"):
        problems.append(f"the tab says {page.title and _text(page.title)!r}, expected {wanted!r}")
    return problems


def images(page: BeautifulSoup, folder: Path) -> list[str]:
    """Every picture is there and says in words what it shows."""
    problems = []
    for img in article(page).find_all("img"):
        src, alt = img.get("src", ""), img.get("alt", "")
        file = folder / unquote(src)
        if not src.startswith("data:") and not (file.is_file() and file.stat().st_size > 0):
            problems.append(f"the picture {src} is missing")
        if len(alt.split()) < 3 or re.search(r"\.(svg|png)$", alt):
            problems.append(f"the picture {src} has no alt text: {alt!r}")
    return problems


def outside(page: BeautifulSoup) -> list[str]:
    """What a browser would fetch from another host on opening the page, MathJax from its CDN excepted."""
    problems = []
    loads = [(t, "src") for t in ("script", "img", "iframe", "source", "video", "audio", "embed")]
    for tag, attribute in [*loads, ("link", "href"), ("object", "data")]:
        for node in page.find_all(tag):
            address = node.get(attribute) or ""
            if tag == "link" and not {"stylesheet", "preload", "icon", "modulepreload"} & set(
                node.get("rel", [])
            ):
                continue
            if not re.match(r"(?:https?:)?//", address):
                continue
            if not (address == CDN and node.get("integrity") and node.get("crossorigin")):
                problems.append(f"<{tag}> loads {address}")
    return problems


def leaks(page: BeautifulSoup) -> list[str]:
    """Paths of a machine, addresses in memory, font warnings, markup that was not understood."""
    problems = []
    for output in article(page).select(".cell_output"):
        text = output.get_text()
        problems += [f"{what}: {p.search(text).group(0)!r}" for what, p in UNSTABLE.items() if p.search(text)]
    if str(ROOT) in page.get_text():
        problems.append(f"the path of the build: {ROOT}")
    body = BeautifulSoup(str(article(page)), "html.parser")
    for code in body.find_all(["pre", "code"]):
        code.decompose()
    text = body.get_text()
    for what, pattern in {
        "a raw directive": r"^\s*:::|```",
        "a raw role": r"\{[a-z][\w:-]*\}`",
        "raw mathematics": r"\$\$|\$[^$\n]*\\[a-z]+[^$\n]*\$",
        "raw emphasis": r"\*\*[A-Za-z][^*\n]*\*\*",
        "a raw link": r"\]\([^)\s]+\)",
    }.items():
        # mathematics stands in the page as TeX between \( and \) until MathJax sets it
        if found := re.search(pattern, text, re.M):
            problems.append(f"{what}: {text[max(0, found.start() - 20) : found.end() + 20]!r}")
    return problems


def mathematics(page: BeautifulSoup, markdown: str) -> list[str]:
    """Formulas of the source arrive as formulas."""
    prose = re.sub(r"^```.*?^```|`[^`\n]+`", "", markdown, flags=re.M | re.S)
    wanted = len(re.findall(r"\$\$.+?\$\$|\$[^$\n]+\$", prose, re.S))
    found = len(article(page).select("span.math, div.math"))
    return [f"{wanted} formulas in the source, {found} on the page"] if found < wanted else []


def links(pages: dict[str, BeautifulSoup]) -> list[str]:
    """Links inside the site lead to a page, their anchors to a place on it. Keys: paths below the root."""
    problems = []
    places = {name: {n["id"] for n in page.find_all(id=True)} for name, page in pages.items()}
    for name, page in pages.items():
        for link in page.find_all("a", href=True):
            url = urlsplit(link["href"])
            if url.scheme or url.netloc or link["href"] in ("#", ""):
                continue
            folder = Path(name).parent
            target = _normal(folder / unquote(url.path)) if url.path else name
            if target in pages:
                if url.fragment and unquote(url.fragment) not in places[target]:
                    problems.append(f"{name}: no place {url.fragment} on {target}")
            elif not (HTML / target).exists():
                problems.append(f"{name}: the link {link['href']} leads nowhere")
    return problems


def _normal(path: Path) -> str:
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            parts = parts[:-1]
        elif part != ".":
            parts.append(part)
    return "/".join(parts)

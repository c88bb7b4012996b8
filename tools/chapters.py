"""Insert, move or remove a chapter: its number changes, and everything that names a chapter follows.

    python -m tools.chapters insert latent --after heads [--title "What is a latent?"]
    python -m tools.chapters move roofline --before kv_cache
    python -m tools.chapters remove latent            each with --dry-run: show the plan, change nothing

A chapter is called by its name without the number. Its files, links to it, its number after the word chapter
in any text and docstring, the lists (_toc.yml, README.md, book/intro.md, notebooks/status.json) and the
notebooks' record of their code change together, or nothing does. What no program can decide is said at the
end: a range that now holds other chapters, or "the next chapter" before another one. An address that the last
commit has and that goes away is kept in book/redirects.yml; the build puts a page there that leads on.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import subprocess
import sys
from pathlib import Path

import jupytext
import nbformat
import yaml

from tools import nbcheck, reading
from tools.address import colab
from tools.notebooks import FORMAT, NOTEBOOKS, ROOT, SETUP, SETUP_TAGS, Problem, normalise, source_hash
from tools.renumber import Change

SUFFIXES = {
    ".md",
    ".py",
    ".ipynb",
    ".yml",
    ".yaml",
    ".toml",
    ".js",
    ".mjs",
    ".css",
    ".html",
    ".txt",
    ".cff",
    "",
}
# A record of the past, stored results, and the examples of this tool.
LEFT = re.compile(
    r"^(CHANGELOG\.md|LICENSE.*|.*/(data|results)/.*|.*chapters(_tool)?\.py|book/redirects\.yml)$"
)
TOC, README, COVER, STATUS = "_toc.yml", "README.md", "book/intro.md", "notebooks/status.json"
REDIRECTS = "book/redirects.yml"
REDIRECTS_HEAD = (
    "# Old address of a chapter: its name, or null if it is gone. Written by tools/chapters.py.\n"
)
# The line of a chapter in each list.
ENTRY = {
    TOC: r"^ *- file: notebooks/{stem}\n",
    README: r"^\| \[\d+\. [^\n]*\(notebooks/{stem}\.ipynb\)[^\n]*\n",
    COVER: r"^{stem}: [^\n]*\n",
}
NEIGHBOUR = re.compile(r"\b(next|previous|last) chapter\b|\bchapter before\b", re.I)
TASK = """### Exercise {n} (easy, five minutes)

To be written.

<details><summary>Solution</summary>

To be written.

</details>

```{{code-cell}} ipython3
---
jupyter:
  source_hidden: true
tags: [solution, hide-cell]
---
assert True  # to be written
```
"""


def stems(names: list[str]) -> dict[str, str]:
    """`heads` -> `03_heads`, in the chapters' order."""
    return {name: f"{n:02}_{name}" for n, name in enumerate(names, 1)}


def git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Problem(f"git {arguments[0]}: {done.stderr.strip()}")
    return [line for line in done.stdout.split("\0") if line]


def chapters() -> list[str]:
    """Names in the order of their numbers, which is the table of contents'."""
    found = [p.stem for p in sorted(NOTEBOOKS.glob("[0-9][0-9]_*.md"))]
    listed = re.findall(r"^ *- file: notebooks/(\S+)$", (ROOT / TOC).read_text(encoding="utf-8"), re.M)
    names = [stem[3:] for stem in found]
    if found != listed or found != list(stems(names).values()):
        raise Problem(f"{TOC} and notebooks/ disagree, or numbers are missing: {listed}; {found}")
    return names


def plan(command: str, name: str, neighbour: str | None, after: bool, title: str | None) -> Change:
    """Everything that is to be written. Problem if the order makes no sense; nothing is changed here."""
    old = chapters()
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise Problem(
            f"name: got {name!r}, accepted: small letters, digits and _, without the chapter's number"
        )
    if (command == "insert") == (name in old):
        there = (
            "there is a chapter already"
            if name in old
            else f"there is no chapter; there are: {', '.join(old)}"
        )
        raise Problem(f"name: got {name!r}, {there}")
    if command != "remove" and (neighbour not in old or neighbour == name):
        raise Problem(
            f"--after or --before: got {neighbour!r}, accepted: {', '.join(n for n in old if n != name)}"
        )
    new = [n for n in old if n != name]
    if command != "remove":
        new.insert(new.index(neighbour) + after, name)
    if len(new) > 99:
        raise Problem("a chapter's number has two digits")
    change = Change(old, new)
    follow(change)
    relist(change, command, name, neighbour, after, title)
    look_at_neighbours(change)
    redirect(change)
    if change.problems:
        raise Problem("nothing was changed:\n" + "\n".join(change.problems))
    change.files = {p: t for p, t in change.files.items() if t is None or not same(p, t)}
    return change


def same(path: str, text: str) -> bool:
    return (ROOT / path).exists() and (ROOT / path).read_text(encoding="utf-8") == text


def follow(change: Change) -> None:
    """Numbers and names in every text; files of chapters under their new names; the record of their code."""
    now, then, hashes = stems(change.old), stems(change.new), {}
    by_stem = {stem: name for name, stem in now.items()}
    gone = {now[name] for name in change.old if name not in then}
    lists = {p: {s: re.compile(ENTRY[p].format(stem=s), re.M) for s in gone} for p in ENTRY}
    written: dict[str, str | None] = {}
    for path in git("ls-files", "-coz", "--exclude-standard"):
        file = ROOT / path
        if file.suffix not in SUFFIXES or LEFT.match(path) or not file.is_file() or file.is_symlink():
            continue
        if file.parent == NOTEBOOKS and file.stem in gone:
            written.setdefault(path, None)
            continue
        text = file.read_text(encoding="utf-8")
        for line in lists.get(path, {}).values():
            text = line.sub("", text)
        new = change.renumber(text, path) if file.suffix != ".ipynb" else notebook(change, text, path, hashes)
        target = path
        if file.parent == NOTEBOOKS and file.stem in by_stem:
            target = f"notebooks/{then[by_stem[file.stem]]}{file.suffix}"
        if target != path:
            change.edits.append(f"{path} -> {target}")
            written.setdefault(path, None)
        if target != path or new != text or path in lists:
            written[target] = new
    change.files.update(written)
    entries = json.loads((ROOT / STATUS).read_text(encoding="utf-8"))
    moved = {then[by_stem[s]]: dict(e) for s, e in entries.items() if s in by_stem and s not in gone}
    for entry in moved.values():
        entry["source_sha256"] = hashes.get(entry["source_sha256"], entry["source_sha256"])
    change.files[STATUS] = json.dumps(dict(sorted(moved.items())), indent=1) + "\n"


def notebook(change: Change, text: str, path: str, hashes: dict[str, str]) -> str:
    """A stored notebook with what its cells say and print renumbered, and the hash of its code made again."""
    stored = nbformat.reads(text, as_version=4)
    if nbformat.writes(stored) + "\n" != text:
        raise Problem(f"{path} is not as tools.notebooks writes it: make it again first")
    new, known = copy.deepcopy(stored), stored.metadata.get("companion", {}).get("source_sha256")
    for i, cell in enumerate(new.cells):
        cell.source = change.renumber(cell.source, f"{path}, cell {i}")
        image = cell.metadata.get("mystnb", {}).get("image", {})
        if "alt" in image:
            image["alt"] = change.renumber(image["alt"], f"{path}, cell {i}")
        for output in cell.get("outputs", []):
            holder = output if output.output_type == "stream" else output.get("data", {})
            for key in [k for k in holder if k in ("text", "image/svg+xml") or k.startswith("text/")]:
                holder[key] = change.renumber(holder[key], f"{path}, cell {i}, {key}")
    if known and known == source_hash(stored):
        new.metadata["companion"]["source_sha256"] = hashes[known] = source_hash(new)
    return nbformat.writes(new) + "\n"


def relist(
    change: Change, command: str, name: str, neighbour: str | None, after: bool, title: str | None
) -> None:
    """The chapter's line in every list, and the frame of a new one. (A removed one's lines are gone.)"""
    then = stems(change.new)
    if command == "remove":
        _no_empty_part(change)
        return
    stem, beside = then[name], then[neighbour]
    lines = {TOC: f"      - file: notebooks/{stem}\n"}
    if command == "insert":
        title = title or name.replace("_", " ").capitalize()
        change.files |= frame(stem, title, stems(change.old)[neighbour])
        page, place = f"[{int(stem[:2])}. {title}](notebooks/{stem}.ipynb)", colab(f"notebooks/{stem}.ipynb")
        lines[README] = f"| {page} | [open in Colab]({place}) | to be written |\n"
    for path, entry in ENTRY.items():
        text = change.files[path]
        if command == "move":
            own = re.search(entry.format(stem=stem), text, re.M)
            if own is None:
                continue
            lines[path], text = own[0], text[: own.start()] + text[own.end() :]
        place = re.search(entry.format(stem=beside), text, re.M)
        if path in lines and place:
            cut = place.end() if after else place.start()
            text = text[:cut] + lines[path] + text[cut:]
            change.edits.append(f"{path}: {lines[path].strip()[:80]}")
        change.files[path] = text
    _no_empty_part(change)


def _no_empty_part(change: Change) -> None:
    parts = yaml.safe_load(change.files[TOC])["parts"]
    change.problems += [
        f"{TOC}: {p['caption']!r} would be empty: take the part out first" for p in parts if not p["chapters"]
    ]


def frame(stem: str, title: str, beside: str) -> dict[str, str]:
    """The two files of an empty chapter: every heading that tools.nbcheck asks for, nothing run."""
    head = re.match(r"---\n.*?\n---\n", (NOTEBOOKS / f"{beside}.md").read_text(encoding="utf-8"), re.S)[0]
    text = (ROOT / "tools/frame.md").read_text(encoding="utf-8")
    parts = {"TITLE": title, "TAGS": ", ".join(SETUP_TAGS), "SETUP": SETUP}
    parts["TASKS"] = "\n".join(TASK.format(n=n) for n in range(1, nbcheck.EXERCISES.start + 1))
    for key, value in parts.items():
        text = text.replace(f"@{key}@", value)
    takes = reading.reading(jupytext.reads(text, fmt="md:myst"))
    text = text.replace("@READING@", str(takes.minutes)).replace("@EXERCISES@", str(takes.exercises))
    text = f"{head}\n{text}"
    made = jupytext.reads(text, fmt=FORMAT)
    for cell in made.cells:
        cell.pop("id", None)
    written = nbformat.writes(normalise(made)) + "\n"
    return {f"notebooks/{stem}.md": text, f"notebooks/{stem}.ipynb": written}


def look_at_neighbours(change: Change) -> None:
    """ "The next chapter" is another one now: only a person can say what then to write."""

    def beside(names: list[str], name: str) -> list[str | None]:
        i = names.index(name)
        return [names[i - 1] if i else None, *names[i + 1 : i + 2]]

    for name in [n for n in change.new if n in change.old]:
        if beside(change.old, name) != beside(change.new, name):
            path = f"notebooks/{stems(change.new)[name]}.md"
            text = change.files.get(path) or (ROOT / path).read_text(encoding="utf-8")
            for n, line in enumerate(text.splitlines(), 1):
                change.notices += [f"{path}:{n}: says {m[0]!r}" for m in NEIGHBOUR.finditer(line)]


def redirect(change: Change) -> None:
    """Addresses of the last commit that no page has any more, by the name of the chapter that was there."""
    now = set(stems(change.new).values())
    committed = git("ls-tree", "-z", "--name-only", "HEAD", "notebooks/")
    known = redirects() | {
        Path(p).stem: Path(p).stem[3:] for p in committed if re.search(r"/\d\d_\w+\.md$", p)
    }
    rows = {s: n if n in change.new else None for s, n in sorted(known.items()) if s not in now}
    lines = [f"{stem}: {name or 'null'}\n" for stem, name in rows.items()]
    change.files[REDIRECTS] = REDIRECTS_HEAD + ("".join(lines) or "{}\n")


def redirects() -> dict[str, str | None]:
    """Old address of a chapter (`04_kv_cache`) -> its name, or None if it is no more."""
    return yaml.safe_load((ROOT / REDIRECTS).read_text(encoding="utf-8"))


def apply(change: Change) -> None:
    """Write all of it; on any error everything is put back."""
    before = {p: (ROOT / p).read_bytes() if (ROOT / p).exists() else None for p in change.files}
    try:
        for path, text in change.files.items():
            _put(path, text if text is None else text.encode())
    except BaseException:
        for path, data in before.items():
            _put(path, data)
        raise


def _put(path: str, data: bytes | None) -> None:
    if data is None:
        (ROOT / path).unlink(missing_ok=True)
    else:
        (ROOT / path).write_bytes(data)


def main(argv: list[str] | None = None) -> int:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("tools.chapters", description=__doc__, formatter_class=as_written)
    parser.add_argument("command", choices=["insert", "move", "remove"])
    parser.add_argument("name", help="of the chapter, without its number")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--after", metavar="NAME")
    where.add_argument("--before", metavar="NAME")
    parser.add_argument("--title", help="of a new chapter")
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args(argv)
    try:
        change = plan(args.command, args.name, args.after or args.before, args.after is not None, args.title)
    except Problem as problem:
        print(problem, file=sys.stderr)
        return 1
    if args.dry_run:
        print("\n".join(change.edits))
    else:
        apply(change)
    print(f"{len(change.files)} files, {len(change.edits)} places{' (nothing was written)' * args.dry_run}")
    if change.notices:
        print("To be read by you:\n" + "\n".join(change.notices))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The chapters in an environment like Colab's, made from nothing: every first cell, and a few chapters whole.

    python -m tools.colab_check [NAME ...]        with the versions of constraints-colab.txt
    python -m tools.colab_check --current         with those that Colab lists today (asks GitHub for the list)
    python -m tools.colab_check --newest torch --newest triton      with the newest of these instead

The first cell is run as it stands, in a kernel of an environment that has what Colab has and no companion;
its address leads to a copy of this working tree. Then all first cells run with no way to a network. NAME is a
chapter to run and compare whole; 04, 06 and 13 without one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import nbformat

from tools import address
from tools.notebooks import NOTEBOOKS, ROOT, Problem, merge_streams, names, read_source

LIST = ROOT / "constraints-colab.txt"
CURRENT = "https://raw.githubusercontent.com/googlecolab/backend-info/main/pip-freeze.gpu.txt"
PYTHONS = ("python3.13", "python3.12")
WHOLE = ("04_kv_cache", "06_memory_bill", "13_moe")
KEPT = ("torch", "triton", "numpy")
KERNEL = "colab"
# A proxy that nobody is: whoever asks a network, be it pip or git, fails.
CUT = {"PIP_NO_INDEX": "1", "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
VERSIONS = (
    "import json, importlib.metadata as m; print(json.dumps({d.name: d.version for d in m.distributions()}))"
)


def pins(text: str) -> dict[str, str]:
    """{name: version} of lines of `name==version`, without local parts such as +cu128."""
    found = re.findall(r"^([A-Za-z0-9][\w.-]*)==([^\s+;]+)", text, re.M)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


def current(text: str, known: dict[str, str]) -> dict[str, str]:
    """The known names with the versions of another list; a name that it lacks is left out."""
    listed = pins(text)
    return {name: listed[name] for name in known if name in listed}


def python(wanted: str | None) -> str:
    """A Python as Colab has it; raises Problem where there is none."""
    for name in [wanted] if wanted else PYTHONS:
        found = shutil.which(name)
        if (
            found
            and subprocess.run([found, "-c", "import ensurepip, venv"], capture_output=True).returncode == 0
        ):
            return found
    raise Problem(f"none of {', '.join([wanted] if wanted else PYTHONS)} is here; name one with --python")


class Environment:
    """A virtual environment with a kernel of its own."""

    def __init__(self, folder: Path):
        self.folder, self.python = folder, folder / "bin" / "python"

    def make(self, python: str, requirements: list[str]) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        subprocess.run([python, "-m", "venv", self.folder], check=True)
        self.pip("install", *requirements)
        spec = self.folder / "share/jupyter/kernels" / KERNEL
        spec.mkdir(parents=True)
        launch = [str(self.python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        kernel = {"argv": launch, "display_name": KERNEL, "language": "python"}
        (spec / "kernel.json").write_text(json.dumps(kernel))

    def pip(self, *arguments: str) -> None:
        quiet = ["--quiet", "--disable-pip-version-check"]
        subprocess.run([self.python, "-m", "pip", *arguments, *quiet], check=True)

    def versions(self) -> dict[str, str]:
        done = subprocess.run([self.python, "-I", "-c", VERSIONS], check=True, capture_output=True, text=True)
        return {re.sub(r"[-_.]+", "-", n).lower(): v for n, v in json.loads(done.stdout).items()}

    def variables(self, **more: str) -> dict[str, str]:
        """For a kernel of this environment: its own folders, nothing of the one that drives it."""
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
        own = {"JUPYTER_PATH": str(self.folder / "share/jupyter"), "OMP_NUM_THREADS": "1"}
        own["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"  # a warning of its debugger, at every start
        own["WHAT_A_TOKEN_COSTS_CACHE"] = str(self.folder / "models")
        return env | own | more

    def first_cell(self, name: str, cwd: Path, **variables: str) -> str:
        """What a chapter's first cell prints, run in a fresh kernel; Problem if it fails."""
        from nbclient import NotebookClient
        from nbclient.exceptions import CellExecutionError

        cells = [c for c in read_source(NOTEBOOKS / f"{name}.md").cells if c.cell_type == "code"][:1]
        notebook = nbformat.v4.new_notebook(cells=cells)
        os.environ["JUPYTER_PATH"] = str(
            self.folder / "share/jupyter"
        )  # where the driver looks for the kernel
        client = NotebookClient(
            notebook, timeout=900, kernel_name=KERNEL, resources={"metadata": {"path": str(cwd)}}
        )
        try:
            client.execute(env=self.variables(**variables))
        except CellExecutionError as error:
            raise Problem(f"{name}: the first cell failed\n{error}") from None
        merge_streams(notebook)
        return "".join(o.get("text", "") for o in cells[0].outputs if o.get("name") == "stdout")


def repository(folder: Path) -> dict[str, str]:
    """The working tree as a repository in a folder, and variables that lead git to it from its address."""
    for path in address.paths():
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    git = ["git", "-C", str(folder), "-c", "user.name=check", "-c", "user.email=check@localhost"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "the working tree"]):
        subprocess.run([*git, *command], check=True)
    return {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.file://{folder}.insteadOf",
        "GIT_CONFIG_VALUE_0": address.repository(),
    }


def first_cells(env: Environment, folder: Path) -> None:
    """Each first cell: where the companion is missing, then all without a network; Problem if one fails."""
    there = repository(folder / "repository")
    begun, chapters = env.versions(), names()
    for without in ((), ("triton",)):  # Colab's machines without a GPU have no triton
        if without:
            env.pip("uninstall", "--yes", "what-a-token-costs", "jaxtyping", *without)
        before = env.versions()
        said = env.first_cell(chapters[0], folder, **there)
        after = env.versions()
        if changed := {n: (v, after.get(n)) for n, v in before.items() if after.get(n) != v}:
            raise Problem(f"the first cell changed what was installed: {changed}")
        if lacking := set(without) - set(after):
            raise Problem(f"the first cell did not add {', '.join(lacking)}")
        added = {n: v for n, v in after.items() if n not in before}
        print(f"without {', '.join(('the companion', *without))}: added {added}\n{said}", flush=True)
    if env.versions()["triton"] != begun["triton"]:
        env.pip("install", "--no-deps", f"triton=={begun['triton']}")
    for name in chapters:
        start = time.monotonic()
        said = env.first_cell(name, folder, **CUT)
        if "Model:" not in said or "Kernels:" not in said:
            raise Problem(f"{name}: the first cell does not say where it runs: {said!r}")
        print(f"{name}: its first cell runs without a network ({time.monotonic() - start:.0f} s)", flush=True)
    if (now := {n: env.versions().get(n) for n in KEPT}) != {n: begun.get(n) for n in KEPT}:
        raise Problem(f"it ended with {now}, it began with {begun}")


def whole(env: Environment, folder: Path, chapters: list[str]) -> bool:
    """Run chapters from end to end and compare what they print with what is stored; whether all agree."""
    fetch = "from companion.model.files import smollm2; smollm2()"  # now: fetching is said on stderr
    subprocess.run([env.python, "-c", fetch], check=True, env=env.variables(), cwd=folder)
    shutil.copy(NOTEBOOKS / "conftest.py", folder)
    for name in chapters:
        shutil.copy(NOTEBOOKS / f"{name}.ipynb", folder)
    files = [f"{name}.ipynb" for name in chapters]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--nbval",
        "--nbval-kernel-name",
        KERNEL,
        "--nbval-cell-timeout",
        "300",
    ]
    command += ["-q", "-p", "no:cacheprovider", "--durations=0", "--durations-min=30", *files]
    return subprocess.run(command, cwd=folder, env=env.variables()).returncode == 0


def main(argv: list[str] | None = None) -> int:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("tools.colab_check", description=__doc__, formatter_class=as_written)
    parser.add_argument("names", nargs="*", metavar="NAME", help="chapters to run whole")
    parser.add_argument(
        "--python", metavar="PATH", help=f"default: the first there is of {', '.join(PYTHONS)}"
    )
    parser.add_argument(
        "--folder", type=Path, default=ROOT / ".venv-colab", help="made anew (default .venv-colab)"
    )
    parser.add_argument("--current", action="store_true", help="take the versions that Colab lists today")
    parser.add_argument("--newest", action="append", default=[], metavar="PACKAGE", help="lift this pin")
    args = parser.parse_args(argv)
    wanted = pins(LIST.read_text(encoding="utf-8"))
    try:
        chapters = names(args.names or list(WHOLE))
        if unknown := set(args.newest) - set(wanted):
            raise Problem(f"--newest takes names of {LIST.name}, not {', '.join(sorted(unknown))}")
        if args.current:
            with urllib.request.urlopen(CURRENT, timeout=60) as answer:
                listed = current(answer.read().decode(), wanted)
            moved = {n: f"{v} -> {listed.get(n)}" for n, v in wanted.items() if listed.get(n) != v}
            print(f"since {LIST.name} was written, Colab moved: {moved or 'nothing'}", flush=True)
            wanted = listed
        env = Environment(args.folder.resolve())
        print(f"making {args.folder} with {len(wanted)} packages as Colab has them", flush=True)
        env.make(python(args.python), [n if n in args.newest else f"{n}=={v}" for n, v in wanted.items()])
        print({n: env.versions().get(n) for n in KEPT}, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            first_cells(env, Path(folder))
            agreed = whole(env, Path(folder), chapters)
    except Problem as problem:
        print(problem, file=sys.stderr)
        return 1
    return int(not agreed)


if __name__ == "__main__":
    sys.exit(main())

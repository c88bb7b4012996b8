"""nbval as the book uses it can fail: on another output, a slow cell, a notebook that was never run."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

ROOT = Path(__file__).resolve().parents[2]
PICTURE = "<svg xmlns='http://www.w3.org/2000/svg'/>"


def printed(source, text, count, tags=()):
    output = new_output("stream", name="stdout", text=text)
    return new_code_cell(source, outputs=[output], execution_count=count, metadata={"tags": list(tags)})


def drawn(source, svg, text, count):
    data = {"image/svg+xml": svg, "text/plain": text}
    return new_code_cell(source, outputs=[new_output("display_data", data=data)], execution_count=count)


SHOW = f"""from IPython.display import display
display({{"image/svg+xml": {PICTURE!r}, "text/plain": "a plot"}}, raw=True)"""

NOTEBOOKS = {
    "right": [
        printed("print(2 + 2)", "4\n", 1),
        printed("import time; print(time.time())", "12.5\n", 2, ["measurement", "nbval-ignore-output"]),
        new_code_cell("x = 1", execution_count=3),
    ],
    "wrong": [printed("print(2 + 2)", "5\n", 1)],
    "missing": [new_code_cell("print(2 + 2)", execution_count=1), printed("print(1)", "1\n", 2)],
    "another_picture": [drawn(SHOW, PICTURE.replace("/>", " id='another'/>"), "a plot", 1)],
    "another_text": [drawn(SHOW, PICTURE, "another plot", 1)],
    "slow": [printed("import time; time.sleep(60); print(1)", "1\n", 1)],
    "not_run": [new_code_cell("print(1)"), printed("print(2)", "2\n", 1)],
    "no_outputs": [new_code_cell("print(1)", execution_count=1)],
    "stderr": [printed("import sys; print(1); print('late', file=sys.stderr)", "1\n", 1)],
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """All the notebooks in one run, as `make test` does it, with a shorter limit per cell."""
    folder = tmp_path_factory.mktemp("nbval")
    shutil.copy(ROOT / "notebooks" / "conftest.py", folder)
    for name, cells in NOTEBOOKS.items():
        nbformat.write(new_notebook(cells=cells), folder / f"{name}.ipynb")
    command = [
        sys.executable,
        "-m",
        "pytest",
        ".",
        "--nbval",
        "--nbval-current-env",
        "--nbval-cell-timeout",
        "5",
    ]
    command += ["-n", "2", "--dist", "loadscope", "-rA", "--color=no", "-p", "no:cacheprovider"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def outcome(run, name):
    """The words pytest has for a notebook's cells: {'PASSED', 'FAILED', ...}."""
    return set(re.findall(rf"^(PASSED|FAILED|ERROR|XFAIL|XPASS|SKIPPED).*\b{name}\.ipynb", run.stdout, re.M))


def test_a_right_notebook_passes(run):
    assert outcome(run, "right") == {"PASSED"}


def test_another_picture_alone_passes(run):
    assert outcome(run, "another_picture") == {"PASSED"}


@pytest.mark.parametrize("name", ["wrong", "another_text", "slow", "stderr"])
def test_a_wrong_or_slow_cell_fails(run, name):
    assert "FAILED" in outcome(run, name), run.stdout[-3000:]


def test_a_missing_output_fails(run):
    assert "FAILED" in outcome(run, "missing")


@pytest.mark.parametrize("name", ["not_run", "no_outputs"])
def test_a_notebook_without_outputs_is_refused(run, name):
    assert outcome(run, name) == {"ERROR"}, run.stdout[-3000:]
    assert "run `make notebooks`" in run.stdout


def test_the_run_fails_and_says_what_it_compared(run):
    assert run.returncode != 0
    said = "nbval: 3 compared, 1 measured (run, not compared), 1 without text output, in 3 notebooks"
    assert said in run.stdout, run.stdout[-1500:]

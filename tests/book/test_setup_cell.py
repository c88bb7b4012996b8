"""The first cell of every notebook: where the companion is, it asks nothing of pip or of a network."""

import subprocess
import sys

import pytest
from IPython.core.inputtransformer2 import TransformerManager

from tools import address, nbcheck
from tools.notebooks import NOTEBOOKS, ROOT, SETUP, SETUP_TAGS, names, read_source, tags

CELL = TransformerManager().transform_cell(SETUP)

# Every call of pip is noted, and no socket can be opened.
BEFORE = """
import socket, subprocess, sys
calls = []
class Shell:
    def run_line_magic(self, name, line):
        calls.append((name, line))
        Absent.here = True
class Absent:
    here = {here}
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "companion" and not self.here:
            raise ModuleNotFoundError(name, name=name)
def get_ipython():
    return Shell()
def refuse(*args, **how):
    raise OSError("no network")
def run(command, **how):
    calls.append(command)
    return subprocess.CompletedProcess(command, 0, "", "")
sys.meta_path.insert(0, Absent())
socket.socket.connect = socket.create_connection = refuse
subprocess.run = run
"""


def cell(after: str, here: bool) -> str:
    """What a fresh Python prints after the cell and the lines after it."""
    code = BEFORE.format(here=here) + CELL + "\n" + after
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_it_is_short():
    assert len(SETUP.splitlines()) <= 12


def test_where_the_companion_is_nothing_is_installed():
    said = cell("assert calls == [], calls", here=True)
    assert said.startswith("Model: cpu, float32") and "\nKernels: " in said


def test_triton_is_not_imported_so_its_interpreter_can_still_be_chosen():
    cell(
        "assert 'triton' not in sys.modules\n"
        "from companion.kernels import interpret\n"
        "interpret(unless_gpu=True)",
        here=True,
    )


def test_where_the_companion_is_not_it_alone_is_installed_and_then_what_it_lacks():
    said = cell("print(calls)", here=False)
    (magic, line), command = eval(said.splitlines()[-1])
    assert magic == "pip" and "--no-deps" in line and f"git+{address.repository()}" in line
    assert command[1:4] == ["-m", "pip", "install"] and "-c" in command
    assert "what-a-token-costs[" in command[-1]


def test_another_package_of_that_name_is_named_and_nothing_is_installed(tmp_path):
    (tmp_path / "companion").mkdir()
    (tmp_path / "companion" / "__init__.py").write_text("")
    # Ours is out of the way: an editable installation is found by a finder of its own.
    ours = "sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]"
    code = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n{ours}\n" + BEFORE.format(here=True) + CELL
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1 and "another package is installed as `companion`" in done.stderr


@pytest.mark.parametrize("name", names())
def test_every_chapter_begins_with_it(name):
    code = [c for c in read_source(NOTEBOOKS / f"{name}.md").cells if c.cell_type == "code"]
    assert code[0].source == SETUP and tags(code[0]) == SETUP_TAGS
    assert not [p for p in nbcheck.code_cell(code[0]) if "tag" in p or "go together" in p]

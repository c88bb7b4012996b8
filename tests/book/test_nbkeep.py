"""The executed notebooks of a comparison are kept, those that differ first of all."""

import shutil
import subprocess
import sys

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tools.notebooks import NOTEBOOKS, ROOT


def test_what_ran_is_kept(tmp_path):
    shutil.copy(NOTEBOOKS / "conftest.py", tmp_path)
    stored = new_output("stream", name="stdout", text="4\n")
    picture = new_output("display_data", data={"text/plain": "old"})
    cells = [
        new_markdown_cell("# Title"),
        new_code_cell("print(2 + 2)", outputs=[stored], execution_count=1),
        new_code_cell("print(2 + 3)", outputs=[stored], execution_count=2),  # another output than the stored
        new_code_cell("x = 7\nx", outputs=[picture], execution_count=3),
        new_code_cell("1 / 0", execution_count=4),
    ]
    nbformat.write(new_notebook(cells=cells, metadata={"companion": {"x": 1}}), tmp_path / "small.ipynb")
    command = [sys.executable, "-m", "pytest", str(tmp_path), "--nbval", "--nbval-current-env"]
    command += ["-p", "tools.nbkeep", "--nbval-keep", str(tmp_path / "kept"), "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout
    kept = nbformat.read(tmp_path / "kept" / "small.ipynb", as_version=4)
    nbformat.validate(kept)
    code = [c for c in kept.cells if c.cell_type == "code"]
    assert [c.outputs[0].get("text") for c in code[:2]] == ["4\n", "5\n"]
    assert code[2].outputs[0]["data"]["text/plain"] == "7"
    assert code[3].outputs[0]["ename"] == "ZeroDivisionError"
    assert [c.execution_count for c in code] == [1, 2, 3, 4]
    assert kept.cells[0].source == "# Title" and "companion" not in kept.metadata
    assert nbformat.read(tmp_path / "small.ipynb", as_version=4).cells[2].outputs == [stored]

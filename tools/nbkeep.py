"""A plug-in of pytest that keeps what nbval ran: the notebooks with the outputs of this machine.

    python -m pytest notebooks --nbval --nbval-current-env -p tools.nbkeep --nbval-keep FOLDER

nbval compares and forgets. Here every notebook is written once more, with what its cells printed in this run,
also where that differs; a cell that did not run has no outputs. Serial runs only: with workers each one would
write its own part.
"""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest


def pytest_addoption(parser):
    parser.addoption("--nbval-keep", type=Path, metavar="FOLDER", help="write the executed notebooks there")


def pytest_configure(config):
    if (folder := config.getoption("--nbval-keep")) is not None:
        config.pluginmanager.register(Keeper(folder), "nbval-keeper")


class Keeper:
    def __init__(self, folder: Path):
        self.folder = folder
        self.run: dict[Path, tuple] = {}  # file -> its notebook, and the outputs by cell

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        if call.when == "call" and hasattr(item, "cell"):
            _, outputs = self.run.setdefault(item.path, (item.parent.nb, {}))
            outputs[id(item.cell)] = getattr(item, "test_outputs", None) or []
        return (yield)

    def pytest_sessionfinish(self):
        if self.run:
            self.folder.mkdir(parents=True, exist_ok=True)
        for path, (notebook, outputs) in self.run.items():
            count = 0
            for cell in notebook.cells:
                if cell.cell_type == "code":
                    ran = id(cell) in outputs
                    count += ran
                    cell.outputs = outputs.get(id(cell), [])
                    cell.execution_count = count if ran else None
            notebook.metadata.pop("companion", None)  # what is stored there was said of other outputs
            nbformat.write(notebook, self.folder / path.name)

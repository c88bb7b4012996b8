"""How nbval checks the chapters: everything stored is compared, but for pictures and measurements.

    python -m pytest notebooks --nbval --nbval-current-env --nbval-cell-timeout 120 -n 2 --dist loadscope

Pictures are left out because matplotlib draws a little differently from machine to machine; the numbers that
a figure draws are printed beside it. A notebook without stored outputs is refused: nbval alone would pass it.
"""

import itertools
import os
import shutil
import tempfile

import nbformat
import nbval.kernel
import pytest

# Before a kernel starts: the stored outputs were made with one thread, too (tools/notebooks.py).
os.environ.setdefault("OMP_NUM_THREADS", "1")

PICTURES = ("image/svg+xml", "image/png")
KINDS = {"compared": "compared", "measured": "measured (run, not compared)", "silent": "without text output"}


def pytest_configure(config):
    # A first import may take long and say so on stderr, which would be an output that is not stored.
    import matplotlib.font_manager  # noqa: F401

    if os.name == "posix":
        speak_through_files(config)


def speak_through_files(config) -> None:
    """Kernels listen on sockets in a folder of this process, where nobody else can take their names.

    A TCP port is chosen before the kernel starts and bound seconds later: two workers may choose the same
    one, and the loser waits for a kernel that never answers. The path is short, as those of sockets must be.
    """
    folder = tempfile.mkdtemp(prefix="nb-")
    plain = nbval.kernel.KernelManager
    number = itertools.count()
    nbval.kernel.KernelManager = lambda **given: plain(
        transport="ipc", ip=f"{folder}/{next(number)}", **given
    )
    config.add_cleanup(lambda: setattr(nbval.kernel, "KernelManager", plain))
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path, parent):
    collectors = yield
    for collector in collectors or []:
        if hasattr(collector, "skip_compare"):
            collector.skip_compare += PICTURES
            if problem := without_outputs(file_path):
                collector.collect = refuse(collector, problem)
    return collectors


def without_outputs(path) -> str | None:
    """Why a notebook cannot be compared: it was not executed, or holds nothing."""
    code = [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
    if any(c.execution_count is None for c in code):
        return "a cell was never executed"
    if not any(c.outputs for c in code):
        return "no outputs are stored"
    return None


def refuse(collector, problem):
    def collect():
        raise collector.CollectError(f"{collector.path.name}: {problem}: run `make notebooks`")

    return collect


def kind(cell, options) -> str:
    """What the comparison does with a cell."""
    if not options.get("check", True):
        return "measured"
    text = [o for o in cell.outputs if o.output_type == "stream" or set(o.get("data", {})) - set(PICTURES)]
    return "compared" if text else "silent"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "call" and hasattr(item, "cell"):
        report.user_properties.append(("nbval", kind(item.cell, item.options)))
    return report


def pytest_terminal_summary(terminalreporter):
    counts = dict.fromkeys(KINDS, 0)
    notebooks = set()
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "nbval":
                counts[value] += 1
                notebooks.add(report.nodeid.split("::")[0])
    said = ", ".join(f"{n} {KINDS[k]}" for k, n in counts.items())
    terminalreporter.write_line(f"nbval: {said}, in {len(notebooks)} notebooks", bold=True)

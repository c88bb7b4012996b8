"""The machine that a result was taken on."""

import importlib.util
import platform
import subprocess

import torch

UNKNOWN = "unknown"


def describe(device: torch.device | None) -> dict:
    """Name, capability, sizes and versions; None: no GPU, a dry run. ValueError if torch can use no GPU."""
    found = {
        "name": "no GPU: Triton's interpreter",
        "capability": [],
        "cores": 0,
        "memory_bytes": 0,
        "l2_bytes": 0,
        "driver": "none",
        "cuda": torch.version.cuda or "none",
        "torch": torch.__version__,
        "triton": _triton(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if device is None:
        return found
    if not torch.cuda.is_available():
        raise ValueError("no GPU that torch can use; dry_run=True tries the script without one")
    p = torch.cuda.get_device_properties(device)
    return found | {
        "name": p.name,
        "capability": list(torch.cuda.get_device_capability(device)),
        "cores": p.multi_processor_count,
        "memory_bytes": p.total_memory,
        "l2_bytes": int(getattr(p, "L2_cache_size", 0)),
        "driver": _driver(),
        "cuda": torch.version.cuda or torch.version.hip or UNKNOWN,
    }


def _triton() -> str:
    if importlib.util.find_spec("triton") is None:
        raise ValueError("kernels need Triton, which exists for Linux only: python -m pip install triton")
    import triton

    return triton.__version__


def _driver() -> str:
    """From nvidia-smi, the one that everybody has; its absence stops nothing."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        return UNKNOWN
    return said[0] if said else UNKNOWN

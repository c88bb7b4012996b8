"""The machine that a result was taken on: processor, GPU, versions. Torch is imported inside functions."""

import importlib.util
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

UNKNOWN = "unknown"


def processor() -> str:
    """The processor's name as the system gives it, else the kind of machine."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        if found := re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(encoding="utf-8"), re.M):
            return " ".join(found.group(1).split())
    elif sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        said = subprocess.run(command, capture_output=True, text=True, check=False)
        if said.stdout.strip():
            return said.stdout.strip()
    return platform.machine()


def load() -> float | None:
    """Processes that wanted to run in the last minute, on average; None where the system doesn't say."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def describe() -> dict[str, Any]:
    """Processor, cores, Python, the load before the run; with torch installed, its threads and version."""
    found = {"processor": processor(), "cores": os.cpu_count()}
    python = {"python": platform.python_version()}
    if importlib.util.find_spec("torch") is None:
        return found | python | {"load_before": load()}
    import torch

    threads = {
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }
    return found | threads | python | {"torch": torch.__version__, "load_before": load()}


def describe_gpu(device) -> dict[str, Any]:
    """Name, capability, sizes and versions; None: no GPU, a dry run.

    device: a torch.device. Raises ValueError where torch can use no GPU, or Triton is not installed.
    """
    import torch

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

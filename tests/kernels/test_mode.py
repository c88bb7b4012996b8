"""Compiled or interpreted: chosen once, before Triton; said clearly when it is too late."""

import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from companion.kernels import interpret, interpreted, mode, triton_for

ROOT = Path(__file__).resolve().parents[2]
CALL = """
import torch
from companion.kernels import decode_attention
c = torch.ones(1, 4, 1, 16)
out = decode_attention(torch.ones(1, 1, 16), c, c, torch.tensor([3], dtype=torch.int32))
print(out.sum().item())
"""


def run(code, **env):
    """What a fresh process prints, and the last line of its error."""
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**clean, **env}, capture_output=True, text=True
    )
    return done.stdout.strip(), (done.stderr.strip().splitlines() or [""])[-1]


def test_importing_the_kernels_does_not_import_triton():
    code = (
        "import sys, companion.kernels as k\n"
        "k.decode_attention, k.attend_with_tail, k.merge_splits, k.decode_reference, k.interpreted\n"
        "print('triton' in sys.modules)"
    )
    assert run(code) == ("False", "")


def test_chosen_in_time_a_kernel_runs_on_a_cpu():
    assert run("from companion.kernels import interpret; interpret(); interpret()" + CALL) == ("16.0", "")


def test_the_variable_alone_is_enough():
    assert run(CALL, TRITON_INTERPRET="1") == ("16.0", "")


def test_not_chosen_a_kernel_on_cpu_tensors_says_how():
    out, error = run(CALL)
    assert out == "" and error.startswith("RuntimeError: a kernel on CPU tensors needs Triton's interpreter")
    assert "(no GPU)" in error and "companion.kernels.interpret()" in error


def test_chosen_too_late_is_refused():
    out, error = run("import triton; from companion.kernels import interpret; interpret()")
    assert out == "" and error.startswith(
        "RuntimeError: Triton was imported before its interpreter was chosen"
    )


@pytest.mark.parametrize("how", ["", "import os; os.environ['TRITON_INTERPRET'] = '1'"])
def test_called_too_late_is_refused(how):
    """Setting the variable after Triton's import chooses nothing: half of Triton would be in either mode."""
    out, error = run("import triton\n" + how + CALL)
    assert out == "" and "Triton was imported without its interpreter" in error


def test_without_triton_everything_else_works():
    hidden = (
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda n, *a: None if n == 'triton' else find(n, *a)\n"
    )
    out, error = run(hidden + "import companion.kernels as k; k.decode_attention; k.interpret()")
    assert error == (
        "ImportError: kernels need Triton, which exists for Linux only: python -m pip install triton"
    )
    assert run(hidden + CALL)[1] == error


def test_a_function_named_as_its_folder_is_in_it():
    code = "from companion.kernels.append import append, kernel; print(type(append).__name__)"
    assert run(code) == ("function", "")


def test_here_it_is_interpreted():
    interpret()
    interpret(unless_gpu=True)
    assert interpreted()
    assert triton_for(torch.ones(1), None, torch.ones(2)) is True


def on(device):
    return SimpleNamespace(device=torch.device(device))


def test_which_tensors(monkeypatch):
    triton_for = inspect.unwrap(mode.triton_for)  # stand-ins for tensors on a GPU are no tensors
    with pytest.raises(ValueError, match="^the tensors are on cpu and cuda:0"):
        triton_for(torch.ones(1), on("cuda:0"))
    with pytest.raises(ValueError, match="^the tensors are on cuda:0 and cuda:1"):
        triton_for(on("cuda:0"), on("cuda:1"))
    with pytest.raises(ValueError, match="^the tensors are on meta"):
        triton_for(torch.ones(1, device="meta"))
    with pytest.raises(ValueError, match="^the tensors are on no device"):
        triton_for(None)
    with pytest.raises(RuntimeError, match="^the tensors are on cuda:0, but this process has chosen"):
        triton_for(on("cuda:0"))
    monkeypatch.setattr(mode, "interpreted", lambda: False)
    assert triton_for(on("cuda:0"), None) is False


def test_a_cpu_has_every_dtype_and_one_core():
    assert mode.capability(torch.ones(1)) == (8, 0) and mode.cores(torch.ones(1)) == 1

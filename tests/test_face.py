"""The type checker's run of `make lint` can fail: a wrong use of the public face is found."""

import subprocess
import sys

import pytest

from tools.address import ROOT


@pytest.mark.parametrize(
    "code, right",
    [
        ("from companion.quantize import codec\ncodec('int4', group=32)", True),
        ("from companion.quantize import codec\ncodec(4)", False),
        ("from companion.cost import kv_bytes, models\nx: str = kv_bytes(models['llama-3.1-8b'], 8)", False),
    ],
)
def test_a_wrong_use_is_found(code, right, tmp_path):
    (tmp_path / "use.py").write_text(code + "\n")
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", str(tmp_path / "use.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode == 0) is right, done.stdout

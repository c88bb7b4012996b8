"""The built wheel, alone in an empty environment outside the tree, and then beside the tests' torch."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile

import pytest

from tools import address, dist
from tools.address import ROOT


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(sdist, wheel)"""
    return dist.build(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def alone(built, tmp_path_factory):
    """Runs a command of an environment that has the wheel and nothing else, somewhere else."""
    folder = tmp_path_factory.mktemp("alone")
    venv.create(folder / "venv", with_pip=True)
    scripts = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "PYTHON"))}

    def run(program: str, *arguments: str, **more: str) -> subprocess.CompletedProcess:
        command = [scripts / program, *arguments]
        return subprocess.run(command, cwd=folder, env=env | more, capture_output=True, text=True)

    done = run("python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(built[1]))
    assert done.returncode == 0, done.stderr
    return run


def ok(done: subprocess.CompletedProcess) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_holds_the_package_and_its_data_and_nothing_else(built):
    names = {n for n in zipfile.ZipFile(built[1]).namelist() if ".dist-info/" not in n}
    package = {
        p.relative_to(ROOT).as_posix() for p in address.paths() if p.is_relative_to(ROOT / "companion")
    }
    assert names == package


def test_the_wheel_can_be_made_from_the_sdist_alone(built, tmp_path):
    with tarfile.open(built[0]) as packed:
        packed.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    command = [sys.executable, "-c", dist.BUILD, str(tmp_path)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    made = tmp_path / ok(done).split()[-1]
    names = [sorted(zipfile.ZipFile(wheel).namelist()) for wheel in (made, built[1])]
    assert names[0] == names[1]


def test_alone_it_sizes_and_says_what_is_here(alone):
    said = ok(alone("companion", "size", "llama-3.1-8b", "--hardware", "h100-sxm", "--batch", "8"))
    assert "llama-3.1-8b" in said
    said = ok(alone("companion", "doctor"))
    assert "torch is not installed" in said and str(ROOT) not in said
    code = (
        "import companion.cost, companion.paging as p; p.BlockPool(4, 16).check(); print(companion.__file__)"
    )
    assert str(ROOT) not in ok(alone("python", "-c", code))


def test_what_needs_torch_says_so_alone(alone):
    done = alone("python", "-c", "import companion.attention")
    assert done.returncode == 1 and "torch" in done.stderr


def test_beside_torch_the_examples_of_the_readme_run(alone):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    (attention,) = [b for b in blocks if "companion.attention" in b]
    # Behind the environment's own: its companion is the wheel's, its torch the tests'.
    code = f"import sys; sys.path.append({sysconfig.get_path('purelib')!r})\n"
    check = (
        "import companion; print(companion.__file__)\n"
        "other = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)\n"
        "assert (out - other).abs().max() < 1e-5"
    )
    said = ok(alone("python", "-c", code + attention + check, OMP_NUM_THREADS="1"))
    assert str(ROOT) not in said.splitlines()[-1]
    for block in blocks:
        ok(alone("python", "-c", code + block, OMP_NUM_THREADS="1"))

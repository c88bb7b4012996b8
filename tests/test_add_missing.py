"""What the first cell adds where the companion is new: real pip, real environments, empty packages."""

import json
import os
import subprocess
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = "what-a-token-costs"


def wheel(folder: Path, name: str, version: str, requires: tuple[str, ...] = (), extra: str = "") -> None:
    """An empty package of this name and version, as a wheel."""
    stem = f"{name.replace('-', '_')}-{version}"
    meta = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    meta += f"Provides-Extra: {extra}\n" if extra else ""
    meta += "".join(
        f"Requires-Dist: {r}" + (f' ; extra == "{extra}"' if extra else "") + "\n" for r in requires
    )
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as z:
        z.writestr(f"{stem}.dist-info/METADATA", meta)
        z.writestr(
            f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        z.writestr(f"{stem}.dist-info/RECORD", "")


class Machine:
    """An environment with packages of our making and no other, and an index that has newer ones."""

    def __init__(self, folder: Path):
        self.wheels = folder / "wheels"
        self.wheels.mkdir()
        venv.create(folder / "venv", with_pip=True)
        self.python = folder / "venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
        plain = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "PYTHON"))}
        self.env = plain | {
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.wheels),
        }

    def pip(self, *arguments: str) -> None:
        command = [self.python, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check"]
        subprocess.run(command, check=True, env=self.env)

    def add_missing(self) -> str:
        """What the cell's call says on stderr; the empty string where it succeeds."""
        code = f"import doctor; doctor.add_missing('{OURS}[all]')"
        where = self.env | {"PYTHONPATH": str(ROOT / "companion")}  # one file that needs nothing else
        done = subprocess.run([self.python, "-c", code], env=where, capture_output=True, text=True)
        assert bool(done.returncode) == bool(done.stderr), done.stderr
        return done.stderr

    def versions(self) -> dict[str, str]:
        command = [self.python, "-m", "pip", "list", "--format=json", "--disable-pip-version-check"]
        done = subprocess.run(command, check=True, env=self.env, capture_output=True, text=True)
        return {row["name"]: row["version"] for row in json.loads(done.stdout) if row["name"] != "pip"}


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    made = Machine(tmp_path_factory.mktemp("machine"))
    for version in ("2.4.0", "2.11.0+cu128", "2.13.0"):
        wheel(made.wheels, "torch", version)
    wheel(made.wheels, "triton", "3.6.0", requires=("numpy<2.4",))
    wheel(made.wheels, "triton", "3.7.1")
    for name, version in (("numpy", "2.1.3"), ("numpy", "2.4.6"), ("tqdm", "4.1"), ("tqdm", "4.67")):
        wheel(made.wheels, name, version)
    wheel(made.wheels, "jaxtyping", "0.3.11")
    needs = ("torch>=2.6", "triton>=3.4", "numpy>=1.26", "jaxtyping>=0.3", "tqdm>=4.66")
    wheel(made.wheels, OURS, "0.1.0", requires=needs, extra="all")
    return made


@pytest.fixture
def having(machine):
    """Make the environment hold these packages, ours without what it needs, and nothing else."""

    def have(*packages: str) -> Machine:
        present = [name for name in machine.versions() if name not in ("setuptools", "wheel")]
        if present:
            machine.pip("uninstall", "--yes", *present)
        machine.pip("install", "--no-deps", OURS, *packages)
        return machine

    return have


def test_what_lacks_is_added_and_what_fits_stays(having):
    there = {"torch": "2.11.0+cu128", "triton": "3.6.0", "numpy": "2.1.3"}
    m = having(*(f"{n}=={v}" for n, v in there.items()), "tqdm==4.67")
    assert m.add_missing() == ""
    assert m.versions().items() >= (there | {"jaxtyping": "0.3.11", "tqdm": "4.67"}).items()


def test_where_triton_lacks_one_is_found_that_leaves_numpy(having):
    m = having("torch==2.11.0+cu128", "numpy==2.4.6", "tqdm==4.67")
    assert m.add_missing() == ""
    assert m.versions().items() >= {"torch": "2.11.0+cu128", "numpy": "2.4.6", "triton": "3.7.1"}.items()


def test_another_package_that_is_too_old_is_renewed(having):
    m = having("torch==2.11.0+cu128", "triton==3.6.0", "numpy==2.1.3", "tqdm==4.1")
    assert m.add_missing() == ""
    assert m.versions()["tqdm"] == "4.67" and m.versions()["torch"] == "2.11.0+cu128"


def test_a_torch_that_is_too_old_is_left_and_named(having):
    m = having("torch==2.4.0", "triton==3.6.0", "numpy==2.1.3")
    before = m.versions()
    said = m.add_missing()
    assert "RuntimeError: pip could not add" in said and "torch==2.4.0" in said, said
    assert m.versions() == before


def test_on_an_empty_machine_everything_comes(having):
    m = having()
    assert m.add_missing() == ""
    assert {"torch", "triton", "numpy", "jaxtyping", "tqdm"} <= set(m.versions())

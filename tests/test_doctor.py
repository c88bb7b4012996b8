"""`companion doctor`: what is found, and the advice that follows from it, on machines that are made up."""

import json
import os
import platform
import shlex
import subprocess
import sys
import tomllib

import pytest
import torch

from companion import doctor
from companion.cli import main


def test_this_machine():
    found = doctor.report()
    assert list(found) == ["machine", "packages", "torch sees", "what will run"]
    assert all(isinstance(v, str) and v and "\n" not in v for rows in found.values() for v in rows.values())
    assert found["machine"]["python"] == platform.python_version()
    assert found["machine"]["cores"] == str(os.cpu_count())
    assert found["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert found["what will run"]["companion size"] == "yes"
    assert found["what will run"]["companion generate"] == "yes"
    assert found["torch sees"]["threads"] == str(torch.get_num_threads())


def test_memory_is_that_of_the_kernel():
    with open("/proc/meminfo") as f:
        total = int(f.readline().split()[1]) * 1024
    text = doctor.report()["machine"]["memory"]
    assert text == f"{total / 2**30:.1f} GiB ({total / 1e9:.1f} GB)"


def test_as_text_and_as_json(capsys):
    assert main(["doctor"]) == 0
    text, err = capsys.readouterr()
    assert err == ""
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for section, rows in found.items():
        assert f"{section}\n" in text
        for name, value in rows.items():
            assert any(line.split() == [*name.split(), *value.split()] for line in text.splitlines())


def a_gpu(monkeypatch, capability, name="NVIDIA Test"):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *a: capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *a, **k: True)  # as a T4 says of itself
    properties = type("P", (), {"name": name, "major": capability[0], "minor": capability[1]})
    properties.total_memory = 16 * 2**30
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: properties)


@pytest.mark.parametrize(
    "capability, dtype",
    [
        ((7, 5), "float16"),
        ((7, 0), "float16"),
        ((8, 0), "bfloat16"),
        ((9, 0), "bfloat16"),
        ((12, 0), "bfloat16"),
    ],
)
def test_tr_13_the_dtype_follows_the_capability(monkeypatch, capability, dtype):
    a_gpu(monkeypatch, capability)
    found = doctor.report()
    assert found["what will run"]["dtype to use"].startswith(dtype)
    major, minor = capability
    assert found["torch sees"]["cuda:0"] == f"NVIDIA Test, capability {major}.{minor}, 16.0 GiB"
    assert "cuda" in found["torch sees"]["devices"]


@pytest.mark.parametrize(
    "capability, said",
    [
        ((7, 5), "timed in float16 (no bfloat16 below capability 8.0)"),
        ((8, 9), "timed in bfloat16 (native from capability 8.0)"),
    ],
)
def test_placement_on_a_gpu(monkeypatch, capability, said):
    a_gpu(monkeypatch, capability, "Tesla Test")
    model, kernels = doctor.placement().splitlines()
    assert model == "Model: cpu, float32, so that its numbers are the same on every machine."
    assert kernels == f"Kernels: cuda, Tesla Test, 16.0 GiB, {said}."


def test_placement_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "in Triton's interpreter, float32, because torch sees no GPU" in doctor.placement()
    without(monkeypatch, "triton")
    assert doctor.placement().endswith("Kernels: no: triton is not installed.")
    a_gpu(monkeypatch, (9, 0))
    assert doctor.placement().endswith("Kernels: no: triton is not installed.")
    without(monkeypatch, "torch")
    assert doctor.placement() == "Nothing that needs torch will run: torch is not installed."


def test_placement_leaves_the_choice_of_the_interpreter():
    code = """import sys
import companion.doctor
companion.doctor.placement()
assert "triton" not in sys.modules and "torch" in sys.modules
from companion.kernels import interpret, interpreted
interpret()
import triton
assert interpreted()"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def without(monkeypatch, *names):
    find = doctor.importlib.util.find_spec
    monkeypatch.setattr(
        doctor.importlib.util, "find_spec", lambda name, *rest: None if name in names else find(name, *rest)
    )


def test_without_torch(monkeypatch):
    without(monkeypatch, "torch")
    found = doctor.report()
    assert found["torch sees"] == {"devices": "torch is not installed"}
    rows = found["what will run"]
    assert rows["companion size"] == "yes" and "dtype to use" not in rows
    assert (
        rows["companion generate"].startswith("no:")
        and "what-a-token-costs[model]" in rows["companion generate"]
    )
    assert rows["Triton kernels"].startswith("no:")


def test_without_the_rest(monkeypatch):
    without(monkeypatch, "tokenizers", "matplotlib", "triton")
    rows = doctor.report()["what will run"]
    assert rows["companion generate"].startswith("no:")
    assert "what-a-token-costs[figures]" in rows["figures"]
    assert rows["Triton kernels"] == "no: triton is not installed"


@pytest.mark.parametrize("platform_name", ["darwin", "win32"])
def test_triton_exists_on_linux_only(monkeypatch, platform_name):
    monkeypatch.setattr(doctor.sys, "platform", platform_name)
    assert doctor.report()["what will run"]["Triton kernels"] == "no: Triton exists on Linux only"


def test_packages_that_are_not_there(monkeypatch):
    def missing(name):
        raise doctor.PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version", missing)
    assert set(doctor.report()["packages"].values()) == {"not installed"}


@pytest.fixture
def pip(monkeypatch):
    """What would be asked of pip: the command and the constraints, and the answer to give."""
    asked = {"returncode": 0, "stderr": ""}

    def run(command, **how):
        asked["command"] = command
        with open(command[command.index("-c") + 1]) as f:
            asked["constraints"] = f.read().split()
        return subprocess.CompletedProcess(command, asked["returncode"], "", asked["stderr"])

    monkeypatch.setattr(doctor.subprocess, "run", run)
    return asked


def test_what_is_missing_is_added_beside_what_must_stay(pip):
    doctor.add_missing()
    assert pip["command"][:4] == [sys.executable, "-m", "pip", "install"]
    assert pip["command"][-1] == "what-a-token-costs[model,kernels,figures]"
    assert "--upgrade" not in pip["command"]
    kept = {name: doctor.version(name) for name in ("torch", "triton", "numpy")}
    assert pip["constraints"] == [f"{name}=={v}" for name, v in kept.items()]


def test_what_is_not_there_is_not_held(pip, monkeypatch):
    find = doctor.version

    def found(name):
        if name == "triton":
            raise doctor.PackageNotFoundError(name)
        return find(name)

    monkeypatch.setattr(doctor, "version", found)
    doctor.add_missing()
    assert [c.split("==")[0] for c in pip["constraints"]] == ["torch", "numpy"]


def test_a_refusal_of_pip_is_passed_on(pip):
    pip["returncode"], pip["stderr"] = 1, "ERROR: Cannot install torch>=2.6 and torch==2.4\n"
    with pytest.raises(RuntimeError, match=r"needs: ERROR: Cannot install torch>=2.6 and torch==2.4$"):
        doctor.add_missing()


def test_another_package_of_our_name_is_noticed(monkeypatch, capsys):
    both = {"companion": ["what-a-token-costs", "companion"], "torch": ["torch"]}
    monkeypatch.setattr(doctor, "packages_distributions", lambda: both)
    assert doctor.foreign() == ["companion"]
    said = doctor.report()["packages"]["companion"]
    assert "uninstall" in said and "what-a-token-costs" in said
    assert said in doctor.placement()
    assert main(["doctor"]) == 0 and said in capsys.readouterr().out


def test_our_own_package_is_no_other():
    assert doctor.foreign() == [] and "companion" not in doctor.report()["packages"]


def test_a_hint_names_a_command_that_works_before_there_is_a_release():
    import companion
    from tools import address

    command = companion.install_command("cpu")
    assert shlex.split(command)[:-1] == ["python", "-m", "pip", "install"]
    assert shlex.split(command)[-1] == f"what-a-token-costs[cpu] @ git+{address.repository()}"
    for name in ("model", "figures", "cpu"):
        assert (
            name
            in tomllib.loads((address.ROOT / "pyproject.toml").read_text())["project"][
                "optional-dependencies"
            ]
        )

"""What the check of a Colab-like environment reads, and what it refuses; `make colab` is the check itself."""

import subprocess

import pytest

from tools import colab_check
from tools.colab_check import KEPT, LIST, Environment, Problem, current, first_cells, main, pins, python
from tools.notebooks import ROOT, names

PINS = pins(LIST.read_text(encoding="utf-8"))


def test_the_list_has_what_the_first_cell_must_leave():
    assert set(KEPT) <= set(PINS) and len(PINS) > 30
    lines = [x for x in LIST.read_text().splitlines() if x and not x.startswith("#")]
    assert len(lines) == len(PINS), "a line that is no pin"
    assert "jaxtyping" not in PINS  # Colab has none, so that the first cell has something to add


def test_a_list_of_colab_is_read():
    listed = pins(
        "# comment\ntorch==2.11.0+cu128\nJinja2==3.1.6\nhf_xet==1.5.0\nx @ file:///y\nscipy==1.16.3\n"
    )
    assert listed == {"torch": "2.11.0", "jinja2": "3.1.6", "hf-xet": "1.5.0", "scipy": "1.16.3"}
    there = "torch==2.12.0+cu130\nnumpy==2.2.0\nscipy==1.0\n"
    assert current(there, {"torch": "2.11.0", "triton": "3.6.0", "numpy": "2.1.3"}) == {
        "torch": "2.12.0",
        "numpy": "2.2.0",
    }


def test_without_such_a_python_it_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Problem, match="none of python3.13, python3.12 is here; name one with --python"):
        python(None)
    assert main(["--folder", str(tmp_path / "venv")]) == 1
    assert "is here" in capsys.readouterr().err and not (tmp_path / "venv").exists()


@pytest.mark.parametrize("arguments, said", [(["--newest", "scipy"], "scipy"), (["99_none"], "99_none")])
def test_what_is_not_known_is_named(arguments, said, capsys):
    assert main(arguments) == 1
    assert said in capsys.readouterr().err


class Pretended(Environment):
    """An environment that is a dict of versions; a cell installs into it what it is told to."""

    def __init__(self, adds, says="Model: cpu\nKernels: cpu"):
        self.has = {"torch": "2.11.0", "triton": "3.6.0", "numpy": "2.1.3"}
        self.adds, self.says, self.cut = adds, says, []

    def pip(self, command, *arguments):
        for name in arguments:
            if command == "uninstall":
                self.has.pop(name, None)
            elif "==" in name:
                self.has.update([name.split("==")])

    def versions(self):
        return dict(self.has)

    def first_cell(self, name, cwd, **variables):
        if "PIP_NO_INDEX" in variables:
            self.cut.append(name)
        else:
            assert variables["GIT_CONFIG_VALUE_0"].startswith("https://github.com/")
            for added, version in self.adds.items():
                if added not in self.has or version != "new":
                    self.has[added] = version
        return self.says


def test_a_cell_that_only_adds_passes(tmp_path):
    env = Pretended({"what-a-token-costs": "0.1.0", "jaxtyping": "0.3.11", "triton": "new"})
    first_cells(env, tmp_path)
    assert env.cut == names() and env.has["triton"] == "3.6.0"


@pytest.mark.parametrize("package", KEPT)
def test_a_cell_that_changes_something_fails(tmp_path, package):
    with pytest.raises(Problem, match=rf"changed what was installed: .*{package}"):
        first_cells(Pretended({"what-a-token-costs": "0.1.0", package: "9.9"}), tmp_path)


def test_a_cell_that_does_not_say_where_it_runs_fails(tmp_path):
    with pytest.raises(Problem, match="does not say where it runs"):
        first_cells(Pretended({"triton": "new"}, says="hello"), tmp_path)


def test_a_cell_that_leaves_triton_missing_fails(tmp_path):
    with pytest.raises(Problem, match="did not add triton"):
        first_cells(Pretended({"what-a-token-costs": "0.1.0"}), tmp_path)


def test_the_address_leads_to_a_copy_of_this_tree(tmp_path):
    there = colab_check.repository(tmp_path / "repository")
    assert there["GIT_CONFIG_KEY_0"] == f"url.file://{tmp_path / 'repository'}.insteadOf"
    kept = subprocess.run(["git", "-C", tmp_path / "repository", "ls-files"], capture_output=True, text=True)
    assert {"pyproject.toml", "companion/doctor.py", "notebooks/04_kv_cache.md"} <= set(kept.stdout.split())
    assert (tmp_path / "repository/companion/doctor.py").read_text() == (
        ROOT / "companion/doctor.py"
    ).read_text()

"""The workflows: valid by the schema, and every command in them exists here and means what it should."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib

import pytest
import yaml

from companion.cli import parser
from tools import address
from tools.address import ROOT

FOLDER = ROOT / ".github" / "workflows"
NAMES = sorted(p.name for p in FOLDER.glob("*.yml"))
# Major versions that run on Node 24, as hosted runners do since September 2026.
ACTIONS = {
    "actions/checkout@v6",
    "actions/setup-python@v6",
    "actions/upload-artifact@v7",
    "actions/upload-pages-artifact@v5",
    "actions/deploy-pages@v5",
    "actions/download-artifact@v7",
    "pypa/gh-action-pypi-publish@release/v1",
}
RIGHTS = {"pages.yml": {"pages": "write", "id-token": "write"}, "release.yml": {"id-token": "write"}}
PARTS = ("lint", "unit", "kernels", "notebooks", "site")


def workflow(name: str) -> dict:
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


def steps(name: str) -> list[dict]:
    return [s for job in workflow(name)["jobs"].values() for s in job["steps"]]


def commands(name: str) -> list[str]:
    """Every command of a workflow; of a line with &&, each part."""
    lines = [line for s in steps(name) if "run" in s for line in s["run"].splitlines()]
    return [part.strip() for line in lines for part in line.split("&&")]


COMMANDS = [(name, command) for name in NAMES for command in commands(name)]


def schema(kind: str, *files) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", kind, *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True)


def test_there_is_one_for_each_purpose():
    assert NAMES == ["canary.yml", "gpu.yml", "links.yml", "pages.yml", "release.yml", "test.yml"]


def test_they_are_valid():
    done = schema("vendor.github-workflows", *(FOLDER / n for n in NAMES))
    assert done.returncode == 0, done.stdout
    done = schema("custom.github-workflows-require-timeout", *(FOLDER / n for n in NAMES))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "old, new",
    [
        ("runs-on: ubuntu-latest", "run-on: ubuntu-latest"),
        ("      - run: make links", "      - runs: make links"),
        ("  workflow_dispatch:", "  on_demand:"),
        ("    timeout-minutes: 30", "    timeout-minutes: half an hour"),
    ],
)
def test_the_schema_refuses_a_mistake(tmp_path, old, new):
    text = (FOLDER / "links.yml").read_text()
    assert old in text
    (tmp_path / "links.yml").write_text(text.replace(old, new))
    assert schema("vendor.github-workflows", tmp_path / "links.yml").returncode == 1


def test_the_citation_is_valid():
    done = schema("vendor.citation-file-format", ROOT / "CITATION.cff")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_actions_are_known_and_rights_are_few(name):
    assert {s["uses"] for s in steps(name) if "uses" in s} <= ACTIONS
    assert workflow(name)["permissions"] == {"contents": "read"}
    rights = {k: v for job in workflow(name)["jobs"].values() for k, v in job.get("permissions", {}).items()}
    assert rights == RIGHTS.get(name, {})


@pytest.mark.parametrize("name, command", COMMANDS, ids=[f"{n}: {c[:50]}" for n, c in COMMANDS])
def test_every_command_exists_here(name, command):
    command = re.sub(r"\$\{\{ *matrix\.(\w+) *\}\}", "torch", command)
    assert "${{" not in command, "an expression in a command is read by the shell"
    assert subprocess.run(["bash", "-n", "-c", command]).returncode == 0
    program, *arguments = shlex.split(command.split(" > ")[0])
    if program == "make":
        done = subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    elif program.endswith("companion"):
        parser().parse_args(arguments)
    elif program.endswith("python") and arguments[:2] == ["-m", "pytest"]:
        done = subprocess.run([sys.executable, *arguments, "--collect-only"], cwd=ROOT, capture_output=True)
        assert done.returncode != pytest.ExitCode.USAGE_ERROR, (
            done.stderr
        )  # an option or a path it does not know
    elif program.endswith("python") and arguments[:2] == ["-m", "pip"]:
        assert arguments[2:4] == ["install", "--upgrade"]
    elif program.endswith("python") and arguments[0] == "-m":
        done = subprocess.run([sys.executable, "-m", arguments[1], "--help"], cwd=ROOT, capture_output=True)
        assert done.returncode == 0
    elif program.endswith("python") and arguments[0] == "-c":
        compile(arguments[1], name, "exec")
    else:
        assert program in ("echo", "mkdir") or os.access(ROOT / program, os.X_OK)


def test_every_python_of_the_package_is_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    matrix = workflow("test.yml")["jobs"]["test"]["strategy"]["matrix"]
    assert matrix == {"python": named, "part": list(PARTS)}  # each part with each Python, side by side
    assert commands("test.yml") == ['.ci/run "$PART"']
    assert steps("test.yml")[-1]["env"] == {"PART": "${{ matrix.part }}"}


@pytest.fixture
def ci(tmp_path):
    """What `.ci/run` asks of make, on a machine that lacks nothing."""
    for name in ("make", "git", "python3", "chromium"):
        (tmp_path / name).write_text('#!/bin/sh\necho "$@"\n')
        (tmp_path / name).chmod(0o755)

    def run(*part: str) -> subprocess.CompletedProcess:
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        return subprocess.run([ROOT / ".ci" / "run", *part], env=env, capture_output=True, text=True)

    return run


def test_the_parts_together_are_what_make_test_does(ci):
    rule = re.search(r"^test: \$\(VENV\)/\.test (.*)$", (ROOT / "Makefile").read_text(), re.M)
    asked = [w for part in PARTS for w in ci(part).stdout.splitlines()[-1].split() if w != ".venv/.test"]
    assert sorted(asked) == sorted(rule[1].split())
    assert ci().stdout.splitlines()[-1].split()[-1] == "test"


def test_an_unknown_part_is_refused(ci):
    done = ci("units")
    assert done.returncode == 2 and "units" in done.stderr and "kernels" in done.stderr


def test_a_release_is_built_apart_from_where_it_may_publish():
    jobs = workflow("release.yml")["jobs"]
    assert workflow("release.yml")[True] == {"push": {"tags": ["v*"]}}  # YAML reads `on` as true
    assert "permissions" not in jobs["build"] and jobs["publish"]["needs"] == "build"
    assert not any("run" in s for s in jobs["publish"]["steps"])


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")), ids=lambda p: p.stem
)
def test_a_report_comes_with_what_the_doctor_says(path):
    done = schema("vendor.github-issue-forms", path)
    assert done.returncode == 0, done.stdout
    fields = {f["id"]: f for f in yaml.safe_load(path.read_text())["body"] if "id" in f}
    assert fields["doctor"]["validations"]["required"]
    assert "companion doctor" in fields["doctor"]["attributes"]["label"]


def test_publishing_takes_the_address_from_where_it_runs(tmp_path):
    before, build = commands("pages.yml")[:2]
    assert build == "make book"
    for path in address.paths():
        target = tmp_path / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    # The Python that the workflow calls has nothing installed: -S leaves the standard library.
    command = before.replace("python ", f"{sys.executable} -S ", 1)
    env = {"PATH": os.environ["PATH"], "GITHUB_REPOSITORY": "ada/another-book"}
    done = subprocess.run(["bash", "-ec", command], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert address.repository(tmp_path) == "https://github.com" + "/ada/another-book"
    assert address.check(tmp_path) == []


def test_notebooks_run_on_a_gpu_one_after_the_other_and_are_kept():
    jobs = workflow("gpu.yml")["jobs"]
    assert jobs["notebooks"]["runs-on"] == "${{ vars.GPU_RUNNER }}"
    assert jobs["notebooks"]["if"] == "${{ vars.GPU_RUNNER != '' }}"
    assert jobs["without-a-runner"]["if"] == "${{ vars.GPU_RUNNER == '' }}"
    run = [s["run"] for s in jobs["notebooks"]["steps"] if "run" in s]
    doctor, strict, bench = (
        next(i for i, r in enumerate(run) if w in r) for w in ("doctor", "--nbval", "bench")
    )
    assert doctor < strict < bench
    assert "-n " not in run[strict] and "lax" not in run[strict]
    keep = re.search(r"--nbval-keep (\S+)", run[strict])[1]
    upload = next(s for s in jobs["notebooks"]["steps"] if "upload-artifact" in s.get("uses", ""))
    assert keep.startswith(upload["with"]["path"]) and f"{upload['with']['path']}/bench.json" in run[bench]
    assert upload["if"] == "${{ !cancelled() }}"

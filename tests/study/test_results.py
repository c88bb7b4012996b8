"""The frozen text, and results that are stored and read."""

import json
import sys

import pytest

from companion import study as results
from companion.study import facts as frozen
from companion.study import store, stored, text


def test_the_text_is_the_one_that_was_measured_on():
    assert text().startswith("What happens to a token?") and 130_000 < len(text()) < 140_000
    assert "CC BY 4.0" in frozen.LICENCE


def test_a_text_with_one_changed_byte_is_refused(tmp_path, monkeypatch):
    raw = bytearray(frozen.PATH.read_bytes())
    raw[1000] ^= 1
    (tmp_path / "text.txt").write_bytes(raw)
    monkeypatch.setattr(frozen, "PATH", tmp_path / "text.txt")
    with pytest.raises(ValueError, match="text.txt has sha256"):
        frozen.text.__wrapped__()  # behind what is remembered


def test_the_text_is_prose():
    for line in text().splitlines():
        assert not line.startswith(("|", "```", "#", "<", ":tags")), line
        assert "](" not in line, line


def test_sixteen_chunks_fit(smollm2):
    _, tokenizer = smollm2
    assert len(tokenizer.encode(text())) >= 16 * 1536 + 1


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "FOLDER", tmp_path / "results")
    return tmp_path / "results"


def test_what_is_stored_comes_back_with_command_and_machine(folder, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/benchmarks/x.py", "--chunks", "3"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    path = store("x", {"kl": [0.1, 1e-9], "n": 2})
    back = stored("x")
    assert back["kl"] == [0.1, 1e-9] and back["n"] == 2
    assert back["command"] == "python x.py --chunks 3"
    assert back["machine"]["torch"] and "cores" in back["machine"]
    assert list(folder.iterdir()) == [path]  # nothing half-written is left


def test_a_module_is_named_as_it_was_started(folder, monkeypatch):
    class Spec:
        name = "benchmarks.quality_kv"

    monkeypatch.setattr(sys, "argv", ["/somewhere/benchmarks/quality_kv.py"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", Spec)
    store("y", {"machine": "mine"})
    assert stored("y") == {"command": "python -m benchmarks.quality_kv", "machine": "mine"}


def test_an_unknown_name_lists_the_known_ones(folder):
    with pytest.raises(ValueError, match="name must be one of .none., got 'b'"):
        stored("b")
    store("a", {"machine": 1})
    with pytest.raises(ValueError, match="must be one of a, got 'b'$"):
        stored("b")
    with pytest.raises(ValueError):
        stored("../results/a")


def test_what_json_can_not_hold_leaves_the_last_result(folder):
    store("a", {"machine": 1, "x": 1.0})
    for bad in ({"x": float("nan")}, {"x": object()}):
        with pytest.raises((ValueError, TypeError)):
            store("a", {"machine": 1} | bad)
    assert stored("a")["x"] == 1.0
    with pytest.raises(ValueError, match="name must be .*'a/b'"):
        store("a/b", {})


@pytest.mark.parametrize("path", sorted(results.FOLDER.glob("*.json")), ids=lambda p: p.stem)
def test_every_result_that_is_shipped_says_how_it_was_made(path):
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["command"].startswith("python -m benchmarks.") and found["machine"]
    assert "/work" not in path.read_text() and "/tmp" not in path.read_text()

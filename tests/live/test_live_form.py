"""What a page asks: from the fields of `Deployment` alone, and sent as it was written."""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from companion.cost import Deployment, models, size
from companion.cost.deployment import ask as asked
from companion.cost.deployment import bytes_of, options
from companion.live import cost

PACKAGE = Path(cost.__file__).resolve().parents[1]
ENGINE = "the engine, as assumptions"
CHIP = {"model": "phi-4", "hardware": "h100-sxm"}


def ask(op, **arguments):
    return json.loads(cost.live(json.dumps({"op": op, **arguments})))


def form(of):
    """The rows of a form by their names, those that are folded away behind the others."""
    result = ask("form", of=of)["result"]
    return {row["name"]: row for row in result["first"] + sum(result["more"].values(), [])}


def names(row):
    return [o["value"] if isinstance(o, dict) else o for o in row["options"]]


def test_the_bill_asks_all_of_a_deployment():
    rows = form("bill")
    assert sorted(rows) == sorted(f.name for f in fields(Deployment))
    more = ask("form", of="bill")["result"]["more"]
    groups = {row["name"]: group for group, rows in more.items() for row in rows}
    for field in options(Deployment):
        row, meta = rows[field.name], field.metadata
        assert (row["help"], row["unit"]) == (meta["means"], meta["unit"])
        assert groups.get(field.name, meta["group"]) == meta["group"]
        assert row["label"] and ("levels" in row) + ("options" in row) <= 1


@pytest.mark.parametrize("of", cost.FORMS)
def test_a_form_is_sent_as_it_stands_and_all_that_it_offers_is_accepted(of):
    rows = form(of)
    start = {name: row["value"] for name, row in rows.items()}
    points = {"contexts": [1]} if of == "bill" else {"batches": [1]}
    assert ask(of, **start, **points)["ok"]
    for name, row in rows.items():
        offered = row.get("levels", names(row) if "options" in row else [""])
        assert row["value"] in offered, name
        for value in offered:
            mixture = {"model": "qwen3-30b-a3b"} if name == "experts" else {}
            reply = ask(of, **{**start, **mixture, name: value}, **points)
            assert reply["ok"], (name, value, reply)


def test_a_part_starts_where_the_chapter_does():
    starts = {of: {k: row["value"] for k, row in form(of).items() if row["value"] != ""} for of in cost.FORMS}
    assert starts["bill"] == {
        "model": "llama-3.1-70b", "hardware": "h100-sxm", "devices": "8", "batch": 8, "context": 32768,
        "weights": "bf16", "kv": "bf16",
    }  # fmt: skip
    assert starts["roofline"]["context"] == 8192 and starts["roofline"]["batch"] == 32
    assert starts["experts"]["experts"] == "bf16" and starts["experts"]["batch"] == 64
    assert names(form("experts")["model"]) == [name for name, m in models.items() if m.moe]


# What a reader writes into a field, and the value that `size` takes for it.
WRITTEN = {
    "weights_bytes": ("12GB", 12 * 10**9),
    "experts": ("mxfp4", "mxfp4"),
    "tensor": ("2", 2),
    "expert": ("4", 4),
    "kv_sharding": ("batch", "batch"),
    "link_bandwidth": ("450GB/s", 450e9),
    "link_latency": ("0.001", 0.001),
    "block_size": ("32", 32),
    "pages": ("grouped", "grouped"),
    "step_tokens": ("2048", 2048),
    "activation_bytes": ("1GiB", 2**30),
    "overhead_bytes": ("2 GB", 2 * 10**9),
    "overhead_seconds": ("0.002", 0.002),
    "efficiency": ("0.5", 0.5),
    "compute_dtype": ("fp8", "fp8"),
}


@pytest.mark.parametrize("name", [row["name"] for rows in cost.form("bill")["more"].values() for row in rows])
def test_what_is_written_is_what_size_takes(name):
    text, value = WRITTEN[name]
    with_it = {"link_latency": {"link_bandwidth": 1e9}, "expert": {"tensor": 1}}.get(name, {})
    where = dict(model="qwen3-30b-a3b", hardware="h200-sxm", batch=8, context=20_000, **with_it)
    reply = ask("bill", contexts=[], **where, **{name: text})
    assert reply["ok"], reply
    answer = size(**where, **{name: value}).to_dict()
    assert reply["result"]["sizing"] == answer
    alone = name in ("kv_sharding", "link_bandwidth", "link_latency", "pages", "step_tokens")  # on one device
    assert alone or answer != size(**where).to_dict()


@pytest.mark.parametrize(
    "name, text, need",
    [
        ("tensor", "two", "a whole number"),
        ("batch", "1.5", "a whole number"),
        ("efficiency", "half", "a number"),
        ("efficiency", "2", "at most 1"),
        ("link_bandwidth", "4 parsec", "900GB/s"),
        ("overhead_bytes", "1.5", "whole number of bytes"),
        ("compute_dtype", "int3", "bf16"),
        ("kv", "fp5", "kivi4"),
        ("pages", "loose", "grouped"),
    ],
)
def test_what_makes_no_sense_is_named(name, text, need):
    reply = ask("bill", **CHIP, contexts=[], **{name: text})
    assert not reply["ok"] and all(word in reply["error"] for word in (name, text, need)), reply


def test_a_form_is_of_something():
    reply = ask("form", of="size")
    assert not reply["ok"] and "of must be one of bill, roofline, experts" in reply["error"]


def test_a_new_field_is_asked_without_another_line(monkeypatch):
    @dataclass(frozen=True)
    class Wider(Deployment):
        spare_bytes: int = asked(0, "kept free", group=ENGINE, read=bytes_of, unit="BYTES")
        mood: str = asked("calm", "of the day", group="weather", read=str, choices=("calm", "wild"))

    before = form("bill")
    monkeypatch.setattr(cost, "Deployment", Wider)
    more = ask("form", of="bill")["result"]["more"]
    row = {"name": "spare_bytes", "label": "Spare bytes", "help": "kept free", "unit": "BYTES", "value": ""}
    assert more[ENGINE][-1] == row | {"empty": "bytes, default 0"}
    assert names(more["weather"][0]) == ["", "wild"] and more["weather"][0]["value"] == ""
    assert set(form("bill")) - set(before) == {"spare_bytes", "mood"}
    assert list(form("roofline")) == ["model", "hardware", "batch", "context", "weights", "kv"]


FIELD = """    spare_bytes: int = ask(
        0, "kept free, per device", group=_ENGINE, check=_count(0), **_BYTES
    )

    def __post_init__"""
ASKED = """
import json, sys
from companion.live.cost import live
from companion.cli import main
bill = {"op": "bill", "model": "phi-4", "hardware": "h100-sxm", "contexts": [], "spare_bytes": sys.argv[1]}
print(json.dumps([json.loads(live(json.dumps(r))) for r in ({"op": "form", "of": "bill"}, bill)]))
main(["size", "phi-4", "--hardware", "h100-sxm", "--spare-bytes", sys.argv[1], "--json"])
"""


def test_an_option_of_size_takes_two_files(tmp_path):
    """As book/extending.md says: the field, and its use; the command and the page then have it."""
    shutil.copytree(PACKAGE, tmp_path / "companion", ignore=shutil.ignore_patterns("__pycache__"))
    changes = {
        "cost/deployment.py": ("\n    def __post_init__", f"\n{FIELD}"),
        "cost/sizing.py": ("ask.overhead_bytes + ask.act", "ask.overhead_bytes + ask.spare_bytes + ask.act"),
    }
    for file, (old, new) in changes.items():
        path = tmp_path / "companion" / file
        text = path.read_text()
        assert text.count(old) == 1
        path.write_text(text.replace(old, new))
    done = subprocess.run(
        [sys.executable, "-c", ASKED, "7GB"], cwd=tmp_path, capture_output=True, text=True,
        env={"PYTHONPATH": str(tmp_path), "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (page, bill), command = json.JSONDecoder().raw_decode(done.stdout)[0], done.stdout.split("\n", 1)[1]
    assert "spare_bytes" in [row["name"] for row in page["result"]["more"][ENGINE]]
    room = size("phi-4", "h100-sxm").cache_room_bytes - 7 * 10**9
    assert bill["result"]["sizing"]["cache_room_bytes"] == json.loads(command)["cache_room_bytes"] == room

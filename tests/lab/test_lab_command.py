"""`companion lab` from its arguments to its files, with a made-up machine and a scripted server."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
from made_up import HERE, SPEC, MadeUpTarget, WritingServer
from scripted import ScriptedClock, ScriptedTransport, refusal

from companion.cost import decode_step
from companion.lab import command
from companion.lab import local as here
from companion.lab.points import CPU, GPU, LOCAL, SERVER, chosen, plan
from companion.lab.probes import Probe, peak_bandwidth
from companion.lab.studies import read


def run(*argv):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args([*argv]))


@pytest.fixture
def local(monkeypatch, tmp_path):
    """This machine made up: the target and the probes; the list grows by each sweep's target."""
    import companion.model
    from companion.lab import probes

    made = []

    def targets(decoder):
        def target(name):
            made.append(MadeUpTarget(**options))
            return made[-1]

        return target

    class Loaded:
        spec = SPEC

    options = {}
    monkeypatch.setattr(companion.model, "load", lambda *a, **k: (Loaded(), None))
    monkeypatch.setattr(here, "targets_here", targets)
    rates = [Probe("read", "fp32", HERE.bandwidth, 1e9, 1e9, 1), Probe("matmul", "fp32", 100e9, 1e9, 1e9, 1)]
    monkeypatch.setattr(probes, "probe", lambda *a, **k: rates)
    monkeypatch.chdir(tmp_path)
    made.append(options)
    return made


@pytest.fixture
def server(monkeypatch, tmp_path):
    """serve(*answers) puts a scripted server at the other end of every endpoint; returns its transport."""
    from companion.lab import client

    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)

    def serve(*answers):
        clock = ScriptedClock()
        transport = ScriptedTransport(clock, *answers)
        monkeypatch.setattr(client, "SystemClock", lambda: clock)
        monkeypatch.setattr(client, "HTTPTransport", lambda parts: transport)
        return transport

    return serve


def test_this_machine(local, tmp_path, capsys):
    assert run("--rounds", "4") == 0
    out = capsys.readouterr().out
    assert out.count("  holds here") == 6 and "context: 24 of 24 runs" in out and out.endswith("lab.html\n")
    assert out.count("does not hold here   Batch 16") == 1 and "predicted 0.594" in out  # beyond the ridge
    data = read("lab.json")
    assert data["hardware"] == {"name": "this machine", "bandwidth": 20e9, "flops": {"fp32": 100e9}}
    assert data["machine"]["cores"] and len(data["probes"]) == 2
    assert "Each cached token" in (tmp_path / "lab.html").read_text(encoding="utf-8")


def test_an_interruption_is_gone_on_with(local, tmp_path, capsys):
    local[0]["interrupt"] = 5
    with pytest.raises(KeyboardInterrupt):
        run("--sweeps", "context")
    assert "keeps all runs" in capsys.readouterr().err and (tmp_path / "lab.html").exists()
    assert len(read("lab.json")["sweeps"]["context"]["runs"]) == 5
    del local[0]["interrupt"]
    assert run("--sweeps", "context") == 0
    assert len(local[-1].measured) == 18 - 5 and "going on with lab.json" in capsys.readouterr().err


@pytest.mark.parametrize("bad", [2, 3])
def test_disturbed_probes_are_taken_again(local, monkeypatch, bad):
    """Twice refused and then taken; the third refusal is the last, and no file remembers it as a rate."""
    from companion.lab import probes

    good = probes.probe()
    refused = [Probe("read", "fp32", None, 1e9, 1e9, 1, [], "it still falls"), good[1]]
    answers = [refused] * bad + [good]
    monkeypatch.setattr(probes, "probe", lambda *a, **k: answers.pop(0))
    if bad == 3:
        with pytest.raises(ValueError, match="it still falls; or name the device with --hardware"):
            run("--sweeps", "batch")
        assert not Path("lab.json").exists()
    else:
        assert run("--sweeps", "batch") == 0 and read("lab.json")["hardware"]["bandwidth"] == 20e9


def test_more_rounds_are_added(local, capsys):
    run("--sweeps", "context", "--rounds", "2")
    before = read("lab.json")["sweeps"]["context"]
    run("--sweeps", "context", "--rounds", "3", "--contexts", "64,256,512,1024,2048,4096,8000")
    after = read("lab.json")["sweeps"]["context"]
    assert len(before["runs"]) == 12 and len(after["runs"]) == 12 + 6 + 3
    assert {k: after["runs"][k] for k in before["runs"]} == before["runs"]
    assert {k: after["predicted"][k] for k in before["predicted"]} == before["predicted"]
    assert after["predicted_at"] == before["predicted_at"]


def test_the_same_again_measures_nothing(local):
    run("--sweeps", "context")
    run("--sweeps", "context", "--rounds", "2")
    assert local[-1].measured == []


def test_json(local, capsys):
    assert run("--sweeps", "batch", "--json", "--out", "mine") == 0
    told = json.loads(capsys.readouterr().out)
    assert {*told} == {"version", "sweeps", "study", "report"} and told["version"] == 1
    assert {*told["sweeps"]["batch"]} >= {"fits", "verdicts", "table", "planned", "measured"}
    assert run("--report", "mine.json", "--json") == 0 and json.loads(capsys.readouterr().out) == told
    assert told["study"] == "mine.json" and told["sweeps"]["batch"]["verdicts"][0]["outcome"]


def test_nothing_measured_is_an_error(local, capsys):
    local[0]["faults"] = ["all"]
    assert run("--sweeps", "context") == 1
    assert "companion lab: context: it broke" in capsys.readouterr().err


def test_a_page_is_made_again(local, tmp_path, capsys):
    run("--sweeps", "batch")
    page = (tmp_path / "lab.html").read_text(encoding="utf-8")
    (tmp_path / "lab.html").unlink()
    capsys.readouterr()
    assert run("--report", "lab.json") == 0 and capsys.readouterr().out == "lab.html\n"
    assert (tmp_path / "lab.html").read_text(encoding="utf-8") == page


def test_an_endpoint(server, capsys):
    transport = server(WritingServer())
    assert run("--endpoint", "h:1", "--sweeps", "all", "--spec", "smollm2-135m", "--hardware", "t4") == 0
    out = capsys.readouterr().out
    assert "context: 15 of 15" in out and "batch: 12 of 12" in out and "prefix: 6 of 6" in out
    data = read("lab.json")
    assert data["target"]["url"] == "http://h:1/v1" and data["target"]["model"] == "m"
    assert data["hardware"]["name"] == "t4" and transport.most_open <= 8


def test_formats_may_be_bits(server):
    server(WritingServer())
    argv = ("--endpoint", "h:1", "--spec", "smollm2-135m", "--hardware", "t4", "--sweeps", "batch")
    run(*argv, "--weights", "5", "--kv", "fp16")
    told = read("lab.json")["sweeps"]["batch"]["predicted"]["base/n64/b1"]
    assert told["itl_s"] == decode_step(SPEC, "t4", 1, 68, weights=5, kv="fp16").seconds


def test_a_resumed_session_asks_in_other_words(server):
    """The server may have kept what it was asked before the interruption."""
    first = server(WritingServer())
    run("--endpoint", "h:1", "--sweeps", "context", "--rounds", "1")
    second = server(WritingServer())
    run("--endpoint", "h:1", "--sweeps", "context", "--rounds", "2")
    starts = [{b["messages"][0]["content"][:16] for b in t.bodies if b} for t in (first, second)]
    assert len(starts[0]) == len(starts[1]) == 7 and not starts[0] & starts[1]


def test_the_key_is_in_no_file(server, monkeypatch, tmp_path, capsys):
    server(WritingServer())
    monkeypatch.setenv("MY_KEY", "sk-secret-1")
    run("--endpoint", "h:1", "--sweeps", "context", "--key-env", "MY_KEY")
    everything = "".join(p.read_text(encoding="utf-8") for p in tmp_path.iterdir())
    assert "sk-secret-1" not in everything + "".join(capsys.readouterr())


@pytest.mark.parametrize(
    "answer, argv, says",
    [
        (refusal(401, "bad key"), (), "the key was refused, status 401: bad key"),
        (WritingServer(models=("other", "more")), ("--model", "othr"), "it lists other"),
        (WritingServer(models=("a", "b")), (), "leaves no choice"),
        (WritingServer(), ("--extra", "[1]"), "extra must be a JSON object"),
        (WritingServer(), ("--spec", "lama-3.1-8b"), "near: llama-3.1-8b"),
        (WritingServer(), ("--hardware", "h100"), "near: h100"),
        (WritingServer(), ("--sweeps", "kv"), "sweeps: 'kv' is none here; accepted: context, batch, prefix"),
        (WritingServer(), ("--rounds", "0"), "rounds must be a positive integer, got 0"),
        (WritingServer(), ("--contexts", "1,x"), "contexts must be whole numbers"),
        (WritingServer(), ("--batches", ""), "batches must be whole numbers"),
        (WritingServer(), ("--sweeps", " ,"), "sweeps: none named in ' ,'; accepted: context, batch"),
        (WritingServer(), ("--spec", "smollm2-135m", "--weights", "0"), "weights: bits per value"),
        (WritingServer(), ("--spec", "smollm2-135m", "--kv", "int9"), "kv must be one of"),
        (WritingServer(), ("--out", "nowhere/lab"), "there is no folder nowhere"),
        (WritingServer(), ("--out", ""), "out must be the name of a file"),
        (WritingServer(), ("--transformers", "x"), "transformers and endpoint each name"),
        (refusal(400, "too warm"), ("--model", "m"), "the request was refused, status 400"),
    ],
)
def test_one_clear_line(server, tmp_path, answer, argv, says):
    server(answer)
    with pytest.raises(ValueError, match=says) as e:
        run("--endpoint", "h:1", *argv)
    assert "\n" not in str(e.value)
    assert list(tmp_path.iterdir()) == []  # or the mended command would be told of other settings


def test_a_warm_up_that_fails_leaves_nothing_and_what_was_measured_stays(server, tmp_path):
    broken = [WritingServer().answer("GET", None), refusal(400, "too warm")]
    for before in (0, 15):
        if before:
            server(WritingServer())
            run("--endpoint", "h:1", "--sweeps", "context")
        server(*broken)
        with pytest.raises(ValueError, match="too warm"):
            run("--endpoint", "h:1", "--sweeps", "context", "--rounds", "4")
        names = sorted(p.name for p in tmp_path.iterdir())
        assert names == (["lab.html", "lab.json"] if before else [])
    assert len(read("lab.json")["sweeps"]["context"]["runs"]) == 15


def test_a_name_may_end_in_json(server, capsys):
    server(WritingServer())
    assert run("--endpoint", "h:1", "--sweeps", "batch", "--out", "mine.json") == 0
    assert capsys.readouterr().out.endswith("mine.json\nmine.html\n")


def test_help_has_examples_that_parse():
    """Each line of the examples is a command with arguments that there are; exit codes are told."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    lines = [line.split("  ")[0] for line in map(str.strip, parser.epilog.splitlines())]
    examples = [line.split()[2:] for line in lines if line.startswith("companion lab")]
    assert len(examples) >= 6 and "Exit codes: 0 measured" in parser.format_help()
    for argv in examples:
        parser.parse_args(argv)


def test_the_sizes_fit_the_model():
    small = GPU.within(2048, 8)
    assert small.contexts == (256, 1024) and small.long == 2040 and small.short == 128
    assert CPU.within(None, 8) == CPU and SERVER.within(16, 8).contexts == (8,)


@pytest.mark.parametrize("name", LOCAL)
def test_a_plan_for_every_sweep(name):
    points = plan(name, CPU, rounds=2, new_tokens=4, seed=1)
    assert {p.sweep for p in points} == {name} and len({p.id for p in points}) == len(points)


def test_sweeps_are_chosen_in_order():
    assert chosen("prefix, context", LOCAL) == ["context", "prefix"] and chosen("all", LOCAL) == [*LOCAL]
    assert chosen(None, LOCAL) == ["context", "batch"]


def test_the_peak_of_a_gpu_is_looked_up():
    assert peak_bandwidth("NVIDIA H200") == pytest.approx(4.8e12, rel=0.01)
    assert peak_bandwidth("Tesla T4") == 320e9
    assert peak_bandwidth("Some New GPU") is None


def test_the_client_needs_neither_torch_nor_numpy():
    code = (
        "import companion.lab as lab, sys; lab.Endpoint, lab.sweep, lab.report, lab.EndpointTarget; "
        "import companion.lab.command; print({'torch', 'numpy', 'httpx', 'matplotlib'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr

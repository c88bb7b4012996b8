"""The doors: JSON for a page, the command line, and imports that cost nothing."""

import argparse
import inspect
import json
import subprocess
import sys

import pytest

import companion.cost
from companion.cost import command, decode_step, kv_bytes, models, size
from companion.live.cost import live


def ask(**request):
    return json.loads(live(json.dumps(request)))


def test_live_answers_what_the_functions_answer():
    arguments = dict(model="llama-3.1-8b", hardware="h100-sxm", batch=8, context=32_768)
    assert ask(op="size", **arguments)["result"] == size(**arguments).to_dict()
    assert ask(op="decode_step", **arguments)["result"] == decode_step(**arguments).to_dict()
    assert ask(op="kv_bytes", model="gemma-3-27b", tokens=5000)["result"] == kv_bytes("gemma-3-27b", 5000)
    assert ask(op="models")["result"] == list(models)
    assert ask(op="hardware", name="H100_SXM")["result"]["bandwidth"] == 3.35e12
    config = models.rows["qwen3-8b"]["config"]
    assert ask(op="parameters", model=config)["result"]["total"] == 8_190_735_360
    machine = {"name": "mine", "bandwidth": 1e9, "flops": {"fp32": 1e11}}
    assert ask(op="prefill", model="smollm2-135m", hardware=machine, tokens=10)["ok"]
    stacked = ask(op="budget", model="llama-3.1-70b", device_bytes=640 * 10**9, contexts=[4096], batch=8)
    assert stacked["result"]["crossings"] == {"cache_equals_weights": 53_829, "full": 190_313}


@pytest.mark.parametrize("op", sorted(__import__("companion.live.cost", fromlist=["OPS"]).OPS))
def test_every_op_answers_and_every_reply_is_json(op):
    arguments = {
        "model": "mixtral-8x7b", "hardware": "h200-sxm", "batch": 2, "context": 10, "tokens": 10,
        "of": "experts", "device_bytes": 10**11, "contexts": [1, 2], "batches": [1, 2],
    }  # fmt: skip
    wanted = {
        "bill": ["model", "hardware", "contexts"], "experts": ["model", "hardware", "batch", "batches"],
        "roofline": ["model", "hardware", "batch", "context", "batches"],
        "budget": ["model", "device_bytes", "contexts"], "decode_flops": ["model", "context"],
        "decode_step": ["model", "hardware"], "experts_touched": ["model", "batch"], "hardware": [],
        "form": ["of"],
        "intensity": ["model", "batch", "context"], "kv_bytes": ["model", "tokens"], "models": [],
        "prefill": ["model", "hardware", "tokens"], "prefill_flops": ["model", "tokens"],
        "size": ["model", "hardware"],
    }  # fmt: skip
    reply = ask(op=op, **{k: arguments[k] for k in wanted.get(op, ["model"])})
    assert reply["ok"] is True and reply["result"]


@pytest.mark.parametrize(
    "request_text, message",
    [
        ("{", "Expecting"),
        ("[]", "JSON object"),
        ("{}", "op must be one of"),
        ('{"op": ["size"]}', "op must be one of"),
        ('{"op": "size", "model": "lama", "hardware": "t4"}', "near: llama"),
        ('{"op": "size", "model": "phi-4", "hardware": "t4", "colour": 1}', "colour"),
        ('{"op": "kv_bytes", "model": {"model_type": "llama"}, "tokens": 1}', "hidden_size"),
        ('{"op": "models", "name": "phi"}', "near: phi-4"),
        ('{"op": "prefill", "model": "phi-4", "hardware": {"bandwidth": 1}, "tokens": 1}', "flops"),
    ],
)
def test_live_never_raises(request_text, message):
    reply = json.loads(live(request_text))
    assert reply["ok"] is False and message in reply["error"]


def test_what_is_no_text_is_refused_too():
    reply = json.loads(inspect.unwrap(live)(7))  # past the tests' own check of types
    assert reply["ok"] is False and reply["error"]


def run_size(capsys, *arguments):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert command.run(parser.parse_args(arguments)) == 0
    return capsys.readouterr().out


def test_command_json(capsys):
    out = run_size(
        capsys, "llama-3.1-8b", "--hardware", "h100-sxm", "--batch", "8", "--context", "32768", "--json"
    )
    result = json.loads(out)
    assert result["kv_bytes_per_token"] == 131_072 and result["max_batch"] == 14 and result["fits"] is True


def test_command_table_has_both_units(capsys):
    out = run_size(capsys, "llama-3.1-8b", "--hardware", "h100-sxm", "--batch", "8", "--context", "32768")
    assert "34,359,738,368 B" in out and "32.00 GiB" in out and "34.36 GB" in out
    assert "74.51 GiB" in out and "80.00 GB" in out
    assert "vllm serve CHECKPOINT --max-model-len 32768 --max-num-seqs 8" in out
    assert max(map(len, out.splitlines())) <= 110


def test_command_accepts_a_configuration(capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(models.rows["gemma-3-27b"]["config"]))
    for argument in (str(path), str(tmp_path)):
        result = json.loads(
            run_size(capsys, argument, "--hardware", "h200-sxm", "--context", "131072", "--json")
        )
        assert result["kv_bytes"] == kv_bytes("gemma-3-27b", 131_072)
        assert result["model"] == tmp_path.name


def test_command_flags_and_bits(capsys):
    base = ("llama-3.1-8b", "--hardware", "h100-sxm")
    out = run_size(capsys, *base, "--weights", "fp8", "--kv", "fp8", "--devices", "4")
    assert "--tensor-parallel-size 4 --quantization fp8 --kv-cache-dtype fp8" in out
    out = run_size(capsys, *base, "--weights", "4.5", "--kv", "nvfp4")
    assert "no flag for a nvfp4 cache" in out and "stored as 4.5" in out
    out = run_size(capsys, *base, "--batch", "14", "--context", "32768")
    assert "--gpu-memory-utilization 0.96" in out  # the plan needs more than the server's default 0.90


def test_command_when_nothing_fits(capsys):
    out = run_size(capsys, "llama-3.1-405b", "--hardware", "t4")
    assert "fits             no" in out and "warning: the weights alone do not fit" in out
    assert "vllm" not in out and "tokens/s" not in out and "|" in out


@pytest.mark.parametrize("model", ["./none.json", "llama-3", "none/config.json", ""])
def test_command_refuses_with_a_value_error(model):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    with pytest.raises(ValueError, match="cannot read|near|known"):
        command.run(parser.parse_args([model, "--hardware", "t4"]))


def test_a_folder_does_not_hide_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "phi-4").mkdir()
    assert command.find_model("phi-4") == models["phi-4"]


def test_standard_library_only():
    """In a fresh interpreter, importing `companion.cost` and sizing need the standard library alone."""
    script = """
import sys
before = set(sys.modules)
import companion.cost, companion.cost.command
companion.cost.size("gemma-3-27b", "t4")
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(new - set(sys.stdlib_module_names) - {"companion"}))
"""
    root = companion.cost.__path__[0].rsplit("/companion", 1)[0]
    # -I -S: no site-packages, so that a third-party import cannot succeed either.
    code = f"import sys; sys.path.insert(0, {root!r})\n{script}"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_public_names_exist_and_say_what_they_do():
    for name in companion.cost.__all__:
        assert getattr(companion.cost, name) is not None
        if callable(getattr(companion.cost, name)):
            assert getattr(companion.cost, name).__doc__, name

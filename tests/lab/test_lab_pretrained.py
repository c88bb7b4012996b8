"""A user's own transformers model as the target, from a folder or from what is downloaded; no network."""

import argparse
import json
import shutil
import socket
import sys

import pytest
import torch
import transformers

from companion.cost import ModelSpec, decode_step, parameters
from companion.lab import command
from companion.lab import local as here
from companion.lab.local import TransformersTarget
from companion.lab.points import Point, Shape
from companion.lab.studies import read

BASE = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "eos_token_id": 0,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": None,
    "bos_token_id": None,
}  # fmt: skip
GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "eos_token_id": 0}
MODELS = {
    "Llama": BASE,
    "Mistral": BASE | {"sliding_window": 5},
    "Gemma2": BASE | {"sliding_window": 5, "head_dim": 8},
    "Qwen3Moe": BASE | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "GPT2": GPT2,
    "Mamba": {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2},
    "T5": {"vocab_size": 96, "d_model": 32, "num_layers": 1, "d_kv": 8, "d_ff": 32, "num_heads": 4},
}


@pytest.fixture(autouse=True)
def no_network(monkeypatch, tmp_path):
    def refuse(*a, **k):
        raise AssertionError("a connection was asked for")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def saved(tmp_path):
    """make(class prefix, **changes) -> folder of a tiny random model."""

    def make(name="Llama", folder="mine", **changes):
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**(MODELS[name] | changes))
        suffix = {"GPT2": "LMHeadModel", "T5": "ForConditionalGeneration"}.get(name, "ForCausalLM")
        getattr(transformers, f"{name}{suffix}")(config).save_pretrained(tmp_path / folder)
        return tmp_path / folder

    return make


def run(*argv):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(["--hardware", "desktop-cpu", *map(str, argv)]))


SMALL = ("--rounds", "2", "--new-tokens", "2", "--contexts", "8,16", "--batches", "1,2")


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2", "Qwen3Moe", "GPT2"])
def test_a_folder(saved, capsys, name):
    """Every sweep that reads prompts, its prediction from the folder's own configuration."""
    folder = saved(name)
    assert run("--transformers", folder, "--sweeps", "all", "--json", *SMALL) == 0
    told = json.loads(capsys.readouterr().out)
    assert {n: s["measured"] for n, s in told["sweeps"].items()} == {"context": 4, "batch": 4, "prefix": 4}
    data = read("lab.json")
    assert data["target"]["kind"] == "transformers" and data["target"]["model"] == "mine"
    assert data["target"]["class"].startswith(name) and data["settings"]["transformers"] == str(folder)
    spec = ModelSpec.from_config(folder)
    step = decode_step(spec, "desktop-cpu", 1, 17, weights="fp32", kv="fp32", compute_dtype="fp32")
    assert data["sweeps"]["context"]["predicted"]["base/n16/b1"]["itl_s"] == step.seconds


def test_the_library_runs_it(saved, monkeypatch):
    """Its own forward, in evaluation, with the cache that it makes for itself: windows are windows there."""
    model, shape = here.pretrained(str(saved("Mistral")))
    seen, forward = [], type(model).forward

    def spying(self, ids, cache=None, **options):
        out = forward(self, ids, cache=cache, **options)
        seen.append((ids.shape[1], cache.get_seq_length(), cache.layers[0].keys.shape[2], self.training))
        return out

    spying.__signature__ = __import__("inspect").signature(forward)
    monkeypatch.setattr(type(model), "forward", spying)
    assert TransformersTarget(model, shape).measure(Point("context", 12, new_tokens=2)).fault is None
    assert seen == [(12, 12, 4, False), (1, 13, 4, False), (1, 14, 4, False)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_formats_are_those_it_runs_in(saved, dtype):
    model, shape = here.pretrained(str(saved()), dtype=dtype)
    own = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    assert model.dtype == dtype and not model.training
    assert (shape.weights, shape.kv, shape.compute_dtype) == (own, own, own)
    assert sum(p.numel() for p in model.parameters()) == parameters(shape.spec)


def test_quantized_weights_are_predicted_by_their_bytes(saved):
    model, shape = here.pretrained(str(saved()))
    with torch.no_grad():
        for p in model.parameters():
            p.data = p.data.to(torch.float8_e4m3fn)
    model.register_buffer("scales", torch.zeros(parameters(shape.spec) // 32))
    assert here.bits_held(model, shape.spec) == pytest.approx(9, abs=0.02)  # and 4 frequencies


def test_what_is_downloaded_has_a_name(saved, monkeypatch, tmp_path, capsys):
    from huggingface_hub import constants

    cache = tmp_path / "hub"
    place = cache / "models--me--tiny-one" / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    place.parent.mkdir(parents=True)
    shutil.move(saved(), place)
    (cache / "models--me--tiny-one" / "refs").mkdir()
    (cache / "models--me--tiny-one" / "refs" / "main").write_text(place.name)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(transformers.utils.hub, "HF_HUB_CACHE", str(cache), raising=False)
    assert here.cached_names() == ["me/tiny-one"]
    with pytest.raises(
        ValueError, match=r"'me/tiny-won' is no folder, and not downloaded; near: me/tiny-one$"
    ):
        run("--transformers", "me/tiny-won")
    assert run("--transformers", "me/tiny-one", "--sweeps", "batch", *SMALL) == 0
    assert read("lab.json")["target"]["model"] == "tiny-one"


def test_an_interruption_is_gone_on_with(saved, monkeypatch, capsys):
    folder, measure, done = saved(), TransformersTarget.measure, []

    def stopping(self, point):
        if len(done) == 4:  # a warm-up and three runs
            raise KeyboardInterrupt
        done.append(point.id)
        return measure(self, point)

    monkeypatch.setattr(TransformersTarget, "measure", stopping)
    with pytest.raises(KeyboardInterrupt):
        run("--transformers", folder, "--sweeps", "context", *SMALL)
    before = read("lab.json")["sweeps"]["context"]["runs"]
    monkeypatch.setattr(TransformersTarget, "measure", measure)
    assert len(before) == 3 and run("--transformers", folder, "--sweeps", "context", *SMALL) == 0
    after = read("lab.json")["sweeps"]["context"]["runs"]
    assert len(after) == 4 and {k: after[k] for k in before} == before
    assert "going on with lab.json" in capsys.readouterr().err


def test_another_model_is_not_mixed_in(saved):
    run("--transformers", saved(), "--sweeps", "batch", *SMALL)
    with pytest.raises(ValueError, match="was begun with transformers="):
        run("--transformers", saved(folder="other"), "--sweeps", "batch", *SMALL)


# Refusals -------------------------------------------------------------------------------------------------


def one_line(tmp_path, *argv):
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError) as e:
        run(*argv, *SMALL)
    text = str(e.value)
    assert "\n" not in text and len(text) < 320 and sorted(tmp_path.iterdir()) == before
    return text


def test_names_that_are_not_known(saved, tmp_path):
    saved(folder="my-model")
    assert one_line(tmp_path, "--transformers", "my-modle").endswith("not downloaded; near: my-model")
    assert "hf download org/thing" in one_line(tmp_path, "--transformers", "org/thing")
    assert one_line(tmp_path, "--transformers", "./nowhere/at/all").endswith("not downloaded")
    assert "has no config.json" in one_line(tmp_path, "--transformers", tmp_path)
    assert "has no config.json" in one_line(tmp_path, "--transformers", tmp_path / "my-model" / "config.json")


@pytest.mark.parametrize("sweep", ["kv", "weights", "heads", "moe"])
def test_sweeps_that_need_the_companions_own_decoder(saved, tmp_path, sweep):
    text = one_line(tmp_path, "--transformers", saved(), "--sweeps", sweep)
    assert text == f"sweeps: {sweep!r} is none here; accepted: context, batch, prefix, all"


@pytest.mark.parametrize("other", ["model", "endpoint", "spec"])
def test_one_target_at_a_time(saved, tmp_path, other):
    text = one_line(tmp_path, "--transformers", saved(), f"--{other}", "smollm2-135m")
    assert other in text and "transformers" in text or "spec is for an endpoint" in text


@pytest.mark.parametrize("name", ["Mamba", "T5"])
def test_an_architecture_that_is_no_decoder_with_a_cache(saved, tmp_path, name):
    folder = saved(name)
    assert "transformers: " in one_line(tmp_path, "--transformers", folder)


def change(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


@pytest.mark.parametrize(
    "fields, says",
    [
        ({"model_type": "nonesuch"}, "nonesuch"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must be a divisor of"),
        ({"hidden_size": 0}, "hidden_size"),
    ],
)
def test_a_configuration_that_cannot_be(saved, tmp_path, fields, says):
    folder = saved()
    change(folder, **fields)
    assert says in one_line(tmp_path, "--transformers", folder)


@pytest.mark.parametrize("broken", ["cut", "gone", "no json"])
def test_files_that_are_not_whole(saved, tmp_path, broken):
    folder = saved()
    weights = folder / "model.safetensors"
    if broken == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif broken == "gone":
        weights.unlink()
    else:
        (folder / "config.json").write_text("{")
    assert str(folder) in one_line(tmp_path, "--transformers", folder)


def test_transformers_is_not_installed(saved, tmp_path, monkeypatch):
    folder = saved()
    monkeypatch.setitem(sys.modules, "transformers", None)
    text = one_line(tmp_path, "--transformers", folder)
    assert text == "transformers is not installed: python -m pip install transformers"


def test_a_device_that_is_not_there(saved, tmp_path):
    assert "device='nowhere'" in one_line(tmp_path, "--transformers", saved(), "--device", "nowhere")


def test_too_long_a_context_is_a_fault_of_the_point(saved):
    model, shape = here.pretrained(str(saved("GPT2")))
    target = TransformersTarget(model, shape)
    assert target.measure(Point("context", 62, new_tokens=2)).fault is None
    assert (
        "63 tokens and 2 more; the model takes 64" in target.measure(Point("context", 63, new_tokens=2)).fault
    )


def test_a_model_that_keeps_no_cache_is_not_measured(saved, monkeypatch):
    """Its steps would be those of an empty context, and fast."""
    model, shape = here.pretrained(str(saved()))
    forward = type(model).forward

    def forgetful(self, ids, cache=None, **options):
        return forward(self, ids, cache=None, use_cache=False)

    forgetful.__signature__ = __import__("inspect").signature(forward)
    monkeypatch.setattr(type(model), "forward", forgetful)
    target = TransformersTarget(model, shape)
    assert target.measure(Point("context", 8, new_tokens=2)).fault == "its cache holds 0 tokens after 10"
    with pytest.raises(ValueError, match="LlamaForCausalLM: its cache holds 0"):
        target.warm_up()


def test_what_goes_wrong_inside_is_a_fault(saved):
    model, _ = here.pretrained(str(saved()))
    wide = Shape(
        ModelSpec.from_config(MODELS["Llama"] | {"model_type": "llama", "vocab_size": 960}, name="wide")
    )
    fault = TransformersTarget(model, wide).measure(Point("context", 30, new_tokens=2)).fault
    assert fault and "\n" not in fault


def test_a_device_of_another_format(saved, tmp_path):
    """What has no rate in this format cannot be predicted with."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    folder = saved()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"dtype='fp32'; t4 is known to compute in fp16, int8, int4$"):
        command.run(parser.parse_args(["--transformers", str(folder), "--hardware", "t4"]))
    assert sorted(tmp_path.iterdir()) == before

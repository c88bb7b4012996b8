"""Targets on this machine: small random models, with a stopwatch that counts instead of timing."""

import pytest
import torch
from scripted import ScriptedClock

from companion.cost import HardwareSpec, ModelSpec, active_parameters, decode_step, parameters
from companion.lab.fit import HOLDS
from companion.lab.local import (
    DecoderTarget,
    TransformersTarget,
    Variant,
    as_mixture,
    random_decoder,
    targets_here,
    with_heads,
)
from companion.lab.points import (
    PAIRS,
    SUFFIX,
    Point,
    Shape,
    Sizes,
    batch_points,
    context_points,
    pair_points,
    plan,
    prefix_points,
    shuffled,
)
from companion.lab.probes import Stopwatch
from companion.lab.studies import Study, sweep

CONFIG = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
SPEC = ModelSpec.from_config(CONFIG, name="tiny")
HERE = HardwareSpec.measured("made up", bandwidth=1e9, flops=1e9)


class Counting(Stopwatch):
    """A call takes as long as the cost model says, by what was really asked of the decoder."""

    def __init__(self):
        super().__init__(ScriptedClock())
        self.calls = []

    def seconds(self, run):
        run()
        return self.calls.pop(0)


@pytest.fixture
def target(monkeypatch):
    """A tiny decoder; the stopwatch reads the predicted time of the tokens that each call passes through."""
    decoder, watch = random_decoder(SPEC), Counting()
    through = decoder.through

    def spying(x, cache=None, *, lengths=None):
        B, S, _ = x.shape
        context = len(cache) + S
        formats = {"weights": "fp32", "kv": "fp32"}
        watch.calls.append(S * decode_step(SPEC, HERE, B, context, **formats).seconds)
        return through(x, cache, lengths=lengths)

    monkeypatch.setattr(decoder, "through", spying)
    return DecoderTarget(decoder, watch=watch)


def test_the_steps_timed_are_those_behind_the_context(target):
    """Each step sees one token more; the time of a step is that of the context it was taken at."""
    run = target.measure(Point("context", 20, new_tokens=3))
    told = [decode_step(SPEC, HERE, 1, n, weights="fp32", kv="fp32").seconds for n in (21, 22, 23)]
    assert run.steps_s == told and run.itl_s == told[1] and run.context == 20 and run.tokens == 3
    assert run.ttft_s == 20 * decode_step(SPEC, HERE, 1, 20, weights="fp32", kv="fp32").seconds


def test_a_filled_cache_costs_a_step_the_same(target):
    read, filled = (target.measure(Point("context", 20, new_tokens=3, prompt=p)) for p in (True, False))
    assert filled.steps_s == read.steps_s and filled.ttft_s is None


def test_a_warm_prompt_reads_its_ending(target):
    target.watch.seconds = lambda run: (run(), target.watch.calls[-1])[1]  # the prefix is not timed
    run = target.measure(Point("prefix", 100, variant="warm", new_tokens=1))
    step = decode_step(SPEC, HERE, 1, 100, weights="fp32", kv="fp32").seconds
    assert run.ttft_s == SUFFIX * step and run.cached_tokens == 100 - SUFFIX


def test_a_batch_is_one_step(target):
    run = target.measure(Point("batch", 10, batch=3, new_tokens=3))
    assert run.tokens == 9 and run.tokens_per_second == 3 / run.itl_s
    assert run.itl_s == decode_step(SPEC, HERE, 3, 12, weights="fp32", kv="fp32").seconds


def test_a_sweep_of_a_machine_that_obeys(target, tmp_path):
    plan = shuffled(context_points((16, 64, 128, 240), prompt_limit=1, new_tokens=3), 2, seed=1)
    result = sweep(target, plan, Study(tmp_path / "s.json", {}), hardware=HERE)
    assert [v["outcome"] for v in result["verdicts"]][:3] == [HOLDS] * 3


@pytest.mark.parametrize("tokens", [256, 300])
def test_a_context_beyond_the_model_is_a_fault(target, tokens):
    assert "the model takes 256" in target.measure(Point("context", tokens)).fault


def test_a_cache_that_does_not_fit_is_a_fault():
    decoder = random_decoder(SPEC)
    run = DecoderTarget({"base": Variant(decoder, "latent")}).measure(Point("kv", 8))
    assert run.fault and "\n" not in run.fault


def test_precision_of_the_cache():
    decoder = random_decoder(SPEC)
    options = {"codec": "int8", "residual": 32}
    target = DecoderTarget(
        {"fp32": Variant(decoder), "int8": Variant(decoder, "quantized", options, kv="int8-g32")}
    )
    for point in pair_points("kv", ("fp32", "int8"), (64,), new_tokens=2):
        run = target.measure(point)
        assert run.fault is None and run.itl_s > 0
    assert target.shapes["int8"].kv == "int8-g32" and target.shapes["fp32"].kv == "fp32"


def test_heads_and_experts_are_of_the_shape_asked_for():
    """Equal active parameters but for the router; the same model but for its key heads."""
    wide = random_decoder(with_heads(SPEC, 4))
    moe = as_mixture(SPEC, experts=8, top_k=2)
    mixed = random_decoder(moe)
    for decoder, spec in ((wide, with_heads(SPEC, 4)), (mixed, moe), (random_decoder(SPEC), SPEC)):
        assert decoder.weights_bytes == 4 * parameters(spec)
    router = 2 * 8 * 32
    assert active_parameters(moe) == parameters(SPEC) + router
    target = DecoderTarget({"dense": Variant(random_decoder(SPEC)), "moe": Variant(mixed)})
    for point in pair_points("moe", ("dense", "moe"), (16,), (1, 4), new_tokens=2):
        assert target.measure(point).fault is None


def test_random_weights_give_finite_logits():
    decoder = random_decoder(as_mixture(SPEC, 4, 2), seed=3)
    logits = decoder(torch.arange(20)[None])
    assert torch.isfinite(logits).all() and logits.std() > 0.1


def test_shapes_that_cannot_be():
    with pytest.raises(ValueError, match="top_k=3"):
        as_mixture(SPEC, 8, 3)
    with pytest.raises(ValueError, match="random weights for qwen2"):
        random_decoder(ModelSpec.from_config(CONFIG | {"model_type": "qwen2"}))


@pytest.mark.parametrize("make_points", [batch_points, context_points])
def test_a_transformers_model(make_points):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = {k: v for k, v in CONFIG.items() if k != "model_type"}
    target = TransformersTarget(LlamaForCausalLM(LlamaConfig(**config)), Shape(SPEC, "fp32", "fp32", "fp32"))
    target.warm_up()
    assert target.describe()["kind"] == "transformers"
    more = {"context": 16} if make_points is batch_points else {}
    for point in make_points((1, 2), new_tokens=2, **more) + prefix_points(40, new_tokens=2):
        run = target.measure(point)
        assert run.fault is None and len(run.steps_s) == 2 and run.ttft_s > 0
    assert target.measure(Point("x", 8, prompt=False)).fault


def test_transformers_sees_every_token(monkeypatch):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = {k: v for k, v in CONFIG.items() if k != "model_type"}
    model, seen = LlamaForCausalLM(LlamaConfig(**config)), []
    forward = model.forward
    model.forward = lambda ids, cache, **k: (
        seen.append((cache.get_seq_length(), ids.shape[1])),
        forward(ids, cache=cache, **k),
    )[1]
    target = TransformersTarget(model, Shape(SPEC))
    target.measure(Point("prefix", 40, variant="warm", new_tokens=2))
    assert seen == [(0, 40 - SUFFIX), (40 - SUFFIX, SUFFIX), (40, 1), (41, 1)]


def test_what_each_sweep_compares():
    """Two variants that differ in one thing, each predicted by its own shape."""
    here = targets_here(random_decoder(SPEC))
    assert here("context") is here("batch") and [*here("context").shapes] == ["base"]
    full, few = here("kv").shapes.values()
    assert full.kv == "fp32" and 8 < few.kv < 12 and full.spec == few.spec
    full, few = here("weights").shapes.values()
    assert (full.weights, full.kv, few.kv) == ("fp32", "fp32", "fp32")
    assert full.spec == few.spec and 8 < few.weights < 10  # scales of 32 bits for rows of 32 and 64
    grouped, wide = here("heads").shapes.values()
    assert (grouped.spec.kv_heads, wide.spec.kv_heads) == (2, 4)
    dense, mixture = here("moe").shapes.values()
    assert dense.spec.moe is None and (mixture.spec.moe.experts, mixture.spec.moe.top_k) == (8, 2)


@pytest.mark.parametrize("name", ["kv", "weights", "heads", "moe"])
def test_pairs_run_and_are_judged(name, tmp_path):
    """Real times of a tiny model, so the outcome is anything; every pair has one, and its prediction."""
    sizes = Sizes((16,), (1,), 16, 64, None, pair_batches=(1, 2))
    points = plan(name, sizes, rounds=2, new_tokens=2, seed=1)
    target = targets_here(random_decoder(SPEC))(name)
    study = Study(tmp_path / "s.json", {})
    result = sweep(target, points, study, hardware=HERE)
    assert result["measured"] == len(points) and len(result["verdicts"]) == {"kv": 1, "weights": 4}.get(
        name, 2
    )
    entry = study.data["sweeps"][name]
    assert entry["variants"] == [*PAIRS[name]] and len(entry["predicted"]) == len(points) / 2
    assert all(PAIRS[name][1] in v["claim"] and v["value"] > 0 for v in result["verdicts"])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype, name", [(torch.float32, "fp32"), (torch.bfloat16, "bf16")])
def test_int8_weights_are_predicted_by_the_bytes_that_a_step_reads(tied, dtype, name):
    """An own embedding is looked up, not read; a tied one is the output head. Scales and norms count."""
    spec = ModelSpec.from_config(CONFIG | {"tie_word_embeddings": tied}, name="tiny")
    decoder = random_decoder(spec, dtype=dtype)
    shape = targets_here(decoder)("weights").shapes["int8"]
    channels = 2 * (8 * 8 + 32 + 2 * 64 + 32) + 96  # q, k, v; o; gate, up; down; the head
    norms = 5 * 32
    inputs = 2 * (64 * 32 + 32 * 32 + 128 * 32 + 32 * 64) + 96 * 32
    item = decoder.dtype.itemsize
    read = inputs + item * (channels + norms)
    step = decode_step(spec, HERE, 1, 10, weights=shape.weights, kv=shape.kv)
    assert abs(step.weights_bytes - read) <= read * 1e-4 and shape.kv == shape.compute_dtype == name


def test_full_heads_have_nothing_to_be_compared_with():
    with pytest.raises(ValueError, match="has full heads"):
        targets_here(random_decoder(with_heads(SPEC, 4)))("heads")

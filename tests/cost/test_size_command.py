"""The command `companion size`: levers, comparisons, the picture, flags, JSON and its schema, mistakes."""

import json
import sys
import xml.etree.ElementTree as ET
from dataclasses import fields
from pathlib import Path

import jsonschema
import pytest

from companion.cli import main
from companion.cost import HardwareSpec, levers, memory, size, vllm_flags
from companion.cost.answer import Lever, Sizing, described, schema
from companion.cost.deployment import Deployment, Own, bytes_of, flops_of, format_of, options, rate_of
from companion.cost.engines import FLAGS

PACKAGE = Path(memory.__file__).resolve().parents[1]
LLAMA = ("llama-3.1-8b", "--hardware", "h100-sxm", "--batch", "8", "--context", "32768")


@pytest.fixture
def ask(capsys):
    """ask(*arguments) -> what the command prints; exit code 0, nothing on stderr."""

    def run(*args, code=0):
        assert main(["size", *map(str, args)]) == code
        out, err = capsys.readouterr()
        assert err == ""
        return out

    return run


# --- levers -----------------------------------------------------------------------------------------------

ASKED = [
    ("llama-3.1-8b", "h100-sxm", dict(batch=8, context=32_768)),
    ("llama-3.1-70b", "h100-sxm", dict(devices=16, context=32_768)),
    ("gpt-oss-20b", "l4", dict(experts="mxfp4", pages="unified", context=131_072)),
    ("deepseek-v3", "h200-sxm", dict(tensor=1, expert=8, weights="fp8", batch=8)),
    ("phi-4", "l4", {}),
]


@pytest.mark.parametrize("model, device, arguments", ASKED, ids=[a[0] for a in ASKED])
def test_a_lever_is_the_same_question_with_one_answer_changed(model, device, arguments):
    before = size(model, device, **arguments)
    rows = levers(model, device, **arguments)
    full = size(model, device, **{**arguments, "batch": max(1, before.max_batch)})
    for row in rows:
        after = size(model, device, **{**arguments, **row.change})
        assert (row.fits, row.max_batch, row.max_context) == (after.fits, after.max_batch, after.max_context)
        assert row.decode_seconds == after.decode_seconds and row.devices == after.devices
        most = size(model, device, **{**arguments, **row.change, "batch": max(1, after.max_batch)})
        assert row.throughput == (most.decode_tokens_per_second or 0.0)
        if before.max_batch:
            assert row.gain == pytest.approx(row.throughput / full.decode_tokens_per_second)
        else:
            assert row.gain is None
    rates = [row.throughput for row in rows]
    assert rates == sorted(rates, reverse=True) and len(rows) >= 4


def test_which_levers_there_are():
    def names(model, device, **arguments):
        return " | ".join(row.name for row in levers(model, device, **arguments))

    plain = names("llama-3.1-8b", "h100-sxm")
    for name in (
        "cache in fp8",
        "cache in nvfp4 (no nvfp4 units)",
        "weights in fp8",
        "2 devices",
        "4,096 tokens",
    ):
        assert name in plain
    assert "cache in fp8" not in names("llama-3.1-8b", "h100-sxm", kv="fp8")
    assert "pages by kind of layer" in names("gpt-oss-20b", "l4", pages="unified")
    assert "no copies" in names("llama-3.1-70b", "h100-sxm", devices=16)
    assert "no copies" not in names("llama-3.1-70b", "h100-sxm", devices=8)
    ranked = names("deepseek-v3", "h200-sxm", tensor=1, expert=8, weights="fp8")
    assert "(tensor 2)" in ranked and "(expert 16)" in ranked


# --- flags ------------------------------------------------------------------------------------------------


def test_flags_that_realise_a_sizing():
    split = size("deepseek-v3", "h200-sxm", tensor=2, expert=8, batch=64, weights="fp8", kv="fp8")
    line = str(vllm_flags(split))
    assert "--max-num-seqs 8 --tensor-parallel-size 2 --data-parallel-size 8 --enable-expert-parallel" in line
    assert "--quantization fp8 --kv-cache-dtype fp8" in line
    pages = size("gpt-oss-20b", "h100-sxm", pages="unified", block_size=32, step_tokens=2048)
    line = str(vllm_flags(pages))
    assert "--block-size 32 --max-num-batched-tokens 2048 --disable-hybrid-kv-cache-manager" in line
    assert "--dtype float16" in str(vllm_flags(size("smollm2-135m", "t4")))
    for sizing in (split, pages):
        words = [w for w in str(vllm_flags(sizing)).split() if w.startswith("--")]
        assert set(words) <= set(FLAGS)
    assert vllm_flags(split).version == "0.32.0"


# --- JSON -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [
        LLAMA,
        ("llama-3.1-405b", "--hardware", "t4"),
        ("mistral-7b-v0.1", "--hardware", "h100-sxm"),
        ("deepseek-v3", "--hardware", "b200", "--tensor", 2, "--expert", 4, "--link-bandwidth", "450GB/s"),
        ("gpt-oss-20b", "--hardware", "l4", "--experts", "mxfp4", "--pages", "grouped", "--kv", "4.5"),
        ("phi-4", "--compare", "l4", "h100-sxm"),
        ("--compare", "phi-4", "qwen3-8b", "--hardware", "h100-sxm"),
    ],
)
def test_json_keeps_its_schema(ask, args):
    found = json.loads(ask(*args, "--json"))
    jsonschema.validate(found, schema())
    assert found["schema"] == 2
    broken = {k: v for k, v in found.items() if k != "schema"}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, schema())


def test_every_field_is_documented(ask, capsys):
    assert set(described(Sizing)) == {f.name for f in fields(Sizing)}
    assert set(described(Lever)) == {f.name for f in fields(Lever)}
    with pytest.raises(SystemExit) as stopped:
        main(["size", "--schema"])
    assert stopped.value.code == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(schema()))
    jsonschema.Draft202012Validator.check_schema(schema())


def test_json_says_what_the_function_says(ask):
    found = json.loads(ask(*LLAMA, "--json"))
    expected = size("llama-3.1-8b", "h100-sxm", batch=8, context=32_768).to_dict()
    assert {k: found[k] for k in expected} == expected
    assert found["vllm"]["command"].startswith("vllm serve CHECKPOINT --max-model-len 32768")
    assert json.loads(ask("llama-3.1-405b", "--hardware", "t4", "--json"))["vllm"] is None


# --- for people -------------------------------------------------------------------------------------------


def test_the_answer_for_people(ask):
    out = ask(*LLAMA)
    parts = (
        "cache = weights  at 15,317 tokens", "memory full      at 60,978 tokens", "cache in fp8", "2.01 x",
        "rests on:", "activations: 0 B, not counted", "times are bounds",
    )  # fmt: skip
    for part in parts:
        assert part in out
    assert max(map(len, out.splitlines())) <= 110
    assert "no one change makes it fit" in ask("llama-3.1-405b", "--hardware", "t4")
    assert "now fits" in ask("phi-4", "--hardware", "l4")
    pages = ask("gpt-oss-20b", "--hardware", "h100-sxm", "--pages", "unified", "--context", 131_072)
    assert "pages      unified" in pages and "one block table for all layers" in pages


def test_compare(ask):
    out = ask("llama-3.1-8b", "--compare", "h100-sxm", "h200-sxm", "--batch", 8)
    assert "1.76" in out and "GiB" in out and "tokens/s" in out and "ms" in out
    both = json.loads(ask("--compare", "llama-3.1-8b", "qwen3-8b", "--hardware", "l4", "--json"))
    assert both["a"] == size("llama-3.1-8b", "l4").to_dict() and both["b"] == size("qwen3-8b", "l4").to_dict()
    assert both["ratios"]["kv_bytes_per_token"] == 147_456 / 131_072


def test_plot(ask, tmp_path):
    path = tmp_path / "budget.svg"
    node = (
        "llama-3.1-70b",
        "--hardware",
        "h100-sxm",
        "--devices",
        8,
        "--batch",
        8,
        "--weights-bytes",
        "140GB",
    )
    assert f"wrote {path}" in ask(*node, "--plot", path)
    root = ET.parse(path).getroot()
    svg = "{http://www.w3.org/2000/svg}"
    rects = [r for r in root.iter(f"{svg}rect") if "data-bytes" in r.attrib]
    weights = [r for r in rects if r.get("class") == "weights"]
    caches = [r for r in rects if r.get("class") == "cache"]
    assert len(weights) == len(caches) == 7 and {r.get("data-bytes") for r in weights} == {"140000000000"}
    line = next(x for x in root.iter(f"{svg}line") if x.get("class") == "memory")
    assert line.get("data-bytes") == "640000000000"
    # Heights are bytes on one scale, a cache stands on the weights, and what is above the line does not fit.
    scale = float(weights[0].get("height")) / 140e9
    for below, above in zip(weights, caches):
        assert float(above.get("height")) == pytest.approx(int(above.get("data-bytes")) * scale, abs=0.02)
        assert float(above.get("y")) + float(above.get("height")) == pytest.approx(
            float(below.get("y")), abs=0.02
        )
        over = int(above.get("data-bytes")) + 140e9 > 640e9
        assert (float(above.get("y")) < float(line.get("y1"))) is over
    text = "".join(root.itertext())
    assert "53,406" in text and "190,735" in text and "GB" in text and "tokens cached per sequence" in text


def test_exit_codes(ask):
    ask(*LLAMA, "--check")
    ask("llama-3.1-405b", "--hardware", "t4")
    ask("llama-3.1-405b", "--hardware", "t4", "--check", code=1)
    ask("llama-3.1-405b", "--compare", "t4", "l4", "--check", code=1)


def test_help_has_examples(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["size", "--help"])
    out = capsys.readouterr().out
    assert stopped.value.code == 0 and "examples:" in out and "exit code" in out
    for option in ("--tensor", "--expert", "--pages", "--compare", "--plot", "--like", "--json", "--schema"):
        assert option in out


def test_a_device_of_ones_own(ask):
    own = ("--memory", "24GB", "--bandwidth", "300GB/s", "--flops", "121TFLOPS", "--json")
    found, row = (
        json.loads(ask("phi-4", "--weights", "fp8", *a)) for a in (own, ("--hardware", "l4", "--json"))
    )
    assert found["decode_seconds"] == row["decode_seconds"] and found["max_batch"] == row["max_batch"]
    half = json.loads(
        ask("phi-4", "--weights", "fp8", "--hardware", "l4", "--bandwidth", "150GB/s", "--json")
    )
    assert half["decode_seconds"] == pytest.approx(2 * row["decode_seconds"])
    device = HardwareSpec("x", 1, 1.0, {"fp32": 1.0}).with_measured(flops=2.0)
    assert device.flops == {"fp32": 2.0} and device.device_bytes == 1


def test_amounts():
    assert (bytes_of("80GB"), bytes_of("80 GiB"), bytes_of("1.5KiB"), bytes_of("1e9")) == (
        80 * 10**9, 80 * 2**30, 1536, 10**9,
    )  # fmt: skip
    assert rate_of("3.35TB/s") == pytest.approx(3.35e12) and flops_of("989TFLOPS") == pytest.approx(9.89e14)
    for bad in ("", "GB", "-1GB", "80XB", "1.5", "nan", "1e999", "0x10", "8 0"):
        with pytest.raises(ValueError):
            bytes_of(bad)


MISTAKES = [
    ((), "a model is required"),
    (("phi-4",), "--hardware is required"),
    (("phi", "--hardware", "l4"), "near: phi-4"),
    (("phi-4", "--hardware", "l5"), "near: l4"),
    (("phi-4", "--hardware", "l4", "--memory", "8Gb4"), "'8Gb4' is not an amount like 80GB"),
    (("phi-4", "--hardware", "l4", "--weights", "0"), "weights: bits per value"),
    (("phi-4", "--hardware", "l4", "--weights", "fp8", "--weights-bytes", "1GB"), "give one of them"),
    (("phi-4", "--hardware", "l4", "--pages", "grouped", "--block-size", "0"), "block_size"),
    (("phi-4", "--hardware", "l4", "--tensor", "3"), "tensor must be a divisor of heads=40, got 3"),
    (("phi-4", "--hardware", "l4", "--expert", "2"), "expert must be 1 for a model without experts, got 2"),
    (("phi-4", "--hardware", "l4", "--plot", "x.png"), "ends in .svg"),
    (("phi-4", "--hardware", "l4", "--plot", "/nowhere/x.svg"), "/nowhere/x.svg"),
    (("phi-4", "--compare", "l4", "qwen3-8b"), "two models or two devices"),
    (("phi-4", "--compare", "qwen3-8b", "phi-4", "--hardware", "l4"), "leave 'phi-4' out"),
    (("--compare", "l4", "t4"), "name the model first"),
    (("phi-4", "--compare", "l4", "t4", "--hardware", "l4"), "leave --hardware out"),
    (("phi-4", "--compare", "l4", "t4", "--plot", "x.svg"), "--plot draws one deployment"),
    (("/nowhere/model.gguf", "--hardware", "l4"), "/nowhere/model.gguf"),
]


@pytest.mark.parametrize("args, message", MISTAKES, ids=[m[:40] for _, m in MISTAKES])
def test_a_mistake_is_one_line(capsys, args, message):
    try:
        code = main(["size", *args])
    except SystemExit as stopped:  # argparse
        code = stopped.code
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1) and message in err and "Traceback" not in err


# --- one deployment ---------------------------------------------------------------------------------------


def test_every_field_of_a_deployment_is_an_option_of_the_command(capsys):
    with pytest.raises(SystemExit):
        main(["size", "--help"])
    said = capsys.readouterr().out
    for asked in options(Deployment) + options(Own):
        flag = asked.metadata.get("flag", "--" + asked.name.replace("_", "-"))
        assert flag in said and asked.metadata["means"]


@pytest.mark.parametrize("name", [asked.name for asked in options(Deployment)])
def test_a_wrong_value_is_refused_by_the_field_that_it_is_for(name):
    read = next(asked.metadata["read"] for asked in options(Deployment) if asked.name == name)
    wrong = "no such thing" if read in (str, format_of) else -1.0 if read in (float, rate_of) else -1
    more = {"link_bandwidth": 1e9} if name == "link_latency" else {}
    with pytest.raises(ValueError, match=name):
        size("llama-3.1-8b", "h100-sxm", **{**more, name: wrong})


def test_a_reader_of_the_byte_formula_opens_few_files(ask, monkeypatch):
    """Files of the package between the command and the count of cached numbers."""
    stacks = []
    real = memory.cached_values

    def counted(*args, **options):
        frame, files = sys._getframe(), set()
        while frame is not None:
            files.add(frame.f_code.co_filename)
            frame = frame.f_back
        stacks.append({f for f in files if f.startswith(str(PACKAGE))} | {memory.__file__})
        return real(*args, **options)

    monkeypatch.setattr(memory, "cached_values", counted)
    ask(*LLAMA, "--json")
    assert stacks and max(map(len, stacks)) <= 10

"""The command: what it prints, and that a mistake is one line on stderr and nothing on stdout."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import companion
import companion.model
from companion.cli import main

ROOT = str(Path(companion.__file__).parents[1])
ENV = {**os.environ, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}


def command(*args, code=None, **options):
    """`companion ARGS` in a process of its own; `code` runs before it."""
    start = [sys.executable, "-m", "companion.cli"]
    if code:
        start = [
            sys.executable,
            "-c",
            f"{code}\nimport sys\nfrom companion.cli import main\nsys.exit(main(sys.argv[1:]))",
        ]
    return subprocess.run([*start, *args], capture_output=True, text=True, env=ENV, timeout=300, **options)


@pytest.fixture
def loaded(monkeypatch, smollm2):
    """The command, with the model that is in memory already."""
    monkeypatch.setattr(companion.model, "load", lambda name: smollm2)


@pytest.fixture
def refused(capsys):
    """refused(args) -> the one line on stderr; nothing on stdout, exit code 2."""

    def run(*args):
        try:
            code = main(list(args))
        except SystemExit as e:  # argparse
            code = e.code
        out, err = capsys.readouterr()
        assert code == 2 and out == ""
        assert err.count("\n") == 1 and err.endswith("\n") and "Traceback" not in err
        assert err.startswith(f"companion {args[0]}: error: ") or len(args) < 2
        return err

    return run


# --- generate -------------------------------------------------------------------------------------


def test_the_capital_of_france():
    """In a process of its own, as a reader types it."""
    done = command("generate", "The capital of France is", "--max-new-tokens", "8")
    assert done.returncode == 0
    assert done.stdout.startswith("The capital of France is Paris") and done.stdout.endswith("\n")
    assert "5 + 8 tokens" in done.stderr and "Traceback" not in done.stderr


def test_json(loaded, capsys):
    assert main(["generate", "The capital of France is", "--max-new-tokens", "8", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.count("\n") == 1
    found = json.loads(out)
    assert found["model"] == "smollm2-135m" and found["prompt"] == "The capital of France is"
    assert "Paris" in found["text"] and found["finish_reason"] == "length"
    assert found["prompt_tokens"] == 5 and len(found["tokens"]) == 8 == len(found["logprobs"])
    assert all(isinstance(t, int) for t in found["tokens"]) and all(p <= 0 for p in found["logprobs"])
    assert found["ttft_s"] > 0 and len(found["itl_s"]) == 7 and all(t > 0 for t in found["itl_s"])


def test_options_reach_the_loop(loaded, capsys):
    def run(*args):
        assert main(["generate", "The capital of France is", "--max-new-tokens", "6", "--json", *args]) == 0
        return json.loads(capsys.readouterr().out)["tokens"]

    plain = run()
    assert plain == run("--no-cache") == run("--prefill-chunk", "2")
    assert plain == run("--temperature", "0.7", "--top-k", "1") == run("--temperature", "1e-9")
    seeded = run("--temperature", "3", "--seed", "1")
    assert seeded == run("--temperature", "3", "--seed", "1") != run("--temperature", "3", "--seed", "2")


def test_stop_and_chat(loaded, capsys):
    prompt = "One, two, three, four,"
    assert main(["generate", prompt, "--max-new-tokens", "20", "--stop", "six"]) == 0
    out, err = capsys.readouterr()
    assert out == prompt + " five, \n" and err.startswith("[8 + 3 tokens, ")
    assert main(["generate", "What is the capital of France?", "--chat", "--max-new-tokens", "24"]) == 0
    assert capsys.readouterr().out == "The capital of France is Paris.\n"  # neither prompt nor markers


def test_a_reply_that_is_empty_shows_the_prompt_all_the_same(loaded, capsys):
    assert main(["generate", "The capital of France is", "--max-new-tokens", "4", "--stop", " Paris"]) == 0
    assert capsys.readouterr().out == "The capital of France is\n"


def test_output_in_any_language(loaded, capsys):
    assert main(["generate", "Größe 漢字 🙂", "--max-new-tokens", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "Größe 漢字 🙂"


@pytest.mark.parametrize(
    "args, message",
    [
        (["--top-p", "0"], "top_p must be above 0 and at most 1, got 0.0"),
        (["--top-p", "nan"], "top_p=nan"),
        (["--top-p", "1.5"], "top_p=1.5"),
        (["--top-k", "-1"], "top_k=-1"),
        (["--min-p", "1"], "min_p=1.0"),
        (["--temperature", "nan"], "temperature=nan"),
        (["--temperature", "inf"], "temperature=inf"),
        (["--temperature", "-1"], "temperature=-1.0"),
        (["--temperature", "1", "--seed", str(2**80)], "seed must"),
        (["--max-new-tokens", "0"], "max_new_tokens=0"),
        (["--max-new-tokens", "9000"], "9005; smollm2-135m is made for at most 8192"),
        (["--prefill-chunk", "0"], "prefill_chunk=0"),
        (["--stop", ""], "stop must"),
        (["--top-p", "much"], "invalid float value: 'much'"),
        (["--max-new-tokens", "2.5"], "invalid int value"),
    ],
)
def test_options_that_are_refused(loaded, refused, args, message):
    name, _, value = message.partition("=")  # the argument named, and what came
    for more in ([], ["--json"]):
        said = refused("generate", "The capital of France is", *more, *args)
        assert name in said and (f"got {value}" if value else "") in said


def test_prompts_that_are_refused(loaded, refused):
    assert "the prompt is empty" in refused("generate", "")
    assert "the prompt is empty" in refused("generate", "", "--json")
    assert "at least one token" in refused(
        "generate", "\x1d"
    )  # a character that this vocabulary has no token for
    assert "UTF-8" in refused("generate", "a\udcffb")
    assert "made for at most 8192" in refused("generate", "one two " * 5000)
    assert "made for at most 8192" in refused("generate", "one two " * 5000, "--json")


def test_logits_that_are_no_numbers(monkeypatch, refused, smollm2):
    decoder, tokenizer = smollm2
    monkeypatch.setattr(companion.model, "load", lambda name: (decoder, tokenizer))
    monkeypatch.setattr(decoder, "head", lambda x: torch.full((len(x), 1, 49152), float("nan")))
    for extra in ([], ["--json"], ["--temperature", "1"]):
        assert "logits of row 0 hold NaN" in refused("generate", "The", *extra)


def test_models_that_are_not_there(refused, tmp_path):
    line = refused("generate", "Hi", "--model", "smollm-135m")
    assert "smollm-135m" in line and "smollm2-135m" in line
    assert "config" in refused("generate", "Hi", "--model", str(tmp_path))


def test_files_that_are_not_whole(refused, tmp_path):
    """A truncated GGUF, a corrupted one, and something else altogether."""
    from companion.model.files import smollm2 as path_of_smollm2

    whole = path_of_smollm2()
    with open(whole, "rb") as f:
        head = f.read(3_000_000)
    path = tmp_path / "cut.gguf"
    for content in (head, head[:1000], head[:30], b"", b"GGUF", b"hello" * 100):
        path.write_bytes(content)
        assert "cut.gguf" in refused("generate", "Hi", "--model", str(path))
    flipped = bytearray(head)
    flipped[4] = 77
    path.write_bytes(flipped)
    assert "cut.gguf: GGUF version 77" in refused("generate", "Hi", "--model", str(path), "--json")


def test_a_file_that_may_not_be_read(monkeypatch, refused):
    def load(name):
        raise PermissionError(13, "Permission denied", "secret.gguf")

    monkeypatch.setattr(companion.model, "load", load)
    assert "secret.gguf: Permission denied" in refused("generate", "Hi", "--model", "secret.gguf")


@pytest.mark.parametrize(
    "words, says",
    {
        "lab --contxts 5": "companion lab: error: unknown argument --contxts; did you mean --contexts?",
        "size llama-3.1-8b --bacth=4": "unknown argument --bacth=4; did you mean --batch?",
        "size llama-3.1-8b twice": "companion size: error: unknown argument twice (",
        "doctor --zzz": "companion doctor: error: unknown argument --zzz (",
        "generte Hello": "did you mean generate?",
    }.items(),
)
def test_a_mistyped_argument_has_a_near_miss(words, says, capsys):
    with pytest.raises(SystemExit) as e:
        main(words.split())
    said = capsys.readouterr().err
    assert e.value.code == 2 and says in said and said.count("\n") == 1


def test_a_mistake_in_a_process_of_its_own():
    done = command("generate", "Hi", "--model", "/nowhere/x.gguf")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    done = command("generate", "Hi", "--top-p", "0")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_an_interruption_and_a_reader_that_leaves(monkeypatch, capsys):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(companion.model, "load", interrupted)
    assert main(["generate", "Hi"]) == 130
    assert "Traceback" not in capsys.readouterr().err
    code = (
        "import companion.model, io\ndef load(name):\n    raise BrokenPipeError\ncompanion.model.load = load"
    )
    done = command("generate", "Hi", code=code)
    assert (done.returncode, done.stdout, done.stderr) == (141, "", "")


def test_what_is_missing_is_said():
    done = command("generate", "Hi", code="import sys\nsys.modules['tokenizers'] = None")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "what-a-token-costs[model]" in done.stderr


# --- size -----------------------------------------------------------------------------------------

LLAMA = ["size", "llama-3.1-8b", "--hardware", "h100-sxm", "--batch", "8", "--context", "32768"]
KEYS = {
    "weights_bytes",
    "kv_bytes",
    "kv_bytes_per_token",
    "total_bytes",
    "device_bytes",
    "fits",
    "max_batch",
    "max_context",
    "decode_tokens_per_second",
    "bound_by",
}


def test_size_as_json(capsys):
    assert main([*LLAMA, "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err == "" and found.keys() >= KEYS
    assert found["kv_bytes_per_token"] == 131072
    assert found["kv_bytes"] == 131072 * 8 * 32768 and found["weights_bytes"] == 2 * 8_030_261_248
    assert found["device_bytes"] == 80 * 10**9 and found["fits"] is True
    assert found["total_bytes"] == found["kv_bytes"] + found["weights_bytes"]


def test_size_for_people(capsys):
    assert main(LLAMA) == 0
    out, err = capsys.readouterr()
    assert err == "" and "GiB" in out and "GB" in out and "34,359,738,368" in out


def test_size_of_a_configuration(capsys, tmp_path):
    config = {
        "model_type": "llama",
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "some_vision_model", "text_config": config}))
    assert main(["size", str(path), "--hardware", "l4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kv_bytes_per_token"] == 2 * 16 * 8 * 64 * 2


@pytest.mark.parametrize(
    "args, message",
    [
        (["size", "llama-3.1-8", "--hardware", "h100-sxm"], "llama-3.1-8b"),
        (["size", "llama-3.1-8b", "--hardware", "h100"], "h100-sxm"),
        (["size", "llama-3.1-8b", "--hardware", "h100-sxm", "--batch", "0"], "batch"),
        (["size", "llama-3.1-8b", "--hardware", "h100-sxm", "--context", "-5"], "context"),
        (["size", "llama-3.1-8b", "--hardware", "h100-sxm", "--kv", "int5"], "kv"),
        (["size", "/nowhere/config.json", "--hardware", "h100-sxm"], "/nowhere/config.json"),
        (["size", "llama-3.1-8b"], "--hardware"),
    ],
)
def test_size_refuses(refused, args, message):
    assert message in refused(*args)
    assert message in refused(*args, "--json")


def test_size_of_a_context_beyond_the_model_only_warns(capsys):
    args = ["size", "llama-2-7b", "--hardware", "h100-sxm", "--context", "100000"]
    assert main(args) == 0
    out, err = capsys.readouterr()
    assert "warning" in out + err and "4,096" in out + err
    assert main([*args, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kv_bytes"] == 100_000 * 524_288


def test_size_and_doctor_need_no_torch():
    absent = ("torch", "triton", "numpy", "jaxtyping", "tokenizers")
    blocked = f"import sys\nfor name in {absent}:\n    sys.modules[name] = None"
    done = command(*LLAMA, "--json", code=blocked)
    assert done.returncode == 0 and json.loads(done.stdout)["kv_bytes_per_token"] == 131072
    done = command("doctor", "--json", code=blocked)
    assert (
        done.returncode == 0 and json.loads(done.stdout)["torch sees"]["devices"] == "torch is not installed"
    )


# --- the rest -------------------------------------------------------------------------------------


def test_help_and_version(capsys):
    for args, text in (
        (["--version"], companion.__version__),
        (["--help"], "generate"),
        (["size", "-h"], "--kv"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(args)
        assert stopped.value.code == 0
        assert text in capsys.readouterr().out


@pytest.mark.parametrize("args", [[], ["sing"]])
def test_no_command_or_an_unknown_one(capsys, args):
    with pytest.raises(SystemExit) as stopped:
        main(args)
    out, err = capsys.readouterr()
    assert stopped.value.code == 2 and out == "" and err.count("\n") == 1 and "companion --help" in err

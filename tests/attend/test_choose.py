"""The backend of a pass: chosen once, by the user's word, the device and the dtype."""

import inspect
from pathlib import Path

import pytest
import torch
from architectures import ids, tiny

import companion
from companion.attend import backend, by_torch, choose, one_pass
from companion.caches import make_cache
from companion.generate import generate
from companion.kernels import mode, use
from companion.model import from_transformers

HOME = Path(companion.__file__).parent
CPU = torch.device("cpu")


@pytest.fixture
def asked(monkeypatch):
    """How often the policy was asked."""
    import sys

    seen, module = [], sys.modules["companion.attend"]
    monkeypatch.setattr(module, "choice", lambda: seen.append(1) or mode.choice())
    return seen


@pytest.mark.parametrize("how", ["auto", "never", "compiled"])
@pytest.mark.parametrize("kind", ["contiguous", "paged", "quantized"])
@torch.inference_mode()
def test_the_policy_is_asked_once_in_a_pass(asked, how, kind):
    decoder = from_transformers(tiny("mixtral"))
    cache = make_cache(kind, decoder.spec, max_tokens=9)
    with use(how):
        for tokens in (ids(1, 5), ids(1, 1), ids(1, 1)):
            asked.clear()
            decoder(tokens, cache)
            assert len(asked) == 1


@torch.inference_mode()
def test_outside_of_a_pass_every_call_asks(asked):
    """The broken example: layers without a pass around them, which the test above would notice."""
    decoder = from_transformers(tiny("qwen3"))
    x = decoder.embed(ids(1, 3))
    rope = (decoder.rope, *decoder.angles(torch.arange(3)))
    for layer in decoder.blocks:
        x = layer(x, *rope)
    assert len(asked) > 1


def test_the_word_may_change_between_passes_and_not_within_one():
    x = torch.zeros(1)
    with use("compiled"):
        with one_pass(x) as first:
            with use("never"), one_pass(x) as inner:
                assert backend(x) is inner is first and first.name == "numba"
        with use("never"):
            assert backend(x).name == "torch"
    for dtype in (torch.float64, torch.bfloat16):
        with use("compiled"):
            assert choose(CPU, dtype).name == "torch"


def test_a_pass_that_fails_leaves_no_choice_behind():
    x = torch.zeros(1)
    with pytest.raises(RuntimeError), use("compiled"), one_pass(x):
        raise RuntimeError
    with use("never"):
        assert backend(x).name == "torch"


def files_on_the_stack() -> set[str]:
    files = {Path(frame.filename) for frame in inspect.stack()}
    return {f.name for f in files if HOME in f.parents}


def test_few_files_stand_between_a_prompt_and_its_scores(monkeypatch):
    """Of the package, on the stack when q k^T is computed in `generate` on a CPU."""
    found, real = [], (torch.bmm, by_torch.F.scaled_dot_product_attention)
    monkeypatch.setattr(torch, "bmm", lambda *a, **o: found.append(files_on_the_stack()) or real[0](*a, **o))
    fused = lambda *a, **o: found.append(files_on_the_stack()) or real[1](*a, **o)  # noqa: E731
    monkeypatch.setattr(by_torch.F, "scaled_dot_product_attention", fused)
    with use("never"):
        generate(from_transformers(tiny("qwen3")), [1, 2, 3, 4], max_new_tokens=3, stop_ids=())
    scores = [files for files in found if "by_torch.py" in files]
    assert scores and max(map(len, scores)) <= 8

"""The cheat sheet: every formula, computed as printed, is what the companion's function returns."""

import importlib
import math
import random
from fractions import Fraction

import pytest
import torch

from companion import cost
from companion.attention import sdpa
from tools import address, formulas
from tools.sitecheck import ROOT

PAGE = (ROOT / "book" / "cheat_sheet.md").read_text(encoding="utf-8")
API = (ROOT / "book" / "api.md").read_text(encoding="utf-8")
ROWS = {row.what: row for row in formulas.rows(PAGE)}

LLAMA, GEMMA, LATENT, EXPERTS = (
    cost.models[m] for m in ("llama-3.1-8b", "gemma-3-27b", "deepseek-v3", "qwen3-30b-a3b")
)
H100 = cost.hardware["h100-sxm"]


def of(model, p=2, **more):
    """The letters of a model (bf16) and of an H100."""
    values = {
        "L": model.layers,
        "L_f": model.full_layers,
        "L_w": model.sliding_layers,
        "d": model.d_model,
        "h_q": model.heads,
        "h_kv": model.kv_heads,
        "d_h": model.head_dim,
        "w": model.window,
        "P": cost.matmul_parameters(model),
        "p": p,
        "W": cost.weight_bytes_read(model, 1),
        "W_0": cost.weight_bytes(model),
        "M": H100.device_bytes,
        "beta": H100.bandwidth,
        "F": H100.peak("bf16"),
        "R": H100.ridge("bf16"),
        "kappa": cost.kv_bytes_per_token(model),
        "a": cost.decode_attention_flops(model, 1),
    }
    return values | more


MLA = of(LATENT, r=LATENT.mla.kv_rank, d_r=LATENT.mla.rope_dim)
_, MOE = EXPERTS, of(EXPERTS, L_e=EXPERTS.moe_layers, k=EXPERTS.moe.top_k, E=EXPERTS.moe.experts)


def pieces():
    """Two pieces of one attention: log-sum-exps and first outputs, and those of the whole."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 4, dtype=torch.float64) for n in (1, 9, 9))
    return [sdpa(q, k[:, :, i:j], v[:, :, i:j], return_lse=True) for i, j in ((0, 5), (5, 9), (0, 9))]


FIRST, SECOND, WHOLE = pieces()
PARTS = {
    "ell_1": float(FIRST[1]),
    "ell_2": float(SECOND[1]),
    "o_1": float(FIRST[0][0, 0, 0, 0]),
    "o_2": float(SECOND[0][0, 0, 0, 0]),
}


def merged(function):
    out, lse = function([FIRST[0], SECOND[0]], [FIRST[1], SECOND[1]])
    assert torch.allclose(out, WHOLE[0]) and torch.allclose(lse, WHOLE[1])
    return out, lse


def found_again(manager, n, b):
    desk = manager(num_blocks=100, block_size=b)
    desk.register(desk.allocate(range(n)))
    return desk.allocate(range(n)).shared


def sent(exchanged, *what):
    """Bytes that a rank hands in for these exchanges, each of which there has to be."""
    payloads = {e.what: e.payload for e in exchanged.exchanges}
    return sum(payloads[w] for w in what)


CASES = {  # what: (values of the letters, what the function named on the page says)
    "attention FLOPs per token looked at": (of(LLAMA), lambda f: f(LLAMA, 1)),
    "the same, over a latent": (MLA, lambda f: f(LATENT, 1)),
    "a decode step": (of(LLAMA, B=8, n=5000), lambda f: f(LLAMA, 5000, batch=8)),
    "reading a prompt, all logits": (of(LLAMA, n=777), lambda f: f(LLAMA, 777)),
    "context at which looking back is half of the work": (of(LLAMA), lambda f: f(LLAMA)),
    "query-key pairs under a causal window, $n \\ge w$": (
        {"n": 100, "w": 32},
        lambda f: f(100, 100, causal=True, window_size=(31, 0)).sum().item(),
    ),
    "log-sum-exp of two pieces": (PARTS, lambda f: float(merged(f)[1])),
    "attention over both": (PARTS, lambda f: float(merged(f)[0][0, 0, 0, 0])),
    "cache per token": (of(LLAMA), lambda f: f(LLAMA)),
    "the same, of a latent": (MLA, lambda f: f(LATENT)),
    "cache, some layers sliding": (
        of(GEMMA, B=3, n=5000, u=7),
        lambda f: f(GEMMA, 5000, batch=3, step=7),
    ),
    "weights that a dense step reads": (of(LLAMA), lambda f: f(LLAMA)),
    "users that fit": (of(LLAMA, n=8192), lambda f: f(LLAMA, H100, context=8192).max_batch),
    "longest context": (of(LLAMA, B=8), lambda f: f(LLAMA, H100, batch=8).max_context),
    "cached tokens that weigh as much as the weights": (of(LLAMA), lambda f: f(LLAMA)),
    "bits per value of a format with groups": ({"c": 4, "s": 8, "g": 16}, lambda f: f("nvfp4")),
    "state of linear attention": (of(LLAMA, p=4, B=3), lambda f: f(LLAMA, batch=3)),
    "blocks of a sequence": ({"n": 33, "b": 16}, lambda f: f(33, 16)),
    "found of a prompt that was read before": ({"n": 64, "b": 16}, lambda f: found_again(f, 64, 16)),
    "ridge": (of(LLAMA), lambda f: f(H100, "bf16")),
    "a decode step, at least": (of(LLAMA, B=8, n=5000), lambda f: f(LLAMA, H100, 8, 5000).seconds),
    "intensity of that step": (of(LLAMA, B=8, n=5000), lambda f: f(LLAMA, 8, 5000)),
    "intensity of attention alone": (of(LLAMA), lambda f: f(LLAMA)),
    "intensity over a latent": (MLA, lambda f: f(LATENT)),
    "context beyond which no batch is compute-bound": (of(LLAMA), lambda f: f(LLAMA, H100)),
    "experts touched in a layer": (MOE | {"B": 8}, lambda f: f(EXPERTS, 8)),
    "rows multiplied for one expert": ({"q": 37, "t": 16}, lambda f: f([37], 16)),
    "sent to the experts, per step and rank": (
        MOE | {"B": 8},
        lambda f: sent(f(EXPERTS, tokens=8, expert=8), "dispatch"),
    ),
    "and as much back from them": (
        MOE | {"B": 8},
        lambda f: sent(f(EXPERTS, tokens=8, expert=8), "combine"),
    ),
    "summed behind attentions and feed-forwards, per step and rank": (
        of(LLAMA, B=8),
        lambda f: sent(f(LLAMA, tokens=8, tensor=8), "attention", "feed-forward"),
    ),
    "what a ring puts on the wire for a sum, per rank": (
        {"N": 8, "m": 4096},
        lambda f: f("all_reduce", 4096, 8, "ring").busiest,
    ),
    "tokens per pass": ({"alpha": 0.8, "gamma": 4}, lambda f: f(0.8, 4)),
    "gain over plain decoding": (
        {"alpha": 0.8, "gamma": 4, "c_p": 1.3, "c_d": 0.1},
        lambda f: f(0.8, 4, pass_cost=1.3, draft_cost=0.1),
    ),
}


def function(path):
    """What a page calls `cost.HardwareSpec.ridge`."""
    module, *names = path.split(".")
    found = importlib.import_module(f"companion.{module}")
    for name in names:
        found = (
            getattr(found, name)
            if hasattr(found, name)
            else importlib.import_module(f"{found.__name__}.{name}")
        )
    return found


# A device on which everything waits for arithmetic, for the other side of each maximum.
SLOW = cost.HardwareSpec.measured("slow", bandwidth=1e12, flops=1e12)
MORE = {
    "a decode step, at least": (
        of(LLAMA, B=8, n=5000, beta=1e12, F=1e12),
        lambda f: f(LLAMA, SLOW, 8, 5000).seconds,
    ),
    "cache, some layers sliding": (of(GEMMA, B=3, n=500, u=7), lambda f: f(GEMMA, 500, batch=3, step=7)),
}


def cases(what):
    return [case for case in (CASES[what], MORE.get(what)) if case]


@pytest.mark.parametrize("what", ROWS)
def test_the_formula_as_printed_is_the_function(what):
    for values, call in cases(what):
        wanted = call(function(ROWS[what].function))
        got = formulas.evaluate(ROWS[what].formula, values)
        assert wanted > 0 and math.isclose(got, wanted, rel_tol=1e-9), (got, wanted)


def test_every_line_is_read_and_has_a_case():
    lines = [x for x in PAGE.splitlines() if x.startswith("|") and "`](" in x]
    assert len(lines) == len(ROWS) == len(CASES) > 25 and set(ROWS) == set(CASES)


def test_a_function_s_link_leads_to_its_entry_or_to_its_source():
    from_source = f"{address.repository()}/blob/{address.BRANCH}/"
    for row in ROWS.values():
        module, *names = row.function.split(".")
        if row.place.startswith("api.md#"):
            entry = row.place.removeprefix("api.md#")
            assert entry in {n.lower() for n in names} and f"companion.{module} -->" in API, row
        else:
            path = ROOT / row.place.removeprefix(from_source)
            assert f"def {names[-1]}(" in path.read_text(encoding="utf-8"), row


def test_every_guess_that_stands_is_the_limit_that_the_page_gives():
    assert r"at $\alpha = 1$, a pass brings $\gamma + 1$ tokens" in PAGE and cost.expected_tokens(1, 4) == 5
    near = formulas.evaluate(ROWS["tokens per pass"].formula, {"alpha": 1 - 1e-9, "gamma": 4})
    assert math.isclose(near, 5, rel_tol=1e-6)


def test_every_letter_is_explained_and_used():
    used = set().union(*(formulas.letters(row.formula) for row in ROWS.values()))
    assert used == set(formulas.symbols(PAGE))
    named = {formulas.name(r.formula.split("=")[0].strip()) for r in ROWS.values() if "=" in r.formula}
    assert named == {"a", "kappa", "W", "R"}


def test_a_chapter_is_that_of_its_number():
    for row in ROWS.values():
        number, path = row.chapter.removeprefix("[").removesuffix(")").split("](../notebooks/")
        assert path.startswith(f"{int(number):02d}_") and (ROOT / "notebooks" / path).exists()


@pytest.mark.parametrize("what", ROWS)
def test_every_letter_matters(what):
    """Another value of a letter gives another result: no part of a formula is left out by its case."""
    formula = ROWS[what].formula
    for letter in formulas.letters(formula):
        assert any(
            not math.isclose(formulas.evaluate(formula, values | {letter: values[letter] * by}), same)
            for values, _ in cases(what)
            for same in [formulas.evaluate(formula, values)]
            for by in (2, 3, 7)
        ), letter


PRINTED = {
    r"1 + 2 \cdot 3 - 4": 3,
    r"x = 2 (3 + 4) 5": 70,
    r"\frac{1}{3} 3": 1,
    r"\lfloor \frac{7}{2} \rfloor + \lceil \frac{7}{2} \rceil": 7,
    r"2^{3} 2^4": 128,
    r"\left\lfloor \dfrac{7}{2} \right\rfloor + \max\left(\dfrac{1}{2}, 2\right)": 5,
    r"\left( 2 \, \min(5, 1 + 2) \right) - -1": 7,
    r"\ln(e^{2})": 2,
    r"a_{bc} \beta - \max(a_{bc}, \beta, 0.5)": 7 * 3 - 7,
}


@pytest.mark.parametrize("formula", PRINTED)
def test_the_reader_reads_tex(formula):
    assert math.isclose(formulas.evaluate(formula, {"a_bc": 7, "beta": 3}), PRINTED[formula])


def test_whole_numbers_stay_exact():
    n = 10**17 + 1
    assert formulas.evaluate(r"\lfloor \frac{n}{3} \rfloor", {"n": n}) == n // 3
    assert formulas.evaluate(r"\frac{n}{3}", {"n": 1}) == Fraction(1, 3)


@pytest.mark.parametrize(
    "formula", [r"2 +", r"\frac{1}", "(1 + 2", r"\sqrt{2}", "1 ! 2", r"\lfloor 1 \rceil", "1 } 2", r"\min 3"]
)
def test_what_it_can_not_read_is_refused(formula):
    with pytest.raises((ValueError, KeyError)):
        formulas.evaluate(formula, {})


def test_a_random_formula_agrees_with_python():
    draw = random.Random(0)
    for _ in range(200):
        values = {x: draw.randint(1, 9) for x in "xyz"}
        tex, python = r"\frac{x + 2 y}{z} (x - y)^{2} + x y z", "(x + 2 * y) / z * (x - y) ** 2 + x * y * z"
        assert math.isclose(formulas.evaluate(tex, values), eval(python, {}, values))

"""The distribution that comes out is the target's: exactly, by measuring the rule; end to end, by counting.

`law` knows nothing of the rule but that it answers for numbers u and v in [0, 1): it finds by bisection
where the answer changes, so the probabilities are exact to about 1e-14. The famous mistakes are run through
the same checks, and must fail them.
"""

import itertools

import jaxtyping
import pytest
import torch
from drafters import Says, TableDraft, right
from hypothesis import given, settings
from hypothesis import strategies as st

from companion.generate import (
    DecoderDraft,
    Proposal,
    Sampler,
    accept,
    acceptance,
    drafts,
    generate,
    probabilities,
    speculate,
    verify,
)
from companion.generate import speculative as module
from companion.generate.sampling import draw

EXACT = 1e-12


@pytest.fixture
def unchecked(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


# --- one step, exactly ---------------------------------------------------------------------------------


def measure(true_until):
    """Length of the initial piece of [0, 1) on which the predicate holds."""
    low, high = 0.0, 1.0
    for _ in range(48):
        middle = (low + high) / 2
        low, high = (middle, high) if true_until(middle) else (low, middle)
    return low if low else float(true_until(0.0)) * high


def law(rule, p, q):
    """Probabilities of the token that the rule lets stand, for a guess drawn from q."""
    V = len(p)
    out = torch.zeros(V, dtype=torch.float64)
    for guess in range(V):
        if not q[guess]:
            continue
        stands = measure(lambda u, guess=guess: rule(p, q, guess, u, 0.5)[1])
        out[guess] += q[guess] * stands
        if stands < 1 - 1e-13:
            u = (1 + stands) / 2
            below = [measure(lambda v, x=x: rule(p, q, guess, u, v)[0] <= x) for x in range(V)]  # noqa: B023
            below[-1] = 1.0
            out += (
                q[guess]
                * (1 - stands)
                * torch.tensor(below, dtype=torch.float64).diff(prepend=torch.zeros(1, dtype=torch.float64))
            )
    return out


def distribution(weights):
    x = torch.tensor(weights, dtype=torch.float64)
    return x / x.sum()


weights = st.lists(st.integers(0, 9) | st.floats(1e-3, 9.0), min_size=4, max_size=4).filter(any)


@settings(deadline=None, max_examples=25)
@given(p=weights.map(distribution), q=weights.map(distribution))
def test_one_step_has_the_law_of_the_target(p, q):
    assert (law(accept, p, q) - p).abs().max() < EXACT
    alpha = sum(float(q[x]) * measure(lambda u, x=x: accept(p, q, x, u, 0.5)[1]) for x in range(4) if q[x])
    assert alpha == pytest.approx(float(acceptance(p, q)), abs=EXACT)


def draws(x, v):
    return int(draw(x[None], torch.tensor([v], dtype=torch.float64)))


def from_p(p, q, guess, u, v):
    """Redraws from the target instead of from what it has beyond the draft."""
    return (guess, True) if u * q[guess] < p[guess] else (draws(p, v), False)


def upside_down(p, q, guess, u, v):
    """Accepts with min(1, q / p)."""
    return (guess, True) if u * p[guess] < q[guess] else accept(p, q, guess, 1 - 1e-9, v)[:1] + (False,)


def by_p_alone(p, q, guess, u, v):
    """Accepts with p, as if the guess had been certain, and redraws from the residual."""
    return (guess, True) if u < p[guess] else (draws((p - q).clamp(min=0), v), False)


def always(p, q, guess, u, v):
    return guess, True


def residual_of_the_difference(p, q, guess, u, v):
    """Redraws from |p - q|."""
    return (guess, True) if u * q[guess] < p[guess] else (draws((p - q).abs(), v), False)


@pytest.mark.parametrize("mistake", [from_p, upside_down, by_p_alone, always, residual_of_the_difference])
def test_the_mistakes_have_another_law(unchecked, mistake):
    p, q = distribution([5, 2, 1, 2]), distribution([1, 4, 3, 2])
    assert (law(accept, p, q) - p).abs().max() < EXACT
    assert (law(mistake, p, q) - p).abs().max() > 0.01


def test_the_corners(unchecked):
    p, one = distribution([5, 2, 1, 2]), distribution([0, 1, 0, 0])
    assert (law(accept, p, one) - p).abs().max() < EXACT  # a look-up: q is certain
    assert (law(accept, one, p) - one).abs().max() < EXACT  # temperature 0
    assert (law(accept, p, p) - p).abs().max() < EXACT and acceptance(p, p) == pytest.approx(1)
    assert accept(p, p, 0, 1 - 2**-53, 0.3) == (0, True)
    apart = distribution([0, 0, 1, 1])
    assert acceptance(one, apart) == 0 and accept(one, apart, 2, 0.0, 0.9) == (1, False)
    # Refused by rounding only, where nothing is left over: the target's own distribution.
    half = torch.tensor([0.5, 0.5], dtype=torch.float64)
    assert accept(half, half * (1 + 2**-52), 0, 1 - 2**-53, 0.7) == (1, False)


# --- a whole pass, exactly -----------------------------------------------------------------------------


class Uniforms(Sampler):
    """A sampler whose random numbers are written down."""

    def __init__(self, numbers, **options):
        super().__init__(**options)
        self.numbers = iter(numbers)

    def uniform(self):
        return next(self.numbers)

    def __call__(self, logits):
        p = probabilities(logits, **self.options)
        return draw(p, torch.tensor([self.uniform()], dtype=torch.float64))


V3 = range(3)
HALVES = [(2, 0, 0), (0, 2, 0), (0, 0, 2), (1, 1, 0), (1, 0, 1), (0, 1, 1)]


def tables(seed):
    """p after no, one and two tokens; q after none and one: multiples of a half, at random."""
    g = torch.Generator().manual_seed(seed)

    def pick(*shape):
        rows = torch.tensor(HALVES, dtype=torch.float64) / 2
        return rows[torch.randint(6, shape, generator=g)]

    return (pick(), pick(3), pick(3, 3)), (pick(), pick(3))


def law_of_a_pass(check, p, q):
    """Joint law of three tokens: those of a pass of two guesses, and further ones from p.

    All numbers are multiples of a half, so every threshold of u and v is 0, a half, or 1, and u, v = 1/4 and
    3/4 stand for all: enumerating them is exact.
    """
    out = torch.zeros(3, 3, 3, dtype=torch.float64)
    for a, b in itertools.product(V3, V3):
        chance = q[0][a] * q[1][a][b]
        if not chance:
            continue
        proposal = Proposal([a, b], torch.stack([q[0], q[1][a]]))
        logits = torch.stack([p[0], p[1][a], p[2][a, b]]).log()
        for numbers in itertools.product((0.25, 0.75), repeat=5):
            got = check(logits, proposal, Uniforms(numbers))
            for rest in itertools.product(V3, repeat=3 - len(got)):
                x = (*got, *rest)
                weight = chance / 2**5
                for i in range(len(got), 3):
                    weight = weight * (p[0], p[1][x[0]], p[2][x[0], x[1]])[i][x[i]]
                out[x] += weight
    return out


def target_law(p):
    return p[0][:, None, None] * p[1][:, :, None] * p[2]


def no_bonus_but_a_guess(logits, proposal, sampler):
    """Forgets that the last place is the target's: a third guess is let through unchecked."""
    got = verify(logits, proposal, sampler)
    return [*got[:-1], int(proposal.probs[-1].argmax())] if len(got) == 3 else got


def bonus_of_the_wrong_row(logits, proposal, sampler):
    return verify(logits[[0, 1, 1]], proposal, sampler)


def goes_on_after_a_refusal(logits, proposal, sampler):
    got = verify(logits, proposal, sampler)
    return [*got, *proposal.ids[len(got) :]]


def test_a_pass_has_the_law_of_the_target(unchecked):
    wrong = {no_bonus_but_a_guess: 0.0, bonus_of_the_wrong_row: 0.0, goes_on_after_a_refusal: 0.0}
    for seed in range(6):
        p, q = tables(seed)
        want = target_law(p)
        assert (law_of_a_pass(verify, p, q) - want).abs().max() < EXACT
        for mistake in wrong if seed < 3 else ():
            gap = (law_of_a_pass(mistake, p, q) - want).abs().max()
            wrong[mistake] = max(wrong[mistake], float(gap))
    assert min(wrong.values()) > 0.05


# --- end to end, by counting ---------------------------------------------------------------------------

V, LENGTH = 6, 3000
ERROR_RATE = 1e-6  # of a chi-square test of a right program, over all seeds; the seeds are fixed
WARP = {"temperature": 0.7, "top_k": 5, "top_p": 0.95, "min_p": 0.02}


class Table:
    """Makes of a tiny decoder one whose logits depend on the last token only."""

    def __init__(self, base, seed):
        g = torch.Generator().manual_seed(seed)
        self.table = 1.5 * torch.randn(V, V, generator=g, dtype=torch.float64)

        class Markov(type(base)):
            def forward(inner, ids, cache=None, *, lengths=None, logits="all"):
                return self.table[ids if logits == "all" else ids[:, -1:]]

        self.model = base
        base.__class__ = Markov


@pytest.fixture(scope="module")
def markov(make_decoder):
    return Table(make_decoder(vocab=V, max_context=None), 1)


def misfit(tokens, p):
    """Chi-square of the transitions against p (V, V): the probability of so bad a fit by chance."""
    pairs = torch.tensor(tokens)
    counts = torch.zeros(V, V, dtype=torch.float64)
    counts.index_put_((pairs[:-1], pairs[1:]), torch.ones(len(pairs) - 1, dtype=torch.float64), True)
    want = counts.sum(1, keepdim=True) * p
    if counts[p == 0].any():
        return 0.0
    used = want >= 5
    chi = ((counts - want)[used] ** 2 / want[used]).sum()
    freedom = (used.sum(1) - 1).clamp(min=0).sum()
    return float(torch.special.gammaincc(freedom / 2.0, chi / 2))


def run(markov, draft, seed, k=3):
    options = {"max_new_tokens": LENGTH, "stop_ids": (), "sampler": Sampler(**WARP, seed=seed)}
    return speculate(markov.model, [0], draft, draft_tokens=k, **options)


def drafting(markov):
    g = torch.Generator().manual_seed(9)
    other = markov.table + torch.randn(V, V, generator=g, dtype=torch.float64)
    return probabilities(other, **WARP)


def test_counts_end_to_end(unchecked, markov):
    p = probabilities(markov.table, **WARP)
    q = drafting(markov)
    assert (p == 0).any()  # the cut-offs bind
    plain = generate(markov.model, [0], max_new_tokens=LENGTH, stop_ids=(), sampler=Sampler(**WARP, seed=0))
    assert misfit(plain.tokens, p) > ERROR_RATE
    for seed, draft in enumerate([TableDraft(q), TableDraft(p), Says([2, 4, 2])]):
        g = run(markov, draft, seed)
        assert misfit(g.tokens, p) > ERROR_RATE
        if seed == 1:
            assert g.acceptance == 1 and g.tokens_per_pass > 3.99
    # Acceptance is what the two distributions say, at the rate at which the tokens come up: 5 deviations.
    g = run(markov, TableDraft(q), 7, k=1)
    rate = torch.bincount(torch.tensor(g.tokens), minlength=V) / len(g.tokens)
    want = float((acceptance(p, q) * rate).sum())
    assert abs(g.acceptance - want) < 5 * (want * (1 - want) / g.passes) ** 0.5


def test_the_counts_would_show_a_mistake(unchecked, markov, monkeypatch):
    p, q = probabilities(markov.table, **WARP), drafting(markov)
    for mistake in (from_p, upside_down, by_p_alone, residual_of_the_difference):
        monkeypatch.setattr(module, "accept", mistake)
        assert misfit(run(markov, TableDraft(q), 0).tokens, p) < ERROR_RATE
    monkeypatch.undo()
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    monkeypatch.setattr(module, "probabilities", lambda logits, **_: probabilities(logits))  # not warped
    assert misfit(run(markov, TableDraft(q), 0).tokens, p) < ERROR_RATE


def test_a_forgotten_bonus_token_would_show(unchecked, decoder, monkeypatch):
    prompt, n = [3, 1, 4], 13
    answer = generate(decoder, prompt, max_new_tokens=n, stop_ids=()).tokens

    def passes():
        draft = right(prompt, answer, 23)
        return speculate(decoder, prompt, draft, draft_tokens=3, max_new_tokens=n, stop_ids=()).passes

    assert passes() == 3  # of four tokens each
    monkeypatch.setattr(module, "verify", lambda *a: verify(*a)[:-1] if len(a[1].ids) == 3 else verify(*a))
    assert passes() == 4


def test_the_checks_of_this_file_can_fail():
    p = distribution([5, 2, 1, 2])
    table = p.expand(V, 4)
    assert misfit([0, 1, 2, 3] * 300, torch.nn.functional.pad(table, (0, V - 4))) < ERROR_RATE
    assert measure(lambda u: u < 0.3) == pytest.approx(0.3, abs=1e-14)
    assert measure(lambda u: False) == 0 and measure(lambda u: True) == pytest.approx(1, abs=1e-14)


def test_a_model_that_drafts_draws_from_what_it_reports(unchecked, markov, make_decoder, monkeypatch):
    """Its guesses' true distribution, or the ratio corrects for the wrong one."""
    p = probabilities(markov.table, **WARP)
    small = Table(make_decoder(vocab=V, max_context=None), 2).model
    assert misfit(run(markov, DecoderDraft(small), 0).tokens, p) > ERROR_RATE
    monkeypatch.setattr(drafts, "draw", lambda q, u: draw(q**2, u))
    assert misfit(run(markov, DecoderDraft(small), 0).tokens, p) < ERROR_RATE

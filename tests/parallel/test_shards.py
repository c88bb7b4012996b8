"""Several processes give what one gives, and say to each other exactly what was predicted."""

import weakref

import pytest
import torch
from parallel_ranks import STEPS, Silent

from companion.cost import models, parallel_bytes, parameters, rank_parameters
from companion.model import Decoder
from companion.parallel import Group, RandomWeights, Slices, cache_nbytes, shard
from tests.parallel.conftest import DTYPES, EXPERT, TENSOR

TOKENS = [2 * n for n in (9, *STEPS)]  # two texts: all at once, then in steps
BOTH = [(world, n) for world in ("four", "two") for n in TENSOR]
SPARSE = [(world, n) for world in ("four", "two") for n in EXPERT]


@pytest.fixture
def ranks(request):
    return lambda world: request.getfixturevalue(world)


def same(got, want, tolerance):
    for g, w in zip(got, want):
        torch.testing.assert_close(g, w, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world, name", BOTH)
def test_tensor_parallel_logits_are_those_of_one(ranks, one, world, name, dtype):
    results = ranks(world)
    for result in results:
        same(result["tensor"][name, dtype], one(name, dtype), DTYPES[dtype])
    # Not nearly: a token chosen on one rank is chosen on all.
    for result in results[1:]:
        assert all(map(torch.equal, result["tensor"][name, dtype], results[0]["tensor"][name, dtype]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world, name", SPARSE)
def test_expert_parallel_logits_are_those_of_one(ranks, one, world, name, dtype):
    for rank, result in enumerate(ranks(world)):  # every rank has texts of its own
        same(result["expert"][name, dtype], one(name, dtype, rank), DTYPES[dtype])


@pytest.mark.parametrize("name", EXPERT)
def test_both_at_once(four, one, name):
    for result in four:
        expert_rank = result["mesh counted"][2][1]
        same(result["mesh"][name], one(name, torch.float64, expert_rank), 1e-12)
    assert sorted(r["mesh counted"][2] for r in four) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def table(calls):
    counted = {}
    for c in calls:
        n, payload = counted.get((c.what, c.kind), (0, 0))
        counted[c.what, c.kind] = n + 1, payload + c.payload
    return counted


def predicted(spec, dtype, **ranks):
    wanted = {}
    for tokens in TOKENS:
        for e in parallel_bytes(spec, tokens=tokens, dtype=dtype, **ranks).exchanges:
            n, payload = wanted.get((e.what, e.kind), (0, 0))
            wanted[e.what, e.kind] = n + e.calls, payload + e.payload
    return wanted


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world, name", BOTH)
def test_tensor_parallel_bytes_are_those_predicted(ranks, whole, world, name, dtype):
    results = ranks(world)
    bits = 8 * dtype.itemsize
    for result in results:
        counted = table(result["counted"]["tensor", name, dtype])
        assert counted == predicted(whole[name][0], bits, tensor=len(results))


def rows_add_up(calls_per_rank, wanted):
    """Dispatch and counts are exact on each rank, the way back is exact for what comes in, and in sum."""
    for calls in calls_per_rank:
        counted, back = table(calls), ("combine", "all_to_all")
        assert {k: v for k, v in counted.items() if k != back} == {
            k: v for k, v in wanted.items() if k != back
        }
        combined = [c for c in calls if c.what == "combine"]
        assert (len(combined), sum(c.received for c in combined)) == wanted[back]
    total = sum(c.payload for calls in calls_per_rank for c in calls)
    assert total == len(calls_per_rank) * sum(payload for _, payload in wanted.values())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world, name", SPARSE)
def test_expert_parallel_bytes_are_those_predicted(ranks, whole, world, name, dtype):
    results = ranks(world)
    calls = [r["counted"]["expert", name, dtype] for r in results]
    rows_add_up(calls, predicted(whole[name][0], 8 * dtype.itemsize, expert=len(results)))
    rows = [c for rank in calls for c in rank if c.what == "dispatch"]
    assert 0 < sum(c.abroad for c in rows) < sum(c.payload for c in rows)  # one's own stay at home


def test_bytes_of_both_at_once(four, whole):
    """All models of the mesh, one after another: the sum of their predictions."""
    wanted = {}
    for name in EXPERT:
        for k, (n, payload) in predicted(whole[name][0], 64, tensor=2, expert=2).items():
            wanted[k] = tuple(a + b for a, b in zip(wanted.get(k, (0, 0)), (n, payload)))
    reduced = {k: v for k, v in wanted.items() if k[1] == "all_reduce"}
    for result in four:
        assert table(result["mesh counted"][0]) == reduced
    columns = [[r["mesh counted"][1] for r in four if r["mesh counted"][2][0] == c] for c in (0, 1)]
    for column in columns:
        rows_add_up(column, {k: v for k, v in wanted.items() if k[1] == "all_to_all"})


@pytest.mark.parametrize("world, name", BOTH)
def test_a_rank_holds_its_part_and_no_more(ranks, whole, world, name):
    results, (spec, _) = ranks(world), whole[name]
    for result in results:
        held, own_memory = result["held"]["tensor", name]
        assert held == 8 * rank_parameters(spec, tensor=len(results))
        assert own_memory  # no view of a whole tensor, which would keep it alive
        if name in EXPERT:
            assert result["held"]["expert", name][0] == 8 * rank_parameters(spec, expert=len(results))


class Lent:
    """Tensors of a file, read anew each time; `peak`: the most bytes of them that were alive at once."""

    def __init__(self, weights):
        self.weights, self.peak, self.lent = weights, 0, []

    def __call__(self, name):
        if name not in self.weights:
            raise ValueError(f"no tensor {name!r}")
        x = self.weights[name].clone()
        self.lent.append((weakref.ref(x.untyped_storage()), x.nbytes))
        self.peak = max(self.peak, sum(n for storage, n in self.lent if storage() is not None))
        return x


@pytest.mark.parametrize("name", TENSOR)
def test_tensors_are_read_and_cut_one_by_one(whole, name):
    """Beside its part, a rank never holds more than one whole tensor."""
    spec, weights = whole[name]
    lent = Lent(weights)
    split = {"expert": Silent(2, 1)} if spec.moe else {}
    decoder = shard(spec, lent, tensor=Silent(2, 1), **split)
    assert lent.peak <= max(w.nbytes for w in weights.values())
    assert decoder.weights_bytes < sum(w.nbytes for w in weights.values())
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in decoder.parameters())


def test_a_group_of_one_is_the_model_itself(whole, one):
    for name in TENSOR:
        spec, weights = whole[name]
        assert shard(spec, weights).spec == spec
        assert Group().calls == []
    ids = torch.arange(1, 9)[None]
    spec, weights = whole["mixtral"]
    assert torch.equal(shard(spec, weights)(ids), Decoder(spec, weights)(ids))


@pytest.mark.parametrize("name, ranks", [("llama-3.1-8b", 8), ("llama-3.1-8b", 16), ("deepseek-v3", 8)])
def test_what_a_cache_costs_on_many_ranks(name, ranks):
    one_device, _ = cache_nbytes(models[name], 1, max_tokens=64, dtype=torch.bfloat16)
    each, together = cache_nbytes(models[name], ranks, max_tokens=64, dtype=torch.bfloat16)
    copies = {("llama-3.1-8b", 8): 1, ("llama-3.1-8b", 16): 2, ("deepseek-v3", 8): 8}[name, ranks]
    assert together == copies * one_device
    if name == "deepseek-v3":
        assert each == one_device == 64 * 61 * 576 * 2  # eight devices hold no more tokens than one


@pytest.mark.parametrize(
    "name, ranks, message",
    [
        ("llama", {"tensor": 3}, "tensor must be a divisor of heads=4, got 3"),
        ("llama", {"expert": 2}, "expert must be 1 for a model without experts, got 2"),
        ("mixtral", {"expert": 3}, "expert must be a divisor of moe.experts=8, got 3"),
        ("deepseek_v3", {"tensor": 8}, "tensor must be a divisor of heads=4, got 8"),
    ],
)
def test_ranks_that_do_not_divide_are_refused_before_anything_is_said_or_read(whole, name, ranks, message):
    def read(tensor):
        raise AssertionError(f"{tensor} was read")

    groups = {what: Silent(n) for what, n in ranks.items()}
    with pytest.raises(ValueError, match=message):
        shard(whole[name][0], read, **groups)


def test_a_tensor_that_is_missing_is_named_as_the_file_would(whole):
    spec, weights = whole["mixtral"]
    take = Slices(spec, {n: w for n, w in weights.items() if ".experts." not in n}, expert=(1, 2))
    with pytest.raises(ValueError, match="experts.5.gate_proj"):
        take("model.layers.0.mlp.experts.1.gate_proj.weight")


@pytest.mark.parametrize("name", TENSOR)
def test_random_weights_have_the_names_and_shapes_of_the_model(whole, name):
    spec, _ = whole[name]
    weights = RandomWeights(spec, 3)
    assert sum(w.numel() for w in weights.values()) == parameters(spec)
    decoder, ids = Decoder(spec, weights), torch.arange(1, 9)[None]
    assert torch.isfinite(decoder(ids)).all()
    again, other = RandomWeights(spec, 3), RandomWeights(spec, 4)
    last = "model.embed_tokens.weight"
    assert torch.equal(again[last], weights[last]) and not torch.equal(other[last], weights[last])

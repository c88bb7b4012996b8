"""The simulation: the engine's own steps without a model, on a clock that can be added up by hand."""

import json

import pytest
from engine_models import MODEL

from companion.cost import HardwareSpec, decode_step, prefill
from companion.engine import Arrival, Engine, Part, Request, live, roofline, simulate

FIXED = {"num_blocks": 9, "block_size": 2, "max_running": 3, "max_tokens_per_step": 7}


def parts(steps):
    return [[(p.id, p.start, p.count, p.sampled) for p in s.parts] for s in steps]


def test_it_decides_as_the_engine_does():
    prompts = [[1, 2, 3, 4], [5], [6, 7, 8, 9, 10], [1, 2, 3, 4, 5], [0, 1], [11, 12, 0]]
    engine = Engine(MODEL, **FIXED)
    for id, p in enumerate(prompts):
        engine.add(Request(p, 9, id=id, stop_ids=()))
    done = engine.run()
    played = simulate([Arrival(0, p, 9) for p in prompts], lambda parts: 1.0, **FIXED)
    assert parts(played.steps) == parts(engine.history)
    for name in ("admitted", "preempted", "running", "waiting", "blocks_free", "blocks_cached", "finished"):
        assert [getattr(s, name) for s in played.steps] == [getattr(s, name) for s in engine.history], name
    for a, b in zip(played.served, done):
        for name in (
            "id",
            "prompt_tokens",
            "finish_reason",
            "cached_tokens",
            "computed_tokens",
            "preemptions",
        ):
            assert getattr(a, name) == getattr(b, name), name
    assert sum(c.preemptions for c in done) > 0 and any(c.cached_tokens for c in done)


def test_times_by_hand():
    played = simulate(
        [Arrival(0.0, 5, 3, "a"), Arrival(0.25, 2, 2, "b"), Arrival(100.0, 1, 1, "c", max_new_tokens=4)],
        lambda parts: 0.5 + 0.125 * sum(p.count for p in parts),
        num_blocks=20,
        block_size=4,
        max_running=2,
        max_tokens_per_step=4,
    )
    # a: 4 tokens in [0, 1], 1 with two of b in [1, 1.875]; both decode in [1.875, 2.625]; a in [2.625, 3.25]
    assert [(s.start_s, s.seconds) for s in played.steps[:3]] == [(0, 1), (1, 0.875), (1.875, 0.75)]
    a, b, c = played.served
    assert (a.ttft_s, a.itl_s) == (1.875, [0.75, 0.625]) and b.itl_s == [0.75]
    assert (b.queue_s, b.ttft_s, b.finished_s) == (0.75, 1.625, 2.625)
    assert (c.queue_s, c.ttft_s, c.finish_reason) == (0.0, 0.625, "stop") and a.finish_reason == "length"
    assert played.seconds == 100.625 and played.tokens_per_second == 6 / 100.625


def test_roofline_is_the_cost_model_s():
    machine = HardwareSpec.measured(bandwidth=3e10, flops=1e11)
    dtypes = {"weight_dtype": "fp32", "kv_dtype": "fp32", "compute_dtype": "fp32"}
    seconds = roofline("smollm2-135m", machine, overhead_seconds=0.001, **dtypes)
    decodes = [Part(i, 99, 1, True) for i in range(8)]
    assert seconds(decodes) == pytest.approx(
        decode_step("smollm2-135m", machine, 8, 100, overhead_seconds=0.001, **dtypes).seconds, rel=1e-12
    )
    assert seconds([Part(0, 64, 200, True)]) == pytest.approx(
        prefill("smollm2-135m", machine, 200, cached=64, overhead_seconds=0.001, **dtypes).seconds, rel=1e-12
    )
    assert seconds([*decodes, Part(9, 0, 200, False)]) > seconds(decodes)


def ask(**changes):
    request = {
        "num_blocks": 12,
        "block_size": 4,
        "max_running": 3,
        "max_tokens_per_step": 8,
        "cost": {"step_s": 0.5, "token_s": 0.125},
        "requests": [
            {"id": c, "at_s": i, "prompt": 9, "new_tokens": 6, "prefix": {"name": "system", "tokens": 8}}
            for i, c in enumerate("ABC")
        ],
    }
    return json.loads(live(json.dumps(request | changes)))


def test_a_page_gets_the_timeline():
    reply = ask()
    assert reply["ok"] and json.dumps(reply)
    result = reply["result"]
    assert [r["id"] for r in result["requests"]] == ["A", "B", "C"]
    assert [r["cached_tokens"] for r in result["requests"]] == [0, 8, 8]
    assert all(r["new_tokens"] == 6 and r["finish_reason"] == "length" for r in result["requests"])
    assert sum(p["sampled"] for s in result["steps"] for p in s["parts"]) == 18
    assert all(s["blocks_free"] + s["blocks_live"] == 12 for s in result["steps"])
    assert result["steps"][0]["tokens"] == 8 and result["steps"][0]["decodes"] == 0
    cold = ask(prefix_caching=False)["result"]
    assert [r["cached_tokens"] for r in cold["requests"]] == [0, 0, 0] and cold["seconds"] > result["seconds"]
    words = [
        {"prompt": "a b c d e a b", "new_tokens": 1},
        {"prompt": ["a", "b", "c", "d", 5], "new_tokens": 1},
    ]
    assert [r["cached_tokens"] for r in ask(requests=words)["result"]["requests"]] == [0, 0]
    salted = [words[0], words[0] | {"salt": "x"}, words[0]]
    salted = [w | {"at_s": 10 * i} for i, w in enumerate(salted)]
    assert [r["cached_tokens"] for r in ask(requests=salted)["result"]["requests"]] == [0, 0, 4]


def test_a_page_is_told_what_can_never_be_served():
    result = ask(requests=[{"id": "big", "prompt": 48, "new_tokens": 2}, {"prompt": 3, "new_tokens": 1}])[
        "result"
    ]
    big, small = result["requests"]
    assert big["finish_reason"] == "refused" and "the pool has 12" in big["refused"]
    assert small["finish_reason"] == "length" and small["id"] == "1"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_blocks": None}, "num_blocks=None"),
        ({"num_blocks": 10**9}, "num_blocks: at most"),
        ({"block_size": "4"}, "block_size='4'"),
        ({"prefix_caching": 1}, "prefix_caching=1"),
        ({"max_running": 9}, "max_tokens_per_step=8; need at least max_running=9"),
        ({"what": 1}, "'what'"),
        ({"requests": {}}, "requests: need a list"),
        ({"requests": [3]}, "request 0: need an object"),
        ({"requests": [{"prompt": 3}]}, "new_tokens=None"),
        ({"requests": [{"prompt": -3, "new_tokens": 1}]}, "prompt=-3"),
        ({"requests": [{"prompt": 0, "new_tokens": 1}]}, "prompt is empty"),
        ({"requests": [{"prompt": 1.5, "new_tokens": 1}]}, "prompt=1.5"),
        ({"requests": [{"prompt": 3, "new_tokens": 2, "max_new_tokens": 1}]}, "max_new_tokens=1"),
        ({"requests": [{"prompt": 3, "new_tokens": 1, "at_s": -1}]}, "at_s=-1"),
        ({"requests": [{"prompt": 10**9, "new_tokens": 1}]}, "at most 65536 tokens"),
        ({"requests": [{"id": "a", "prompt": 3, "new_tokens": 9}] * 2}, "has not ended yet"),
        ({"cost": {"step_s": -1}}, "step_s=-1"),
        ({"cost": {"model": "no such model", "hardware": "h100-sxm"}}, "no such model"),
        ({"cost": {"model": "llama-3.1-8b"}}, "hardware"),
        ({"cost": {"model": "llama-3.1-8b", "hardware": "h100-sxm", "step_s": 1}}, "step_s and token_s"),
    ],
)
def test_a_request_that_makes_no_sense(changes, message):
    reply = ask(**changes)
    assert not reply["ok"] and message in reply["error"]


def test_no_json_at_all():
    for text in ("", "[1]", "{", "3"):
        assert not json.loads(live(text))["ok"]

"""The simulation: the engine's own steps without a model, on a clock that can be added up by hand."""

import json
import random

import pytest
from engine_models import MODEL

from companion.cost import HardwareSpec, decode_step, prefill
from companion.engine import Arrival, Engine, Part, Request, Scheduler, roofline, simulate
from companion.live.serving import live
from companion.serving import simulation

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
    dtypes = {"weights": "fp32", "kv": "fp32", "compute_dtype": "fp32"}
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


# --- what a reader is told of the steps -------------------------------------------------------------------

STEPS = {"step_s": 1, "token_s": 0}


def play(traffic, **options):
    reply = json.loads(live(json.dumps({"cost": STEPS, **options, "traffic": traffic})))
    assert reply["ok"], reply
    return reply["result"]


def drawn(rng):
    """A setting as a page could ask for it, often one with too little of something."""
    running = rng.randint(1, 5)
    return {
        "cost": {"step_s": 1, "token_s": rng.choice((0, 0.25))},  # sums of these are exact
        "traffic": {
            "count": rng.randint(1, 8),
            "spacing": rng.choice((0, 0, 1, 3)),
            "prompt": rng.randint(1, 12),
            "reply": rng.randint(1, 12),
            "mix": rng.choice(("alike", "prompts", "replies", "long", "shared")),
        },
        "num_blocks": rng.randint(2, 20),
        "block_size": rng.randint(1, 5),
        "max_running": running,
        "max_tokens_per_step": rng.randint(running, 16),
        "prefix_caching": rng.random() < 0.5,
    }


def test_the_chapter_s_four_requests():
    pool = {"block_size": 4, "max_running": 4, "max_tokens_per_step": 32, "prefix_caching": False}
    traffic = {"count": 4, "prompt": 8, "reply": 20, "mix": "prompts"}
    told = play(traffic, num_blocks=14, **pool)
    users = (("A", 6), ("B", 10), ("C", 4), ("D", 8))
    requests = [{"id": id, "prompt": n, "new_tokens": 20} for id, n in users]
    assert (
        told
        == json.loads(live(json.dumps({"num_blocks": 14, "cost": STEPS, **pool, "requests": requests})))[
            "result"
        ]
    )
    said = [step["decided"] for step in told["steps"]]
    assert said[0] == ["A, B, C and D enter with prompts of 6, 10, 4 and 8 tokens, read in one step."]
    assert said[7] == [
        "No block is free: D gives all back, to be computed again.",
        "A, B and C write one token each.",
        "D waits: nobody enters in a step that took blocks back.",
    ]
    assert said[19][-2:] == [
        "B waits: nobody enters in a step that took blocks back. 2 more behind it.",
        "A ends.",
    ]
    assert said[20] == [
        "B enters and computes 29 tokens, 28 of them once more.",
        "C enters and computes 3 tokens, 3 of them once more.",
        "D waits: all 32 tokens of the step are taken.",
        "B ends.",
    ]
    assert told["waits"] == [
        {"row": row, "kind": "back", "start_s": start, "end_s": end}
        for row, start, end in ((1, 19, 20), (2, 11, 20), (3, 7, 21))
    ]
    totals = told["totals"]
    assert (totals["steps"], totals["again"], totals["preemptions"], totals["tokens"]) == (34, 56, 3, 80)
    assert (totals["ttft_max_s"], totals["itl_max_s"], totals["itl_mean_s"]) == (
        1,
        15,
        (4 * 19 + 1 + 10 + 14) / 76,
    )
    # The saw of the chapter: with a prefix cache 24 of 26 tokens are found again, where one block is missing.
    assert play(traffic, num_blocks=27, **pool)["totals"]["again"] == 26
    assert play(traffic, num_blocks=27, **pool | {"prefix_caching": True})["totals"]["again"] == 2


@pytest.mark.parametrize("seed", range(60))
def test_every_moment_of_a_request_is_accounted_for(seed):
    asked = drawn(random.Random(seed))
    told = play(**asked)
    spent = {row: [] for row in range(len(told["requests"]))}
    for wait in told["waits"]:
        spent[wait["row"]].append((wait["start_s"], wait["end_s"]))
    for step in told["steps"]:
        for part in step["parts"]:
            spent[part["row"]].append((step["start_s"], step["start_s"] + step["seconds"]))
            assert told["requests"][part["row"]]["id"] == part["id"]
    assert {w["kind"] for w in told["waits"]} <= {"waiting", "back"}
    for wait in told["waits"]:  # whoever runs computes something: the budget has a token for each
        begun = any(
            p["row"] == wait["row"]
            for s in told["steps"]
            for p in s["parts"]
            if s["start_s"] < wait["start_s"]
        )
        assert wait["kind"] == ("back" if begun else "waiting")
    for row, one in enumerate(told["requests"]):
        at = one["arrival_s"]
        for start, end in sorted(spent[row]):
            assert start == at < end, "a gap, or two things at a time"
            at = end
        assert at == (one["arrival_s"] if one["refused"] else one["finished_s"])
        if not one["refused"]:
            least = one["prompt_tokens"] - one["cached_tokens"] + one["new_tokens"] - 1
            assert one["again"] == one["computed_tokens"] - least
            assert one["itl_mean_s"] == (sum(one["itl_s"]) / len(one["itl_s"]) if one["itl_s"] else None)
    counted = [p for step in told["steps"] for p in step["parts"]]
    assert told["totals"]["again"] == sum(p["again"] for p in counted)
    assert told["totals"]["computed"] == sum(p["count"] for p in counted)
    for p in counted:
        long = told["requests"][p["row"]]["prompt_tokens"]
        assert p["kind"] == ("again" if p["again"] else "prefill" if p["start"] < long else "decode")


def test_the_reason_for_waiting_is_the_scheduler_s_own(monkeypatch):
    said, true = [], []

    class Watched(Scheduler):
        def plan(self):
            self.failed = False
            plan = super().plan()
            reason = None
            if self.num_waiting:
                head = next(self.waiting).id
                full = plan.tokens == self.max_tokens_per_step
                why = "blocks are free for" if self.failed else "tokens of the step" if full else "seats"
                reason = head, "took blocks back" if plan.preempted else why
            true.append(reason)
            return plan

        def _admit(self, job):
            self.failed = not super()._admit(job)
            return not self.failed

    monkeypatch.setattr(simulation, "Scheduler", Watched)
    for seed in range(60):
        said += [
            [d for d in s["decided"] if " waits: " in d] for s in play(**drawn(random.Random(seed)))["steps"]
        ]
    assert len(said) == len(true)
    for texts, reason in zip(said, true):
        assert len(texts) == (reason is not None)
        if reason:
            assert texts[0].startswith(f"{reason[0]} waits: ") and reason[1] in texts[0], (texts, reason)
    assert {reason[1] for reason in true if reason} == {
        "blocks are free for", "tokens of the step", "seats", "took blocks back"
    }  # fmt: skip


def test_lengths_of_the_mixes():
    def lengths(mix, prompt=8, reply=8, count=5):
        told = play({"count": count, "prompt": prompt, "reply": reply, "mix": mix}, num_blocks=99)
        return [(r["prompt_tokens"], r["new_tokens"]) for r in told["requests"]]

    assert lengths("alike") == [(8, 8)] * 5
    assert lengths("prompts") == [(6, 8), (10, 8), (4, 8), (8, 8), (6, 8)]
    assert lengths("replies") == [(8, 2), (8, 8), (8, 4), (8, 16), (8, 2)]
    assert lengths("long") == [(8, 8)] * 4 + [(128, 8)]
    assert lengths("shared") == [(8, 8)] * 5
    for mix in ("prompts", "replies", "shared"):
        assert min(min(pair) for pair in lengths(mix, 1, 1)) == 1
    shared = play(
        {"count": 2, "spacing": 99, "prompt": 16, "reply": 2, "mix": "shared"}, num_blocks=9, block_size=4
    )
    assert [r["cached_tokens"] for r in shared["requests"]] == [0, 12]
    # A step of spacing is one decode of one request alone, in whatever the clock says.
    slow = {"count": 3, "spacing": 2, "prompt": 5, "reply": 1}
    times = [
        r["arrival_s"] for r in play(slow, num_blocks=9, cost={"step_s": 0.5, "token_s": 0.25})["requests"]
    ]
    assert times == [0, 1.5, 3]
    names = [r["id"] for r in play({"count": 28, "prompt": 1, "reply": 1}, num_blocks=9)["requests"]]
    assert names[:2] == ["A", "B"] and names[25:] == ["Z", "A1", "B1"]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_blocks": None}, "num_blocks=None"),
        ({"num_blocks": 10**9}, "num_blocks=65536=1000000000"),
        ({"block_size": "4"}, "block_size='4'"),
        ({"prefix_caching": 1}, "prefix_caching=1"),
        ({"max_running": 9}, "max_tokens_per_step must be an integer of at least 9, got 8"),
        ({"what": 1}, "'what'"),
        ({"requests": {}}, "requests must be a list"),
        ({"requests": [3]}, "request 0 must be an object, got 3"),
        ({"requests": [{"prompt": 3}]}, "new_tokens=None"),
        ({"requests": [{"prompt": -3, "new_tokens": 1}]}, "prompt=-3"),
        ({"requests": [{"prompt": 0, "new_tokens": 1}]}, "prompt must be at least one token"),
        ({"requests": [{"prompt": 1.5, "new_tokens": 1}]}, "prompt=1.5"),
        ({"requests": [{"prompt": 3, "new_tokens": 2, "max_new_tokens": 1}]}, "max_new_tokens=1"),
        ({"requests": [{"prompt": 3, "new_tokens": 1, "at_s": -1}]}, "at_s=-1"),
        ({"requests": [{"prompt": 10**9, "new_tokens": 1}]}, "at most 65536 tokens"),
        ({"requests": [{"id": "a", "prompt": 3, "new_tokens": 9}] * 2}, "has not ended yet"),
        ({"cost": {"step_s": -1}}, "step_s=-1"),
        ({"traffic": {"count": 1, "prompt": 1, "reply": 1}}, "give requests or traffic"),
        ({"cost": {"model": "no such model", "hardware": "h100-sxm"}}, "no such model"),
        ({"cost": {"model": "llama-3.1-8b"}}, "hardware"),
        ({"cost": {"model": "llama-3.1-8b", "hardware": "h100-sxm", "step_s": 1}}, "step_s and token_s"),
    ],
)
def test_a_request_that_makes_no_sense(changes, message):
    reply = ask(**changes)
    assert not reply["ok"] and all(part in reply["error"] for part in message.split("="))


def test_no_json_at_all():
    for text in ("", "[1]", "{", "3"):
        assert not json.loads(live(text))["ok"]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"count": 0}, "count=0"),
        ({"count": 10**6}, "count must be an integer from 1 to 200=1000000"),
        ({"count": True}, "count=True"),
        ({"prompt": "8"}, "prompt='8'"),
        ({"prompt": 10**9}, "prompt must be an integer from 1 to 65536=1000000000"),
        ({"reply": None}, "reply=None"),
        ({"spacing": -1}, "spacing=-1"),
        ({"spacing": 1.5}, "spacing=1.5"),
        ({"mix": "salad"}, "mix must be one of alike, prompts"),
        ({"mix": ["alike"]}, "mix=['alike']"),
        ({"colour": 1}, "'colour'"),
    ],
)
def test_traffic_that_makes_no_sense(changes, message):
    traffic = {"count": 2, "prompt": 4, "reply": 4, **changes}
    reply = json.loads(live(json.dumps({"num_blocks": 9, "traffic": traffic})))
    assert not reply["ok"] and all(part in reply["error"] for part in message.split("="))
    assert not json.loads(live('{"num_blocks": 9, "traffic": []}'))["ok"]

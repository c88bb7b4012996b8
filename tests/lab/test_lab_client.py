"""What the client reports, against servers whose every delay is known: the times are exact."""

import json

import pytest
from scripted import (
    DONE,
    DROP,
    REFUSE,
    ROLE,
    SILENCE,
    Answered,
    delta,
    finish,
    refusal,
    sse,
    usage,
)

from companion.lab.client import Endpoint


def ask(endpoint, **options):
    return endpoint.ask("Hello", **({"max_tokens": 8} | options))


WHOLE = Answered(
    [
        (0.5, sse(ROLE)),
        (2.0, sse(delta("The"))),
        (0.25, sse(delta(" sea"))),
        (0.25, sse(delta(" is"))),
        (0.75, sse(delta(" wide"))),
        (0.0, sse(finish())),
        (0.5, sse(usage(4, prompt=20, cached=3))),
        (0.0, sse(DONE)),
    ]
)


def test_times_are_those_of_the_script(scripted):
    endpoint, transport = scripted(WHOLE)
    a = ask(endpoint)
    assert a.ok and a.fault is None
    assert a.ttft_s == 2.5  # not 0.5, when the role came
    assert a.arrivals_s == [2.5, 2.75, 3.0, 3.75] and a.gaps_s == [0.25, 0.25, 0.75]
    assert a.itl_s == a.itl_low_s == a.itl_high_s == 1.25 / 3
    assert (a.tokens, a.counted_by, a.prompt_tokens, a.cached_tokens) == (4, "usage", 20, 3)
    assert (a.text, a.finish_reason, a.done, a.merged) == ("The sea is wide", "length", True, False)
    assert a.finished_s == 1003.75 and a.sent_s == 1000.0 and a.attempts == 1
    assert transport.open == 0


def test_connecting_is_in_no_other_time(scripted):
    endpoint, _ = scripted(Answered(WHOLE.pieces, connect_after=1.5, headers_after=0.25))
    a = ask(endpoint)
    assert a.connect_s == 1.5 and a.ttft_s == 2.75


@pytest.mark.parametrize("content", [None, "", "absent"])
def test_an_early_event_without_text_is_no_token(scripted, content):
    first = {"role": "assistant"} | ({} if content == "absent" else {"content": content})
    role = {"choices": [{"index": 0, "delta": first}]}
    endpoint, _ = scripted(Answered([(0.125, sse(role)), (3.0, sse(delta("x"), finish(), DONE))]))
    assert ask(endpoint).ttft_s == 3.125


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_is_text(scripted, name):
    thought = {"choices": [{"index": 0, "delta": {name: "hm"}}]}
    endpoint, _ = scripted(Answered([(1.0, sse(thought)), (2.0, sse(delta("x"), finish(), DONE))]))
    assert ask(endpoint).arrivals_s == [1.0, 3.0]


def test_completions_have_their_text_elsewhere(scripted):
    text = {"choices": [{"index": 0, "text": "sea", "finish_reason": None}]}
    endpoint, transport = scripted(
        Answered([(1.0, sse(text)), (0.0, sse(finish(), DONE))]), api="completions"
    )
    assert ask(endpoint).text == "sea"
    ((method, path, _, body),) = transport.asked
    assert (method, path, body["prompt"]) == ("POST", "/v1/completions", "Hello") and "messages" not in body


def test_tokens_of_merged_events_are_shared_out(scripted):
    """8 tokens in 4 events, 2 in each: half a second per token; the first event may have held 1 to 5."""
    pieces = [
        (2.0, sse(delta("a b"))),
        *[(1.0, sse(delta(" c d")))] * 3,
        (0.0, sse(finish(), usage(8), DONE)),
    ]
    a = ask(scripted(Answered(pieces))[0])
    assert a.merged and (a.tokens, len(a.arrivals_s)) == (8, 4)
    assert a.itl_s == 0.5
    assert (a.itl_low_s, a.itl_high_s) == (3 / 7, 1.0)


def test_events_in_one_piece_come_at_one_moment(scripted):
    """The network may deliver several events together; the sum of the gaps is still the whole time."""
    pieces = [(1.0, sse(ROLE, delta("a"))), (0.5, sse(delta("b"), delta("c"))), (0.5, sse(delta("d")))]
    a = ask(scripted(Answered([*pieces, (0.0, sse(finish(), usage(4), DONE))]))[0])
    assert a.gaps_s == [0.5, 0.0, 0.5] and a.itl_s == 1.0 / 3 and not a.merged


def test_an_event_in_two_pieces_counts_when_it_is_whole(scripted):
    whole = sse(delta("a"))
    a = ask(scripted(Answered([(1.0, whole[:20]), (0.5, whole[20:]), (0.0, sse(finish(), DONE))]))[0])
    assert a.ttft_s == 1.5


def test_a_stop_token_is_counted_and_has_no_event(scripted):
    pieces = [
        (1.0, sse(delta("a"))),
        (0.5, sse(delta("b"))),
        (0.5, sse(delta("c"), finish("stop"), usage(4), DONE)),
    ]
    a = ask(scripted(Answered(pieces))[0])
    assert a.tokens == 4 and not a.merged and a.itl_s == 0.5


@pytest.mark.parametrize("told", [None, {}, {"completion_tokens": "3"}, {"completion_tokens": True}])
def test_without_usage_events_are_counted(scripted, told):
    pieces = [(1.0, sse(delta("a"))), (0.5, sse(delta("b"))), (0.0, sse(finish(usage=told), DONE))]
    a = ask(scripted(Answered(pieces))[0])
    assert a.ok and (a.tokens, a.counted_by, a.prompt_tokens) == (2, "events", None) and a.itl_s == 0.5


def test_usage_below_what_was_seen_is_not_believed(scripted):
    pieces = [(1.0, sse(delta("a"))), (0.5, sse(delta("b"))), (0.0, sse(finish(), usage(1), DONE))]
    a = ask(scripted(Answered(pieces))[0])
    assert (a.tokens, a.counted_by) == (2, "events")


def test_one_token_has_no_gap(scripted):
    a = ask(scripted(Answered([(1.0, sse(delta("a"), finish(), usage(1), DONE))]))[0])
    assert a.ok and a.ttft_s == 1.0 and a.itl_s is None


def test_no_done_is_no_fault_after_a_finish_reason(scripted):
    a = ask(scripted(Answered([(1.0, sse(delta("a"), finish("stop", usage={"completion_tokens": 2})))]))[0])
    assert a.ok and not a.done and a.tokens == 2


@pytest.mark.parametrize("end", [DROP, SILENCE])
def test_what_follows_a_whole_answer_may_be_lost(scripted, end):
    a = ask(scripted(Answered([(1.0, sse(delta("a"), finish())), (0.0, end)]))[0])
    assert a.ok and a.ttft_s == 1.0


def test_the_server_s_own_timings_are_kept(scripted):
    last = usage(1) | {"timings": {"prompt_ms": 900.0}}
    assert ask(scripted(Answered([(1.0, sse(delta("a"), finish(), last, DONE))]))[0]).timings == {
        "prompt_ms": 900.0
    }


# Faults ---------------------------------------------------------------------------------------------------


def faulty(answer):
    assert not answer.ok and answer.itl_s is None and "\n" not in str(answer.fault)
    return answer.fault


def test_a_stream_that_ends_early_is_cut_off(scripted):
    fault = faulty(ask(scripted(Answered([(1.0, sse(delta("a"))), (1.0, sse(delta("b")))]), retries=0)[0]))
    assert (fault.kind, fault.detail) == ("dropped", "it ended after 2 events, with no finish_reason")


def test_a_dropped_connection_is_tried_again_and_the_broken_times_are_gone(scripted):
    broken = Answered([(1.0, sse(delta("a"))), (9.0, DROP)])
    endpoint, transport = scripted(broken, WHOLE)
    a = ask(endpoint)
    assert a.ok and a.attempts == 2 and a.waited_s == 1.0
    assert a.ttft_s == 2.5 and a.sent_s == 1011.0 and transport.open == 0


def test_a_connection_that_always_drops(scripted):
    endpoint, transport = scripted(Answered([(1.0, sse(delta("a"))), (9.0, DROP)]), retries=2)
    a = ask(endpoint)
    assert faulty(a).kind == "dropped" and "after 1 events with text" in a.fault.detail
    assert len(transport.asked) == a.attempts == 3 and a.waited_s == 3.0


@pytest.mark.parametrize(
    "bad", ["{not json", "[1, 2]", '"text"', "null", "3", '{"choices": [' + "[" * 100_000]
)
def test_an_event_that_is_no_object_is_malformed(scripted, bad):
    endpoint, transport = scripted(Answered([(1.0, sse(delta("a"))), (1.0, sse(bad))]))
    assert faulty(ask(endpoint)).kind == "malformed" and len(transport.asked) == 1


@pytest.mark.parametrize(
    "odd",
    [
        {"choices": None},
        {"choices": "x"},
        {"choices": [None]},
        {"choices": [{"delta": None}]},
        {"choices": [{"delta": {"content": 7}}]},
        {"choices": [{"delta": {"content": ["a"]}, "finish_reason": 3}]},
        {"usage": "many"},
        {"timings": [1]},
        {},
    ],
)
def test_an_odd_event_is_no_token_and_no_crash(scripted, odd):
    a = ask(scripted(Answered([(1.0, sse(odd)), (1.0, sse(delta("a"), finish(), DONE))]))[0])
    assert a.ok and a.arrivals_s == [2.0] and a.timings is None


def test_an_error_inside_the_stream(scripted):
    error = {"error": {"message": "CUDA out\nof memory", "code": 500}}
    fault = faulty(ask(scripted(Answered([(1.0, sse(delta("a"), error))]), retries=0)[0]))
    assert (fault.kind, fault.detail) == ("server", "CUDA out of memory")


def test_an_endless_event(scripted):
    endpoint, _ = scripted(Answered([(0.5, b"data: " + b"x" * 60_000)] * 40))
    assert faulty(ask(endpoint)).kind == "malformed"


def test_an_answer_that_is_no_stream(scripted):
    body = json.dumps({"message": "streaming is off"}).encode()
    endpoint, _ = scripted(Answered([(1.0, body)], headers={"content-type": "application/json"}))
    fault = faulty(ask(endpoint))
    assert fault.kind == "malformed" and fault.detail == "content type 'application/json': streaming is off"


def test_an_answer_without_a_token(scripted):
    assert (
        faulty(ask(scripted(Answered([(1.0, sse(ROLE, finish("stop"), usage(1), DONE))]))[0])).kind == "empty"
    )


@pytest.mark.parametrize(
    "status, kind", [(401, "unauthorized"), (403, "unauthorized"), (404, "missing"), (400, "refused"),
                     (422, "refused"), (302, "refused")],
)  # fmt: skip
def test_a_refusal_is_not_repeated(scripted, status, kind):
    endpoint, transport = scripted(refusal(status, "The model `x` does not exist"))
    fault = faulty(ask(endpoint))
    assert (fault.kind, fault.status, len(transport.asked)) == (kind, status, 1)
    assert str(status) in str(fault) and transport.open == 0
    assert "does not exist" in fault.detail or "points elsewhere" in fault.detail


@pytest.mark.parametrize("status, kind", [(429, "busy"), (503, "loading"), (500, "server"), (502, "server")])
def test_a_busy_server_is_asked_again(scripted, status, kind):
    no = refusal(status, "later")
    endpoint, transport = scripted(no, no, no, WHOLE)
    a = ask(endpoint)
    assert a.ok and a.attempts == 4 and a.waited_s == 1.0 + 2.0 + 4.0
    assert a.sent_s == 1007.0 and a.ttft_s == 2.5  # pauses are in no time


def test_patience_ends(scripted):
    endpoint, transport = scripted(refusal(503, "Loading model"), retries=20, max_wait=31.0)
    fault = faulty(a := ask(endpoint))
    assert fault.kind == "loading" and "Loading model" in str(fault)
    assert a.attempts == 6 and a.waited_s == 31.0 and endpoint.clock.now() == 1031.0


def test_the_server_s_own_pause_is_kept(scripted):
    endpoint, _ = scripted(refusal(429, headers={"retry-after": "7"}), WHOLE)
    a = ask(endpoint)
    assert a.waited_s == 7.0 and a.sent_s == 1007.0


def test_a_pause_beyond_patience_is_not_begun(scripted):
    endpoint, _ = scripted(refusal(429, headers={"retry-after": "3600"}), WHOLE)
    assert faulty(ask(endpoint)).kind == "busy" and endpoint.clock.now() == 1000.0


def test_a_pause_given_as_a_date(scripted):
    past = refusal(429, headers={"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"})
    assert ask(scripted(past, WHOLE)[0]).waited_s == 0.0


def test_an_unreachable_address(scripted):
    fault = faulty(a := ask(scripted(REFUSE, retries=1)[0]))
    assert fault.kind == "unreachable" and a.attempts == 2


def test_a_server_that_never_answers(scripted):
    endpoint, transport = scripted(Answered(headers_after=1e9), first_timeout=20.0)
    fault = faulty(ask(endpoint))
    assert fault.kind == "timeout" and "before the first token" not in fault.detail
    assert endpoint.clock.now() == 1020.0 and len(transport.asked) == 1 and transport.open == 0


def test_a_stream_that_stays_silent(scripted):
    endpoint, _ = scripted(Answered([(0.5, sse(ROLE)), (0.0, SILENCE)]), first_timeout=20.0)
    fault = faulty(ask(endpoint))
    assert fault.kind == "timeout" and "before the first token" in fault.detail
    assert endpoint.clock.now() == 1020.0


def test_signs_of_life_do_not_put_off_the_end(scripted):
    """Comments every second keep a proxy awake; they are no token."""
    endpoint, _ = scripted(Answered([(1.0, b": still here\n\n")] * 500), first_timeout=20.0)
    assert faulty(ask(endpoint)).kind == "timeout" and endpoint.clock.now() == 1020.0


def test_a_stall_between_tokens(scripted):
    pieces = [(1.0, sse(delta("a"))), (1.0, sse(delta("b"))), (0.0, SILENCE)]
    endpoint, _ = scripted(Answered(pieces), gap_timeout=5.0, first_timeout=50.0)
    fault = faulty(ask(endpoint))
    assert fault.kind == "timeout" and "after 2 events" in fault.detail and endpoint.clock.now() == 1007.0


def test_an_endless_answer(scripted):
    endpoint, _ = scripted(Answered([(1.0, sse(delta("a")))] * 500), total_timeout=100.0)
    assert faulty(ask(endpoint)).kind == "timeout" and endpoint.clock.now() == 1100.0


# The key --------------------------------------------------------------------------------------------------


def test_the_key_is_sent_and_never_shown(scripted, monkeypatch):
    endpoint, transport = scripted(refusal(401, "Incorrect API key provided: sk-secret-123. Find it"))
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-123\n")
    a = ask(endpoint)
    assert transport.asked[0][2]["Authorization"] == "Bearer sk-secret-123"
    assert a.fault.detail == "Incorrect API key provided: [key]. Find it"
    assert "sk-secret" not in repr(a) + repr(vars(endpoint))


def test_a_key_in_a_broken_event_is_not_shown(scripted, monkeypatch):
    monkeypatch.setenv("MY_KEY", "sk-secret-123")
    endpoint, _ = scripted(Answered([(1.0, sse("{broken sk-secret-123"))]), key_env="MY_KEY")
    assert "sk-secret" not in str(faulty(ask(endpoint)))


def test_without_a_key_none_is_sent(scripted):
    endpoint, transport = scripted(WHOLE)
    ask(endpoint)
    assert "Authorization" not in transport.asked[0][2]


# What is asked, and by how many at once -------------------------------------------------------------------


def test_the_request(scripted):
    endpoint, transport = scripted(WHOLE, extra={"ignore_eos": True})
    ask(endpoint, max_tokens=5)
    method, path, headers, body = transport.asked[0]
    assert (method, path) == ("POST", "/v1/chat/completions") and headers[
        "Content-Type"
    ] == "application/json"
    assert body == {
        "model": "m", "max_tokens": 5, "temperature": 0.0, "stream": True, "ignore_eos": True,
        "stream_options": {"include_usage": True}, "messages": [{"role": "user", "content": "Hello"}],
    }  # fmt: skip


def test_a_server_that_refuses_to_report_usage_is_asked_without(scripted):
    endpoint, transport = scripted(refusal(400, "unknown field stream_options", shape="fastapi"), WHOLE)
    assert ask(endpoint).ok and ask(endpoint).ok
    assert ["stream_options" in body for body in transport.bodies] == [True, False, False]


def test_many_at_once_but_no_more_than_asked(scripted):
    import threading

    endpoint, transport = scripted(WHOLE)
    together = threading.Barrier(3, timeout=60)  # passes only when three requests are in flight
    transport.on_request = together.wait
    seen = []
    answers = endpoint.ask_all(
        [f"{i}" for i in range(9)], max_tokens=4, concurrency=3, on_answer=lambda i, a: seen.append(i)
    )
    assert len(answers) == 9 and all(a.ok and a.ttft_s == 2.5 for a in answers)
    assert transport.most_open == 3 and transport.open == 0 and sorted(seen) == list(range(9))
    assert sorted(b["messages"][0]["content"] for b in transport.bodies) == [str(i) for i in range(9)]


def test_a_wrong_key_ends_the_rest(scripted):
    endpoint, transport = scripted(refusal(401))
    answers = endpoint.ask_all(["x"] * 50, max_tokens=4, concurrency=2)
    assert all(a.fault.kind == "unauthorized" for a in answers) and len(transport.asked) <= 2
    assert answers[-1].attempts == 0


# Models and addresses ---------------------------------------------------------------------------------------


def listing(*names):
    return Answered([(0.0, json.dumps({"data": [{"id": n} for n in names]}).encode())], headers={})


def test_the_only_model_is_taken(scripted):
    endpoint, transport = scripted(refusal(503), listing("smollm2"), model=None)
    assert endpoint.choose_model() == endpoint.model == "smollm2"
    assert transport.asked[0][:2] == ("GET", "/v1/models") and endpoint.clock.now() == 1001.0


@pytest.mark.parametrize("names, says", [(("a", "b"), "it lists a, b"), ((), "it lists none")])
def test_a_choice_is_left_to_the_user(scripted, names, says):
    with pytest.raises(ValueError, match=says):
        scripted(listing(*names), model=None)[0].choose_model()


def test_a_model_that_is_not_there(scripted):
    with pytest.raises(ValueError, match="'smolm2' is not at http://127.0.0.1:9/v1; it lists smollm2"):
        scripted(listing("smollm2", "other"), model="smolm2")[0].choose_model()


@pytest.mark.parametrize("no", [refusal(404), Answered([(0.0, b"[]")], headers={}), Answered([(0.0, b"{}")])])
def test_a_server_without_a_list_is_believed(scripted, no):
    assert scripted(no, model="x")[0].choose_model() == "x"


@pytest.mark.parametrize("answer, says", [(REFUSE, "no connection"), (refusal(401), "the key was refused")])
def test_a_server_that_cannot_be_asked(scripted, answer, says):
    with pytest.raises(ValueError, match=says):
        scripted(answer, retries=0)[0].choose_model()


@pytest.mark.parametrize(
    "given, shown",
    [
        ("http://h:1", "http://h:1/v1"),
        ("h:1", "http://h:1/v1"),
        ("https://h/v1/", "https://h/v1"),
        ("http://h/v1/chat/completions", "http://h/v1"),
        ("http://h/v1/completions", "http://h/v1"),
        ("http://h/openai/api", "http://h/openai/api"),
        ("http://[::1]:80", "http://[::1]:80/v1"),
    ],
)
def test_addresses(given, shown):
    assert Endpoint(given).url == shown


@pytest.mark.parametrize("bad", ["", "ftp://h", "http://", "http://h:port", "http://h:99999999"])
def test_no_address(bad):
    with pytest.raises(ValueError, match="need an address"):
        Endpoint(bad)


@pytest.mark.parametrize("bad", ["http://me:sk-1@h", "http://h/v1?key=sk-1", "ftp://sk-1@h"])
def test_a_key_in_the_address_is_refused_unseen(bad):
    with pytest.raises(ValueError, match="put no key") as e:
        Endpoint(bad)
    assert "sk-1" not in str(e.value)


@pytest.mark.parametrize(
    "options",
    [{"api": "assistants"}, {"retries": -1}, {"limit": 0}, {"limit": True}, {"gap_timeout": 0.0},
     {"max_wait": float("nan")}],
)  # fmt: skip
def test_options_that_cannot_be(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Endpoint("http://h", **options)


@pytest.mark.parametrize("options", [{"max_tokens": 0}, {"concurrency": 0}, {"concurrency": 17}])
def test_calls_that_cannot_be(scripted, options):
    endpoint, transport = scripted(WHOLE)
    with pytest.raises(ValueError, match=next(iter(options))):
        endpoint.ask_all(["x"], **({"max_tokens": 4} | options))
    assert transport.asked == []

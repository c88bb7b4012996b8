"""The client against llama.cpp's own server with the real model; what the server times itself is the truth.

No wall time is asserted, since the machine may be busy: the client's times are compared with the server's own
of the same request. Real sockets lie between them, so the client may only be later.
"""

import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("xllamacpp", reason="llama.cpp's server has no package for this machine")

from companion.lab.client import Endpoint
from companion.model.files import smollm2

PATIENCE = 600.0  # seconds; a busy machine of two cores may need minutes


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with socket.socket() as s:  # a port that is free now
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    log = open(tmp_path_factory.mktemp("server") / "log", "w+")
    program = [
        sys.executable,
        str(Path(__file__).parents[1] / "helpers" / "llama_server.py"),
        str(smollm2()),
        str(port),
    ]
    child = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=log, text=True)
    killer = threading.Timer(2 * PATIENCE, child.kill)
    killer.start()
    try:
        address = child.stdout.readline().strip()
        log.seek(0)
        assert address, f"the server did not start: {log.read()[-2000:]}"
        yield f"http://127.0.0.1:{port}"
    finally:
        killer.cancel()
        child.kill()
        child.wait()
        log.close()


@pytest.fixture(scope="module")
def endpoint(server):
    found = Endpoint(server, first_timeout=PATIENCE, gap_timeout=PATIENCE, extra={"cache_prompt": False})
    assert found.choose_model() == "smollm2"
    return found


@pytest.fixture(scope="module")
def answers(server):
    """Three of 24 tokens each, after a first one that touches the weights."""
    extra = {"cache_prompt": False, "ignore_eos": True}
    endpoint = Endpoint(server, "smollm2", first_timeout=PATIENCE, gap_timeout=PATIENCE, extra=extra)
    endpoint.ask("Hello", max_tokens=2)
    return [endpoint.ask(f"{i} {'The tide comes in. ' * 20}", max_tokens=24) for i in range(3)]


def test_an_answer(endpoint):
    a = endpoint.ask("What is the capital of France? Tell me one fact about it.", max_tokens=12)
    assert a.ok and a.done and a.text == "The capital of France is Paris."
    assert a.finish_reason == "stop" and a.counted_by == "usage"
    assert (a.tokens, len(a.arrivals_s), a.prompt_tokens) == (8, 7, 44)  # the stop token has no event
    assert not a.merged and len(a.gaps_s) == 6


def test_counts_are_those_of_the_server(answers):
    for a in answers:
        assert a.ok and a.tokens == len(a.arrivals_s) == a.timings["predicted_n"] == 24
        assert a.prompt_tokens == a.timings["prompt_n"] + a.timings["cache_n"] > 100


def test_the_client_is_never_before_the_server(answers):
    """The headers come before the prompt is read; a client that took them as TTFT would fail here."""
    for a in answers:
        assert a.ttft_s >= a.timings["prompt_ms"] / 1e3
        assert a.arrivals_s[-1] >= (a.timings["prompt_ms"] + a.timings["predicted_ms"]) / 1e3


def test_the_client_agrees_with_the_server(answers):
    """Within 10 % in one of three requests; on a quiet machine all are within 1 %."""
    ttft = [a.ttft_s / (a.timings["prompt_ms"] / 1e3) for a in answers]
    itl = [a.itl_s / (a.timings["predicted_ms"] / 1e3 / (a.tokens - 1)) for a in answers]
    assert min(abs(r - 1) for r in ttft) < 0.1, ttft
    assert min(abs(r - 1) for r in itl) < 0.1, itl


def test_a_prefix_that_the_server_kept_is_reported(server):
    keeping = Endpoint(server, "smollm2", first_timeout=PATIENCE, gap_timeout=PATIENCE)
    prompt = "A lighthouse stands where the land ends. " * 12
    first, again = keeping.ask(prompt, max_tokens=2), keeping.ask(prompt, max_tokens=2)
    assert first.ok and again.ok
    assert again.cached_tokens == again.prompt_tokens - 1 == again.timings["cache_n"]
    assert first.cached_tokens < 60


def test_two_at_once_both_answer(endpoint):
    answers = endpoint.ask_all(["Count to three.", "Name a colour."], max_tokens=4, concurrency=2)
    assert all(a.ok and a.tokens == 4 for a in answers)


def test_a_prompt_that_is_too_long_is_refused(endpoint):
    a = endpoint.ask("word " * 5000, max_tokens=4)
    assert a.fault is not None and a.fault.status == 400 and "context" in a.fault.detail


def test_a_model_that_it_lacks(server):
    with pytest.raises(ValueError, match="'smollm3' is not at .* it lists smollm2"):
        Endpoint(server, "smollm3").choose_model()


def test_another_path_is_missing(server):
    a = Endpoint(f"{server}/elsewhere", "smollm2").ask("Hello", max_tokens=1)
    assert a.fault.kind == "missing" and a.fault.status == 404


def test_an_address_where_nobody_listens():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    a = Endpoint(f"http://127.0.0.1:{port}", "m", retries=0).ask("Hello", max_tokens=1)
    assert a.fault.kind == "unreachable" and "refused" in a.fault.detail

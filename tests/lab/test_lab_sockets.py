"""The real transport against a small server on the loopback address; times have lower bounds only."""

import contextlib
import socket
import threading

import pytest
from scripted import DONE, ROLE, delta, finish, sse, usage

from companion.lab.client import Endpoint
from companion.lab.transport import HTTPReply

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
END = sse(finish(), usage(2), DONE)


def chunked(data):
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def read_request(peer):
    """All of it: a connection closed with something unread is reset."""
    request = peer.recv(65536)
    while request[:1] in (b"P", b"G") and b"\r\n\r\n" not in request:
        request += peer.recv(65536)
    head, _, body = request.partition(b"\r\n\r\n")
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            missing = int(line.split(b":")[1]) - len(body)
            while missing > 0:
                missing -= len(peer.recv(65536))


@pytest.fixture
def serve():
    """serve(*steps) -> url; a connection gets bytes, seconds to wait, an Event to wait for, or "reset"."""
    listening = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def start(*steps):
        def run():
            while not stop.is_set():
                try:
                    peer, _ = listening.accept()
                except OSError:
                    return
                with peer:
                    read_request(peer)
                    for step in steps:
                        if isinstance(step, float):
                            stop.wait(step)
                        elif isinstance(step, threading.Event):
                            step.wait(60)
                        elif step == "reset":
                            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                        else:
                            with contextlib.suppress(OSError):  # the client may have gone
                                peer.sendall(step)

        threading.Thread(target=run, daemon=True).start()
        return f"http://127.0.0.1:{listening.getsockname()[1]}"

    yield start
    stop.set()
    listening.close()


def ask(url, **options):
    return Endpoint(url, "m", **({"retries": 0, "first_timeout": 60.0} | options)).ask("Hello", max_tokens=4)


@pytest.mark.parametrize("coding", ["chunked", "until closed"])
def test_times_are_at_least_the_delays(serve, coding):
    wrap = chunked if coding == "chunked" else bytes
    head = HEAD + (b"Transfer-Encoding: chunked\r\n\r\n" if coding == "chunked" else b"\r\n")
    last = b"0\r\n\r\n" if coding == "chunked" else b""
    a = ask(
        serve(head, wrap(sse(ROLE)), 0.3, wrap(sse(delta("a"))), 0.2, wrap(sse(delta("b"))), wrap(END), last)
    )
    assert a.ok and a.done and a.text == "ab" and (a.tokens, a.counted_by) == (2, "usage")
    assert a.ttft_s >= 0.3 and a.arrivals_s[1] >= 0.5


def test_an_event_is_seen_when_it_comes_not_when_a_buffer_is_full(serve, monkeypatch):
    """The server sends the second token only once the client has seen the first."""
    seen, read = threading.Event(), HTTPReply.read

    def telling(self, timeout):
        piece = read(self, timeout)
        if b'"a"' in piece:
            seen.set()
        return piece

    monkeypatch.setattr(HTTPReply, "read", telling)
    a = ask(serve(HEAD + b"\r\n", sse(delta("a")), seen, sse(delta("b")), END), gap_timeout=50.0)
    assert a.ok and seen.is_set() and a.gaps_s[0] > 0


@pytest.mark.parametrize("coding", [b"Transfer-Encoding: chunked\r\n", b""])
@pytest.mark.parametrize("end", ["closed", "reset"])
def test_a_cut_connection(serve, coding, end):
    first = chunked(sse(delta("a"))) if coding else sse(delta("a"))
    steps = [HEAD + coding + b"\r\n", first, 0.05] + (["reset"] if end == "reset" else [])
    fault = ask(serve(*steps)).fault
    assert fault.kind == "dropped"


def test_nothing_comes(serve):
    fault = ask(serve(60.0), first_timeout=0.3).fault
    assert fault.kind == "timeout" and "0.3 s" in fault.detail


def test_nothing_more_comes(serve):
    fault = ask(serve(HEAD + b"\r\n", sse(delta("a")), 60.0), gap_timeout=0.3).fault
    assert fault.kind == "timeout" and "after 1 events" in fault.detail


def test_a_server_that_says_nothing_at_all(serve):
    assert ask(serve(0.01)).fault.kind == "dropped"


def test_no_http(serve):
    assert ask(serve(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")).fault.kind == "dropped"


def test_an_error_with_its_body(serve):
    body = b'{"error":{"message":"Loading model","code":503}}'
    head = b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
    fault = ask(serve(head + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)).fault
    assert (fault.kind, fault.status, fault.detail) == ("loading", 503, "Loading model")


def test_a_name_that_is_none():
    assert ask("http://no-such-host.invalid:1").fault.kind == "unreachable"


def test_a_plain_server_is_no_secure_one(serve):
    url = serve(b"HTTP/1.1 200 OK\r\n\r\n").replace("http:", "https:")
    assert ask(url, connect_timeout=30.0).fault.kind == "unreachable"


def test_a_key_that_is_no_header(serve, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "one\ntwo")
    fault = ask(serve(HEAD + b"\r\n", END)).fault
    assert fault.kind == "refused" and "one" not in fault.detail and "OPENAI_API_KEY" in fault.detail

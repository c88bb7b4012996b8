"""Links out of the project: what counts as one, and what a server's answer means."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tools import address, links

TEXT = """See [a](https://one.org/a_(b)), https://two.org/x. And "https://three.org/q?x=1#y", `https://four.org/`;
f"https://{host}/x" https://example.org/no http://localhost:8000/no http://127.0.0.1/no https://nothing
**https://five.org/b**"""


def test_what_is_a_link():
    found = links.links(TEXT)
    assert {"https://one.org/a_(b)", "https://two.org/x", "https://three.org/q?x=1#y"} <= found
    assert {"https://four.org/", "https://five.org/b"} <= found
    assert not any("{" in link or link == "https://nothing" for link in found)


def test_what_is_asked(tmp_path):
    own = f" {address.repository()}/issues {address.pages()}book/x.html {address.colab('notebooks/x.ipynb')}"
    asked = links.outside([(tmp_path / "a.md", TEXT + own), (tmp_path / "b.md", "https://two.org/x")])
    assert sorted(asked) == [
        "https://five.org/b",
        "https://four.org/",
        "https://one.org/a_(b)",
        "https://three.org/q?x=1#y",
        "https://two.org/x",
    ]
    assert asked["https://two.org/x"] == [str(tmp_path / "a.md"), str(tmp_path / "b.md")]


def test_the_references_are_among_them():
    found = links.outside(links.project())
    assert "book/references.md" in found["https://arxiv.org/abs/1706.03762"]
    assert not any(name.startswith("tests/") for where in found.values() for name in where)


class Answers(BaseHTTPRequestHandler):
    codes = {"/good": 200, "/gone": 404, "/refuses": 403, "/fails": 500}

    def do_GET(self):
        if self.path == "/moved":
            self.send_response(301)
            self.send_header("Location", "/good")
        else:
            self.send_response(self.codes[self.path])
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    """http://localhost:PORT, where a path says what is answered; here, localhost is asked."""
    monkeypatch.setattr(links, "NOT_ASKED", links.re.compile("$^"))
    monkeypatch.setenv("no_proxy", "localhost")
    with ThreadingHTTPServer(("localhost", 0), Answers) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://localhost:{http.server_port}"
        http.shutdown()


def test_what_an_answer_means(server, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(" ".join(f"{server}/{p}" for p in ("good", "moved", "refuses")))
    assert links.main([str(page)]) == 0
    said = capsys.readouterr().out
    assert "3 links lead out, 0 of them to nothing" in said
    assert f"does not answer programs:\n{server}/refuses" in said
    for wrong in (f"{server}/gone", f"{server}/fails", "http://nobody.invalid/x"):
        page.write_text(f"{server}/good {wrong}")
        assert links.main([str(page)]) == 1
        said = capsys.readouterr().out
        assert f"2 links lead out, 1 of them to nothing:\n{wrong}\n" in said and str(page) in said

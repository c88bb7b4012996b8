"""Serve the built book on this machine: `python -m tools.serve [FOLDER] [--port N]`.

Opened as a file, a page may not load fonts or start workers; any local server will do, and this one knows the
types of .mjs and .wasm files whatever the system's table says.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import threading
from contextlib import contextmanager


class Handler(http.server.SimpleHTTPRequestHandler):
    extensions_map = http.server.SimpleHTTPRequestHandler.extensions_map | {
        ".mjs": "text/javascript",
        ".wasm": "application/wasm",
        ".svg": "image/svg+xml",
    }

    def log_message(self, *args) -> None:
        pass


def server(folder: str, port: int = 0) -> http.server.ThreadingHTTPServer:
    """A server on the loopback address; port 0 takes a free one."""
    handler = functools.partial(Handler, directory=str(folder))
    return http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)


@contextmanager
def serving(folder: str):
    """The address of a running server: `with serving("_build/html") as address: ...`."""
    running = server(folder)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{running.server_port}/"
    finally:
        running.shutdown()
        running.server_close()


def main() -> None:
    parser = argparse.ArgumentParser("tools.serve", description=__doc__)
    parser.add_argument("folder", nargs="?", default="_build/html")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    try:
        running = server(args.folder, args.port)
    except OSError as error:
        raise SystemExit(f"port {args.port}: {error.strerror}; choose another with --port") from None
    print(f"the book: http://127.0.0.1:{args.port}/  (stop with Ctrl-C)", flush=True)
    try:
        running.serve_forever()
    except KeyboardInterrupt:
        print()


if __name__ == "__main__":
    main()

"""Ranks as processes of this machine: for a notebook, a test, or a first try. In earnest, use torchrun.

    logits = run(4, step, ids)      # step(group, ids) in four processes; a list of four results

Processes are spawned, not forked: a fork of a program in which torch has started threads may hang. A spawned
process imports what it runs, so `step` has to be importable, from a module or a script. A notebook's cells
are neither; of a function defined there the source text is sent instead, and it must import all that it uses
inside itself and use no name of the notebook.
Ranks meet at a file in a temporary folder: no port to choose, none to collide.
"""

import inspect
import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..checks import whole
from .collectives import Number, RankLost, join

GRACE = 3.0  # seconds beyond `timeout` in which ranks may report their own errors once one has failed


class RanksFailed(RuntimeError):
    """At least one rank of a `run` failed. `errors`: rank -> what it reported, or how it died."""

    def __init__(self, errors: dict[int, str]):
        self.errors = dict(sorted(errors.items()))
        # Those who only lost another rank are not the cause.
        causes = [r for r, e in self.errors.items() if RankLost.__name__ not in e] or list(self.errors)
        rest = [r for r in self.errors if r not in causes]
        text = "\n".join(f"rank {r}: {self.errors[r].rstrip()}" for r in causes)
        super().__init__(text + (f"\nranks {rest} then lost it" if rest else ""))


def run(
    world: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: Number = 30.0,
    threads: int = 1,
    **options: Any,
) -> list[Any]:
    """fn(group, *args, **options) in `world` new processes; their results, by rank.

    fn: importable, or a function of a notebook that needs nothing from outside itself. Arguments and results
        are pickled: each process has copies.
    timeout: seconds that a rank waits for another, in a collective and at the start.
    threads: of torch, in each process.

    Raises RanksFailed if a rank raises or dies. The others then have `timeout` and some seconds to say what
    they saw, and are ended; no process is left behind. Raises ValueError for a function that cannot be sent.
    """
    whole("world", world)
    work = pickle.dumps((_portable(fn), args, options))
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="companion-") as folder:
        meeting, ranks, ends = str(Path(folder) / "ranks"), [], []
        try:
            for rank in range(world):
                ours, theirs = context.Pipe()
                given = (rank, world, meeting, timeout, threads, theirs, work)
                process = context.Process(target=_rank, args=given, daemon=True)
                process.start()
                theirs.close()  # so that its death is the end of the pipe
                ranks.append(process)
                ends.append(ours)
            return _collect(ranks, ends, timeout + GRACE)
        except BaseException:
            for process in ranks:
                process.kill()
            raise
        finally:
            for end in ends:
                end.close()  # lets those go that have reported
            for process in ranks:
                process.join()


def _collect(ranks: list, ends: list, limit: float) -> list[Any]:
    results, errors, open_ends, last = {}, {}, dict(zip(ends, range(len(ends)))), None
    while open_ends:
        ready = wait(list(open_ends), None if last is None else max(0.0, last - time.monotonic()))
        if not ready:
            errors |= {r: f"no word within {limit} s of the first failure" for r in open_ends.values()}
            break
        for end in ready:
            rank = open_ends.pop(end)
            try:
                good, content = pickle.loads(end.recv_bytes())
            except EOFError:
                ranks[rank].join(GRACE)
                good, content = False, f"died with exit code {ranks[rank].exitcode}"
            if good:
                results[rank] = content
            else:
                errors[rank] = content
                last = time.monotonic() + limit if last is None else last
    if errors:
        raise RanksFailed(errors)
    return [results[r] for r in range(len(ranks))]


def _rank(rank: int, world: int, meeting: str, timeout: Number, threads: int, parent, work: bytes) -> None:
    """What each process runs."""
    torch.set_num_threads(threads)
    if name := _loopback():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    try:
        fn, args, options = pickle.loads(work)
        store = dist.FileStore(meeting, world) if world > 1 else None
        group = join(timeout=timeout, rank=rank, size=world, store=store)
        report = pickle.dumps((True, fn(group, *args, **options)))
    except BaseException:
        parent.send_bytes(pickle.dumps((False, traceback.format_exc())))
        _end(1)
    parent.send_bytes(report)
    try:
        parent.recv_bytes()  # until all have reported: who leaves earlier breaks the others' connections
    except (EOFError, OSError):
        _end(0)


def _loopback() -> str | None:
    """The interface by which a machine speaks to itself. Gloo would look up the machine's name, which need
    not resolve; on macOS it often does not."""
    try:
        names = {name for _, name in socket.if_nameindex()}
    except OSError:  # a sandbox that does not tell
        return None
    return next((name for name in ("lo", "lo0") if name in names), None)


def _end(code: int) -> None:
    """At once, so that others find the connections closed; torch's clean-up might wait for them."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@dataclass(frozen=True)
class _Source:
    """A function as its text, for a process that cannot import it."""

    name: str
    text: str

    def __call__(self, *args: Any, **options: Any) -> Any:
        space: dict[str, Any] = {"__name__": "sent"}
        exec(compile(self.text, f"<{self.name}>", "exec"), space)
        return space[self.name](*args, **options)


def _portable(fn: Callable[..., Any]) -> Callable[..., Any]:
    """fn, or what stands for it in another process."""
    main = sys.modules.get("__main__")
    if getattr(fn, "__module__", None) != "__main__" or getattr(main, "__file__", None):
        try:
            pickle.dumps(fn)
        except (pickle.PicklingError, AttributeError, TypeError) as e:
            raise ValueError(f"fn={fn!r} cannot be imported by another process: {e}") from None
        return fn
    name = getattr(fn, "__name__", "")
    try:
        text = textwrap.dedent(inspect.getsource(fn))
    except (OSError, TypeError):
        text = ""
    if not text.startswith("def ") or fn.__code__.co_freevars:
        plain = "a plain `def` of a notebook that imports what it uses inside itself"
        raise ValueError(f"fn must be a function of a module, or {plain}, got {fn!r}")
    return _Source(name, text)

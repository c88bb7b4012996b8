"""The bare collectives, the exchange of rows with experts, and what happens when a rank goes away."""

import sys
import types

import parallel_ranks
import pytest
import torch
from parallel_ranks import CASES

from companion.moe import grouped_experts
from companion.parallel import Group, RankLost, RanksFailed, exchanged_experts, join, mesh, run
from companion.parallel.launch import GRACE, _loopback, _portable


@pytest.fixture(params=["two", "four"])
def results(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("case", CASES)
def test_rows_come_back_as_if_all_experts_were_here(results, case):
    for result in results:
        got, want, _ = result["experts"][case]
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12, equal_nan=True)
    if case == "NaN in one token":
        got = results[0]["experts"][case][0]
        assert got[1].isnan().all() and not got[[0, 2, 3]].isnan().any()


@pytest.mark.parametrize("case", CASES)
def test_bytes_of_an_exchange(results, case):
    """2 experts of 8 per token, rows of 6 float64; counts of 8 experts in int64."""
    for rank, result in enumerate(results):
        *_, calls = result["experts"][case]
        *_, chosen, _, _, _ = parallel_ranks.expert_case(len(results), rank, *CASES[case])
        rows = int((chosen >= 0).sum())
        away = int(((chosen >= 0) & (chosen // (8 // len(results)) != rank)).sum())
        assert [c.what for c in calls] == ["counts", "dispatch", "combine"]
        assert calls[0].payload == calls[0].received == 8 * 8
        assert (calls[1].payload, calls[2].received) == (rows * 6 * 8, rows * 6 * 8)
        assert calls[1].abroad == away * 6 * 8


def test_collectives_and_their_counts(results):
    n = len(results)
    for r, result in enumerate(results):
        values, calls = result["collectives"]
        total = n * (n + 1) // 2
        assert values["reduce"].tolist() == [[total] * 5] * 3
        assert values["reduce, strided"].equal(torch.arange(6.0).view(2, 3).t() * total)
        assert values["reduce, bf16"].tolist() == [n] * 7
        assert values["gather"].tolist() == [[[i, i]] for i in range(n)]
        assert values["broadcast"].tolist() == [1] * 4
        assert values["exchange"].tolist() == [[i, i] for i in range(n) for _ in range(r)]
        assert values["scalar, bool"].equal(torch.tensor(True))
        assert values["nothing"].shape == (0, 3)
        counted = [(c.kind, c.what, c.payload, c.received, c.abroad) for c in calls]
        rows = n * (n - 1) // 2
        assert counted == [
            ("all_reduce", "a", 120, 120, 120),
            ("all_reduce", "b", 24, 24, 24),
            ("all_reduce", "c", 14, 14, 14),
            ("all_gather", "d", 8, 8 * n, 8),
            ("broadcast", "e", 32 * (r == 1), 32 * (r != 1), 32 * (r == 1)),
            ("all_to_all", "f", 4 * rows, 4 * n * r, 4 * (rows - r)),
            ("broadcast", "h", 1 * (r == 1), 1 * (r != 1), 1 * (r == 1)),
            ("all_to_all", "g", 0, 0, 0),
        ]


def test_a_group_of_one_needs_no_one():
    group = join(timeout=1.0)
    x = torch.randn(3, 4)
    assert (group.rank, group.size) == (0, 1)
    assert group.all_reduce(x) is x and group.broadcast(x) is x
    assert group.all_gather(x).equal(x[None]) and group.all_to_all(x, [3], [3]) is x
    assert group.calls == [] and group.payload == 0 and group.by_kind == group.by_purpose == {}
    assert not torch.distributed.is_initialized()
    assert [g.size for g in mesh(group, 1)] == [1, 1]


def test_experts_of_a_group_of_one_are_all():
    x, w1, w2, ids, weights, *_ = parallel_ranks.expert_case(1, 0, [5], "random")
    got = exchanged_experts(x, w1, w2, ids, weights, group=Group())
    torch.testing.assert_close(got, grouped_experts(x, w1, w2, ids, weights), rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    "send, receive, message",
    [([1, 1], [0, 0], "send"), ([3], [1, 2], "send"), ([4, -1], [1, 2], "send"), ([2, 1], [1], "receive")],
)
def test_counts_that_do_not_fit_are_refused_before_anything_is_sent(send, receive, message):
    group = parallel_ranks.Silent(2)
    with pytest.raises(ValueError, match=message):
        group.all_to_all(torch.ones(3, 2), send, receive)
    assert group.calls == []


@pytest.mark.parametrize(
    "options, message",
    [
        ({"timeout": 0}, "timeout"),
        ({"rank": 1}, "size"),
        ({"rank": 2, "size": 2}, "rank must .* got 2"),
    ],
)
def test_bad_ranks(options, message):
    with pytest.raises(ValueError, match=message):
        join(**options)
    with pytest.raises(ValueError, match="source must .* got 1"):
        Group().broadcast(torch.ones(1), 1)
    with pytest.raises(ValueError, match="tensor must .* got 3"):
        mesh(parallel_ranks.Silent(2), 3)


def test_a_rank_that_never_comes_is_an_error(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "ranks"), 2)
    with pytest.raises(RankLost, match=r"rank 0: not all of 2 ranks came within 1.0 s"):
        join(timeout=1.0, rank=0, size=2, store=store)


@pytest.mark.parametrize(
    "how, world, timeout, cause",
    [
        ("killed", 3, 30.0, "died with exit code -9"),
        ("stuck", 2, 2.0, "no word within 5.0 s"),
        ("raises", 2, 30.0, "ValueError: rank 1 has had enough"),
    ],
)
def test_a_rank_that_goes_away_is_an_error_on_the_others(capfd, how, world, timeout, cause):
    with pytest.raises(RanksFailed) as failed:
        run(world, parallel_ranks.dies, how, timeout=timeout)
    errors = failed.value.errors
    others = [r for r in range(world) if r != 1]
    assert set(errors) == {1, *others} and cause in errors[1]
    for rank in others:
        assert f"RankLost: rank {rank} of {world}: all_reduce (attention) did not end" in errors[rank]
    if how != "stuck":  # then the cause comes first, and the others are named as its victims
        told = str(failed.value)
        assert told.startswith("rank 1: ") and told.endswith(f"ranks {others} then lost it")
    # In time: a closed connection at once, and silence when the limit is over.
    waited = [float(line.split()[2]) for line in capfd.readouterr().out.splitlines()]
    assert len(waited) == len(others)
    assert max(waited) < (timeout + GRACE if how == "stuck" else timeout)


SENT = """
def sent(group, factor):
    import torch

    x = group.broadcast(torch.arange(1000.0))
    if group.rank:  # still at work when rank 0 is done
        x = x * sum(i % 3 == 0 for i in range(100_000))
    return group.rank, (x[1] * factor).item()
"""


def in_a_notebook(monkeypatch, text):
    """The last function of a cell: no file, its source in linecache, where IPython puts it too."""
    import linecache

    space = {"__name__": "__main__"}
    exec(compile(text, "<cell 1>", "exec"), space)
    monkeypatch.setitem(linecache.cache, "<cell 1>", (len(text), None, text.splitlines(True), "<cell 1>"))
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    return [f for f in space.values() if isinstance(f, types.FunctionType)][-1]


def test_a_function_of_a_notebook_is_sent_as_text_and_a_rank_may_be_done_first(monkeypatch):
    fn = in_a_notebook(monkeypatch, SENT)
    assert run(2, fn, 3) == [(0, 3.0), (1, 100_002.0)]


CLOSED = """
def outer():
    y = 1
    def g(group):
        return y
    return g
f = outer()
"""


@pytest.mark.parametrize("text", ["f = lambda group: 1", CLOSED])
def test_a_function_that_cannot_be_sent_is_refused(monkeypatch, text):
    fn = in_a_notebook(monkeypatch, text)
    with pytest.raises(ValueError, match="^fn must be a function of a module"):
        run(2, fn)


def test_a_function_that_cannot_be_imported_is_refused():
    with pytest.raises(ValueError, match="cannot be imported"):
        run(2, lambda group: 1)
    assert _portable(parallel_ranks.dies) is parallel_ranks.dies
    with pytest.raises(ValueError, match="world must be a positive integer, got 0"):
        run(0, parallel_ranks.dies)


@pytest.mark.parametrize(
    "interfaces, name", [(["eth0", "lo"], "lo"), (["lo0", "en0"], "lo0"), (["ethernet_1"], None)]
)
def test_ranks_of_one_machine_meet_on_its_loopback_whatever_that_is_called(monkeypatch, interfaces, name):
    monkeypatch.setattr("socket.if_nameindex", lambda: list(enumerate(interfaces, 1)))
    assert _loopback() == name


def test_under_torchrun(tmp_path):
    import subprocess

    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        + ["-m", "companion.parallel", "--experts", "4", "--steps", "3", "--prompt", "4"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
    rows = (2 * 4 + 2 * 2) * 4 * 2 * 128 * 4  # tokens x layers x top 2 x width x float32
    counts = 3 * 4 * 4 * 8  # steps x layers x experts x int64
    wanted = f"{2 * (2 * rows + counts):,}"
    assert lines["all_to_all"] == [wanted, wanted] and lines["all_reduce"] == ["0", "0"]

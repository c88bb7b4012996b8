"""`companion bench --gpu` without a GPU: a dry run through every line, and each part of it by itself.

No time is measured here. A clock that stands in for one counts its calls.
"""

import argparse
import dataclasses
import itertools
import json
import math

import pytest
import torch

from companion.attention import sdpa
from companion.kernels import bench as command
from companion.kernels.bench import cases as bench_cases
from companion.kernels.bench import cases as bench_data
from companion.kernels.bench import checks as bench_baselines
from companion.kernels.bench import checks as bench_checks
from companion.kernels.bench import gpu as script
from companion.kernels.bench import report as bench_report
from companion.kernels.bench import runs as bench_runs
from companion.kernels.bench.gpu import WARM_UPS, ClockTimer, EventTimer, Timing
from companion.kernels.moe.reference import fused_moe_reference
from companion.machine import describe_gpu


def counting(step=0.5):
    """A clock that moves by `step` whenever it is asked."""
    times = itertools.count(0.0, step)
    return lambda: next(times)


@pytest.fixture(scope="module")
def dry():
    """One dry run of everything: (result, lines)."""
    lines = []
    timer = ClockTimer(counting(0.25))
    clock = counting(1e-3)
    return script.bench_gpu(dry_run=True, timer=timer, clock=clock, say=lines.append, command="try"), lines


@pytest.fixture
def short(monkeypatch):
    """A run of three cases and no check."""
    cases = bench_cases.first_cases("bf16")[:1], bench_cases.more_cases("bf16", None)[:1]
    monkeypatch.setattr(script, "first_cases", lambda dtype: cases[0])
    monkeypatch.setattr(script, "more_cases", lambda dtype, other: cases[1])
    monkeypatch.setattr(script, "moe_cases", lambda dtype: bench_cases.moe_cases(dtype)[:1])
    monkeypatch.setattr(bench_checks, "checks", lambda bench: None)
    monkeypatch.setattr(bench_runs, "writes", lambda bench: None)


# --- the whole ---------------------------------------------------------------------------------------------


def test_a_dry_run_goes_through_everything_and_says_what_it_is(dry):
    result, lines = dry
    bench_report.check(result)
    assert result["dry_run"] is True and result["command"] == "try" and result["skipped"] == []
    assert lines[0].startswith("dry run:") and bench_report.failed(result) == []
    kernels = {c["kernel"] for c in result["cases"]}
    assert kernels == {"decode_attention", "fused_moe", "grouped_gemm", "append"}
    for kind, of in (("kv_format", bench_cases.FORMATS), ("layout", ("contiguous", "paged"))):
        assert {c[kind] for c in result["cases"] if c["kernel"] == "decode_attention"} == set(of)
    names = [row["name"] for row in (*result["checks"], *result["cases"])]
    assert len(set(names)) == len(names)
    assert any("fp32" in n for n in names) and any("fp16" in n for n in names)


def test_every_row_has_its_line(dry):
    result, lines = dry
    for row in (*result["copy"]["rows"], *result["checks"], *result["cases"]):
        assert sum(row["name"] in line for line in lines) == 1, row["name"]
    for row in result["goals"]:
        assert f"not measured  {row['name']}" in "\n".join(lines)  # a dry run reaches nothing
        assert row["reached"] is None
    decodes = [line for line in lines if line.startswith("decode llama") and "bf16 none contiguous" in line]
    assert decodes and all("predicted" in x and "of copy" in x and "sdpa " in x for x in decodes)


def test_the_stubbed_clock_is_the_only_source_of_time(dry):
    result, _ = dry
    assert {c["seconds"] for c in result["cases"]} == {0.25}
    assert result["copy"]["bytes_per_s"] == 2 * 2**14 / 0.25
    for c in result["cases"]:
        assert c["predicted_s"] == pytest.approx(c["bytes"]["total"] / result["copy"]["bytes_per_s"])
        assert c["of_copy"] == pytest.approx(c["predicted_s"] / c["seconds"])


def test_a_dry_run_cannot_be_stored(dry, tmp_path):
    with pytest.raises(ValueError, match="dry_run: nothing was measured"):
        bench_report.store(dry[0], tmp_path)
    assert list(tmp_path.iterdir()) == []
    path = bench_report.write(dry[0], tmp_path / "x.json")
    assert json.loads(path.read_text())["dry_run"] is True


def test_time_that_runs_out_is_said(monkeypatch, short):
    lines, clock = [], counting(10.0)
    result = script.bench_gpu(
        dry_run=True, seconds=45, timer=ClockTimer(counting()), clock=clock, say=lines.append
    )
    done, skipped = len(result["cases"]), len(result["skipped"])
    assert done + skipped == 4 and done and skipped
    assert lines[-1].startswith(f"no time for {skipped}: ") and result["skipped"][0] in lines[-1]
    bench_report.check(result)


@pytest.mark.parametrize("seconds", [0, -1.0, math.nan])
def test_no_time_at_all_is_refused(seconds):
    with pytest.raises(ValueError, match="seconds="):
        script.bench_gpu(dry_run=True, seconds=seconds)


# --- the command -------------------------------------------------------------------------------------------


def options(*line):
    return command.parse(["--gpu", *line])


def test_the_command_without_a_gpu_is_one_line_and_code_2(capsys):
    assert command.run(options()) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 1 and "no GPU that torch can use" in error
    with pytest.raises(ValueError, match="no GPU that torch can use"):
        script.bench_gpu()


@pytest.mark.parametrize("reason", [ImportError("kernels need Triton"), RuntimeError("Triton was imported")])
def test_a_dry_run_that_cannot_begin_is_one_line_and_code_2(monkeypatch, capsys, reason):
    def refuse():
        raise reason

    monkeypatch.setattr("companion.kernels.mode.interpret", refuse)
    assert command.run(options("--dry-run")) == 2
    assert capsys.readouterr().err == f"companion bench: error: {reason}\n"


def test_the_command_writes_its_file(short, tmp_path, capsys):
    path = tmp_path / "out.json"
    assert command.run(options("--dry-run", "--out", str(path))) == 0
    result = json.loads(path.read_text())
    bench_report.check(result)
    assert result["dry_run"] and result["command"].startswith("companion")
    assert capsys.readouterr().out.strip().endswith(f"written to {path}")
    assert command.run(options("--dry-run", "--json")) == 0
    out, error = capsys.readouterr()
    assert json.loads(out)["dry_run"] and error.startswith("dry run:")


def test_a_wrong_kernel_is_named_and_is_code_1(short, monkeypatch, capsys):
    real = bench_runs.decode_attention

    def wrong(*args, **kwargs):
        out = real(*args, **kwargs)
        return (out[0] * 1.02, out[1]) if isinstance(out, tuple) else out

    monkeypatch.setattr(bench_runs, "decode_attention", wrong)
    assert command.run(options("--dry-run")) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == [
        "WRONG: decode llama-3.1-8b b1 n64 bf16 none contiguous",
        "WRONG: decode smollm2-135m b1 n64 bf16 none contiguous",
    ]
    assert any("WRONG: error 2.0e-02, allowed 8e-03" in line for line in lines)


@pytest.mark.parametrize("where", ["lse", "nan"])
def test_a_wrong_lse_and_a_nan_are_seen(short, monkeypatch, where):
    real = bench_runs.decode_attention

    def wrong(*args, **kwargs):
        out = real(*args, **kwargs)
        if isinstance(out, tuple):
            out = (
                (out[0], out[1] + 1)
                if where == "lse"
                else (out[0].index_fill(1, torch.tensor(0), math.nan), out[1])
            )
        return out

    monkeypatch.setattr(bench_runs, "decode_attention", wrong)
    result = script.bench_gpu(dry_run=True, say=lambda line: None)
    assert len(bench_report.failed(result)) == 2
    json.dumps(result, allow_nan=False)


@pytest.mark.parametrize("name", ["fused_moe", "grouped_gemm", "decode_attention"])
def test_a_kernel_that_raises_is_named_and_stops_nothing(short, monkeypatch, name):
    def broken(*args, **kwargs):
        raise RuntimeError("device-side assert\nmore")

    monkeypatch.setattr(bench_runs, name, broken)
    lines = []
    result = script.bench_gpu(dry_run=True, say=lines.append)
    bench_report.check(result)
    bad = [c for c in result["cases"] if not c["ok"]]
    assert {c["kernel"] for c in bad} == {name} and len(result["cases"]) == 4
    assert bad[0]["message"] == "RuntimeError: device-side assert"
    assert f"WRONG {bad[0]['name']}: RuntimeError: device-side assert" in lines


def test_memory_that_does_not_suffice_is_no_wrong_kernel(short, monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(bench_runs, "fused_moe", full)
    result = script.bench_gpu(dry_run=True, say=lambda line: None)
    assert result["skipped"] == ["moe qwen3-30b-a3b t1 bf16 (memory)"] and not bench_report.failed(result)


def test_a_wrong_check_is_named(short, monkeypatch):
    monkeypatch.undo()
    bench = script.Bench(torch.device("cpu"), None, counting(), 1e9, print, ("bf16", None), True)
    bench.check("too far", 1e-3, lambda: 2e-3)
    bench.check("no number", 1e-3, lambda: math.nan)
    bench.check("raises", 1e-3, lambda: 1 / 0)
    bench.check("good", 1e-3, lambda: 1e-3)
    rows = {r["name"]: r for r in bench.found["checks"]}
    assert [n for n, r in rows.items() if not r["ok"]] == ["too far", "no number", "raises"]
    assert rows["raises"]["message"] == "ZeroDivisionError: division by zero"
    json.dumps(bench.found, allow_nan=False)


@pytest.mark.parametrize(
    "kernel, break_it",
    [
        ("copy", lambda out: out + 1),
        ("append", None),
        ("decode_attention", lambda out: (out[0] * 1.02, out[1])),
        ("grouped_gemm", lambda out: out.roll(1, 0)),
        ("fused_moe", lambda out: out * 1.02),
    ],
)
def test_every_check_can_fail(monkeypatch, kernel, break_it):
    real = getattr(bench_checks, kernel)
    if kernel == "append":  # forgets what has to be skipped

        def broken(k, v, kc, vc, *, slot_mapping, **more):
            real(k, v, kc, vc, slot_mapping=slot_mapping % 96, **more)

    else:

        def broken(*args, **kwargs):
            return break_it(real(*args, **kwargs))

    monkeypatch.setattr(bench_checks, kernel, broken)
    bench = script.Bench(torch.device("cpu"), None, counting(), 1e9, lambda line: None, ("fp16", None), True)
    bench_checks.checks(bench)
    bad = [r["name"] for r in bench.found["checks"] if not r["ok"]]
    mine = [r["name"] for r in bench.found["checks"] if r["name"].startswith(kernel)]
    assert bad == mine and bad


# --- what is compared ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_format", bench_cases.FORMATS)
@pytest.mark.parametrize("paged", [False, True])
def test_the_reference_reads_a_cache_as_the_codecs_do(kv_format, paged):
    """Against `companion.quantize` where a codec writes that format, and in another order of operations."""
    from companion.quantize import QuantizedTensor, codec

    heads = dataclasses.replace(bench_cases.LLAMA, heads=4, kv_heads=2, head_dim=64, v_head_dim=64)
    case = bench_cases.DecodeCase(heads, 2, 64, "fp32", kv_format, paged)
    inputs = bench_data.decode_inputs(case, torch.device("cpu"))
    pages = inputs["block_table"][1].long() if paged else torch.tensor([1])

    def numbers(side):
        fields = [inputs.get(f"{side}_{n}") for n in ("cache", "scale", "zero")]
        codes, scale, zero = (None if f is None else f[pages].flatten(0, 1).transpose(0, 1) for f in fields)
        if kv_format == "none":
            return codes
        if kv_format == "kivi4":
            c = codec("int4", group=32, group_dim=-2 if side == "k" else -1)
        else:
            c = codec(kv_format)
            scale, zero = (None if s is None else s[..., None] for s in (scale, zero))
        if kv_format.startswith("fp8"):
            codes = codes.view(c.dtype)
        return c.dequantize(QuantizedTensor(codes, scale, zero, None, (2, 64, 64), torch.float32))

    want = sdpa(inputs["q"][1, None, :, None], numbers("k")[None], numbers("v")[None], return_lse=True)
    got = bench_data.decode_exact(case, inputs, 1)
    assert bench_data.relative_error(got[0], want[0][0, :, 0]) < 2e-6
    assert bench_data.relative_error(got[1], want[1][0, :, 0]) < 2e-6


@pytest.mark.parametrize("model", ["LLAMA", "SMOLLM2", "QWEN3", "MLA"])
def test_baselines_compute_the_same(model):
    case = bench_cases.tiny_decode(bench_cases.sized(getattr(bench_cases, model), 64, 16, dtype="fp32"))
    inputs = bench_data.decode_inputs(case, torch.device("cpu"))
    want = torch.stack([bench_data.decode_exact(case, inputs, b)[0] for b in range(case.batch)])
    found = bench_baselines.baselines(case, inputs, slow=True)
    assert set(found) >= {"sdpa, rows packed"} and ("sdpa" in found) == (model != "MLA")
    for name in ("sdpa", "sdpa, rows packed"):
        if name in found:
            assert bench_data.relative_error(found[name]()().view_as(want), want) < 1e-5


def test_a_baseline_that_fails_is_written_down():
    bench = script.Bench(torch.device("cpu"), ClockTimer(), counting(), 9, print, ("bf16", None), True)

    def prepare():
        raise ImportError("no module named flashinfer.decode")

    assert bench.beside(prepare) == {"message": "ImportError: no module named flashinfer.decode"}
    assert "flash-attn: ImportError" in bench_report.case_line(
        {"name": "x", "seconds": 1e-5, "predicted_s": 1e-5, "bytes_per_s": 1e9, "of_copy": 1.0, "ok": True,
         "baselines": {"flash-attn": {"message": "ImportError"}}}
    )  # fmt: skip


def test_the_loop_over_experts_is_the_same_layer():
    case = bench_cases.MoECase("x", 5, 2, 32, 48, 9, "fp32")
    x, w1, w2, weights, ids = layer = bench_data.moe_inputs(case, torch.device("cpu"))
    sizes = torch.bincount(ids.flatten(), minlength=5).tolist()
    want = fused_moe_reference(*(t.double() for t in (x, w1, w2, weights)), ids)
    assert bench_data.relative_error(bench_runs._loop(*layer, sizes)(), want) < 1e-6
    assert bench_data.relative_error(bench_data.moe_exact(*layer), want) < 1e-12


def test_an_error_is_infinite_where_one_is_no_number():
    error, nan, inf = bench_data.relative_error, math.nan, math.inf
    one = torch.tensor([1.0, 2.0])
    assert error(one * 1.1, one) == pytest.approx(0.1)
    assert error(torch.tensor([1.0, nan]), one) == error(one, torch.tensor([nan, 2.0])) == inf
    assert error(torch.tensor([-inf, 2.0]), torch.tensor([inf, 2.0])) == inf
    assert error(torch.tensor([-inf, 2.0]), torch.tensor([-inf, 2.0])) == 0
    assert error(one[:1], one) == inf


def test_cases_are_as_large_as_promised():
    for dtype, other in (("bf16", "fp16"), ("fp16", None)):
        cases = bench_cases.first_cases(dtype) + bench_cases.more_cases(dtype, other)
        assert len(set(cases)) == len(cases) and min(c.kv_bytes for c in cases) >= 64 * 2**20
        assert all(c.length % (c.block_size or 1) == 0 and c.length % 32 == 0 for c in cases)
        kinds = {(c.heads.heads // c.heads.kv_heads, c.heads.head_dim) for c in cases}
        assert kinds == {(4, 128), (3, 64), (16, 128), (128, 576)}
        plain = {c for c in cases if c.kv_format == "none" and not c.paged}
        for c in cases:  # everything has what it is compared with
            assert dataclasses.replace(c, kv_format="none", paged=False) in plain
    assert not any("bf16" in c.name for c in bench_cases.more_cases("fp16", None))  # a T4


# --- the timer ---------------------------------------------------------------------------------------------


class FakeGPU:
    """A device whose time moves when work is put on it, and a host that is slower than it."""

    def __init__(self, monkeypatch, host):
        self.now, self.log, self.host = 0.0, [], host
        fake = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = fake.now
                fake.log.append("event")

            def elapsed_time(self, other):
                return (other.at - self.at) * 1e3

        def sleep(cycles):
            fake.log.append("sleep")
            fake.slept = cycles / 1e9
            fake.now += cycles / 1e9

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(torch.cuda, "_sleep", sleep)
        properties = argparse.Namespace(L2_cache_size=2**20)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr("companion.kernels.bench.gpu.time.perf_counter", lambda: self.host_clock())
        self.t = 0.0

    def host_clock(self):
        self.t += self.host
        return self.t


def test_the_event_timer_warms_up_flushes_and_waits(monkeypatch):
    gpu = FakeGPU(monkeypatch, host=3e-4)
    timer = EventTimer(torch.device("cpu"), rounds=5)
    assert timer.flush.nbytes >= 64 * 2**20
    flush = torch.Tensor.max

    def read(self, *args):
        gpu.log.append("flush")
        return flush(self[:1])

    monkeypatch.setattr(torch.Tensor, "max", read)
    costs = iter([9.0, 9.0, 9.0, 9.0, 1e-4, 3e-4, 2e-4, 2e-4, 5e-4])

    def call():
        gpu.log.append("call")
        gpu.now += next(costs)

    gpu.log.clear()
    found = timer(call)
    assert found == Timing(
        median=2e-4, min=1e-4, max=5e-4, host=3e-4, rounds=5
    ) or found.median == pytest.approx(2e-4)
    assert found.host == pytest.approx(3e-4) and found.rounds == 5
    assert gpu.log[: WARM_UPS + 1] == ["call"] * (WARM_UPS + 1)
    assert gpu.log[WARM_UPS + 1 :] == ["sleep", "flush", "event", "call", "event"] * 5
    assert gpu.slept > 3e-4  # longer than a launch takes the host, so that its time is not counted


def test_a_timing_is_the_median():
    assert Timing.of([3.0, 1.0, 2.0, 10.0, 2.5], [1.0]) == Timing(2.5, 1.0, 10.0, 1.0, 5)
    calls = []
    ClockTimer(counting(), rounds=4)(lambda: calls.append(1))
    assert len(calls) == 4


# --- the report --------------------------------------------------------------------------------------------


def decode_row(model="m", kv_format="none", seconds=1.0, layout="contiguous", dtype="bf16", **more):
    row = dict(
        name=f"{model} {kv_format} {layout}", kernel="decode_attention", model=model, batch=1, length=64,
        dtype=dtype, kv_format=kv_format, layout=layout, kv_bytes=2**26, seconds=seconds,
        of_copy=0.9 / seconds, baselines={"sdpa": {"seconds": 1.5}},
    )  # fmt: skip
    return row | more


def reached(rows):
    return [g["reached"] for g in bench_report.goals(rows, "bf16")]


def test_goals_hold_for_the_worst_case():
    rows = [
        decode_row(),
        decode_row("other", seconds=1.05),
        decode_row(kv_format="int8", seconds=0.5, baselines={}),
        decode_row(kv_format="int4", seconds=0.41, baselines={}),
    ]
    assert reached(rows) == [True, True, None, True, False]
    four = bench_report.goals(rows, "bf16")[-1]
    assert four["value"] == pytest.approx(1 / 0.41) and four["worst"] == "m int4 contiguous"
    assert "missed" in bench_report.goal_line(four) and "0 of 1" in bench_report.goal_line(four)
    slow = decode_row("slow", seconds=1.6)
    assert reached([*rows, slow])[:2] == [False, False]
    row = bench_report.goals([*rows, slow], "bf16")[0]
    assert (row["met"], row["of"], row["worst"]) == (2, 3, "slow none contiguous")


def test_goals_compare_like_with_like():
    paged = decode_row(layout="paged", seconds=4.0)
    eight = decode_row(kv_format="int8", seconds=2.0, layout="paged")
    assert reached([decode_row(), paged, eight])[3] is True  # 4.0 / 2.0, not 1.0 / 2.0
    assert reached([decode_row(), eight])[3] is None
    small = decode_row(kv_bytes=2**25, of_copy=0.1)
    assert reached([decode_row(dtype="fp16", of_copy=0.1), small])[0] is None  # another dtype, too small
    assert reached([{"kernel": "decode_attention", "message": "RuntimeError"}]) == [None] * 5
    infer = decode_row(baselines={"flashinfer": {"seconds": 0.95}, "sdpa": {"message": "x"}})
    assert reached([infer])[1:3] == [None, True]
    assert reached([decode_row(baselines={"flashinfer": {"seconds": 0.9}})])[2] is False


def measured(dry):
    """A result as a GPU would have left it."""
    result = json.loads(json.dumps(dry[0]))
    machine = {"name": "NVIDIA H200 (test)", "capability": [9, 0], "cores": 132}
    return result | {"dry_run": False, "machine": result["machine"] | machine}


def test_a_measured_result_is_stored_under_its_device(dry, tmp_path):
    path = bench_report.store(measured(dry), tmp_path)
    assert path.name == "gpu_nvidia_h200_test.json"
    assert json.loads(path.read_text())["machine"]["cores"] == 132


def test_a_wrong_kernel_is_not_stored(dry, tmp_path):
    result = measured(dry)
    result["cases"][3]["ok"] = False
    with pytest.raises(ValueError, match=f"failed: {result['cases'][3]['name']}"):
        bench_report.store(result, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "path, value, says",
    [
        (("schema",), 7, "schema is 7"),
        (("dry_run",), "no", "'dry_run' is 'no'"),
        (("machine", "driver"), None, "machine: 'driver' is None"),
        (("copy", "bytes_per_s"), 3, "copy: 'bytes_per_s' is 3"),
        (("cases", 0, "seconds"), "fast", "'seconds' is 'fast'"),
        (("cases", 0, "seconds"), True, "'seconds' is True"),
        (("cases", 0, "baselines"), None, "'baselines' is None"),
        (("checks", 0, "ok"), 1, "'ok' is 1"),
        (("goals", 0, "reached"), "yes", "'reached' is 'yes'"),
    ],
)
def test_a_result_of_another_form_is_refused(dry, path, value, says):
    result = measured(dry)
    *before, last = path
    place = result
    for step in before:
        place = place[step]
    place[last] = value
    with pytest.raises(ValueError, match=says):
        bench_report.check(result)
    del place[last]
    with pytest.raises(ValueError, match="has no"):
        bench_report.check(result)


def test_the_machine_of_a_dry_run_is_none():
    found = describe_gpu(None)
    assert found["capability"] == [] and found["cores"] == 0 and found["torch"] == torch.__version__
    head = bench_report.head(found, True)
    assert head[0].startswith("dry run") and "capability none" in head[1]
    gpu = found | {"name": "NVIDIA H200", "capability": [9, 0], "cores": 132, "l2_bytes": 50 * 2**20}
    assert bench_report.head(gpu, False)[0].startswith("NVIDIA H200, capability 9.0, 132 cores")

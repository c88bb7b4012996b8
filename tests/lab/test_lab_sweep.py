"""Sweeps: the prediction comes first, nothing is lost, and the verdicts are those of the numbers put in."""

import json

import pytest
from made_up import HERE, SHAPE, SPEC, MadeUpTarget, WritingServer

from companion.cost import HardwareSpec, kv_bytes, prefill, weight_bytes_read
from companion.lab.answers import Answer, together
from companion.lab.client import EndpointTarget
from companion.lab.fit import FAILS, HOLDS, UNTOLD
from companion.lab.points import (
    Point,
    Run,
    Shape,
    batch_points,
    context_points,
    pair_points,
    predict,
    prefix_points,
    shuffled,
)
from companion.lab.studies import Study, read, sweep

CONTEXTS = (64, 256, 1024, 2048, 4096)
SETTINGS = {"seed": 1}


@pytest.fixture
def study(tmp_path):
    study = Study(tmp_path / "study.json", SETTINGS)
    study.save()
    return study


def points(contexts=CONTEXTS, rounds=4, **options):
    return shuffled(context_points(contexts, **options), rounds, seed=1)


def outcomes(result):
    return [v["outcome"] for v in result["verdicts"]]


# Points ----------------------------------------------------------------------------------------------


def test_every_round_has_every_point_in_an_order_of_its_own():
    plan = points(rounds=5)
    rounds = [[p.context for p in plan if p.round == r] for r in range(5)]
    assert [p.round for p in plan] == sorted(p.round for p in plan)
    assert all(sorted(r) == sorted(CONTEXTS) for r in rounds)
    assert len({tuple(r) for r in rounds}) > 1
    assert points(rounds=5) == plan and len({p.id for p in plan}) == 25


def test_a_long_context_is_filled():
    assert [p.prompt for p in context_points(CONTEXTS, prompt_limit=1024)] == [True] * 3 + [False] * 2


# Predictions -----------------------------------------------------------------------------------------


def test_a_prediction_is_bytes_over_bandwidth():
    p = predict(Point("context", 1000, new_tokens=8), SHAPE, HERE)
    read_bytes = weight_bytes_read(SPEC, 1, "fp32") + kv_bytes(SPEC, 1004, dtype="fp32")
    assert p.itl_s == pytest.approx(read_bytes / 20e9) and p.bound_by == "memory: weights"
    assert p.ttft_s == prefill(SPEC, HERE, 1000, weights="fp32", kv="fp32").seconds


def test_a_warm_prompt_is_predicted_to_read_its_ending():
    cold, warm = (predict(Point("prefix", 1000, variant=v), SHAPE, HERE) for v in ("cold", "warm"))
    assert warm.ttft_s < cold.ttft_s / 5 and warm.itl_s == cold.itl_s


def test_the_prediction_is_on_disk_before_the_first_run(study):
    target, seen = MadeUpTarget(), []
    measure = target.measure

    def looking(point):
        if not seen:
            seen.append(read(study.path)["sweeps"]["context"])
        return measure(point)

    target.measure = looking
    sweep(target, points(), study, hardware=HERE)
    assert seen[0]["runs"] == {} and len(seen[0]["predicted"]) == 5 and seen[0]["predicted_at"]
    assert seen[0]["predicted"] == read(study.path)["sweeps"]["context"]["predicted"]


# Verdicts --------------------------------------------------------------------------------------------


def test_a_machine_that_does_what_was_predicted(study):
    result = sweep(MadeUpTarget(), points(), study, hardware=HERE)
    assert outcomes(result) == [HOLDS] * 5
    slope, told = (result["fits"][k]["coefficients"]["slope"] for k in ("itl", "itl predicted"))
    assert told["value"] == pytest.approx(kv_bytes(SPEC, 1, dtype="fp32") / 20e9, rel=1e-3)
    assert slope["low"] < told["value"] < slope["high"]


def test_a_wrong_prediction_is_called_wrong(study):
    """The prediction believes in a memory and in units five times as fast."""
    wrong = HardwareSpec.measured("wrong", bandwidth=100e9, flops=500e9)
    result = sweep(MadeUpTarget(), points(), study, hardware=wrong)
    assert outcomes(result) == [HOLDS, FAILS, FAILS, HOLDS, FAILS]


def test_a_measurement_below_the_bound_shows_that_the_bound_is_wrong(study):
    result = sweep(MadeUpTarget(bandwidth=60e9), points(), study, hardware=HERE)
    assert outcomes(result)[:3] == [HOLDS, FAILS, FAILS]


def test_a_run_too_short_cannot_be_told(study):
    result = sweep(MadeUpTarget(scatter=0.05), points((8, 16, 24), rounds=2), study, hardware=HERE)
    slope = result["verdicts"][1]
    assert outcomes(result)[:2] == [UNTOLD] * 2
    assert slope["runs_needed"] > 6 and slope["context_needed"] > 24 and "could tell" in slope["reason"]


def test_a_flat_machine_is_told_from_a_growing_one(study):
    """Every step takes as long as one at 64 tokens: the cache is not read."""
    target = MadeUpTarget(scatter=0.002)
    measure = target.measure
    target.measure = lambda p: measure(Point("context", 64, round=p.round)).__class__(
        **(vars(measure(Point("context", 64, round=p.round))) | {"context": p.context, "ttft_s": None})
    )
    result = sweep(target, points(rounds=6), study, hardware=HERE)
    assert result["verdicts"][1]["outcome"] == FAILS and result["verdicts"][0]["outcome"] != HOLDS


def test_without_a_prediction_only_the_signs_are_judged(study):
    result = sweep(MadeUpTarget(), points(), study)
    assert outcomes(result) == [HOLDS, UNTOLD, UNTOLD, HOLDS, UNTOLD]
    assert "no prediction" in result["verdicts"][1]["reason"]


def test_one_context_gives_no_line(study):
    result = sweep(MadeUpTarget(), points((64,)), study, hardware=HERE)
    assert outcomes(result) == [UNTOLD] * 5 and result["fits"]["itl"] is None


def test_throughput_follows_the_line_until_it_leaves_it(study):
    """Ridge of 5 FLOPs a byte: fp32 products bind from batch 10 on."""
    plan = shuffled(batch_points((1, 2, 4, 8, 16, 32), context=64), 5, seed=1)
    result = sweep(MadeUpTarget(), plan, study, hardware=HERE)
    assert outcomes(result) == [HOLDS, FAILS]
    assert result["left_the_line_at_batch"] == 16
    assert result["multiples"]["8"]["value"] == pytest.approx(8, rel=0.1)


def test_a_sweep_within_the_line_says_so(study):
    plan = shuffled(batch_points((1, 2, 4), context=64), 5, seed=1)
    result = sweep(MadeUpTarget(), plan, study, hardware=HERE)
    assert outcomes(result) == [HOLDS, HOLDS] and result["left_the_line_at_batch"] is None


class TwoCaches(MadeUpTarget):
    """A cache of eight bits beside one of 32; obeys: whether its steps read a quarter of it, or all."""

    def __init__(self, obeys, **options):
        super().__init__(**options)
        self.obeys = obeys
        self.shapes = {"full": SHAPE, "int8": Shape(SPEC, "fp32", "int8", "fp32")}

    def measure(self, point):
        shape = self.shapes[point.variant if self.obeys else "full"]
        itl = predict(point, shape, self.device).itl_s * self.noise()
        return Run(None, itl, [itl], point.context, 1, 1 / itl)


@pytest.mark.parametrize("obeys, outcome", [(True, HOLDS), (False, FAILS)])
def test_two_variants_are_compared_as_predicted(study, obeys, outcome):
    """At 32 thousand tokens the cache is most of the bytes; eight bits save half the time, since then
    attention waits for its products: 2.26 GFLOPs take 22.6 ms, 378 MB of cache 18.9."""
    plan = shuffled(pair_points("kv", ("full", "int8"), (32768,)), 4, seed=1)
    result = sweep(TwoCaches(obeys), plan, study, hardware=HERE)
    (v,) = result["verdicts"]
    assert v["outcome"] == outcome and "int8 is to one with full" in v["claim"]
    told = [r["predicted"]["itl_s"] for r in result["table"]]
    assert told[1] / told[0] == pytest.approx((26.9 + 22.6) / (26.9 + 75.5), rel=0.01)


# Keeping ---------------------------------------------------------------------------------------------


def test_an_interruption_loses_nothing(tmp_path):
    path, plan = tmp_path / "study.json", points()
    with pytest.raises(KeyboardInterrupt):
        sweep(MadeUpTarget(interrupt=7), plan, Study(path, SETTINGS), hardware=HERE)
    kept = read(path)["sweeps"]["context"]
    assert len(kept["runs"]) == 7 and set(kept["runs"]) == {p.id for p in plan[:7]}
    again, other = MadeUpTarget(seed=5), HardwareSpec.measured("other", bandwidth=1e9, flops=1e9)
    study = Study(path, SETTINGS)
    result = sweep(again, plan, study, hardware=other)
    assert study.resumed and again.measured == [p.id for p in plan[7:]]
    entry = read(path)["sweeps"]["context"]
    assert {k: entry["runs"][k] for k in kept["runs"]} == kept["runs"]  # as they were
    assert entry["predicted"] == kept["predicted"]  # not made again with hindsight
    assert result["measured"] == result["planned"] == 20


def test_a_finished_sweep_measures_nothing_more(tmp_path):
    path = tmp_path / "study.json"
    first = sweep(MadeUpTarget(), points(), Study(path, SETTINGS), hardware=HERE)
    target = MadeUpTarget(faults=["all"])
    assert sweep(target, points(), Study(path, SETTINGS), hardware=HERE) == first
    assert target.measured == [] and target.warmed == 0


def test_a_fault_is_kept_apart_and_tried_again(tmp_path):
    path, plan = tmp_path / "study.json", points()
    result = sweep(MadeUpTarget(faults=[plan[3].id]), plan, Study(path, SETTINGS), hardware=HERE)
    assert result["measured"] == 19 and read(path)["sweeps"]["context"]["faults"] == {plan[3].id: "it broke"}
    again = MadeUpTarget()
    result = sweep(again, plan, Study(path, SETTINGS), hardware=HERE)
    assert again.measured == [plan[3].id] and result["measured"] == 20
    assert read(path)["sweeps"]["context"]["faults"] == {}


def test_three_faults_in_a_row_end_a_sweep(study):
    target = MadeUpTarget(faults=["all"])
    result = sweep(target, points(), study, hardware=HERE)
    assert len(target.measured) == 3 and result["measured"] == 0 and outcomes(result) == [UNTOLD] * 5


def test_other_settings_are_not_mixed(tmp_path):
    path = tmp_path / "study.json"
    Study(path, {"rounds": 3, "model": "a"}).save()
    before = path.read_bytes()
    with pytest.raises(ValueError, match="begun with rounds=3, and now it is 5"):
        Study(path, {"rounds": 5, "model": "a"})
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", "null", '{"format": "other"}', '{"format": "companion lab"}'),
        '{"format": "companion lab", "version": 1}',
        '{"format": "companion lab", "version": 1, "settings": {"seed": 1}, "sweeps": {"context": {}}}',
        '{"format": "companion lab", "version": 1, "settings": {"seed": 1}, "sweeps": []}',
    ],
)
def test_a_file_that_is_no_study_is_left_alone(tmp_path, content):
    path = tmp_path / "study.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="study.json"):
        Study(path, SETTINGS)
    assert path.read_text() == content


def test_nothing_is_written_before_there_is_something_to_keep(tmp_path):
    study = Study(tmp_path / "study.json", SETTINGS)
    assert not study.path.exists() and not study.resumed
    study.note(machine="a pencil")
    assert read(study.path)["machine"] == "a pencil"
    study.discard()
    assert not study.path.exists()


def test_what_was_measured_or_was_there_is_not_discarded(tmp_path):
    path = tmp_path / "study.json"
    study = Study(path, SETTINGS)
    sweep(MadeUpTarget(), points((64, 256), rounds=1), study)
    study.discard()
    assert len(read(path)["sweeps"]["context"]["runs"]) == 2
    empty = tmp_path / "empty.json"
    Study(empty, SETTINGS).save()
    Study(empty, SETTINGS).discard()
    assert empty.exists()


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="there is no folder"):
        Study(tmp_path / "nowhere" / "study.json", SETTINGS)


def test_whoever_reads_the_file_reads_it_whole(study):
    """The old file is replaced, never written into: a reader that had opened it still sees all of it."""
    before = study.path.read_bytes()
    with open(study.path, "rb") as reader:
        study.note(fact="x" * 100_000)
        assert reader.read() == before
    assert read(study.path)["fact"] == "x" * 100_000


def test_a_failed_write_leaves_the_old_file(study, monkeypatch):
    before = study.path.read_bytes()
    study.data["bad"] = float("nan")
    with pytest.raises(ValueError):
        study.save()
    assert study.path.read_bytes() == before and list(study.path.parent.iterdir()) == [study.path]


def test_a_study_is_json_without_infinities(study):
    sweep(MadeUpTarget(), points(rounds=1, contexts=(64, 256)), study, hardware=HERE)
    json.loads(study.path.read_text(), parse_constant=lambda c: pytest.fail(f"{c} in the file"))


def test_progress_is_told(study):
    told = []
    sweep(
        MadeUpTarget(), points((64, 256), rounds=1), study,
        on_progress=lambda done, total, point, run: told.append((done, total, run is None)),
    )  # fmt: skip
    assert told == [(0, 2, True), (1, 2, False), (1, 2, True), (2, 2, False)]


@pytest.mark.parametrize("bad", [[], [Point("a", 1), Point("b", 1)]])
def test_points_of_one_sweep_are_needed(study, bad):
    with pytest.raises(ValueError, match="points of one sweep"):
        sweep(MadeUpTarget(), bad, study)


# Through an endpoint ---------------------------------------------------------------------------------


def remote(scripted, study, plan, server, hardware=None, **options):
    endpoint, transport = scripted(server, **options)
    target = EndpointTarget(endpoint, shape=SHAPE, session="s")
    return sweep(target, plan, study, hardware=hardware), transport, target


def test_an_endpoint_s_formula_is_found(scripted, study):
    """TTFT = 1/4 + n / 1024 and ITL = 1/16 + n / 2^18, n counted by the server."""
    result, transport, _ = remote(scripted, study, points(rounds=3), WritingServer())
    itl, ttft = (result["fits"][k]["coefficients"] for k in ("itl", "ttft"))
    assert itl["intercept"]["value"] == pytest.approx(1 / 16, rel=1e-6)
    assert itl["slope"]["value"] == pytest.approx(2**-18, rel=1e-6)
    assert ttft["slope"]["value"] == pytest.approx(1 / 1024, rel=1e-6)
    assert ttft["curvature"]["value"] == pytest.approx(0, abs=1e-12)
    runs = study.data["sweeps"]["context"]["runs"].values()
    assert {r["context"] for r in runs} == set(CONTEXTS)  # lengths are hit once they were counted


def test_no_two_prompts_begin_alike(scripted, study):
    result, transport, _ = remote(scripted, study, points(rounds=2), WritingServer(cache=True))
    prompts = [b["messages"][0]["content"] for b in transport.bodies if b]
    assert len({p[:16] for p in prompts}) == len(prompts) == 12 and result["measured"] == 10


def test_a_server_s_cache_that_answers_is_noticed(scripted, study):
    server = WritingServer(cache=True)
    server.seen = type("Everything", (set,), {"__contains__": lambda self, x: True})()
    result, *_ = remote(scripted, study, points((1024, 2048), rounds=1), server)
    faults = study.data["sweeps"]["context"]["faults"].values()
    assert result["measured"] == 0 and all("prefix cache answered" in f for f in faults)


def test_a_known_prefix(scripted, study):
    plan = shuffled(prefix_points(1024), 4, seed=1)
    result, *_ = remote(scripted, study, plan, WritingServer(cache=True), HERE)
    assert outcomes(result) == [HOLDS, HOLDS]
    warm = [r for k, r in study.data["sweeps"]["prefix"]["runs"].items() if k.startswith("warm")]
    assert all(r["cached_tokens"] > 900 for r in warm)


def test_a_server_without_a_prefix_cache_saves_nothing(scripted, study):
    plan = shuffled(prefix_points(1024), 4, seed=1)
    assert outcomes(remote(scripted, study, plan, WritingServer(), HERE)[0]) == [FAILS, HOLDS]


def test_batches_are_requests_at_once(scripted, study):
    plan = shuffled(batch_points((1, 4), context=64), 3, seed=1)
    result, transport, _ = remote(scripted, study, plan, WritingServer())
    assert result["multiples"]["4"]["value"] == pytest.approx(4, rel=1e-2)
    assert transport.most_open <= 4 and transport.open == 0


def test_a_server_that_reports_no_usage(scripted, study):
    result, *_ = remote(scripted, study, points(rounds=2), WritingServer(usage=False))
    runs = list(study.data["sweeps"]["context"]["runs"].values())
    assert all(r["context"] is None and "no usage" in r["note"] for r in runs) and len(runs) == 10
    assert outcomes(result)[0] == HOLDS  # at the lengths aimed at


def test_the_rate_of_a_batch_is_that_of_the_time_when_all_write():
    """One writes at seconds 1 to 9, the other, sent at 2, at 3.5 to 7.5; between these, four of each."""
    first = Answer(sent_s=0.0, arrivals_s=[float(t) for t in range(1, 10)], tokens=9)
    other = Answer(sent_s=2.0, arrivals_s=[1.5, 2.5, 3.5, 4.5, 5.5], tokens=5)
    assert together([first, other]) == 8 / 4
    other.tokens, other.merged = 10, True  # two in each event
    assert together([first, other]) == (4 + 8) / 4


@pytest.mark.parametrize("arrivals", [[1.0], [20.0, 21.0], []])
def test_no_rate_without_a_common_time(arrivals):
    first = Answer(sent_s=0.0, arrivals_s=[1.0, 2.0, 3.0], tokens=3)
    assert together([first, Answer(sent_s=0.0, arrivals_s=arrivals, tokens=2)]) is None


@pytest.mark.parametrize("point", [Point("x", 64, prompt=False), Point("x", 64, batch=99)])
def test_what_an_endpoint_cannot(scripted, point):
    run = EndpointTarget(scripted(WritingServer())[0]).measure(point)
    assert isinstance(run, Run) and run.fault

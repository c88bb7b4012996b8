"""The page: whole by itself, the numbers those of the study, and a server's words harmless."""

import importlib
import re
from html.parser import HTMLParser

import pytest
from bs4 import BeautifulSoup
from made_up import HERE, MadeUpTarget

from companion.lab.points import batch_points, context_points, shuffled
from companion.lab.reports import chart, report, ticks, write_report
from companion.lab.studies import Study, read, sweep

VOID = {"meta", "br"}


class Balanced(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture
def study(tmp_path):
    study = Study(tmp_path / "study.json", {})
    study.note(target={"kind": "made up"}, machine={"processor": "a pencil"}, hardware=vars(HERE), probes=[])
    plan = shuffled(context_points((64, 256, 1024, 4096), prompt_limit=1024), 3, seed=1)
    sweep(MadeUpTarget(), plan, study, hardware=HERE)
    sweep(MadeUpTarget(), shuffled(batch_points((1, 4, 32), context=64), 3, seed=1), study, hardware=HERE)
    return read(study.path)


def test_the_page_asks_for_nothing(study):
    page = report(study)
    soup = BeautifulSoup(page, "html.parser")
    assert not soup.find_all(["script", "link", "img", "iframe", "object", "form", "base", "use", "image"])
    assert not soup.find_all(attrs={"src": True}) and not soup.find_all(attrs={"href": re.compile("^[^#]")})
    assert "url(" not in page and "@import" not in page and "http:" not in page and "https:" not in page
    assert "default-src 'none'" in page


def test_the_page_is_well_formed(study):
    checker = Balanced()
    checker.feed(report(study))
    assert checker.open == []


def test_the_numbers_are_those_of_the_study(study):
    text = BeautifulSoup(report(study), "html.parser").get_text(" ")
    result = study["sweeps"]["context"]["result"]
    for v in result["verdicts"]:
        assert v["claim"] in text and v["reason"] in text
    fit, told = (result["fits"][k]["coefficients"]["slope"] for k in ("itl", "itl predicted"))
    for value in (fit["value"], fit["low"], fit["high"], told["value"]):
        assert f"{value * 1e9:,.0f}" in text  # thousands of nanoseconds, and no exponent
    assert "a pencil" in text and "20.0 GB/s" in text and "leaves the bandwidth line at batch 32" in text
    assert "12 of 12 runs" in text


def test_every_run_is_a_dot_and_every_prediction_a_line(study):
    charts = BeautifulSoup(report(study), "html.parser").find_all("svg")
    dots = [len(c.find_all("circle")) for c in charts]
    assert dots == [12, 9, 9]  # ITL of all, TTFT of the prompts, throughput of the batches
    assert [len(c.select("path.predicted")) for c in charts] == [1, 1, 1]


def test_the_fitted_line_goes_where_the_fit_says(study, monkeypatch):
    """It begins and ends where something was measured, and passes through the curve in the chart's unit."""
    drawn = []
    page = importlib.import_module("companion.lab.reports")
    monkeypatch.setattr(page, "chart", lambda *given: drawn.append(given[-1]) or chart(*given))
    charts = BeautifulSoup(report(study), "html.parser").find_all("svg")
    assert [len(c.select("path.fitted")) for c in charts] == [1, 1, 0]  # no curve is fitted to throughput
    fits = study["sweeps"]["context"]["result"]["fits"]
    for points, name, ends in zip(drawn, ("itl", "ttft"), ((64, 4096), (64, 1024))):
        a, b, c = (
            fits[name]["coefficients"].get(k, {"value": 0})["value"]
            for k in ("intercept", "slope", "curvature")
        )
        assert (points[0][0], points[-1][0]) == ends
        assert [y for _, y in points] == pytest.approx([1e3 * (a + b * x + c * x * x) for x, _ in points])


def test_a_line_lies_where_its_dots_would():
    ends = [(10, 2.0), (100, 10.0)]
    svg = BeautifulSoup(chart("t", "x", "y", {"a": ends}, {}, [*ends, (100, -1.0)]), "html.parser")
    places = [p.split() for p in svg.select_one("path.fitted")["d"].removeprefix("M").split("L")]
    assert places[:2] == [[c["cx"], c["cy"]] for c in svg.find_all("circle")]
    assert float(places[2][1]) == 228  # on the axis, not below it


def test_a_column_without_values_is_left_out(study):
    soup = BeautifulSoup(report(study), "html.parser")
    heads = [[c.get_text() for c in t.find_all("th")] for t in soup.find_all("table")]
    assert not any("Variant" in names for names in heads)  # there is one
    assert sum("TTFT, ms" in names for names in heads) == 4  # the table and the runs of either sweep
    for t in soup.find_all("table"):
        rows = [r.find_all("td") for r in t.find_all("tr")[1:]]
        assert all(any(row[i].get_text() for row in rows) for i in range(len(rows[0])))


def test_moments_and_numbers_are_for_people(study):
    slope = study["sweeps"]["context"]["result"]["fits"]["itl"]["coefficients"]["slope"]
    slope["value"] = 1.88474e-5
    text = BeautifulSoup(report(study), "html.parser").get_text(" ")
    assert "18,847" in text
    assert f"begun: {study['begun'].replace('T', ' ')[:19]} UTC" in text
    assert not re.search(r"\d\.\d+e[+-]\d", text) and "+00:00" not in text


def test_what_others_say_is_text(study):
    evil = "<script>alert(1)</script>\"'&"
    study["target"] = {"kind": "endpoint", "model": evil}
    study["sweeps"]["context"]["faults"] = {"p": evil}
    next(iter(study["sweeps"]["context"]["runs"].values()))["note"] = evil
    study["sweeps"]["context"]["result"]["verdicts"][0]["reason"] = evil
    page = report(study)
    assert "<script" not in page and page.count("&lt;script&gt;") >= 5


def test_a_study_just_begun_has_a_page(tmp_path):
    study = Study(tmp_path / "s.json", {})
    assert "Nothing has been concluded yet" in report(study.data)
    study.begin("context", context_points((8,)), {})
    page = report(study.data)
    assert "0 of 1 runs" in page and "<svg" not in page


def test_an_interrupted_sweep_has_a_page(tmp_path):
    study = Study(tmp_path / "s.json", {})
    with pytest.raises(KeyboardInterrupt):
        sweep(MadeUpTarget(interrupt=2), context_points((8, 16, 32)), study)
    assert "2 of 3 runs" in report(read(study.path))


def test_the_page_is_written_whole(study, tmp_path):
    write_report(study, tmp_path / "r.html")
    assert (tmp_path / "r.html").read_text(encoding="utf-8") == report(study)
    assert {p.suffix for p in tmp_path.iterdir()} == {".html", ".json"}


@pytest.mark.parametrize("most", [1e-9, 0.03, 1, 7, 99.9, 100, 131072, 3.3e12])
def test_ticks_are_round_and_enclose(most):
    t = ticks(most)
    assert t[0] == 0 and t[-1] >= most * (1 - 1e-9) and t[-2] < most and 4 <= len(t) <= 9


def test_a_dot_lies_where_its_number_is():
    svg = BeautifulSoup(chart("t", "x", "y", {"a": [(0, 0), (100, 10)]}, {}), "html.parser")
    low, high = ((float(c["cx"]), float(c["cy"])) for c in svg.find_all("circle"))
    assert low == (72, 228) and high == (528, 34)


def test_nothing_measured_is_no_chart():
    assert chart("t", "x", "y", {}, {"a": [(1, 1)]}) == ""

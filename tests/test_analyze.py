"""`scatterbrain analyze` and `report` on small inputs: records, figures, going on after a stop, mistakes, the page. No network."""

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from scatterbrain import cli
from scatterbrain.lab import analyze, attention_data, plate_page, study
from scatterbrain.lab.plates import Heat, Panel, Series

for module in ("scipy", "matplotlib", "plotly", "tqdm"):
    pytest.importorskip(module, reason=f"{module} is not installed; the extra `analysis` brings it")

SMALL = {
    "observations": {"data": ("process1",), "length": 32, "budget": 0.25},
    "recovery": {"size": 20, "trials": 1},
    "process1": {"lengths": (32, 64), "draws": 1},
    "temperature": {"lengths": (32, 64)},
    "separation": {"lengths": (32, 64)},
    "variance": {"width": 8, "features": 8, "draws": 200, "widths": (8, 16), "rotations": 20},
    "bound": {"data": ("process1",), "length": 32, "heads": 2, "budget": 0.25, "scales": (1.0, 0.1)},
    "sweep": {"data": ("process1",), "lengths": (32, 64), "heads": 2, "budgets": (0.25, 0.5)},
    "ratio": {"data": ("process1",), "length": 32, "heads": 3, "seeds": 1, "budget": 0.25},
    "picture": {"data": "process1", "length": 32, "heads": 1, "budget": 0.25, "methods": ("default",)},
}


def capture(path, **more):
    q, k = torch.randn(2, 2, 3, 32, 8, generator=torch.Generator().manual_seed(0))
    torch.save({"q": q, "k": k, **more}, path)
    return path


def options(name, out):
    line = ["analyze", name, "--out", str(out)]
    for key, value in SMALL[name].items():
        line += ["--" + key.replace("_", "-"), *map(str, value if isinstance(value, tuple) else (value,))]
    return line


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Every study once, by its command."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("records")
    for name in analyze.studies():
        assert cli.main(options(name, out)) == 0
    return out


def test_there_is_a_small_case_of_every_study():
    assert set(SMALL) == set(analyze.studies())


@pytest.mark.parametrize("name", SMALL)
def test_each_study_writes_a_record_and_figures(records, name):
    found = study.load(records / f"{name}.json")
    assert found["study"] == name and found["complete"] and found["cells"] and found["summary"]
    assert found["command"].startswith(f"scatterbrain analyze {name}")
    assert found["versions"]["torch"] == torch.__version__ and found["hardware"]["cores"]
    assert (records / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (records / "figures" / f"{name}.svg").read_text()[:2000]
    assert analyze.studies()[name].text(found)


def test_observations_are_the_oracles_of_the_definition(records):
    from scatterbrain import analysis

    found = study.load(records / "observations.json")
    heads = attention_data.load("process1", length=32)
    matrix = heads.attention(1, 2)
    cell = found["cells"]["Process 1, layer 1"]
    assert cell["entropy"][2] == pytest.approx(float(analysis.entropy(matrix)), rel=1e-4)
    assert cell["sparse"][2] == pytest.approx(float(analysis.relative_error(analysis.top_k(matrix, 8), matrix)), rel=1e-3)
    assert cell["low_rank"][2] == pytest.approx(float(analysis.relative_error(analysis.truncated_svd(matrix, 4), matrix)), rel=1e-3)
    assert min(cell["mixes"][2]) <= min(cell["sparse"][2], cell["low_rank"][2]) * (1 + 1e-5)


def test_the_sweep_says_why_a_method_is_left_out(tmp_path):
    capture(tmp_path / "c.pt", causal=True)
    found = run("sweep", tmp_path, data=(str(tmp_path / "c.pt"),), lengths=(32,), budgets=(0.5, 0.6))
    cells = {c["method"]: c for c in found["cells"].values() if c["budget"] == 0.6}
    assert "later tokens" in cells["smyrf"]["refused"]
    assert len(cells["default"]["errors"]) == 2


def run(name, out, **more):
    one = analyze.studies()[name]
    study.run(one, one.config(**{**SMALL[name], **more, "out": str(out)}))
    return study.load(out / f"{name}.json")


def test_a_stopped_run_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    one, done = analyze.studies()["recovery"], []

    def stopping(config):
        for key, work in one.cells(config):

            def counted(key=key, work=work):
                if len(done) == 3:
                    raise KeyboardInterrupt
                done.append(key)
                return work()

            yield key, counted

    config = one.config(**SMALL["recovery"], out=str(tmp_path))
    with pytest.raises(KeyboardInterrupt, match=r"3 parts are in .*recovery.json; give the same command to go on"):
        study.run(dataclasses.replace(one, cells=stopping), config)
    assert not study.load(tmp_path / "recovery.json")["complete"]
    with pytest.raises(ValueError, match="must hold an unfinished run with these settings"):
        study.run(one, dataclasses.replace(config, seed=1))
    study.run(one, config)
    assert "holds 3 of 49 parts; going on from there" in capsys.readouterr().out
    found = study.load(tmp_path / "recovery.json")
    assert found["complete"] and len(found["cells"]) == 49
    assert found["cells"] == run("recovery", tmp_path / "again")["cells"]


def test_all_leaves_what_is_complete(tmp_path, monkeypatch, capsys):
    small = analyze.studies()["recovery"]

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Config(small.config):
        size: int = study.option(20, "rows")
        trials: int = study.option(1, "draws")

    monkeypatch.setattr(analyze, "studies", lambda: {"recovery": dataclasses.replace(small, config=Config)})
    for _ in range(2):
        assert cli.main(["analyze", "all", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.count("Recovered (relative") == 1 and "recovery.json is complete; --fresh measures it again" in out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"type":"scatterbrain-analysis","version":99,"complete":true}', r"must be a record of version 1; got version 99; run the study again"),
        ('{"type":"scatterbrain-bench"}', r"must be a record of type scatterbrain-analysis; got scatterbrain-bench"),
        ("not JSON", r"must be a record of type scatterbrain-analysis; got no JSON object"),
    ],
)
def test_another_record_is_refused_in_one_line(tmp_path, capsys, text, said):
    (tmp_path / "recovery.json").write_text(text)
    assert cli.main(["report", "--records", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 1
    err = capsys.readouterr().err
    assert re.search(said, err) and err.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["observations", "--budget", "0.001", "--data", "process1", "--length", "32"], "budget must buy at least one entry a row"),
        (["observations", "--data", "nowhere.pt"], "nowhere.pt is no file and none of minilm"),
        (["recovery", "--size", "3"], "size must be an integer >= 20"),
        (["temperature", "--lengths", "64"], "lengths must name at least two"),
        (["picture", "--layer", "1"], "layer and head must come together"),
        (["picture", "--data", "process1", "--layer", "9", "--head", "0", "--length", "32"], "layer and head must be below 3 and 4"),
        (["variance", "--draws", "5"], "draws must be an integer >= 100"),
    ],
)
def test_a_wrong_value_is_one_line(tmp_path, capsys, line, said):
    assert cli.main(["analyze", *line, "--out", str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        ({"attention": torch.full((1, 1, 4, 4), float("nan"))}, "attention must hold finite numbers; got 16"),
        ({"attention": torch.full((1, 1, 4, 4), 0.5)}, "attention must have rows that sum to one; got a sum of 2"),
        ({"attention": torch.eye(4)}, "attention must have shape (layers, heads, length, ...)"),
        ({"q": torch.ones(1, 2, 4, 8), "k": torch.ones(1, 1, 4, 8)}, "k must match q"),
        ({"x": 1}, "must hold a dict with 'attention', or with 'q' and 'k'"),
        (torch.zeros(2), "must hold a dict"),
    ],
)
def test_a_bad_capture_is_one_line(tmp_path, capsys, saved, said):
    torch.save(saved, tmp_path / "bad.pt")
    assert cli.main(["analyze", "observations", "--data", str(tmp_path / "bad.pt"), "--out", str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_a_file_that_holds_no_tensors_is_one_line(tmp_path, capsys):
    (tmp_path / "x.pt").write_text("hello")
    assert cli.main(["analyze", "observations", "--data", str(tmp_path / "x.pt"), "--out", str(tmp_path)]) == 1
    assert "is not a file of tensors" in capsys.readouterr().err


def test_captured_matrices_serve_the_oracles_but_not_the_methods(tmp_path, capsys):
    matrix = torch.softmax(torch.randn(1, 4, 32, 32, generator=torch.Generator().manual_seed(0)), -1)
    torch.save({"attention": matrix}, tmp_path / "checkpoint-1.pt")
    found = run("observations", tmp_path, data=(str(tmp_path / "checkpoint-1.pt"),))
    assert list(found["summary"]) == ["checkpoint-1"] and found["summary"]["checkpoint-1"]["heads"] == 4
    assert cli.main(["analyze", "bound", "--data", str(tmp_path / "checkpoint-1.pt"), "--length", "32", "--out", str(tmp_path)]) == 1
    assert "holds attention matrices alone" in capsys.readouterr().err


class Outside(HTMLParser):
    """What a page would fetch."""

    def __init__(self):
        super().__init__()
        self.found, self.sections = [], []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.found += [v for k, v in given.items() if k in ("src", "href") and not v.startswith(("#", "data:"))]
        self.sections += [given["id"]] if tag == "section" else []


def test_the_page_holds_every_study_and_fetches_nothing(records, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert cli.main(["report", "--records", str(records), "--out", str(page)]) == 0
    assert str(page) in capsys.readouterr().out
    text = page.read_text(encoding="utf-8")
    parser = Outside()
    parser.feed(text)
    assert parser.sections == list(analyze.studies()) and parser.found == []
    assert len(text) < 6 * 2**20
    plots = json.loads(re.search(r"const plots=(.*);\nconst options", text, re.S).group(1).replace("<\\/", "</"))
    assert len(plots) == sum(len(one.plate(study.load(records / f"{name}.json")).panels) for name, one in analyze.studies().items())


def test_a_page_of_nothing_and_of_a_record_without_what_it_needs(records, tmp_path, capsys):
    assert cli.main(["report", "--records", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 1
    assert "holds no record" in capsys.readouterr().err
    found = study.load(records / "recovery.json")
    (tmp_path / "recovery.json").write_text(json.dumps({**found, "summary": {}}))
    assert cli.main(["report", "--records", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 1
    assert "recovery.json lacks 'worst_error_easy'" in capsys.readouterr().err
    (tmp_path / "recovery.json").write_text(json.dumps({**found, "complete": False}))
    assert cli.main(["report", "--records", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 1
    assert "is unfinished" in capsys.readouterr().out


def test_panels_become_plots():
    line = plate_page.figure(Panel(title="t", series=(Series(name="a", x=[1, 2, 3], y=[1.0, None, 3.0]),), log_y=True))
    assert line["data"][0]["x"] == [1, 3] and line["layout"]["yaxis"]["type"] == "log"
    heat = plate_page.figure(Panel(title="t", heat=Heat(z=[[1.0, 0.0]], low=0.01, high=1, log=True)))
    assert heat["data"][0]["z"] == [[0.0, -2.0]] and heat["data"][0]["zmin"] == pytest.approx(-2)


def test_numbers_that_are_not_finite_do_not_reach_a_record():
    assert study.rounded({"a": [float("nan"), 1.23456789, True, "x"]}) == {"a": [None, 1.23457, True, "x"]}


@pytest.mark.parametrize("line", [["analyze", "--help"], ["report", "--help"], *(["analyze", name, "--help"] for name in SMALL)])
def test_help_reads_well(line, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stop:
        cli.main(line)
    out = capsys.readouterr().out
    assert stop.value.code == 0 and "default: None" not in out and out.startswith("usage: scatterbrain")


def test_the_claims_name_commands_and_records_that_exist():
    """Every claim has a command that parses, or says that it is open."""
    path = Path(__file__).parent.parent / "docs" / "claims.md"
    rows = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("| ") and not line.startswith(("| claim", "| ---"))]
    assert len(rows) > 30
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 5, row
        named = re.findall(r"`(?:analyze|bench|demo) ?([a-z0-9]*)", cells[2])
        assert named or "open" in cells[4] or "not a measurement" in cells[4], row
        assert all(name in analyze.studies() for name in named if name), row
        assert re.match(r"(holds|fails|in part|open|not a measurement)", cells[4]), row

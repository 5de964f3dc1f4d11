"""The command line: what it says, and what it does with mistakes."""

import pytest
import scatterbrain as sb
from scatterbrain import cli
from scatterbrain.lab import demo
from scatterbrain.lab.extras import LabError, need


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"scatterbrain {sb.__version__}\n"


@pytest.mark.parametrize(
    ("argv", "words"), [(["--help"], ["demo", "--version"]), (["demo", "--help"], ["--budget", "0.125", "model, process1, minilm"])]
)
def test_help(capsys, monkeypatch, argv, words):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    out = capsys.readouterr().out
    assert stop.value.code == 0
    assert all(word in out for word in words)
    assert "default: None" not in out


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["demo", "--data", "nonsense"], ["demo", "--budget", "much"]])
def test_unknown_words_are_refused(argv):
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2


@pytest.mark.parametrize(
    ("option", "value", "name"),
    [
        ("--budget", "0", "budget"),
        ("--budget", "nan", "budget"),
        ("--heads", "0", "heads"),
        ("--delta", "-1", "delta"),
        ("--beta-factor", "0", "beta_factor"),
        ("--grid-draws", "0", "grid_draws"),
    ],
)
def test_a_wrong_value_is_one_line(capsys, tmp_path, option, value, name):
    pytest.importorskip("matplotlib")
    pytest.importorskip("tqdm")
    assert cli.main(["demo", "--data", "process1", "--out", str(tmp_path), option, value]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"scatterbrain: {name} must ")
    assert err.count("\n") == 1


def test_options_reach_the_configuration(monkeypatch):
    seen = []
    monkeypatch.setattr(demo, "run", lambda config, command: seen.append((config, command)))
    assert cli.main(["demo", "--budget", "0.25", "--data", "process1", "--seed", "3"]) == 0
    assert seen == [(demo.DemoConfig(budget=0.25, data=("process1",), seed=3), "scatterbrain demo --budget 0.25 --data process1 --seed 3")]
    assert cli.main(["demo"]) == 0
    assert seen[1][0] == demo.DemoConfig()


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), 130), (LabError("no such wheel; fetch it"), 1), (PermissionError(13, "denied", "out"), 1)]
)
def test_what_stops_the_work_is_one_line(monkeypatch, capsys, error, code):
    def stop(config, command):
        raise error

    monkeypatch.setattr(demo, "run", stop)
    assert cli.main(["demo"]) == code
    assert capsys.readouterr().err.count("\n") == 1


def test_a_missing_package_names_its_extra():
    with pytest.raises(LabError, match=r"not_there is not installed; run: pip install 'scatterbrain\[demo\]'"):
        need("not_there")

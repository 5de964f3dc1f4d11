"""The commands that load a model: calibrate, evaluate, quality, demo; on a random one saved to a folder, without a network."""

import json

import pytest
import scatterbrain as sb
import torch
from scatterbrain import cli
from scatterbrain.lab import demo, demo_model, matrix, minilm, models, quality, rivals, subjects, tasks
from scatterbrain.lab.extras import LabError

transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
pytest.importorskip("tqdm")

WORDS = [f"w{n}" for n in range(60)]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 61}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random encoder and a random language model, with a tokenizer of sixty words."""
    place = tmp_path_factory.mktemp("models")
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: n for n, w in enumerate(["[UNK]", *WORDS])}, unk_token="[UNK]"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="[UNK]", pad_token="[UNK]")
    torch.manual_seed(0)
    bert = transformers.BertModel(transformers.BertConfig(**SIZES))
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2, max_position_embeddings=256))
    for name, model in (("bert", bert), ("llama", llama)):
        model.save_pretrained(place / name)
        tokenizer.save_pretrained(place / name)
    return place


@pytest.fixture(scope="module")
def corpus(folder):
    picks = torch.randint(60, (4000,), generator=torch.Generator().manual_seed(0)).tolist()
    path = folder / "corpus.txt"
    path.write_text(" ".join(WORDS[n] for n in picks))
    return path


@pytest.mark.parametrize(("name", "task"), [("bert", "cosine to exact"), ("llama", "perplexity")])
def test_calibrate_then_evaluate(folder, corpus, tmp_path, capsys, name, task):
    plan, report = tmp_path / "plan.json", tmp_path / "report.json"
    common = ["--model", str(folder / name), "--text", str(corpus), "--inputs", "2", "--length", "64"]
    assert cli.main(["calibrate", *common, "--budget", "1/4", "--out", str(plan)]) == 0
    out = capsys.readouterr().out
    assert f"plan  {plan}" in out and "entropy" in out and "the first 2 windows of 64 tokens" in out
    assert sb.Plan.load(plan).budget == 0.25
    assert cli.main(["evaluate", *common, "--plan", str(plan), "--out", str(report)]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in (task, "converted", "seconds", "extra memory", "output error", f"report  {report}"))
    found = json.loads(report.read_text())
    assert found["report"]["type"] == "Report" and task in found["converted"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["calibrate", "--model", "{}/none"], "none could not be loaded"),
        (["calibrate", "--model", "{}/bert", "--text", "{}/corpus.txt", "--out", "{}/no/plan.json"], "out must lie in a folder that exists"),
        (["calibrate", "--model", "{}/bert", "--text", "{}/corpus.txt", "--length", "512", "--inputs", "99"], "text must hold 99 windows"),
        (["evaluate", "--model", "{}/bert", "--text", "{}/corpus.txt", "--plan", "{}/corpus.txt"], "be a plan"),
        (["evaluate", "--model", "{}/bert", "--plan", "{}/missing.json"], "missing.json"),
        (["quality", "--budget", "3/2"], "budget must lie in (0, 1]"),
    ],
)
def test_mistakes_are_one_line(folder, corpus, capsys, monkeypatch, argv, words):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert cli.main([word.format(folder) for word in argv]) == 1
    err = capsys.readouterr().err
    assert words in err and err.strip().count("\n") == 0


def test_budgets_are_written_as_one_writes_them(capsys):
    assert cli.share("1/8") == cli.share("0.125") == 0.125
    for wrong in ("1/0", "much"):
        with pytest.raises(SystemExit):
            cli.main(["calibrate", "--model", "x", "--budget", wrong])
        assert "write 1/8 or 0.125" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["calibrate", "evaluate", "quality"])
def test_help_reads(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    out = capsys.readouterr().out
    assert "default: None" not in out and "--budget" in out + "--budget" * (command == "evaluate")


def as_carried(monkeypatch, folder):
    """The carried models' names, answered by the random ones, short."""
    names = {"minilm": "bert", "smollm2": "llama"}

    def load(name):
        return subjects.load_folder(folder / names[name], name, name)

    for module in (quality, demo_model):
        monkeypatch.setattr(module, "load", load)
    text = (folder / "corpus.txt").read_text()
    monkeypatch.setattr(quality, "calibration_inputs", lambda subject: (subject.windows([text], 64, 2), "made-up words"))
    documents = torch.randint(60, (6, 128), generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(tasks, "long_documents", lambda subject, count: list(documents[:, None]))
    monkeypatch.setattr(tasks, "wikitext", lambda split: text)
    brief = {
        "minilm": {"retrieval": lambda subject: tasks.retrieval(subject, 6, 64)},
        "smollm2": {
            "perplexity 2,048": lambda subject: tasks.perplexity(subject, 64, 2),
            "generation": lambda subject: tasks.generation(subject, 2, 48, 4),
        },
    }
    monkeypatch.setattr(quality, "TASKS", brief)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))


def test_quality_measures_what_the_record_lacks(folder, corpus, tmp_path, monkeypatch, capsys):
    as_carried(monkeypatch, folder)
    out = tmp_path / "records" / "quality.json"
    methods = ("exact", quality.OURS, "default", "Performer", "SMYRF", "top-k (oracle)")
    config = quality.QualityConfig(data=("minilm", "smollm2"), methods=methods[:3], budget=1 / 4, out=str(out), plans=str(tmp_path))
    quality.run(config)
    assert (tmp_path / "minilm-1_4.json").is_file() and (tmp_path / "smollm2-1_4.json").is_file()
    first = json.loads(out.read_text())
    quality.run(quality.QualityConfig(**{**vars(config), "methods": methods}))
    record = json.loads(out.read_text())
    assert record["type"] == "scatterbrain-quality" and record["rows"][: len(first["rows"])] != []
    rows = {(row["model"], row["method"], row["task"]): row for row in record["rows"]}
    assert len(rows) == 3 * len(methods)
    assert capsys.readouterr().out.count(": exact") == 3  # what it said was kept
    assert rows["minilm", "exact", "retrieval"]["result"]["cosine"] == pytest.approx(1)
    same = rows["smollm2", "exact", "generation"]["result"]
    assert same.pop("text") and same == {"new_tokens": 4, "same_until": 4.0, "same_first": 2, "whole": 2}
    assert "not causal" in rows["smollm2", "SMYRF", "generation"]["note"]
    assert rows["smollm2", "default", "perplexity 2,048"]["result"]["perplexity"] > 1
    quality.run(config)
    table = capsys.readouterr().out
    assert "smollm2 at budget 0.25" in table and "not causal" in table and str(out) in table


def test_errors_on_models_beside_the_oracles(folder, corpus, tmp_path, monkeypatch, capsys):
    as_carried(monkeypatch, folder)
    text = (folder / "corpus.txt").read_text()
    monkeypatch.setattr(matrix, "load", quality.load)
    monkeypatch.setattr(matrix, "held_out_inputs", lambda subject, count: (subject.windows([text[len(text) // 2 :]], 64, count), "other words"))
    out = tmp_path / "errors.json"
    methods = (matrix.OURS, "default", "SMYRF", "top-k (oracle)", *matrix.ORACLES)
    config = matrix.ErrorsConfig(data=("minilm", "smollm2"), budgets=(1 / 4, 1 / 8), methods=methods, out=str(out))
    matrix.run(config)
    rows = {(row["model"], row["budget"], row["method"]): row for row in json.loads(out.read_text())["rows"]}
    assert len(rows) == 2 * 2 * len(methods)
    for model in ("minilm", "smollm2"):
        for method in ("top-k (oracle)", *matrix.ORACLES):
            wide, narrow = (rows[model, budget, method] for budget in (1 / 4, 1 / 8))
            assert 0 <= wide["error"] < narrow["error"] and wide["output_error"] < narrow["output_error"] and wide["spent"] > narrow["spent"]
        # random weights attend to all keys alike, which means hold and a few entries do not
        assert rows[model, 1 / 8, matrix.OURS]["error"] < 0.05 < rows[model, 1 / 8, "top-k (oracle)"]["error"]
    assert "not causal" in rows["smollm2", 1 / 8, "SMYRF"]["note"]
    before = out.read_text()
    matrix.run(config)  # nothing is left to measure
    assert out.read_text() == before and "smollm2" in capsys.readouterr().out


def test_half_documents_find_each_other():
    good = torch.nn.functional.normalize(torch.eye(4).repeat_interleave(2, 0) + 0.01, dim=-1)
    assert tasks.top1(good) == 100
    assert tasks.compare_embeddings(good, good)["cosine"] == pytest.approx(1)
    assert tasks.top1(good.roll(1, 0)) == 0


def test_words_that_differ():
    assert tasks.edits(["a", "b", "c", "d"], ["a", "x", "c"]) == 2
    assert tasks.compare_transcripts("It was", "It was")["the_same"]
    assert tasks.compare_transcripts("It was", "")["wrong_words"] == 2


@pytest.mark.parametrize("name", rivals.BOTH_WAYS)
@pytest.mark.parametrize("causal", [False, True])
def test_rivals_keep_to_their_budget_or_say_why_they_cannot_be_causal(name, causal):
    rival = rivals.Named(name, 1 / 8)
    q, k = torch.randn(2, 1, 2, 1024, 16, generator=torch.Generator().manual_seed(0))
    if rival.refusal(causal):
        with pytest.raises(ValueError, match="be able to honour is_causal"):
            sb.attention(q, k, k, is_causal=causal, **rival.method(1024, causal))
        return
    told = sb.explain(q, k, k, is_causal=causal, **rival.method(1024, causal))
    assert told.budget <= 0.14 or name == "Linear Transformer"


def test_the_demo_writes_a_page(folder, corpus, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    as_carried(monkeypatch, folder)
    monkeypatch.setattr(minilm, "LONGEST", 64)
    monkeypatch.setattr(minilm, "documents", lambda count, data: ([corpus.read_text()], "made-up words"))
    monkeypatch.setattr(models.Carried, "announce", lambda self: None)
    monkeypatch.delenv("SCATTERBRAIN_DATA", raising=False)
    paths = demo.run(demo.DemoConfig(budget=0.25, documents=2, repeats=1, out=str(tmp_path / "out")), "scatterbrain demo")
    page = paths["page"].read_text()
    assert page.count("data:image/png;base64,") == 2 and "scatterbrain as published" in page and "entropy" in page
    record = json.loads(paths["record"].read_text())
    assert [row["method"] for row in record["rows"]] == ["exact", "scatterbrain as published", "default", "calibrated"]
    assert record["rows"][0]["cosine"] == pytest.approx(1) and len(record["heads"]["calibrated"]) == 8
    out = capsys.readouterr().out
    assert all(str(path) in out for path in paths.values()) and "8 heads" in out


def test_missing_data_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("SCATTERBRAIN_DATA", str(tmp_path))
    with pytest.raises(LabError, match=r"SCATTERBRAIN_DATA must name a folder that holds wikitext2_test.txt.gz"):
        subjects.wikitext("test")
    with pytest.raises(LabError, match="acl_scisumm_docs"):
        tasks.long_documents(None, 3)

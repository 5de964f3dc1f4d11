"""The benchmark on small inputs: captures, errors, refusals, skips, going on, table and figures. No network but in one test."""

import dataclasses
import itertools
import json
import math

import pytest
import torch
from scatterbrain import cli
from scatterbrain.lab import (
    bench,
    bench_figures,
    bench_table,
    cases,
    check,
    contenders,
    contest,
    machine,
    models,
    packages,
    peak,
    record,
    smollm,
    truth,
    whisper,
)
from scatterbrain.lab.extras import LabError
from scatterbrain.lab.measure import head_errors

SMALL = {"lengths": (64, 128), "data": ("normal",), "methods": ("sdpa", "naive", "default", "window+performer"), "heads": 2, "width": 16}


def shape(**more):
    return contenders.Shape(**{"length": 128, "heads": 2, "kv_heads": 2, "width": 16, "scale": 0.25, **more})


def small_case(**more):
    like = shape(**more)
    return cases.normal(like.length, like.length, like)


def config(folder, **more):
    return bench.BenchConfig(**{**SMALL, "repeats": 2, "memory": False, "out": str(folder), **more})


@pytest.fixture
def drawing():
    pytest.importorskip("matplotlib")
    pytest.importorskip("tqdm")


def test_a_run_fills_the_record_and_draws(drawing, tmp_path, capsys):
    paths = bench.run(config(tmp_path), "scatterbrain bench")
    saved = json.loads(paths["record"].read_text())
    assert saved["complete"]
    assert saved["command"] == "scatterbrain bench"
    assert saved["seed"] == 0
    assert saved["versions"]["torch"] == torch.__version__
    assert saved["hardware"]["isa"]
    assert saved["hardware"]["threads"] == torch.get_num_threads()
    assert saved["skips"] == []
    assert {(row["length"], row["method"]) for row in saved["rows"]} == {(n, m) for n in (64, 128) for m in SMALL["methods"]}
    for row in saved["rows"]:
        assert len(row["forward"]) == len(row["forward_backward"]) == 2
        assert row["forward_median"] == pytest.approx(sum(row["forward"]) / 2)
        assert 0 < row["forward_least"] <= row["forward_median"]
        assert row["agreement"] is None or row["agreement"] < 1e-5
        if row["kind"] == "exact":
            assert row["matrix_error"] is None
            assert row["output_error"] < 1e-5
        else:
            assert 0.1 < row["matrix_error"] < 10
            assert row["entries"] >= 0.9 * row["length"] // 8
    for name in ("time", "front"):
        picture = paths[name].read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert len(picture) > 20_000
    assert "memory" not in paths
    out = capsys.readouterr().out
    assert all(str(path) in out for path in paths.values())
    assert "normal, 128 tokens" in out
    assert "1.00x" in out


def test_a_wrong_result_is_refused_and_not_timed(drawing, tmp_path, monkeypatch, capsys):
    right = contenders.sb.attention

    def wrong(*args, impl="auto", **more):
        found = right(*args, impl=impl, **more)
        return found if impl == "reference" else found * 1.01

    monkeypatch.setattr(contenders.sb, "attention", wrong)
    with pytest.raises(LabError, match=r"2 wrong results were refused, not timed: default on normal at 64, default on normal at 128"):
        bench.run(config(tmp_path, methods=("sdpa", "default"), backward=False))
    found = record.load(tmp_path / "bench.json")
    assert {row.method for row in found.rows.values()} == {"sdpa"}
    assert all(s.wrong and "default must agree with its dense definition within 0.001" in s.reason for s in found.skips)
    assert "refused" in capsys.readouterr().out


def test_numbers_that_are_not_finite_are_refused():
    case, broken = small_case(), dataclasses.replace(contenders.EXACT[0], build=lambda s: lambda q, k, v: v * math.nan)
    with pytest.raises(check.WrongResult, match="finite: False"):
        check.check(broken, case, broken.build(case.shape))


def test_the_whole_output_is_compared_with_torchs():
    case, ours = small_case(), contenders.OURS[3]
    forward = ours.build(case.shape)
    assert check.against_torch(ours, case, forward, 0.0) < 1e-6
    with pytest.raises(check.WrongResult, match=r"agree with impl='torch' within 0.001"):
        check.against_torch(ours, case, lambda q, k, v: forward(q, k, v) * 1.01, 0.0)


def test_a_stopped_run_goes_on(drawing, tmp_path, monkeypatch):
    one, heard = contest.Contest.heard, []

    def stop(self, name, what, seconds):
        one(self, name, what, seconds)
        heard.append((name, what))
        if len(heard) == 6:
            raise KeyboardInterrupt

    monkeypatch.setattr(contest.Contest, "heard", stop)
    settings = config(tmp_path, lengths=(64,))
    with pytest.raises(KeyboardInterrupt, match="the same command goes on with it"):
        bench.run(settings)
    before = record.load(tmp_path / "bench.json")
    assert not before.complete
    assert sum(len(row.forward) for row in before.rows.values()) == 6
    monkeypatch.setattr(contest.Contest, "errors", lambda *_: pytest.fail("what is there is not measured again"))
    bench.run(settings)
    after = record.load(tmp_path / "bench.json")
    assert after.complete
    # Two times four methods, forward and both: six were there.
    assert len(heard) == 16
    assert all(after.rows[key].forward[: len(row.forward)] == row.forward for key, row in before.rows.items())
    bench.run(settings)
    assert len(heard) == 16


def test_another_run_does_not_go_on_with_it(drawing, tmp_path):
    bench.run(config(tmp_path, lengths=(64,), methods=("sdpa",)))
    with pytest.raises(ValueError, match=r"must hold a run with the same settings.*; got others \(config.seed\); pass another --out, or --fresh"):
        bench.run(config(tmp_path, lengths=(64,), methods=("sdpa",), seed=1))
    bench.run(config(tmp_path, lengths=(64,), methods=("sdpa",), seed=1), fresh=True)
    (tmp_path / "bench.json").write_text("{}")
    with pytest.raises(ValueError, match="be a benchmark's record"):
        bench.run(config(tmp_path))


def test_causal_runs_are_causal_and_say_who_cannot_be(drawing, tmp_path):
    methods = ("sdpa", "naive", "default", "smyrf+performer", "longformer")
    bench.run(config(tmp_path, lengths=(64,), data=("normal", "minilm"), methods=methods, causal=True, backward=False))
    found = record.load(tmp_path / "bench.json")
    assert {row.method for row in found.rows.values()} == {"sdpa", "naive", "default"}
    assert all(row.shape["causal"] for row in found.rows.values())
    reasons = {(s.data, s.method): s.reason for s in found.skips}
    assert "SMYRF's balanced clusters" in reasons["normal", "smyrf+performer"]
    assert "no causal form" in reasons["normal", "longformer"] or "not installed" in reasons["normal", "longformer"]
    assert reasons["minilm", "all"] == "its attention is not causal"
    assert "Left out:\n  normal at 64: smyrf+performer: cannot be causal" in bench_table.format_record(found)


def lone(case, contender, folder, **effort):
    found = record.Record(path=folder / "bench.json", header={})
    return contest.Contest(
        case, [contender], contest.Effort(**{"repeats": 1, "longest": 1.0, "memory": False, **effort}), found, peak.Scales(), lambda *_: None
    )


def a_row(method="default", length=64, **more):
    case = small_case(length=length)
    fields = {
        "data": "normal",
        "length": length,
        "method": method,
        "label": method,
        "kind": "ours",
        "shape": dataclasses.asdict(case.shape),
        "impl": "torch",
    }
    errors = {"output_error": 0.1, "matrix_error": 0.1, "matrix_spread": None, "agreement": None, "agreement_torch": None}
    return record.Row(**{**fields, **errors, "entries": 8.0, "budget": 0.125, "flop_ratio": None, **more})


def test_what_would_take_too_long_is_skipped_from_the_last_lengths_time(tmp_path):
    for contender, seconds, guess in ((contenders.OURS[0], 0.3, 1.2), (contenders.EXACT[0], 0.3, 1.2), (contenders.OURS[0], 0.2, 0.8)):
        one = lone(small_case(), contender, tmp_path)
        # Twice as long with twice the entries, and exact attention: four times as much.
        one.record.put(a_row(contender.name, forward=(seconds,)))
        said = one.reason(contender, "all")
        assert said == (f"would take about {guess:.0f} s, over 1 s" if guess > 1 else "")


def test_what_takes_too_long_is_not_repeated(tmp_path, monkeypatch):
    one = lone(small_case(), contenders.EXACT[0], tmp_path, longest=1e-9)
    one.run()
    (row,) = one.record.rows.values()
    assert row.forward == ()
    assert row.output_error < 1e-5
    assert [s.what for s in one.record.skips] == ["forward", "forward_backward"]
    assert one.record.skips[0].reason.endswith("over 1e-09 s")


def test_what_would_not_fit_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "memory", lambda field="MemAvailable": 2**30)
    naive = contenders.EXACT[1]
    assert lone(small_case(), naive, tmp_path).reason(naive, "all") == ""
    case = dataclasses.replace(small_case(), shape=shape(length=16384))
    assert lone(case, naive, tmp_path).reason(naive, "all") == "would need about 6.0 GiB of 1.0 GiB free"
    one = lone(case, contenders.OURS[0], tmp_path)
    one.record.put(a_row(peak_forward=2**24))
    assert one.reason(contenders.OURS[0], "all") == "would need about 4.0 GiB of 1.0 GiB free"


def test_a_missing_package_is_skipped_with_its_remedy(tmp_path):
    absent = dataclasses.replace(packages.PACKAGES[0], module="not_there")
    one = lone(small_case(), absent, tmp_path)
    one.run()
    assert one.record.skips[0].reason == "not-there is not installed; run: pip install 'scatterbrain[bench]'"


def test_what_fails_is_skipped_with_its_words(tmp_path):
    def build(shape):
        raise RuntimeError("no such\nkernel")

    one = lone(small_case(), dataclasses.replace(contenders.EXACT[0], build=build), tmp_path)
    one.run()
    assert one.record.skips[0].reason == "RuntimeError: no such kernel"
    assert not one.record.skips[0].wrong


@pytest.mark.parametrize("causal", [False, True])
def test_exact_attention_and_its_errors(causal, monkeypatch):
    case = small_case(causal=causal, heads=4, kv_heads=2)
    k, v = (t.repeat_interleave(2, 1)[:, :4] for t in (case.k, case.v))
    case = cases.make("normal", "", case.q, case.k[:, :2], case.v[:, :2], case.shape)
    k, v = (t.repeat_interleave(2, 1) for t in (case.k, case.v))
    logits = case.q.double() @ k.double().mT * case.shape.scale
    weights = torch.softmax(logits.masked_fill(torch.ones(128, 128).triu(1).bool(), -math.inf) if causal else logits, -1)
    exact = truth.exact(case)
    assert torch.allclose(exact.output, weights @ v.double(), atol=1e-12)
    assert torch.allclose(exact.norm, weights.square().sum((2, 3)))
    window = next(one for one in contenders.OURS if one.name == "window")
    forward = window.build(case.shape)
    got = forward(case.q, case.k, torch.eye(128).expand(1, 2, 128, 128))
    expected = float(head_errors(got, weights).mean())
    error, spread = truth.matrix_error(window, forward, case, exact)
    assert error == pytest.approx(expected, rel=1e-5)
    assert spread is None
    monkeypatch.setattr(truth, "WHOLE", 0)
    error, spread = truth.matrix_error(window, forward, case, truth.exact(case))
    assert 0 < spread < 0.1 * expected
    assert abs(error - expected) < 5 * spread


@pytest.mark.parametrize("name", [one.name for one in packages.PACKAGES])
@pytest.mark.parametrize("causal", [False, True])
def test_other_packages_attend_to_the_given_inputs(name, causal):
    """Against the dense definition where there is one; everywhere, the output is linear in v and has its gradient."""
    contender = bench.CONTENDERS[name]
    if packages.missing(contender):
        pytest.skip(packages.missing(contender))
    case = small_case(causal=causal, length=256, scale=0.5)
    if contender.refuses(case.shape):
        pytest.skip(contender.refuses(case.shape))
    forward = contender.build(case.shape)
    agreement = check.check(contender, case, forward)
    assert (agreement is None) == (contender.definition is None)
    q, k, v = contender.feed(case.shape, case.q, case.k, case.v)
    assert torch.allclose(forward(q, k, 2 * v), 2 * forward(q, k, v), atol=1e-5)
    leaf = v.clone().requires_grad_()
    forward(q, k, leaf).sum().backward()
    assert leaf.grad.abs().sum() > 0


def test_longformer_takes_the_given_tensors_at_their_scale():
    contender = bench.CONTENDERS["longformer"]
    if packages.missing(contender):
        pytest.skip(packages.missing(contender))
    case = small_case(length=128, scale=0.4)
    q, k, v = contender.feed(case.shape, case.q, case.k, case.v)
    far = (torch.arange(128)[:, None] - torch.arange(128)).abs() > packages.longformer_reach(case.shape)
    expected = torch.softmax((case.q @ case.k.mT * 0.4).masked_fill(far, -math.inf), -1) @ case.v
    assert torch.allclose(contender.build(case.shape)(q, k, v), expected, atol=1e-5)


@pytest.mark.parametrize("length", [512, 1024, 2048])
def test_entries_are_those_of_the_table(length):
    assert contenders.entries_for(length) == length // 8
    assert [contenders.entries_for(n) for n in (4096, 8192, 16384, 20000, 32768, 131072)] == [512, 512, 576, 576, 704, 1024]
    case = small_case(length=length, heads=1, kv_heads=1, width=32, scale=32**-0.5)
    default = contenders.OURS[0]
    settled, found = contenders.settle(default, case.shape, case.q, case.k, case.v)
    assert length // 8 <= found.entries_sparse + found.entries_low_rank < 1.2 * length // 8
    assert settled.share is None or settled.share > 1 / 8


@pytest.mark.skipif(not peak.measurable(), reason="needs Linux's /proc")
def test_peaks_are_measured_in_a_process_of_their_own():
    scales = peak.Scales()
    try:
        one = shape(length=1024, heads=4, kv_heads=4)
        naive = scales.peak(contenders.EXACT[1], one, False, 60)
        fused = scales.peak(contenders.EXACT[0], one, False, 60)
        matrix = 4 * 4 * 1024**2
        assert 1.5 * matrix < naive <= 1.1 * contenders.dense_bytes(one, False)
        assert fused < matrix
        with pytest.raises(peak.DidNotFit, match=r"in a process of its own: .*allocate memory"):
            scales.peak(contenders.EXACT[1], shape(length=2**19), False, 60)
        with pytest.raises(peak.DidNotFit, match="took over 1 s"):
            scales.peak(contenders.EXACT[0], shape(length=2**17, heads=8, kv_heads=8, width=64), True, 1)
    finally:
        scales.close()


def test_names_in_the_margin_keep_apart():
    places = bench_figures.pushed_apart([-0.5, 0.5, 0.5, 0.5, 0.52, 0.9, 3.0, 3.1], 0.1)
    assert all(b - a >= 0.1 - 1e-9 for a, b in itertools.pairwise(places))
    assert places[0] == 0.0
    assert places[-1] == pytest.approx(1.0)
    assert bench_figures.pushed_apart([0.1, 0.5], 0.1) == [0.1, 0.5]


def test_nothing_is_better_than_the_front():
    assert bench_figures.front([(3, 1), (1, 3), (2, 2), (2.5, 2.5), (4, 1)]) == [(1, 3), (2, 2), (3, 1)]


def test_every_figure_is_drawn_from_a_record(drawing, tmp_path):
    rows = [
        a_row(m, n, forward=(n * 1e-4,), forward_backward=(n * 3e-4,), peak_forward=n * 2**10, peak_forward_backward=n * 2**11)
        for m in OURS
        for n in (64, 128)
    ]
    rows += [dataclasses.replace(a_row("sdpa", n, forward=(n * n * 1e-6,)), kind="exact", matrix_error=None) for n in (64, 128)]
    rows += [dataclasses.replace(a_row("default", 2048, forward=(0.1,)), data="smollm2")]
    found = record.Record(path=tmp_path / "bench.json", header=bench.header(config(tmp_path), ""), rows={row.key: row for row in rows})
    assert bench_figures.front_place(found) == ("smollm2", 2048)
    paths = bench_figures.draw(found, tmp_path)
    assert list(paths) == ["time", "memory", "front"]
    image = pytest.importorskip("matplotlib.image")
    for path in paths.values():
        pixels = image.imread(path)
        assert min(pixels.shape[:2]) > 500
        assert 0.005 < (pixels[..., :3].min(-1) < 0.9).mean() < 0.5


OURS = [one.name for one in contenders.OURS]


def test_mel_spectrogram_is_whispers():
    transformers = pytest.importorskip("transformers")
    extractor = transformers.WhisperFeatureExtractor()
    assert torch.allclose(whisper.mel_filters(), torch.from_numpy(extractor.mel_filters.T).float(), atol=1e-7)
    samples = torch.randn(16_000, generator=torch.Generator().manual_seed(0))
    expected = extractor(samples.numpy(), sampling_rate=16_000, return_tensors="pt").input_features[0]
    assert torch.allclose(whisper.log_mel(samples), expected, atol=1e-4)


def test_encoder_gives_what_whispers_layers_receive():
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 24, "encoder_layers": 2, "encoder_attention_heads": 3, "encoder_ffn_dim": 40, "num_mel_bins": 8, "max_source_positions": 20}
    model = transformers.models.whisper.modeling_whisper.WhisperEncoder(transformers.WhisperConfig(**sizes)).eval()
    names = {"layers": "blocks", "self_attn_layer_norm": "attn_ln", "final_layer_norm": "mlp_ln", "self_attn": "attn"}
    names |= {
        "q_proj": "query",
        "k_proj": "key",
        "v_proj": "value",
        "out_proj": "out",
        "fc1": "mlp.0",
        "fc2": "mlp.2",
        "embed_positions": "positional_embedding",
    }
    weights = {".".join(names.get(part, part) for part in name.split(".")): t for name, t in model.state_dict().items()}
    weights["positional_embedding"] = weights.pop("positional_embedding.weight")
    mel = torch.randn(8, 40)
    with torch.no_grad():
        q, k, v = whisper.encode(weights, mel, heads=3)
        hidden = model(mel[None], output_hidden_states=True).hidden_states[1]
        part = model.layers[1]
        normed = part.self_attn_layer_norm(hidden)
        for got, name in ((q, "q_proj"), (k, "k_proj"), (v, "v_proj")):
            assert got.shape == (2, 3, 20, 8)
            expected = getattr(part.self_attn, name)(normed).view(1, 20, 3, 8).transpose(1, 2)
            assert torch.allclose(got[1:], expected, atol=1e-5)


def test_decoder_gives_queries_and_keys_after_the_rotation():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 32, "vocab_size": 11}
    model = transformers.LlamaModel(transformers.LlamaConfig(**sizes)).eval()
    ids = torch.randint(11, (1, 13))
    with torch.no_grad():
        states = model(input_ids=ids, output_hidden_states=True).hidden_states
        part = model.layers[1]
        normed = part.input_layernorm(states[1])
        rotation = model.rotary_emb(normed, torch.arange(13)[None])
        heads = [getattr(part.self_attn, name)(normed).view(1, 13, -1, 4).transpose(1, 2) for name in ("q_proj", "k_proj")]
        expected = transformers.models.llama.modeling_llama.apply_rotary_pos_emb(*heads, *rotation)
    q, k, v = smollm.capture(model, ids, (0, 1))
    assert q.shape == (2, 6, 13, 4)
    assert k.shape == v.shape == (2, 2, 13, 4)
    assert torch.allclose(q[1:], expected[0], atol=1e-5)
    assert torch.allclose(k[1:], expected[1], atol=1e-5)
    assert len(model.layers) == 2


@pytest.mark.slow
def test_whispers_real_attention_is_found():
    pytest.importorskip("soundfile")
    if models.data_folder() is None:
        pytest.skip("SCATTERBRAIN_DATA names no folder with speech")
    try:
        case = cases.whisper_case(1500, 1500, shape(seed=0))
    except LabError as error:
        pytest.skip(str(error))
    assert case.q.shape == (4, 6, 1500, 64)
    # Attention of a trained encoder is far from uniform.
    weights = torch.softmax(case.q[0] @ case.k[0].mT * case.shape.scale, -1)
    assert float(weights.max(-1).values.mean()) > 20 / 1500


def test_without_speech_the_case_is_left_out(drawing, tmp_path, monkeypatch):
    monkeypatch.delenv("SCATTERBRAIN_DATA", raising=False)
    cases.frames.cache_clear()
    bench.run(config(tmp_path, data=("whisper",), methods=("sdpa",)))
    (skip,) = record.load(tmp_path / "bench.json").skips
    assert (skip.data, skip.method) == ("whisper", "all")
    assert skip.reason.startswith("no speech: SCATTERBRAIN_DATA must name a folder")


def test_text_for_the_decoder_is_long_enough():
    words, source = smollm.text(None)
    assert "standard library" in source
    assert len(words) > 6 * smollm.LONGEST


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--methods", "default"], "methods must have sdpa among them"),
        (["--repeats", "0"], "repeats must be an integer >= 1"),
        (["--lengths", "8"], "lengths must be an integer >= 16"),
        (["--longest", "nan"], "longest must be positive"),
        (["--impl", "fast"], "impl must be one of"),
    ],
)
def test_a_wrong_option_is_one_line(capsys, argv, words):
    assert cli.main(["bench", *argv]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"scatterbrain: {words}")
    assert err.count("\n") == 1


def test_options_reach_the_configuration(monkeypatch):
    seen = []
    monkeypatch.setattr(bench, "run", lambda *given: seen.append(given))
    assert cli.main(["bench"]) == 0
    assert seen[0] == (bench.BenchConfig(), "scatterbrain bench", False)
    assert cli.main(["bench", "--quick", "--repeats", "5", "--causal", "--fresh"]) == 0
    assert seen[1][0] == bench.BenchConfig(**{**bench.QUICK, "repeats": 5, "causal": True})
    assert seen[1][2]
    assert cli.main(["bench", "--lengths", "64", "128", "--no-backward", "--no-memory", "--dtype", "bfloat16"]) == 0
    assert seen[2][0] == bench.BenchConfig(lengths=(64, 128), backward=False, memory=False, dtype="bfloat16")


def test_help_says_what_is_default(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        cli.main(["bench", "--help"])
    out = capsys.readouterr().out
    assert all(words in out for words in ("512 1024 2048", "--causal", "(default: 7)", "--quick", "goes on from its record"))
    assert "None" not in out

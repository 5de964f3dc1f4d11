"""calibrate, convert, evaluate: from a model's own inputs to a plan, and what the plan gives."""

import dataclasses
import json

import pytest
import scatterbrain as sb
import torch
from scatterbrain.calibration import capture, evaluate
from scatterbrain.calibration.plan import HeadPlan, LayerPlan, Plan, head_count
from scatterbrain.integrations.heads import group_heads
from torch import nn

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 50}
NAMES = [f"encoder.layer.{n}.attention.self" for n in range(2)]


@pytest.fixture
def bert():
    torch.manual_seed(0)
    return transformers.BertModel(transformers.BertConfig(**SIZES)).eval()


def llama(**more):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, max_position_embeddings=512, **more)
    return transformers.LlamaForCausalLM(config).eval()


def ids(length=80, batch=2, seed=0):
    return torch.randint(2, 50, (batch, length), generator=torch.Generator().manual_seed(seed))


def padded():
    mask = torch.ones(2, 80, dtype=torch.long)
    mask[1, 50:] = 0
    return mask


def handmade(model, budgets=(1 / 2, 1 / 4, 1 / 4, 1 / 8), names=NAMES, kind="BertSelfAttention"):
    heads = tuple(HeadPlan(recipe=sb.Recipe.default(b), stats={"error": b, "length": 80}) for b in budgets)
    return Plan(model=type(model).__name__, layers={name: LayerPlan(kind=kind, heads=heads) for name in names}, budget=1 / 4)


def test_the_issues_lines(bert, tmp_path, capsys):
    batches = [{"input_ids": ids(seed=s), "attention_mask": padded()} for s in range(2)]
    plan = sb.calibrate(bert, batches, budget=1 / 4)
    text = plan.summary()
    assert all(word in text for word in ("encoder.layer.1.attention.self", "entropy", "error", "entries", "support", "map", "budget 0.25"))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    held_out = [{"input_ids": ids(seed=9), "attention_mask": padded()}]
    model = sb.convert(bert, plan)
    report = sb.evaluate(model, plan, held_out)
    assert 0 < report.error < 1 and len(report.heads) == 8 and report.flops < report.flops_full
    assert report.budget == pytest.approx(1 / 4, rel=0.3)
    assert "encoder.layer.0.attention.self" in report.table() and json.dumps(report.to_dict())
    assert sb.evaluate(model, batches=held_out).error == report.error
    converted = model(**held_out[0])[0]
    sb.restore(model)
    assert sb.evaluate(model, plan, held_out).error == report.error
    with sb.replace_sdpa(plan) as seen:
        assert torch.equal(bert(**held_out[0])[0], converted)
    assert list(seen.calls) == NAMES


def test_calibration_leaves_no_trace_and_keeps_the_mode(bert):
    given = {"input_ids": ids()}
    before = bert(**given)[0]
    for training in (False, True):
        bert.train(training)
        sb.calibrate(bert, [given], policy="default", progress=False)
        assert bert.training is training
    assert torch.equal(bert.eval()(**given)[0], before)
    assert not any("_scatterbrain" in word for module in bert.modules() for word in vars(module))


@torch.no_grad()
def test_what_is_captured_is_what_attention_receives():
    model = llama()
    seen = capture.capture(model, [{"input_ids": ids(), "attention_mask": padded(), "use_cache": False}])
    assert list(seen) == [f"model.layers.{n}.self_attn" for n in range(2)]
    first, second = seen["model.layers.0.self_attn"].kept
    assert first.q.shape == (1, 4, 80, 8) and first.k.shape == (1, 2, 80, 8)
    assert first.causal and torch.equal(second.key_mask[0, 0, 0], padded()[1].bool())
    layer = model.model.layers[0]
    states = layer.input_layernorm(model.model.embed_tokens(ids()))
    values = layer.self_attn.v_proj(states).unflatten(-1, (2, 8)).transpose(1, 2)
    torch.testing.assert_close(first.v, values[:1])


def test_memory_is_bounded_and_what_was_left_out_is_told(bert):
    one = 3 * 4 * 80 * 8 * 4  # bytes of an input of a layer
    batches = [{"input_ids": ids(seed=s)} for s in range(3)]
    plan = sb.calibrate(bert, batches, policy="default", memory=2 * 3 * one, progress=False)
    assert plan.about["inputs"] == 3 and plan.about["inputs left out for want of memory"] == 3
    with pytest.raises(ValueError, match="memory must hold an input of layer"):
        sb.calibrate(bert, batches, memory=one, progress=False)


def test_capture_of_plain_torch_models_by_position():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 48, batch_first=True), 2).eval()
    plan = sb.calibrate(model, [(torch.randn(2, 60, 32),), torch.randn(1, 60, 32)], policy="default", progress=False)
    assert list(plan.layers) == ["layers.0.self_attn", "layers.1.self_attn"]
    x = torch.randn(1, 60, 32)
    with sb.replace_sdpa(plan):
        expected = model(x)
    assert torch.equal(sb.convert(model, plan)(x), expected)


def test_a_plan_of_a_part_serves_the_whole_inside_replace_sdpa():
    inner = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 48, batch_first=True), 2).eval()
    plan = sb.calibrate(inner, [torch.randn(1, 60, 32)], policy="default", progress=False)
    outer = nn.Sequential(nn.Identity(), inner)
    with sb.replace_sdpa(plan) as seen:
        outer(torch.randn(1, 60, 32))
    assert set(seen.calls) == set(plan.layers)
    other = nn.ModuleDict({"else": nn.TransformerEncoderLayer(32, 4, 48)}).eval()
    with sb.replace_sdpa(plan), pytest.raises(ValueError, match="plan must hold one layer for the call in 'self_attn'"):
        other["else"](torch.randn(20, 1, 32))


def test_calls_outside_modules_take_the_layers_in_turn(bert):
    plan = handmade(bert)
    q = torch.randn(1, 4, 60, 8)
    with sb.replace_sdpa(plan) as seen:
        for _ in range(3):
            torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert {name: sum(counts.values()) for name, counts in seen.calls.items()} == dict(zip(NAMES, (2, 1), strict=True))


def test_layers_that_cannot_be_approximated_are_planned_exact():
    config = transformers.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, vocab_size=50, decoder_start_token_id=0)
    model = transformers.T5Model(config).eval()
    given = {"input_ids": ids(), "decoder_input_ids": ids(40), "use_cache": False}
    expected = model(**given)[0]
    plan = sb.calibrate(model, [given], policy="default", progress=False)
    notes = {name: layer.note for name, layer in plan.layers.items() if not layer.heads}
    assert set(notes) == {"encoder.block.0.layer.0.SelfAttention", "decoder.block.0.layer.0.SelfAttention"}
    assert all("position bias" in note for note in notes.values()) and "position bias" in plan.summary()
    sb.convert(model, plan)
    assert 0 < (model(**given)[0] - expected).abs().max() < 1


def test_heads_with_their_own_recipes_are_each_computed_by_them(bert):
    """Shared key heads, padding and causality included: the plan's output is, head by head, attention with that recipe."""
    q, k, v = torch.randn(2, 4, 80, 8), torch.randn(2, 2, 80, 8), torch.randn(2, 2, 80, 8)
    from scatterbrain.integrations.call import Call
    from scatterbrain.integrations.heads import Converted

    mask = padded().bool()[:, None, None]
    for budgets in [(1 / 2, 1 / 4, 1 / 4, 1 / 2), (1 / 2, 1 / 2, 1 / 4, 1 / 4), (1 / 4,) * 4, (1 / 2, 1 / 4, 1.0, 1 / 8)]:
        for keys, causal in [(None, False), (mask, False), (None, True), (mask, True)]:
            recipes = tuple(sb.Recipe.default(b) for b in budgets)
            got = Converted("layer", recipes)(Call("layer", q, k, v, keys, causal, None, 0.0, "", lambda: None))
            for head, recipe in enumerate(recipes):
                alone = [t[:, h : h + 1] for t, h in ((q, head), (k, head // 2), (v, head // 2))]
                expected = sb.attention(*alone, keys, is_causal=causal, **recipe.method(80, causal))
                torch.testing.assert_close(got[:, head : head + 1], expected, rtol=1e-4, atol=1e-5)


def test_heads_that_differ_in_a_threshold_share_a_call():
    gains = (-3.0, -5.0, -5.0)
    methods = [sb.Recipe(budget=0.1 + 0.01 * n, means=0.1, window=0.1, gain=g, length=64).method(64, False) for n, g in enumerate(gains)]
    other = sb.Recipe.default(1 / 4).method(64, False)
    (heads, joined), (rest, alone) = group_heads([methods[0], other, *methods[1:]])
    assert heads == [0, 2, 3] and rest == [1] and alone == other
    routed = next(part for part in joined["support"].parts if isinstance(part, sb.Routed))
    assert routed.gain == gains and joined["low_rank"] == methods[0]["low_rank"]
    two = {"support": sb.Routed(2, clusters=8, fit="queries", gain=-3.0) | sb.Routed(4, clusters=16), "low_rank": None}
    assert group_heads([two, two]) == [([0, 1], two)]  # as it was asked for


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda p: {"layers": dict(list(p.layers.items())[:1])},
            r"plan must name every attention layer.*nothing for 'encoder.layer.1.attention.self'",
        ),
        (lambda p: {"layers": {**p.layers, "decoder": p.layers[NAMES[0]]}}, r"model must have the plan's 3 layers; got none named 'decoder'"),
        (
            lambda p: {"layers": {n: dataclasses.replace(layer, heads=layer.heads[:3]) for n, layer in p.layers.items()}},
            r"layer 'encoder.layer.0.attention.self' must have the plan's 3 heads; got 4",
        ),
        (
            lambda p: {"layers": {n: dataclasses.replace(layer, kind="LlamaAttention") for n, layer in p.layers.items()}},
            r"layer 'encoder.layer.0.attention.self' must be a LlamaAttention, as in the plan; got BertSelfAttention",
        ),
    ],
)
def test_a_model_that_does_not_match_is_refused_and_told_where(bert, change, words):
    plan = handmade(bert)
    sb.convert(bert, plan)
    sb.restore(bert)
    with pytest.raises(ValueError, match=words):
        sb.convert(bert, dataclasses.replace(plan, **change(plan)))
    assert bert.config._attn_implementation != "scatterbrain"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("not json", "be a plan"),
        ("{}", "be a plan"),
        ('{"type": "Plan", "version": 99}', "be of version 1"),
        ('{"type": "Plan", "version": 1, "layers": {}, "model": "x", "colour": 1}', "only a plan's fields"),
    ],
)
def test_files_that_are_no_plans(tmp_path, text, words):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ValueError, match=f"plan.json must {words}|{words}"):
        Plan.load(tmp_path / "plan.json")


def test_plans_keep_their_recipes_in_json(bert, tmp_path):
    parts = HeadPlan(recipe=sb.Recipe.fixed(sb.Window(9) | sb.Columns(2), sb.ClusterMeans(4)), stats={"error": 0.5})
    plan = dataclasses.replace(
        handmade(bert), layers={"a": LayerPlan(kind="A", heads=(parts,), causal=False), "b": LayerPlan(kind="B", note="never")}
    )
    assert Plan.load(plan.save(tmp_path)) == plan
    assert "Window(9) | Columns(2)" in plan.summary() and "never" in plan.summary()


def test_wrong_calls_are_one_line(bert):
    with pytest.raises(ValueError, match="batches must hold at least one batch"):
        sb.calibrate(bert, [], progress=False)
    with pytest.raises(ValueError, match="budget and error must not be given together"):
        sb.calibrate(bert, [{"input_ids": ids()}], budget=0.1, error=0.1)
    with pytest.raises(ValueError, match="decoding"):
        sb.calibrate(bert, [{"input_ids": ids(1)}], progress=False)
    assert head_count(bert.encoder.layer[0].attention.self) == 4


@torch.no_grad()
def test_the_report_measures_what_the_definition_says():
    """Matrix and output error of a head, from dense weights."""
    model, given = llama(), {"input_ids": ids(batch=1), "use_cache": False}
    recipe = sb.Recipe.default(1 / 4)
    report = sb.evaluate(model, recipe, [given], progress=False)
    seen = capture.capture(model, [given])["model.layers.1.self_attn"].kept[0]
    k, v = (t.repeat_interleave(2, 1) for t in (seen.k, seen.v))
    method = recipe.method(80, True)
    weights = sb.attention(seen.q, k, torch.eye(80).expand(1, 4, 80, 80), is_causal=True, **method)
    logits = seen.q @ k.mT * seen.scale
    exact = torch.softmax(logits.masked_fill(torch.ones(80, 80).triu(1).bool(), -torch.inf), -1)
    heads = [head for head in report.heads if head.layer == "model.layers.1.self_attn"]
    for n, head in enumerate(heads):
        assert head.error == pytest.approx(float((weights - exact)[0, n].norm() / exact[0, n].norm()), rel=0.15)  # from random probes
        outputs = (weights @ v)[0, n], (exact @ v)[0, n]
        assert head.output_error == pytest.approx(float((outputs[0] - outputs[1]).norm() / outputs[1].norm()), rel=1e-3)
        assert head.visible == pytest.approx(40.5)
    assert isinstance(report, evaluate.Report) and report.exact == {"model.layers.0.self_attn": {}, "model.layers.1.self_attn": {}}


class Both(nn.Module):
    """What sentence-transformers and multimodal code look like: a transformers model inside another, beside torch's own attention."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.pool = inner, nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, ids):
        states = self.inner(input_ids=ids)[0]
        return self.pool(states, states, states, need_weights=False)[0]


@torch.no_grad()
def test_a_transformers_model_inside_another_beside_torchs_own_attention(bert):
    model = Both(bert).eval()
    x = ids()
    expected = model(x)
    plan = sb.calibrate(model, [x], policy="default", progress=False)
    assert list(plan.layers) == [*(f"inner.{name}" for name in NAMES), "pool"] and all(layer.heads for layer in plan.layers.values())
    assert all(layer.heads[0].stats["length"] == 80 for layer in plan.layers.values())
    assert torch.equal(model(x), expected)
    assert torch.allclose(sb.convert(model, budget=1.0)(x), expected, atol=1e-5)
    from scatterbrain.integrations import calls

    assert calls(model) == {name: {"by its recipe": 1} for name in plan.layers}
    assert torch.equal(sb.restore(model)(x), expected)
    report = sb.evaluate(model.train(), plan, [x], progress=False)
    assert len(report.heads) == 12 and model.training and model.pool.training

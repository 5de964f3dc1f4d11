"""transformers models converted: the same at budget 1, different below, honoured or refused by name, and restored."""

import copy
import pickle
import warnings

import pytest
import scatterbrain as sb
import torch
from scatterbrain.integrations import calls

transformers = pytest.importorskip("transformers")

WORDS = 50
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
LLAMA = {**SIZES, "num_key_value_heads": 2, "vocab_size": WORDS, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1}


def llama(**more):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**LLAMA, "eos_token_id": None, **more})).eval()


def gpt2():
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=WORDS, n_positions=512, bos_token_id=1, eos_token_id=None)
    return transformers.GPT2LMHeadModel(config).eval()


def mistral(window):
    return transformers.MistralForCausalLM(transformers.MistralConfig(**LLAMA, eos_token_id=None, sliding_window=window)).eval()


def bert():
    return transformers.BertModel(transformers.BertConfig(**SIZES, vocab_size=WORDS)).eval()


def roberta():
    return transformers.RobertaModel(transformers.RobertaConfig(**SIZES, vocab_size=WORDS, max_position_embeddings=512)).eval()


def vit():
    return transformers.ViTModel(transformers.ViTConfig(**SIZES, image_size=48, patch_size=6)).eval()


def bart():
    sizes = {f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))}
    return transformers.BartModel(transformers.BartConfig(d_model=32, vocab_size=WORDS, max_position_embeddings=256, **sizes)).eval()


def t5():
    config = transformers.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=WORDS, decoder_start_token_id=0)
    return transformers.T5Model(config).eval()


def ids(length=90, batch=2, seed=0):
    return torch.randint(2, WORDS, (batch, length), generator=torch.Generator().manual_seed(seed))


def padded(length=90, left=False):
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, slice(0, 30) if left else slice(60, None)] = 0
    return mask


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


ENCODERS = {
    "bert": (bert, lambda: {"input_ids": ids(), "attention_mask": padded()}),
    "roberta": (roberta, lambda: {"input_ids": ids(), "attention_mask": padded()}),
    "vit": (vit, lambda: {"pixel_values": torch.randn(2, 3, 48, 48)}),
    "gpt2": (gpt2, lambda: {"input_ids": ids(), "attention_mask": padded(), "use_cache": False}),
    "gpt2-left": (gpt2, lambda: {"input_ids": ids(), "attention_mask": padded(left=True), "use_cache": False}),
    "llama": (llama, lambda: {"input_ids": ids(), "attention_mask": padded(), "use_cache": False}),
    "llama-left": (llama, lambda: {"input_ids": ids(), "attention_mask": padded(left=True), "use_cache": False}),
    "bart": (bart, lambda: {"input_ids": ids(), "attention_mask": padded(), "decoder_input_ids": ids(40, seed=1), "use_cache": False}),
}


def rows(out, given):
    """Rows of real tokens: what padding holds is anyone's."""
    mask = given.get("attention_mask")
    out = out[0]
    return out if mask is None or mask.shape[1] != out.shape[1] else out[mask.bool()]


@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_budget_one_is_exact_and_a_budget_is_not_and_restore_is(name):
    make, feed = ENCODERS[name]
    model, given = make(), feed()
    before, keys, forms = model(**given), list(model.state_dict()), str(model.config)
    expected, attention = rows(before, given), model.config._attn_implementation
    assert sb.convert(model, budget=1.0) is model
    assert list(model.state_dict()) == keys
    torch.testing.assert_close(rows(model(**given), given), expected, rtol=1e-5, atol=1e-5)
    assert all(counts == {"by its recipe": 1} for counts in calls(model).values()) and calls(model)
    sb.restore(model)
    sb.convert(model, budget=1 / 8)
    assert (rows(model(**given), given) - expected).abs().max() > 1e-6
    assert all(counts == {"by its recipe": 1} for counts in calls(model).values())
    sb.restore(model)
    assert torch.equal(rows(model(**given), given), expected)
    assert str(model.config) == forms and model.config._attn_implementation == attention
    assert not any("_scatterbrain" in word for module in model.modules() for word in vars(module))
    assert not any(module._forward_pre_hooks for module in model.modules())


@torch.no_grad()
def test_full_support_through_our_own_engine_is_softmax():
    """Budget 1 may take torch's attention; this one takes ours, padding, causality and shared key heads included."""
    for name in ("bert", "llama-left", "bart"):
        make, feed = ENCODERS[name]
        model, given = make(), feed()
        expected = rows(model(**given), given)
        sb.convert(model, support=sb.Full() | sb.Window(3), low_rank=None)
        torch.testing.assert_close(rows(model(**given), given), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("cache", [None, "static"])
def test_generation_at_budget_one_gives_the_same_tokens(make, cache):
    model = make()
    told = {"max_new_tokens": 8, "do_sample": False, "attention_mask": padded(left=True), "pad_token_id": 0}
    told |= {"cache_implementation": cache} if cache else {}
    expected = model.generate(ids(), **told)
    sb.convert(model, budget=1.0)
    assert torch.equal(model.generate(ids(), **told), expected)
    for counts in calls(model).values():
        assert counts == {"by its recipe": 1, "exact: one query a call (decoding)": 7}


@torch.no_grad()
def test_prefill_is_approximated_and_decoding_exact():
    """What is decoded sees keys and values of an approximated prefill, exactly."""
    model, tokens = llama(), ids()
    sb.convert(model, budget=1 / 4)
    first = model(input_ids=tokens, use_cache=True)
    assert torch.equal(first.logits, model(input_ids=tokens, use_cache=False).logits)
    step = model(input_ids=tokens[:, :1], past_key_values=copy.deepcopy(first.past_key_values)).logits
    sb.restore(model)
    torch.testing.assert_close(model(input_ids=tokens[:, :1], past_key_values=first.past_key_values).logits, step, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [llama, gpt2])
@torch.no_grad()
def test_a_chunk_after_cached_keys_is_aligned_to_the_right(make):
    model, tokens = make(), ids()
    expected = model(input_ids=tokens).logits
    sb.convert(model, budget=1.0)
    cache = transformers.DynamicCache(config=model.config)
    parts = [model(input_ids=part, past_key_values=cache, use_cache=True).logits for part in tokens.split([40, 30, 20], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-4, atol=1e-4)
    assert all(counts == {"by its recipe": 1, "exact: a causal chunk after cached keys": 2} for counts in calls(model).values())


@torch.no_grad()
def test_nothing_looks_ahead():
    model, tokens = llama(), ids(200)
    sb.convert(model, budget=1 / 4)
    changed = tokens.clone()
    changed[:, 120:] = ids(80, seed=3)
    got, other = (model(input_ids=some, use_cache=False).logits for some in (tokens, changed))
    torch.testing.assert_close(got[:, :120], other[:, :120], rtol=1e-4, atol=1e-5)
    assert (got[:, 120:] - other[:, 120:]).abs().max() > 1e-4


@torch.no_grad()
def test_a_sliding_window_is_refused_or_exact_and_one_that_reaches_everything_is_not_one():
    tokens = ids()
    model = mistral(window=16)
    expected = model(input_ids=tokens).logits
    sb.convert(model, budget=1.0)
    with pytest.raises(ValueError, match=r"layer 'model.layers.0.self_attn' must .*hides other keys from some queries.*fallback='exact'"):
        model(input_ids=tokens)
    sb.restore(model)
    sb.convert(model, budget=1 / 8, fallback="exact")
    with pytest.warns(UserWarning, match="is computed exactly, since the mask hides other keys"):
        torch.testing.assert_close(model(input_ids=tokens).logits, expected, rtol=1e-5, atol=1e-5)
    reason = "exact: the mask hides other keys from some queries than from others"
    assert all(counts == {reason: 1} for counts in calls(model).values())
    wide = sb.convert(mistral(window=400), budget=1 / 4)
    wide(input_ids=tokens)
    assert all(counts == {"by its recipe": 1} for counts in calls(wide).values())


@torch.no_grad()
def test_packed_sequences_do_not_mix():
    model, tokens = llama(), ids(60, batch=1)
    position = torch.cat([torch.arange(25), torch.arange(35)])[None]
    expected = model(input_ids=tokens, position_ids=position, use_cache=False).logits
    sb.convert(model, budget=1.0)
    with pytest.raises(ValueError, match="hides other keys from some queries"):
        model(input_ids=tokens, position_ids=position, use_cache=False)
    sb.restore(model)
    sb.convert(model, budget=1 / 4, fallback="exact")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(model(input_ids=tokens, position_ids=position, use_cache=False).logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "words"),
    [("softcap", "logit soft caps"), ("s_aux", "attention sinks"), ("cu_seq_lens_q", "packed sequences"), ("head_mask", "mask of heads")],
)
def test_what_sdpa_would_drop_is_refused_by_name(name, words):
    model = sb.convert(llama(), budget=1 / 8)
    attend = transformers.AttentionInterface()["scatterbrain"]
    q = torch.randn(1, 4, 9, 8)
    with pytest.raises(ValueError, match=f"{name} of layer 'model.layers.1.self_attn' must be left out; got .*{words}"):
        attend(model.model.layers[1].self_attn, q, q[:, :2], q[:, :2], None, **{name: torch.ones(1)})


def test_real_models_with_soft_caps_and_sinks_are_refused():
    gemma = transformers.Gemma2Config(**LLAMA, head_dim=8, layer_types=["full_attention"] * 2, attn_logit_softcapping=30.0)
    model = sb.convert(transformers.Gemma2ForCausalLM(gemma).eval(), budget=1 / 8)
    with pytest.raises(ValueError, match="softcap of layer"):
        model(input_ids=ids())
    sizes = {**LLAMA, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "layer_types": ["full_attention"] * 2}
    model = sb.convert(transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes)).eval(), budget=1 / 8)
    with pytest.raises(ValueError, match="s_aux of layer"):
        model(input_ids=ids())


def test_attention_weights_are_refused():
    model = sb.convert(bert(), budget=1 / 8)
    with pytest.raises(ValueError, match="output_attentions must be False"):
        model(input_ids=ids(), output_attentions=True)
    asks = bert()
    asks.set_attn_implementation("eager")
    asks.config.output_attentions = True
    assert asks(input_ids=ids()).attentions[0] is not None
    sb.convert(asks, budget=1 / 8)
    with pytest.raises(ValueError, match="output_attentions must be False"):
        asks(input_ids=ids())
    sb.restore(asks)
    assert asks(input_ids=ids()).attentions[0] is not None


@torch.no_grad()
def test_t5_keeps_its_position_bias():
    given = {"input_ids": ids(), "attention_mask": padded(), "decoder_input_ids": ids(40, seed=1), "use_cache": False}
    model = t5()
    expected = model(**given)[0]
    sb.convert(model, budget=1 / 8)
    with pytest.raises(ValueError, match=r"encoder.block.0.layer.0.SelfAttention.*a position bias is added"):
        model(**given)
    sb.restore(model)
    sb.convert(model, budget=1.0, fallback="exact")
    with pytest.warns(UserWarning, match="position bias"):
        torch.testing.assert_close(model(**given)[0], expected, rtol=1e-5, atol=1e-5)
    counted = calls(model)
    assert counted["decoder.block.1.layer.1.EncDecAttention"] == {"by its recipe": 1}
    assert counted["decoder.block.1.layer.0.SelfAttention"] == {"exact: a position bias is added to the logits": 1}


@torch.no_grad()
def test_set_attn_implementation_after_register():
    from scatterbrain.integrations.huggingface import register

    model, tokens = llama(), ids()
    plain = model(input_ids=tokens).logits
    register()
    model.set_attn_implementation("scatterbrain")
    got = model(input_ids=tokens).logits
    model.set_attn_implementation("sdpa")
    sb.convert(model, budget=1 / 8)
    assert torch.equal(model(input_ids=tokens).logits, got)
    assert (got - plain).abs().max() > 1e-6


def test_nothing_is_registered_at_import():
    import subprocess
    import sys

    code = "import transformers, scatterbrain as sb; sb.convert, sb.Plan; assert 'scatterbrain' not in transformers.AttentionInterface()"
    subprocess.run([sys.executable, "-c", code], check=True)


@torch.no_grad()
def test_a_copy_is_independent():
    model, tokens = bert(), ids()
    exact = model(input_ids=tokens)[0]
    sb.convert(model, budget=1 / 8)
    twin = copy.deepcopy(model)
    ours = model(input_ids=tokens)[0]
    sb.restore(model)
    assert torch.equal(twin(input_ids=tokens)[0], ours)
    assert torch.equal(model(input_ids=tokens)[0], exact)
    assert torch.equal(sb.restore(twin)(input_ids=tokens)[0], exact)
    again = pickle.loads(pickle.dumps(sb.convert(model, budget=1 / 8)))
    assert torch.equal(again(input_ids=tokens)[0], ours)
    assert torch.equal(sb.restore(again)(input_ids=tokens)[0], exact)


@torch.no_grad()
def test_a_converted_model_saves_and_loads_with_its_plan_beside_it(tmp_path):
    from scatterbrain.calibration.plan import HeadPlan, LayerPlan

    model, tokens = bert(), ids()
    heads = tuple(HeadPlan(recipe=sb.Recipe.default(b)) for b in (1 / 4, 1 / 8, 1 / 4, 1 / 2))
    layers = {f"encoder.layer.{n}.attention.self": LayerPlan(kind="BertSelfAttention", heads=heads) for n in range(2)}
    plan = sb.Plan(model="BertModel", layers=layers, budget=1 / 4)
    expected = sb.convert(model, plan)(input_ids=tokens)[0]
    model.save_pretrained(tmp_path)
    assert plan.save(tmp_path) == tmp_path / "scatterbrain_plan.json"
    loaded = transformers.BertModel.from_pretrained(tmp_path).eval()
    assert loaded.config._attn_implementation != "scatterbrain"
    assert torch.equal(sb.convert(loaded, tmp_path)(input_ids=tokens)[0], expected)
    other = bert()
    other.load_state_dict(model.state_dict())
    assert torch.equal(sb.convert(other, plan)(input_ids=tokens)[0], expected)


@pytest.mark.parametrize(
    ("given", "word"), [({"budget": 0.1, "support": sb.Window(3)}, "not be combined"), ({"budget": 2}, "budget"), ({"plan": 3}, "plan")]
)
def test_wrong_arguments_are_one_line(given, word):
    with pytest.raises(ValueError, match=word):
        sb.convert(bert(), **given)


def test_twice_is_refused():
    model = sb.convert(bert())
    with pytest.raises(ValueError, match="not be converted already"):
        sb.convert(model)
    sb.restore(model)
    with pytest.raises(ValueError, match="must be converted"):
        sb.restore(model)

"""Models that call F.scaled_dot_product_attention, by whatever name: torch's own, timm's, openai-whisper's, diffusers-like code."""

import copy
import warnings

import pytest
import scatterbrain as sb
import torch
import torch.nn.functional as F
from scatterbrain.integrations import calls
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from stub_torchvision import timm

PLANNED = {"by its recipe": 1}
SQUARE = nn.Transformer.generate_square_subsequent_mask(90)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def data():
    padding = torch.zeros(2, 90, dtype=torch.bool)
    padding[1, 60:] = True
    return torch.randn(2, 90, 32), padding


def encoder(**more):
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 48, batch_first=True, dropout=0.0, **more), 2).eval()


class ByName(nn.Module):
    """Imported by name, as openai-whisper does; general shapes, as diffusers has them."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(16, 48)

    def forward(self, x, mask=None, causal=False):
        q, k, v = self.proj(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal).transpose(1, 2).flatten(2)


class Processor:
    """diffusers keeps the call in an object that is not a module."""

    def __call__(self, attn, x):
        q = k = v = attn.project(x).unflatten(-1, (2, 8)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Processed(nn.Module):
    def __init__(self):
        super().__init__()
        self.project, self.processor = nn.Linear(16, 16), Processor()

    def forward(self, x):
        return self.processor(self, x)


def mixed():
    return nn.Sequential(ByName(), Processed(), ByName())


@torch.no_grad()
def test_encoder_in_eval_without_gradients_cannot_take_the_fast_path_around_us():
    x, padding = data()
    model = encoder()
    expected = model(x, src_key_padding_mask=padding), model(x)
    sb.convert(model, budget=1.0)
    got = model(x, src_key_padding_mask=padding), model(x)
    torch.testing.assert_close(got[0][0], expected[0][0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[0][1, :60], expected[0][1, :60], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[1], expected[1], rtol=1e-5, atol=1e-5)
    assert calls(model) == {f"layers.{n}.self_attn": {"by its recipe": 2} for n in range(2)}
    sb.restore(model)
    sb.convert(model, budget=1 / 8)
    assert (model(x, src_key_padding_mask=padding)[0] - expected[0][0]).abs().max() > 1e-4
    sb.restore(model)
    assert torch.equal(model(x, src_key_padding_mask=padding), expected[0])
    assert not any("forward" in vars(m) or m._forward_pre_hooks for m in model.modules()) and model.use_nested_tensor


@torch.no_grad()
def test_replace_sdpa_is_convert_without_touching_the_model():
    x, padding = data()
    model = encoder()
    expected = model(x, src_key_padding_mask=padding)
    with sb.replace_sdpa(budget=1 / 8) as seen:
        got = model(x, src_key_padding_mask=padding)
    assert seen.calls == {f"layers.{n}.self_attn": PLANNED for n in range(2)}
    assert torch.equal(model(x, src_key_padding_mask=padding), expected)
    assert torch.equal(sb.convert(model, budget=1 / 8)(x, src_key_padding_mask=padding), got)


@torch.no_grad()
def test_causal_masks_are_recognised_with_and_without_padding():
    x, padding = data()
    model = encoder()
    plain, masked = model(x, mask=SQUARE, is_causal=True), model(x, mask=SQUARE.isinf(), src_key_padding_mask=padding)
    sb.convert(model, support=sb.Full() | sb.Window(3), low_rank=None)
    torch.testing.assert_close(model(x, mask=SQUARE, is_causal=True), plain, rtol=1e-4, atol=1e-4)
    got = model(x, mask=SQUARE.isinf(), src_key_padding_mask=padding)
    torch.testing.assert_close(got[0], masked[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got[1, :60], masked[1, :60], rtol=1e-4, atol=1e-4)
    assert all(counts == {"by its recipe": 2} for counts in calls(model).values())


@pytest.mark.parametrize(
    "options", [{}, {"batch_first": True}, {"kdim": 20, "vdim": 24}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"bias": False}]
)
@torch.no_grad()
def test_multihead_attention_with_its_options(options):
    mha = nn.MultiheadAttention(32, 4, **options).eval()
    q, k, v = torch.randn(70, 2, 32), torch.randn(50, 2, mha.kdim), torch.randn(50, 2, mha.vdim)
    if mha.batch_first:
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    expected = mha(q, k, v, need_weights=False)[0]
    sb.convert(mha, support=sb.Full() | sb.Window(3), low_rank=None)
    torch.testing.assert_close(mha(q, k, v, need_weights=False)[0], expected, rtol=1e-4, atol=1e-5)
    assert calls(mha) == {"": PLANNED}


def test_weights_are_refused_or_exact():
    mha, x = nn.MultiheadAttention(32, 4, batch_first=True), data()[0]
    expected = mha(x, x, x)
    sb.convert(mha, budget=1 / 8)
    with pytest.raises(ValueError, match="need_weights=True asks for the matrix"):
        mha(x, x, x)
    sb.restore(mha)
    sb.convert(mha, budget=1 / 8, fallback="exact")
    with pytest.warns(UserWarning, match="need_weights"):
        out, weights = mha(x, x, x)
    assert torch.equal(out, expected[0]) and torch.equal(weights, expected[1])
    assert calls(mha) == {"": {"exact: need_weights=True asks for the matrix of weights": 1}}


def test_decoder_layers_keep_their_cross_attention():
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(32, 4, 48, batch_first=True, dropout=0.0), 1)
    x, memory = data()[0], torch.randn(2, 40, 32)
    expected = model(x, memory, tgt_mask=SQUARE, tgt_is_causal=True)
    sb.convert(model, support=sb.Full() | sb.Window(3), low_rank=None)
    torch.testing.assert_close(model(x, memory, tgt_mask=SQUARE, tgt_is_causal=True), expected, rtol=1e-4, atol=1e-4)
    assert calls(model) == {f"layers.0.{name}": PLANNED for name in ("self_attn", "multihead_attn")}


@torch.no_grad()
def test_calls_by_imported_name_and_from_processors():
    model, x = mixed(), torch.randn(2, 60, 16)
    expected = model(x)
    for attach, detach in ((lambda: sb.convert(model, budget=1.0), lambda: sb.restore(model)), (None, None)):
        if attach:
            attach()
            got, counted = model(x), calls(model)
            detach()
        else:
            with sb.replace_sdpa(budget=1.0) as seen:
                got = model(x)
            counted = seen.calls
        torch.testing.assert_close(got, expected)
        assert counted == {str(n): PLANNED for n in range(3)}
    sb.convert(model, budget=1 / 8)
    assert (model(x) - expected).abs().max() > 1e-5


@torch.no_grad()
def test_general_masks_are_refused_or_exact_and_counted():
    model, x = ByName(), torch.randn(2, 60, 16)
    bias = torch.randn(60, 60)
    expected = model(x, bias)
    with sb.replace_sdpa(budget=1 / 8), pytest.raises(ValueError, match=r"layer '' must be one .*a bias is added to the logits.*fallback='exact'"):
        model(x, bias)
    with sb.replace_sdpa(budget=1 / 8, fallback="exact") as seen, pytest.warns(UserWarning, match="a bias is added"):
        assert torch.equal(model(x, bias), expected)
    assert seen.calls == {"": {"exact: a bias is added to the logits": 1}}
    with sb.replace_sdpa(budget=1 / 4) as seen:
        model(x, torch.ones(60, 60, dtype=torch.bool).tril())
        model(x, causal=True)
    assert seen.calls == {"": {"by its recipe": 2}}


@torch.no_grad()
def test_shapes_and_arguments_of_sdpa():
    q, k = torch.randn(3, 2, 4, 50, 8), torch.randn(3, 2, 4, 70, 8)
    for args, more in [((q, k, k), {}), ((q[0], k[0, :, :2], k[0, :, :2]), {"enable_gqa": True}), ((q[0, 0], k[0, 0], k[0, 0]), {"scale": 0.3})]:
        expected = F.scaled_dot_product_attention(*args, **more)
        with sb.replace_sdpa(support=sb.Full() | sb.Window(3), low_rank=None) as seen:
            torch.testing.assert_close(F.scaled_dot_product_attention(*args, **more), expected, rtol=1e-4, atol=1e-5)
        assert seen.calls == {"(outside any module)": PLANNED}
    with sb.replace_sdpa(budget=1 / 8) as seen:
        one = F.scaled_dot_product_attention(q[0, :, :, :1], k[0], k[0])
    assert torch.equal(one, F.scaled_dot_product_attention(q[0, :, :, :1], k[0], k[0]))
    assert seen.calls == {"(outside any module)": {"exact: one query a call (decoding)": 1}}
    with sb.replace_sdpa(budget=1 / 8), pytest.raises(ValueError, match="broadcast"):
        F.scaled_dot_product_attention(q[0], k[0, :1], k[0, :1])


@torch.no_grad()
def test_a_module_that_computes_attention_itself_is_noticed():
    class Switch(ByName):
        fused = True

        def forward(self, x):
            return super().forward(x) if self.fused else x.softmax(-1)

    model, x = Switch(), torch.randn(1, 40, 16)
    sb.convert(model, budget=1 / 8)
    model(x)
    model.fused = False
    with pytest.raises(ValueError, match=r"without F\.scaled_dot_product_attention"):
        model(x)


def test_a_model_without_attention_is_refused():
    with pytest.raises(ValueError, match=r"model must hold modules that call scaled_dot_product_attention.*replace_sdpa"):
        sb.convert(nn.Linear(3, 3))


@torch.no_grad()
def test_timm_vision_transformers():
    module = timm()
    from timm.models.vision_transformer import ParallelScalingBlock

    x = torch.randn(2, 3, 48, 48)
    for more in (
        {},
        {"qk_norm": True, "global_pool": "map"},
        {"block_fn": ParallelScalingBlock},
        {"reg_tokens": 2, "class_token": False, "global_pool": "avg"},
    ):
        model = module.models.vision_transformer.VisionTransformer(
            img_size=48, patch_size=6, embed_dim=32, depth=2, num_heads=4, num_classes=3, **more
        ).eval()
        expected, keys = model(x), list(model.state_dict())
        sb.convert(model, budget=1.0)
        assert list(model.state_dict()) == keys
        torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
        planned = [counts for name, counts in calls(model).items() if "pool" not in name]
        assert planned == [PLANNED] * 2
        sb.restore(model)
        sb.convert(model, budget=1 / 8)
        assert (model(x) - expected).abs().max() > 1e-7
        assert torch.equal(sb.restore(model)(x), expected)


@torch.no_grad()
def test_timm_unfused_attention_is_fused_for_us_and_put_back():
    module = timm()
    model = module.models.vision_transformer.VisionTransformer(img_size=48, patch_size=6, embed_dim=32, depth=1, num_heads=4).eval()
    model.blocks[0].attn.fused_attn = False
    x = torch.randn(1, 3, 48, 48)
    expected = model(x)
    torch.testing.assert_close(sb.convert(model, budget=1.0)(x), expected, rtol=1e-5, atol=1e-5)
    assert calls(model) == {"blocks.0.attn": PLANNED}
    assert sb.restore(model).blocks[0].attn.fused_attn is False


def whisper_model():
    whisper = pytest.importorskip("whisper.model", reason="pip install --no-deps openai-whisper==20250625, with numba tiktoken more-itertools tqdm")
    model = whisper.Whisper(whisper.ModelDimensions(80, 100, 32, 4, 2, 50, 20, 32, 4, 2)).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    return model


@torch.no_grad()
def test_openai_whisper():
    model, mel, tokens = whisper_model(), torch.randn(1, 80, 200), torch.randint(0, 50, (1, 10))
    expected = model(mel, tokens)
    assert torch.isfinite(expected).all()
    torch.testing.assert_close(sb.convert(model, budget=1.0)(mel, tokens), expected, rtol=1e-5, atol=1e-5)
    assert len(calls(model)) == 6 and all(counts == PLANNED for counts in calls(model).values())
    sb.restore(model)
    sb.convert(model.encoder, budget=1 / 8)
    got = model(mel, tokens)
    assert (got - expected).abs().max() > 1e-6
    sb.restore(model.encoder)
    with sb.replace_sdpa(budget=1 / 8) as seen:
        features = model.encoder(mel)
    assert seen.calls == {f"blocks.{n}.attn": PLANNED for n in range(2)}
    torch.testing.assert_close(model.decoder(tokens, features), got, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_copy_is_bound_to_itself():
    x, _ = data()
    model = sb.convert(encoder(), budget=1 / 8)
    twin, ours = copy.deepcopy(model), model(x)
    for parameter in model.parameters():
        parameter.mul_(2)
    assert torch.equal(twin(x), ours)
    sb.restore(model)
    assert torch.equal(twin(x), ours)
    assert len(calls(twin)) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sb.restore(twin)
    assert (twin(x) - ours).abs().max() > 1e-5


def test_replacing_nothing_is_said():
    with pytest.warns(UserWarning, match="nothing was replaced"), sb.replace_sdpa(budget=1 / 8):
        nn.Linear(3, 3)(torch.randn(2, 3))


@pytest.mark.parametrize(("make", "width"), [(mixed, 16), (encoder, 32)])
@torch.no_grad()
def test_a_compiled_model_inside_replace_sdpa(make, width):
    model, x = make(), torch.randn(2, 60, width)
    with sb.replace_sdpa(budget=1 / 8) as plain:
        expected = model(x)
    torch._dynamo.reset()
    with sb.replace_sdpa(budget=1 / 8) as seen:
        got = torch.compile(model, backend="aot_eager")(x)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert seen.calls == {f"_orig_mod.{name}": counts for name, counts in plain.calls.items()}
    assert torch.backends.mha.get_fastpath_enabled()

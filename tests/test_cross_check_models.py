"""Against independent layers: torch.nn.MultiheadAttention, transformers' BigBird and Longformer. Bounds: see rounding.py."""

from dataclasses import dataclass

import pytest
import scatterbrain as sb
import torch
from scatterbrain.selection import Blocks, Rows
from torch import nn

from rounding import assert_within, average_error, normal, pattern, unit, weight_error

IMPLS = ("reference", "torch")
WIDTH, HEADS = 16, 2


@dataclass(frozen=True, eq=False)
class Given(sb.Support):
    """Layers built by the test, so that another library's pattern can be asked for."""

    layers: tuple

    def select(self, ctx, state):
        return self.layers


def copied(theirs, **settings):
    """Our layer with the weights of an nn.MultiheadAttention."""
    like = {"bias": theirs.in_proj_bias is not None, "kdim": theirs.kdim, "vdim": theirs.vdim, "batch_first": theirs.batch_first}
    ours = sb.ScatterbrainAttention(WIDTH, HEADS, support=sb.Full(), low_rank=None, dtype=torch.float64, **like, **settings)
    joint = theirs.in_proj_weight
    ins = (theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight) if joint is None else joint.chunk(3)
    with torch.no_grad():
        for n, (mine, weight) in enumerate(zip((ours.q_proj, ours.k_proj, ours.v_proj), ins, strict=True)):
            mine.weight.copy_(weight)
            if like["bias"]:
                mine.bias.copy_(theirs.in_proj_bias.chunk(3)[n])
    ours.out_proj.load_state_dict(theirs.out_proj.state_dict())
    return ours.eval()


def multihead(seed=1, **settings):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layer = nn.MultiheadAttention(WIDTH, HEADS, dtype=torch.float64, **settings).eval()
        for name, p in layer.named_parameters():
            if "bias" in name:
                nn.init.normal_(p)
    return layer


def layer_bound(layer, q, k, v, x, y, z):
    """Twice a layer's error: the projections' rounding moves the logits, attention adds its own, and the output projection sums it up."""
    u, d = unit(q.dtype), WIDTH // HEADS
    sizes = [w.abs().sum(-1).max() * t.abs().max() + 3 for w, t in ((q, x), (k, y), (v, z))]
    logits = 4 * u * (max(x.shape[-1], y.shape[-1], z.shape[-1]) + d + 8) * d**0.5 * sizes[0] * sizes[1]
    average = (logits + 4 * u * (y.shape[-2] + z.shape[-1] + 8)) * sizes[2]
    return 2 * ((average + u * WIDTH * sizes[2]) * layer.out_proj.weight.abs().sum(-1).max() + u * 3).item()


def as_matrices(layer):
    return (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight) if layer.in_proj_weight is None else layer.in_proj_weight.chunk(3)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kdim,vdim", [(None, None), (12, 20), (None, 20)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_layer_is_multihead_attention(impl, batch_first, kdim, vdim, bias, padded):
    theirs = multihead(batch_first=batch_first, kdim=kdim, vdim=vdim, bias=bias)
    ours = copied(theirs, impl=impl)
    x, y, z = normal(3, 7, WIDTH, seed=2), normal(3, 11, kdim or WIDTH, seed=3), normal(3, 11, vdim or WIDTH, seed=4)
    mask = torch.arange(11) >= torch.tensor([[11], [6], [1]]) if padded else None
    args = [t if batch_first else t.transpose(0, 1) for t in (x, y, z)]
    want = impl == "reference"
    expected, weights = theirs(*args, key_padding_mask=mask, need_weights=want)
    actual, mine = ours(*args, key_padding_mask=mask, need_weights=want)
    bound = layer_bound(theirs, *as_matrices(theirs), x, y, z)
    assert bound < 1e-7  # far below what any wrong weight would change
    assert_within(actual, expected, bound)
    if want:
        assert_within(mine, weights, bound)
        each = ours(*args, key_padding_mask=mask, need_weights=True, average_attn_weights=False)[1]
        assert_within(each, theirs(*args, key_padding_mask=mask, average_attn_weights=False)[1], bound)


@pytest.mark.parametrize("batch_first", [True, False])
def test_layer_is_multihead_attention_without_a_batch_and_when_causal(batch_first):
    theirs = multihead(batch_first=batch_first)
    ours = copied(theirs)
    x, y = normal(7, WIDTH, seed=5), normal(11, WIDTH, seed=6)
    bound = layer_bound(theirs, *as_matrices(theirs), x, y, y)
    assert_within(ours(x, y, y)[0], theirs(x, y, y)[0], bound)
    padded = torch.arange(11) >= 8
    assert_within(ours(x, y, y, key_padding_mask=padded)[0], theirs(x, y, y, key_padding_mask=padded)[0], bound)
    hidden = torch.ones(7, 7, dtype=torch.bool).triu(1)
    expected = theirs(x, x, x, attn_mask=hidden, is_causal=True, need_weights=False)[0]
    assert_within(ours(x, x, x, is_causal=True)[0], expected, bound)
    assert_within(copied(theirs, is_causal=True)(x)[0], expected, bound)


def hidden_states(n, seed):
    return normal(2, n, WIDTH, seed=seed) * 2


def heads_of(layer, x):
    """q, k, v (B, H, N, D) by a transformers layer's own projections."""
    with torch.no_grad():
        return [f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (layer.query, layer.key, layer.value)]


def scaled_up(layer):
    """Projections large enough for peaked attention: transformers layers start out at nn.Linear's small weights."""
    with torch.no_grad():
        layer.query.weight.mul_(2)
    return layer.double()


def bigbird(kind, n, **settings):
    model = pytest.importorskip("transformers.models.big_bird.modeling_big_bird")
    config = model.BigBirdConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, attention_probs_dropout_prob=0.0, max_position_embeddings=n, **settings
    )
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return model, scaled_up(getattr(model, kind)(config))


def block_sparse(n, block, seen, dtype=torch.float64):
    """BigBird's sparse layer: its context, in float32 its probabilities, and the q, k, v it saw.

    It draws its random blocks in training mode only, from NumPy's global state; earlier versions assemble probabilities in float32 only.
    """
    numpy = pytest.importorskip("numpy")
    model, layer = bigbird("BigBirdBlockSparseAttention", n, block_size=block, num_random_blocks=2)
    layer.seed = 8
    layer, x, state = layer.to(dtype).train(), hidden_states(n, 9).to(dtype), numpy.random.get_state()
    try:
        blocked, band, rows, columns = model.BigBirdModel.create_masks_for_block_sparse_attn(seen.to(dtype), block)
        with torch.no_grad():
            out, probs = layer(x, band, rows, columns, blocked, blocked, output_attentions=dtype == torch.float32)
    finally:
        numpy.random.set_state(state)
    return out.unflatten(-1, (HEADS, -1)).transpose(1, 2), probs, heads_of(layer, x)


def softmax_bound(q, k, v, dtype=torch.float64):
    error = weight_error(q, k, q.shape[-1] ** -0.5, dtype)
    return 2 * error, 2 * average_error(error, v, dtype)


@pytest.mark.parametrize("impl", IMPLS)
def test_full_bigbird_is_full_attention(impl):
    _, layer = bigbird("BigBirdSelfAttention", 32)
    x = hidden_states(19, 10)
    q, k, v = heads_of(layer, x)
    seen = (torch.arange(19) < torch.tensor([[19], [12]]))[:, None, None]
    penalty = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    with torch.no_grad():
        expected = layer.eval()(x, penalty)[0].unflatten(-1, (HEADS, -1)).transpose(1, 2)
    assert_within(sb.attention(q, k, v, seen, support=sb.Full(), low_rank=None, impl=impl), expected, softmax_bound(q, k, v)[1])


@pytest.mark.parametrize("block", [1, 4])
def test_bigbirds_global_and_window_blocks_are_ours(block):
    """What is left of their pattern after ours is their random part: two blocks a row of blocks, none in the global ones.

    Their window is whole blocks (3 of them) and their last block is global too, which is Window(2) and a column at block size 1.
    """
    n, count = 20 * block, 20
    _, probs, (q, k, _) = block_sparse(n, block, torch.ones(2, n), torch.float32)
    theirs = (probs > 0).unflatten(2, (count, block)).unflatten(-1, (count, block))
    assert torch.equal(theirs.any(3).any(-1), theirs.all(3).all(-1))  # whole blocks
    tokens = pattern(sb.GlobalTokens(block), q, k).unflatten(2, (count, block)).unflatten(-1, (count, block)).all(3).all(-1)
    band = pattern(sb.Window(2) | sb.Columns(index=(count - 1,)), normal(2, HEADS, count, 4, seed=11), normal(2, HEADS, count, 4, seed=12))
    ours, theirs = (tokens | band)[:, :, :-1], theirs.all(3).all(-1)
    assert bool(theirs[:, :, -1].all())
    left = theirs[:, :, :-1]
    assert bool((left | ~ours).all())
    extra = (left & ~ours).sum(-1)
    assert bool((extra[:, :, 0] == 0).all()) and bool((extra[:, :, 1:] == 2).all())


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("short", [0, 6])
def test_sparse_bigbird_is_attention_on_its_blocks(impl, short):
    """Their pattern as our layers, overlaps included: GlobalTokens, the block window, each head's random blocks, the last block's row and column."""
    n, block, count = 64, 4, 16
    seen = torch.ones(2, n)
    seen[1, n - short :] = 0
    out, _, (q, k, v) = block_sparse(n, block, seen)
    _, open_probs, _ = block_sparse(n, block, torch.ones(2, n), torch.float32)
    grid = (open_probs > 0)[:, :, ::block, ::block].flatten(0, 1)
    random = torch.where(grid, torch.arange(count), -1)
    random[:, [0, -1]] = -1
    own = torch.arange(count)[:, None] + torch.arange(-1, 2)
    own = torch.where((own < 0) | (own >= count), -1, own)
    last = Given((Blocks(own[None], block, block), Blocks(random, block, block), Rows(torch.arange(n - block, n)[None])))
    support = sb.GlobalTokens(block) | last | sb.Columns(index=tuple(range(n - block, n)))
    actual = sb.attention(q, k, v, seen.bool()[:, None, None], support=support, low_rank=None, impl=impl)
    visible = seen.bool()[:, None, :, None]  # their padded queries are zeroed, ours are not
    assert_within(actual * visible, out, softmax_bound(q, k, v)[1])


def longformer(window):
    model = pytest.importorskip("transformers.models.longformer.modeling_longformer")
    config = model.LongformerConfig(hidden_size=WIDTH, num_attention_heads=HEADS, attention_window=[window], attention_probs_dropout_prob=0.0)
    with torch.random.fork_rng():
        torch.manual_seed(13)
        layer = model.LongformerSelfAttention(config, 0)
    layer = scaled_up(layer)
    for name in ("query", "key", "value"):
        getattr(layer, f"{name}_global").load_state_dict(getattr(layer, name).state_dict())
    return layer.eval()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("window,tokens,short", [(8, 0, 0), (8, 3, 0), (4, 1, 0), (8, 6, 0), (4, 2, 7)])
def test_longformer_is_window_and_global_tokens(impl, window, tokens, short):
    """With one set of projections for local and global attention. Their softmax is float32 whatever the input."""
    n, layer = 48, longformer(window)
    x = hidden_states(n, 14)
    q, k, v = heads_of(layer, x)
    state = torch.zeros(2, n)
    state[:, :tokens] = 10000.0
    state[1, n - short :] = -10000.0 if short else state[1, n - short :]
    with torch.no_grad():
        out = layer(x, state, state < 0, state > 0, bool(tokens))[0].unflatten(-1, (HEADS, -1)).transpose(1, 2)
    support = sb.Window(window) | sb.GlobalTokens(tokens) if tokens else sb.Window(window)
    visible = (state >= 0)[:, None, None]
    actual = sb.attention(q, k, v, visible, support=support, low_rank=None, impl=impl)
    bound = softmax_bound(q, k, v, torch.float32)[1]
    assert bound < 2e-3
    assert_within(actual * visible.mT, out * visible.mT, bound)

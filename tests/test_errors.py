"""Rule 10: bad input gets one line that names the argument, the rule, what came, and the remedy."""

import math

import pytest
import scatterbrain as sb
import torch

from cases import normal

Q = normal(2, 4, 6, 8)


def call(**changed):
    args = {"query": Q, "key": Q, "value": Q, **changed}
    return lambda: sb.attention(**args)


THREE = torch.ones(1, 3, 8)


def layer_call(**kwargs):
    return lambda: sb.ScatterbrainAttention(8, 2)(THREE, **kwargs)


BAD = {
    "query-not-a-tensor": (call(query=[1.0]), "query", "tensor"),
    "wrong-rank": (call(query=Q[0]), "query", "4 dimensions"),
    "key-wrong-rank": (call(key=Q[None]), "key", "4 dimensions"),
    "integers": (call(query=Q.long(), key=Q.long(), value=Q.long()), "query", "float"),
    "mixed-dtypes": (call(key=Q.float()), "key", "dtype"),
    "mixed-devices": (call(key=Q.to("meta")), "key", "device"),
    "widths": (call(key=Q[..., :4]), "key", "width 8"),
    "no-width": (call(query=Q[..., :0], key=Q[..., :0]), "query", "width"),
    "heads": (call(key=Q[:, :2], value=Q[:, :2]), "key", "enable_gqa"),
    "heads-not-dividing": (call(key=Q[:, :3], value=Q[:, :3], enable_gqa=True), "key", "divides"),
    "value-heads": (call(value=Q[:, :2]), "value", "heads"),
    "batch": (call(key=Q[:1], value=Q[:1]), "key", "batch"),
    "lengths": (call(value=Q[:, :, :5]), "value", "length"),
    "mask-general": (call(attn_mask=torch.eye(6, dtype=torch.bool)), "attn_mask", "is_causal=True"),
    "mask-shape": (call(attn_mask=torch.ones(2, 1, 1, 5, dtype=torch.bool)), "attn_mask", "broadcast"),
    "mask-rank": (call(attn_mask=torch.ones(1, 2, 1, 1, 6, dtype=torch.bool)), "attn_mask", "broadcast"),
    "mask-bias": (call(attn_mask=torch.full((1, 1, 1, 6), -2.5)), "attn_mask", "biases"),
    "mask-dtype": (call(attn_mask=torch.ones(1, 1, 1, 6, dtype=torch.int64)), "attn_mask", "bool"),
    "mask-device": (call(attn_mask=torch.ones(1, 1, 1, 6, dtype=torch.bool, device="meta")), "attn_mask", "device"),
    "mask-type": (call(attn_mask="causal"), "attn_mask", "tensor"),
    "budget-nan": (call(budget=math.nan), "budget", "(0, 1]"),
    "budget-zero": (call(budget=0), "budget", "(0, 1]"),
    "budget-negative": (call(budget=-0.5), "budget", "(0, 1]"),
    "budget-over-one": (call(budget=1.5), "budget", "(0, 1]"),
    "budget-text": (call(budget="1/8"), "budget", "(0, 1]"),
    "budget-and-support": (call(budget=0.5, support=sb.Window(2)), "budget", "left out"),
    "budget-and-map": (call(budget=0.5, low_rank=sb.Performer(2)), "budget", "left out"),
    "nothing": (call(support=None, low_rank=None), "support and low_rank", "not both be None"),
    "support-is-a-map": (call(support=sb.Performer(4)), "support", "Support"),
    "map-is-a-support": (call(low_rank=sb.Window(4)), "low_rank", "LowRankMap"),
    "support-is-a-class": (call(support=sb.Window), "support", "Window(128)"),
    "implementation": (call(impl="cuda"), "impl", "reference"),
    "native-absent": (call(impl="native"), "impl", "torch"),
    "weights-of-torch": (call(return_weights=True, impl="torch"), "return_weights", "reference"),
    "dropout-high": (call(dropout_p=1.2), "dropout_p", "[0, 1]"),
    "dropout-nan": (call(dropout_p=math.nan), "dropout_p", "[0, 1]"),
    "scale-nan": (call(scale=math.nan), "scale", "finite"),
    "scale-inf": (call(scale=math.inf), "scale", "finite"),
    "double-count-alone": (call(double_count=True, support=sb.Window(2)), "double_count", "both"),
    "smyrf-causal": (call(support=sb.LSH(1), is_causal=True), "support", "reformer"),
    "linformer-causal": (call(low_rank=sb.Linformer(2), is_causal=True), "low_rank", "future"),
    "linformer-too-short": (call(low_rank=sb.Linformer(2, length=4)), "length", "6"),
    "columns-out-of-range": (call(support=sb.Columns(0, index=(9,))), "index", "0..5"),
    "window-zero": (lambda: sb.Window(0), "size", ">= 1"),
    "window-negative": (lambda: sb.Window(-3), "size", "-3"),
    "window-float": (lambda: sb.Window(2.5), "size", "integer"),
    "window-bool": (lambda: sb.Window(True), "size", "integer"),
    "dilation": (lambda: sb.Window(3, dilation=0), "dilation", ">= 1"),
    "stride": (lambda: sb.Strided(0), "stride", ">= 1"),
    "tail": (lambda: sb.Fixed(4, tail=5), "tail", "stride"),
    "blocks": (lambda: sb.RandomBlocks(0), "blocks", ">= 1"),
    "tokens": (lambda: sb.GlobalTokens(-1), "count", ">= 1"),
    "columns-none": (lambda: sb.Columns(), "Columns", "heavy=8"),
    "columns-repeated": (lambda: sb.Columns(0, index=(1, 1)), "index", "distinct"),
    "columns-negative": (lambda: sb.Columns(0, index=(-1,)), "index", ">= 0"),
    "clusters": (lambda: sb.Clusters(0), "clusters", ">= 1"),
    "top": (lambda: sb.Routed(9, clusters=4), "top", "clusters"),
    "routed-keys": (lambda: sb.Routed(1, keys=0), "keys", ">= 1"),
    "topk": (lambda: sb.TopK(0), "k", ">= 1"),
    "rounds": (lambda: sb.LSH(0), "rounds", ">= 1"),
    "scheme": (lambda: sb.LSH(scheme="minhash"), "scheme", "smyrf"),
    "bucket": (lambda: sb.LSH(bucket=0), "bucket", ">= 1"),
    "bucket-none": (lambda: sb.LSH(bucket=None), "bucket", "smyrf"),
    "functions": (lambda: sb.LSH(functions=2), "functions", "cross_polytope"),
    "features": (lambda: sb.Performer(0), "features", ">= 1"),
    "features-odd": (lambda: sb.Performer(5, kind="trig"), "features", "even"),
    "kind": (lambda: sb.Performer(4, kind="relu"), "kind", "positive"),
    "order": (lambda: sb.ClusterMeans(4, order=3), "order", "1 or 2"),
    "inner": (lambda: sb.ClusterMeans(4, inner=33), "inner", "divide"),
    "iterations": (lambda: sb.Nystrom(4, iterations=0), "iterations", ">= 1"),
    "length": (lambda: sb.Linformer(4, length=-1), "length", ">= 1"),
    "union": (lambda: sb.Window(2) | sb.Performer(2), "support", "Window(64)"),
    "preset-entries": (lambda: sb.presets.smyrf(0), "entries", ">= 1"),
    "preset-share": (lambda: sb.presets.scatterbrain(sparse_share=1.0), "sparse_share", "(0, 1)"),
    "preset-sparse": (lambda: sb.presets.scatterbrain(sparse="topk"), "sparse", "smyrf"),
    "preset-pattern": (lambda: sb.presets.sparse_transformer(pattern="x"), "pattern", "strided"),
    "json-type": (lambda: sb.from_json('{"type": "Windows", "version": 1}'), "type", "Window"),
    "json-version": (lambda: sb.from_json('{"type": "Window", "version": 9, "size": 3}'), "version", "9"),
    "json-field": (lambda: sb.from_json('{"type": "Window", "version": 1, "width": 3}'), "Window", "width"),
    "module-heads": (lambda: sb.ScatterbrainAttention(10, 3), "embed_dim", "multiple"),
    "module-kv-heads": (lambda: sb.ScatterbrainAttention(12, 6, num_kv_heads=4), "num_kv_heads", "divide"),
    "module-dropout": (lambda: sb.ScatterbrainAttention(8, 2, dropout=2.0), "dropout", "[0, 1]"),
    "module-support": (lambda: sb.ScatterbrainAttention(8, 2, support=sb.Performer(2)), "support", "Support"),
    "module-budget": (lambda: sb.ScatterbrainAttention(8, 2, budget=2.0), "budget", "(0, 1]"),
    "module-budget-and-map": (lambda: sb.ScatterbrainAttention(8, 2, budget=0.5, low_rank=None), "budget", "left out"),
    "module-impl": (lambda: sb.ScatterbrainAttention(8, 2, impl="fast"), "impl", "torch"),
    "module-causal": (lambda: sb.ScatterbrainAttention(8, 2, support=sb.LSH(1), is_causal=True), "support", "reformer"),
    "module-mask": (layer_call(attn_mask=torch.ones(3, 3).bool()), "attn_mask", "key_padding_mask"),
    "module-padding": (
        lambda: sb.ScatterbrainAttention(8, 2)(torch.ones(1, 3, 8), key_padding_mask=torch.ones(1, 4).bool()),
        "key_padding_mask",
        "3",
    ),
    "module-padding-dtype": (
        lambda: sb.ScatterbrainAttention(8, 2)(torch.ones(1, 3, 8), key_padding_mask=torch.ones(1, 3)),
        "key_padding_mask",
        "bool",
    ),
    "module-rank": (lambda: sb.ScatterbrainAttention(8, 2)(torch.ones(1, 1, 3, 8)), "query", "dimensions"),
    "module-weights": (layer_call(need_weights=True), "return_weights", "reference"),
}


@pytest.mark.parametrize("case", BAD)
def test_one_line_names_argument_rule_value_and_remedy(case):
    run, argument, hint = BAD[case]
    with pytest.raises(ValueError) as error:
        run()
    text = str(error.value)
    assert "\n" not in text
    assert text.startswith(argument)
    assert hint in text
    assert " must " in text and "; got " in text and text.count("; ") >= 2


def test_explain_checks_as_attention_does():
    with pytest.raises(ValueError, match="budget must"):
        sb.explain(Q, Q, Q, budget=7.0)
    with pytest.raises(TypeError, match="supprt"):
        sb.attention(Q, Q, Q, supprt=None)


def test_a_mask_that_says_the_same_to_every_query_is_taken():
    keys = torch.tensor([True, True, False, True, True, True])
    expected = sb.attention(Q, Q, Q, keys, support=sb.Full())
    floats = torch.zeros(6, dtype=Q.dtype).masked_fill(~keys, torch.finfo(Q.dtype).min)
    for mask in (keys.expand(6, 6), keys[None, None, None].expand(2, 4, 6, 6).clone(), floats, torch.where(keys, 0.0, -torch.inf)):
        assert torch.equal(sb.attention(Q, Q, Q, mask, support=sb.Full()), expected)

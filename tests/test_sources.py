"""Supports against the definitions in their papers, each written out here in a few lines of its own."""

import math

import pytest
import scatterbrain as sb
import torch

from rounding import assert_within, average_error, causal, normal, pattern, weight_error, weights


def positions(n, m):
    return torch.arange(n)[:, None], torch.arange(m)


def qk(n, m, d=8, groups=2, seed=0):
    return normal(1, groups, n, d, seed=seed), normal(1, groups, m, d, seed=seed + 1)


def assert_pattern(actual, expected):
    assert torch.equal(actual, torch.as_tensor(expected).expand_as(actual)), (actual != expected).nonzero()[:5].tolist()


@pytest.mark.parametrize("size,dilation", [(1, 1), (4, 1), (5, 1), (6, 3)])
def test_window_is_longformers_sliding_window(size, dilation):
    """Half of it on each side, `dilation` apart (Beltagy et al. 2020, figure 2); causal: the last `size` of them."""
    i, j = positions(23, 29)
    steps, on_grid = (j - i) / dilation, (j - i) % dilation == 0
    q, k = qk(23, 29)
    assert_pattern(pattern(sb.Window(size, dilation=dilation), q, k), on_grid & (steps.abs() <= size // 2))
    past = on_grid & (steps <= 0) & (steps > -size)
    assert_pattern(pattern(sb.Window(size, dilation=dilation), q, k, is_causal=True), past)


@pytest.mark.parametrize("n", [12, 23])
@pytest.mark.parametrize("stride", [1, 4, 5])
def test_strided_is_child_et_al(n, stride):
    """A1_i = {max(0, i - l), .., i}; A2_i = {j <= i : (i - j) mod l = 0}. Not causal: the same on both sides."""
    i, j = positions(n, n)
    expected = ((i - j).abs() <= stride) | ((i - j) % stride == 0)
    assert_pattern(pattern(sb.Strided(stride), *qk(n, n)), expected)
    assert_pattern(pattern(sb.Strided(stride), *qk(n, n), is_causal=True), expected & causal(n, n))


@pytest.mark.parametrize("n", [12, 23])
@pytest.mark.parametrize("stride,tail", [(4, 1), (4, 2), (6, 6), (1, 1)])
def test_fixed_is_child_et_al(n, stride, tail):
    """A1_i = {j : floor(j / l) = floor(i / l)}; A2_i = {j : j mod l in l - c .. l - 1}, both with j <= i."""
    i, j = positions(n, n)
    expected = (i // stride == j // stride) | (j % stride >= stride - tail)
    assert_pattern(pattern(sb.Fixed(stride, tail=tail), *qk(n, n), is_causal=True), expected & causal(n, n))
    whole = n // stride * stride  # the source is causal; without that an unfinished last block has no summary
    assert_pattern(pattern(sb.Fixed(stride, tail=tail), *qk(n, n))[..., :whole], expected[:, :whole])


def key_blocks(blocks, block, n, m, seed=0, **more):
    """(query blocks, key blocks) seen, and that they are seen whole."""
    seen = pattern(sb.RandomBlocks(blocks, block=block, seed=seed), *qk(n, m, groups=1), **more)[0, 0]
    rows, columns = -(-n // block), -(-m // block)
    table = torch.stack([seen[r * block : (r + 1) * block, c * block : (c + 1) * block].any() for r in range(rows) for c in range(columns)])
    table = table.view(rows, columns)
    whole = table.repeat_interleave(block, 0)[:n].repeat_interleave(block, 1)[:, :m]
    assert torch.equal(seen, whole & causal(n, m) if more.get("is_causal") else whole)
    return table


@pytest.mark.parametrize("blocks,m", [(1, 64), (3, 96), (4, 61), (2, 32)])
def test_random_blocks_are_bigbirds(blocks, m):
    """Each query block sees r distinct key blocks (Zaheer et al. 2020), others in each row and for each seed."""
    table = key_blocks(blocks, 4, 60, m)
    assert bool((table.sum(1) == blocks).all())
    assert len({tuple(row.tolist()) for row in table}) > 1
    assert not torch.equal(table, key_blocks(blocks, 4, 60, m, seed=1))


@pytest.mark.parametrize("blocks,total", [(3, 16), (5, 7), (4, 3)])
def test_random_blocks_are_as_many_as_asked_for_at_any_length(blocks, total):
    tables = [key_blocks(blocks, 4, 60, 4 * total, seed=seed) for seed in range(4)]
    assert all(bool((t.sum(1) == min(blocks, total)).all()) for t in tables)


def test_a_random_block_drawn_twice_counts_once():
    """More blocks than there are: the fast code, which walks the list of blocks, must agree with the dense mask."""
    q, k = qk(60, 12, groups=1)
    method = {"support": sb.RandomBlocks(5, block=4), "low_rank": None}
    bound = 2 * average_error(weight_error(q, k, 8**-0.5, q.dtype), k, q.dtype)
    assert_within(sb.attention(q, k, k, impl="torch", **method), weights(q, k, **method) @ k, bound)


def test_random_blocks_reach_every_block_equally_often():
    """Over seeds, within 5 standard deviations of r / total."""
    table = sum(key_blocks(3, 2, 8, 24, seed=seed).double() for seed in range(400)) / 400
    assert_within(table, torch.full_like(table, 3 / 12), 5 * math.sqrt(0.25 * 0.75 / 400))


def test_causal_random_blocks_stay_at_or_before_the_querys_own():
    table = key_blocks(2, 4, 64, 64, is_causal=True)
    assert not bool(table.triu(1).any())
    assert bool((table.sum(1) >= 1).all())
    earlier = [key_blocks(2, 4, n, n, is_causal=True) for n in (24, 48)]  # later tokens must not move an earlier row's draw
    for short in earlier:
        assert torch.equal(table[: len(short), : len(short)], short)


@pytest.mark.parametrize("is_causal", [False, True])
def test_topk_is_torch_topk_of_the_logits(is_causal):
    q, k = qk(19, 31)
    logits = q @ k.mT
    if is_causal:
        logits = logits.masked_fill(~causal(19, 31), -torch.inf)
    expected = torch.zeros(logits.shape, dtype=torch.bool).scatter_(-1, logits.topk(5, -1).indices, True) & ~torch.isneginf(logits)
    assert_pattern(pattern(sb.TopK(5), q, k, is_causal=is_causal), expected)
    best = weights(q, k, support=sb.Full(), low_rank=None, is_causal=is_causal)
    kept = best.mul(expected) / best.mul(expected).sum(-1, keepdim=True)
    assert_within(weights(q, k, support=sb.TopK(5), low_rank=None, is_causal=is_causal), kept, 4 * weight_error(q, k, 8**-0.5, q.dtype))


@pytest.mark.parametrize("count", [1, 4, 50])
def test_global_tokens_are_rows_and_columns(count):
    i, j = positions(17, 23)
    q, k = qk(17, 23)
    assert_pattern(pattern(sb.GlobalTokens(count), q, k), (i < count) | (j < count))
    both = {"support": sb.Window(4), "low_rank": sb.GlobalTokens(count)}
    apart = weights(q, k, support=sb.Window(4) | sb.GlobalTokens(count), low_rank=None)
    assert_within(weights(q, k, **both), apart, 4 * weight_error(q, k, 8**-0.5, q.dtype))


def test_columns_are_the_ones_named():
    _, j = positions(9, 23)
    assert_pattern(pattern(sb.Columns(first=3, index=(1, 7, 22)), *qk(9, 23)), (j < 3) | (j == 7) | (j == 22))


def test_heavy_columns_are_the_largest_column_sums_of_softmax():
    """With as many samples as rows the estimate is the column sums themselves, beside the columns already named."""
    q, k = qk(40, 57)
    mass = torch.softmax(2 * q @ k.mT * 8**-0.5, -1).sum(2)
    mass[..., 4] = -1
    expected = torch.zeros_like(mass, dtype=torch.bool).scatter_(-1, mass.topk(6, -1).indices, True)
    expected[..., 4] = True
    actual = pattern(sb.Columns(6, index=(4,), samples=40), q, k, scale=2 * 8**-0.5)
    assert_pattern(actual, expected[:, :, None].expand_as(actual))


def planted_columns(n, at):
    q, k = qk(n, n, seed=4)
    k[:, :, at] = 2.0  # every query below leans towards (1, .., 1)
    return q * 0.3 + 1.0, k


def test_heavy_columns_find_planted_ones_from_a_few_rows():
    q, k = planted_columns(256, [3, 70, 200])
    _, j = positions(256, 256)
    assert_pattern(pattern(sb.Columns(3, samples=8), q, k), (j == 3) | (j == 70) | (j == 200))


def test_causal_heavy_columns_find_planted_ones_one_block_later():
    """Blocks of 64 queries vote for the blocks after them: key 70 of block 1 opens at row 128, and never earlier."""
    q, k = planted_columns(256, [3, 70])
    seen = pattern(sb.Columns(2), q, k, is_causal=True)
    assert bool(seen[:, :, 64:, 3].all()) and bool(seen[:, :, 128:, 70].all())
    assert not bool(seen[:, :, :64].any()) and not bool(seen[:, :, :128, 70].any())


def planted(labels, d=16, seed=5, noise=0.05):
    """Points near orthogonal directions, one a label."""
    at = torch.as_tensor(labels)
    return torch.eye(d, dtype=torch.float64)[at][None, None] + noise * normal(1, 1, len(at), d, seed=seed)


def test_routing_clusters_hold_their_nearest():
    """Each centroid takes the `size` nearest queries and keys by cosine (Roy et al. 2021): some tokens twice, some never."""
    labels = torch.tensor([0, 1, 2] * 4 + [0] * 14 + [1, 2, 2])
    q, k = planted(labels, seed=6) * 3, planted(labels.flip(0), seed=7) * 2
    unit = [torch.nn.functional.normalize(t, dim=-1)[0, 0] for t in (q, k)]
    both, names = torch.cat(unit), torch.cat([labels, labels.flip(0)])
    centres = torch.nn.functional.normalize(torch.stack([both[names == c].mean(0) for c in range(3)]), dim=-1)
    expected = torch.zeros(29, 29, dtype=torch.bool)
    for c in range(3):
        rows, columns = ((t @ centres[c]).topk(8).indices for t in unit)
        expected[rows[:, None], columns] = True
    assert not bool(expected.any(1).all()) and bool((expected.sum(1) > 8).any())
    assert_pattern(pattern(sb.Clusters(3, size=8), q, k), expected)


def test_routed_picks_the_clusters_with_most_estimated_mass():
    """count * exp(scale q.mean), and here the count changes the choice."""
    labels = torch.tensor([0, 1, 2, 3] * 3 + [3] * 20 + [2] * 6)
    k, q = planted(labels), normal(1, 1, 50, 16, seed=8) * 4
    mean = torch.stack([k[0, 0][labels == c].mean(0) for c in range(4)])
    near = q[0, 0] @ mean.mT / 4
    mass = near.exp() * torch.bincount(labels)
    best = mass.topk(2, -1).indices
    assert not torch.equal(best.sort(-1).values, near.topk(2, -1).indices.sort(-1).values)
    expected = (best[:, :, None] == labels).any(1)
    assert_pattern(pattern(sb.Routed(2, clusters=4), q, k), expected)


def test_causal_routed_opens_clusters_of_earlier_chunks_only():
    chunk, n = 16, 64
    labels = torch.tensor([0, 1, 0, 0, 1, 0, 1, 0, 1, 0, 0, 0, 0, 0, 1, 0] * 4)
    k, q = planted(labels, seed=9), normal(1, 1, n, 16, seed=10) * 4
    k = k + 0.3 * planted(2 + torch.arange(n) // chunk, noise=0.0)  # so that chunks differ
    node = 2 * (torch.arange(n) // chunk) + labels
    mean = torch.stack([k[0, 0][node == c].mean(0) for c in range(8)])
    mass = (q[0, 0] @ mean.mT / 4).exp() * torch.bincount(node)
    expected = torch.zeros(n, n, dtype=torch.bool)
    for i in range(chunk, n):
        open_nodes = mass[i, : 2 * (i // chunk)]
        expected[i] = torch.isin(node, open_nodes.topk(2).indices)
    assert_pattern(pattern(sb.Routed(2, chunk=chunk, per_chunk=2), q, k, is_causal=True), expected)

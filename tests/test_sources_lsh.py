"""Hashing against its papers: cross-polytope (Andoni et al. 2015), Reformer (Kitaev et al. 2020), SMYRF (Daras et al. 2020)."""

import itertools
import math

import pytest
import scatterbrain as sb
import torch
from scatterbrain.context import Context
from scatterbrain.supports.lsh import xbox_plus

from rounding import assert_within, causal, normal, pattern, unit


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def axis(x, rotation):
    """argmax of [xR; -xR]."""
    return torch.cat([x @ rotation, -(x @ rotation)], -1).argmax(-1)


def test_rotations_are_orthogonal_and_differ():
    r = sb.LSH(5, scheme="cross_polytope", bucket=None, functions=3).sample(24, generator()).state["rotation"]
    assert r.shape == (5, 3, 24, 24)
    assert_within(r @ r.mT, torch.eye(24).expand_as(r), 24 * 4 * unit(torch.float32))
    flat = r.flatten(0, 1).flatten(1)
    overlap = (flat @ flat.mT / 24).fill_diagonal_(0)  # trace(R'S) / d of two Haar rotations: mean 0, standard deviation 1 / d
    assert bool((overlap.abs() < 6 / 24).all())


def test_rotations_are_haar():
    """Entries have mean 0 and variance 1 / d; the fourth moment of a coordinate on the sphere is 3 / (d (d + 2)). Signs of QR fixed."""
    d, count = 4, 20000
    r = sb.LSH(count, scheme="cross_polytope", bucket=None).sample(d, generator(1)).state["rotation"][:, 0].double()
    assert_within(r.mean(0), torch.zeros(d, d), 5 * math.sqrt(1 / d / count))
    second, fourth, eighth = 1 / d, 3 / (d * (d + 2)), 105 / (d * (d + 2) * (d + 4) * (d + 6))
    assert_within(r.square().mean(0), torch.full((d, d), second), 5 * math.sqrt((fourth - second**2) / count))
    assert_within(r.pow(4).mean(0), torch.full((d, d), fourth), 5 * math.sqrt((eighth - fourth**2) / count))


@pytest.mark.parametrize("functions,rounds", [(1, 1), (2, 1), (3, 2), (6, 2)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_cross_polytope_needs_all_functions_of_one_round(functions, rounds, is_causal):
    lsh = sb.LSH(rounds, scheme="cross_polytope", bucket=None, functions=functions).sample(8, generator(2))
    k = normal(2, 1, 60, 8, seed=3)
    q = (k + 0.1 * normal(2, 1, 60, 8, seed=4))[:, :, :45]
    expected = torch.zeros(2, 1, 45, 60, dtype=torch.bool)
    for tables in lsh.state["rotation"].double():
        expected |= torch.stack([axis(q, r)[..., :, None] == axis(k, r)[..., None, :] for r in tables]).all(0)
    expected = expected & causal(45, 60) if is_causal else expected
    assert expected.any() and not expected.all()
    assert torch.equal(pattern(lsh, q, k, is_causal=is_causal), expected)


@pytest.mark.parametrize("functions", [1, 2])
def test_collision_probability_in_the_plane_is_a_line(functions):
    """There the hash is the quadrant of a random angle: p = 1 - 2 theta / pi up to a right angle, to the power K."""
    count = 4000
    lsh = sb.LSH(1, scheme="cross_polytope", bucket=None, functions=functions)
    for share in (0.0, 0.2, 0.5, 0.8, 1.0, 2.0):
        theta = share * math.pi / 2
        pair = torch.tensor([[1.0, 0.0], [math.cos(theta), math.sin(theta)]], dtype=torch.float64)
        turn = sb.LSH(count, scheme="cross_polytope", bucket=None, functions=functions).sample(2, generator(5)).state["rotation"].double()
        hit = torch.stack([axis(pair[0], turn[:, f]) == axis(pair[1], turn[:, f]) for f in range(functions)]).all(0).double().mean()
        p = max(0.0, 1 - share) ** functions
        assert_within(hit, torch.tensor(p), 5 * math.sqrt(p * (1 - p) / count) + 1e-12, share)
    assert lsh.functions == functions


def test_collision_probability_falls_with_distance():
    """Through the public call: pairs at one distance, turned at random, under one sampled rotation; at 16 dimensions."""
    d, count = 16, 4000
    first, second = torch.linalg.qr(normal(count, d, 2, seed=6)).Q.unbind(-1)
    lsh, rates = sb.LSH(1, scheme="cross_polytope", bucket=None).sample(d, generator(7)), []
    for distance in (0.2, 0.6, 1.0, 1.4, 1.9):
        cosine = 1 - distance**2 / 2
        other = cosine * first + math.sqrt(1 - cosine**2) * second
        rates.append(pattern(lsh, first[:, None, None], other[:, None, None]).double().mean().item())
    for near, far in itertools.pairwise(rates):
        assert near - far > 5 * math.sqrt((near * (1 - near) + far * (1 - far)) / count), rates
    assert pattern(lsh, first[:, None, None], 3 * first[:, None, None]).all()
    assert not pattern(lsh, first[:, None, None], -first[:, None, None]).any()


def sorted_places(codes):
    """Place of each token in the order (bucket, position)."""
    order = sorted(range(len(codes)), key=lambda t: (int(codes[t]), t))
    place = torch.empty(len(codes), dtype=torch.int64)
    place[torch.tensor(order)] = torch.arange(len(codes))
    return place


@pytest.mark.parametrize("n,bucket,rounds", [(64, 8, 1), (64, 8, 3), (61, 8, 1), (20, 7, 2), (16, 8, 1), (8, 8, 1), (5, 8, 1)])
def test_reformer_sees_its_own_chunk_and_the_one_before(n, bucket, rounds):
    """Shared q = k. P_i = {j : floor(s_i / m) - 1 <= floor(s_j / m) <= floor(s_i / m)}, s the place after sorting by bucket, wrapping."""
    lsh = sb.LSH(rounds, bucket=bucket, scheme="reformer").sample(8, generator(8))
    x = normal(1, 1, n, 8, seed=9)
    chunks = -(-n // bucket)
    half = min(8, (chunks + 1) // 2)  # b / 2 axes for as many buckets as chunks
    expected = torch.zeros(n, n, dtype=torch.bool)
    for r in lsh.state["rotation"][:, 0].double():
        h = axis(x[0, 0], r[:, :half])
        chunk = sorted_places(2 * (h % half) + h // half) // bucket  # the sides of an axis are neighbours in the order
        expected |= (chunk[:, None] == chunk) | ((chunk[:, None] - 1) % chunks == chunk)
    assert torch.equal(pattern(lsh, x, x)[0, 0], expected)


@pytest.mark.parametrize("scheme", ["reformer", "cross_polytope"])
def test_causal_chunks_are_counted_inside_a_bucket(scheme):
    """A query sees the chunk that its bucket has filled so far and the one before: decided by the past alone."""
    n, size = 90, 4
    lsh = sb.LSH(1, bucket=size, scheme=scheme).sample(4, generator(10))
    x = normal(1, 1, n, 4, seed=11)
    half = min(4, (-(-n // size) + 1) // 2)
    h = axis(x[0, 0], lsh.state["rotation"][0, 0].double()[:, :half]).tolist()
    expected = torch.zeros(n, n, dtype=torch.bool)
    for i in range(n):
        mates = [j for j in range(i + 1) if h[j] == h[i]]
        current = (len(mates) - 1) // size
        expected[i, [j for c, j in enumerate(mates) if c // size in (current, current - 1)]] = True
    assert torch.equal(pattern(lsh, x, x, is_causal=True)[0, 0], expected)
    assert expected.sum(1).max() == 2 * size


def test_cross_polytope_buckets_are_cut_into_chunks():
    n, size = 70, 5
    lsh = sb.LSH(1, bucket=size, scheme="cross_polytope").sample(4, generator(12))
    x = normal(1, 1, n, 4, seed=13)
    h = axis(x[0, 0], lsh.state["rotation"][0, 0].double())
    rank = torch.tensor([int((h[:i] == h[i]).sum()) for i in range(n)]) // size
    expected = (h[:, None] == h) & (rank[:, None] == rank)
    assert torch.equal(pattern(lsh, x, x)[0, 0], expected)


def test_xbox_plus_turns_products_into_distances():
    """|F(q) - G(k)|^2 = 2 (max|q|^2 + max|k|^2) - 2 q.k, and all lifted points have one norm."""
    q, k = normal(3, 20, 8, seed=14) * 2, normal(3, 33, 8, seed=15)
    f, g = xbox_plus(Context(q, k, 1.0, False, None))
    top = q.square().sum(-1).amax(-1) + k.square().sum(-1).amax(-1)
    distance = (f[:, :, None] - g[:, None]).square().sum(-1)
    bound = 40 * unit(q.dtype) * top.max()
    assert_within(distance, 2 * top[:, None, None] - 2 * q @ k.mT, bound)
    assert_within(f.square().sum(-1), top[:, None].expand(3, 20), bound)
    assert_within(g.square().sum(-1), top[:, None].expand(3, 33), bound)


@pytest.mark.parametrize("n,m,bucket", [(64, 64, 8), (50, 64, 8), (64, 45, 8), (30, 61, 16), (9, 9, 16)])
def test_smyrf_clusters_are_balanced(n, m, bucket):
    """One round: disjoint clusters that cover everything; each holds the same number of keys, and of queries, up to one."""
    seen = pattern(sb.LSH(1, bucket=bucket), normal(2, 2, n, 8, seed=16), normal(2, 2, m, 8, seed=17)).flatten(0, 1)
    for head in seen:
        clusters, queries = head.unique(dim=0, return_counts=True)
        assert len(clusters) == -(-m // bucket)
        assert bool((clusters.sum(0) == 1).all())
        keys = clusters.sum(1)
        assert keys.max() - keys.min() <= 1 and keys.max() <= bucket
        assert queries.max() - queries.min() <= 1


def test_smyrf_clusters_are_runs_of_one_sorted_projection():
    """h(x) = a.x after the lift F(q) = [q; 0; sqrt(M - |q|^2)], G(k) = [k; sqrt(M - |k|^2); 0]; equal runs of each order meet."""
    lsh = sb.LSH(2, bucket=8).sample(6, generator(18))
    q, k = normal(48, 6, seed=19), normal(64, 6, seed=20)
    q2, k2 = q.square().sum(-1, keepdim=True), k.square().sum(-1, keepdim=True)
    top = q2.max() + k2.max()
    f = torch.cat([q, 0 * q2, (top - q2).sqrt()], -1)
    g = torch.cat([k, (top - k2).sqrt(), 0 * k2], -1)
    expected = torch.zeros(48, 64, dtype=torch.bool)
    for a in lsh.state["projection"].double():
        for rows, columns in zip((f @ a).argsort().chunk(8), (g @ a).argsort().chunk(8), strict=True):
            expected[rows[:, None], columns] = True
    assert torch.equal(pattern(lsh, q[None, None], k[None, None])[0, 0], expected)


@pytest.mark.parametrize("scheme", ["smyrf", "reformer", "cross_polytope"])
def test_hashing_finds_clustered_pairs(scheme):
    """Recall of same-cluster pairs against the share of all pairs looked at, which is what a random support of that size would find."""
    n, clusters = 256, 16
    label = torch.arange(n) % clusters
    centre = torch.nn.functional.normalize(normal(clusters, 32, seed=21), dim=-1) * 3
    q, k = (centre[label] + 0.15 * normal(n, 32, seed=s) for s in (22, 23))
    seen = pattern(sb.LSH(1, bucket=16, scheme=scheme).sample(32, generator(24)), q[None, None], k[None, None])[0, 0]
    together = label[:, None] == label
    recall, density = seen[together].double().mean(), seen.double().mean()
    shuffled = seen[torch.randperm(n, generator=generator(25))][together].double().mean()
    # the measure itself: blind to who is whose, it gives the density; a cluster's 16 members move together, so they count as one draw
    assert abs(shuffled - density) < 5 * math.sqrt(density * clusters / int(together.sum()))
    assert density < 0.13 and recall > 2.5 * density, (recall, density)

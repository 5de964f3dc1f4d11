"""What a mask says: key padding, causality, or something that linear attention cannot honour."""

import pytest
import torch
from scatterbrain.integrations import masks
from scatterbrain.integrations.masks import read_mask

B, H, N = 2, 3, 7
KEYS = torch.ones(B, 1, 1, N, dtype=torch.bool)
KEYS[1, ..., 5:] = False
TRIL = torch.ones(N, N, dtype=torch.bool).tril()


def additive(mask, least=-torch.inf):
    return torch.zeros(mask.shape).masked_fill(~mask, least)


def read(mask, is_causal=False, n=N, m=N):
    return read_mask(mask, is_causal, B, H, n, m)


@pytest.mark.parametrize("form", [lambda m: m, additive, lambda m: additive(m, torch.finfo(torch.float32).min), lambda m: additive(m).half()])
@pytest.mark.parametrize(
    ("mask", "keys", "causal"),
    [
        (KEYS, KEYS, False),
        (KEYS.expand(B, H, N, N), KEYS, False),
        (TRIL, None, True),
        (TRIL[None, None].expand(B, 1, N, N), None, True),
        (KEYS & TRIL, KEYS, True),
        (torch.ones(N, N, dtype=torch.bool), None, False),
    ],
)
def test_padding_and_causality_are_read(mask, keys, causal, form):
    got = read(form(mask))
    assert got.refusal == "" and got.causal is causal
    assert (got.key_mask is None) == (keys is None)
    if keys is not None:
        assert torch.equal(got.key_mask, keys)


def test_no_mask_says_what_is_causal_says():
    assert read(None, True).causal and not read(None).causal


def test_left_padding_under_causality():
    keys = KEYS.flip(-1)
    got = read(keys & TRIL)
    assert got.causal and torch.equal(got.key_mask, keys)
    filled = (keys & TRIL).clone()
    filled[1, 0, :2] = True  # rows that would be empty: some code fills them, and in cross-attention they could mean it
    assert read(filled).refusal


def windowed(size):
    return TRIL & ~TRIL.tril(-size)


@pytest.mark.parametrize(
    ("mask", "word"),
    [
        (windowed(3), "other keys from some queries"),
        (torch.block_diag(torch.ones(3, 3), torch.ones(4, 4)).bool(), "other keys from some queries"),
        (TRIL.mT, "other keys from some queries"),
        (torch.randn(N, N), "bias"),
        (torch.zeros(N, N, dtype=torch.int64), "neither bool nor float"),
        (torch.ones(5, N, dtype=torch.bool), "broadcast"),
        (torch.stack([torch.ones(N, dtype=torch.bool)] * 2 + [torch.arange(N) > 2])[None, :, None], "between heads"),
    ],
)
def test_others_are_refused_by_name(mask, word):
    assert word in read(mask).refusal


def test_causality_over_more_keys_than_queries_is_not_guessed():
    longer = torch.ones(4, N, dtype=torch.bool).tril(N - 4)
    assert read(longer, n=4).refusal
    assert "is_causal" in read(TRIL, True).refusal


def test_long_masks_are_read_in_slices(monkeypatch):
    monkeypatch.setattr(masks, "SLICE", 2 * N * B)
    assert read(KEYS & TRIL).causal
    wrong = (KEYS & TRIL).clone()
    wrong[0, 0, 6, 0] = False
    assert read(wrong).refusal
    assert read(windowed(6)).refusal

"""What a mask says, where linear attention can honour it: which keys are hidden from everyone, and whether the future is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SLICE = 2**24  # entries of a mask looked at together


@dataclass(frozen=True)
class Reading:
    """key_mask (B, 1, 1, M) bool, True where visible, or None; causal counts rows from the first key on, as SDPA does.
    `refusal` says why the mask is neither, and is empty where it is."""

    key_mask: Tensor | None
    causal: bool
    refusal: str = ""


def read_mask(mask: Tensor | None, is_causal: bool, batch: int, heads: int, n: int, m: int) -> Reading:
    """A mask as scaled_dot_product_attention takes it: bool, True where visible, or float to be added."""
    if mask is None:
        return Reading(None, is_causal)
    if is_causal:
        return Reading(None, False, "a mask came together with is_causal=True")
    full = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape)) if mask.dim() <= 4 else mask
    fits = full.dim() == 4 and all(s in (1, t) for s, t in zip(full.shape, (batch, heads, n, m), strict=True))
    if not fits:
        return Reading(None, False, f"a mask {tuple(mask.shape)} does not broadcast to {(batch, heads, n, m)}")
    if mask.dtype != torch.bool:
        if not mask.is_floating_point():
            return Reading(None, False, f"a mask of {mask.dtype} is neither bool nor float")
        if not _says_all_or_nothing(full):
            return Reading(None, False, "a bias is added to the logits")
    return _structure(full, batch, n, m)


def _says_all_or_nothing(mask: Tensor) -> bool:
    """Whether an additive mask only hides: 0, or the least number there is."""
    return all(bool((_hidden(part) | (part == 0)).all()) for part in _slices(mask))


def _hidden(mask: Tensor) -> Tensor:
    return mask <= torch.finfo(mask.dtype).min / 2


def _slices(mask: Tensor) -> tuple[Tensor, ...]:
    rows = max(1, SLICE * mask.shape[2] // max(1, mask.numel()))
    return mask.split(rows, 2)


def _visible(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else ~_hidden(mask)


def _structure(mask: Tensor, batch: int, n: int, m: int) -> Reading:
    """The last row of a causal mask over as many keys as queries shows which keys are hidden from everyone."""
    last = _visible(mask[:, :, -1:])
    if last.shape[1] > 1 and not bool((last == last[:, :1]).all()):
        return Reading(None, False, "the mask differs between heads")
    last = last[:, :1].expand(last.shape[0], 1, 1, m)
    keys = None if bool(last.all()) else last.expand(batch, 1, 1, m)
    if _rows_are(mask, last, n, m, causal=False):
        return Reading(keys, False)
    if n == m and _rows_are(mask, last, n, m, causal=True):
        return Reading(keys, True)
    return Reading(None, False, "the mask hides other keys from some queries than from others")


def _rows_are(mask: Tensor, last: Tensor, n: int, m: int, causal: bool) -> bool:
    """Whether every row shows what `last` shows, up to its own place where causal."""
    if mask.shape[2] == 1 and n > 1 and causal:
        return False
    start, column = 0, torch.arange(m, device=mask.device)
    for part in _slices(mask):
        row = torch.arange(start, start + part.shape[2], device=mask.device)
        start += part.shape[2]
        expected = last & (column <= row[:, None]) if causal else last
        if bool((_visible(part) != expected).any()):
            return False
    return True

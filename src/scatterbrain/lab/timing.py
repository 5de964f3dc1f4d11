"""One call, timed; and contenders timed in turn, so that a disturbance hits all alike."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from .contenders import Forward

Call = Callable[[], float]


def call(forward: Forward, tensors: tuple[Tensor, ...], backward: bool) -> Call:
    """Runs it once and returns the seconds it took."""
    if not backward:
        return lambda: _forward(forward, tensors)
    leaves = [t.detach().requires_grad_() for t in tensors]
    return lambda: _both(forward, leaves)


def _forward(forward: Forward, tensors: tuple[Tensor, ...]) -> float:
    with torch.no_grad():
        start = time.perf_counter()
        forward(*tensors)
        return time.perf_counter() - start


def _both(forward: Forward, leaves: list[Tensor]) -> float:
    start = time.perf_counter()
    out = forward(*leaves)
    # Ones of their own, since the expanded gradient of sum() is a special case to some kernels. Shared keys leave k unused.
    torch.autograd.grad(out, leaves, torch.ones_like(out), allow_unused=True)
    return time.perf_counter() - start


def rounds(calls: dict[str, Call], counts: dict[str, int], repeats: int, heard: Callable[[str, float], None]) -> None:
    """One call of each in turn, until each has been heard `repeats` times; `counts` have been heard already."""
    for turn in range(repeats):
        for name, one in calls.items():
            if counts[name] <= turn:
                heard(name, one())

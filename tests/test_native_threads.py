"""Threads: their number changes nothing beyond rounding, callers do not disturb each other, and a forked child works."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import scatterbrain as sb
import torch

from cases import NATIVE, assert_close, grads, is_causal_ok, name, normal, parts, run, some_keys

SINGLE = torch.float32
every_engine = pytest.mark.parametrize("impl", NATIVE)
SOME = [
    (None, "performer"),
    (None, "means"),
    ("window", "performer"),
    ("smyrf", "performer"),
    ("three-overlapping", "performer"),
    ("global", "elu"),
    ("columns-window-routed", "means"),
    ("routed-keys", None),
    ("columns-heavy", None),
]


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def inputs_of(heads, n, d=16, e=9, seed=0, batch=1):
    return [normal(batch, heads, n, w, seed=seed + x, dtype=SINGLE) for x, w in enumerate((d, d, e))]


def forward_and_backward(pair, q, k, v, mask, causal, impl):
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    out = sb.attention(*inputs, mask, is_causal=causal, impl=impl, **parts(pair))
    return out.detach(), *grads(out, inputs)


@every_engine
@pytest.mark.parametrize("pair", SOME, ids=name)
def test_the_number_of_threads_does_not_matter(pair, impl, threads):
    """One head's queries are cut into pieces for several threads; heads are shared among them."""
    for heads, n in ((1, 1100), (3, 420)):
        q, k, v = inputs_of(heads, n)
        for causal in (False, True) if is_causal_ok(pair) else (False,):
            threads(1)
            one = forward_and_backward(pair, q, k, v, some_keys(1, n), causal, impl)
            for count in (2, 3, 4):
                threads(count)
                for a, b in zip(forward_and_backward(pair, q, k, v, some_keys(1, n), causal, impl), one, strict=True):
                    assert_close(a, b, SINGLE, 10, what=f"{name(pair)} heads={heads} causal={causal} threads={count}")


@every_engine
@pytest.mark.parametrize("causal", [False, True])
def test_one_head_in_pieces_equals_the_reference(impl, causal, threads):
    threads(4)
    q, k, v = inputs_of(1, 1100)
    for entries in (40, 200):
        run(sb.presets.default(entries, length=1100, causal=causal), q, k, v, causal=causal, impl=impl)
    run(("window", "performer"), q, k, v, causal=causal, impl=impl)


@every_engine
@pytest.mark.parametrize("count", [1, 2])
def test_several_callers_at_once(impl, count, threads):
    threads(count)
    calls = [(pair, inputs_of(2, 150 + 40 * x, seed=x), causal) for x, pair in enumerate(SOME) for causal in (False, True)[: 1 + is_causal_ok(pair)]]

    def call(job):
        pair, tensors, causal = job
        return forward_and_backward(pair, *tensors, None, causal, impl)

    alone = [call(job) for job in calls]
    with ThreadPoolExecutor(6) as pool:
        for together in pool.map(call, calls * 4):
            pair = calls[0]
            for a, b in zip(together, alone[0], strict=True):
                assert_close(a, b, SINGLE, 10, what=str(pair[0]))
            calls, alone = calls[1:] + calls[:1], alone[1:] + alone[:1]


FORK = """
import os, sys, torch
import scatterbrain as sb
torch.set_num_threads(2)
impl, methods = sys.argv[1], [
    {"budget": 1 / 4}, {"support": sb.Window(30), "low_rank": sb.Performer(16)}, {"support": sb.LSH(1, bucket=32), "low_rank": sb.Performer(16)}]
tensors = [torch.randn(1, heads, 900, 16, requires_grad=True) for heads in (1, 2) for _ in range(3)]
def results():
    out = []
    for at in (0, 3):
        for method in methods:
            y = sb.attention(*tensors[at : at + 3], impl=impl, **method)
            out += [y.detach(), *torch.autograd.grad((y * y).sum(), tensors[at : at + 3])]
    return out
def same(a, b):
    return all(torch.allclose(x, y, atol=1e-4, rtol=1e-4) for x, y in zip(a, b, strict=True))
expected = results()
codes = []
for count in (1, 2, 3):
    child = os.fork()
    if child == 0:
        torch.set_num_threads(count)
        right = same(results(), expected) and same(results(), expected)
        grandchild = os.fork()
        if grandchild == 0:
            os._exit(0 if same(results(), expected) else 4)
        right &= os.waitpid(grandchild, 0)[1] == 0
        sys.exit(0 if right else 3)
    codes.append(os.waitpid(child, 0)[1])
print(codes, same(results(), expected))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@every_engine
def test_a_forked_child_computes_and_leaves(impl):
    done = subprocess.run([sys.executable, "-c", FORK, impl], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["[0,", "0,", "0]", "True"]

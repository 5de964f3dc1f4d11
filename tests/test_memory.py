"""Peak memory of forward + backward in a fresh process, B=1 H=8 d=64: below 1.5 GiB at 16,384, at most 2.2 times that at 32,768."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, sys, torch
import scatterbrain as sb
torch.set_num_threads(2)
METHODS = {
    "default": lambda n: {"budget": 1 / 8},
    "default-causal": lambda n: {"budget": 1 / 8, "is_causal": True},
    "first-example": lambda n: {"support": sb.LSH(rounds=4, bucket=64), "low_rank": sb.Performer(128)},
    "window-performer": lambda n: sb.presets.scatterbrain(n // 8, sparse="local"),
}
def status(field):
    line = next(x for x in open("/proc/self/status") if x.startswith(field))
    return int(line.split()[1]) * 1024
def inputs(n):
    return [torch.randn(1, 8, n, 64, requires_grad=True) for _ in range(3)]
def run(n, q, k, v):
    sb.attention(q, k, v, **METHODS[sys.argv[1]](n)).sum().backward()
run(512, *inputs(512))
n = int(sys.argv[2])
x = inputs(n)
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
run(n, *x)
print(json.dumps(status("VmHWM") - before))
"""


def peak(method, n):
    done = subprocess.run([sys.executable, "-c", SCRIPT, method, str(n)], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc to reset the peak of resident memory")
@pytest.mark.parametrize("method", ["default", "first-example", "window-performer"])
def test_peak_memory_is_linear(method):
    short = peak(method, 16384)
    assert short < 1.5 * 2**30, f"{short / 2**30:.2f} GiB"
    long = peak(method, 32768)
    assert long <= 2.2 * short, f"{short / 2**30:.2f} -> {long / 2**30:.2f} GiB"

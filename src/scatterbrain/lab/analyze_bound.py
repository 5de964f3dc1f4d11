"""Every method against its lower bound, Robust PCA, on the same matrices: error within what factor, at what ratio of time."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import analysis, functional, presets
from ..errors import require, require_int
from .attention_data import Heads, load
from .measure import fused_softmax
from .plates import COLOURS, Panel, Plate, Series
from .study import Cell, Study, option, table

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
PCA, BEST = "Robust PCA, cut to the budget", "best mix (alternating projections)"
REPEATS = 3
GROWTH, GAP = 1.2, 0.05  # the last percents of the gap move the error at a budget by less than 1% and take ten times as long


@dataclass(frozen=True, kw_only=True)
class BoundConfig:
    data: tuple[str, ...] = option(("minilm", "whisper", "process1"), "minilm, whisper, smollm2, process1, or files of captured attention")
    heads: int = option(5, "heads of each source, spread evenly over entropy")
    scales: tuple[float, ...] = option((1.0, 0.1), "logits are multiplied by these: below 1 attention is more diffuse")
    budget: float = option(1 / 8, "share of the entries that a method may spend")
    length: int = option(512, "tokens; frames of Whisper")
    out: str = option("records", "folder for the record and the figures")

    def __post_init__(self) -> None:
        require_int(self.heads, "heads")
        require(bool(self.data), "data", "name at least one source", self.data, "pass --data minilm")
        analysis.check_budget(self.budget, self.length)
        positive = bool(self.scales) and all(0 < s < float("inf") for s in self.scales)
        require(positive, "scales", "be positive and finite", self.scales, "pass 1 for the model's own logits")


def methods(entries: int, causal: bool, budget: float) -> dict[str, dict[str, Any]]:
    """Random parts at their usual seed; the published pair also at the sparse share that suits diffuse attention."""
    p = presets
    both = {} if causal else {"SMYRF": p.smyrf(entries), "naive sum": p.naive_sum(entries)}
    sparse = "reformer" if causal else "smyrf"
    return {
        **both,
        "Reformer": p.reformer(entries),
        "Performer": p.performer(entries),
        "Scatterbrain, published 3:1": p.scatterbrain(entries, sparse=sparse),
        "Scatterbrain, published 1:3": p.scatterbrain(entries, sparse=sparse, sparse_share=0.25),
        "Scatterbrain, window + Performer": p.scatterbrain(entries, sparse="local"),
        "Scatterbrain, the default": {"budget": budget},
    }


def cells(config: BoundConfig) -> Iterator[Cell]:
    for name in config.data:
        heads = load(name, length=config.length)
        picks = chosen(heads, config.heads)
        for scale in config.scales:
            name = heads.name if scale == 1 else f"{heads.name}, logits x {scale:g}"
            scaled = dataclasses.replace(heads, name=name, scale=heads.scale * scale)
            for layer, head in picks:
                yield f"{name}, layer {layer}, head {head}", functools.partial(measure, scaled, layer, head, config.budget)


def chosen(heads: Heads, count: int) -> list[tuple[int, int]]:
    """Heads at even ranks of entropy, most peaked first."""
    entropy = torch.stack([analysis.entropy(heads.attention(layer)) for layer in range(heads.shape[0])])
    order = entropy.flatten().argsort()
    count = min(count, len(order))
    picks = [int(order[round(i * (len(order) - 1) / max(1, count - 1))]) for i in range(count)]
    return [divmod(i, heads.shape[1]) for i in dict.fromkeys(picks)]


def timed(work: Callable[[], Any], repeats: int) -> tuple[Any, float]:
    """The last result and the least of the times."""
    best, found = float("inf"), None
    for _ in range(repeats):
        begun = time.perf_counter()
        found = work()
        best = min(best, time.perf_counter() - begun)
    return found, best


def measure(heads: Heads, layer: int, head: int, budget: float) -> dict[str, Any]:
    """Errors at equal entries; a method's time is a forward pass, an oracle's is its decomposition of the known matrix."""
    matrix = analysis.check_attention(heads.attention(layer, head))
    entries = analysis.check_budget(budget, heads.visible)
    pursuit, seconds = timed(lambda: analysis.robust_pca(matrix.double(), growths=(GROWTH,), gap=GAP), 1)
    cut = analysis.at_budget(pursuit, matrix.double(), entries)
    mixed, mixing = timed(lambda: analysis.mixes(matrix, entries, SHARES), 1)
    rows = {PCA: (float(cut.error), seconds), BEST: (float(mixed.best), mixing)}
    q, k = heads.pair(layer, head)
    value = torch.randn((*q.shape[:2], k.shape[2], q.shape[3]), generator=torch.Generator().manual_seed(0))
    for name, method in methods(round(entries), heads.causal, budget).items():
        got = analysis.weights(q, k, heads.scale, heads.causal, **method)[0, 0]
        _, taken = timed(functools.partial(forward, q, k, value, heads, method), REPEATS + 1)
        rows[name] = (float(analysis.relative_error(got, matrix)), taken)
    softmax = timed(lambda: fused_softmax(q, k, value, heads.scale), REPEATS + 1)[1]
    return {
        "data": heads.name,
        "layer": layer,
        "head": head,
        "keys": heads.shape[3],
        "entropy": float(analysis.entropy(matrix)),
        "errors": {name: row[0] for name, row in rows.items()},
        "seconds": {name: row[1] for name, row in rows.items()} | {"softmax": softmax},
        "pursuit": {
            "rank": int(pursuit.rank),
            "density": float(pursuit.density),
            "iterations": int(pursuit.iterations),
            "gap": float(pursuit.gap),
            "converged": bool(pursuit.converged),
        },
    }


def forward(q: Tensor, k: Tensor, value: Tensor, heads: Heads, method: dict[str, Any]) -> Any:
    return functional.attention(q, k, value, is_causal=heads.causal, scale=heads.scale, **method)


def summarize(config: dict[str, Any], cells: dict[str, Any]) -> dict[str, Any]:
    names = dict.fromkeys(cell["data"] for cell in cells.values())
    return {name: _summary([cell for cell in cells.values() if cell["data"] == name]) for name in names}


def _summary(cells: list[dict[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name in cells[0]["errors"]:
        over = [c["errors"][name] / c["errors"][PCA] for c in cells]
        faster = [c["seconds"][PCA] / c["seconds"][name] for c in cells]
        out[name] = {
            "error": statistics.mean(c["errors"][name] for c in cells),
            "seconds": statistics.mean(c["seconds"][name] for c in cells),
            "error_over_pca": statistics.median(over),
            "least_over_pca": min(over),
            "within_20_percent": sum(r <= 1.2 for r in over) / len(over),
            "faster_than_pca": statistics.median(faster),
        }
    for name in ("SMYRF", "Performer"):
        if name in out:
            ratios = [c["errors"][name] / min(v for n, v in c["errors"].items() if "published" in n) for c in cells]
            out[name]["error_over_published"] = statistics.median(ratios)
            out[name]["most_over_published"] = max(ratios)
    return out


def text(record: dict[str, Any]) -> list[str]:
    out = []
    for data, found in record["summary"].items():
        count = sum(c["data"] == data for c in record["cells"].values())
        rows = [(n, r["error"], r["error_over_pca"], r["within_20_percent"], 1e3 * r["seconds"], r["faster_than_pca"]) for n, r in found.items()]
        headings = ("method", "error", "over PCA", "within 20%", "ms", "times faster than PCA")
        out += [f"{data}: {count} heads at {record['config']['budget']:g} of the entries (errors and times: means; ratios: medians)"]
        out += [*table(headings, rows), ""]
    done = [c["pursuit"]["converged"] for c in record["cells"].values()]
    return [*out, f"Robust PCA converged (residual 1e-7, duality gap {GAP:g}) on {sum(done)} of {len(done)} matrices"]


def plate(record: dict[str, Any]) -> Plate:
    panels = []
    for data, found in record["summary"].items():
        dots = tuple(
            Series(name=n, x=[1e3 * r["seconds"]], y=[r["error"]], kind="dots", colour="#22282e" if n == PCA else COLOURS[i])
            for i, (n, r) in enumerate(found.items())
        )
        panels.append(Panel(title=data, x="time of a head, ms", y="relative error", series=dots, log_x=True, log_y=True))
    for data in record["summary"]:
        some = sorted((c for c in record["cells"].values() if c["data"] == data), key=lambda c: c["entropy"])
        names = [PCA, BEST, "SMYRF", "Performer", "Scatterbrain, published 3:1", "Scatterbrain, published 1:3", "Scatterbrain, the default"]
        curves = tuple(Series(name=n, x=[c["entropy"] for c in some], y=[c["errors"][n] for c in some]) for n in names if n in some[0]["errors"])
        panels.append(Panel(title=f"{data}: error against entropy", x="entropy, nats", y="relative error", series=curves, log_y=True))
    caption = (
        f"The same matrices, {record['config']['budget']:g} of the entries for all. First: mean error against the time of one head on this machine "
        "(a method: a forward pass; an oracle: its decomposition of the known matrix). Then: head by head."
    )
    return Plate(title="Accuracy against cost, beside Robust PCA", caption=caption, panels=tuple(panels), columns=3)


STUDY = Study(
    name="bound",
    title="Scatterbrain and Robust PCA",
    about="every method's error and time beside Robust PCA's, on the same matrices",
    config=BoundConfig,
    cells=cells,
    summarize=summarize,
    text=text,
    plate=plate,
)

"""Pictures of attention taken apart, and what each branch contributes to a row."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from .. import analysis, presets
from ..errors import require, require_int
from .analyze_bound import chosen
from .attention_data import Heads, load
from .plates import BOTH, LOW_RANK, Heat, Panel, Plate, Series
from .study import Cell, Study, option, table

SIDE = 40
PARTS = ("exact", "sparse part", "low-rank part", "sum", "error")
METHODS = ("default", "scatterbrain", "local")
NAMES = {"default": "the default", "scatterbrain": "SMYRF + Performer, 3:1", "local": "window + Performer, 3:1"}


@dataclass(frozen=True, kw_only=True)
class PictureConfig:
    data: str = option("minilm", "minilm, whisper, smollm2, process1, or a file of captured attention")
    layer: int = option(-1, "one head's layer; -1 shows heads spread over entropy")
    head: int = option(-1, "one head; -1 shows heads spread over entropy")
    heads: int = option(3, "how many heads, where none is named")
    methods: tuple[str, ...] = option(("default", "scatterbrain"), "what is taken apart", METHODS)
    budget: float = option(1 / 8, "share of the entries that a method may spend")
    length: int = option(512, "tokens; frames of Whisper")
    out: str = option("records", "folder for the record and the figures")

    def __post_init__(self) -> None:
        require_int(self.heads, "heads")
        require((self.layer < 0) == (self.head < 0), "layer and head", "come together", (self.layer, self.head), "pass both or none")
        require(bool(self.methods) and set(self.methods) <= set(METHODS), "methods", f"be some of {', '.join(METHODS)}", self.methods, "pick one")
        analysis.check_budget(self.budget, self.length)


def method(name: str, entries: int, heads: Heads) -> dict[str, Any]:
    if name == "default":
        return presets.default(entries, length=heads.shape[3], causal=heads.causal)
    return presets.scatterbrain(entries, sparse="local" if name == "local" else "reformer" if heads.causal else "smyrf")


def cells(config: PictureConfig) -> Iterator[Cell]:
    heads = load(config.data, length=config.length)
    layers, count = heads.shape[:2]
    picks = chosen(heads, config.heads)
    if config.layer >= 0:
        known = config.layer < layers and config.head < count
        require(known, "layer and head", f"be below {layers} and {count}", (config.layer, config.head), "pick another")
        picks = [(config.layer, config.head)]
    for layer, head in picks:
        for name in config.methods:
            yield f"picture, layer {layer}, head {head}, {name}", functools.partial(picture, heads, layer, head, name, config.budget)
    for layer in range(layers):
        for name in config.methods:
            yield f"branches, layer {layer}, {name}", functools.partial(contributions, heads, layer, name, config.budget)


def apart(heads: Heads, layer: int, head: int | slice, name: str, budget: float) -> analysis.Branches:
    q, k = heads.pair(layer, head)
    entries = round(analysis.check_budget(budget, heads.visible))
    return analysis.branches(q, k, heads.scale, heads.causal, **method(name, entries, heads))


def picture(heads: Heads, layer: int, head: int, name: str, budget: float) -> dict[str, Any]:
    b = apart(heads, layer, head, name, budget)
    saved = {part: small(t[0, 0]) for part, t in zip(PARTS, (b.exact, b.sparse, b.low_rank), strict=False)}
    return {"kind": "picture", "layer": layer, "head": head, "method": name, "keys": heads.shape[3], "error": float(b.error),
            "entropy": float(analysis.entropy(b.exact)), "parts": saved}  # fmt: skip


def small(matrix: Tensor) -> list[list[float]]:
    """Means over blocks, to three digits."""
    side = min(SIDE, *matrix.shape)
    pooled = F.adaptive_avg_pool2d(matrix[None, None].float(), side)[0, 0]
    return [[float(f"{v:.3g}") for v in row] for row in pooled.tolist()]


def shown(parts: dict[str, Any], part: str) -> list[list[float]]:
    """Sum and error follow from what is saved."""
    if part in parts:
        saved: list[list[float]] = parts[part]
        return saved
    exact, sparse, low = (parts[name] for name in PARTS[:3])
    less = 1.0 if part == "error" else 0.0
    return [[s + r - less * e for e, s, r in zip(*rows, strict=True)] for rows in zip(exact, sparse, low, strict=True)]


def contributions(heads: Heads, layer: int, name: str, budget: float) -> dict[str, Any]:
    """Of every head of a layer: the weight of a row that the low-rank branch carries, and what it ought to carry."""
    out: dict[str, Any] = {"kind": "branches", "layer": layer, "method": name, "carried": [], "due": [], "entropy": [], "error": []}
    for head in range(heads.shape[1]):
        b = apart(heads, layer, head, name, budget)
        values = (b.carried.mean(), b.due.mean(), analysis.entropy(b.exact).mean(), b.error.mean())
        for key, value in zip(("carried", "due", "entropy", "error"), values, strict=True):
            out[key].append(float(value))
    return out


def summarize(config: dict[str, Any], cells: dict[str, Any]) -> dict[str, Any]:
    out = {}
    for name in config["methods"]:
        some = [c for c in cells.values() if c["kind"] == "branches" and c["method"] == name]
        columns = {k: [v for c in some for v in c[k]] for k in ("carried", "due", "error")}
        out[name] = {k: statistics.mean(v) for k, v in columns.items()} | {
            "bypassed": sum(v < 0.01 for v in columns["carried"]) / len(columns["carried"]),
            "heads": len(columns["carried"]),
        }
    return out


def text(record: dict[str, Any]) -> list[str]:
    rows = [(NAMES[n], r["heads"], r["error"], r["carried"], r["due"], r["bypassed"]) for n, r in record["summary"].items()]
    headings = ("method", "heads", "error", "low-rank carries", "ought to carry", "bypassed")
    return [f"{record['config']['data']}: weight of a row in the low-rank branch, mean over rows and heads", *table(headings, rows)]


def plate(record: dict[str, Any]) -> Plate:
    panels = []
    for c in (c for c in record["cells"].values() if c["kind"] == "picture"):
        keys = c["keys"]
        for part in PARTS:
            name = f"layer {c['layer']}, head {c['head']}: {part}" if part == "exact" else part
            title = (
                f"{name} (entropy {c['entropy']:.1f})" if part == "exact" else f"{NAMES[c['method']]}: {c['error']:.2f}" if part == "error" else name
            )
            z = shown(c["parts"], part)
            most = max(abs(v) for row in z for v in row) or 1.0
            heat = (
                Heat(z=z, low=-most, high=most, signed=True)
                if part == "error"
                else Heat(z=z, low=1e-2 / keys, high=max(2 / keys, min(1.0, 50 / keys)), log=True)
            )
            panels.append(Panel(title=title, heat=heat))
    for name in record["config"]["methods"]:
        some = [c for c in record["cells"].values() if c["kind"] == "branches" and c["method"] == name]
        carried, due, entropy = ([v for c in some for v in c[k]] for k in ("carried", "due", "entropy"))
        dots = Series(name="heads", x=due, y=carried, kind="dots", colour=BOTH)
        line = Series(name="equal", x=[0, 1], y=[0, 1], kind="rule", colour="#22282e")
        panels.append(Panel(title=f"{NAMES[name]}: low-rank weight", x="exact attention off the support", y="low-rank branch", series=(dots, line)))
        dots = Series(name="", x=entropy, y=carried, kind="dots", colour=LOW_RANK)
        panels.append(Panel(title="against entropy", x="entropy, nats", y="low-rank branch", series=(dots,)))
    caption = (
        "Each row of pictures is a head and a method: exact attention, its two branches, their sum, and the error (red: too much; "
        "the number: relative error). Log colours from 0.01 / M; means over blocks. "
        "Below: the weight of a row that the low-rank branch carries, against what it ought to."
    )
    return Plate(title=f"Attention taken apart: {record['config']['data']}", caption=caption, panels=tuple(panels), columns=5, shrink=0.62)


STUDY = Study(
    name="picture",
    title="Pictures of attention",
    about="exact attention, its sparse and low-rank parts, their sum and error; what each branch carries",
    config=PictureConfig,
    cells=cells,
    summarize=summarize,
    text=text,
    plate=plate,
)

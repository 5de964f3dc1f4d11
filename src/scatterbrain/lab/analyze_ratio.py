"""How to divide a budget between sparse and low-rank: the error at each share, and where the paper's 3:1 is best."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .. import analysis, presets
from ..errors import require, require_int
from .analyze_bound import chosen
from .attention_data import Heads, load
from .plates import BOTH, LOW_RANK, SPARSE, Panel, Plate, Series
from .study import Cell, Study, option, table

SHARES = tuple(i / 8 for i in range(9))
KINDS = {"oracle": ("best mix", BOTH), "published": ("SMYRF + Performer", SPARSE), "local": ("window + Performer", LOW_RANK)}


@dataclass(frozen=True, kw_only=True)
class RatioConfig:
    data: tuple[str, ...] = option(("minilm", "whisper", "process1"), "minilm, whisper, smollm2, process1, or files of captured attention")
    heads: int = option(12, "heads of each source, spread evenly over entropy")
    budget: float = option(1 / 8, "share of the entries")
    length: int = option(512, "tokens; frames of Whisper")
    seeds: int = option(3, "draws of the random parts; a head's error is their median")
    out: str = option("records", "folder for the record and the figures")

    def __post_init__(self) -> None:
        require_int(self.heads, "heads")
        require_int(self.seeds, "seeds")
        require(bool(self.data), "data", "name at least one source", self.data, "pass --data minilm")
        analysis.check_budget(self.budget, self.length)


def cells(config: RatioConfig) -> Iterator[Cell]:
    for name in config.data:
        heads = load(name, length=config.length)
        for layer, head in chosen(heads, config.heads):
            yield f"{heads.name}, layer {layer}, head {head}", functools.partial(measure, heads, layer, head, config)


def method(kind: str, entries: int, share: float, seed: int, causal: bool) -> dict[str, Any]:
    sparse = "local" if kind == "local" else "reformer" if causal else "smyrf"
    if share == 0:
        return presets.performer(entries, seed=seed)
    if share == 1:
        if sparse == "local":
            return presets.local(entries)
        return presets.reformer(entries) if sparse == "reformer" else presets.smyrf(entries, rounds=1, seed=seed)
    return presets.scatterbrain(entries, sparse=sparse, sparse_share=share, seed=seed)


def measure(heads: Heads, layer: int, head: int, config: RatioConfig) -> dict[str, Any]:
    matrix = analysis.check_attention(heads.attention(layer, head))
    entries = analysis.check_budget(config.budget, heads.visible)
    q, k = heads.pair(layer, head)
    errors: dict[str, list[float]] = {"oracle": analysis.mixes(matrix, entries, SHARES).errors.tolist()}
    for kind in ("published", "local"):
        errors[kind] = []
        for share in SHARES:
            draws = [method(kind, round(entries), share, seed, heads.causal) for seed in range(config.seeds)]
            got = [analysis.weights(q, k, heads.scale, heads.causal, **draw)[0, 0] for draw in draws]
            errors[kind].append(statistics.median(float(analysis.relative_error(g, matrix)) for g in got))
    return {"data": heads.name, "layer": layer, "head": head, "entropy": float(analysis.entropy(matrix)), "errors": errors}


def summarize(config: dict[str, Any], cells: dict[str, Any]) -> dict[str, Any]:
    out = {}
    for data in dict.fromkeys(c["data"] for c in cells.values()):
        some = [c for c in cells.values() if c["data"] == data]
        out[data] = {kind: _summary(some, kind) for kind in KINDS}
    return out


def _summary(cells: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    curves = [c["errors"][kind] for c in cells]
    best = [SHARES[min(range(len(SHARES)), key=curve.__getitem__)] for curve in curves]
    entropy = [c["entropy"] for c in cells]
    related = analysis.correlations(entropy, best)[0] if len(best) >= 3 and max(best) > min(best) else None
    three = SHARES.index(0.75)
    return {
        "mean": [statistics.mean(curve[i] for curve in curves) for i in range(len(SHARES))],
        "best_share": best,
        "best_at_3_to_1": best.count(0.75) / len(best),
        "within_5_percent_at_3_to_1": sum(curve[three] <= 1.05 * min(curve) for curve in curves) / len(best),
        "entropy_and_best_share": None if related is None else {"spearman": related.coefficient, "p": related.p_value},
    }


def text(record: dict[str, Any]) -> list[str]:
    out = []
    for data, found in record["summary"].items():
        out += [f"{data}: mean error at each sparse share; heads where 3:1 is best, or within 5% of it; Spearman of entropy and best share"]
        rows = []
        for kind, (name, _) in KINDS.items():
            r = found[kind]
            said = r["entropy_and_best_share"]
            rows.append((name, *r["mean"], r["best_at_3_to_1"], r["within_5_percent_at_3_to_1"], said["spearman"] if said else None))
        out += [*table(("", *(f"{s:g}" for s in SHARES), "3:1 best", "3:1 near", "entropy"), rows), ""]
    return out


def plate(record: dict[str, Any]) -> Plate:
    panels = []
    for data, found in record["summary"].items():
        curves = tuple(Series(name=name, x=list(SHARES), y=found[kind]["mean"], colour=shade) for kind, (name, shade) in KINDS.items())
        rule = Series(
            name="3:1",
            x=[0.75, 0.75],
            y=[min(min(found[k]["mean"]) for k in KINDS), max(max(found[k]["mean"]) for k in KINDS)],
            kind="rule",
            colour="#22282e",
        )
        panels.append(Panel(title=f"{data}: mean error", x="sparse share of the budget", y="relative error", series=(*curves, rule), log_y=True))
    for data, found in record["summary"].items():
        entropy = [c["entropy"] for c in record["cells"].values() if c["data"] == data]
        dots = tuple(
            Series(name=name, x=entropy, y=[s + shift for s in found[kind]["best_share"]], kind="dots", colour=shade)
            for shift, (kind, (name, shade)) in zip((0, 0.012, -0.012), KINDS.items(), strict=True)
        )
        panels.append(Panel(title=f"{data}: best share of each head", x="entropy, nats", y="sparse share", series=dots, y_range=(-0.05, 1.05)))
    caption = f"At {record['config']['budget']:g} of the entries. Left end: low-rank alone; right end: sparse alone; dashed: the paper's 3:1."
    return Plate(title="Sparse to low-rank: how to divide a budget", caption=caption, panels=tuple(panels), columns=len(record["summary"]))


STUDY = Study(
    name="ratio",
    title="Sparse to low-rank ratio",
    about="error against the sparse share of a budget, and where the paper's 3:1 is best",
    config=RatioConfig,
    cells=cells,
    summarize=summarize,
    text=text,
    plate=plate,
    needs=("scipy",),
)

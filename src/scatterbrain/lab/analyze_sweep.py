"""Error of every preset against budget, length and entropy, on the same matrices."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .. import analysis, presets
from ..errors import require, require_int
from .analyze_bound import chosen
from .attention_data import MODELS, Heads, load
from .plates import COLOURS, Panel, Plate, Series
from .study import Cell, Study, option, table

Make = Callable[[int, int, bool], dict[str, Any]]
LEAST = 8


def makers() -> dict[str, Make]:
    """Every preset of the core at so many entries a row; the linear Transformer has one size."""
    p = presets
    return {
        "top-k (oracle)": lambda e, n, c: {"support": _top_k(e), "low_rank": None},
        "reformer": lambda e, n, c: p.reformer(e),
        "smyrf": lambda e, n, c: p.smyrf(e),
        "local": lambda e, n, c: p.local(e),
        "sparse_transformer": lambda e, n, c: p.sparse_transformer(e, length=n),
        "longformer": lambda e, n, c: p.longformer(e, tokens=2),
        "bigbird": lambda e, n, c: p.bigbird(e, tokens=2),
        "routing_transformer": lambda e, n, c: p.routing_transformer(e, length=n),
        "performer": lambda e, n, c: p.performer(e),
        "linear_transformer": lambda e, n, c: p.linear_transformer(),
        "linformer": lambda e, n, c: p.linformer(e, length=n),
        "nystromformer": lambda e, n, c: p.nystromformer(e),
        "long_short": lambda e, n, c: p.long_short(e),
        "naive_sum": lambda e, n, c: p.naive_sum(e),
        "scatterbrain": lambda e, n, c: p.scatterbrain(e, sparse="reformer" if c else "smyrf"),
        "scatterbrain, local": lambda e, n, c: p.scatterbrain(e, sparse="local"),
        "default": lambda e, n, c: p.default(e, length=n, causal=c),
    }


def _top_k(entries: int) -> Any:
    from ..supports import TopK

    return TopK(entries)


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    data: tuple[str, ...] = option(("minilm", "whisper", "process1"), "minilm, whisper, smollm2, process1, or files of captured attention")
    heads: int = option(4, "heads of each source, spread evenly over entropy")
    budgets: tuple[float, ...] = option((1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2), "shares of the entries")
    lengths: tuple[int, ...] = option((128, 256, 512), "tokens, at the middle budget; the longest is used for the budgets")
    out: str = option("records", "folder for the record and the figures")

    def __post_init__(self) -> None:
        require_int(self.heads, "heads")
        require(bool(self.data), "data", "name at least one source", self.data, "pass --data minilm")
        for n in self.lengths:
            require_int(n, "lengths", least=16)
        for budget in self.budgets:
            analysis.check_budget(budget, max(self.lengths))

    @property
    def middle(self) -> float:
        return sorted(self.budgets)[len(self.budgets) // 2]


def cells(config: SweepConfig) -> Iterator[Cell]:
    longest = max(config.lengths)
    for name in config.data:
        made = name in (*MODELS, "process1")
        whole = load(name, length=longest)
        picks = chosen(whole, config.heads)
        spots = [(longest, b) for b in config.budgets]
        spots += [(n, config.middle) for n in config.lengths if n != longest] if made else []
        for n, budget in spots:
            heads = whole if n == longest else load(name, length=n)
            for method in makers():
                key = f"{heads.name}, {n} tokens, budget {budget:g}, {method}"
                yield key, functools.partial(measure, heads, picks, budget, method)


def measure(heads: Heads, picks: list[tuple[int, int]], budget: float, method: str) -> dict[str, Any]:
    """Errors of each chosen head; a method that cannot be causal, or so small, says why instead."""
    n, entries = heads.shape[3], max(1, round(budget * heads.visible))
    out: dict[str, Any] = {"data": heads.name, "n": n, "budget": budget, "method": method}
    if entries < LEAST and method != "linear_transformer":
        return {**out, "refused": f"{entries} entries a row are too few to divide"}
    errors, entropy = [], []
    for layer, head in picks:
        q, k = heads.pair(layer, head)
        exact = heads.attention(layer, head)
        try:
            got = analysis.weights(q, k, heads.scale, heads.causal, **makers()[method](entries, n, heads.causal))
        except ValueError as refusal:
            return {**out, "refused": str(refusal)}
        errors.append(float(analysis.relative_error(got[0, 0], exact)))
        entropy.append(float(analysis.entropy(exact)))
    return {**out, "errors": errors, "entropy": entropy}


def mean(cell: dict[str, Any] | None) -> float | None:
    return statistics.mean(cell["errors"]) if cell and "errors" in cell else None


def summarize(config: dict[str, Any], cells: dict[str, Any]) -> dict[str, Any]:
    longest = max(config["lengths"])
    by = {(c["data"], c["n"], c["budget"], c["method"]): c for c in cells.values()}
    out: dict[str, Any] = {}
    for data in dict.fromkeys(c["data"] for c in cells.values()):
        own = max((c["n"] for c in cells.values() if c["data"] == data), default=longest)
        lengths = sorted({c["n"] for c in cells.values() if c["data"] == data})
        middle = sorted(config["budgets"])[len(config["budgets"]) // 2]
        out[data] = {
            m: {
                "by_budget": [mean(by.get((data, own, b, m))) for b in config["budgets"]],
                "by_length": [mean(by.get((data, n, middle, m))) for n in lengths],
                "lengths": lengths,
            }
            for m in makers()
        }
    return out


def text(record: dict[str, Any]) -> list[str]:
    out, budgets = [], record["config"]["budgets"]
    for data, found in record["summary"].items():
        lengths = next(iter(found.values()))["lengths"]
        out += [f"{data}: mean relative error by budget (at {max(lengths)} tokens), and by length (at the middle budget)"]
        headings = ("preset", *(f"{b:g}" for b in budgets), *(f"n={n}" for n in lengths))
        out += [*table(headings, [(m, *f["by_budget"], *f["by_length"]) for m, f in found.items()]), ""]
    return out


def plate(record: dict[str, Any]) -> Plate:
    config, panels = record["config"], []
    budgets, middle = config["budgets"], sorted(config["budgets"])[len(config["budgets"]) // 2]
    shades = {m: COLOURS[i % len(COLOURS)] for i, m in enumerate(makers())}
    for data, found in record["summary"].items():
        curves = tuple(
            Series(name=m, x=budgets, y=f["by_budget"], colour=shades[m]) for m, f in found.items() if any(v is not None for v in f["by_budget"])
        )
        panels.append(
            Panel(title=f"{data}: error against budget", x="share of the entries", y="relative error", series=curves, log_x=True, log_y=True)
        )
        lengths = next(iter(found.values()))["lengths"]
        curves = tuple(
            Series(name=m, x=lengths, y=f["by_length"], colour=shades[m]) for m, f in found.items() if any(v is not None for v in f["by_length"])
        )
        panels.append(
            Panel(title=f"{data}: against length, budget {middle:g}", x="tokens", y="relative error", series=curves, log_x=True, log_y=True)
        )
        some = [c for c in record["cells"].values() if (c["data"], c["n"], c["budget"]) == (data, max(lengths), middle) and "errors" in c]
        curves = tuple(
            Series(name=c["method"], x=[x for x, _ in pairs], y=[y for _, y in pairs], colour=shades[c["method"]])
            for c in some
            for pairs in [sorted(zip(c["entropy"], c["errors"], strict=True))]
        )
        panels.append(Panel(title=f"{data}: head by head, budget {middle:g}", x="entropy, nats", y="relative error", series=curves, log_y=True))
    caption = "Relative Frobenius error to softmax attention, mean over the same heads for every preset; predicting zero gives 1."
    return Plate(title="Every preset against budget, length and entropy", caption=caption, panels=tuple(panels), columns=3)


STUDY = Study(
    name="sweep",
    title="Budget, length, entropy",
    about="error of every preset against budget, length and entropy, on the same heads",
    config=SweepConfig,
    cells=cells,
    summarize=summarize,
    text=text,
    plate=plate,
)

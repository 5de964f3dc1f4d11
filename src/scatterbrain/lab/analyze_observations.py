"""Observations 1 to 3 of the paper: sparse and low-rank errors against each other, against entropy, and both together."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from .. import analysis
from ..errors import require
from .attention_data import Heads, load
from .plates import BOTH, LOW_RANK, SPARSE, Panel, Plate, Series
from .study import Cell, Study, option, table

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, kw_only=True)
class ObservationsConfig:
    data: tuple[str, ...] = option(
        ("minilm", "whisper", "smollm2"), "minilm, whisper, smollm2, process1, or files of captured attention (one a checkpoint)"
    )
    budget: float = option(1 / 8, "share of the entries that an approximation may store; a rank costs two entries a row")
    length: int = option(512, "tokens of SmolLM2 and Process 1")
    documents: int = option(1, "texts for MiniLM")
    out: str = option("records", "folder for the record and the figures")

    def __post_init__(self) -> None:
        require(bool(self.data), "data", "name at least one source", self.data, "pass --data minilm")
        analysis.check_budget(self.budget, 1e9)


def cells(config: ObservationsConfig) -> Iterator[Cell]:
    for name in config.data:
        heads = load(name, length=config.length if name in ("smollm2", "process1") else None, documents=config.documents)
        for layer in range(heads.shape[0]):
            yield f"{heads.name}, layer {layer}", functools.partial(measure, heads, layer, config.budget)


def measure(heads: Heads, layer: int, budget: float) -> dict[str, Any]:
    """Every head of a layer: entropy, norm, and relative errors at one budget."""
    entries = analysis.check_budget(budget, heads.visible)
    found: dict[str, list[Any]] = {name: [] for name in ("entropy", "norm", "sparse", "low_rank", "low_rank_as_paper", "mixes", "best_share")}
    for head in range(heads.shape[1]):
        matrix = analysis.check_attention(heads.attention(layer, head))
        rank = analysis.rank_for(entries, matrix.shape)
        mixed = analysis.mixes(matrix, entries, SHARES)
        low, paper = analysis.low_rank_errors(matrix, [rank, int(entries)])
        values = (analysis.entropy(matrix), matrix.norm(), mixed.errors[-1], low, paper, mixed.errors, mixed.best_share)
        for name, value in zip(found, values, strict=True):
            found[name].append(value.tolist())
    return {"data": heads.name, "about": heads.about, "layer": layer, "entries": entries, "keys": heads.shape[3], **found}


def summarize(config: dict[str, Any], cells: dict[str, Any]) -> dict[str, Any]:
    names = dict.fromkeys(cell["data"] for cell in cells.values())
    return {name: _summary([cell for cell in cells.values() if cell["data"] == name]) for name in names}


def joined(cells: list[dict[str, Any]], name: str) -> list[Any]:
    return [value for cell in cells for value in cell[name]]


def _summary(cells: list[dict[str, Any]]) -> dict[str, Any]:
    sparse, low, paper, norm, mixes, entropy = (joined(cells, n) for n in ("sparse", "low_rank", "low_rank_as_paper", "norm", "mixes", "entropy"))
    best = [min(some) for some in mixes]
    alone = [min(s, r) for s, r in zip(sparse, low, strict=True)]
    saved = [1 - b / a if a > 0 else 0.0 for b, a in zip(best, alone, strict=True)]
    absolute = [[e * n for e, n in zip(some, norm, strict=True)] for some in (sparse, low)]
    pairs = {"relative": (sparse, low), "absolute": tuple(absolute), "relative, rank as in the paper": (sparse, paper)}
    return {
        "about": cells[0]["about"],
        "heads": len(sparse),
        "mean": {"sparse": statistics.mean(sparse), "low_rank": statistics.mean(low), "both": statistics.mean(best)},
        "correlation": {name: [asdict(c) for c in _correlations(*pair)] for name, pair in pairs.items()},
        "with_entropy": {
            "sparse": [asdict(c) for c in _correlations(entropy, sparse)],
            "low_rank": [asdict(c) for c in _correlations(entropy, low)],
        },
        "largest_reduction": max(saved),
        "median_reduction": statistics.median(saved),
        "largest_at_entropy": entropy[saved.index(max(saved))],
        "both_better": sum(b < a * (1 - 1e-6) for b, a in zip(best, alone, strict=True)) / len(best),
        "best_shares": {str(s): joined(cells, "best_share").count(s) for s in SHARES},
    }


def _correlations(x: list[float], y: list[float]) -> list[analysis.Correlation]:
    return analysis.correlations(x, y) if len(x) >= 3 and max(x) > min(x) and max(y) > min(y) else []


def text(record: dict[str, Any]) -> list[str]:
    lines = []
    for name, found in record["summary"].items():
        for kind, rows in found["correlation"].items():
            lines.append((f"{name}, {kind}", found["heads"], *(c for row in rows for c in (row["coefficient"], row["p_value"]))))
    out = ["Observation 1: sparse against low-rank error over heads (coefficient and p-value)"]
    out += table(("errors", "heads", "Spearman", "p", "Pearson", "p", "Kendall", "p"), [line for line in lines if len(line) == 8])
    out += ["", "Observations 2 and 3: mean relative error, and what the best mix saves over the better of the two"]
    rows = [
        (n, *f["mean"].values(), *(f["with_entropy"][k][0]["coefficient"] if f["with_entropy"][k] else None for k in ("sparse", "low_rank")),
         f["largest_reduction"], f["median_reduction"], f["both_better"])
        for n, f in record["summary"].items()
    ]  # fmt: skip
    headings = ("data", "sparse", "low-rank", "both", "entropy~sparse", "entropy~low-rank", "most saved", "median saved", "better in")
    return [*out, *table(headings, rows)]


def plate(record: dict[str, Any]) -> Plate:
    panels = []
    for name, found in record["summary"].items():
        some = [cell for cell in record["cells"].values() if cell["data"] == name]
        sparse, low, entropy, mixes = (joined(some, n) for n in ("sparse", "low_rank", "entropy", "mixes"))
        rho = found["correlation"]["relative"][0]["coefficient"] if found["correlation"]["relative"] else float("nan")
        dots = Series(name="", x=sparse, y=low, kind="dots", colour=BOTH)
        panels.append(Panel(title=f"{name}: {found['heads']} heads, Spearman {rho:.2f}", x="sparse error", y="low-rank error", series=(dots,)))
        curves = (("sparse", sparse, SPARSE), ("low-rank", low, LOW_RANK), ("sparse + low-rank", [min(m) for m in mixes], BOTH))
        panels.append(
            Panel(
                title=f"{name}: error against entropy",
                x="entropy of a row, mean, in nats",
                y="relative error",
                series=tuple(Series(name=n, x=entropy, y=y, kind="dots", colour=c) for n, y, c in curves),
            )
        )
    budget = record["config"]["budget"]
    caption = (
        f"Each dot is a head; relative Frobenius error of the best sparse (top-k a row), the best low-rank (SVD) and the best mix found, "
        f"each at {budget:g} of the entries."
    )
    return Plate(title="Observations 1 to 3: sparse and low-rank errors of real attention", caption=caption, panels=tuple(panels))


STUDY = Study(
    name="observations",
    title="Observations 1 to 3",
    about="sparse, low-rank and mixed oracles on real attention: their correlation, and their errors against entropy",
    config=ObservationsConfig,
    cells=cells,
    summarize=summarize,
    text=text,
    plate=plate,
    needs=("scipy",),
)

"""A plan: for every attention layer and head of one model, how it is computed. JSON, versioned; `convert` consumes it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from .. import __version__
from ..errors import require
from .recipe import Recipe

VERSION = 1
FILE = "scatterbrain_plan.json"
HEADS = ("num_heads", "num_attention_heads", "n_head", "n_heads", "heads")


@dataclass(frozen=True, kw_only=True)
class HeadPlan:
    """One head: its recipe, and what was measured of it (entropy, error, entries and so on)."""

    recipe: Recipe
    stats: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {"recipe": self.recipe.to_dict(), "stats": dict(self.stats)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> HeadPlan:
        return cls(recipe=Recipe.from_dict(data["recipe"]), stats=data["stats"])


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """One attention layer. Without heads it stays exact, for the reason in `note`."""

    kind: str
    heads: tuple[HeadPlan, ...] = ()
    causal: bool = False
    note: str = ""

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        return tuple(head.recipe for head in self.heads)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "causal": self.causal, "note": self.note, "heads": [head.to_dict() for head in self.heads]}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> LayerPlan:
        heads = tuple(HeadPlan.from_dict(head) for head in data["heads"])
        return cls(kind=data["kind"], heads=heads, causal=data["causal"], note=data["note"])


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What `calibrate` found. `budget` is the share asked for, or None where an error was; `about` says on what it was measured."""

    model: str
    layers: Mapping[str, LayerPlan]
    budget: float | None = None
    error: float | None = None
    policy: str = "measured"
    seed: int = 0
    about: Mapping[str, Any] = field(default_factory=dict)
    library: str = __version__

    def to_dict(self) -> dict[str, Any]:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        layers = {name: layer.to_dict() for name, layer in self.layers.items()}
        return {"type": "Plan", "version": VERSION, **fields, "about": dict(self.about), "layers": layers}

    @classmethod
    def from_dict(cls, data: dict[str, Any], source: str = "plan") -> Plan:
        require(isinstance(data, dict) and data.get("type") == "Plan", source, "be a plan", "something else", "pass a file that Plan.save wrote")
        require(data.get("version") == VERSION, source, f"be of version {VERSION}", data.get("version"), "calibrate again with this version")
        given = {name: value for name, value in data.items() if name not in ("type", "version")}
        unknown = sorted(set(given) - {f.name for f in dataclasses.fields(cls)})
        require(not unknown, source, "have only a plan's fields", unknown, "drop the others")
        layers = {name: LayerPlan.from_dict(layer) for name, layer in given.pop("layers").items()}
        return cls(layers=layers, **given)

    def save(self, path: str | Path) -> Path:
        """Write JSON to `path`, or into it as scatterbrain_plan.json where it is a folder, beside a saved model."""
        path = Path(path)
        path = path / FILE if path.is_dir() else path
        path.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        path = Path(path)
        path = path / FILE if path.is_dir() else path
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError:
            data = None
        return cls.from_dict(data, str(path))

    def check(self, model: nn.Module, found: Mapping[str, nn.Module]) -> None:
        """Refuse a model whose attention layers (`found`) are not the plan's, and say where."""
        modules, remedy = dict(model.named_modules()), f"calibrate this model; the plan was made for {self.model}"
        missing = [name for name in self.layers if name not in modules]
        require(not missing, "model", f"have the plan's {len(self.layers)} layers", f"none named {_some(missing)}", remedy)
        extra = [name for name in found if name not in self.layers]
        require(not extra, "plan", "name every attention layer of the model", f"nothing for {_some(extra)}", remedy)
        for name, layer in self.layers.items():
            kind, heads = type(modules[name]).__name__, head_count(modules[name])
            require(kind == layer.kind, f"layer {name!r}", f"be a {layer.kind}, as in the plan", kind, remedy)
            fits = heads is None or not layer.heads or heads == len(layer.heads)
            require(fits, f"layer {name!r}", f"have the plan's {len(layer.heads)} heads", heads, remedy)

    def summary(self) -> str:
        """A table, a line a layer and head."""
        total = sum(len(layer.heads) for layer in self.layers.values())
        aim = f"budget {self.budget:g}" if self.budget is not None else f"error {self.error:g}"
        said = [f"{self.model}: {total} heads in {len(self.layers)} layers; {aim}, policy {self.policy}, seed {self.seed}"]
        said += [f"{name}: {value}" for name, value in self.about.items()]
        lines: list[tuple[str, ...]] = [("layer", "head", "entropy", "error", "entries", "budget", "support", "map")]
        for name, layer in self.layers.items():
            if not layer.heads:
                lines.append((name, "all", "", "", "", "1", "exact", layer.note or "as planned"))
            lines += [(name, str(number), *_cells(head, layer.causal)) for number, head in enumerate(layer.heads)]
        means = [_mean([head.stats.get(key) for layer in self.layers.values() for head in layer.heads]) for key in ("entropy", "error", "entries")]
        lines.append(("mean", "", *map(number, means), "", "", ""))
        return "\n".join([*said, *aligned(lines, right=(1, 2, 3, 4, 5))])


def head_count(module: nn.Module) -> int | None:
    """Query heads, where the module or its configuration says so."""
    for owner in (module, getattr(module, "config", None)):
        for name in HEADS:
            count = getattr(owner, name, None)
            if isinstance(count, int) and not isinstance(count, bool):
                return count
    return None


def aligned(lines: list[tuple[str, ...]], right: tuple[int, ...] = ()) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(c.rjust(w) if n in right else c.ljust(w) for n, (c, w) in enumerate(zip(line, widths, strict=True))).rstrip() for line in lines]


def _cells(head: HeadPlan, causal: bool) -> tuple[str, ...]:
    stats, length = head.stats, int(head.stats.get("length") or 1024)
    method = head.recipe.method(length, causal)
    support, low_rank = (repr(part) if part is not None else "none" for part in (method["support"], method["low_rank"]))
    numbers = (number(stats.get(name)) for name in ("entropy", "error", "entries"))
    return (*numbers, f"{head.recipe.budget:.4g}", support, low_rank)


def number(value: Any) -> str:
    return "" if value is None or not math.isfinite(value) else f"{value:,.1f}" if value >= 100 else f"{value:.3f}"


def _mean(values: list[Any]) -> float | None:
    known = [float(v) for v in values if v is not None]
    return sum(known) / len(known) if known else None


def _some(names: list[str]) -> str:
    return ", ".join(map(repr, names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4 else "")

"""A study: cells that fill a record one by one, on disk after each, and a plate drawn from the record alone."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from ..errors import require
from . import machine
from .extras import need
from .plates import Plate

TYPE, FORMAT = "scatterbrain-analysis", 1
DIGITS = 6
PACKAGES = ("torch", "scipy", "numpy", "transformers")
Cell = tuple[str, Callable[[], dict[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class Study:
    """cells(config) names each piece of work; summarize(config, cells) and plate(record) read what they gave."""

    name: str
    title: str
    about: str
    config: type[Any]
    cells: Callable[[Any], Iterable[Cell]]
    summarize: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]
    text: Callable[[dict[str, Any]], list[str]]
    plate: Callable[[dict[str, Any]], Plate]
    needs: tuple[str, ...] = ()


@dataclass(kw_only=True)
class Record:
    path: Path
    header: dict[str, Any]
    cells: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    complete: bool = False
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        body = {"complete": self.complete, "seconds": round(self.seconds, 1), "summary": self.summary, "cells": self.cells}
        plain: dict[str, Any] = rounded({"type": TYPE, "version": FORMAT, **self.header, **body})
        return plain

    def save(self) -> None:
        """Written beside and renamed, so that a stop at any moment leaves a whole record."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.to_dict(), separators=(",", ":"), allow_nan=False) + "\n", encoding="utf-8")
        part.replace(self.path)


def rounded(value: Any) -> Any:
    """Six digits are more than any of these measurements has; no number stands for what is not finite."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): rounded(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(v) for v in value]
    return value


def load(path: Path) -> dict[str, Any]:
    """A saved record; anything else is refused in one line."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        found = None
    kind = found.get("type") if isinstance(found, dict) else "no JSON object"
    require(kind == TYPE, str(path), f"be a record of type {TYPE}", kind, "name a file that `scatterbrain analyze` wrote")
    version = found["version"]
    require(version == FORMAT, str(path), f"be a record of version {FORMAT}", f"version {version}", "run the study again with --fresh")
    return dict(found)


def run(study: Study, config: Any, command: str = "", fresh: bool = False) -> dict[str, Path]:
    """Fill what is missing, then draw; returns where things are."""
    tqdm = need("tqdm", "analysis").tqdm
    for module in ("matplotlib", *study.needs):
        need(module, "analysis")
    record = start(study, config, command, fresh)
    cells = list(study.cells(config))
    todo = [(key, work) for key, work in cells if key not in record.cells]
    if len(todo) < len(cells) and todo:
        print(f"{record.path} holds {len(cells) - len(todo)} of {len(cells)} parts; going on from there")
    fill(record, todo, tqdm)
    names = [key for key, _ in cells]
    record.cells = {key: record.cells[key] for key in names}
    record.summary, record.complete = study.summarize(record.header["config"], record.cells), True
    record.save()
    return finish(study, record)


def settings(config: Any) -> dict[str, Any]:
    plain: dict[str, Any] = rounded({f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name != "out"})
    return plain


def finished(study: Study, config: Any) -> bool:
    """Whether the folder holds a complete record with these settings."""
    path = Path(config.out) / f"{study.name}.json"
    if not path.exists():
        return False
    old = load(path)
    return bool(old["complete"]) and old["config"] == settings(config)


def start(study: Study, config: Any, command: str, fresh: bool) -> Record:
    path = Path(config.out) / f"{study.name}.json"
    header = {
        "study": study.name,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "config": settings(config),
        "versions": machine.versions(PACKAGES),
        "hardware": machine.hardware(),
    }
    if fresh or not path.exists():
        return Record(path=path, header=header)
    old = load(path)
    if old["complete"]:
        return Record(path=path, header=header)
    same = all(old.get(name) == header[name] for name in ("study", "config"))
    remedy = "give the same options to go on with it, another --out, or --fresh to start over"
    require(same, str(path), "hold an unfinished run with these settings, to go on with it", "one with others", remedy)
    return Record(path=path, header=header, cells=old["cells"], seconds=old["seconds"])


def fill(record: Record, todo: list[Cell], tqdm: Any) -> None:
    """The record is saved at most every two seconds, and whatever happens at the end."""
    saved = time.monotonic()
    try:
        with tqdm(total=len(todo), unit="part", leave=False, dynamic_ncols=True) as bar, torch.no_grad():
            for key, work in todo:
                bar.set_description_str(key)
                begun = time.monotonic()
                record.cells[key] = rounded(work())
                record.seconds += time.monotonic() - begun
                bar.update()
                if time.monotonic() - saved > 2:
                    record.save()
                    saved = time.monotonic()
    except KeyboardInterrupt:
        record.save()
        raise KeyboardInterrupt(f"{len(record.cells)} parts are in {record.path}; give the same command to go on") from None


def finish(study: Study, record: Record) -> dict[str, Path]:
    from .plate_figure import draw

    saved = load(record.path)
    print("\n".join(study.text(saved)))
    paths = {"record": record.path} | draw(study.plate(saved), record.path.parent / "figures" / study.name)
    print()
    for name, path in paths.items():
        print(f"{name:<7} {path}")
    return paths


def option(default: Any, text: str, choices: tuple[str, ...] = ()) -> Any:
    """A field of a study's config with what the command line says of it."""
    return field(default=default, metadata={"help": text, "choices": choices})


def table(headings: tuple[str, ...], lines: Iterable[tuple[Any, ...]]) -> list[str]:
    """The first column to the left, numbers to the right."""
    cells = [headings, *(tuple(number(c) for c in line) for line in lines)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headings))]
    return ["  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))).rstrip() for row in cells]


def number(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        size = abs(value)
        return f"{value:.3f}" if 1e-3 <= size < 1e3 else f"{value:,.0f}" if 1e3 <= size < 1e6 else "0" if size == 0 else f"{value:.1e}"
    return str(value)

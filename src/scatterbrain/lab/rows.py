"""A record that is written row by row and goes on where it was: what `scatterbrain quality` and `scatterbrain errors` keep."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from ..errors import require
from . import machine
from .subjects import CARRIED

FORMAT = 1


@dataclass
class Rows:
    """Rows that differ in their `keys`, on disk after each."""

    path: Path
    header: dict[str, Any]
    keys: tuple[str, ...]
    rows: list[dict[str, Any]]

    @classmethod
    def open(cls, kind: str, keys: tuple[str, ...], config: Any, command: str) -> Rows:
        """Of a configuration with `out`, `fresh` and `threads`; what is there is kept unless it asks for a fresh one."""
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        path = Path(config.out)
        kept = [] if config.fresh or not path.exists() else read(path, kind)
        header = {
            "type": kind,
            "version": FORMAT,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": command,
            "config": dataclasses.asdict(config),
            "versions": machine.versions(("torch", "transformers", "openai-whisper")),
            "hardware": machine.hardware(),
        }
        return cls(path, header, keys, kept)

    def find(self, **key: Any) -> dict[str, Any] | None:
        return next((row for row in self.rows if all(row[name] == value for name, value in key.items())), None)

    def put(self, row: dict[str, Any]) -> None:
        """In place of one with the same keys."""
        row = {**{name: row[name] for name in self.keys}, "machine": here(), **row}
        same = self.find(**{name: row[name] for name in self.keys})
        self.rows = [old for old in self.rows if old is not same] + [row]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps({**self.header, "rows": self.rows}, indent=1) + "\n", encoding="utf-8")
        part.replace(self.path)


def read(path: Path, kind: str) -> list[dict[str, Any]]:
    found = json.loads(path.read_text(encoding="utf-8"))
    ours = found.get("type") == kind and found.get("version") == FORMAT
    require(ours, str(path), f"be a {kind} record of version {FORMAT}", "something else", "pass another --out, or --fresh")
    return found["rows"]


def here() -> str:
    """Seconds are of this machine; a record may go on on another."""
    return f"{machine.processor()}, {torch.get_num_threads()} threads"


def check_common(data: tuple[str, ...], methods: tuple[str, ...], known: tuple[str, ...]) -> None:
    for name, given, among in (("data", data, CARRIED), ("methods", methods, known)):
        require(set(given) <= set(among) and given, name, f"name some of {', '.join(among)}", given, "pick among them")


def in_unit(budget: float) -> bool:
    return 0 < budget <= 1

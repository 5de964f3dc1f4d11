"""The one table of names: configs to and from JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from .config import VERSION, Config, Union
from .errors import require
from .features import ClusterMeans, EluPlusOne, Linformer, Nystrom, Performer
from .supports import LSH, Clusters, Columns, Fixed, Full, GlobalTokens, RandomBlocks, Routed, Strided, TopK, Window

_SUPPORTS = (LSH, Clusters, Columns, Fixed, Full, GlobalTokens, RandomBlocks, Routed, Strided, TopK, Window, Union)
_MAPS = (ClusterMeans, EluPlusOne, Linformer, Nystrom, Performer)
NAMES: dict[str, type[Config]] = {c.__name__: c for c in (*_SUPPORTS, *_MAPS)}


def from_json(text: str) -> Config:
    """The config that `to_json` wrote."""
    return from_dict(json.loads(text))


def from_dict(data: dict[str, Any]) -> Config:
    kind, version = data.get("type"), data.get("version")
    require(kind in NAMES, "type", f"be one of {', '.join(NAMES)}", kind, "check the file")
    require(version == VERSION, "version", f"be {VERSION}", version, "save the config again with this version")
    cls = NAMES[str(kind)]
    known = {f.name for f in dataclasses.fields(cls)}
    given = {k: v for k, v in data.items() if k not in ("type", "version")}
    unknown = sorted(set(given) - known)
    require(not unknown, str(kind), f"have only the fields {', '.join(sorted(known)) or '(none)'}", unknown, "drop the others")
    return cls(**{k: _value(v) for k, v in given.items()})


def _value(value: Any) -> Any:
    if isinstance(value, dict):
        return from_dict(value)
    if isinstance(value, list):
        return tuple(_value(v) for v in value)
    return value

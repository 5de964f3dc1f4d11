"""Sparse + low-rank attention for PyTorch."""

import importlib
from typing import Any

from . import presets
from .config import LowRankMap, Sampled, Support, Union
from .explain import Explanation, explain
from .features import ClusterMeans, EluPlusOne, Linformer, Nystrom, Performer
from .functional import attention
from .module import ScatterbrainAttention
from .names import from_json
from .supports import LSH, Clusters, Columns, Fixed, Full, GlobalTokens, RandomBlocks, Routed, Strided, TopK, Window

__version__ = "0.1.0"

# Imported when first asked for: they look at other libraries' models, and the core does not.
_LATER = {
    "Adaptive": "calibration.adaptive",
    "Plan": "calibration.plan",
    "Recipe": "calibration.recipe",
    "calibrate": "calibration.calibrate",
    "convert": "integrations.convert",
    "evaluate": "calibration.evaluate",
    "replace_sdpa": "integrations.replace",
    "restore": "integrations.convert",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LATER[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})


__all__ = [
    "LSH",
    "Adaptive",
    "ClusterMeans",
    "Clusters",
    "Columns",
    "EluPlusOne",
    "Explanation",
    "Fixed",
    "Full",
    "GlobalTokens",
    "Linformer",
    "LowRankMap",
    "Nystrom",
    "Performer",
    "Plan",
    "RandomBlocks",
    "Recipe",
    "Routed",
    "Sampled",
    "ScatterbrainAttention",
    "Strided",
    "Support",
    "TopK",
    "Union",
    "Window",
    "attention",
    "calibrate",
    "convert",
    "evaluate",
    "explain",
    "from_json",
    "presets",
    "replace_sdpa",
    "restore",
]

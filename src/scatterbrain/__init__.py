"""Sparse + low-rank attention for PyTorch."""

from . import presets
from .config import LowRankMap, Sampled, Support, Union
from .explain import Explanation, explain
from .features import ClusterMeans, EluPlusOne, Linformer, Nystrom, Performer
from .functional import attention
from .module import ScatterbrainAttention
from .names import from_json
from .supports import LSH, Clusters, Columns, Fixed, Full, GlobalTokens, RandomBlocks, Routed, Strided, TopK, Window

__version__ = "0.1.0"

__all__ = [
    "LSH",
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
    "RandomBlocks",
    "Routed",
    "Sampled",
    "ScatterbrainAttention",
    "Strided",
    "Support",
    "TopK",
    "Union",
    "Window",
    "attention",
    "explain",
    "from_json",
    "presets",
]

"""Who sees whom exactly."""

from .clusters import Clusters, Routed
from .columns import Columns
from .full import Full
from .global_tokens import GlobalTokens
from .lsh import LSH
from .random_blocks import RandomBlocks
from .sparse_transformer import Fixed, Strided
from .topk import TopK
from .window import Window

__all__ = ["LSH", "Clusters", "Columns", "Fixed", "Full", "GlobalTokens", "RandomBlocks", "Routed", "Strided", "TopK", "Window"]

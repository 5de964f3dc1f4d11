"""The low-rank maps."""

from .cluster_means import ClusterMeans
from .elu import EluPlusOne
from .linformer import Linformer
from .nystrom import Nystrom
from .performer import Performer

__all__ = ["ClusterMeans", "EluPlusOne", "Linformer", "Nystrom", "Performer"]

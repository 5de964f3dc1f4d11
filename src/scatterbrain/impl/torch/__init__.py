"""Any device, memory linear in N."""

from .op import attend, row_sums

__all__ = ["attend", "row_sums"]

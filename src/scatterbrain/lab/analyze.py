"""The studies by name."""

from __future__ import annotations

from .study import Study


def studies() -> dict[str, Study]:
    """In the order of the paper."""
    from . import (
        analyze_bound,
        analyze_observations,
        analyze_picture,
        analyze_process1,
        analyze_ratio,
        analyze_recovery,
        analyze_separation,
        analyze_sweep,
        analyze_temperature,
        analyze_variance,
    )

    modules = (
        analyze_observations,
        analyze_recovery,
        analyze_process1,
        analyze_temperature,
        analyze_separation,
        analyze_variance,
        analyze_bound,
        analyze_sweep,
        analyze_ratio,
        analyze_picture,
    )
    return {m.STUDY.name: m.STUDY for m in modules}

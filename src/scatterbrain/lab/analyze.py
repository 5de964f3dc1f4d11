"""The studies by name."""

from __future__ import annotations

from .study import Study


def studies() -> dict[str, Study]:
    """In the order of the paper. Imported here, so that `--help` of another command need not."""
    from . import analyze_bound, analyze_observations, analyze_process1, analyze_recovery, analyze_separation, analyze_temperature, analyze_variance

    modules = (analyze_observations, analyze_recovery, analyze_process1, analyze_temperature, analyze_separation, analyze_variance, analyze_bound)
    return {m.STUDY.name: m.STUDY for m in modules}

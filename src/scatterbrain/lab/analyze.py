"""The studies by name."""

from __future__ import annotations

from .study import Study


def studies() -> dict[str, Study]:
    """In the order of the paper. Imported here, so that `--help` of another command need not."""
    from . import analyze_observations, analyze_process1, analyze_recovery

    modules = (analyze_observations, analyze_recovery, analyze_process1)
    return {m.STUDY.name: m.STUDY for m in modules}

"""What a record says of the machine and of the software it ran on."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import scatterbrain as sb

VECTOR = re.compile(r"(sse4_[12]|avx.*|fma|f16c|amx.*|neon|asimd.*|sve.*|bf16|i8mm)")


def versions(packages: tuple[str, ...]) -> dict[str, str | None]:
    return {"scatterbrain": sb.__version__, "python": platform.python_version()} | {name: installed(name) for name in packages}


def hardware() -> dict[str, Any]:
    return {
        "processor": processor(),
        "isa": vector_flags(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory": memory("MemTotal"),
        "platform": platform.platform(),
    }


def installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def processor() -> str:
    """platform.processor() is empty on many Linux systems; the kernel knows."""
    names = _cpuinfo("model name")
    return names[0] if names else platform.processor() or platform.machine()


def vector_flags() -> list[str]:
    """The vector instructions the kernel lists; torch's own word for them where it lists none."""
    words = (_cpuinfo("flags") or _cpuinfo("Features") or [""])[0].split()
    return sorted(word for word in words if VECTOR.fullmatch(word)) or [torch.backends.cpu.get_cpu_capability()]


def _cpuinfo(field: str) -> list[str]:
    return _fields(Path("/proc/cpuinfo"), field)


def memory(field: str = "MemAvailable") -> int | None:
    """Bytes, as the kernel counts them; None where it has no such file."""
    found = _fields(Path("/proc/meminfo"), field)
    return 1024 * int(found[0].split()[0]) if found else None


def load() -> float:
    """Tasks that ran at once, mean over the last minute."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def _fields(path: Path, field: str) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [value.strip() for name, _, value in (line.partition(":") for line in lines) if name.strip() == field]

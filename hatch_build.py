"""Compiles the native engine while the package is built: one library an instruction set. Without a compiler it is left out."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ModuleNotFoundError:  # run by hand
    BuildHookInterface = object  # type: ignore[assignment,misc]

FOLDER = Path("src/scatterbrain/impl/native")
AVX512 = "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma"
# The first that the compiler takes. What of bf16 is used is asked of the processor at run time.
X86 = {"avx512": (f"{AVX512} -mavx512bf16", AVX512), "avx2": ("-mavx2 -mfma",)}
# No -ffast-math: infinities mark what is masked. No SLP: the vectors are written out, and gcc 12 crashes on them.
FLAGS = "-std=c++17 -O3 -fno-tree-slp-vectorize -fPIC -shared -Wall -Wextra -Wno-psabi -Wno-maybe-uninitialized -fno-math-errno"


class NativeEngine(BuildHookInterface):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or os.environ.get("SCATTERBRAIN_NATIVE") == "0":
            return
        built = compile_all(Path(self.root) / FOLDER, self.app.display_warning)
        if not built:
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform()}"
        build_data["artifacts"] += [str(path.relative_to(self.root)) for path in built]


def compile_all(folder: Path, warn: Any = print, extra: str = "", to: Path | None = None) -> list[Path]:
    """The libraries that could be built from `folder`, in it or in `to`."""
    to = to or folder
    to.mkdir(parents=True, exist_ok=True)
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    wanted = {**(X86 if x86 else {}), "portable": ("",)}
    built = []
    for isa, choices in wanted.items():
        out = to / f"_engine_{isa}.so"
        said = ""
        for flags in choices:
            said = _compile(folder / "csrc" / "engine.cpp", out, f"{flags} {extra}")
            if not said:
                built.append(out)
                break
        if said:
            warn(f"scatterbrain: {out.name} was not built, others or the torch implementation will serve: {said}")
            out.unlink(missing_ok=True)
    return built


def _compile(source: Path, out: Path, flags: str) -> str:
    """With OpenMP, which torch brings too, or else without: the engine then starts threads of its own. What went wrong, if anything."""
    compiler = shlex.split(os.environ.get("CXX", "g++ " if sys.platform != "darwin" else "clang++"))
    said = ""
    for threads in ("-fopenmp", "-pthread"):
        command = [*compiler, *shlex.split(FLAGS), *shlex.split(flags), threads, str(source), "-o", str(out)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            said = str(error)
            continue
        if done.returncode == 0:
            return ""
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        said = (errors or done.stderr.splitlines() or [f"exit status {done.returncode}"])[0]
    return said or "the compiler could not be run"


def _platform() -> str:
    import sysconfig

    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


if __name__ == "__main__":
    # python hatch_build.py [folder [compiler flags ..]]: the libraries built in a folder, or else in place
    to = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    found = compile_all(Path(__file__).parent / FOLDER, extra=" ".join(sys.argv[2:]), to=to)
    print(*found, sep="\n")
    sys.exit(not found)

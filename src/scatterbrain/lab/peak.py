"""Peak memory of one call in a process of its own: what it takes beyond its inputs.

Importing torch takes longer than most calls, so one process imports what is needed and computes nothing; each
measurement is a fork of it, with a fresh heap and no threads yet.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from . import machine
from .contenders import Contender, Shape
from .timing import call

CLEAR = Path("/proc/self/clear_refs")
WARM = 128


class DidNotFit(Exception):
    """The call needed more memory than there is, or more time than it may take."""


def measurable() -> bool:
    return CLEAR.exists()


class Scales:
    """Asks the process that forks; starts it when first needed."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def peak(self, contender: Contender, shape: Shape, backward: bool, timeout: float) -> int:
        """Bytes, on random normal inputs."""
        task = {"name": contender.name, "shape": dataclasses.asdict(shape), "backward": backward, "timeout": timeout}
        found = self._ask(json.dumps({**task, "threads": torch.get_num_threads()}))
        if "bytes" not in found:
            raise DidNotFit(f"in a process of its own: {found.get('error', 'it ended without a word')}")
        return int(found["bytes"])

    def _ask(self, task: str) -> dict[str, Any]:
        if self.process is None:
            command = [sys.executable, "-m", "scatterbrain.lab.peak"]
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            print(task, file=self.process.stdin, flush=True)
            answer: dict[str, Any] = json.loads(self.process.stdout.readline() or "{}")
        except BrokenPipeError:
            answer = {}
        return answer

    def close(self) -> None:
        if self.process is not None:
            assert self.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
            self.process.wait()
            self.process = None


def serve() -> None:
    """A fork for each line of standard input; a line of standard output for each."""
    from .packages import preload

    preload()
    for line in sys.stdin:
        task = json.loads(line)
        source, sink = os.pipe()
        child = os.fork()
        if child == 0:
            answer_in_child(task, sink)
        os.close(sink)
        with os.fdopen(source) as pipe:
            said = pipe.read()
        _, status = os.waitpid(child, 0)
        print(said or json.dumps({"error": why(status, task)}), flush=True)


def answer_in_child(task: dict[str, Any], sink: int) -> None:
    """Never returns: what the parent still has to do is not this process's."""
    signal.alarm(max(1, round(task["timeout"])))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        found: dict[str, Any] = {"bytes": measure(task)}
    except BaseException as error:
        found = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    os.write(sink, json.dumps(found).encode())
    os._exit(0)


def why(status: int, task: dict[str, Any]) -> str:
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    return f"took over {task['timeout']:g} s" if number == signal.SIGALRM else f"ended by signal {number}"


def measure(task: dict[str, Any]) -> int:
    from .bench import CONTENDERS

    torch.set_num_threads(task["threads"])
    contender, shape = CONTENDERS[task["name"]], Shape(**task["shape"])
    limit()
    short = shape.at(min(WARM, shape.length))
    if not contender.refuses(short):  # so that what is loaded once is not counted
        call(contender.build(short), inputs(contender, short), task["backward"])()
    timed = call(contender.build(shape), inputs(contender, shape), task["backward"])
    give_back()
    CLEAR.write_text("5")  # forgets the peak so far
    before = resident("VmRSS")
    timed()
    return resident("VmHWM") - before


def inputs(contender: Contender, shape: Shape) -> tuple[torch.Tensor, ...]:
    generator, kv = torch.Generator().manual_seed(shape.seed), shape.kv_heads
    sizes = [(shape.batch, heads, shape.length, shape.width) for heads in (shape.heads, kv, kv)]
    return contender.feed(shape, *(torch.randn(size, generator=generator).to(getattr(torch, shape.dtype)) for size in sizes))


def give_back() -> None:
    """What the heap keeps from warming up would be used again, and not be seen."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def resident(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def limit() -> None:
    """A wrong guess should end in an error here, not in the machine's out-of-memory killer."""
    import resource

    free = machine.memory()
    if free is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (free, resource.getrlimit(resource.RLIMIT_DATA)[1]))


if __name__ == "__main__":
    serve()

"""The compiled engine: one shared library an instruction set, found beside this file and called through ctypes.

The structs are those of csrc/api.h, field by field.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch  # before the engine: it brings the OpenMP runtime that both share
from torch import Tensor

from ...errors import message

ISAS = ("avx512", "avx2", "portable")  # the first that the processor has is taken
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
KINDS = {"Band": 0, "Blocks": 1, "Rows": 2, "Buckets": 3, "Routes": 4}
UNBOUNDED = 2**40


class Array(Structure):
    _fields_ = [("data", c_void_p), *((name, c_int64) for name in ("dtype", "sb", "sh", "sn", "sd"))]


class Layer(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("kind", "lo", "hi", "dilation")),
        ("index", c_void_p),
        *((name, c_int64) for name in ("groups", "outer", "inner", "q_block", "k_block")),
        ("q_label", c_void_p),
        ("k_label", c_void_p),
        *((name, c_int64) for name in ("q_groups", "k_groups", "visits", "nodes", "top", "keys", "chunk")),
        *((name, c_void_p) for name in ("offset", "worth", "least")),
    ]


class Call(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("batch", "heads", "rep", "n", "m", "d", "e")),
        *((name, Array) for name in ("q", "k", "v", "out")),
        ("key_mask", c_void_p),
        *((name, c_int64) for name in ("causal", "double_count", "threads")),
        ("scale", c_float),
        ("layers_n", c_int64),
        ("layers", POINTER(Layer)),
        ("features", c_int64),
        ("log_phi", c_void_p),
        ("log_psi", c_void_p),
        ("node", c_void_p),
        *((name, c_int64) for name in ("node_groups", "nodes", "chunk", "inner")),
        ("offset", c_void_p),
        ("offset_in", c_void_p),
        *((name, c_void_p) for name in ("log_scale", "denominator", "lost", "inverse", "delta")),
        *((name, Array) for name in ("d_out", "d_q", "d_k", "d_v")),
        ("d_phi", c_void_p),
        ("d_psi", c_void_p),
    ]


_forked = False
_own = 0  # threads that a forked child asked for


def _mark_forked() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_mark_forked)


def after_fork() -> None:
    """A forked child has lost OpenMP's threads, and torch's own parallel loops would wait for them for ever: torch is told
    to use one thread there, as its DataLoader does, while the engine starts as many of its own as were asked for."""
    global _own
    if _forked and torch.get_num_threads() > 1:
        _own = torch.get_num_threads()
        torch.set_num_threads(1)


def threads() -> int:
    return max(_own, torch.get_num_threads())


def _layout(library: Any) -> int:
    """How long its structs are; 0 of a build that does not tell."""
    if not hasattr(library, "sb_layout"):
        return 0
    library.sb_layout.restype = c_int64
    return int(library.sb_layout())


@lru_cache
def load(isa: str) -> Any:
    """The library for one instruction set, or None where it is not built or the processor lacks it."""
    folder = os.environ.get("SCATTERBRAIN_ENGINE_FOLDER")  # another build of it, such as one with sanitizers
    path = (Path(folder) if folder else Path(__file__).parent) / f"_engine_{isa}.so"
    if not path.is_file():
        return None
    library = ctypes.CDLL(str(path))
    library.sb_isa.restype = c_char_p
    library.sb_forward.argtypes = library.sb_backward.argtypes = [POINTER(Call)]
    library.sb_routes.argtypes = [POINTER(Call), c_void_p]
    library.sb_cluster.argtypes = [POINTER(Array), *[c_int64] * 4, c_void_p, *[c_int64] * 4, c_void_p]
    library.sb_columns.argtypes = [POINTER(Call), c_void_p, *[c_int64] * 4, c_void_p, c_int64, c_int64, c_void_p]
    for name in ("sb_supported", "sb_forward", "sb_backward", "sb_routes", "sb_cluster", "sb_columns"):
        getattr(library, name).restype = c_int
    if _layout(library) != ctypes.sizeof(Call) * 4096 + ctypes.sizeof(Layer):
        raise RuntimeError(message(str(path), "be built from the sources beside it", "another version's", "build it again: pip install ."))
    return library if library.sb_supported() else None


@torch.compiler.assume_constant_result
def isas() -> tuple[str, ...]:
    """The instruction sets that can run here, the fastest first."""
    return tuple(isa for isa in ISAS if load(isa) is not None)


def run(isa: str, function: str, *args: Any) -> None:
    code = getattr(load(isa), function)(*args)
    if code == 1:
        raise MemoryError(message("memory", "hold the native engine's workspace", "none left", "shorten the input, or lower the budget"))
    if code:
        raise RuntimeError(f"the native engine failed in {function} with code {code}; report it")


def array(t: Tensor | None) -> Array:
    """A (batch, heads, length, width) tensor as it lies in memory."""
    if t is None:
        return Array()
    return Array(t.data_ptr(), DTYPES[t.dtype], *t.stride())


def pointer(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()

"""Any code that calls F.scaled_dot_product_attention: a function mode that sees the call, however its name was imported."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .call import DECODE, Call, Handler
from .masks import read_mask

SDPA = F.scaled_dot_product_attention
MHA = F.multi_head_attention_forward
Route = Callable[[], tuple[str, Handler | None]]


class SdpaMode(TorchFunctionMode):
    """Inside this context every scaled_dot_product_attention is answered by the handler that `route` names for it, or, where it
    names none, as it would be without.

    F.multi_head_attention_forward, and with it nn.MultiheadAttention, is one of the callers; an active mode also keeps
    torch from its fused fast paths, which would never call either.
    """

    def __init__(self, route: Route) -> None:
        super().__init__()
        self.route, self.seen = route, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is SDPA:
            return self.answer(*args, **kwargs)
        if func is MHA:
            return self.answer_mha(*args, **kwargs)
        return func(*args, **kwargs)

    @torch.compiler.disable  # a compiled graph ends here and goes on after
    def answer(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        self.seen += 1
        name, handler = self.route()
        if handler is None:
            return SDPA(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

        def exact() -> Tensor:
            return SDPA(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

        if query.is_nested or query.dim() < 3 or not query.dim() == key.dim() == value.dim():
            q, k, v = query, key, value
            handler.exactly("inputs are nested or have unlike or fewer than 3 dimensions")
            return exact()
        q, k, v = (to_four(t) for t in (query, key, value))
        keys, causal, refusal = None, False, unlike(q, k, v, enable_gqa)
        if not refusal:
            reading = read_mask(attn_mask, is_causal, q.shape[0], q.shape[1], q.shape[2], k.shape[2])
            keys, causal, refusal = reading.key_mask, reading.causal, reading.refusal
        if q.shape[2] == 1:
            refusal = DECODE
        out = handler(Call(name, q, k, v, keys, causal, scale, dropout_p, refusal, exact))
        return out.reshape(*query.shape[:-1], value.shape[-1])

    @torch.compiler.disable
    def answer_mha(self, *args: Any, **kwargs: Any) -> Any:
        """torch's own code of this function, calling `answer` where it calls scaled_dot_product_attention."""
        names = MHA.__code__.co_varnames[: MHA.__code__.co_argcount]
        given = dict(zip(names, args, strict=False)) | kwargs
        if given.get("need_weights", True):
            self.seen += 1
            handler = self.route()[1]
            if handler is not None:
                handler.exactly("need_weights=True asks for the matrix of weights")
            return MHA(*args, **kwargs)
        scope = {**vars(F), "scaled_dot_product_attention": self.answer, "has_torch_function": lambda _: False}
        return types.FunctionType(MHA.__code__, scope, MHA.__name__, MHA.__defaults__)(*args, **kwargs)


def to_four(t: Tensor) -> Tensor:
    return t[None] if t.dim() == 3 else t.flatten(0, t.dim() - 4)


def unlike(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> str:
    """Shapes that torch would broadcast."""
    heads = q.shape[1] == k.shape[1] or enable_gqa
    same = q.shape[0] == k.shape[0] == v.shape[0] and k.shape[1] == v.shape[1] and heads
    return "" if same else "batches or heads of query, key and value are broadcast"


def callers() -> tuple[nn.Module | None, nn.Module | None]:
    """The innermost module whose code is running, and the outermost."""
    inner: nn.Module | None = None
    outer: nn.Module | None = None
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, nn.Module):
            inner, outer = inner if inner is not None else found, found
        frame = frame.f_back
    return inner, outer


class Wrapped:
    """A module's forward under a mode. An object, not a closure, so that a copy of the module gets a copy bound to itself."""

    def __init__(self, module: nn.Module, handler: Handler, name: str) -> None:
        self.module, self.handler, self.name = module, handler, name
        self.own = module.__dict__.get("forward")

    @torch.compiler.disable  # a compiled graph ends here and goes on after
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.own or types.MethodType(type(self.module).forward, self.module)
        mode = SdpaMode(lambda: (self.name, self.handler))
        with mode:
            out = forward(*args, **kwargs)
        if not mode.seen:
            self.handler.exactly("its module computed attention without F.scaled_dot_product_attention")
        return out


class Guard:
    """A hook that does nothing: torch's fused encoder layer stands back where a hook could be missed."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        return None


def find(model: nn.Module) -> dict[str, nn.Module]:
    """Modules whose own code, or whose processor's, calls scaled_dot_product_attention, and every nn.MultiheadAttention."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention) or _calls(module)}


def _calls(module: nn.Module) -> bool:
    kinds = {type(module)} | {type(part) for part in vars(module).values() if callable(part) and not isinstance(part, (nn.Module, Wrapped))}
    return any(_mentions(kind) for kind in kinds)


def _mentions(kind: type) -> bool:
    own = [vars(base) for base in kind.__mro__ if not base.__module__.startswith("torch.nn.modules.")]
    codes = [code for space in own for f in space.values() if (code := getattr(f, "__code__", None)) is not None]
    return any("scaled_dot_product_attention" in code.co_names for code in codes)


def attach(model: nn.Module, handlers: dict[str, Handler]) -> dict[str, list[str]]:
    """Wrap the named modules; returns what was changed besides, for `detach`."""
    changed: dict[str, list[str]] = {"fused": [], "nested": []}
    for name, handler in handlers.items():
        module = model.get_submodule(name)
        module.forward = Wrapped(module, handler, name)
        if isinstance(module, nn.MultiheadAttention):
            module.register_forward_pre_hook(Guard())
        if module.__dict__.get("fused_attn") is False:  # timm's own way round F.scaled_dot_product_attention
            module.__dict__["fused_attn"] = True
            changed["fused"].append(name)
    for name, module in model.named_modules():
        if isinstance(module, nn.TransformerEncoder) and getattr(module, "use_nested_tensor", False):
            module.use_nested_tensor = False
            changed["nested"].append(name)
    return changed


def detach(model: nn.Module, changed: dict[str, list[str]]) -> None:
    for module in model.modules():
        wrapped = module.__dict__.get("forward")
        if isinstance(wrapped, Wrapped):
            del module.forward
            if wrapped.own is not None:
                module.forward = wrapped.own
        for key in [key for key, hook in module._forward_pre_hooks.items() if isinstance(hook, Guard)]:
            del module._forward_pre_hooks[key]
    for name in changed["fused"]:
        vars(model.get_submodule(name))["fused_attn"] = False
    for name in changed["nested"]:
        vars(model.get_submodule(name))["use_nested_tensor"] = True

"""transformers 5.x: an attention function and a mask function under one name.

The mask function matters as much as the other: without one of the same name, transformers passes no mask at all.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import message, require
from .call import DECODE, PREFIX, Call, Handler
from .masks import read_mask

NAME = "scatterbrain"
SLOT = "_scatterbrain"
# Each changes what attention means, and scaled_dot_product_attention would drop it.
REFUSED = (
    ("softcap", "logit soft caps"),
    ("logits_soft_cap", "logit soft caps"),
    ("s_aux", "attention sinks as extra logits"),
    ("sinks", "attention sinks as extra logits"),
    ("cu_seq_lens_q", "packed sequences (varlen)"),
    ("cu_seqlens", "packed sequences (varlen)"),
    ("cache", "a paged cache"),
    ("head_mask", "a mask of heads"),
    ("indices", "a sparse pattern of its own"),
    ("block_indices", "a sparse pattern of its own"),
)
THEIRS: dict[str, Any] = {}  # transformers' own "sdpa" functions, found by `register`; a compiled graph cannot import
EAGER = "set attn_implementation='eager', or leave this model as it is"


def register() -> None:
    """Make attn_implementation="scatterbrain" known to transformers. `convert` does it; nothing does at import."""
    transformers = importlib.import_module("transformers")
    transformers.AttentionInterface.register(NAME, attend)
    transformers.AttentionMaskInterface.register(NAME, mask)
    THEIRS.update(attend=transformers.AttentionInterface()["sdpa"], mask=transformers.AttentionMaskInterface()["sdpa"])


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """The meaning of transformers' own "sdpa", except that a 2D mask (from `mask` below) is key padding under causality."""
    handler = handler_of(module)
    _refuse_by_name(handler, more)
    causal = bool(is_causal if is_causal is not None else getattr(module, "is_causal", True)) and query.shape[2] > 1
    n, m = query.shape[2], key.shape[2]
    if causal and m > n and (attention_mask is None or attention_mask.dim() == 2):  # a cache with room to spare, not written yet
        key, value, m = key[:, :, :n], value[:, :, :n], n
    if attention_mask is not None and attention_mask.dim() == 2:
        keys, refusal = attention_mask[:, None, None, :], ""
    elif attention_mask is None:
        keys, refusal = None, ""
    else:
        reading = read_mask(attention_mask, False, query.shape[0], query.shape[1], n, m)
        refusal = PREFIX if reading.refusal and causal and n < m else reading.refusal
        keys, causal = reading.key_mask, reading.causal
    if _biases(more.get("position_bias")):
        refusal = "a position bias is added to the logits"

    def exact() -> Tensor:
        given = attention_mask
        if keys is not None and given is not None and given.dim() == 2:
            given = keys & torch.ones(n, m, dtype=torch.bool, device=keys.device).tril() if causal else keys
        return THEIRS["attend"](module, query, key, value, given, dropout=dropout, scaling=scaling, is_causal=is_causal, **more)[0].transpose(1, 2)

    only_exact = DECODE if n == 1 else refusal
    out = handler(Call(getattr(handler, "name", ""), query, key, value, keys, causal, scaling, dropout, only_exact, exact))
    return out.transpose(1, 2).contiguous(), None


def _biases(bias: Tensor | None) -> bool:
    """T5's cross-attention passes a bias of zeros."""
    return bias is not None and (torch.compiler.is_compiling() or bool(bias.any()))


def handler_of(module: nn.Module) -> Handler:
    """What `convert` left with the module; without it, the default method at its default budget."""
    found = module.__dict__.get(SLOT)
    if found is None:
        from ..calibration.recipe import Recipe
        from .heads import Converted

        found = Converted(type(module).__name__, (Recipe.default(1 / 8),))
        setattr(module, SLOT, found)
    return found


def _refuse_by_name(handler: Handler, more: dict[str, Any]) -> None:
    layer = getattr(handler, "name", "")
    for name, what in REFUSED:
        if more.get(name) is not None:
            raise ValueError(message(f"{name} of layer {layer!r}", "be left out", what, EAGER))
    if more.get("output_attentions"):
        raise ValueError(message("output_attentions", "be False", f"True in layer {layer!r}, whose weights are never formed", EAGER))


def mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **more: Any,
) -> Tensor | None:
    """Padding where that is all there is to say: (B, M) under causality, (B, 1, 1, M) without; else transformers' dense mask.

    transformers allows the skips exactly where the pattern is the plain one; a window that nothing reaches past is plain too.
    """
    require(q_length is not None, "transformers", "give masks a q_length", "an older version", "upgrade it with: pip install -U transformers")
    assert q_length is not None
    plain = (local_size is None or kv_length < local_size) and kv_offset == 0
    if isinstance(q_offset, Tensor) and not torch.compiler.is_compiling():
        q_offset = int(q_offset)
    if plain and allow_is_bidirectional_skip and not allow_is_causal_skip:
        if attention_mask is None or attention_mask.shape[-1] == kv_length:
            return _padding(attention_mask, (batch_size, 1, 1, kv_length))
    elif plain and allow_is_causal_skip and not isinstance(q_offset, Tensor) and q_offset == 0 and 1 < q_length <= kv_length:
        seen = None if attention_mask is None else attention_mask[:, :q_length]
        if seen is None or seen.shape[-1] == q_length:
            return _padding(seen, (batch_size, q_length))
    return THEIRS["mask"](
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        **more,
    )


def _padding(attention_mask: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """None where nothing is hidden; a graph cannot ask."""
    if attention_mask is None or (not torch.compiler.is_compiling() and bool(attention_mask.all())):
        return None
    return attention_mask.to(torch.bool).view(-1, *shape[1:]).expand(shape)


class RefuseWeights:
    """A hook on the whole model: output_attentions=True would otherwise give a tuple of None."""

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        asked = kwargs.get("output_attentions")
        if asked is None:
            asked = getattr(getattr(module, "config", None), "output_attentions", False)
        require(not asked, "output_attentions", "be False", asked, "sb.restore(model) first: converted attention never forms its weights")


def roots(model: nn.Module) -> list[Any]:
    """The transformers models in a model, outermost first, that let their attention be set. transformers is not imported to find out."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module not in inside and _pretrained(type(module)) and module._can_set_attn_implementation():  # type: ignore[operator]
            found.append(module)
            inside.update(module.modules())
    return found


def _pretrained(kind: type) -> bool:
    return any(base.__name__ == "PreTrainedModel" and base.__module__.startswith("transformers.") for base in kind.__mro__)


def find(model: nn.Module) -> dict[str, nn.Module]:
    """Modules of transformers models that ask the attention interface for their function."""
    mine = {module for root in roots(model) for module in root.modules()}
    return {name: module for name, module in model.named_modules() if module in mine and _asks(type(module))}


def _asks(kind: type) -> bool:
    code = getattr(kind.forward, "__code__", None)  # type: ignore[attr-defined]
    inner = getattr(getattr(kind.forward, "__wrapped__", None), "__code__", None)  # type: ignore[attr-defined]
    return any(c is not None and "get_interface" in c.co_names for c in (code, inner))


def attach(model: nn.Module, handlers: dict[str, Handler]) -> dict[str, list[Any]]:
    register()
    before = [config._attn_implementation_internal for config in configs(model)]
    for name, handler in handlers.items():
        setattr(model.get_submodule(name), SLOT, handler)
    for root in roots(model):
        root.register_forward_pre_hook(RefuseWeights(), with_kwargs=True)
        root.set_attn_implementation(NAME)
    return {"implementations": before}


def detach(model: nn.Module, changed: dict[str, list[Any]]) -> None:
    for config, implementation in zip(configs(model), changed["implementations"], strict=True):
        config._attn_implementation_internal = implementation
    for module in model.modules():
        module.__dict__.pop(SLOT, None)
        for key in [key for key, hook in module._forward_pre_hooks.items() if isinstance(hook, RefuseWeights)]:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


def configs(model: nn.Module) -> list[Any]:
    """Every configuration object in the model, each once, in a fixed order."""
    found: dict[int, Any] = {}

    def visit(config: Any) -> None:
        if config is not None and id(config) not in found and hasattr(config, "_attn_implementation_internal"):
            found[id(config)] = config
            for name in getattr(config, "sub_configs", {}):
                visit(getattr(config, name, None))

    for module in model.modules():
        visit(getattr(module, "config", None))
    return list(found.values())

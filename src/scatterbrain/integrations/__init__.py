"""Other people's models: their attention calls, answered by ours.

What is approximated: attention over keys that are hidden from all queries alike (padding) or from earlier queries
(causal, as many keys as queries), with any number of query heads a key head, any scale, dropout, and widths of their own
for values. Cross-attention too.

Always exact, since it must be or costs no more, and counted:

- one query a call (decoding)
- a causal chunk of queries after cached keys: aligned to the last key, as transformers' masks are
- layers that a plan leaves exact

Refused, or exact and counted with fallback="exact" (with a warning, once a layer and reason):

- masks that differ between queries otherwise: sliding windows that are shorter than the input, packed sequences
- biases added to the logits (T5's relative positions; a bias of zeros is none)
- need_weights=True of nn.MultiheadAttention; modules that compute attention without F.scaled_dot_product_attention;
  shapes that torch would broadcast; nested tensors

Refused always, by name, since torch's exact attention would drop them as silently: logit soft caps, attention sinks as
extra logits (s_aux), cu_seq_lens, paged caches, head masks, and output_attentions.

torch.compile: transformers models stay one graph where there is no mask, and break to look at one; modules that call
F.scaled_dot_product_attention, nn.MultiheadAttention among them, run outside the graph.
"""

from .convert import calls, convert, restore
from .replace import replace_sdpa

__all__ = ["calls", "convert", "replace_sdpa", "restore"]

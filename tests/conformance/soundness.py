"""What must hold of a tiny model before a proof on it says anything."""

from __future__ import annotations

import torch

from conformance.odd_ones import NOT_BUILDABLE, not_causal
from conformance.tiny_models import build
from helpers.tolerance import rounding

LENGTH = 23
# No softmax attention, or an implementation that does not hand out its weights.
_WITHOUT_WEIGHTS = {"falcon_mamba", "mamba", "mamba2", "reformer", "reformer:local", "rwkv", "xlstm"}
# How many keys the last of 23 tokens sees, layer by layer.
_VISIBLE_KEYS = {
    "cohere2 exaone4 gemma2 gemma3_text gpt_oss olmo3": [8, 23, 8, 23],
    "gemma3_text:window": [4, 4, 4, 4, 4, 23],
    "gpt_neo modernbert-decoder": [23, 8, 23, 8],
    "llama mistral:full qwen2": [23, 23, 23, 23],
    "llama4_text": [7, 7, 7, 23],
    "mistral phi3 starcoder2": [8, 8, 8, 8],
    "qwen2:window qwen3": [23, 23, 8, 8],
    "recurrent_gemma": [8],
    "smollm3": [23, 23, 23, 8],
}


def faults(name: str) -> list[str]:
    """What is wrong with the tiny model of a type or variant: it must be finite and causal, attend to more than one
    key and not to all alike, and see over the edge of its windows."""
    if name in NOT_BUILDABLE:
        return []
    tiny = build(name, attn_implementation="eager")
    ids = tiny.inputs(LENGTH)["input_ids"]
    changed = ids.clone()
    changed[0, -1] = 20 if ids[0, -1] != 20 else 21
    plain = build(name).model
    with torch.no_grad():
        output = tiny.model(input_ids=ids, use_cache=False, output_attentions=True)
        own, other = (plain(input_ids=x, use_cache=False).logits for x in (ids, changed))
    found = [] if own.isfinite().all() else ["logits are not finite"]
    # Relative to the largest logit. Experts are products of as many rows as tokens chose them, so a later token changes
    # how earlier ones are rounded; what a token is seen by changes ten times more even in ProphetNet.
    change = (own - other).abs() / own.abs().max()
    earlier = float(change[:, :-1].max())
    if change[:, -1].max() < 1e-2:
        found.append("the last token does not change its own logits")
    if (earlier > rounding(32)) != (name in not_causal()):
        found.append(f"a later token changes earlier logits by {earlier:.1e}")
    tensors = [a for a in (getattr(output, "attentions", None) or ()) if a is not None and a.ndim == 4]
    weights = [a for a in tensors if a.min() >= 0 and a.sum(-1).max() < 1 + 1e-4]
    if bool(weights) == (name in _WITHOUT_WEIGHTS):
        found.append(f"hands out the weights of {len(weights)} layers")
    for layer, weight in enumerate(weights):
        rows = weight[0, :, LENGTH // 2 :].flatten(0, 1).double()
        # Over the keys a row sees, log weights are logits up to a constant.
        spread = torch.stack([row[row > 0].log().std() for row in rows if (row > 0).sum() > 2]).mean()
        if not 0.4 < spread < 4.0:
            found.append(f"the logits of layer {layer} have a standard deviation of {spread:.2f}")
    seen = [int((weight[0, 0, -1] > 0).sum()) for weight in weights]
    if any(name in names.split() and seen != keys for names, keys in _VISIBLE_KEYS.items()):
        found.append(f"the last token sees {seen} keys")
    return found

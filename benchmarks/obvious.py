"""The three-axis fit of every head beside the obvious way: keep all attention scores, then SciPy's least squares.

    pip install "transformer_lens>=4"              # in an environment of its own: it is no dependency of wherewhat
    python benchmarks/obvious.py --tokens 2048

The obvious way is TransformerLens's ``run_with_cache`` (forward hooks on the Hugging Face model where it is not
installed) and ``scipy.sparse.linalg.lsqr`` with its default tolerances, a few heads of which stand for all. Both ways
get the same text, each in a process of its own, so that the peak of resident memory is its own; loading is not timed.
First of all their scores must agree, last of all their r. Other work on the machine falsifies the seconds.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

# The process that starts the others stays small, without torch: Linux counts its size into their peaks.
if TYPE_CHECKING:
    from torch import Tensor

SCORES_ALLOWED = 1e-3
R_ALLOWED = 1e-4


def main() -> int:
    """Check, measure both ways, print the tables, and return 1 if the two disagree."""
    parser = argparse.ArgumentParser(description="The three-axis fit of every head beside the obvious way.")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=3, help="heads given to lsqr, spread over the model")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part is not None:
        print(json.dumps(run_part(options)))
        return 0
    if lens_version() is None:
        print('no TransformerLens (pip install "transformer_lens>=4"): Hugging Face forward hooks take its place')
    gap = in_process("check", options)["gap"]
    print(f"{options.tokens} tokens, scores at most {gap:.1e} apart (allowed {SCORES_ALLOWED:g})")
    if not gap <= SCORES_ALLOWED:
        return 1
    obvious, ours = in_process("obvious", options), in_process("wherewhat", options)
    print_costs(obvious, ours)
    gap = max(abs(r - ours["r"][head]) for head, r in obvious["r"].items())
    for head, r in obvious["r"].items():
        print(f"r of head {head}: lsqr {r:.7f}, wherewhat {ours['r'][head]:.7f}")
    print(f"r at most {gap:.1e} apart (allowed {R_ALLOWED:g})")
    return 0 if gap <= R_ALLOWED else 1


def in_process(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """What one part reports from a fresh process."""
    command = [sys.executable, __file__, "--part", part, "--tokens", str(options.tokens)]
    command += ["--heads", str(options.heads), "--threads", str(options.threads)]
    threads = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=threads)
    return json.loads(done.stdout.splitlines()[-1])


def run_part(options: argparse.Namespace) -> dict[str, Any]:
    """Load the model and run one part on the first tokens of the embedded prose."""
    import torch

    from wherewhat.models.loader import load
    from wherewhat.text.documents import embedded_documents

    torch.set_num_threads(options.threads)
    loaded = load("smollm2", device="cpu")
    ids = loaded.encode(embedded_documents()[0].text, tokens=options.tokens)[None]
    with torch.no_grad():
        return PARTS[options.part](loaded, ids, options.heads)


def check(loaded: Any, ids: Tensor, _: int) -> dict[str, Any]:
    """Largest difference between the scores of both ways, over all heads and causal pairs."""
    from wherewhat.captures.proof import capture

    layers = []
    with capture(loaded.model, layers.append):
        loaded.model(ids, use_cache=False, logits_to_keep=1)
    theirs = scores_of(loaded)(ids)
    gaps = [((a.attn_scores() - s) * a.visible()).abs().max() for a, s in zip(layers, theirs, strict=True)]
    return {"gap": float(max(gaps))}


def by_lsqr(loaded: Any, ids: Tensor, count: int) -> dict[str, Any]:
    """All scores first, then a sparse design with three ones a row, then lsqr head by head."""
    import numpy as np
    from scipy.sparse import csr_array
    from scipy.sparse.linalg import lsqr

    keep_scores = scores_of(loaded)
    costs = Costs()
    scores = keep_scores(ids)
    lens = lens_version()
    costs.add(f"all scores, {f'TransformerLens {lens}' if lens else 'forward hooks'}")

    n = ids.shape[1]
    i, j = np.tril_indices(n)
    rows, columns = np.tile(np.arange(len(i)), 3), np.concatenate([i - j, n + i, 2 * n + j])
    design = csr_array((np.ones(len(rows)), (rows, columns)), shape=(len(i), 3 * n))
    costs.add("sparse design")

    heads = scores[0].shape[1]
    total = heads * len(scores)
    found = {}
    for index in sorted({step * (total - 1) // max(1, count - 1) for step in range(count)}):
        w = scores[index // heads][0, index % heads].numpy()[i, j].astype(np.float64)
        residual = lsqr(design, w)[3]
        found[f"{index // heads}.{index % heads}"] = math.sqrt(1 - residual**2 / ((w - w.mean()) ** 2).sum())
    costs.add(f"lsqr, {len(found)} heads")
    *once, (_, seconds, highest) = costs.steps
    every = (f"lsqr, {total} heads (extrapolated)", seconds * total / len(found), highest)
    costs.steps.append(every)
    return costs.report([*once, every], found)


def by_wherewhat(loaded: Any, ids: Tensor, _: int) -> dict[str, Any]:
    """Every head of every layer while the model runs."""
    from wherewhat.captures.proof import capture, prove
    from wherewhat.measures.axes.fit import fit_layer

    fits = {}
    costs = Costs()
    proof = prove(loaded.model)
    costs.add("proof of the capture")
    with capture(loaded.model, lambda a: fits.update({a.layer: fit_layer(a)}), proof=proof):
        loaded.model(ids, use_cache=False, logits_to_keep=1)
    found = {f"{layer}.{head}": r for layer, fit in fits.items() for head, r in enumerate(fit.r.tolist())}
    costs.add(f"capture and fit_layer, {len(found)} heads")
    return costs.report(costs.steps, found)


PARTS = {"check": check, "obvious": by_lsqr, "wherewhat": by_wherewhat}


def lens_version() -> str | None:
    """Version of TransformerLens; None where there is none that wraps a model as it is."""
    try:
        version = importlib.metadata.version("transformer_lens")
    except importlib.metadata.PackageNotFoundError:
        return None
    return version if int(version.split(".")[0]) >= 4 else None


def scores_of(loaded: Any) -> Callable[[Tensor], list[Tensor]]:
    """A function from ids to the scores ``(1, heads, n, n)`` of every layer; the model is changed in place."""
    if lens_version() is None:
        return lambda ids: scores_by_hooks(loaded.model, ids)
    from transformer_lens.model_bridge import TransformerBridge

    bridge = TransformerBridge.boot_transformers(
        loaded.name, hf_model=loaded.model, tokenizer=loaded.tokenizer, device="cpu"
    )
    names = [f"blocks.{layer}.attn.hook_attn_scores" for layer in range(bridge.cfg.n_layers)]

    def cached(ids: Tensor) -> list[Tensor]:
        _, cache = bridge.run_with_cache(ids, names_filter=names, return_type=None)
        return [cache[name] for name in names]

    return cached


def scores_by_hooks(model: Any, ids: Tensor) -> list[Tensor]:
    """Scores from each attention module's input, by its own projections and rotation."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

    kept = []

    def keep(module: Any, _: Any, given: dict[str, Any], output: Any) -> None:
        x = given["hidden_states"]
        q, k = (p(x).unflatten(-1, (-1, module.head_dim)).transpose(1, 2) for p in (module.q_proj, module.k_proj))
        q, k = apply_rotary_pos_emb(q, k, *given["position_embeddings"])
        kept.append(q @ repeat_kv(k, module.num_key_value_groups).mT * module.scaling)

    for block in model.model.layers:
        block.self_attn.register_forward_hook(keep, with_kwargs=True)
    model(ids, use_cache=False, logits_to_keep=1)
    return kept


Step = tuple[str, float, float]
"""Name, seconds, peak of memory at its end in GiB."""


class Costs:
    """What the steps of a part cost, over the model that is loaded when it begins."""

    def __init__(self) -> None:
        self.loaded = peak()
        self.steps: list[Step] = []
        self._started = time.perf_counter()

    def add(self, name: str) -> None:
        """End a step and begin the next."""
        self.steps.append((name, time.perf_counter() - self._started, peak()))
        self._started = time.perf_counter()

    def report(self, needed: list[Step], r: dict[str, float]) -> dict[str, Any]:
        """The steps, and those needed for all heads added up."""
        return {"loaded": self.loaded, "steps": [*self.steps, ("all of it", sum(s[1] for s in needed), peak())], "r": r}


def peak() -> float:
    """Largest resident memory of this process so far, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 2**30


def print_costs(obvious: dict[str, Any], ours: dict[str, Any]) -> None:
    """Seconds and memory of every step and of the whole."""
    print(f"{'':54}{'seconds':>9}{'peak GiB':>10}{'above model':>13}")
    for way, part in (("the obvious way", obvious), ("wherewhat", ours)):
        for name, seconds, highest in part["steps"]:
            print(f"{way + ': ' + name:54}{seconds:9.2f}{highest:10.2f}{highest - part['loaded']:13.2f}")


if __name__ == "__main__":
    sys.exit(main())

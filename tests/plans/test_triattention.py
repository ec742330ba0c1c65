"""Brute force: statistics for TriAttention equal those of hooked queries, and its series gives their logits."""

from __future__ import annotations

import pytest
import torch

import wherewhat as ww
from helpers.capture import run, tiny, tokens
from wherewhat.errors import MeasureError

TEXTS = [tokens(40, seed=seed)[0].tolist() for seed in range(3)]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}


def hooked(model, name):
    """Mean query and mean magnitude of a submodule's outputs over all texts, complex, by layer and head."""
    kept: dict[int, list[torch.Tensor]] = {}
    heads = model.config.num_attention_heads
    handles = [
        getattr(block.self_attn, name).register_forward_hook(
            lambda module, inputs, output, layer=layer: kept.setdefault(layer, []).append(
                output.reshape(output.shape[1], heads, -1).double()
            )
        )
        for layer, block in enumerate(model.model.layers)
    ]
    with torch.no_grad():
        for text in TEXTS:
            model(input_ids=torch.tensor([text]), use_cache=False)
    for handle in handles:
        handle.remove()
    found = {}
    for layer, each in kept.items():
        q = torch.cat(each)  # (tokens, heads, d)
        real, imaginary = (q[..., ::2], q[..., 1::2]) if model.config.model_type == "cohere" else q.chunk(2, -1)
        planes = torch.complex(real, imaginary)
        for head in range(heads):
            found[layer, head] = planes[:, head].mean(0), planes[:, head].abs().mean(0)
    return found


def read(file):
    """Read the file as ``load_head_frequency_stats`` in triattention/methods/pruning_utils.py does."""
    payload = torch.load(file, map_location="cpu", weights_only=True)  # noqa: TID251 - their format
    metadata, stats = payload["metadata"], payload["stats"]
    found = {}
    for layer, head in metadata["sampled_heads"]:
        entry = stats[f"layer{layer:02d}_head{head:02d}"]
        mean = torch.complex(entry["q_mean_real"].float(), entry["q_mean_imag"].float())
        found[layer, head] = mean, entry["q_abs_mean"].float()
    return metadata, found


@pytest.mark.parametrize(
    ("family", "hook", "style", "options"),
    [
        ("llama", "q_proj", "half", {}),
        ("qwen3", "q_norm", "half", {}),  # after the norm of queries
        ("cohere", "q_norm", "interleaved", {}),
        ("llama", "q_proj", "half", {"changes": {"rope_parameters": YARN}}),  # without the scaling of YaRN
    ],
)
def test_statistics_are_those_of_hooked_queries(family, hook, style, options, tmp_path):
    model = tiny(family, **options)
    metadata, found = read(ww.save_triattention(model, tmp_path / "new" / "stats.pt", texts=TEXTS, tokens=40))
    expected = hooked(model, hook)
    assert found.keys() == expected.keys()
    for key, (mean, size) in expected.items():
        torch.testing.assert_close(found[key][0], mean.to(torch.complex64), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(found[key][1], size.float(), atol=1e-5, rtol=1e-4)
    assert metadata["rope_style"] == style
    assert metadata["head_dim"] == 2 * len(metadata["inv_freq"])
    assert (metadata["num_traces"], metadata["num_attention_heads"]) == (3, model.config.num_attention_heads)


@pytest.mark.parametrize("family", ["llama", "cohere"])
def test_series_of_the_score_gives_the_logits_of_the_mean_query(family, tmp_path):
    """``score_keys_for_round``: sum over planes of |q| |k| cos(distance · inv_freq + angle of q times conjugate k)."""
    model = tiny(family)
    metadata, found = read(ww.save_triattention(model, tmp_path / "stats.pt", texts=TEXTS, tokens=40))
    for attention in run(model, torch.tensor(TEXTS[:1])):
        pairs = attention.rotation.pairs
        k = torch.complex(attention.k[0, ..., pairs[:, 0]], attention.k[0, ..., pairs[:, 1]])
        head, position = attention.heads - 1, torch.tensor([39])
        mean = found[attention.layer, head][0]
        relative = mean * k[-1].conj()
        phase = (39 - torch.arange(40))[:, None] * metadata["inv_freq"] + relative.angle()
        series = (mean.abs() * k[-1].abs() * phase.cos()).sum(-1)
        q = torch.zeros(1, 2 * len(pairs))
        q[0, pairs[:, 0]], q[0, pairs[:, 1]] = mean.real, mean.imag
        logits = attention.rot_k[0, -1] @ attention.rotation.rotate(q, position)[0]
        torch.testing.assert_close(series, logits, atol=1e-4, rtol=1e-4)


def test_their_loader_reads_the_file(tmp_path):
    theirs = pytest.importorskip("triattention.methods.pruning_utils", reason="triattention is not installed")
    file = ww.save_triattention(tiny("llama"), tmp_path / "stats.pt", texts=TEXTS, tokens=40)
    metadata, stats = theirs.load_head_frequency_stats(file, torch.device("cpu"))
    expected = read(file)[1]
    assert metadata["rope_style"] == "half"
    assert stats.keys() == expected.keys()
    for key, (mean, size) in expected.items():
        assert torch.equal(stats[key].q_mean_complex, mean)
        assert torch.equal(stats[key].q_abs_mean, size)


def test_models_that_cannot_be_scored_are_refused(tmp_path):
    for family, message in (
        ("bloom", "layer 0 has no rotation"),
        ("gpt_neox", "layer 0 rotates 4 of the 16 dimensions"),
        ("gemma3_text", "differs from the first layer in its frequencies"),
    ):
        with pytest.raises(MeasureError, match=message):
            ww.save_triattention(tiny(family), tmp_path / "stats.pt", texts=TEXTS, tokens=40)
        assert not (tmp_path / "stats.pt").exists()

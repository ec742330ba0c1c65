"""Calibration files of TriAttention: mean query and mean magnitude of every head, per plane of the rotation.

TriAttention (Mao et al., arXiv 2604.04921) scores cached keys by a trigonometric series of their distance to later
queries. Of the queries it needs only these statistics.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wherewhat.boundary import MOST_TOKENS, check_at_most, output_file
from wherewhat.captures.attention import LayerAttention
from wherewhat.captures.rotation import Rotation
from wherewhat.errors import MeasureError
from wherewhat.files import make_folder, write_file
from wherewhat.models.loaded import evaluation
from wherewhat.numerics import new_process_settings, weight_dtypes
from wherewhat.options import checked
from wherewhat.progress import Progress, Silent
from wherewhat.runs.request import MemoryModel, ModelRequest, document_text, file_names, model_request
from wherewhat.runs.subject import ModelSubject, load_model
from wherewhat.text.documents import Document, documents_of, read_documents


@dataclass(frozen=True)
class _Layout:
    """Numbers of heads and rotation of a layer, which TriAttention takes to be the same in all layers."""

    heads: int
    kv_heads: int
    rotation: Rotation

    def equals(self, other: _Layout) -> bool:
        """Return whether both are the same up to rounding of the frequencies."""
        own, its = self.rotation, other.rotation
        counts = [(x.heads, x.kv_heads, x.rotation.pairing, x.rotation.planes) for x in (self, other)]
        return counts[0] == counts[1] and torch.allclose(own.inv_freq, its.inv_freq, rtol=1e-4, atol=0)


class QuerySums:
    """Accumulate queries before rotation over the tokens of all texts, with each plane as a complex number.

    A rotation by an angle multiplies the number by ``exp(i · angle)``.
    """

    def __init__(self) -> None:
        self.layout: _Layout | None = None
        self._sums: dict[int, tuple[Tensor, Tensor]] = {}
        self._tokens: dict[int, int] = {}

    def add(self, attention: LayerAttention) -> None:
        """Add a layer of a pass; refuse one that TriAttention cannot score."""
        layer, rotation, d = attention.layer, attention.rotation, attention.rot_q.shape[-1]
        if rotation is None:
            raise MeasureError(f"layer {layer} has no rotation: TriAttention needs rotary embeddings in all layers")
        if 2 * rotation.planes != d:
            raise MeasureError(
                f"layer {layer} rotates {2 * rotation.planes} of the {d} dimensions of a head: TriAttention needs a "
                "rotation of all of them"
            )
        layout = _Layout(attention.heads, attention.kv_heads, rotation)
        self.layout = self.layout or layout
        if not layout.equals(self.layout):
            raise MeasureError(
                f"layer {layer} differs from the first layer in its frequencies or numbers of heads: TriAttention uses "
                "the same for all layers"
            )
        q, pairs = attention.q.double(), rotation.pairs.to(attention.rot_q.device)
        planes = torch.complex(q[..., pairs[:, 0]], q[..., pairs[:, 1]])  # (batch, heads, n, planes)
        total, size = planes.sum((0, 2)).cpu(), planes.abs().sum((0, 2)).cpu()
        if layer in self._sums:
            total, size = total + self._sums[layer][0], size + self._sums[layer][1]
        self._sums[layer] = total, size
        self._tokens[layer] = self._tokens.get(layer, 0) + len(q) * attention.n

    def result(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Return the mean query, complex, and its mean magnitude, each ``(heads, planes)``, by layer."""
        return {
            layer: (total / self._tokens[layer], size / self._tokens[layer])
            for layer, (total, size) in sorted(self._sums.items())
        }


def write_triattention(subject: ModelSubject, texts: Sequence[Tensor], file: Path) -> Path:
    """Run a model on texts ``(1, n)`` and write the calibration file of TriAttention.

    Its ``triattention/methods/pruning_utils.py`` reads ``stats["layer00_head00"]`` with ``q_mean_real``,
    ``q_mean_imag`` and ``q_abs_mean``, ``(planes,)`` float32 each, for the heads in ``metadata["sampled_heads"]``, and
    ``triattention/vllm/core/compressor.py`` reads ``metadata["inv_freq"]``. The plane of frequency f is
    ``q[f] + i q[f + d / 2]`` if ``rope_style`` is ``half``, and ``q[2 f] + i q[2 f + 1]`` if it is ``interleaved``.
    Queries are those that the model rotates: after any norm, without the scaling of YaRN.
    """
    sums = QuerySums()
    for ids in texts:
        subject.run(ids, sums.add)
    statistics, layout, loaded = sums.result(), sums.layout, subject.loaded
    assert layout is not None
    config: Any = loaded.model.config
    metadata = {
        "model_name": loaded.spec,
        "num_traces": len(texts),
        "head_dim": 2 * layout.rotation.planes,
        "num_layers": len(statistics),
        "num_attention_heads": layout.heads,
        "num_kv_heads": layout.kv_heads,
        "dtype": loaded.dtype,
        "use_chat_template": False,
        "system_prompt": "",
        "attn_implementation": str(config._attn_implementation),
        "rope_style": layout.rotation.pairing,
        "rope_type": str((getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")),
        "inv_freq": layout.rotation.inv_freq.float().cpu(),
        "sampled_heads": [[layer, head] for layer in statistics for head in range(layout.heads)],
    }
    stats = {
        f"layer{layer:02d}_head{head:02d}": {
            "q_mean_real": mean[head].real.float(),
            "q_mean_imag": mean[head].imag.float(),
            "q_abs_mean": size[head].float(),
        }
        for layer, (mean, size) in statistics.items()
        for head in range(layout.heads)
    }
    data = io.BytesIO()
    torch.save({"metadata": metadata, "stats": stats}, data)  # noqa: TID251 - TriAttention reads it with torch.load
    make_folder(file.parent)
    write_file(file, data.getvalue())
    return file


@checked(model=model_request, files=file_names, texts=documents_of)
def save_triattention(
    model: ModelRequest | MemoryModel,
    file: str | os.PathLike[str],
    *,
    files: tuple[str, ...] | None = None,
    texts: tuple[Document, ...] | None = None,
    tokens: int = 512,
    beyond: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write the calibration file of TriAttention (Mao et al., arXiv 2604.04921): statistics of all heads' queries.

    Per head and plane of the rotation these are the mean query before rotation, as a complex number, and the mean of
    its magnitude, over all tokens of all texts. The model must rotate all dimensions of its heads in the same way in
    all layers.

    Args:
        model: A name, folder or file, a model of transformers in memory, or what :func:`wherewhat.load` returned.
        file: The file to write, such as ``stats.pt``; ``torch.load(file, weights_only=True)`` reads it.
        files: Text files; by default the embedded prose.
        texts: Texts in place of files: strings, documents or token ids.
        tokens: Tokens of each text.
        beyond: Allow texts longer than the model's trained length.
        progress: Progress callback; silent by default.
    """
    progress = progress or Silent()
    file = output_file(file, name="the file")
    check_at_most(MOST_TOKENS, tokens=tokens)
    documents = list(texts) if texts is not None else read_documents(files)
    progress.say(f"loading {model.model}")
    loaded = load_model(model, say=progress.say, hashed=False)
    with new_process_settings(weight_dtypes(loaded.model)), evaluation(loaded.model):
        ids = [document_text(loaded, document, tokens, beyond=beyond).ids for document in documents]
        return write_triattention(ModelSubject(loaded), ids, file)

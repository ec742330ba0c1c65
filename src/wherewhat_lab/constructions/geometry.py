"""Keys and queries of a head as points in the plane with the largest logit contributions.

In an Index head keys share one direction and the direction of queries depends on the number; in a Retrieval head both
depend on the letter (arXiv 2605.31558). Points are taken before rotation, where they do not depend on position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import ConfigError, MeasureError
from wherewhat_lab.constructions.transformers import pair_letters
from wherewhat_lab.model import LabModel
from wherewhat_lab.tasks.multi_hop import LetterTask, NumberTask
from wherewhat_lab.tasks.one_hop import IndexTask, RetrievalTask
from wherewhat_lab.tasks.task import SequenceTask


@dataclass(frozen=True, eq=False)
class PlaneGeometry:
    """One head's keys and queries in one plane, before rotation.

    Attributes:
        plane: Index of the plane.
        angle: Its angle of rotation per position.
        share: Its share of the sum of the planes' largest contributions to logits.
        keys: Points ``(keys, 2)``.
        key_labels: Their labels ``(keys,)``.
        queries: Points ``(queries, 2)``.
        query_labels: Their labels ``(queries,)``.
    """

    plane: int
    angle: float
    share: float
    keys: Tensor
    key_labels: Tensor
    queries: Tensor
    query_labels: Tensor

    @property
    def key_resultant(self) -> float:
        """Resultant length of the keys' phases: 1 for one common direction, near 0 for uniformly distributed ones."""
        return resultant(self.keys)

    @property
    def query_spread(self) -> float:
        """Circular variance of the labels' mean query directions: 0 for one common direction, 1 for uniform ones."""
        return 1 - resultant(directions_by_label(self.queries, self.query_labels)[0])

    @property
    def query_tightness(self) -> float:
        """Mean over labels of the resultant length within a label: 1 where the label determines the direction."""
        return float(directions_by_label(self.queries, self.query_labels)[1].mean())


def plane_geometry(
    attention: LayerAttention, *, key_labels: Tensor, query_labels: Tensor, head: int = 0
) -> PlaneGeometry:
    """Return a head's keys and queries in the plane with the largest contributions to the last queries' logits.

    Args:
        attention: One layer of a pass over inputs of one length.
        key_labels: Label of each key, ``(inputs, n)``; keys with labels below 0 are left out.
        query_labels: The same for queries, ``(inputs, n)``.
        head: Index of the head.
    """
    shape = attention.rot_q.shape[0], attention.n
    if attention.rotation is None:
        raise MeasureError(f"layer {attention.layer} does not rotate its queries and keys: it has no planes")
    if attention.n != attention.m or key_labels.shape != shape or query_labels.shape != shape:
        raise MeasureError(
            f"labels of keys {tuple(key_labels.shape)} and queries {tuple(query_labels.shape)} must both be {shape}"
        )
    if not 0 <= head < attention.heads:
        raise MeasureError(f"there is no head {head}: layer {attention.layer} has {attention.heads}")
    use = plane_use(attention)[head]
    plane = int(use.argmax())
    dims = attention.rotation.pairs[plane].to(attention.rot_q.device)
    keys = attention.k[:, head // (attention.heads // attention.kv_heads)][..., dims].double().cpu()
    queries = attention.q[:, head][..., dims].double().cpu()
    of_keys, of_queries = key_labels.cpu(), query_labels.cpu()
    return PlaneGeometry(
        plane=plane,
        angle=float(attention.rotation.inv_freq[plane]),
        share=float(use[plane] / use.sum().clamp_min(1e-300)),
        keys=keys[of_keys >= 0],
        key_labels=of_keys[of_keys >= 0],
        queries=queries[of_queries >= 0],
        query_labels=of_queries[of_queries >= 0],
    )


def head_geometry(
    model: LabModel, task: SequenceTask, tokens: Tensor, *, layer: int = 0, head: int = 0
) -> PlaneGeometry:
    """Return :func:`plane_geometry` of a head of a laboratory model on ``tokens`` ``(inputs, n)`` of its task."""
    if not 0 <= layer < model.config.layers:
        raise MeasureError(f"there is no layer {layer}: the model has {model.config.layers}")
    of_keys, of_queries = task_labels(task, tokens)
    attention = model.attention(tokens)[layer]
    return plane_geometry(attention, key_labels=of_keys, query_labels=of_queries, head=head)


def task_labels(task: SequenceTask, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the labels of keys and of queries, in the shape of ``tokens``; -1 for tokens without a query.

    In number and index tasks an integer's label is the integer, and that of a letter's key is 0. In letter and
    retrieval tasks a key's label is its left letter, a query's its right one, as numbers from 0.
    """
    if isinstance(task, (NumberTask, IndexTask)):
        integers = (tokens - task.answers + 1).clamp_min(0)
        return integers, torch.where(integers > 0, integers, -1)
    if isinstance(task, (LetterTask, RetrievalTask)):
        left, asked = pair_letters(task, tokens)
        return left, torch.where(tokens >= task.answers, asked, -1)
    raise ConfigError(
        f"tokens of a {type(task).__name__} have no labels: give a number, index, letter or retrieval task"
    )


def plane_use(attention: LayerAttention) -> Tensor:
    """Return each plane's largest logit contribution at the last query, mean over inputs, ``(heads, planes)``."""
    assert attention.rotation is not None
    pairs = attention.rotation.pairs.to(attention.rot_q.device)
    row = slice(attention.n - 1, attention.n)
    seen = attention.visible(row)[:, :, 0]  # (inputs or 1, heads or 1, keys)
    groups = attention.heads // attention.kv_heads
    use = []
    for head in range(attention.heads):
        q = attention.rot_q[:, head, -1].double()[:, pairs]
        k = attention.rot_k[:, head // groups].double()[..., pairs]
        added = (torch.einsum("bpw,bnpw->bnp", q, k) * attention.scale).abs()
        hidden = ~seen[:, min(head, seen.shape[1] - 1), :, None]
        use.append(added.masked_fill(hidden, 0.0).amax(1).mean(0))
    return torch.stack(use).cpu()


def resultant(points: Tensor) -> float:
    """Return the resultant length of the directions of points ``(count, 2)``; zeros are skipped, NaN without points."""
    return float(_unit(points).mean(0).norm())


def directions_by_label(points: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean directions of the points ``(count, 2)`` of each label ``(count,)``, and their resultant lengths.

    Mean directions have length 1, ``(labels, 2)``. Resultant lengths ``(labels,)`` are 1 if all points of a label have
    the same direction, and 0 if they cancel.
    """
    unit = _unit(points)
    known = labels[points.norm(dim=-1) > 0]
    names, index, counts = torch.unique(known, return_inverse=True, return_counts=True)
    sums = torch.zeros(len(names), 2, dtype=unit.dtype).index_add_(0, index, unit)
    means = sums / counts[:, None]
    length = means.norm(dim=-1)
    return means / length.clamp_min(1e-300)[:, None], length


def _unit(points: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(points, dim=-1)
    known = length > 0
    return points[known] / length[known, None]

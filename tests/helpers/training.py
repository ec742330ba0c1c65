"""Tiny trainings with dropout and shuffled data."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from helpers.capture import tiny


class Rows(Dataset):
    """Rows of random token ids, with their labels."""

    def __init__(self, count: int = 64, length: int = 24, *, vocabulary: int = 160) -> None:
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(16, vocabulary, (count, length), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


DROPOUT: dict[str, dict[str, Any]] = {
    "llama": {"attention_dropout": 0.1},
    "gpt2": {"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1},
}


def trainee(model_type: str = "llama") -> Any:
    """A tiny model with dropout, in training mode."""
    return tiny(model_type, changes=DROPOUT[model_type]).train()


def train_loop(model: Any, watch: Any = None, *, steps: int = 6, first: int = 1, rate: float = 1e-2) -> Any:
    """Train in a plain loop with a global seed; call ``watch`` with the model's number of steps."""
    torch.manual_seed(first)
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    batches = iter(())
    for step in range(first, steps + 1):
        batch = next(batches, None)
        if batch is None:
            batches = iter(DataLoader(Rows(), batch_size=4, shuffle=True))
            batch = next(batches)
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if watch is not None:
            watch(step)
    return model


def same_weights(one: Any, other: Any) -> bool:
    """Whether two models have the same weights, bit for bit."""
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)

"""Texts written greedily until a string comes up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wherewhat.capturing import Proof
from wherewhat.capturing.passes import input_device
from wherewhat.errors import ConfigError
from wherewhat.extend import LengthMethod, Untouched, generate, trained_length
from wherewhat.models import LoadedModel

_AT_ONCE = 32
"""Tokens written before looking for a place to stop; the text is read anew after so many."""


@dataclass(frozen=True)
class Until:
    """When to stop: at the first of some strings, at the end of the text, or after so many tokens."""

    strings: tuple[str, ...]
    end: int | None
    most: int

    @classmethod
    def of(cls, options: dict[str, Any], tokenizer: Any) -> Until:
        """From the harness's options of generation.

        Raises:
            ConfigError: If anything but greedy writing is asked for, or no tokens.
        """
        if options.get("do_sample") or options.get("num_beams", 1) != 1:
            raise ConfigError("texts are written greedily here: leave do_sample and num_beams out")
        given = options.get("until") or ()
        most = int(options.get("max_gen_toks", options.get("max_new_tokens", 256)))
        if most < 1:
            raise ConfigError(f"max_gen_toks is {most}: give 1 or more")
        strings = (given,) if isinstance(given, str) else tuple(given)
        return cls(tuple(text for text in strings if text), tokenizer.eos_token_id, most)

    def cut(self, text: str) -> str | None:
        """The text up to the first of the strings; None if there is none."""
        places = [text.find(string) for string in self.strings if string in text]
        return text[: min(places)] if places else None


def write(loaded: LoadedModel, ids: Tensor, until: Until, method: LengthMethod | None, proof: Proof) -> str:
    """What follows ``ids`` ``(n,)``, token by token the likeliest, up to where it shall stop."""
    rule: LengthMethod = method or Untouched()
    if rule.is_open:
        # Settled once, so that stopping to look does not change what is written.
        rule = rule.fitted(trained=trained_length(loaded.model), length=len(ids) + until.most)
    written = ids.new_empty(0)
    device = input_device(loaded.model)
    while len(written) < until.most:
        steps = min(_AT_ONCE, until.most - len(written))
        whole = torch.cat([ids, written])[None].to(device)
        written = generate(loaded.model, whole, rule, steps, proof=proof)[0, len(ids) :].cpu()
        ended = until.end is not None and until.end in written
        if ended:
            written = written[: written.tolist().index(until.end)]
        text: str = loaded.tokenizer.decode(written, skip_special_tokens=True)
        if (cut := until.cut(text)) is not None:
            return cut
        if ended:
            return text
    return text

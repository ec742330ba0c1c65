"""A model for lm-evaluation-harness, under a length method or with perturbed contexts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wherewhat.captures.comparison import input_device
from wherewhat.captures.proof import Proof, prove
from wherewhat.errors import ConfigError
from wherewhat.extend.generation import generate
from wherewhat.extend.method import LengthMethod, extended
from wherewhat.extend.windows import Untouched
from wherewhat.measures.choices.answers import disturbed, with_behind
from wherewhat.measures.perturb.changes import Change, nothing
from wherewhat.measures.perturb.measurement import PerturbConfig
from wherewhat.models.loaded import LoadedModel
from wherewhat.models.positions import trained_length
from wherewhat.numerics import new_process_settings, weight_dtypes
from wherewhat.runs.continuation import continued
from wherewhat.runs.inputs import blank, text_seed
from wherewhat.runs.words import with_spans
from wherewhat.text.questions import lm_eval

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
        """From the harness's options of generation."""
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


_Base: Any = lm_eval("api.model").TemplateLM


class HarnessModel(_Base):  # type: ignore[misc]
    """A loaded model as lm-evaluation-harness takes it: ``lm_eval.simple_evaluate(model=HarnessModel(loaded), …)``.

    Texts are tokenised as everywhere in this package: with the tokens in front that the model expects. Texts longer
    than the model was trained on lose their beginning, as in the harness's own models; under a length method they do
    not.

    Args:
        loaded: The model.
        method: Length method to attend by; None for the model's own attention.
        perturb: Kind, rate and seed of a perturbation of every context; answers are never disturbed.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        method: LengthMethod | None = None,
        perturb: tuple[str, float, int] | None = None,
    ) -> None:
        super().__init__()
        kind, rate, seed = perturb or ("words", 0.0, 0)
        self._config = PerturbConfig(kinds=(kind,), rates=(rate,), seed=seed)
        if method is not None and (kind.startswith("position_") or kind == "features"):
            raise ConfigError(
                f"{kind} cannot be disturbed under {method.name}, which sets distances itself: choose one"
            )
        self.loaded, self.method, self.perturb = loaded, method, perturb
        self.tokenizer = loaded.tokenizer
        self._proof = prove(loaded.model)
        self._blank = blank(loaded)

    @property
    def eot_token_id(self) -> int:
        """The token at the end of a text, or the one at its beginning where there is none."""
        eos = self.tokenizer.eos_token_id
        return self.prefix_token_id if eos is None else int(eos)

    @property
    def prefix_token_id(self) -> int:
        """The token that stands for an empty context."""
        if not self._blank:
            raise ConfigError(f"the tokenizer of {self.loaded.name} has neither BOS nor EOS to stand for an empty text")
        return int(self._blank[-1])

    @property
    def device(self) -> torch.device:
        """Where texts go in."""
        return input_device(self.loaded.model)

    @property
    def max_length(self) -> int | None:
        """Tokens of the longest text; None for any."""
        if self.method is not None:
            return None
        try:
            return trained_length(self.loaded.model)
        except ConfigError:
            return None

    @property
    def tokenizer_name(self) -> str:
        """Name under which the harness keeps requests."""
        return self.loaded.name.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A chat as one text."""
        text: str = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids, with what the model expects in front unless told otherwise or it is there already."""
        body = list(self.tokenizer(string, add_special_tokens=False, verbose=False)["input_ids"])
        prefix = list(self.loaded.prefix)
        if add_special_tokens is False or (add_special_tokens is None and body[: len(prefix)] == prefix):
            return body
        return prefix + body

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Log-probability of every continuation; those with the same context in front share it."""
        del disable_tqdm
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(tuple(request[1]), []).append(index)
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        for context, members in groups.items():
            answers = self._scored(requests[members[0]][0][0], list(context), [requests[index][2] for index in members])
            for index, answer in zip(members, answers, strict=True):
                found[index] = answer
                self.cache_hook.add_partial("loglikelihood", requests[index][0], answer)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of whole texts, in windows of the trained length where no length method is given."""
        del disable_tqdm
        if self.perturb is not None:
            raise ConfigError("a whole text has no context to disturb: leave perturb out, or use wherewhat perturb")
        utils = lm_eval("utils")
        found = []
        for (text,) in (request.args for request in requests):
            tokens = self.tok_encode(text, add_special_tokens=False)
            windows = utils.get_rolling_token_windows(
                token_list=tokens,
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length or len(tokens),
                context_len=1,
            )
            pairs = [utils.make_disjoint_window(window) for window in windows]
            total = sum(self._scored("", context, [answer])[0][0] for context, answer in pairs)
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
            found.append(total)
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The likeliest continuation of each context, up to the first of the strings to stop at."""
        del disable_tqdm
        found = []
        for context, options in (request.args for request in requests):
            until = Until.of(options, self.loaded.tokenizer)
            change = self._disturbed(context, self.tok_encode(context))
            if change.positions is not None or change.orders:
                raise ConfigError(f"{self._config.kinds[0]} cannot be disturbed while texts are written: choose words")
            room = None if self.max_length is None else max(1, self.max_length - until.most)
            ids = change.ids if room is None else change.ids[-room:]
            text = write(self.loaded, ids, until, self.method, self._proof)
            self.cache_hook.add_partial("generate_until", (context, options), text)
            found.append(text)
        return found

    def _disturbed(self, text: str, ids: list[int]) -> Change:
        tokens = torch.tensor(ids, dtype=torch.int64)
        if self.perturb is None or not text:
            return nothing(tokens)
        kind, rate, seed = self.perturb
        context = text.rstrip()
        spanned = with_spans(self.loaded, context, tokens)
        layer = self._config.layers[0] if kind == "features" else None
        return disturbed(spanned, kind, rate, seed + text_seed(context), self._config, layer=layer)

    def _scored(self, text: str, context: list[int], continuations: list[list[int]]) -> list[tuple[float, bool]]:
        """Log-probability and greediness of each continuation of one context."""
        change = self._disturbed(text, context)
        most = self.max_length
        longest = max(map(len, continuations))
        if most is not None and len(change.ids) + longest - 1 > most:
            if change.positions is not None or change.orders:
                raise ConfigError(
                    f"a text of {len(change.ids) + longest} tokens is cut to {most}: disturb words instead"
                )
            # Each loses only what its own length asks for, as in the harness.
            return [self._pass(_cut(change.ids, most, one), [one], None, change)[0] for one in continuations]
        positions = with_behind(change.positions, longest - 1, kind=self._config.kinds[0])
        return self._pass(change.ids, continuations, positions, change)

    def _pass(
        self, ids: Tensor, continuations: list[list[int]], positions: Tensor | None, change: Change
    ) -> list[tuple[float, bool]]:
        method, model = self.method, self.loaded.model
        if method is not None and method.is_open:
            # What a method leaves open may depend on the length of the whole text, which differs by continuation.
            answers = [
                self._run(ids, [one], method.fitted(trained=trained_length(model), length=len(ids) + len(one)), False)
                for one in continuations
            ]
            return [answer for (answer,) in answers]
        shared = method is None or method.cacheable
        return self._run(ids, continuations, method, shared, positions=positions, change=change)

    def _run(
        self,
        ids: Tensor,
        continuations: list[list[int]],
        method: LengthMethod | None,
        shared: bool,
        *,
        positions: Tensor | None = None,
        change: Change | None = None,
    ) -> list[tuple[float, bool]]:
        model = self.loaded.model
        orders = None if change is None else change.orders
        with (
            new_process_settings(weight_dtypes(model)),
            nullcontext() if method is None else extended(model, method, proof=self._proof),
        ):
            logprobs, greedy = continued(
                model, self._proof, ids[None], continuations, positions=positions, orders=orders, shared=shared
            )
        return list(zip(logprobs.tolist(), greedy.tolist(), strict=True))


def _cut(ids: Tensor, most: int, continuation: Sequence[int]) -> Tensor:
    """The end of a context for which there is room before a continuation, whose last token is not read."""
    room = most - len(continuation) + 1
    if room < 1:
        raise ConfigError(f"a continuation of {len(continuation)} tokens leaves no room for context in {most}")
    return ids[-room:]

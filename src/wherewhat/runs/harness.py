"""A model for lm-evaluation-harness, under a length method or with perturbed contexts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wherewhat.captures.layer_proofs import input_device
from wherewhat.captures.proof import Proof, prove
from wherewhat.errors import ConfigError
from wherewhat.lengths.method import LengthMethod, extended, generate
from wherewhat.lengths.windows import Untouched
from wherewhat.measures.choices import continued_positions, perturb_context
from wherewhat.measures.perturb import PerturbConfig
from wherewhat.measures.perturb.changes import Change, no_change
from wherewhat.models.loaded import LoadedModel, known_length, trained_length
from wherewhat.numerics import new_process_settings, weight_dtypes
from wherewhat.runs.request import blank, text_seed, with_spans
from wherewhat.runs.subject import continued
from wherewhat.text.questions import lm_eval

_AT_ONCE = 32
"""Tokens generated before the stop strings are looked for."""


@dataclass(frozen=True)
class Until:
    """When generation stops: at the first of some strings, at the end token, or after ``most`` tokens."""

    strings: tuple[str, ...]
    end: int | None
    most: int

    @classmethod
    def of(cls, options: dict[str, Any], tokenizer: Any) -> Until:
        """Return it from the generation options of the harness."""
        if options.get("do_sample") or options.get("num_beams", 1) != 1:
            raise ConfigError("generation is greedy here: leave do_sample and num_beams out")
        stops = options.get("until") or ()
        most = int(options.get("max_gen_toks", options.get("max_new_tokens", 256)))
        if most < 1:
            raise ConfigError(f"max_gen_toks is {most}: give 1 or more")
        strings = (stops,) if isinstance(stops, str) else tuple(stops)
        return cls(tuple(text for text in strings if text), tokenizer.eos_token_id, most)

    def cut(self, text: str) -> str | None:
        """Return the text up to the first of the strings; None if it has none of them."""
        places = [text.find(string) for string in self.strings if string in text]
        return text[: min(places)] if places else None


def write(loaded: LoadedModel, ids: Tensor, until: Until, method: LengthMethod | None, proof: Proof) -> str:
    """Continue ``ids`` ``(n,)`` greedily until a stop criterion holds, and return the new text."""
    rule: LengthMethod = method or Untouched()
    if rule.is_open:
        # Fitted once, so that generating in several steps does not change the result.
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

    Texts are tokenised as everywhere in this package, with the prefix tokens that the model expects. Texts longer than
    the trained length lose their beginning, as in the harness's own models; under a length method they do not.

    Args:
        loaded: The model.
        method: Length method; None for the model's own attention.
        perturb: Kind, rate and seed of a perturbation of every context; answers are not perturbed.
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
                f"{kind} cannot be perturbed under {method.name}, which sets distances itself: choose one"
            )
        self.loaded, self.method, self.perturb = loaded, method, perturb
        self.tokenizer = loaded.tokenizer
        self._proof = prove(loaded.model)
        self._blank = blank(loaded)

    @property
    def eot_token_id(self) -> int:
        """End-of-text token, or the prefix token where there is none."""
        eos = self.tokenizer.eos_token_id
        return self.prefix_token_id if eos is None else int(eos)

    @property
    def prefix_token_id(self) -> int:
        """Token that stands for an empty context."""
        if not self._blank:
            raise ConfigError(f"the tokenizer of {self.loaded.name} has neither BOS nor EOS to stand for an empty text")
        return int(self._blank[-1])

    @property
    def device(self) -> torch.device:
        """Device of the model's input."""
        return input_device(self.loaded.model)

    @property
    def max_length(self) -> int | None:
        """Tokens of the longest text; None for no limit."""
        return known_length(self.loaded.model) if self.method is None else None

    @property
    def tokenizer_name(self) -> str:
        """Name under which the harness caches requests."""
        return self.loaded.name.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a chat as one text."""
        text: str = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return token ids, with the model's prefix unless it is switched off or present already."""
        body = list(self.tokenizer(string, add_special_tokens=False, verbose=False)["input_ids"])
        prefix = list(self.loaded.prefix)
        if add_special_tokens is False or (add_special_tokens is None and body[: len(prefix)] == prefix):
            return body
        return prefix + body

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return the log-probability of every continuation; those with the same context share its pass."""
        del disable_tqdm
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(tuple(request[1]), []).append(index)
        scores: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        for context, members in groups.items():
            answers = self._scored(requests[members[0]][0][0], list(context), [requests[index][2] for index in members])
            for index, answer in zip(members, answers, strict=True):
                scores[index] = answer
                self.cache_hook.add_partial("loglikelihood", requests[index][0], answer)
        return scores

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of whole texts, in windows of the trained length without a length method."""
        del disable_tqdm
        if self.perturb is not None:
            raise ConfigError("a whole text has no context to perturb: leave perturb out, or use wherewhat perturb")
        utils = lm_eval("utils")
        totals = []
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
            totals.append(total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the greedy continuation of each context, up to the first stop string."""
        del disable_tqdm
        texts = []
        for context, options in (request.args for request in requests):
            until = Until.of(options, self.loaded.tokenizer)
            change = self._disturbed(context, self.tok_encode(context))
            if change.positions is not None or change.orders:
                raise ConfigError(f"{self._config.kinds[0]} cannot be perturbed during generation: choose words")
            most = None if self.max_length is None else max(1, self.max_length - until.most)
            ids = change.ids if most is None else change.ids[-most:]
            text = write(self.loaded, ids, until, self.method, self._proof)
            self.cache_hook.add_partial("generate_until", (context, options), text)
            texts.append(text)
        return texts

    def _disturbed(self, text: str, ids: list[int]) -> Change:
        tokens = torch.tensor(ids, dtype=torch.int64)
        if self.perturb is None or not text:
            return no_change(tokens)
        kind, rate, seed = self.perturb
        context = text.rstrip()
        spanned = with_spans(self.loaded.encoder, context, tokens)
        layer = self._config.layers[0] if kind == "features" else None
        return perturb_context(spanned, kind, rate, seed + text_seed(context), self._config, layer=layer)

    def _scored(self, text: str, context: list[int], continuations: list[list[int]]) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation of one context, and whether it is the greedy one."""
        change = self._disturbed(text, context)
        most = self.max_length
        longest = max(map(len, continuations))
        if most is not None and len(change.ids) + longest - 1 > most:
            if change.positions is not None or change.orders:
                raise ConfigError(
                    f"a text of {len(change.ids) + longest} tokens is cut to {most}: perturb words instead"
                )
            # Each context is cut only as far as its own continuation requires, as in the harness.
            return [self._pass(_cut(change.ids, most, tokens), [tokens])[0] for tokens in continuations]
        positions = continued_positions(change.positions, longest - 1, kind=self._config.kinds[0])
        return self._pass(change.ids, continuations, positions, change.orders)

    def _pass(
        self,
        ids: Tensor,
        continuations: list[list[int]],
        positions: Tensor | None = None,
        orders: Mapping[int, Tensor] | None = None,
    ) -> list[tuple[float, bool]]:
        method, model, shared = self.method, self.loaded.model, True
        if method is not None and method.is_open:
            # Open parameters may depend on the length of the whole text, which differs by continuation.
            if len(continuations) > 1:
                return [self._pass(ids, [tokens])[0] for tokens in continuations]
            length = len(ids) + len(continuations[0])
            method, shared = method.fitted(trained=trained_length(model), length=length), False
        with (
            new_process_settings(weight_dtypes(model)),
            nullcontext() if method is None else extended(model, method, proof=self._proof),
        ):
            logprobs, greedy = continued(
                model, self._proof, ids[None], continuations, positions=positions, orders=orders, shared=shared
            )
        return list(zip(logprobs.tolist(), greedy.tolist(), strict=True))


def _cut(ids: Tensor, most: int, continuation: Sequence[int]) -> Tensor:
    """Return the end of a context that fits before a continuation, whose last token is not read."""
    count = most - len(continuation) + 1
    if count < 1:
        raise ConfigError(f"a continuation of {len(continuation)} tokens leaves no token for the context within {most}")
    return ids[-count:]

r"""RULER of NVIDIA within and beyond the trained length: the unmodified model, length methods and cache plans.

    python benchmarks/ruler.py prompts smollm2 --lengths 1x 2x --out ruler/smollm2
    python benchmarks/ruler.py check smollm2 --prompts ruler/smollm2
    python benchmarks/ruler.py answers smollm2 --prompts ruler/smollm2 --out smollm2.jsonl --device cuda
    python benchmarks/ruler.py score smollm2.jsonl --prompts ruler/smollm2
    python benchmarks/ruler.py page

``prompts`` and ``score`` run NVIDIA's code (see ``nvidia_ruler.py``); ``answers`` needs torch and transformers only, so
it may run on another machine. Lengths are tokens of prompt and answer, or multiples of the trained length (``2x``).
The unmodified model answers at all of them, length methods beyond the trained length, cache plans (``--plan``, files of
``wherewhat plan``) within it. Answers are appended to a file, and what it holds is not answered again; nor is what the
files of ``--answered`` hold. The answers behind ``docs/ruler.md`` are in ``studies/ruler/answers``: name them there,
and for ``score`` beside new ones.

**On a GPU.** A step of one token of each text starts about 45 kernels per layer for the unmodified model, 75 to 140 for
most methods and 200 for near-far, and Python takes longer to start most of them than the GPU to run them: in 30 layers
20, 50 and 85 ms on a CPU of 2.5 GHz. Reading the prompts takes less time than that. So let several processes share the
GPU, after ``nvidia-cuda-mps-control -d``: without it they take turns, and each value that Python reads waits for a
turn. A share of a method's batches has nearly as many steps as all of them: where there are enough methods, start
processes with other ``--methods`` in place of ``--share``. Give each batch the tokens of one task at least. A token
takes ``4 · layers · kv_heads · head_dim`` bytes in bfloat16, and under a method that rotates keys as many again: 46 KB
for SmolLM2, 45 for TinyLlama; a process of SmolLM2 with batches of 220,000 tokens takes 26 GB. InfLLM, which also keeps
sums in float64, and plans have batches of a quarter of the tokens. In order of what they tell::

    answers() {  # model, name, options: at most 8 minutes of six processes; the same call continues them
        for i in 1 2 3 4 5 6; do
            python benchmarks/ruler.py answers "$1" --prompts "ruler/$2" --out "$2.$i.jsonl" --name "$2" --share $i/6 \
                --answered "$2".?.jsonl --device cuda --dtype bfloat16 --batch 160000 --minutes 8 "${@:3}" &
        done
        wait
    }
    answers MODEL NAME --lengths 1x --methods none
    python benchmarks/ruler.py check MODEL --prompts ruler/NAME --lengths 1x --device cuda --batch 200000
    python benchmarks/ruler.py score NAME.?.jsonl --prompts ruler/NAME    # the tasks that the model can do
    answers MODEL NAME --lengths 2x 1x 4x 1.5x --tasks TASKS --near-far-plan half.json --plan quarter.json half.json
    answers MODEL NAME --lengths 2x 4x --near-far-plan half.json --samples 10

``answers --dry-run`` prints operations, batches and steps of each of them, and about how long one process takes.
"""

from __future__ import annotations

import argparse
import json
import lzma
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import wherewhat
from batch_cache import BatchCache, holds_whole_texts
from nvidia_ruler import PACKAGE, TASKS, VERSION, Prompt, PromptSet, make_all, score_answers, unpacked
from ruler_page import able_tasks, write_page
from variants import PLANNED, variant
from wherewhat.caches.plan import Plan
from wherewhat.captures.proof import Proof, prove
from wherewhat.errors import WherewhatError
from wherewhat.files import make_folder, write_file
from wherewhat.lengths import METHODS, InfLLM, LengthMethod, NearFar, extended, find_method, keys_kept
from wherewhat.models.loaded import LoadedModel, trained_length
from wherewhat.models.loader import load

UNMODIFIED = "none"
STUDIES = Path(__file__).resolve().parents[1] / "studies" / "ruler"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "ruler.md"
_SAMPLES = 50
_LOOK = 16
"""Steps after which finished answers are looked for."""
_READ = 131_072
"""Most tokens of prompts that are read in one pass."""


@dataclass(frozen=True)
class Question:
    """A prompt to be answered.

    Attributes:
        task: Name of the task.
        prompt: The sample.
        ids: Its token ids.
        new_tokens: Most tokens of the answer.
    """

    task: str
    prompt: Prompt
    ids: tuple[int, ...]
    new_tokens: int

    def answered(self, text: str) -> bool:
        """Return whether a text contains all references, so that no further token can change its score."""
        lower = text.lower()
        return all(reference.lower() in lower for reference in self.prompt.references)


def main() -> int:
    """Run a command; return 2 if something is wrong with its input."""
    options = _arguments()
    if getattr(options, "threads", 0):
        torch.set_num_threads(options.threads)
    try:
        options.run(options)
    except WherewhatError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="NVIDIA's RULER for length methods and cache plans.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any, help: str) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = commands.add_parser(name, help=help, description=help)
        added.set_defaults(run=run)
        return added

    def model(added: argparse.ArgumentParser) -> None:
        added.add_argument("model", help="name, folder or file of the model")
        added.add_argument("--trained", type=int, help="trained length in place of that in the model's configuration")
        added.add_argument("--lengths", nargs="+", metavar="N", help="tokens, or multiples of the trained length (2x)")
        added.add_argument("--tasks", nargs="+", choices=TASKS, metavar="TASK", help=f"of {', '.join(TASKS)}")
        added.add_argument("--samples", type=int, default=_SAMPLES, help="samples of each task")
        added.add_argument("--threads", type=int, default=0, help="CPU threads; 0 for torch's choice")

    def device(added: argparse.ArgumentParser) -> None:
        added.add_argument("--prompts", type=Path, required=True, metavar="DIR", help="folder of 'prompts'")
        added.add_argument("--device", default="cpu")
        added.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
        added.add_argument("--batch", type=int, help="most tokens of a batch; default: by the memory of the device")

    added = command("prompts", _prompts, "Write the prompts of all tasks for a model's tokenizer.")
    model(added)
    added.add_argument("--out", type=Path, required=True, metavar="DIR")
    added.add_argument("--patience", type=float, default=900, help="seconds after which a task is left out")

    added = command("answers", _answers, "Answer prompts, greedily; continue where the file ends.")
    model(added)
    device(added)
    most = f"'{UNMODIFIED}' is the unmodified model; default: all"
    added.add_argument("--methods", nargs="*", choices=METHODS, default=[*METHODS], help=most)
    added.add_argument(
        "--variants", nargs="+", default=[], metavar="METHOD:OPTION=VALUE", help="also methods with other parameters"
    )
    added.add_argument("--plan", type=Path, nargs="+", default=[], help="cache plans, run within the trained length")
    added.add_argument("--near-far-plan", type=Path, help="also near-far for the heads of this plan")
    added.add_argument("--name", help="name of the model in results")
    added.add_argument(
        "--share", type=_share, default=(0, 1), metavar="I/N", help="one of N parts of the work, I from 1 to N"
    )
    added.add_argument(
        "--answered", type=Path, nargs="*", default=[], metavar="FILE", help="answers that are not given again"
    )
    added.add_argument("--minutes", type=float, help="begin no batch after this time")
    added.add_argument(
        "--dry-run", action="store_true", help="print the work of each method and length, answer nothing"
    )
    added.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON lines, continued if it exists")

    added = command("check", _check, "Compare answers of the unmodified model with generate of transformers.")
    model(added)
    device(added)
    added.add_argument("--count", type=int, default=100, help="prompts to compare")

    added = command("score", _score, "Score answers with NVIDIA's evaluate.py.")
    added.add_argument("answers", type=Path, nargs="+", help="files of 'answers' of one model")
    added.add_argument("--prompts", type=Path, required=True, metavar="DIR")
    added.add_argument("--out", type=Path, help="default: studies/ruler/MODEL.json")

    added = command("page", _page, "Write docs/ruler.md from the stored scores.")
    added.add_argument("--scores", type=Path, default=STUDIES, metavar="DIR")
    added.add_argument("--out", type=Path, default=PAGE)
    return parser.parse_args()


def _share(text: str) -> tuple[int, int]:
    """Return the number of a part, from 0, and the number of parts."""
    first, _, count = text.partition("/")
    if not (first.isdecimal() and count.isdecimal() and 1 <= int(first) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a share such as 1/4")
    return int(first) - 1, int(count)


def _prompts(options: argparse.Namespace) -> None:
    # Only the tokenizer and the trained length are needed: random weights are made faster than stored ones are read.
    loaded = load(options.model, weights="random", device="cpu", dtype="bfloat16")
    lengths = lengths_of(options.lengths or ["1x", "1.5x", "2x", "4x"], options.trained or trained_length(loaded.model))
    tasks = options.tasks or TASKS
    make_all(loaded, lengths, tasks, options.samples, options.out, patience=options.patience, say=_print)


def lengths_of(names: Sequence[str], trained: int) -> list[int]:
    """Return lengths in tokens: ``4096`` is one, ``2x`` a multiple of the trained length."""
    lengths = []
    for name in names:
        try:
            length = round(float(name[:-1]) * trained) if name.endswith("x") else int(name)
        except ValueError:
            length = 0
        if length < 1:
            raise WherewhatError(f"{name!r} is not a length: give tokens, such as 4096, or a multiple, such as 2x")
        lengths.append(length)
    return lengths


def _stored(options: argparse.Namespace, trained: int) -> dict[int, list[PromptSet]]:
    """Return the sets of prompts of a folder by length, with the first samples of each."""
    names = options.lengths or sorted((path.name for path in options.prompts.glob("[0-9]*")), key=int)
    stored: dict[int, list[PromptSet]] = {}
    for length in lengths_of(names, trained):
        files = [options.prompts / str(length) / f"{task}.jsonl.xz" for task in options.tasks or TASKS]
        sets = [PromptSet.load(file) for file in files if file.exists()]
        stored[length] = [replace(one, prompts=one.prompts[: options.samples]) for one in sets]
    if not any(stored.values()):
        raise WherewhatError(f"{options.prompts} has no prompts of these tasks and lengths: write them with 'prompts'")
    return stored


def questions(loaded: LoadedModel, stored: PromptSet, samples: int | None = None) -> list[Question]:
    """Return the samples of a set or the first of them; as the model reads them, prompt and answer must fit.

    Versions of transformers may split a text otherwise than that with which the prompts were made.
    """
    found = []
    for prompt in stored.prompts if samples is None else stored.prompts[:samples]:
        ids = tuple(loaded.tokenize(prompt.text))
        if len(ids) + stored.new_tokens > stored.length:
            raise WherewhatError(
                f"{loaded.name} reads sample {prompt.index} of {stored.task} as {len(ids)} tokens, which with "
                f"{stored.new_tokens} of the answer exceeds the context of {stored.length}: make the prompts with the "
                "tokenizer of this model"
            )
        found.append(Question(stored.task, replace(prompt, tokens=len(ids)), ids, stored.new_tokens))
    return found


def batches(some: Sequence[Question], most_tokens: int) -> list[list[Question]]:
    """Return questions in the batches that need the fewest steps of :func:`answer_batch`; ids are not needed.

    A batch takes as many steps as its answers have tokens at most, and one more for each token by which its prompts
    differ. It has at most ``most_tokens`` tokens, or one question, and answers of one largest length.
    """
    made: list[list[Question]] = []
    for new_tokens in sorted({question.new_tokens for question in some}):
        group = sorted((x for x in some if x.new_tokens == new_tokens), key=lambda x: x.prompt.tokens)
        # steps[j]: fewest steps for the first j questions, the last batch of which begins at first[j].
        steps, first = [0], [0]
        for stop in range(1, len(group) + 1):
            longest = group[stop - 1].prompt.tokens
            least = max(0, stop - max(1, most_tokens // (longest + new_tokens)))
            start = min(range(least, stop), key=lambda i: steps[i] + longest - group[i].prompt.tokens)
            steps.append(steps[start] + longest - group[start].prompt.tokens + new_tokens)
            first.append(start)
        stop, own = len(group), []
        while stop:
            own.append(group[first[stop] : stop])
            stop = first[stop]
        made += reversed(own)
    return made


def steps(batch: Sequence[Question]) -> int:
    """Return the most steps of one token of each text that a batch of :func:`batches` takes."""
    return batch[-1].prompt.tokens - batch[0].prompt.tokens + batch[0].new_tokens


def shared(some: Sequence[Question], most_tokens: int, share: tuple[int, int]) -> list[list[Question]]:
    """Return the batches of one part of the work: parts have about the same number of steps.

    Args:
        some: All questions, the same for all parts.
        most_tokens: See :func:`batches`.
        share: Number of the part, from 0, and the number of parts.
    """
    part, count = share
    longest = max((x.prompt.tokens + x.new_tokens for x in some), default=0)
    most = min(most_tokens, longest * -(-len(some) // count))  # a batch for each part, if possible
    taken = [0] * count
    own = []
    for batch in sorted(batches(some, most), key=steps, reverse=True):
        least = taken.index(min(taken))
        taken[least] += steps(batch)
        if least == part:
            own.append(batch)
    return own


def answer_batch(loaded: LoadedModel, batch: Sequence[Question], *, split: bool = True) -> list[str]:
    """Return the greedy answers to prompts of different lengths, without padding.

    All texts are first read up to the length of the shortest prompt. Then each step reads one token of every text: its
    next token while the prompt lasts, afterwards the most likely one. So each row is computed as if it were alone. A
    text ends at its end token, with its last new token, or when it contains all references; it then leaves the batch.

    Args:
        loaded: The model, in the context of a length method or plan if there is one.
        batch: The prompts.
        split: Whether texts are first read a few at a time, which takes less memory; see :attr:`Way.split`.
    """
    model, ends = loaded.model, end_tokens(loaded)
    shortest, most = min(len(x.ids) for x in batch), batch[0].new_tokens
    longest = max(len(x.ids) for x in batch)
    ids = torch.zeros(len(batch), longest + most, dtype=torch.int64)
    for row, question in enumerate(batch):
        ids[row, : len(question.ids)] = torch.tensor(question.ids)
    lengths = torch.tensor([len(x.ids) for x in batch])
    ids, lengths = ids.to(model.device), lengths.to(model.device)
    ended = torch.tensor(sorted(ends), dtype=torch.int64, device=ids.device)
    open_rows = torch.ones(len(batch), dtype=torch.bool, device=ids.device)
    asked, texts = list(range(len(batch))), [""] * len(batch)
    with torch.no_grad(), keys_kept() as kept:
        logits, cache = _read(model, ids[:, :shortest], longest + most, split=split)
        for place in range(shortest, longest + most):
            if place > shortest:
                new = ids[:, place - 1 : place]
                logits = model(input_ids=new, use_cache=True, past_key_values=cache, logits_to_keep=1).logits
            best = logits[:, -1].argmax(-1)
            own = place >= lengths
            ids[:, place] = torch.where(own, best, ids[:, place])
            open_rows &= ~own | ~torch.isin(best, ended)
            open_rows &= place + 1 - lengths < most
            if (place - shortest) % _LOOK != _LOOK - 1 and place + 1 < longest + most:
                continue
            left, here = [], ids.cpu()
            for row, is_open in enumerate(open_rows.tolist()):
                texts[asked[row]] = _text(loaded, batch[asked[row]], here[row], place + 1)
                if is_open and not batch[asked[row]].answered(texts[asked[row]]):
                    left.append(row)
            if not left:
                break
            if len(left) < len(asked):
                # Texts that have ended would cost as much as the others until the last one ends.
                chosen = torch.tensor(left, device=ids.device)
                ids, lengths, open_rows = (x[chosen] for x in (ids, lengths, open_rows))
                asked = [asked[x] for x in left]
                cache.batch_select_indices(chosen)
                kept.select(chosen)
    return texts


def _read(model: Any, ids: Tensor, tokens: int, *, split: bool) -> tuple[Tensor, Any]:
    """Return the logits after texts ``(batch, n)``, and a cache of their keys for up to ``tokens`` tokens each."""
    if not (split and holds_whole_texts(model.config)):
        out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
        return out.logits, out.past_key_values
    cache = BatchCache(model.config.get_text_config().num_hidden_layers, len(ids), tokens)
    logits = []
    step = max(1, _READ // ids.shape[1])
    for start in range(0, len(ids), step):
        rows = slice(start, min(len(ids), start + step))
        cache.fill(rows)
        with keys_kept():  # the first step after it rotates the keys of all texts
            logits.append(model(input_ids=ids[rows], use_cache=True, past_key_values=cache, logits_to_keep=1).logits)
    cache.fill(None)
    return torch.cat(logits), cache


def end_tokens(loaded: LoadedModel) -> frozenset[int]:
    """Return the tokens that end an answer: those at which ``generate`` of transformers stops."""
    declared = getattr(getattr(loaded.model, "generation_config", None), "eos_token_id", None)
    declared = loaded.tokenizer.eos_token_id if declared is None else declared
    return frozenset(() if declared is None else (declared,) if isinstance(declared, int) else declared)


def _text(loaded: LoadedModel, question: Question, ids: Tensor, stop: int) -> str:
    """Return the answer in a row of token ids up to its end token."""
    start = len(question.ids)
    written = ids[start : min(stop, start + question.new_tokens)].tolist()
    ends = end_tokens(loaded)
    end = next((place for place, token in enumerate(written) if token in ends), len(written))
    text: str = loaded.tokenizer.decode(written[:end], skip_special_tokens=True)
    return text


@dataclass(frozen=True)
class Way:
    """A way of running the model: unmodified, under a length method or under a plan.

    Attributes:
        name: Its name in results.
        method: The length method; None for none.
        plan: The cache plan; None for none.
    """

    name: str
    method: LengthMethod | None = None
    plan: Plan | None = None

    @property
    def split(self) -> bool:
        """Whether texts can be read a few at a time: a plan has its own cache, and InfLLM keeps sums of one batch."""
        return self.plan is None and not isinstance(self.method, InfLLM)

    def largest(self, tokens: int) -> int:
        """Return the most tokens of a batch, if keys of so many fit: texts that are read at once need more memory."""
        return tokens if self.split else max(1, tokens // 4)

    def runs_at(self, length: int, trained: int) -> bool:
        """Return whether it is measured: plans within the trained length, methods beyond, the model itself at both."""
        if self.plan is not None:
            return length <= trained
        return self.method is None or length > trained

    def context(self, loaded: LoadedModel, proof: Proof, *, length: int, trained: int) -> AbstractContextManager[Any]:
        """Return the context in which the model runs this way; parameters of methods are those for ``length``."""
        if self.plan is not None:
            return wherewhat.planned(loaded.model, self.plan, proof=proof)
        if self.method is None:
            return nullcontext()
        fitted = self.method.fitted(trained=trained, length=length) if self.method.is_open else self.method
        return extended(loaded.model, fitted, proof=proof)


def ways(
    methods: Sequence[str], plans: Sequence[Path], near_far: Path | None, variants: Sequence[str] = ()
) -> list[Way]:
    """Return the ways that are asked for, the unmodified model first; ``none`` is that."""
    found = [Way(UNMODIFIED)] if UNMODIFIED in methods else []
    found += [Way(name, method=find_method(name)()) for name in methods if name != UNMODIFIED]
    far_heads = None if near_far is None else Plan.load(near_far)
    found += [Way(text, method=variant(text, far_heads)) for text in variants]
    if far_heads is not None:
        found.append(Way(PLANNED, method=NearFar(plan=far_heads)))
    for path in plans:
        plan = Plan.load(path)
        found.append(Way(f"plan-{100 * plan.share:.0f}", plan=plan))
    names = [way.name for way in found]
    if len(set(names)) < len(names):
        raise WherewhatError(f"two plans keep the same share ({names[-1]}): give one of them")
    return found


def _answers(options: argparse.Namespace) -> None:
    # To count operations, shapes are enough.
    weights = {"weights": "random"} if options.dry_run else {}
    loaded = load(options.model, device=options.device, dtype=options.dtype, **weights)
    trained = options.trained or trained_length(loaded.model)
    stored = _stored(options, trained)
    about = {"model": options.name or loaded.name, "weights_hash": loaded.weights_hash, "dtype": loaded.dtype}
    about |= {"trained": trained, "device": _device_name(loaded)}
    about |= {"versions": {"wherewhat": _version("wherewhat"), "torch": torch.__version__}}
    done = set() if options.dry_run else _resumed(options.out, about)
    for path in options.answered:
        if path.exists() and path != options.out:
            done |= _keys(read_answers(path)[1])
    most = options.batch or batch_tokens(loaded)
    cells = [
        (length, way)
        for length in stored
        for way in ways(options.methods, options.plan, options.near_far_plan, options.variants)
        if way.runs_at(length, trained)
    ]
    if options.dry_run:
        _print_work(loaded, cells, stored, most, options.share)
        return
    proof = prove(loaded.model)
    left = _work(cells, stored, done, most, options.share)
    _print(
        f"{loaded.name}: {left.answers:,} answers to come in {left.batches:,} batches, with {left.tokens:,} tokens of "
        f"prompts and {left.steps:,} steps; {len(done):,} answers are in {options.out}"
    )
    started, answered, tokens = time.perf_counter(), 0, 0
    read: dict[int, list[Question]] = {}
    with options.out.open("a", encoding="utf-8") as file:
        for length, way in cells:
            if length not in read:
                read = {length: [x for one in stored[length] for x in questions(loaded, one)]}
            asked = _asked(read[length], length, way, done, most, options.share)
            if not asked:
                continue
            with way.context(loaded, proof, length=length, trained=trained):
                for batch in asked:
                    seconds = time.perf_counter() - started
                    if options.minutes is not None and seconds > 60 * options.minutes:
                        _print(
                            f"stopped after {seconds / 60:.1f} minutes with {left.answers - answered:,} answers to come"
                        )
                        return
                    began = time.perf_counter()
                    texts = _answer_or_split(loaded, batch, way)
                    took = (time.perf_counter() - began) / len(batch)
                    for question, text in zip(batch, texts, strict=True):
                        line = {"method": way.name, "length": length, "task": question.task}
                        line |= {"index": question.prompt.index, "answer": text, "seconds": round(took, 4)}
                        file.write(json.dumps(line, ensure_ascii=False) + "\n")
                    file.flush()
                    answered, tokens = answered + len(batch), tokens + sum(x.prompt.tokens for x in batch)
                    spent = (time.perf_counter() - started) / 60
                    tasks = ", ".join(sorted({question.task for question in batch}))
                    _print(
                        f"{way.name}, {length:,} tokens, {tasks}: {len(batch)} answers, {took:.2f} s each; "
                        f"{answered:,} of {left.answers:,} in {spent:.1f} min, "
                        f"about {spent * (left.tokens - tokens) / tokens:.0f} min left"
                    )


@dataclass(frozen=True)
class Work:
    """What is left to do: numbers of answers, batches, prompt tokens, their squares, and steps of one token each."""

    answers: int
    batches: int
    tokens: int
    squares: int
    steps: int


def _work(
    cells: Sequence[tuple[int, Way]],
    stored: Mapping[int, Sequence[PromptSet]],
    done: set[tuple[str, int, str, int]],
    most: int,
    share: tuple[int, int],
) -> Work:
    """Return what is left to do before anything is tokenised."""
    made: list[list[Question]] = []
    for length, way in cells:
        some = [Question(one.task, prompt, (), one.new_tokens) for one in stored[length] for prompt in one.prompts]
        made += _asked(some, length, way, done, most, share)
    return Work(
        answers=sum(map(len, made)),
        batches=len(made),
        tokens=sum(x.prompt.tokens for batch in made for x in batch),
        squares=sum(x.prompt.tokens**2 for batch in made for x in batch),
        steps=sum(map(steps, made)),
    )


def _asked(
    some: Sequence[Question],
    length: int,
    way: Way,
    done: set[tuple[str, int, str, int]],
    most: int,
    share: tuple[int, int],
) -> list[list[Question]]:
    """Return the batches of one part of the work, without questions that are answered."""

    def left(part: Sequence[Question]) -> list[Question]:
        return [x for x in part if (way.name, length, x.task, x.prompt.index) not in done]

    # Parts are chosen from all questions, so that they do not depend on what is answered.
    own = left(some) if share[1] == 1 else [x for part in shared(some, way.largest(most), share) for x in left(part)]
    return batches(own, way.largest(most))


_READ_RATE = 250e12
"""Operations per second with which prompts are read on an H200 in bfloat16. A Llama of 1.1 billion weights reads 4,096
tokens in 24 ms (docs/scaling.md), which is 390e12; narrower models are slower."""
_STEP_KERNELS = {UNMODIFIED: 45, "sliding-window": 75, "infllm": 140, "near-far": 200, PLANNED: 200}
"""Kernels per layer of a step: operations that were counted on a CPU, without views."""
_OTHER_KERNELS = 130
_KERNEL = 15e-6
"""Seconds in which Python starts a kernel, which takes longer than most of these kernels."""


def _print_work(
    loaded: LoadedModel,
    cells: Sequence[tuple[int, Way]],
    stored: Mapping[int, Sequence[PromptSet]],
    most: int,
    share: tuple[int, int],
) -> None:
    """Print what each way has to do at each length, and about how long one process takes on an H200."""
    config = loaded.model.config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    pairs = 2 * config.num_hidden_layers * config.num_attention_heads * width  # operations per pair of tokens
    embedding = loaded.model.get_input_embeddings().weight
    weights = sum(x.numel() for x in loaded.model.model.parameters() if x is not embedding)
    whole = 0.0
    for length, way in cells:
        work = _work([(length, way)], stored, set(), most, share)
        read = 2 * weights * work.tokens + pairs * work.squares
        step = _KERNEL * config.num_hidden_layers * _STEP_KERNELS.get(way.name, _OTHER_KERNELS)
        seconds = read / _READ_RATE + work.steps * step
        whole += seconds
        _print(
            f"{length:,} tokens, {way.name}: {work.answers:,} answers in {work.batches:,} batches, "
            f"{read / 1e12:,.0f} TFLOP to read them ({read / _READ_RATE:.0f} s), {work.steps:,} steps "
            f"({work.steps * step:.0f} s at most)"
        )
    _print(f"about {whole / 60:.1f} min of one process, at most")


def _answer_or_split(loaded: LoadedModel, batch: list[Question], way: Way) -> list[str]:
    """Return the answers to a batch, in halves if the GPU has too little memory for it."""
    try:
        return answer_batch(loaded, batch, split=way.split)
    except torch.OutOfMemoryError:
        if len(batch) == 1:
            raise WherewhatError(
                f"a text of {len(batch[0].ids):,} tokens needs more memory than the GPU has: give shorter ones"
            ) from None
    torch.cuda.empty_cache()
    middle = len(batch) // 2
    return [x for part in (batch[:middle], batch[middle:]) for x in _answer_or_split(loaded, part, way)]


def batch_tokens(loaded: LoadedModel) -> int:
    """Return how many tokens a batch may have: their keys take a fifth of a GPU's free memory; one text on a CPU."""
    if loaded.model.device.type != "cuda":
        return 1
    config = loaded.model.config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    each = 2 * config.num_hidden_layers * config.num_key_value_heads * width * loaded.model.dtype.itemsize
    free, _ = torch.cuda.mem_get_info(loaded.model.device)
    return int(free / 5 / each)


def _resumed(path: Path, about: Mapping[str, Any]) -> set[tuple[str, int, str, int]]:
    """Return which answers a file holds; begin it with a line about the model if it does not exist."""
    if not path.exists():
        make_folder(path.absolute().parent)
        write_file(path, (json.dumps(about) + "\n").encode())
        return set()
    found, lines = read_answers(path)
    other = [name for name in ("model", "weights_hash", "dtype", "trained") if found.get(name) != about[name]]
    if other:
        raise WherewhatError(f"{path} has answers with another {other[0]} ({found.get(other[0])}): give another file")
    # A line that was cut by an interruption is removed, so that the next one begins after it.
    kept = [json.dumps(found), *(json.dumps(line, ensure_ascii=False) for line in lines)]
    write_file(path, ("\n".join(kept) + "\n").encode())
    return _keys(lines)


def _keys(lines: Sequence[Mapping[str, Any]]) -> set[tuple[str, int, str, int]]:
    return {(line["method"], line["length"], line["task"], line["index"]) for line in lines}


def read_answers(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the line about the model and the answers of a file; a last line that was cut is left out."""
    try:
        data = path.read_bytes()
        first, *rest = (lzma.decompress(data) if path.suffix == ".xz" else data).decode().split("\n")
        about = json.loads(first)
        lines = [json.loads(line) for line in rest[:-1]]
    except (OSError, ValueError, lzma.LZMAError) as error:
        raise WherewhatError(f"{path} is not a file of answers ({error}): give one that 'answers' wrote") from None
    return about, lines


def _check(options: argparse.Namespace) -> None:
    loaded = load(options.model, device=options.device, dtype=options.dtype)
    stored = _stored(options, options.trained or trained_length(loaded.model))
    each = max(1, -(-options.count // sum(map(len, stored.values()))))
    some = [x for sets in stored.values() for one in sets for x in questions(loaded, one, each)][: options.count]
    equal, compared = 0, 0
    for batch in batches(some, options.batch or batch_tokens(loaded)):
        texts = answer_batch(loaded, batch)
        for question, text in zip(batch, texts, strict=True):
            plain = generated(loaded, question)
            same = agree(question, text, plain)
            equal, compared = equal + same, compared + 1
            _print(f"{question.task} {question.prompt.index}: {'equal' if same else f'{text!r}, generate: {plain!r}'}")
    _print(f"{equal} of {compared} answers are those of generate")
    if equal < compared:
        raise WherewhatError(f"{compared - equal} of {compared} answers differ from generate: compare in float32")


def generated(loaded: LoadedModel, question: Question) -> str:
    """Return the greedy answer of ``generate`` of transformers to one prompt."""
    ids = torch.tensor([question.ids], device=loaded.model.device)
    with torch.no_grad():
        out = loaded.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=question.new_tokens,
            do_sample=False,
            num_beams=1,
            pad_token_id=next(iter(end_tokens(loaded)), 0),
        )
    return _text(loaded, question, out[0], out.shape[1])


def agree(question: Question, text: str, plain: str) -> bool:
    """Return whether an answer is that of ``generate``, or its beginning up to the point where its score is certain."""
    return text == plain or (question.answered(text) and plain.startswith(text.rstrip("\ufffd")))


def _score(options: argparse.Namespace) -> None:
    folder = unpacked(_print)
    read = [read_answers(path) for path in options.answers]
    about = read[0][0]
    for other, _ in read[1:]:
        if other["weights_hash"] != about["weights_hash"]:
            raise WherewhatError(f"{options.answers[1]} has answers of another model: score one model at a time")
    cells: dict[tuple[int, str], dict[str, list[tuple[Prompt, str]]]] = {}
    sets: dict[tuple[int, str], dict[int, Prompt]] = {}
    seconds: dict[tuple[int, str], float] = {}
    lines = {(x["length"], x["method"], x["task"], x["index"]): x for _, some in read for x in some}
    order = {name: place for place, name in enumerate((UNMODIFIED, *METHODS))}
    for (length, method, task, index), line in sorted(
        lines.items(), key=lambda item: (item[0][0], order.get(item[0][1], len(order)), *item[0][1:])
    ):
        if (length, task) not in sets:
            one = PromptSet.load(options.prompts / str(length) / f"{task}.jsonl.xz")
            sets[length, task] = {prompt.index: prompt for prompt in one.prompts}
        cells.setdefault((length, method), {}).setdefault(task, []).append((sets[length, task][index], line["answer"]))
        seconds[length, method] = seconds.get((length, method), 0.0) + line["seconds"]
    result: dict[str, Any] = {**about, "ruler": f"{PACKAGE} {VERSION}", "lengths": {}}
    for (length, method), tasks in cells.items():
        for task in [name for name, pairs in tasks.items() if [x.index for x, _ in pairs] != list(range(len(pairs)))]:
            _print(f"{length:,} tokens, {method}, {task}: left out, since its answers are incomplete")
            del tasks[task]
        if not tasks:
            continue
        left_out = options.prompts / str(length) / "left-out.json"
        at = result["lengths"].setdefault(str(length), {"left_out": {}, "methods": {}})
        if left_out.exists():
            at["left_out"] = json.loads(left_out.read_text("utf-8"))
        scores = score_answers(folder, tasks)
        at["methods"][method] = {
            "seconds": round(seconds[length, method], 1),
            "scores": {task: [round(x, 2) for x in each] for task, each in scores.items()},
        }
        shown = (f"{task} {sum(each) / len(each):.0f}" for task, each in scores.items())
        _print(f"{length:,} tokens, {method}: " + ", ".join(shown))
    _print("within its trained length the model can do: " + (", ".join(able_tasks(result)) or "none of the tasks"))
    path = options.out or STUDIES / f"{about['model'].lower()}.json"
    make_folder(path.parent)
    write_file(path, (json.dumps(result, separators=(",", ":")) + "\n").encode())
    _print(f"{path}")


def _page(options: argparse.Namespace) -> None:
    files = sorted(options.scores.glob("*.json"))
    if not files:
        raise WherewhatError(f"{options.scores} has no scores: write them with 'score'")
    write_file(options.out, write_page([json.loads(file.read_text("utf-8")) for file in files]).encode())
    _print(f"{options.out}")


def _device_name(loaded: LoadedModel) -> str:
    device = loaded.model.device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "source"


def _print(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())

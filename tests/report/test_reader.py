"""A reader who does not believe: every sentence about constructed models, asserted against the stored numbers.

Each model is reported as a user would: on a page, in the terminal and in Python. :data:`CHECKS` holds one check for
each kind of sentence; it computes what the sentence says from the scores on disk, with scipy's intervals. A sentence of
another kind fails the test: a new sentence comes with its check here.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from scipy.stats import t as student
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPT2Config,
    LlamaConfig,
    MptConfig,
    PreTrainedTokenizerFast,
)

import wherewhat
from helpers.heads import constructed_model, constructed_texts
from wherewhat.measures.swaps import LABELS
from wherewhat.report.report import make_report
from wherewhat.runs.request import MemoryModel

NUMBER = r"-?\d+(?:\.\d+)?"
MEAN = rf"{NUMBER}(?: ± <?{NUMBER})?(?: %)?(?: \({NUMBER} to {NUMBER}(?: %)?\))?"


class Stored:
    """Scores on disk of the runs of one report."""

    def __init__(self, out: Path) -> None:
        self.rows = {}
        for path in out.glob("*/scores.parquet"):
            for row in pq.read_table(path).to_pylist():
                self.rows.setdefault((row["measurement"], row["weights"], row["metric"]), []).append(row)

    def documents(self, measurement, metric, weights="trained"):
        """Mean over heads and layers by document."""
        found: dict[str, list[float]] = {}
        for row in self.rows.get((measurement, weights, metric), ()):
            if row["document"] is not None and row["value"] is not None:
                found.setdefault(row["document"], []).append(row["value"])
        return {name: sum(values) / len(values) for name, values in found.items()}

    def mean(self, measurement, metric, weights="trained"):
        """Values by document, or the mean of a metric that documents only have together."""
        found = list(self.documents(measurement, metric, weights).values())
        rows = self.rows.get((measurement, weights, metric), ())
        together = [row["value"] for row in rows if row["document"] is None and row["value"] is not None]
        return found or ([sum(together) / len(together)] if together else [])

    def difference(self, measurement, metric, other=None, weights="trained", than="trained"):
        """Differences of two metrics, or of one under two weights, by document."""
        one, two = self.documents(measurement, metric, weights), self.documents(measurement, other or metric, than)
        return [one[name] - two[name] for name in one if name in two]

    def draws(self, metric):
        """Half of the interval of a difference between two untrained models, from the heads of one."""
        heads: dict[int, dict[int, list[float]]] = {}
        for row in self.rows["axes", "random", metric]:
            if row["head"] is not None and row["document"] is not None and row["value"] is not None:
                heads.setdefault(row["layer"], {}).setdefault(row["head"], []).append(row["value"])
        layers = [torch.tensor([sum(x) / len(x) for x in layer.values()]).double() for layer in heads.values()]
        count, free = (sum(len(layer) - less for layer in layers) for less in (0, 1))
        variance = sum(float((layer - layer.mean()).square().sum()) for layer in layers) / free
        return float(student.ppf(0.975, free)) * math.sqrt(2 * variance / count)

    def labels(self, weights="trained", metric="label_no_sink"):
        """Number of heads by label over all documents together, or of the only one."""
        rows = self.rows.get(("heads", weights, f"{metric}_together")) or self.rows[("heads", weights, metric)]
        return Counter(LABELS[int(row["value"])] for row in rows if row["value"] is not None and row["value"] >= 0)

    def counted(self, metric, weights="trained"):
        """Number of heads with the label of a share of heads."""
        label = metric.removeprefix("heads_").removesuffix("_no_sink")
        version = "label_no_sink" if metric.endswith("_no_sink") or label == "sink" else "label"
        return self.labels(weights, version)[label] if label in LABELS else None


def interval(values, tests=1):
    """Mean and Student's interval."""
    x = torch.tensor(list(values), dtype=torch.float64)
    if len(x) < 2:
        return float(x.mean()), -math.inf, math.inf
    half = float(student.ppf(1 - 0.025 / tests, len(x) - 1) * x.std() / len(x) ** 0.5)
    return float(x.mean()), float(x.mean()) - half, float(x.mean()) + half


def clear(values, least=0.0, tests=1, draws=0.0):
    """Whether three or more documents show that a difference is not 0, nor small, nor that of two untrained models."""
    mean, low, high = interval(values, tests)
    reach = math.hypot(high - mean, draws)
    low, high = mean - reach, mean + reach
    return len(values) >= 3 and (low > 0 or high < 0) and abs(mean) >= least


def says(text, values):
    """Whether a mean in words is that of the values, with its interval, in digits that the interval supports."""
    found = [float(x) for x in re.findall(NUMBER, text)]
    decimals = {len(x.partition(".")[2]) for x in re.findall(NUMBER, text)}
    scale, digit = 100.0 if "%" in text else 1.0, 10.0 ** -max(decimals)
    mean, low, high = (scale * x for x in interval(values))
    assert abs(found[0] - mean) <= 0.51 * digit, (text, mean)
    if "±" in text or "to" in text:
        half = (high - low) / 2
        assert digit >= min(1.0, half / 101), (text, half)  # at most two digits of the half width after the point
        # Intervals end where the range of possible values ends.
        ends = [abs(x) for x in (found[0] - found[1], found[0] + found[1])]
        cut = found[1] < half and any(abs(x - end) <= digit for x in ends for end in (0, scale))
        assert "±" not in text or "<" in text or abs(found[1] - half) <= 0.51 * digit or cut
        assert "to" not in text or low - digit <= found[1] <= found[0] <= found[2] <= high + digit
    else:
        assert len(values) == 1, f"{text}: several documents have an interval"
    return True


# One check for each kind of sentence: the stored numbers, and the groups of the expression.

DIRECTIONS = {"raised": 1, "doubled": 1, "tripled": 1, "lowered": -1, "halved": -1, "more": 1, "less": -1}
RATIOS = {"doubled": (1.75, 2.3), "tripled": (2.6, 3.4), "halved": (0.43, 0.57)}


def training(stored, verb, what, own, untrained, n):
    metric = {"the key": "unique_c", "the distance": "unique_a"}[what]
    values = {weights: list(stored.documents("axes", metric, weights).values()) for weights in ("trained", "random")}
    change = stored.difference("axes", metric, than="random")
    assert clear(change, 0.05, draws=stored.draws(metric))
    means = [sum(x) / len(x) for x in values.values()]
    assert max(means) >= 2 * min(means)
    word = verb.split()[0]
    assert DIRECTIONS[word] * (means[0] - means[1]) > 0
    low, high = RATIOS.get(word, (0, math.inf))
    assert low <= (means[0] / means[1] if means[1] else math.inf) < high
    assert says(own, values["trained"])
    assert says(untrained, values["random"])
    assert int(n) == len(change)


def additivity(stored, direction, own, untrained, n):
    change = stored.difference("axes", "r", than="random")
    if direction in DIRECTIONS:
        assert clear(change, 0.1, draws=stored.draws("r"))
        assert DIRECTIONS[direction] * sum(change) > 0
    else:
        mean, _, high = interval(change)
        assert abs(mean) + math.hypot(high - mean, stored.draws("r")) <= 0.05 + 1e-9
        assert len(change) >= 3
        assert ("high" in direction) == (interval(stored.documents("axes", "r").values())[0] >= 0.7)
    assert says(own, stored.documents("axes", "r").values())
    assert says(untrained, stored.documents("axes", "r", "random").values())
    assert int(n) == len(change)


def single_documents(total, shares):
    """Range of the number of heads over documents."""
    counts = sorted({round(total * share) for share in shares})
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def heads(stored, total, sinks, listed, single, all_keys, untrained, n):
    counts, control, papers = stored.labels(), stored.labels("random"), stored.labels(metric="label")
    assert int(total) == sum(counts.values())
    assert sinks is None or int(sinks) == counts["sink"]
    kinds = {"positions": "positional", "contents": "symbolic", "uniformly": "uniform"}
    named = [(int(count), kinds[kind]) for count, kind in re.findall(r"(\d+) (?:follows? )?(\w+) alone", listed)]
    named = named or [(int(listed.split()[0]), "uniform")]
    for (count, kind), one, other in zip(named, single.split(" and "), untrained.split(" and "), strict=True):
        assert count == counts[kind] > int(other) == control[kind]
        metric = f"heads_{kind}_no_sink"
        assert one == single_documents(int(total), stored.documents("heads", metric).values())
        change = stored.difference("heads", metric, than="random")
        assert min(change) > 0
        assert interval(change)[1] > 0
        assert int(n) == len(change) >= 3
    if all_keys is not None:
        assert [int(x) for x in all_keys.split(" and ")] == [papers[kind] for _, kind in named]
    elif sinks is not None:
        assert [papers[kind] for _, kind in named] == [count for count, _ in named]


def sink(stored, own, even, n):
    mass, uniform = (stored.documents("heads", metric) for metric in ("sink_mass", "sink_mass_uniform"))
    assert says(own, mass.values())
    assert float(even) == pytest.approx(100 * sum(uniform.values()) / len(uniform), rel=0.05)
    assert clear([mass[name] - 2 * uniform[name] for name in mass])
    assert int(n) == len(mass)


def order_of_keys(stored, verdict, own, control, n):
    change = stored.difference("distance", "key_rank_correlation", "key_rank_correlation_scrambled")
    wanted = {"better": 1, "less well": -1}.get(verdict)
    assert clear(change, 0.05) == (wanted is not None)
    assert wanted is None or wanted * sum(change) > 0
    assert says(own, stored.documents("distance", "key_rank_correlation").values())
    assert says(control, stored.documents("distance", "key_rank_correlation_scrambled").values())
    assert n.split()[0] == {1: "one"}.get(len(change), str(len(change)))
    assert ("too few" in n) == (len(change) < 3)


def scores(stored, own, all_keys, n, untrained):
    assert says(own, stored.documents("heads", "corr_pos_sym_no_sink").values())
    assert says(all_keys, stored.documents("heads", "corr_pos_sym").values())
    assert untrained is None or says(untrained, stored.documents("heads", "corr_pos_sym_no_sink", "random").values())
    assert n.split()[0] in ("one", str(len(stored.documents("heads", "corr_pos_sym"))))


def bands(stored, band, total, random, n):
    every = {m.rpartition("_")[2] for _, _, m in stored.rows if m.startswith("loss_without_band_")}
    costs = {x: stored.difference("frequencies", f"loss_without_band_{x}", "loss_without_random") for x in every}
    clearly = {x for x, values in costs.items() if sum(values) > 0 and clear(values, 0.05, tests=len(costs))}
    assert int(n) == len(next(iter(costs.values()))) >= 3
    if band is None:
        assert not clearly
        return
    assert band in clearly
    assert sum(costs[band]) == max(sum(costs[x]) for x in clearly)
    assert says(total, stored.difference("frequencies", f"loss_without_band_{band}", "loss"))
    assert says(random, stored.difference("frequencies", "loss_without_random", "loss"))


def perturbation(stored, rise, n):
    costs = {
        metric: list(stored.documents("perturb", metric).values())
        for _, _, metric in stored.rows
        if re.fullmatch(r"rise_.*_at_5_untouched", metric)
    }
    clearly = [x for x in costs.values() if sum(x) > 0 and clear(x, 0.02, tests=len(costs))]
    if rise is None:
        assert not clearly
    else:
        assert any(abs(float(rise.split()[0]) - sum(x) / len(x)) < 0.05 * abs(sum(x)) for x in clearly)
    assert all(len(x) == int(n) for x in costs.values())


def additive_loss(stored, verb, before, after, noise, n):
    losses = [stored.documents("residual", metric) for metric in ("loss", "loss_strength_0", "loss_noise")]
    means = [sum(x.values()) / len(x) for x in losses if x]
    assert [float(x) for x in (before or after, after)] == pytest.approx(means[:2], abs=0.0051)
    assert verb is None or (means[1] > means[0]) == (verb == "rises")
    assert noise is None or float(noise) == pytest.approx(means[2], abs=0.0051)
    assert n.split()[0] == {1: "one"}.get(len(losses[0]), str(len(losses[0])))


def summary(stored, own, untrained, total, listed, n):
    counts = stored.labels() if total else Counter()
    if own is not None:
        assert says(own, stored.documents("axes", "r2").values())
        control = stored.documents("axes", "r2", "random")
        assert (untrained is not None) == bool(control)
        assert untrained is None or says(untrained, control.values())
    assert total is None or int(total) == sum(counts.values())
    names = {"attention": "sink"}
    named = re.findall(r"(\d+) (?:is |are )?(?:an )?(\w+)", listed or "")
    assert {names.get(name, name): int(count) for count, name in named} == +counts
    sizes = {len(stored.documents(*metric)) for metric in (("axes", "r2"), ("heads", "s_pos"))} - {0}
    assert {1 if count == "one" else int(count) for count in re.findall(r"one|\d+", n)} <= sizes


def brief(short, text):
    """A short sentence is the whole one with rounded means: two digits at most, as of the uncertainty."""
    means = rf"({NUMBER})(?: ± <?({NUMBER}))?( %)?(?: \(({NUMBER}) to ({NUMBER})(?: %)?\))?"
    whole = re.sub(r" \((?:[^()]|\([^()]*\))*\)\.$", ".", text) if re.search(r"documents?\)\.$", text) else text
    assert re.sub(means, "#", whole) == re.sub(means, "#", short)
    for full, part in zip(re.finditer(means, whole), re.finditer(means, short), strict=True):
        if full[2] is None and full[4] is None:
            assert float(full[1]) == pytest.approx(float(part[1]), rel=0.051)  # a count, or of one document
            continue
        assert part[0] == part[1] + (part[3] or "")
        digits, half = part[1].lstrip("-"), float(full[2]) if full[2] else (float(full[5]) - float(full[4])) / 2
        assert len(digits.replace(".", "").strip("0")) <= 2, (short, text)
        zeros = 0 if "." in digits else len(digits) - len(digits.rstrip("0"))
        last = 10.0 ** (zeros - len(digits.partition(".")[2]))
        # The half width in the text is rounded: 10 may be 9.5, which has its first digit one place lower.
        assert not half or "<" in full[0] or last >= 0.99 * 10.0 ** (math.floor(math.log10(0.94 * half)) - 1), (
            short,
            text,
        )
        assert abs(float(part[1]) - float(full[1])) <= 0.51 * last, (short, text)


def too_few(stored, count):
    tables = {len(stored.documents(name, "loss")) for name in ("perturb", "frequencies")}
    assert {"One": 1, "Two": 2}[count] in tables


DOCUMENTS = r"\((\d+) documents\)\."
CHECKS = {
    rf"Training (\S+(?: \S+-fold)?) what only (the \w+) explains: ({MEAN}) of the logits' variance, against ({MEAN}) "
    rf"in one untrained model {DOCUMENTS}": training,
    rf"Training made logits (more|less) additive: r is ({MEAN}) here, ({MEAN}) in one untrained model {DOCUMENTS}": (
        additivity
    ),
    rf"(A high r|r) is no sign of training in this model: ({MEAN}) here, ({MEAN}) in one untrained model {DOCUMENTS}": (
        additivity
    ),
    r"Of (\d+) heads, (?:(\d+) (?:is an|are) attention sinks?; of the others, )?(.*?) \(in single documents (.*?)"
    r"(?:; over all keys, with sinks, (.*?))?; in one untrained model (.*?); (\d+) documents\)\.": heads,
    r"(\d+ of )(\d+) heads attends? uniformly, to no position and no content \(in single documents (.*?); in one "
    r"untrained model (.*?); (\d+) documents\)\.": lambda stored, count, total, single, untrained, n: heads(
        stored, total, None, f"{count} uniformly", single, None, untrained, n
    ),
    rf"Heads give ({MEAN}) of their attention to the first token; uniform attention would give ([\d.]+) % "
    rf"{DOCUMENTS}": sink,
    rf"(?:The order of keys is kept (better|less well) than with random phases|How well the order of keys is kept): "
    rf"rank correlation ({MEAN}), with random phases ({MEAN}) \((.*?)\)\.(?: The phases of this model move .*)?": (
        order_of_keys
    ),
    rf"Over heads, the positional and the symbolic score correlate by ({MEAN}) over the keys after the sink and by "
    rf"({MEAN}) over all keys \((.*?)\)(?:; in one untrained model by ({MEAN}) after the sink)?\.": scores,
    rf"(?:Masking band (\d+) costs most: ({MEAN}) nats, against ({MEAN}) for as many random planes|No band costs "
    rf"clearly more than as many random planes when it is masked) {DOCUMENTS}": bands,
    rf"(?:With 5 % of .*?, the loss of the other tokens rises by ({MEAN}) nats|No perturbation raises the loss of the "
    rf"other tokens clearly, by 0.02 nats or more) {DOCUMENTS}": perturbation,
    rf"With exactly additive logits(?: in all heads)? the loss (?:(rises|falls) from ({NUMBER}) to|stays at) ({NUMBER})"
    rf" nats(?:, by {MEAN})?(?:; with noise of the same size added to the logits instead, it is ({NUMBER}))? "
    r"\((one document|\d+ documents)(?: of \d+ tokens, no interval)?\)\.": additive_loss,
    rf"(?:Distance, query and key terms together explain ({MEAN}) of the variance of attention logits(?: \(({MEAN}) in "
    r"one untrained model\))?)?(?:; )?(?:[oO]f (\d+) heads, (.*?))? \(([^()]* documents?)\)\.": summary,
    r"(One|Two) documents? (?:is|are) too few to say which differences are more than chance\.": too_few,
}


def believe(stored, text):
    """Check one sentence."""
    for expression, check in CHECKS.items():
        match = re.fullmatch(expression, text)
        if match is not None:
            check(stored, *match.groups())
            return
    raise AssertionError(f"no check for this sentence: {text}")


MODELS = {
    "uniform attention": ["uniform"] * 8,
    "pure sink": ["sink"] * 8,
    "pure position": ["positional"] * 8,
    "pure content": ["symbolic"] * 8,
    "half sinks": ["sink"] * 6 + ["symbolic"] * 6,
    "noise": ["noise"] * 8,
}
CASES = [(name, 3) for name in MODELS] + [("pure content", 1), ("pure content", 2), ("noise", 2)]


@pytest.mark.parametrize(("name", "documents"), CASES)
def test_every_sentence(name, documents, tmp_path):
    model = constructed_model(*MODELS[name])
    texts = constructed_texts(model, documents)
    report = make_report(model, out=tmp_path, texts=texts, tokens=len(texts[0]))
    stored = Stored(tmp_path)
    (page,) = report.data["models"]
    sentences = [finding["text"] for finding in page["findings"]]
    assert report.models[0].findings == sentences  # what the terminal prints
    assert documents >= 3 or not sentences
    if name == "noise":  # an untrained model beside another one
        assert not [text for text in sentences if text.startswith("Training")]
    captions = [caption for caption in page["captions"].values() if caption not in sentences]
    for sentence in (page["summary"], *page["findings"]):
        brief(sentence["short"], sentence["text"])
    prices = [card["price"] for card in page["numbers"] if card["price"]]
    assert prices or name == "uniform attention"
    for text in (page["summary"]["text"], *sentences, *captions, *prices):
        believe(stored, text)
    cards(stored, page["numbers"])
    for path in tmp_path.glob("*-trained-*/scores.parquet"):
        table(wherewhat.Result.load(path.parent), stored)


def cards(stored, numbers):
    """Each headline number and its control models."""
    for card in numbers:
        names = dict(zip((value["name"] for value in card["values"]), card["metrics"], strict=True))
        for value in card["values"]:
            metric = names[value["name"]]
            agrees(value["words"], stored.mean(card["measurement"], metric), stored.counted(metric))
        for value in card["controls"]:
            weights, _, which = value["name"].removeprefix("one ").partition(" control")
            if value["name"].startswith("one "):
                metric = names.get(which.removeprefix(", "), card["metrics"][0])
                agrees(
                    value["words"], stored.mean(card["measurement"], metric, weights), stored.counted(metric, weights)
                )


def table(result, stored):
    """Each row of what Python prints."""
    titles = {summary.metric.title: summary.metric.name for summary in result.summary()}
    printed = repr(result).splitlines()[2:]
    for line in printed:
        title = next((x for x in sorted(titles, key=len, reverse=True) if line.startswith(f"{x} ")), None)
        cells = re.split(r"  +", line)
        if title is not None and len(cells) > 1:
            agrees(cells[1], stored.mean(result.measurement, titles[title]), stored.counted(titles[title]))


def agrees(words, values, counted=None):
    """A cell: undefined without values, else their mean in words; of a label the number of heads."""
    if " of " in words:
        count, total, *single = re.fullmatch(r"(\d+) of (\d+)(?:; (.*) in single documents)?", words).groups()
        assert int(count) == counted
        assert single == ([None] if len(values) == 1 else [single_documents(int(total), values)])
        return
    assert (words == "undefined") == (not values), (words, values)
    assert not values or says(words, values)


def test_a_model_that_is_not_a_number_is_refused():
    model = constructed_model("symbolic", "symbolic")
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.fill_(torch.nan)
    with pytest.raises(wherewhat.WherewhatError):
        wherewhat.measure("axes", model, constructed_texts(model, 3))


def parts(claims):
    """A part about one of a claim's numbers is decided by the interval of that number; return how many were."""
    wanted = {"holds": {True}, "does not hold": {False}, "cannot be told": {None}, "holds if": {True, False}}
    decided = 0
    for claim in claims:
        numbers = {number["title"]: number for number in claim["numbers"]}
        outcomes = {part["outcome"] for part in claim["parts"]}
        verdict = claim["verdict"]
        if verdict == "cannot be told" and claim["condition"]:  # decided by the rule, and left open by resampling
            assert claim["stability"]["changed"] > 0.1
            verdict = re.match(r"holds if|holds|does not hold", claim["stability"]["verdict"])[0]
        assert wanted.get(verdict, set()) <= outcomes
        assert verdict != "holds" or outcomes == {True}
        for part in claim["parts"]:
            match = re.fullmatch(rf"(.*) is at (least|most) ({NUMBER})", part["statement"])
            if match is None or match[1] not in numbers:
                continue
            number, threshold = numbers[match[1]], float(match[3])
            enough = number["low"] is not None and number["n"] >= 3
            above, below = enough and number["low"] >= threshold, enough and number["high"] < threshold
            expected = {"least": above, "most": below}[match[2]]
            assert part["outcome"] is (expected if above or below else None), (claim["number"], part)
            decided += 1
    return decided


def test_stored_verdicts_follow_from_their_numbers():
    """What the documentation says about claims."""
    studies = (Path(__file__).parents[2] / "studies" / "claims").glob("*.json")
    assert parts(claim for path in studies for claim in json.loads(path.read_text("utf-8"))["claims"])


SIZES = {"vocab_size": 48, "initializer_range": 0.3}
CONFIGS = (
    LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        **SIZES,
    ),
    GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=128, **SIZES),
    BloomConfig(hidden_size=32, n_layer=2, n_head=4, **SIZES),
    MptConfig(d_model=32, n_layers=2, n_heads=4, max_seq_len=128, **SIZES),
)


def random_report(seed, out, *, claims=False):
    """Page, stored scores and judged claims of an untrained model on texts of random words."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[seed % 4]).eval()
    words = [f"w{number}" for number in range(SIZES["vocab_size"])]
    rules = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="w0"))
    rules.pre_tokenizer = Whitespace()
    given = MemoryModel(model, PreTrainedTokenizerFast(tokenizer_object=rules, unk_token="w0"))
    drawn = torch.randint(SIZES["vocab_size"], (2 + seed // 4 % 3, 40)).tolist()
    texts = [" ".join(words[token] for token in text) for text in drawn]
    report = make_report(given, out=out, texts=texts, tokens=40)
    stored = Stored(out)
    judged = wherewhat.judge_claims(given, claims=(1, 5, 6, 17, 18, 21), texts=texts, out=out) if claims else None
    return report.data["models"][0], stored, judged


@pytest.mark.slow
def test_untrained_models(tmp_path):
    """No sentence without support, and none about training, on sixteen untrained models."""
    for seed in range(16):
        page, stored, judged = random_report(seed, tmp_path / str(seed), claims=seed < 4)
        sentences = [finding["text"] for finding in page["findings"]]
        for text in {page["summary"]["text"], *sentences, *page["captions"].values()}:
            believe(stored, text)
        for sentence in (page["summary"], *page["findings"]):
            brief(sentence["short"], sentence["text"])
        cards(stored, page["numbers"])
        assert not [text for text in sentences if text.startswith("Training")]
        assert judged is None or parts(judged.data["claims"])

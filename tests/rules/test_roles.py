"""Known answers: constructed heads have their roles and no others, and portraits say what was measured."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import wherewhat
from helpers.capture import shared, tokens
from helpers.heads import constructed_model, constructed_texts
from helpers.runs import provenance
from wherewhat.captures.attention import LayerAttention, Mask
from wherewhat.captures.rotation import Rotation
from wherewhat.cli.tables import telling
from wherewhat.errors import ConfigError
from wherewhat.measures.heads import HeadsConfig
from wherewhat.measures.heads.heads_measurement import HeadsMeasurement
from wherewhat.measures.measurement import Text, declared_metrics, measure_text
from wherewhat.measures.statistics import Interval, interval
from wherewhat.measures.swaps import LABELS
from wherewhat.measures.swaps.scores import label
from wherewhat.rules.numbers import head_means
from wherewhat.rules.roles import (
    ROLES,
    HeadRole,
    find_removal,
    find_roles,
    portraits,
    removal_words,
    score_label,
    telling_heads,
)
from wherewhat.runs.directory import RunDirectory
from wherewhat.runs.results import StoredRun

N, VOCABULARY, ROTATED, RANDOM = 160, 8, 16, 8
FREQUENCIES = torch.logspace(0, -2, ROTATED // 2)

EXPECTED = {
    "induction": {"induction", "symbolic"},
    "duplicate token": {"duplicate token", "symbolic"},
    "retrieval": {"retrieval", "symbolic"},
    "previous token": {"previous token", "positional"},
    "three back": {"fixed distance", "positional"},
    "itself": {"fixed distance", "positional"},
    "sink": {"sink"},
    "content": {"symbolic"},
    "both": {"mixed"},
    "even": {"uniform"},
}
"""Roles by name of a constructed head."""


def constructed(ids: torch.Tensor) -> LayerAttention:
    """A layer with one head for each name in :data:`EXPECTED`.

    Keys hold the distance in rotated dimensions, then their token, the token before them, contents at random, and
    whether they are the first.
    """
    generator = torch.Generator().manual_seed(int(ids.sum()))
    rotation = Rotation("interleaved", 0, FREQUENCIES, 1.0)
    own, where = torch.eye(VOCABULARY)[ids], torch.arange(N)
    before, after = own.roll(1, 0), own.roll(-1, 0)
    before[0] = after[-1] = 0
    contents, wanted = torch.nn.functional.normalize(torch.randn(2, N, RANDOM, generator=generator), dim=-1)
    flat, first = torch.zeros(N, ROTATED), (where == 0).float()[:, None]
    flat[:, ::2] = 1.0
    k = torch.cat([flat, own, before, contents, first], -1)

    def queries(*, back=None, sharp=0.0, own=None, before=None, content=0.0, first=0.0) -> torch.Tensor:
        turned = torch.polar(torch.full((ROTATED // 2,), sharp), -(back or 0) * FREQUENCIES)
        parts = [torch.view_as_real(turned).flatten().expand(N, -1)]
        parts += [torch.zeros(N, VOCABULARY) if x is None else 40 * x for x in (own, before)]
        return torch.cat([*parts, content * wanted, torch.full((N, 1), first)], -1)

    heads = {
        "induction": queries(before=own, content=2.0),
        "duplicate token": queries(own=own, content=2.0),
        "retrieval": queries(own=after, content=2.0),
        "previous token": queries(back=1, sharp=40.0),
        "three back": queries(back=3, sharp=40.0),
        "itself": queries(back=0, sharp=40.0),
        "sink": queries(first=12.0),
        "content": queries(content=40.0),
        "both": queries(back=1, sharp=2.0, content=20.0),
        "even": queries(),
    }
    q = torch.stack([heads[name] for name in EXPECTED])
    rot_q, rot_k = (rotation.rotate(x, where) for x in (q, k.expand(len(q), N, -1)))
    empty = torch.zeros(1, len(q), N, 0)
    return LayerAttention(
        layer=0,
        name="constructed",
        rot_q=rot_q[None],
        rot_k=rot_k[None],
        value=empty,
        output=empty.transpose(1, 2),
        scale=1.0,
        mask=Mask(causal=True),
        rotation=rotation,
        positions=where,
    )


class Subject:
    def run(self, ids, reducer, *, logits=False):
        reducer(constructed(ids[0]))

    def key_mixing(self):
        return {}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of ``heads`` on the constructed layer."""
    config, measurement = HeadsConfig(queries=8, taus=(), blocks=()), HeadsMeasurement()
    texts = {f"text {seed}": tokens(N, seed=seed) % VOCABULARY for seed in range(3)}
    scores = {name: measure_text(measurement, Subject(), Text(ids), config) for name, ids in texts.items()}
    settings = {"measurement": "heads", "model": "constructed", "weights": "trained", "tokens": N, "seed": 0}
    settings |= {"options": {"queries": 8, "taus": [], "blocks": []}, "documents": [{"name": name} for name in texts]}
    directory = RunDirectory.open(tmp_path_factory.mktemp("roles"), name="heads", config=settings)
    known = declared_metrics(measurement, config)
    with directory.lock():
        parts = {**scores, None: measurement.combine(list(scores.values()), config)}
        for name, document in parts.items():
            directory.save(name or "\n", document.checked(known, of="heads"), document=name, seconds=0.1)
        directory.finish([name or "\n" for name in parts], provenance=provenance())
    return StoredRun(directory)


def test_constructed_heads_have_their_roles_and_no_others(run):
    roles = find_roles(run)
    assert {name: {role.role for role in roles[0, head]} for head, name in enumerate(EXPECTED)} == EXPECTED
    assert {role for names in EXPECTED.values() for role in names} == set(ROLES)
    distances = {name: next(x.distance for x in roles[0, head]) for head, name in enumerate(EXPECTED)}
    assert (distances["three back"], distances["itself"], distances["sink"]) == (3, 0, None)
    for listed in roles.values():
        for role in listed:
            assert role.documents == 3
            # Labels are of all documents together; patterns need more than two of three.
            assert role.documents_with == 3 or (role.chance is None and role.documents_with == 2)
            assert (role.chance is None) == (role.role in ("positional", "symbolic", "uniform", "mixed"))


def test_portraits_say_what_was_measured(run):
    sentences = [portraits(run)[0, head].replace("\u00a0", " ") for head in range(len(EXPECTED))]
    named = dict(zip(EXPECTED, sentences, strict=True))
    scores = [head_means(run, metric)[0, 0] for metric in ("s_pos_no_sink", "s_sym_no_sink")]
    (role,) = (x for x in find_roles(run)[0, 0] if x.role == "induction")
    assert named["induction"] == (
        f"Induction: {role.value:.0%} of its attention on the token after an earlier occurrence of the current one, "
        f"where there is one (chance {role.chance:.0%}), in 3 of 3 documents; content decides, position hardly "
        f"matters (scores {scores[0]:.2f} and {scores[1]:.2f})."
    ).replace("%", " %")
    assert "; position decides, content hardly matters (scores 1.00 and" in named["previous token"]
    assert "on the token 3 back" in named["three back"]
    assert "on the token itself" in named["itself"]
    assert "on the first token" in named["sink"]
    (sink,) = find_roles(run)[0, list(EXPECTED).index("sink")]
    assert "on the first 4 tokens" in sink.words(4)
    assert named["even"].startswith("Uniform: attention is even")
    assert named["both"].startswith("Mixed: position and content both matter")


def test_portraits_take_the_cost_of_removal_from_the_same_folder(tmp_path):
    """Identity: of the same model and texts only, whichever run has the most documents."""
    model, texts = shared("llama"), [tokens(48, seed=seed)[0] for seed in range(3)]
    own = wherewhat.measure("heads", model, texts, out=tmp_path)
    without = portraits(own.stored)
    other = wherewhat.measure("removal", shared("llama", seed=1), texts, out=tmp_path)
    wherewhat.measure("removal", model, tokens(48, seed=9)[0], out=tmp_path, mean=False)
    assert find_removal(own.stored) is None
    assert portraits(own.stored) == without
    wherewhat.measure("removal", model, texts[:1], out=tmp_path)
    removal = wherewhat.measure("removal", model, texts, out=tmp_path)
    found = find_removal(own.stored)
    assert found is not None
    assert found.directory.path == removal.path != other.path
    rise, noise = (removal.stored.head_documents(name) for name in ("removal_loss", "noise_loss"))
    for place, sentence in portraits(own.stored).items():
        values = [interval([*numbers[place].values()]) for numbers in (rise, noise)]
        assert sentence == f"{without[place].removesuffix('.')}; {removal_words(*values)}."


@pytest.mark.parametrize(
    ("rise", "words"),
    [
        (Interval(0.021, 0.018, 0.024, 4), "removing it costs 0.0210 ± 0.0030 nats (noise of the same size 0.0012)"),
        (Interval(-0.021, -0.024, -0.018, 4), "removing it lowers the loss by 0.0210 ± 0.0030 nats (noise of"),
        (Interval(0.001, -0.002, 0.004, 4), "removing it changes the loss by 0.0010 ± 0.0030 nats (noise of"),
        (Interval(0.0213, None, None, 1), "removing it costs 0.0213 nats in one document (noise of"),
    ],
)
def test_words_of_removal(rise, words):
    assert removal_words(rise, Interval(0.00123, None, None, 1)).startswith(words)
    assert removal_words(rise) in removal_words(rise, Interval(0.00123, None, None, 1))


def test_noise_has_the_sign_of_the_words_before_it():
    """Where removal lowers the loss by a number, so does noise."""
    noise = Interval(-0.012, None, None, 1)
    assert removal_words(Interval(-0.0206, None, None, 1), noise).endswith("(noise of the same size 0.012)")
    assert removal_words(Interval(0.0206, None, None, 1), noise).endswith("(noise of the same size -0.012)")


def test_telling_heads_show_each_role_once_before_any_twice(run):
    clearest = telling_heads(find_roles(run))
    assert [x.role for x in clearest[:6]] == list(ROLES[:6])
    assert [x.role for x in clearest[6:]] == ["fixed distance", "symbolic"]
    assert len({(x.layer, x.head) for x in clearest}) == len(clearest)
    assert telling_heads(find_roles(run), 2) == clearest[:2]


def test_roles_in_one_document():
    role = HeadRole(0, 0, "previous token", 0.5, 0.1, documents=1, documents_with=1)
    assert role.words().endswith(", in one document")


def test_roles_of_uniform_heads():
    """The table has all columns, and the command line says that there is nothing to tell."""
    model = constructed_model("uniform", "uniform")
    result = wherewhat.measure("heads", model, constructed_texts(model, 2), queries=4, taus=(), blocks=())
    table = result.roles(frame="pyarrow")
    assert table.column_names == [item.name for item in dataclasses.fields(HeadRole)]
    assert set(table["role"].to_pylist()) == {"uniform"}
    (first, _) = telling(result.stored).columns
    assert list(first.cells) == ["none"]


def test_label_of_two_numbers_is_that_of_tensors():
    scores = torch.linspace(0, 1, 21, dtype=torch.float64)
    for s_pos in scores:
        for s_sym in scores:
            assert score_label(float(s_pos), float(s_sym), 0.1) == LABELS[int(label(s_pos, s_sym, 0.1))]


def test_roles_of_a_result():
    result = wherewhat.measure("heads", shared("llama"), tokens(40, batch=3), queries=4, taus=(), blocks=())
    table = result.roles(frame="pyarrow").to_pylist()
    assert {row["role"] for row in table} <= set(ROLES)
    assert {(row["layer"], row["head"]) for row in table} <= set(find_roles(result.stored))
    with pytest.raises(ConfigError, match="a run of axes has no roles: measure 'heads'"):
        wherewhat.measure("axes", shared("llama"), tokens(40)).roles()


def _repeating(texts: int, periods: tuple[int, int], generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens that repeat with a period, and whether the next token is known from its earlier occurrence."""
    place = torch.arange(48)[None]
    period = torch.randint(*periods, (texts, 1), generator=generator)
    tokens = torch.stack([torch.randperm(64, generator=generator)[:48] for _ in range(texts)])
    return tokens.gather(1, place % period), (place >= period)[:, :-1]


def _trained(periods: tuple[int, int]) -> torch.nn.Module:
    """A model of two layers that has learned to continue tokens that repeat with some periods."""
    from transformers import LlamaConfig, LlamaForCausalLM

    generator = torch.Generator().manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=256, **sizes))
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    low = 0
    for _ in range(3000):
        ids, known = _repeating(32, periods, generator)
        loss = torch.nn.functional.cross_entropy(model(ids).logits[:, :-1][known], ids[:, 1:][known])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        low = low + 1 if float(loss.detach()) < 0.2 else 0
        if low == 10:
            return model.eval()
    raise AssertionError(f"not learned in 3,000 steps: the loss is {float(loss.detach()):.2f} nats")


@pytest.mark.slow
def test_trained_induction_heads_are_found_and_a_shortcut_is_not_taken_for_one():
    def roles(periods: tuple[int, int]) -> list[dict[str, set[int]]]:
        ids, _ = _repeating(4, (13, 24), torch.Generator().manual_seed(1))
        layers: list[dict[str, set[int]]] = [{}, {}]
        for row in (
            wherewhat.measure("heads", _trained(periods), ids, taus=(), blocks=()).roles(frame="pyarrow").to_pylist()
        ):
            layers[row["layer"]].setdefault(row["role"], set()).add(row["head"])
        return layers

    first, second = roles((6, 24))
    assert second["induction"] <= second["symbolic"]
    assert "induction" not in first
    assert "previous token" in first
    # With one period in training there is nothing to look for: tokens are known from a fixed distance.
    first, second = roles((24, 25))
    assert "fixed distance" in second
    assert not {"induction", "retrieval", "symbolic"} & {*first, *second}

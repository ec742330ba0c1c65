"""Brute force: what heads attend to and cause, against one token and one edit at a time; identity: constructed heads,
whose roles are known."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from wherewhat.errors import ConfigError, MeasureError
from wherewhat_lab.config import LabConfig
from wherewhat_lab.constructions.transformers import index_transformer, retrieval_transformer
from wherewhat_lab.model import LabModel
from wherewhat_lab.multihop.functions import (
    MOVES,
    ablate_heads,
    classify,
    find_roles,
    hop_function,
    other_sequences,
    patch_heads,
    path_attention,
    path_tokens,
)
from wherewhat_lab.tasks.multi_hop import LetterTask, NumberTask
from wherewhat_lab.tasks.one_hop import IndexTask, PartialInductionTask, RetrievalTask

NUMBER = NumberTask(target=4, pretarget=4, hops=3, symbols=8)
LETTER = LetterTask(target=4, pretarget=4, hops=3, letters=6, digits=3)
TASKS = (NUMBER, LETTER, IndexTask(target=5, symbols=6), RetrievalTask(target=5), PartialInductionTask(target=5))


def make(task, *, heads=2, layers=2, spread=0.4, **options):
    """A model with larger weights than initial ones, which hide mistakes."""
    config = LabConfig(vocabulary=task.vocabulary, layers=layers, heads=heads, width=16, **options)
    model = LabModel(config).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(spread * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def other_answers(task, sequences, *, seed=0):
    """The same sequences with another token at the answer's position, so that only the answer differs."""
    group = task.answers if hop_function(task) == "Index" else task.digits
    generator = torch.Generator().manual_seed(seed)
    first, old = sequences.answers // group * group, sequences.answers % group
    new = first + (old + 1 + torch.randint(group - 1, old.shape, generator=generator)) % group
    where = sequences.path.gather(1, sequences.hops[:, None])
    return replace(sequences, tokens=sequences.tokens.scatter(1, where, new[:, None]), answers=new)


def built(task, layers=3):
    if hop_function(task) == "Index":
        return index_transformer(task, theta=0.866, layers=layers)
    return retrieval_transformer(task, theta=0.0, layers=layers)


@pytest.fixture(scope="module")
def trained():
    """A small model of two layers, trained until it solves most of a small number task."""
    task = NumberTask(target=3, pretarget=3, hops=2, symbols=4)
    torch.manual_seed(0)
    model = LabModel(LabConfig(vocabulary=task.vocabulary, layers=2, width=32, dropout=0.0, seed=1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    data = task.sample(64 * 500, seed=0)
    for tokens, answers in zip(data.tokens.split(64), data.answers.split(64), strict=True):
        loss = functional.cross_entropy(model(tokens), answers)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model, task


@pytest.mark.parametrize("task", TASKS, ids=lambda task: type(task).__name__)
def test_path_tokens_are_where_the_rule_leads(task):
    sequences = task.sample(40, seed=0)
    tokens = path_tokens(sequences)
    found = iter(range(len(tokens)))
    for row in range(len(sequences)):
        ids = sequences.tokens[row].tolist()
        _, visited = task.solve(ids)
        for step, position in enumerate(visited[:-1]):
            index = next(found)
            assert int(tokens.row[index]) == row
            assert int(tokens.position[index]) == position
            assert int(tokens.left[index]) == len(visited) - 1 - step
            ahead = visited[step + 1 :]
            assert tokens.ahead[index].tolist() == ahead + [-1] * (task.max_hops - len(ahead))
            assert int(tokens.next[index]) == ahead[0]
            assert int(tokens.answer[index]) == visited[-1]
            if hop_function(task) == "Index":
                assert ahead[0] == position - (ids[position] - task.answers + 1)
    assert next(found, None) is None


@pytest.mark.parametrize(("task", "kind"), [(NUMBER, "llama"), (LETTER, "parallel")], ids=("number", "letter"))
@torch.no_grad()
def test_path_attention_is_that_of_one_token_at_a_time(task, kind):
    model, sequences = make(task, block=kind), task.sample(12, seed=1)
    looked = path_attention(model, sequences)
    moves = classify(looked, hop_function(task))
    for index in range(len(looked.tokens)):
        row, position = int(looked.tokens.row[index]), int(looked.tokens.position[index])
        ids = sequences.tokens[row : row + 1]
        path = sequences.path[row].tolist()
        ahead = [p for p in path[path.index(position) + 1 :] if p >= 0]
        x = model.embed(ids)
        for layer, (block, attention) in enumerate(zip(model.blocks, model.attention(ids), strict=True)):
            read = model.head(model.norm(x[0, position]))
            holds = int(read.argmax()) == int(sequences.answers[row])
            assert bool(looked.holds[layer, index]) == holds
            for head in range(2):
                weights = attention.pattern()[0, head, position]
                best = int(weights.argmax())
                assert int(looked.attended[layer, head, index]) == best
                assert float(looked.on_next[layer, head, index]) == pytest.approx(float(weights[ahead[0]]))
                assert float(looked.on_self[layer, head, index]) == pytest.approx(float(weights[position]))
                named = ahead if task is LETTER else ahead[:1]
                move = "hop" if best in named else "else"
                if best == position or (best == ahead[-1] and holds):
                    move = "stay"
                assert MOVES[int(moves[layer, head, index])] == move
            x = block.combine(x, block.norm(x), attention.output, None)


@pytest.mark.parametrize("task", [NUMBER, LETTER], ids=("number", "letter"))
def test_hand_built_heads_have_the_roles_they_were_built_for(task):
    sequences = task.sample(150, seed=2)
    roles = find_roles(built(task), task, sequences)
    assert roles.solved == 1.0
    assert [role.role for role in roles.heads] == [roles.function] * len(roles.heads)
    assert roles.function == ("Index" if task is NUMBER else "Retrieval")
    assert roles.heads[0].hops_left == (1, 2, 3)
    assert torch.equal(roles.shares[0, 0, :, MOVES.index("hop")], torch.ones(3, dtype=torch.float64))
    assert bool((roles.on_next[0, 0] > 0.99).all())
    # One hop left, a layer later: the answer is there, and the head that still looks at it stays.
    assert float(roles.shares[1, 0, 0, MOVES.index("stay")]) == 1.0
    assert roles.moves.sum(-1)[0, 0].tolist() == roles.counts.tolist()


def test_a_head_that_looks_at_itself_is_reflexive():
    task = IndexTask(target=5, symbols=6)
    model = built(task, layers=1)
    with torch.no_grad():
        block = model.blocks[0]
        of_q, of_k, _ = block.qkv.weight.split(model.config.width)
        of_q.copy_(of_k)  # every query is v: cos((i - j)θ) is largest at i = j
        for token in range(task.answers, task.vocabulary):
            model.head.weight[3, token] = 1.0  # so that it solves something: it always says 3
    roles = find_roles(model, task, task.sample(60, seed=0))
    assert [role.role for role in roles.heads] == ["Reflexive"]
    assert 0 < roles.solved < 1
    assert float(roles.shares[0, 0, 0, MOVES.index("stay")]) == 1.0


def test_uniform_heads_have_no_role():
    model = built(IndexTask(target=5, symbols=6), layers=1)
    with torch.no_grad():
        model.blocks[0].qkv.weight[: model.config.width] = 0
        model.head.bias[3] = 9.0
    task = IndexTask(target=5, symbols=6)
    roles = find_roles(model, task, task.sample(60, seed=0))
    # All weights are equal, and the largest one is the first; by chance that is where the answer stands.
    assert [role.role for role in roles.heads] == ["other"]


@pytest.mark.slow
def test_roles_of_a_trained_model(trained):
    model, task = trained
    sequences = task.sample(400, seed=9)
    roles = find_roles(model, task, sequences)
    assert roles.solved > 0.7
    assert any(role.role == "Index" for role in roles.heads)
    ablation = ablate_heads(model, sequences)
    needed = [role for role in roles.heads if float(ablation[role.layer, role.head].min()) < -0.3]
    assert any(role.role == "Index" for role in needed)
    patched = patch_heads(model, sequences, other_answers(task, sequences))
    assert float(patched.max()) > 0.5


@torch.no_grad()
def test_ablation_is_one_edit_at_a_time():
    model, sequences = make(NUMBER), NUMBER.sample(31, seed=3)
    sequences = replace(sequences, answers=model(sequences.tokens).argmax(-1))  # so that it has something to lose
    change = ablate_heads(model, sequences)
    for layer in range(2):
        for head in range(2):
            x = model.embed(sequences.tokens)
            for index, block in enumerate(model.blocks):
                normed = block.norm(x)
                tables = model.position_tables(9)[index]
                output = block.attend(block.project(normed, tables, last=False), tables, None).clone()
                if index == layer:
                    output[:, :, head] = output[:, :, head].mean(0)
                x = block.combine(x, normed, output, None)
            right = model.head(model.norm(x[:, -1])).argmax(-1) == sequences.answers
            for column, hops in enumerate(sequences.hop_numbers):
                rows = sequences.hops == hops
                expected = float(right[rows].double().mean()) - 1
                assert float(change[layer, head, column]) == pytest.approx(expected)
    assert float(change.min()) < 0


def test_hand_built_heads_are_needed():
    for task in (NUMBER, LETTER):
        sequences = task.sample(120, seed=4)
        change = ablate_heads(built(task), sequences)
        assert change.shape == (3, 1, 3)
        assert float(change[:, 0, 2].max()) < -0.5  # three hops take all three layers


def test_patched_answers_follow():
    for task in (NUMBER, LETTER, RetrievalTask(target=5)):
        layers = task.max_hops
        model, sequences = built(task, layers=layers), task.sample(90, seed=5)
        donors = other_answers(task, sequences)
        shares = patch_heads(model, sequences, donors)
        assert shares.shape == (layers, 1, layers)
        if task is not NUMBER:  # a layer that replaces the stream passes on everything
            assert torch.equal(shares, torch.ones_like(shares))
        # With as many hops as layers every layer has to pass the answer on; the first one alone passes it far.
        assert float(shares[0, 0].max()) > 0.9
        assert float(shares.max()) <= 1
        same = patch_heads(model, sequences, replace(donors, tokens=donors.tokens))
        assert torch.equal(same, shares)


@torch.no_grad()
def test_patching_is_one_edit_at_a_time():
    model, sequences = make(NUMBER), NUMBER.sample(24, seed=6)
    said = model(sequences.tokens).argmax(-1)
    sequences = replace(sequences, answers=said)
    donors = sequences.select(torch.arange(24).roll(7))
    shares = patch_heads(model, sequences, donors)
    use = said != donors.answers
    theirs = model.attention(donors.tokens)
    for layer in range(2):
        for head in range(2):

            def edit(attention, layer=layer, head=head):
                output = attention.output.clone()
                if attention.layer == layer:
                    output[:, :, head] = theirs[layer].output[:, :, head]
                return output

            now = model(sequences.tokens, edit_attention=edit).argmax(-1)
            for column, hops in enumerate(sequences.select(use.nonzero()[:, 0]).hop_numbers):
                follows = (now == donors.answers)[use & (sequences.hops == hops)]
                assert float(shares[layer, head, column]) == pytest.approx(float(follows.double().mean()))
    with pytest.raises(ConfigError, match="as many and as long"):
        patch_heads(model, sequences, donors.select(torch.arange(3)))
    with pytest.raises(MeasureError, match="none of 24 pairs"):
        patch_heads(model, sequences, sequences)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: type(task).__name__)
def test_donors(task):
    sequences = task.sample(60, seed=7)
    donors = other_answers(task, sequences)
    for tokens, before, answer, old in zip(
        donors.tokens.tolist(),
        sequences.tokens.tolist(),
        donors.answers.tolist(),
        sequences.answers.tolist(),
        strict=True,
    ):
        assert task.solve(tokens)[0] == answer != old
        assert sum(a != b for a, b in zip(tokens, before, strict=True)) == 1
    others = other_sequences(sequences)
    assert torch.equal(others.hops, sequences.hops)
    assert bool((others.answers != sequences.answers).all())
    assert sorted(map(tuple, others.tokens.tolist())) == sorted(map(tuple, sequences.tokens.tolist()))
    with pytest.raises(ConfigError, match="too few, or too alike"):
        other_sequences(sequences.select(torch.tensor([0, 0, 0])))


def test_wrong_wishes():
    model, sequences = make(NUMBER), NUMBER.sample(9, seed=0)
    never = replace(sequences, answers=(model(sequences.tokens).argmax(-1) + 1) % NUMBER.answers)
    with pytest.raises(MeasureError, match="solves none of 9"):
        find_roles(model, NUMBER, never)

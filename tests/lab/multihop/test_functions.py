"""Brute force: what heads attend to, write and cause, against one token and one edit at a time; identity: hand-built
heads, whose roles are known, and flows that must add up."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from wherewhat.errors import ConfigError, MeasureError
from wherewhat.lab.config import LabConfig
from wherewhat.lab.constructions.transformers import index_transformer, retrieval_transformer
from wherewhat.lab.model import LabModel
from wherewhat.lab.multihop.accuracy import solved_by
from wherewhat.lab.multihop.flow import ablation_flow, edge_flow, patch_flow
from wherewhat.lab.multihop.functions import MOVES, classify, find_roles, hop_function, look, path_tokens
from wherewhat.lab.multihop.interventions import ablate_heads, other_answers, other_sequences, patch_heads
from wherewhat.lab.tasks.multi_hop import LetterTask, NumberTask
from wherewhat.lab.tasks.one_hop import IndexTask, PartialInductionTask, RetrievalTask

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
            assert bool(tokens.at_query[index]) == (step == 0)
            ahead = visited[step + 1 :]
            assert tokens.ahead[index].tolist() == ahead + [-1] * (task.max_hops - len(ahead))
            assert int(tokens.next[index]) == ahead[0]
            assert int(tokens.answer[index]) == visited[-1]
            if hop_function(task) == "Index":
                assert ahead[0] == position - (ids[position] - task.answers + 1)
    assert next(found, None) is None


@pytest.mark.parametrize("task", [NUMBER, LETTER], ids=("number", "letter"))
@pytest.mark.parametrize("kind", ["parallel", "llama"])
@torch.no_grad()
def test_look_is_what_one_token_at_a_time_shows(task, kind):
    model, sequences = make(task, block=kind), task.sample(12, seed=1)
    looked = look(model, sequences, answers=task.answers)
    moves = classify(looked, hop_function(task))
    for index in range(len(looked.tokens)):
        row, position = int(looked.tokens.row[index]), int(looked.tokens.position[index])
        ids = sequences.tokens[row : row + 1]
        path = sequences.path[row].tolist()
        ahead = [p for p in path[path.index(position) + 1 :] if p >= 0]
        x = model.embed(ids)
        for layer, (block, attention) in enumerate(zip(model.blocks, model.attention(ids), strict=True)):
            seen = x[0, : position + 1]
            read = model.head(model.norm(x[0, position]))
            holds = int(read.argmax()) == int(sequences.answers[row])
            assert bool(looked.holds[layer, index]) == holds
            for head in range(2):
                weights = attention.pattern()[0, head, position]
                best = int(weights.argmax())
                assert int(looked.attended[layer, head, index]) == best
                assert float(looked.on_next[layer, head, index]) == pytest.approx(float(weights[ahead[0]]))
                assert float(looked.on_self[layer, head, index]) == pytest.approx(float(weights[position]))
                output = torch.zeros(16, dtype=torch.float64)
                output[8 * head : 8 * head + 8] = attention.output[0, position, head]
                written = block.out(output)
                centred = written - written.mean() if kind == "parallel" else written
                logits = model.head.weight[: task.answers] @ (centred * model.norm.weight)
                can = int(ids[0, best]) < task.answers
                assert bool(looked.can_say[layer, head, index]) == can
                says = can and int(logits.argmax()) == int(ids[0, best])
                assert bool(looked.says_attended[layer, head, index]) == says
                alike = functional.cosine_similarity(seen - seen.mean(0), written[None])
                assert bool(looked.like_attended[layer, head, index]) == (int(alike.argmax()) == best)
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
    assert roles.query_counts.tolist() == [50, 50, 50]
    assert roles.query_moves.sum(-1)[0, 0].tolist() == [50, 50, 50]
    # It copies: what is written at tokens next to the answer says it.
    says, could = roles.says[0, 0].tolist()
    assert says == could == 150
    assert float(roles.says_intervals[0, 0, 0]) > 0.97
    assert float(roles.like_intervals[0, 0, 0]) > roles.like_chance or task is NUMBER


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
    assert roles.says[0, 0].tolist() == [0, 0]  # integers cannot be said


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
    needed = [role for role in roles.heads if float(ablation.change[role.layer, role.head].min()) < -0.3]
    assert any(role.role == "Index" for role in needed)
    patched = patch_heads(model, sequences, other_answers(task, sequences))
    assert float(patched.shares.max()) > 0.5


@pytest.mark.parametrize("to", ["mean", "zero"])
@torch.no_grad()
def test_ablation_is_one_edit_at_a_time(to):
    model, sequences = make(NUMBER), NUMBER.sample(31, seed=3)
    sequences = replace(sequences, answers=model(sequences.tokens).argmax(-1))  # so that it has something to lose
    found = ablate_heads(model, sequences, to=to)
    assert bool(found.before.all())
    for layer in range(2):
        for head in range(2):
            x = model.embed(sequences.tokens)
            for index, block in enumerate(model.blocks):
                normed = block.norm(x)
                place = model.places(9)[index]
                output = block.attend(block.project(normed, place, last=False), place, None).clone()
                if index == layer:
                    output[:, :, head] = output[:, :, head].mean(0) if to == "mean" else 0.0
                x = block.combine(x, normed, output, None)
            right = model.head(model.norm(x[:, -1])).argmax(-1) == sequences.answers
            assert torch.equal(found.after[layer, head], right)
            for column, hops in enumerate(found.numbers):
                rows = sequences.hops == hops
                change = float(right[rows].double().mean()) - 1
                assert float(found.change[layer, head, column]) == pytest.approx(change)
    intervals = found.intervals()
    assert intervals.shape == (2, 2, 3, 2)
    assert bool((intervals[..., 0] <= found.change + 1e-9).all())
    assert bool((found.change <= intervals[..., 1] + 1e-9).all())
    assert bool((intervals[..., 0] < intervals[..., 1]).all())  # also of heads that change no answer
    assert float(found.change.min()) < 0
    with pytest.raises(ConfigError, match="'half'"):
        ablate_heads(model, sequences, to="half")


def test_hand_built_heads_are_needed():
    for task in (NUMBER, LETTER):
        sequences = task.sample(120, seed=4)
        change = ablate_heads(built(task), sequences, to="zero").change
        assert change.shape == (3, 1, 3)
        assert float(change[:, 0, 2].max()) < -0.5  # three hops take all three layers


def test_patched_answers_follow():
    for task in (NUMBER, LETTER, RetrievalTask(target=5)):
        layers = task.max_hops
        model, sequences = built(task, layers=layers), task.sample(90, seed=5)
        donors = other_answers(task, sequences)
        found = patch_heads(model, sequences, donors)
        assert int(found.counts.sum()) == 90
        if task is not NUMBER:  # a layer that replaces the stream passes on everything
            assert torch.equal(found.shares, torch.ones_like(found.shares))
        # With as many hops as layers every layer has to pass the answer on; the first one alone passes it far.
        assert float(found.shares[0, 0].max()) > 0.9
        assert bool((found.follows + found.stays <= found.counts).all())
        same = patch_heads(model, sequences, replace(donors, tokens=donors.tokens))
        assert torch.equal(same.follows, found.follows)


@torch.no_grad()
def test_patching_is_one_edit_at_a_time():
    model, sequences = make(NUMBER), NUMBER.sample(24, seed=6)
    said = model(sequences.tokens).argmax(-1)
    sequences = replace(sequences, answers=said)
    donors = sequences.select(torch.arange(24).roll(7))
    found = patch_heads(model, sequences, donors)
    use = said != donors.answers
    assert int(found.counts.sum()) == int(use.sum())
    theirs = model.attention(donors.tokens)
    for layer in range(2):
        for head in range(2):

            def edit(index, output, layer=layer, head=head):
                if index == layer:
                    output = output.clone()
                    output[:, :, head] = theirs[layer].output[:, :, head]
                return output

            now = model(sequences.tokens, edit=edit).argmax(-1)
            assert int(found.follows[layer, head].sum()) == int((now == donors.answers)[use].sum())
            assert int(found.stays[layer, head].sum()) == int((now == said)[use].sum())
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


def test_flow_of_the_answer(trained):
    model, task = trained
    sequences = task.sample(200, seed=10, hops=2)
    donors = other_answers(task, sequences)
    row = int((solved_by(model, sequences) & solved_by(model, donors)).nonzero()[0])
    one, other = sequences.select(torch.tensor([row])), donors.select(torch.tensor([row]))
    answer, donor_answer = int(one.answers[0]), int(other.answers[0])
    tokens, donor = one.tokens[0], other.tokens[0]
    flow = patch_flow(model, tokens, donor, answer=answer, donor_answer=donor_answer)
    n = len(tokens)
    start, end = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    start[one.path[0, 2]], end[-1] = 1, 1  # it comes in where the answer stands, and goes out at the query
    assert torch.allclose(flow.share[0], start, atol=1e-5)
    assert torch.allclose(flow.share[-1], end, atol=1e-5)
    assert flow.effect.shape == (3, n)
    for layer, position in ((1, 2), (1, n - 1)):
        streams = []
        with torch.no_grad():
            model(donor[None], edit_stream=lambda index, x, streams=streams: streams.append(x))

            def edit(index, x, layer=layer, position=position, streams=streams):
                if index == layer:
                    x = x.clone()
                    x[:, position] = streams[layer][:, position]
                return x

            logits = model(tokens[None], edit_stream=edit)[0].double()
        effect = flow.clean - float(logits[answer] - logits[donor_answer])
        assert float(flow.effect[layer, position]) == pytest.approx(effect, abs=1e-4)
    with pytest.raises(ConfigError, match="must both be"):
        patch_flow(model, tokens, donor[:-1], answer=answer, donor_answer=donor_answer)
    with pytest.raises(MeasureError, match="do not differ"):
        patch_flow(model, tokens, tokens, answer=answer, donor_answer=donor_answer)


@torch.no_grad()
def test_flow_without_positions():
    model, sequences = make(NUMBER), NUMBER.sample(20, seed=0)
    tokens, answer = sequences.tokens[0], 3
    found = ablation_flow(model, tokens, sequences.tokens, answer=answer)
    assert found.shape == (3, 9)
    streams = []
    model(sequences.tokens, edit_stream=lambda index, x: streams.append(x.mean(0)))
    clean = model(tokens[None])[0]
    for layer in range(3):
        for position in range(9):

            def edit(index, x, layer=layer, position=position):
                if index == layer:
                    x = x.clone()
                    x[:, position] = streams[layer][position]
                return x

            logits = model(tokens[None], edit_stream=edit)[0]
            expected = (clean - logits)[answer] - (clean - logits).mean()
            assert float(found[layer, position]) == pytest.approx(float(expected), abs=1e-9)
    with pytest.raises(ConfigError, match=r"\(count, n\)"):
        ablation_flow(model, tokens, sequences.tokens[:, :-1], answer=answer)


@pytest.mark.parametrize("encoding", ["rope", "alibi"])
@torch.no_grad()
def test_flow_without_edges(encoding):
    base = make(NUMBER)
    model = LabModel(replace(base.config, encoding=encoding)).double()
    model.load_state_dict(base.state_dict())
    tokens, answer = NUMBER.sample(1, seed=0).tokens[0], 2
    found = edge_flow(model, tokens, answer=answer)
    assert found.shape == (2, 2, 9, 9)
    assert torch.equal(
        found.isnan(), torch.ones(9, 9).triu(1).bool().index_fill(0, torch.tensor([0]), True).expand(2, 2, 9, 9)
    )
    clean = model(tokens[None])[0]
    layers = model.attention(tokens[None])
    for layer in range(2):
        for head in range(2):
            for query, key in ((8, 0), (8, 8), (5, 3), (1, 0)):
                weights = layers[layer].pattern()[0, head, query].clone()
                weights[key] = 0
                output = (weights / weights.sum()) @ layers[layer].value[0, head]

                def edit(index, attended, layer=layer, head=head, query=query, output=output):
                    if index == layer:
                        attended = attended.clone()
                        attended[:, query, head] = output
                    return attended

                logits = model(tokens[None], edit=edit)[0]
                expected = (clean - logits)[answer] - (clean - logits).mean()
                assert float(found[layer, head, query, key]) == pytest.approx(float(expected), abs=1e-9)


def test_wrong_wishes():
    model, sequences = make(NUMBER), NUMBER.sample(9, seed=0)
    with pytest.raises(ConfigError, match="threshold is 1"):
        find_roles(model, NUMBER, sequences, threshold=1)
    never = replace(sequences, answers=(model(sequences.tokens).argmax(-1) + 1) % NUMBER.answers)
    with pytest.raises(MeasureError, match="solves none of 9"):
        find_roles(model, NUMBER, never)
    with pytest.raises(ConfigError, match="no other answer"):
        other_answers(RetrievalTask(digits=1), RetrievalTask(digits=1).sample(4, seed=0))

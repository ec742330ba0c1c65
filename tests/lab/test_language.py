"""Identity: training on text gives the same bits, whole or killed and resumed; brute force: order, loss, widths."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from itertools import pairwise, product

import pytest
import torch
from torch.nn import functional

from helpers.lab import Interrupt, Told, killed, same
from helpers.tolerance import rounding, worst
from wherewhat.errors import ConfigError, MeasureError
from wherewhat.options import build_config
from wherewhat_lab import model as fusing
from wherewhat_lab.checkpoints import load_model, load_state
from wherewhat_lab.config import LabConfig
from wherewhat_lab.encodings import ENCODINGS
from wherewhat_lab.kernels import flash_attention, look_up, widen
from wherewhat_lab.language import LanguageConfig, batch_starts, recording_steps, train_language, windows
from wherewhat_lab.model import LabModel
from wherewhat_lab.steps import CpuSteps, learning_rates
from wherewhat_lab.training import MODEL_FILE, STATE_FILE

TEXT = torch.frombuffer(bytearray(b"the cat sat on the mat, the dog ate the rat; " * 60), dtype=torch.uint8)
MODEL = LabConfig(vocabulary=256, layers=2, heads=2, width=16, block="sequential", biases="none", dropout=0.0)
TRAIN = LanguageConfig(
    steps=24, batch=6, context=20, warmup=3, learning_rate=1e-2, precision="float32", threads=2, save_every=7
)


def loss_of(model):
    tokens = TEXT[None, :101].long()
    with torch.no_grad():
        logits = model(tokens[:, :-1], all_tokens=True)
        return float(functional.cross_entropy(logits[0], tokens[0, 1:]))


@pytest.mark.parametrize("encoding", [*ENCODINGS, "rope, bfloat16"])
def test_every_encoding_learns_the_same_way_twice(encoding):
    encoding, _, precision = encoding.partition(", ")
    fewer = {"batch": 1, "context": 10, "precision": precision} if precision else {}  # many CPUs are slow at bfloat16
    model_config = replace(MODEL, encoding=encoding)
    config = replace(TRAIN, threads=1, **fewer)
    before = LabModel(model_config)
    first, second = (train_language(model_config, config, TEXT) for _ in range(2))
    assert same(first, second)
    assert all(p.dtype == torch.float32 for p in first.parameters())
    assert loss_of(first) < 0.75 * loss_of(before)


def trained(config, *, threads, dtype=torch.float64):
    """The model after all steps; in float64 AdamW does not divide one rounding error by another."""
    model = LabModel(MODEL).to(dtype)
    order = batch_starts(config, len(TEXT))
    steps = CpuSteps(model, windows(TEXT, config.context), None, config, threads=threads, order=order)
    for step in range(config.steps):
        steps.run(step)
    steps.close()
    return model


def test_equals_the_obvious_loop_and_the_sum_of_parts():
    config = replace(TRAIN, steps=8, clip=0.1)
    model = LabModel(MODEL).double()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    for starts, rate in zip(batch_starts(config, len(TEXT)), learning_rates(config), strict=True):
        tokens = torch.stack([TEXT[start : start + 21] for start in starts.tolist()]).long()
        logits = model(tokens[:, :-1], all_tokens=True)
        optimizer.zero_grad()
        functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        assert float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)) > 0.1
        optimizer.param_groups[0]["lr"] = float(rate)
        optimizer.step()
    for threads in (1, 3):
        found = trained(config, threads=threads).state_dict()
        torch.testing.assert_close(found, model.state_dict(), atol=1e-9, rtol=0)
    # A training is these steps, on float32 weights; other seeds give another one.
    one = replace(config, threads=1)
    found = train_language(MODEL, one, TEXT)
    assert same(found, trained(config, threads=1, dtype=torch.float32))
    assert not same(found, train_language(MODEL, replace(one, data_seed=1), TEXT))
    assert not same(found, train_language(replace(MODEL, seed=1), one, TEXT))


def test_recorded_where_asked():
    seen = []

    def record(step, model):
        assert not torch.is_grad_enabled()
        seen.append((step, loss_of(model)))

    train_language(MODEL, TRAIN, TEXT, record=record, record_at=[0, 2, 5, 24])
    assert [step for step, _ in seen] == [0, 2, 5, 24]
    assert seen[0][1] == loss_of(LabModel(MODEL))
    assert seen[-1][1] < seen[0][1]


@pytest.mark.parametrize("at", [5, 16])  # before and after the first state
def test_interrupted_and_resumed(tmp_path, at):
    model_config = replace(MODEL, encoding="pope")
    train = partial(train_language, model_config, TRAIN, TEXT, record_at=[at, 20])
    whole = train()
    with pytest.raises(KeyboardInterrupt):
        train(record=Interrupt(at), directory=tmp_path)
    assert (tmp_path / STATE_FILE).exists() == (at > 7)
    if at > 7:
        assert load_state(tmp_path / STATE_FILE).step == 14
    seen = []
    assert same(whole, train(record=lambda step, model: seen.append(step), directory=tmp_path))
    assert seen == ([0, 5, 20, 24] if at == 5 else [16, 20, 24])
    assert same(whole, load_model(tmp_path / MODEL_FILE))
    assert same(whole, train(record=Interrupt(0), directory=tmp_path))
    with pytest.raises(ConfigError, match=r"clip=1\.0, not 2\.0"):
        train_language(model_config, replace(TRAIN, clip=2.0), TEXT, directory=tmp_path)
    with pytest.raises(ConfigError, match="other text"):
        train_language(model_config, TRAIN, TEXT[:-1], directory=tmp_path)


def _train(directory, connection):
    record = Told(connection, last=TRAIN.steps)
    train_language(MODEL, TRAIN, TEXT, directory=directory, record_at=range(24), record=record)


@pytest.mark.slow
def test_killed_and_resumed(tmp_path, processes):
    killed(processes, _train, tmp_path, after=16)
    assert same(train_language(MODEL, TRAIN, TEXT), train_language(MODEL, TRAIN, TEXT, directory=tmp_path))


def test_every_epoch_reads_the_whole_text():
    config = replace(TRAIN, context=10, batch=3, steps=8)
    starts = batch_starts(config, 100).flatten()
    for epoch in starts[:9], starts[9:18]:
        assert torch.equal(epoch.sort().values - epoch.min(), 10 * torch.arange(9))
        assert 0 <= int(epoch.min()) < 10
    assert torch.equal(starts, batch_starts(replace(config, seed=5), 100).flatten())
    assert not torch.equal(starts, batch_starts(replace(config, data_seed=5), 100).flatten())
    for length in range(11, 40):
        found = batch_starts(config, length)
        assert int(found.min()) >= 0
        assert int(found.max()) + 11 <= length
    assert torch.equal(windows(TEXT, 10)[7], TEXT[7:18])


def test_records_are_spaced_logarithmically():
    steps = recording_steps(5000)
    assert steps[:5] == [0, 1, 2, 3, 4]
    assert steps[-1] == 5000
    assert len(steps) == 40
    for n, count in product((1, 2, 3, 7, 20, 39, 59), (2, 3, 10, 40, 49)):
        assert 0 <= len(recording_steps(n, count)) - min(n + 1, count) <= 2, (n, count)
    later = [step for step in steps if step > 50]
    ratios = [b / a for a, b in pairwise(later)]
    assert max(ratios) / min(ratios) < 1.05
    assert recording_steps(1) == [0, 1]
    with pytest.raises(ConfigError):
        recording_steps(0)


def test_learning_rate_is_a_cosine():
    rates = learning_rates(replace(TRAIN, steps=1000, warmup=100))
    assert float(rates[0]) == 0
    assert float(rates[100]) == pytest.approx(1e-2)
    assert float(rates[550]) == pytest.approx(5e-3)
    assert float(rates[325]) == pytest.approx(1e-2 * (1 + 0.5**0.5) / 2)
    assert float(rates[-1]) < 1e-7


def test_wrong_input_is_told():
    assert all(field.metadata["help"] for field in fields(LanguageConfig))
    for options in ({"context": "0"}, {"clip": "0"}, {"precision": "half"}, {"steps": "0"}):
        with pytest.raises(ConfigError) as error:
            build_config(LanguageConfig, options)
        assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="too short"):
        train_language(MODEL, TRAIN, TEXT[:20])
    for text in (TEXT.long(), TEXT[None]):
        with pytest.raises(ConfigError, match="uint8"):
            train_language(MODEL, TRAIN, text)
    with pytest.raises(MeasureError, match="smaller learning_rate"):
        train_language(MODEL, replace(TRAIN, learning_rate=1e30, clip=None), TEXT)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_widened_heads_give_the_same_attention(encoding):
    """What the GPU's kernel is handed, through torch's own attention: positions beyond 256 and odd slopes included."""
    model = LabModel(replace(MODEL, encoding=encoding, heads=4, width=48))
    n, generator = 600, torch.Generator().manual_seed(0)
    tables, scale = model.position_tables(n)[0], 12**-0.5
    attend = functional.scaled_dot_product_attention
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = (torch.randn(2, 4, n, 12, generator=generator).to(dtype) for _ in range(3))
        if encoding == "pope":
            q, k = torch.cat([q, k], -1), torch.cat([k, q], -1)
        expected = attend(q.float(), k.float(), v.float(), tables.hidden.expand(4, -1, -1), scale=scale)
        wide = widen(q, k, v, tables, scale=scale)
        assert {x.shape[-1] for x in wide} == {24 if encoding == "pope" else 16}
        found = attend(*(x.float() for x in wide), is_causal=True, scale=scale)
        # Logits, with biases of up to 600, are float32: their rounding moves weights by 600 ε.
        torch.testing.assert_close(found[..., :12], expected, atol=rounding(8 * n), rtol=0)
        assert not found[..., 12:].any()


def test_the_kernel_is_called_as_it_is_declared():
    """On tensors without contents: shapes come out, gradients too, and torch is as deterministic as it was."""
    tables = LabModel(MODEL).position_tables(64)[0]
    q, k, v = (torch.empty(2, 3, 64, d, device="meta", dtype=torch.bfloat16, requires_grad=True) for d in (24, 24, 12))
    output = flash_attention(q, k, v, tables, scale=1.0)
    assert output.shape == v.shape
    output.sum().backward()
    assert all(x.grad.shape == x.shape for x in (q, k, v))
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("encoding", "block"),
    [
        pytest.param("rope", "parallel", marks=pytest.mark.slow),
        pytest.param("alibi", "sequential", marks=pytest.mark.slow),
        ("pope", "llama"),
    ],
)
def test_fused_layers_are_the_same(encoding, block, monkeypatch):
    """Traced whole, without a compiler: what torch.compile is given has no part that it cannot take."""
    monkeypatch.setattr(fusing.torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    model, tokens = LabModel(replace(MODEL, encoding=encoding, block=block)), TEXT[None, :32].long()
    found = []
    for wanted in (False, True):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), fusing.fused(model, wanted):
            loss = model(tokens, all_tokens=True).float().square().mean()
            found.append([loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))])
    # Products are bfloat16, whose ε is 0.0078.
    assert all(worst(b, a) < 4 * torch.finfo(torch.bfloat16).eps for a, b in zip(*found, strict=True))
    assert "enter" not in vars(model.blocks[0])


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_gpu_repeats_itself_and_agrees(encoding):
    model_config = replace(MODEL, encoding=encoding, width=64)
    plain = replace(TRAIN, compile=False, precision="bfloat16")
    exact = loss_of(train_language(model_config, replace(plain, precision="float32"), TEXT))
    for config in (plain, replace(plain, compile=True)):
        first, second = (train_language(model_config, config, TEXT, device="cuda").cpu() for _ in range(2))
        assert same(first, second)
        assert loss_of(first) == pytest.approx(exact, rel=0.1)


def test_vectors_of_tokens_have_the_same_gradients():
    tokens = torch.randint(0, 11, (3, 40), generator=torch.Generator().manual_seed(0))
    table = torch.randn(11, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 40, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    plain = torch.autograd.grad((torch.nn.functional.embedding(tokens, table) * weight).sum(), table)[0]
    ours = look_up(tokens, table)
    torch.testing.assert_close(torch.autograd.grad((ours * weight).sum(), table)[0], plain, atol=1e-12, rtol=0)
    assert torch.equal(ours, torch.nn.functional.embedding(tokens, table))

"""Identity: half-way steps and rank correlations of curves whose outcome is known, windows and splits of a text;
brute force: the chance of a correlation against all orders."""

from __future__ import annotations

import gzip
import math

import pytest
import torch

from wherewhat.errors import ConfigError, TextError
from wherewhat_lab.encoding_study.corpus import read_corpus, spanned
from wherewhat_lab.encoding_study.summary import half_step, relate


def test_half_step_of_a_jump_lies_between_its_records():
    steps = torch.tensor([0, 1, 2, 4, 8, 16])
    found = half_step(steps, torch.tensor([5.0, 5, 5, 1, 1, 1]))
    assert found == pytest.approx(math.sqrt(3 * 5) - 1)  # half-way over log(1 + step)
    assert half_step(steps, torch.tensor([0.0, 1, 1, 1, 1, 1])) == pytest.approx(math.sqrt(2) - 1)


def test_half_step_is_the_first_and_knows_directions_and_gaps():
    steps = torch.tensor([0, 1, 3, 7, 15])
    up = torch.tensor([0.0, 1.0, 0.2, 0.4, 1.0])
    assert half_step(steps, up) < 1
    assert half_step(steps, -up) == pytest.approx(half_step(steps, up))
    assert half_step(steps, 7 + 3 * up) == pytest.approx(half_step(steps, up), rel=1e-5)
    gap = torch.tensor([0.0, math.nan, 1.0, 1.0, 1.0])
    assert half_step(steps, gap) == pytest.approx(1.0)
    assert math.isnan(half_step(steps, torch.zeros(5)))
    assert math.isnan(half_step(steps, torch.tensor([0.0, 1.0, 0.5, 0.3, 0.2])))  # it went, and came back
    assert math.isnan(half_step(steps, torch.tensor([math.nan, 1, 2, 3, 4])))
    # For good, it is the last crossing.
    up = torch.tensor([0.0, 1.0, 0.2, 0.4, 0.6])
    assert half_step(steps, up) < 1
    # Half of 0.6 is half-way from 0.2 to 0.4, over log(1 + step).
    assert half_step(steps, up, for_good=True) == pytest.approx(math.sqrt(4 * 8) - 1)
    once = torch.tensor([0.0, 0.1, 0.7, 0.8, 1.0])
    assert half_step(steps, once, for_good=True) == half_step(steps, once)


def test_relations():
    x = [1.0, 2.0, 3.0, 4.0, 5.0]
    same = relate(x, [v**3 for v in x])
    assert same.rho == pytest.approx(1)
    assert same.p == pytest.approx(2 / math.factorial(5))  # its own order and the reverse
    assert relate(x, [-v for v in x]).rho == pytest.approx(-1)
    some = relate(x, [2.0, 1.0, 4.0, 3.0, 5.0])
    assert some.rho == pytest.approx(0.8)
    assert some.low <= some.rho <= some.high
    assert relate([*x, math.nan], [*x, 1.0]).n == 5
    assert math.isnan(relate(x[:2], x[:2]).rho)
    assert math.isnan(relate(x, [1.0] * 5).rho)
    many = [float(v) for v in range(10)]  # permuted at random
    assert relate(many, many).p < 0.01


def test_texts(tmp_path):
    content = bytes(range(32, 127)) * 40
    (tmp_path / "plain.txt").write_bytes(content)
    (tmp_path / "packed.gz").write_bytes(gzip.compress(content))
    plain = read_corpus(tmp_path / "plain.txt", held_out=0.25)
    packed = read_corpus(tmp_path / "packed.gz", held_out=0.25)
    assert plain.sha256 == packed.sha256
    assert bytes(plain.training.tolist()) + bytes(plain.held_out.tolist()) == content
    assert len(plain.held_out) == pytest.approx(len(content) / 4, abs=1)
    windows = plain.windows(5, 64, seed=0)
    assert windows.shape == (5, 64)
    held_out = bytes(plain.held_out.tolist())
    assert all(bytes(row.tolist()) in held_out for row in windows)
    assert torch.equal(windows, packed.windows(5, 64, seed=0))
    assert not torch.equal(windows, plain.windows(5, 64, seed=1))
    repeats = plain.repeats(2, 31, seed=0)
    assert torch.equal(repeats[:, :15], repeats[:, 16:])
    assert read_corpus(tmp_path / "plain.txt", held_out=0.5, most=100).training.shape == (50,)
    assert read_corpus(None, held_out=0.1).source == "embedded"


def test_wrong_texts_are_told(tmp_path):
    with pytest.raises(TextError, match="cannot be read"):
        read_corpus(tmp_path / "missing.txt", held_out=0.1)
    (tmp_path / "broken.gz").write_bytes(b"\x1f\x8b\x08 broken")
    with pytest.raises(TextError, match="damaged gzip"):
        read_corpus(tmp_path / "broken.gz", held_out=0.1)
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(TextError, match="0 bytes"):
        read_corpus(tmp_path / "empty", held_out=0.1)
    with pytest.raises(ConfigError, match="held_out is 1"):
        read_corpus(None, held_out=1)
    with pytest.raises(TextError, match="fewer than"):
        read_corpus(None, held_out=0.001).windows(1, 10**6, seed=0)


def test_words_of_bytes_are_whole():
    text = spanned(torch.tensor(list("cut off. Two words\u00e9, cut".encode())))
    assert [bytes(text.ids[0, start:end].tolist()).decode() for start, end in text.spans.words] == [
        "off.",
        "Two",
        "words\u00e9,",
    ]

"""Brute force: ``Mask`` says row by row what a dense mask says at once."""

import pytest
import torch

from helpers.capture import proved, tokens
from wherewhat.captures.attention import LOW, Mask
from wherewhat.captures.layout import Hiding, hiding_of
from wherewhat.captures.session import capture_with
from wherewhat.errors import CaptureError

N, M, HEADS, BATCH = 7, 11, 3, 2
LOWEST = torch.finfo(torch.float32).min
ROWS = [
    slice(None),
    slice(0, 3),
    slice(3, 7),
    slice(6, 7),
    slice(-2, None),
    slice(1, 7, 2),
    slice(4, 4),
    slice(5, 2),
]


def dense(n, m, *, causal=False, window=None):
    """Visibility by two loops; queries are the last n of m positions."""
    out = torch.ones(n, m, dtype=torch.bool)
    for i in range(n):
        for j in range(m):
            position = i + m - n
            if (causal and j > position) or (window is not None and position - j >= window):
                out[i, j] = False
    return out


def alibi(m):
    return torch.tensor([0.5, 0.25, 0.125]).view(1, HEADS, 1, 1) * torch.arange(m)


@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 4), (False, 3), (False, None), (True, 1)])
def test_causal_and_window(causal, window):
    mask = Mask(causal=causal, window=window)
    for n in (N, M, 1):
        expected = dense(n, M, causal=causal, window=window)
        for rows in ROWS:
            assert torch.equal(mask.visible(rows, n, M)[0, 0], expected[rows]), (n, rows)
            assert mask.bias(rows, n, M) is None


def test_additive_mask_with_alibi_inside():
    visible = dense(N, M, causal=True, window=5)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        bias = alibi(M).to(dtype)
        for low in (torch.finfo(dtype).min, -torch.inf, -1e4):
            mask = Mask(added=(torch.where(visible, bias, low).expand(BATCH, HEADS, N, M),))
            mask = hiding_of(mask, N, M).applied(mask, "layer", M)
            for rows in ROWS:
                seen = visible[rows]
                assert torch.equal(mask.visible(rows, N, M), seen.expand(BATCH, HEADS, *seen.shape)), (dtype, low, rows)
                ours = mask.bias(rows, N, M)
                assert torch.equal(torch.where(seen, ours, 0), torch.where(seen, bias.float(), 0).expand_as(ours))
                assert bool(ours.isfinite().all())


def test_terms_add_up_and_any_of_them_hides():
    seen, shown = (
        dense(N, M, causal=True),
        torch.rand(BATCH, 1, 1, M, generator=torch.Generator().manual_seed(1)) > 0.3,
    )
    shown[..., 0] = True
    mask = Mask(
        added=(alibi(M), torch.where(seen, 0.0, LOWEST)[None, None], torch.full((1, 1, 1, 1), 0.25)),
        hidden=(~dense(N, M, window=6)[None, None],),
        visible_only=(shown,),
    )
    expected = seen & dense(N, M, window=6) & shown
    assert torch.equal(mask.visible(slice(None), N, M), expected.expand(BATCH, HEADS, N, M))
    ours = mask.bias(slice(None), N, M)
    # Multiples of 1/8 below 8 and zeros: float32 adds them without rounding.
    assert torch.equal(torch.where(seen, ours, 0), torch.where(seen, alibi(M) + 0.25, 0).expand_as(ours))


def test_terms_of_every_rank_broadcast():
    for shape in [(M,), (N, M), (1, 1, M), (BATCH, 1, 1, M), (1, HEADS, N, M), (1, 1, N, M + 4)]:
        term = torch.rand(shape, generator=torch.Generator().manual_seed(0)) > 0.5
        expected = term[..., :M].expand(BATCH, HEADS, N, M)
        for mask in (Mask(visible_only=(term,)), Mask(hidden=(~term,))):
            for rows in ROWS:
                ours = mask.visible(rows, N, M)
                assert torch.equal(ours.expand(BATCH, HEADS, *ours.shape[2:]), expected[:, :, rows]), (shape, rows)


@pytest.mark.parametrize("apart", [True, False])
def test_a_long_alibi_hides_nothing(apart):
    """MPT counts its bias back from the last token: whole rows lie below -1e4 in a long text, and still attend."""
    n, slope = 40, 0.75
    far = -slope * (20_000 - torch.arange(n, dtype=torch.float32)).view(1, 1, 1, n)
    future = ~dense(n, n, causal=True)[None, None]
    mask = Mask(added=(far,), hidden=(future,)) if apart else Mask(added=(far.masked_fill(future, LOWEST),))
    assert torch.equal(mask.visible(slice(None), n, n)[0, 0], dense(n, n, causal=True))
    bias = mask.bias(slice(None), n, n)
    centred = torch.where(~future, bias - bias.gather(-1, torch.zeros_like(bias[..., :1], dtype=torch.long)), 0)
    # Multiples of 1/4 below 2**14: float32 subtracts them without rounding.
    assert torch.equal(centred, torch.where(~future, slope * torch.arange(n), 0.0))


def test_a_long_alibi_hides_nothing_when_the_bias_covers_later_keys_too():
    """The largest entry of such a row belongs to the last key, which the query does not see."""
    m, slope = 30_000, 0.75
    bias = -slope * torch.arange(m - 1, -1, -1.0).view(1, 1, 1, m)
    future = torch.arange(m).view(1, 1, 1, m) > torch.arange(4).view(1, 1, 4, 1)
    mask = Mask(added=(bias,), hidden=(future.expand(1, 1, 4, m),))
    assert mask.visible(slice(None), 4, m).sum(-1).flatten().tolist() == [1, 2, 3, 4]


def test_a_row_that_sees_nothing_stays_so():
    for low in (LOWEST, -torch.inf):
        added = torch.zeros(1, 1, N, M)
        added[:, :, 2] = low
        visible = Mask(added=(added,)).visible(slice(None), N, M)
        assert visible.sum(-1).flatten().tolist() == [M, M, 0, *[M] * (N - 3)]
        assert bool(Mask(added=(added,)).bias(slice(None), N, M).isfinite().all())


def test_double_precision_bias_keeps_its_digits():
    bias = torch.rand(1, 1, N, M, dtype=torch.float64)
    assert torch.equal(Mask(added=(bias,)).bias(slice(None), N, M), bias)


def test_rows_may_be_given_by_their_indices():
    added = torch.where(dense(N, M, causal=True, window=5), alibi(M), LOWEST)
    hidden = torch.zeros(1, 1, 1, M, dtype=torch.bool)
    hidden[..., 2] = True
    mask = Mask(causal=True, added=(added,), hidden=(hidden,))
    chosen = torch.tensor([0, 2, 5, 6])
    assert torch.equal(mask.visible(chosen, N, M), mask.visible(slice(None), N, M)[:, :, chosen])
    assert torch.equal(mask.bias(chosen, N, M), mask.bias(slice(None), N, M)[:, :, chosen])


def test_only_causal_means_nothing_else():
    assert Mask(causal=True).only_causal
    others = {"window": 4, "added": (torch.zeros(1),), "hidden": (torch.zeros(M, dtype=torch.bool),)}
    others["visible_only"] = (torch.ones(M, dtype=torch.bool),)
    assert not any(Mask(causal=True, **{name: value}).only_causal for name, value in others.items())
    assert not Mask().only_causal


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("apart", [True, False])
def test_a_strong_alibi_slope_is_no_mask(dtype, apart):
    """A head of slope 0.84 sees all of 16,000 keys, although its bias goes down to -13,440."""
    m = 16_000
    bias = (-0.84 * (m - 1 - torch.arange(m + 4.0))).to(dtype).view(1, 1, 1, m + 4)
    later = torch.arange(m + 4).view(1, 1, 1, m + 4) >= m
    low = torch.zeros_like(bias).masked_fill(later, torch.finfo(dtype).min)
    mask = Mask(added=(bias, low)) if apart else Mask(added=(bias.masked_fill(later, torch.finfo(dtype).min),))
    assert hiding_of(mask, 1, m + 4) == Hiding()
    assert torch.equal(mask.visible(slice(None), 1, m + 4), ~later)
    assert torch.equal(mask.bias(slice(None), 1, m + 4), torch.where(later, 0.0, bias.float()))


@pytest.mark.parametrize("low", [-1e4, -65504.0, -1e9])
def test_a_proof_says_which_number_hides(low):
    """Where keys are hidden by a number, a proof sees it before any bias is as low, and how far a bias stays above."""
    short = torch.where(dense(23, 23, causal=True), -0.84 * (22 - torch.arange(23.0)), low)
    hiding = hiding_of(Mask(added=(short,)), 23, 23)
    reach = hiding.reach
    assert hiding.below == low / 2
    assert reach == pytest.approx(-low / 2 / 0.84, rel=1e-5, abs=1)
    m = min(reach, 16_000)
    row = -0.84 * (m - 1 - torch.arange(float(m)))
    row[m // 2] = low
    mask = hiding.applied(Mask(added=(row,)), "layer", m)
    assert torch.equal(mask.visible(slice(None), 1, m)[0, 0, 0], torch.arange(m) != m // 2)
    with pytest.raises(CaptureError, match=f"at most {reach:,} tokens"):
        hiding.applied(mask, "layer", reach + 1)


@pytest.mark.parametrize(
    ("family", "below"), [("openai-gpt", LOW), ("llama", LOW), ("falcon:alibi", None), ("bloom", None)]
)
def test_the_number_that_hides_is_part_of_the_proof(family, below):
    model, proof = proved(family)
    plan = proof.layout
    assert {layer.hiding for layer in plan.layers} == {Hiding(below)}, plan.layers
    seen = []
    with torch.no_grad(), capture_with(model, plan, lambda a: seen.append(a.visible())):
        model(input_ids=tokens(40), use_cache=False)
    assert all(bool((x == dense(40, 40, causal=True)).all()) for x in seen)

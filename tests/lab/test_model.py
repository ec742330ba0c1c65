"""Parity: the laboratory's model against Hugging Face's GPT-J; identity: what its options must and must not change."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.lab import draw, spread
from helpers.tolerance import rounding, worst
from wherewhat.errors import ConfigError
from wherewhat.measures.axes.fit import fit_layer
from wherewhat.measures.swaps.layer import layer_swaps
from wherewhat.options import build_config
from wherewhat_lab.block import MaskDrawer
from wherewhat_lab.config import LabConfig
from wherewhat_lab.encodings import ENCODINGS, allowed_planes
from wherewhat_lab.hugging_face import to_hugging_face
from wherewhat_lab.model import LabModel

SMALL = LabConfig(vocabulary=40, layers=3, heads=2, width=32)
EXACT = {"atol": 1e-9, "rtol": 0}
"""Of float64: sums of up to 128 terms in three layers are within 1e-12 of each other in any order."""


@pytest.mark.parametrize(
    "config",
    [SMALL, replace(SMALL, encoding="partial", rotary_share=0.5), replace(SMALL, encoding="partial", heads=1)],
    ids=("rope", "half", "partial"),
)
@torch.no_grad()
def test_equals_gptj(config):
    model = spread(LabModel(config))
    theirs = to_hugging_face(model)
    assert theirs.config.model_type == "gptj"
    tokens = draw(vocabulary=config.vocabulary)
    # In float64, but GPT-J's attention, in float32: twice 3 layers of at most 128 terms.
    model, expected = model.double(), theirs.double()(tokens).logits
    assert worst(model(tokens, all_tokens=True), expected) < rounding(2 * 3 * 128)
    torch.testing.assert_close(model(tokens), model(tokens, all_tokens=True)[:, -1], **EXACT)


def test_gptj_starts_alike():
    ours = to_hugging_face(LabModel(LabConfig()))
    torch.manual_seed(0)
    theirs = type(ours)(ours.config)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    for name, weight in theirs.state_dict().items():
        if weight.ndim == 2:
            assert float(ours.state_dict()[name].std()) == pytest.approx(float(weight.std()), rel=0.05)
        else:
            assert torch.equal(ours.state_dict()[name], weight)


def test_what_gptj_has_not_is_refused():
    for options in ({"encoding": "alibi"}, {"base": 500.0}, {"frequencies": ("0.0:0",)}, {"norm": False}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            to_hugging_face(LabModel(replace(SMALL, **options)))


@pytest.mark.parametrize("encoding", ENCODINGS)
@torch.no_grad()
def test_attention_is_what_the_model_used(encoding):
    for heads in (1, 2):
        model = spread(LabModel(replace(SMALL, encoding=encoding, heads=heads, frequencies=("1.0:0-3",)))).double()
        tokens = draw()
        outputs = {}
        whole = model(tokens, edit_attention=lambda layer, to=outputs: to.update({layer.layer: layer.output}))
        torch.testing.assert_close(whole, model(tokens), **EXACT)
        for layer in model.attention(tokens):
            attended = torch.matmul(layer.pattern(), layer.value).transpose(1, 2)
            torch.testing.assert_close(attended, outputs[layer.layer], **EXACT)
            torch.testing.assert_close(layer.output, outputs[layer.layer], **EXACT)
            assert (layer.rotation is None) == (encoding in ("alibi", "learned", "nope"))
            if layer.rotation is not None:
                # Rotated back and forth by cosines and sines in float32.
                rotated = layer.rotation.rotate(layer.k, layer.positions)
                assert worst(rotated, layer.rot_k) < rounding(64)
            unused = bool((layer.rot_q[:, 0, :, 8:] == 0).all())
            assert unused == (layer.layer == 1)


@pytest.mark.parametrize("encoding", ENCODINGS)
@torch.no_grad()
def test_looking_and_the_future_change_nothing(encoding):
    model, tokens, other = spread(LabModel(replace(SMALL, encoding=encoding))).double(), draw(), draw()
    before = model(tokens, all_tokens=True)
    other[:, 9:] = (other[:, 9:] + 1) % 40
    torch.testing.assert_close(model(other, all_tokens=True)[:, :9], before[:, :9], **EXACT)
    seen = []
    assert torch.equal(model(tokens, all_tokens=True, edit_attention=seen.append), before)
    assert [layer.layer for layer in seen] == [0, 1, 2]
    rebuilt = model(
        tokens, all_tokens=True, edit_attention=lambda layer: (layer.pattern() @ layer.value).transpose(1, 2)
    )
    torch.testing.assert_close(rebuilt, before, **EXACT)
    gone = model(tokens, edit_attention=lambda layer: 0 * layer.output)
    for block in model.blocks:
        block.out.weight.zero_()
    torch.testing.assert_close(gone, model(tokens), **EXACT)


@torch.no_grad()
@pytest.mark.parametrize("encoding", ["rope", "partial", "alibi", "nope", "pope"])
def test_moving_all_positions_changes_nothing(encoding):
    model, tokens = spread(LabModel(replace(SMALL, encoding=encoding))).double(), draw()
    still = model(tokens)
    assert torch.equal(model(tokens, positions=torch.arange(17)), still)
    # Angles are float32 products with positions up to 66, in three layers.
    angles = rounding(8 * 66 * 3) * float(still.abs().max())
    torch.testing.assert_close(model(tokens, positions=torch.arange(17) + 50), still, atol=angles, rtol=0)
    apart = float((model(tokens, positions=3 * torch.arange(17)) - still).abs().max())
    assert apart < angles if encoding == "nope" else apart > 0.1


def test_encodings_differ_as_they_should():
    def rotation(**options):
        return LabModel(LabConfig(layers=1, **options)).rotation

    full = rotation().inv_freq
    assert torch.equal(full, 1.0 / (10000 ** (torch.arange(0, 128, 2) / 128)))
    p_rope = rotation(encoding="p-rope").inv_freq
    assert torch.equal(p_rope[:48], full[:48])
    assert not p_rope[48:].any()
    assert rotation(encoding="partial").planes == 16
    assert rotation(encoding="partial", rotary_share=0.5).planes == 32
    assert rotation(angles=(0.5,)).inv_freq.tolist() == [0.5]
    slopes = ENCODINGS["alibi"].slopes
    assert slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert len(slopes(12)) == 12


def test_alibi_and_nope_depend_on_positions_as_they_say():
    tokens = draw()
    for encoding, expected in (("nope", 0.0), ("alibi", -(2.0**-4) - 2.0**-8)):
        model = spread(LabModel(replace(SMALL, encoding=encoding))).double()
        layer = model.attention(tokens)[0]
        plain = torch.matmul(layer.rot_q, layer.rot_k.mT) * layer.scale
        gap = (layer.attn_scores() - plain)[0, :, 16, 15].sum()
        assert float(gap) == pytest.approx(expected, abs=1e-9)
    layer = spread(LabModel(SMALL)).attention(draw(batch=1))[1]
    assert bool((layer_swaps(layer, [16]).exclusion >= 1).all())


@torch.no_grad()
def test_edits_take_effect():
    model = spread(LabModel(SMALL)).double()
    tokens = draw()
    before = model(tokens)
    torch.testing.assert_close(model(tokens, edit_attention=lambda layer: layer.output), before, **EXACT)
    without = model(tokens, edit_attention=lambda layer: 0 * layer.output if layer.layer == 1 else None)
    assert not torch.allclose(without, before, atol=1e-2)
    streams = {}
    model(tokens, edit_stream=lambda layer, x: streams.update({layer: x.clone()}))
    assert sorted(streams) == [0, 1, 2, 3]
    patched = model(draw() * 0, edit_stream=lambda layer, x: streams[3] if layer == 3 else None)
    torch.testing.assert_close(patched, before, **EXACT)


def test_masks_drop_as_often_as_they_should():
    config = LabConfig(layers=2)
    masks = MaskDrawer(config, batch=64, n=17).draw(torch.Generator().manual_seed(0))
    for mask in (masks.embedding, masks.layers[0].attention, masks.layers[0].mlp):
        assert mask.unique().tolist() == pytest.approx([0, 1 / 0.9], rel=1e-6)
        assert float((mask == 0).float().mean()) == pytest.approx(0.1, abs=4e-3)
    assert masks.layers[0].pattern.shape == (64, 1, 17, 17)
    assert masks.layers[1].pattern.shape == (64, 1, 1, 17)
    assert masks.layers[1].mlp.shape == (64, 1, 128)
    none = MaskDrawer(replace(config, dropout=0.0), batch=2, n=5).draw(torch.Generator().manual_seed(0))
    assert bool((none.embedding == 1).all())
    for heads in (1, 2):
        model = spread(LabModel(replace(SMALL, dropout=0.0, heads=heads, encoding="alibi"))).double()
        tokens = draw()
        masks = MaskDrawer(model.config, batch=4, n=17).draw(torch.Generator().manual_seed(0))
        torch.testing.assert_close(model(tokens, masks=masks), model(tokens), **EXACT)


def test_weights_by_hand():
    """One layer without LayerNorm, MLP and residual stream is attention and nothing else."""
    config = LabConfig(
        vocabulary=6, layers=1, width=6, norm=False, mlp=False, residual=False, scale=50.0, angles=(0.3,)
    )
    model = LabModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.embedding.copy_(torch.eye(6))
        model.blocks[0].qkv.weight[12:].copy_(torch.eye(6))
        model.blocks[0].out.weight.copy_(torch.eye(6))
        model.head.weight.copy_(torch.eye(6))
        # All queries and keys are the same vector: a query attends to its own place, where the angle is 0.
        model.blocks[0].qkv.weight[0] = model.blocks[0].qkv.weight[6] = 1
        assert torch.equal(model(draw(vocabulary=6)).argmax(-1), draw(vocabulary=6)[:, -1])


def test_wrong_options_are_told_in_one_line(subtests):
    for options in (
        {"width": 33},
        {"width": 32, "heads": 3},
        {"layers": 0},
        {"dropout": 1.0},
        {"rotary_share": 0.5},
        {"encoding": "partial", "rotary_share": 0.001},
        {"angles": (1.0,) * 99},
        {"frequencies": ("nonsense",)},
        {"frequencies": ("9.0:1",)},
        {"frequencies": ("0.0:0-99",)},
    ):
        with subtests.test(options=options):
            with pytest.raises(ConfigError) as error:
                LabModel(build_config(LabConfig, {**vars(SMALL), **options}))
            assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="do not fit 17 tokens"):
        LabModel(SMALL)(draw(), positions=torch.arange(5))


def test_planes_as_text():
    allowed = allowed_planes(("*.*:0-1", "1.0:3+0"), layers=2, heads=2, planes=4)
    assert allowed[0].tolist() == [[True, True, False, False]] * 2
    assert allowed[1].tolist() == [[True, False, False, True], [True, True, False, False]]
    assert allowed_planes((), layers=2, heads=2, planes=4) is None


def test_learned_positions_end():
    with pytest.raises(ConfigError, match="17 tokens"):
        LabModel(replace(SMALL, encoding="learned", positions=16))(draw())
    with pytest.raises(ConfigError, match="20 tokens"):
        LabModel(replace(SMALL, encoding="learned", positions=18))(draw(), positions=torch.arange(17) + 3)


@torch.no_grad()
@pytest.mark.parametrize("block", ["parallel", "sequential", "llama"])
def test_blocks_see_what_they_should(block):
    """The MLP of a sequential block sees what its attention gives; that of a parallel one does not."""
    config = replace(SMALL, layers=1, block=block, dropout=0.0)
    model, tokens = spread(LabModel(config)).double(), draw()

    def after(factor):
        streams = {}
        model(
            tokens,
            edit_attention=lambda layer: factor * layer.output,
            edit_stream=lambda index, x: streams.update({index: x}),
        )
        return streams[1]

    bend = float((after(2) - 2 * after(1) + after(0)).abs().max())
    assert bend < 1e-9 if block == "parallel" else bend > 1e-2
    masks = MaskDrawer(config, batch=4, n=17).draw(torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(tokens, masks=masks), model(tokens, all_tokens=True)[:, -1], **EXACT)


def test_biases():
    for block, biases, expected in (
        ("sequential", "all", 10),
        ("sequential", "inner", 9),
        ("sequential", "none", 0),
        ("llama", "inner", 0),
    ):
        model = LabModel(replace(SMALL, block=block, layers=2, biases=biases))
        assert sum(name.endswith(".bias") for name, _ in model.named_parameters()) == expected, (block, biases)


@torch.no_grad()
def test_axes_find_the_slopes_that_alibi_was_given():
    """Up to the gauge: the distance curve is minus slope times distance, on top of what content gives."""
    n = 48
    model = spread(LabModel(LabConfig(vocabulary=40, layers=2, heads=3, width=48, encoding="alibi"))).double()
    line = -ENCODINGS["alibi"].slopes(3)[:, None].double() * torch.arange(n)
    tokens = draw(n=n, batch=1)
    for layer in model.attention(tokens):
        assert float(layer.rot_q.std()) > 0.1
        bare = replace(layer, rot_q=0 * layer.rot_q)
        found = fit_layer(bare)
        torch.testing.assert_close(found.a - found.a[:, :1], line, **EXACT)
        torch.testing.assert_close(found.r, torch.ones(3, dtype=torch.float64), **EXACT)
        with_content, content = fit_layer(layer), fit_layer(replace(layer, mask=replace(layer.mask, added=())))
        curve = with_content.a - content.a
        torch.testing.assert_close(curve - curve[:, :1], line, atol=1e-7, rtol=0)

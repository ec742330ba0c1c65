"""Identity: a proof holds for the model as it was; whatever changes is refused or proved again."""

import pytest
import torch

from helpers.capture import Kept, assert_near, tiny, tokens
from wherewhat.captures.proof import capture, intervene, prove
from wherewhat.captures.structure import state_of, structure_of
from wherewhat.errors import CaptureError


@pytest.fixture
def proofs(monkeypatch):
    """Counts the proofs that are made."""
    made = []

    def counted(model, **options):
        made.append(model)
        return prove(model, **options)

    monkeypatch.setattr("wherewhat.captures.proof.prove", counted)
    return made


def look(model, ids=None, proof=None):
    """Layers of one pass, each with the pattern that was captured, beside the model's own."""
    kept = Kept([])
    with torch.no_grad():
        with capture(model, kept, proof=proof):
            model(input_ids=tokens() if ids is None else ids, use_cache=False)
        return kept.layers


def check_faithful(model):
    """Captured patterns are those the model itself computes now."""
    layers = look(model)
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        own = model(input_ids=tokens(), use_cache=False, output_attentions=True).attentions
    model.set_attn_implementation(implementation)
    for layer, pattern in zip(layers, own, strict=True):
        assert_near(layer.pattern(), pattern)


def test_nothing_changed_is_not_proved_again(proofs):
    for kind in ("llama", "bloom"):
        model = tiny(kind)
        state = state_of(model)
        for _ in range(3):
            look(model)
        assert proofs == [model]
        assert state_of(model) == state
        assert structure_of(model) is structure_of(model)
        proofs.clear()


def test_training_mode_after_a_capture():
    """Dropout of one half: patterns would be off by more than one."""
    model = tiny("gpt2")
    for proof in (None, prove(model)):
        look(model, proof=proof)
        model.train()
        for use in (capture, intervene):
            with pytest.raises(CaptureError, match=r"training mode.*call model\.eval"), use(model, print, proof=proof):
                pass
        model.eval()
        look(model, proof=proof)
    model.transformer.h[2].mlp.train()
    with pytest.raises(CaptureError, match=r"^transformer\.h\.2\.mlp.* is in training mode"), capture(model, print):
        pass


def test_training_mode_inside_an_open_capture():
    for kind in ("llama", "bloom"):
        model = tiny(kind)
        with torch.no_grad(), capture(model, lambda a: None):
            model(input_ids=tokens(), use_cache=False)
            model.train()
            with pytest.raises(CaptureError, match="training mode"):
                model(input_ids=tokens(), use_cache=False)


@pytest.mark.parametrize("how", ["no_grad", "data", "replaced"])
def test_weights_that_became_nan(how):
    """Writes through ``.data`` are not counted by torch: the output shows them."""
    model = tiny("gpt2" if how == "no_grad" else "llama")
    look(model)
    weight = next(p for n, p in model.named_parameters() if ".2." in n and p.ndim == 2)
    if how == "no_grad":
        with torch.no_grad():
            weight[0, 0] = torch.nan
    elif how == "data":
        weight.data[0, 0] = torch.nan
    else:
        weight.data = torch.full_like(weight, torch.nan)
    with pytest.raises(CaptureError, match="NaN"):
        look(model)


def test_an_optimiser_step_is_proved_again(proofs):
    model = tiny("llama")
    look(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(input_ids=tokens(), use_cache=False).logits.float().logsumexp(-1).mean().backward()
    optimizer.step()
    check_faithful(model)
    assert len(proofs) == 2


def test_another_dtype_is_proved_again(proofs):
    model = tiny("llama")
    look(model)
    model.double()
    assert look(model)[0].rot_q.dtype == torch.float64
    assert len(proofs) == 2


def test_another_dtype_inside_an_open_capture():
    model = tiny("llama")
    with torch.no_grad(), capture(model, lambda a: None):
        model.double()
        with pytest.raises(CaptureError, match=r"computes in torch\.float64, in the proof in torch\.float32"):
            model(input_ids=tokens(), use_cache=False)


def test_another_attention_implementation_is_proved_again(proofs):
    model = tiny("llama", attn_implementation="sdpa")
    look(model)
    model.set_attn_implementation("eager")
    check_faithful(model)
    assert len(proofs) >= 2


def test_another_module_is_proved_again(proofs):
    model = tiny("llama")
    look(model)
    model.model.layers[1].self_attn.q_proj = torch.nn.Sequential(model.model.layers[1].self_attn.q_proj).eval()
    check_faithful(model)
    assert len(proofs) == 2


def test_the_proof_of_another_model_is_not_used(proofs):
    proof = prove(tiny("llama"))
    other = tiny("gptj")
    assert [layer.name for layer in look(other, proof=proof)] == [f"transformer.h.{i}.attn" for i in range(4)]
    assert proofs == [other]


def test_a_proof_is_made_again_at_the_length_it_had():
    model = tiny("llama")
    proof = prove(model, length=40)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.0)
    look(model, proof=proof)
    from wherewhat.captures.proof import _proofs

    assert _proofs[model] is not proof
    assert _proofs[model].length == 40


def test_a_freed_model_leaves_nothing():
    import gc
    import weakref

    model = tiny("llama")
    look(model)
    gone, part = weakref.ref(model), weakref.ref(model.model.layers[0])
    gc.disable()
    try:
        del model
        assert gone() is None
        assert part() is None
    finally:
        gc.enable()


def test_code_that_was_replaced_is_proved_again(proofs, monkeypatch):
    model = tiny("llama")
    look(model)
    attention = model.model.layers[2].self_attn
    forward = attention.forward
    monkeypatch.setattr(attention, "forward", lambda *args, **kwargs: forward(*args, **kwargs))
    check_faithful(model)
    assert len(proofs) == 2


def test_what_surrounds_the_model_changed_inside_an_open_capture():
    model = tiny("llama", attn_implementation="sdpa")
    with torch.no_grad(), capture(model, lambda a: None):
        with torch.autocast("cpu"), pytest.raises(CaptureError, match="open capture"):
            model(input_ids=tokens(), use_cache=False)
        model.set_attn_implementation("eager")
        with pytest.raises(CaptureError, match="open capture"):
            model(input_ids=tokens(), use_cache=False)


def test_a_kernel_with_a_window_of_its_own_is_refused_at_every_use():
    """The proof's prompt is shorter than the window."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    def windowed(module, query, key, value, mask, **rest):
        n = query.shape[2]
        near = torch.ones(n, n, dtype=torch.bool).tril().triu(-31)
        return sdpa_attention_forward(module, query, key, value, near[None, None], **rest)

    AttentionInterface.register("windowed", windowed)
    AttentionMaskInterface.register("windowed", sdpa_mask)
    try:
        model = tiny("llama")
        model.set_attn_implementation("windowed")
        look(model)
        for _ in range(2):
            with pytest.raises(CaptureError, match="is not its attention weights times its values"):
                look(model, tokens(60))
    finally:
        AttentionInterface._global_mapping.pop("windowed")
        AttentionMaskInterface._global_mapping.pop("windowed")


def test_a_capture_closed_in_another_thread_leaves_no_trace():
    import threading

    for kind in ("llama", "gptj"):
        model = tiny(kind)
        open_one = capture(model, lambda a: None)
        open_one.__enter__()
        thread = threading.Thread(target=open_one.__exit__, args=(None, None, None))
        thread.start()
        thread.join()
        assert len(look(model)) == 4

"""Identity: a capture changes nothing, sees only its own model, and leaves nothing behind however it ends."""

import sys
import threading
from contextlib import ExitStack

import pytest
import torch
from torch.overrides import _len_torch_function_stack
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from helpers.capture import tiny, tokens
from wherewhat.captures import calls as swaps_module
from wherewhat.captures.calls import observers
from wherewhat.captures.proof import capture, prove
from wherewhat.errors import CaptureError

# One on the attention interface, one with rotary methods and tables of its own, one in plain PyTorch with ALiBi.
KINDS = ["llama", "gptj", "bloom"]
HOOKS = [
    f"_{prefix}{name}"
    for prefix in ("forward_", "forward_pre_", "backward_", "backward_pre_")
    for name in ("hooks", "hooks_with_kwargs", "hooks_always_called")
]


class Boom(Exception):
    """Raised on purpose."""


def snapshot(*models):
    """Everything a capture could have touched, by identity."""
    found = {"interface": dict(ALL_ATTENTION_FUNCTIONS.items()), "observers": observers.get()}
    found["modes"] = _len_torch_function_stack()
    found["swapped"] = dict(swaps_module._replaced)
    for model in models:
        for file in {cls.__module__ for module in model.modules() for cls in type(module).__mro__}:
            if file.startswith("transformers"):
                found[file] = dict(vars(sys.modules[file]))
        for name, module in model.named_modules():
            own = vars(module)
            found[id(model), name] = {key: value for key, value in own.items() if key not in HOOKS}
            found[id(model), name, "hooks"] = {key: dict(own[key]) for key in HOOKS if key in own}
            if hasattr(module, "config"):
                config = vars(module.config)
                found[id(model), name, "config"] = {k: v for k, v in config.items() if k.startswith("_attn")}
    return found


def changed(before, after):
    """Where two snapshots differ, by identity of what they hold."""
    out = list(before.keys() ^ after.keys())
    for key in before.keys() & after.keys():
        old, new = before[key], after[key]
        if isinstance(old, dict):
            if old.keys() != new.keys():
                out.append((key, old.keys() ^ new.keys()))
            out.extend((key, k) for k in old.keys() & new.keys() if old[k] is not new[k] and old[k] != new[k])
        elif old != new:
            out.append(key)
    return out


@pytest.fixture(params=KINDS)
def model(request):
    made = tiny(request.param)
    with torch.no_grad():
        made(input_ids=tokens())  # lazily made buffers are not the capture's doing
        prove(made)
    return made


def logits(model, ids=None):
    with torch.no_grad():
        return model(input_ids=tokens() if ids is None else ids, use_cache=False).logits


def test_each_layer_once_and_in_order_and_nothing_is_left(model):
    before, plain = snapshot(model), logits(model)
    prove(model)
    assert changed(before, snapshot(model)) == []
    seen = []

    def reducer(a):
        a.pattern()
        seen.append((a.layer, a.name))

    with capture(model, reducer) as session:
        assert changed(before, snapshot(model))
        assert torch.equal(logits(model), plain)
        logits(model, tokens(11))
    assert changed(before, snapshot(model)) == []
    assert torch.equal(logits(model), plain)
    assert [layer for layer, _ in seen] == [0, 1, 2, 3] * 2
    assert all(str(layer) in name.split(".") for layer, name in seen)
    assert session.layers_seen == 8


def test_nothing_is_left_after_an_exception(model):
    before = snapshot(model)

    def explode(a):
        if a.layer == 2:
            raise Boom

    with pytest.raises(Boom), capture(model, explode):
        logits(model)
    assert changed(before, snapshot(model)) == []
    for error in (Boom, KeyboardInterrupt):

        def fail(*_, error=error):
            raise error

        handle = list(model.modules())[-1].register_forward_pre_hook(fail)
        with pytest.raises(error), capture(model, lambda a: None):
            logits(model)
        handle.remove()
        assert changed(before, snapshot(model)) == []


def test_a_pass_after_a_failed_one_starts_afresh(model):
    seen = []

    def explode(a):
        seen.append(a.layer)
        if len(seen) == 2:
            raise Boom

    with capture(model, explode):
        with pytest.raises(Boom):
            logits(model, tokens(31))
        # What the broken pass left half-done must not be compared with this one, which is shorter.
        logits(model, tokens(5))
    assert seen == [0, 1, 0, 1, 2, 3]


def test_a_pass_broken_between_rotation_and_attention_leaves_no_trace():
    model = tiny("llama")
    seen = []
    attention = model.model.layers[2].self_attn
    with capture(model, lambda a: seen.append(a.layer)):
        attention.is_causal, attention.scaling = True, "no number"
        with pytest.raises(Exception, match=r"number|str"):
            logits(model, tokens(31))
        attention.scaling = 16**-0.5
        logits(model, tokens(5))
    assert seen == [0, 1, 0, 1, 2, 3]


def test_nested_captures_of_one_model_each_see_each_layer_once(model):
    before = snapshot(model)
    outer, inner = [], []

    def work(a, into):
        key, value = (x.repeat_interleave(a.heads // x.shape[1], 1) for x in (a.rot_k, a.value))
        torch.softmax(a.rot_q @ key.transpose(-1, -2), -1) @ value  # looks like attention itself
        into.append(a.layer)

    with capture(model, lambda a: work(a, outer)):
        with capture(model, lambda a: work(a, inner)):
            logits(model)
        assert (outer, inner) == ([0, 1, 2, 3], [0, 1, 2, 3])
        logits(model)
    assert (outer, inner) == ([0, 1, 2, 3] * 2, [0, 1, 2, 3])
    assert changed(before, snapshot(model)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_two_models_of_a_family_are_told_apart(kind):
    first, second = tiny(kind, seed=1), tiny(kind, seed=2)
    prove(first), prove(second)
    before = snapshot(first, second)
    a, b = [], []
    with capture(first, lambda x: a.append(x.layer)):
        logits(second)
        assert a == []
        with capture(second, lambda x: b.append(x.layer)):
            logits(second)
            assert (a, b) == ([], [0, 1, 2, 3])
            logits(first)
    assert (a, b) == ([0, 1, 2, 3], [0, 1, 2, 3])
    assert changed(before, snapshot(first, second)) == []
    a.clear(), b.clear()
    one, two = ExitStack(), ExitStack()
    one.enter_context(capture(first, lambda x: a.append(x.layer)))
    two.enter_context(capture(second, lambda x: b.append(x.layer)))
    one.close()  # the first opened is the first closed
    logits(first)
    logits(second)
    assert (a, b) == ([], [0, 1, 2, 3])
    two.close()
    logits(second)
    assert (a, b) == ([], [0, 1, 2, 3])
    assert changed(before, snapshot(first, second)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_reducer_may_run_models_itself(kind):
    """Another of the family in the middle of a pass, and even the very model that is being captured."""
    model, other = tiny(kind, seed=1), tiny(kind, seed=2)
    plain = logits(model), logits(other, tokens(7))
    seen = []

    def reducer(a):
        seen.append(a.layer)
        assert torch.equal(logits(other, tokens(7)), plain[1])
        assert torch.equal(logits(model), plain[0])
        assert a.positions.tolist() == list(range(31))

    with capture(model, reducer):
        logits(model, tokens(31))
        logits(model, tokens(31))
    assert seen == [0, 1, 2, 3] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_another_thread_is_not_observed_and_does_not_disturb(kind):
    """With the model that is captured and with another one of the family, in the middle of a pass."""
    mine, theirs = tiny(kind, seed=1), tiny(kind, seed=2)
    ids = tokens(9, batch=2)
    plain = [logits(model, ids) for model in (mine, theirs)]
    seen, elsewhere = [], []

    def other():
        positions = {} if kind == "bloom" else {"position_ids": torch.arange(9)[None] + 5}
        with torch.no_grad():
            mine(input_ids=ids, use_cache=False, **positions)
        elsewhere.extend(logits(model, ids) for model in (mine, theirs))

    def reducer(a):
        assert a.positions.tolist() == list(range(23))
        seen.append((a.layer, threading.get_ident()))
        if a.layer == 1:
            worker = threading.Thread(target=other)
            worker.start()
            worker.join()

    with capture(mine, reducer):
        logits(mine)
    assert seen == [(layer, threading.get_ident()) for layer in range(4)]
    assert all(torch.equal(x, y) for x, y in zip(elsewhere, plain, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_captures_in_two_threads_at_once(kind):
    models = [tiny(kind, seed=seed) for seed in (1, 2)]
    for model in models:
        prove(model)
    before = snapshot(*models)
    alone = [[], []]
    for model, into in zip(models, alone, strict=True):
        with capture(model, lambda a, into=into: into.append(a.pattern().clone())):
            logits(model)
    together = [[], []]
    barrier = threading.Barrier(2)

    def work(index):
        def reducer(a):
            barrier.wait(timeout=600)  # only a thread that failed leaves the other alone
            together[index].append(a.pattern().clone())

        with capture(models[index], reducer):
            logits(models[index])

    workers = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for ours, expected in zip(together, alone, strict=True):
        assert len(ours) == 4
        assert all(torch.equal(x, y) for x, y in zip(ours, expected, strict=True))
    assert changed(before, snapshot(*models)) == []


def test_running_only_a_part_of_the_model_is_refused(model):
    """Positions and the rotation's guard belong to the whole pass; a part alone would go unchecked."""
    base = getattr(model, model.base_model_prefix)
    with capture(model, lambda a: None), torch.no_grad(), pytest.raises(CaptureError, match="whole model"):
        base(input_ids=tokens(), use_cache=False)

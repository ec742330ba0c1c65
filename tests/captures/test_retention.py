"""Identity: nothing of a layer is kept once its reducer has returned."""

import gc
import weakref

import pytest
import torch

from helpers.capture import shared, tiny, tokens
from wherewhat.captures.blocks import blocks, key_mixing
from wherewhat.captures.proof import capture, prove

# Attention through the interface, in models' own code, and through SDPA in their own code.
KINDS = ["llama", "gptj", "falcon:alibi"]
OTHERS = ["gemma2", "gpt_neo", "bloom", "mpt"]
NAMES = ("rot_q", "rot_k", "value", "output", "q", "k")


class Watching:
    """Reducer that keeps weak references, and looks at those of earlier layers."""

    def __init__(self):
        self.watched = []
        self.late = []

    def __call__(self, a):
        self.late.extend((a.layer, what) for what, ref in self.watched_names() if ref() is not None)
        held = [getattr(a, name) for name in NAMES]
        self.watched += [weakref.ref(x) for x in (*held, a.pattern(), a)]

    def watched_names(self):
        names = [*NAMES, "pattern", "attention"]
        return [(names[i % len(names)], ref) for i, ref in enumerate(self.watched)]


def big_tensors(n):
    """How many tensors live that are n × n or more in their last two dimensions."""
    found = (x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and x.ndim >= 2)
    return sum(x.shape[-1] >= n and x.shape[-2] >= n for x in found)


@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS)])
def test_tensors_are_dead_when_the_next_layer_comes(kind):
    """References alone must free them: a cycle would hold a layer until the collector comes by."""
    model = shared(kind)
    reducer, counts = Watching(), []
    with torch.no_grad(), capture(model, reducer):
        gc.collect()
        gc.disable()
        try:
            model(input_ids=tokens(), use_cache=False)
            assert not [what for what, ref in reducer.watched_names() if ref() is not None]
        finally:
            gc.enable()
    assert len(reducer.watched) == 4 * 8
    assert reducer.late == []
    with torch.no_grad(), capture(model, lambda a: counts.append(big_tensors(101))):
        model(input_ids=tokens(101), use_cache=False)
    assert len(counts) == 4
    # No square tensor of an earlier layer is alive; masks are the model's. Some models themselves hold the weights of
    # the layer before; layers of two kinds alternate in others.
    assert counts[3] <= counts[1]


def mixed(model):
    key_mixing(model, prove(model))


def captured(model):
    with torch.no_grad(), capture(model, lambda a: None):
        model(input_ids=tokens(), use_cache=False)


@pytest.mark.parametrize("kind", ["llama", "gptj"])
def test_the_model_itself_is_not_kept(kind):
    """Not even until the collector comes by, which may be long after its memory is needed."""
    for use in (prove, captured, mixed):
        model = tiny(kind)
        ref = weakref.ref(model)
        gc.collect()
        gc.disable()
        try:
            use(model)
            del model
            assert ref() is None, use.__name__
        finally:
            gc.enable()


def test_blocks_let_go_of_the_last_layer_when_they_close():
    model = tiny("llama")
    with blocks(model, tokens(), prove(model)) as again:
        ref = weakref.ref(again.run(1, again.hidden(1)).rot_k)
        assert ref() is not None
    assert ref() is None

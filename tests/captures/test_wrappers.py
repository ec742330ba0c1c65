"""Identity: a model in a wrapper is captured as the model alone is, or refused in one line."""

import threading

import pytest
import torch
import torch.distributed
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

from helpers.capture import Kept, tiny, tokens
from helpers.tolerance import rounding
from wherewhat.captures.proof import capture, intervene, prove
from wherewhat.captures.structure import uncompiled, unwrapped
from wherewhat.errors import CaptureError

IDS = tokens()


def captured(called, given):
    """Every layer and the logits of a pass of ``called``, under a capture of ``given``."""
    kept = Kept([])
    with torch.no_grad(), capture(given, kept):
        logits = called(input_ids=IDS, use_cache=False).logits
    return kept.layers, logits


def same_as_alone(wrapped, model, *, given=None):
    """A pass through a wrapper shows the layers and logits of a plain pass; its proof is within float32 rounding."""
    layers, logits = captured(wrapped, wrapped if given is None else given)
    alone, expected = captured(model, model)
    assert torch.equal(logits, expected)
    proof = prove(wrapped)
    assert len(layers) == len(alone) == len(proof.layers)
    for one, other in zip(layers, alone, strict=True):
        assert (one.name, one.layer) == (other.name, other.layer)
        assert torch.equal(one.rot_q, other.rot_q)
        assert torch.equal(one.pattern(slice(None)), other.pattern(slice(None)))
    # Sums of up to 23 products of weights and values, relative to the largest output.
    assert max(layer.output_error for layer in proof.layers) < rounding(32)


def refused(model, match):
    with pytest.raises(CaptureError, match=match) as caught, capture(model, Kept([])):
        pass
    assert "\n" not in str(caught.value)


@pytest.fixture
def one_process(tmp_path):
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("kind", ["llama", pytest.param("gptj", marks=pytest.mark.slow)])
def test_compiled_models(kind):
    compilations = []

    def backend(graph, _):
        compilations.append(graph)
        return graph.forward

    model = tiny(kind)
    compiled = torch.compile(model, backend=backend)
    same_as_alone(compiled, model)
    same_as_alone(compiled, model, given=model)
    assert compilations == []
    with torch.no_grad():
        compiled(input_ids=IDS, use_cache=False)
        made = len(compilations)
        assert made
        same_as_alone(compiled, model)
        compiled(input_ids=IDS, use_cache=False)
    assert len(compilations) == made  # compiled code is used again after a capture


@pytest.mark.slow
def test_models_compiled_in_place():
    model = tiny("llama")
    model.compile(backend="eager")
    same_as_alone(model, model)
    model = tiny("llama")
    model.forward = torch.compile(model.forward, backend="eager")
    same_as_alone(model, model)
    model = tiny("llama")
    model.model.layers[1].compile(backend="eager")
    same_as_alone(model, model)


def test_overlapping_captures_stay_uncompiled_until_the_last_ends():
    double = torch.compile(lambda x: (torch.compiler.is_compiling(), 2 * x), backend="eager")
    one = torch.ones(1)
    first, second = uncompiled(), uncompiled()
    first.__enter__()
    worker = threading.Thread(target=second.__enter__)
    worker.start()
    worker.join()
    first.__exit__(None, None, None)
    assert double(one)[0] is False
    second.__exit__(None, None, None)
    assert double(one)[0] is True


def test_a_capture_inside_compiled_code():
    model = tiny("llama")
    prove(model)

    def step(ids):
        with capture(model, Kept([])):
            return model(input_ids=ids, use_cache=False).logits

    with pytest.raises(CaptureError, match="opened inside compiled code"):
        torch.compile(step, backend="eager")(IDS)


def test_data_parallel():
    model = tiny("llama")
    same_as_alone(DataParallel(model), model)
    several = DataParallel(model)
    several.device_ids = [0, 1]
    refused(several, r"DataParallel runs copies of the model on 2 devices.*\.module")


@pytest.mark.usefixtures("one_process")
def test_distributed_data_parallel():
    model = tiny("llama")
    same_as_alone(DistributedDataParallel(model), model)
    same_as_alone(torch.compile(DistributedDataParallel(model), backend="eager"), model)


@pytest.mark.usefixtures("one_process")
@pytest.mark.filterwarnings("ignore:FSDP is switching")
def test_sharded_models():
    model = tiny("llama")
    _, expected = captured(model, model)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    layers, logits = captured(model, model)
    assert len(layers) == 4
    assert torch.equal(logits, expected)
    refused(FullyShardedDataParallel(tiny("llama"), device_id=torch.device("cpu")), "with fully_shard")


def test_gradient_checkpointing():
    model = tiny("llama")
    model.gradient_checkpointing_enable()
    same_as_alone(model, model)
    model.train()
    refused(model, "training mode")


def test_accelerate_hooks():
    accelerate = pytest.importorskip("accelerate", reason="device maps need the extra 'large'")
    model = tiny("llama")
    _, expected = captured(model, model)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    layers, logits = captured(model, model)
    assert len(layers) == 4
    assert torch.equal(logits, expected)


def test_pipelines(tmp_path):
    from transformers import pipeline

    from helpers.models import save_model

    text = pipeline("text-generation", model=str(save_model(tmp_path / "tiny")), device="cpu")
    assert unwrapped(text) is text.model
    kept = Kept([])
    with capture(text, kept):
        text("the cat sat on", max_new_tokens=3, do_sample=False)
    assert len(kept.layers) == 3 * len(prove(text).layers)
    assert {layer.rot_q.shape[2] for layer in kept.layers} == {4, 1}


def test_inference_mode_and_autocast():
    model = tiny("llama")
    with torch.inference_mode():
        same_as_alone(model, model)
    for kind in ("llama", "gptj"):
        with torch.autocast("cpu", dtype=torch.float16):
            assert prove(tiny(kind)).tolerance == 1e-2


def test_interventions_reach_through_wrappers():
    model = tiny("llama")
    compiled = torch.compile(DataParallel(model), backend="eager")
    changed = []
    for called in (model, compiled):
        with torch.no_grad(), intervene(called, lambda a: torch.zeros_like(a.output) if a.layer == 1 else None):
            changed.append(called(input_ids=IDS, use_cache=False).logits)
    assert torch.equal(*changed)
    assert not torch.equal(changed[0], captured(model, model)[1])


def test_what_is_no_wrapper_stays_as_it_is():
    module = nn.Linear(2, 2)
    assert unwrapped(module) is module
    refused(DataParallel(module), "Linear is not a model of transformers")


class TestAdapters:
    """PEFT models in memory."""

    @pytest.fixture(autouse=True)
    def peft(self):
        self.peft = pytest.importorskip("peft", reason="adapters need the extra 'peft'")

    def adapted(self, config=None, kind="llama"):
        """A model with an adapter that does something."""
        config = config or self.peft.LoraConfig(target_modules=["q_proj", "k_proj"], init_lora_weights=False)
        return self.peft.get_peft_model(tiny(kind), config).eval()

    @pytest.mark.parametrize(("kind", "task"), [("llama", "CAUSAL_LM"), ("gptj", None)])
    def test_lora(self, kind, task):
        config = self.peft.LoraConfig(
            target_modules=["q_proj", "k_proj"], init_lora_weights=False, **({"task_type": task} if task else {})
        )
        model = self.adapted(config, kind)
        same_as_alone(model, model.get_base_model())
        with model.disable_adapter():
            _, without = captured(model, model)
        assert torch.equal(without, captured(tiny(kind), tiny(kind))[1])
        _, logits = captured(model, model)
        assert float((logits - without).abs().max()) > 1e-2 * float(without.abs().max())

    @pytest.mark.slow
    def test_other_adapters_of_weights(self):
        for config in (
            self.peft.LoraConfig(target_modules=["q_proj"], use_dora=True),
            self.peft.LoHaConfig(target_modules=["q_proj"], init_weights=False),
            self.peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[], init_ia3_weights=False),
        ):
            model = self.adapted(config)
            same_as_alone(model, model.get_base_model())

    def test_versions_that_call_forward_themselves(self, monkeypatch):
        from peft.tuners.tuners_utils import BaseTuner

        monkeypatch.setattr(BaseTuner, "forward", lambda self, *args, **kwargs: self.model.forward(*args, **kwargs))
        model = self.adapted()
        same_as_alone(model, model.get_base_model())
        assert "forward" not in vars(model.base_model)

    def test_injected_and_merged(self):
        model = tiny("llama")
        model.add_adapter(self.peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
        model.eval()
        same_as_alone(model, model)
        merged = self.adapted().merge_and_unload()
        same_as_alone(merged, merged)

    def test_wrappers_of_wrappers(self):
        model = self.adapted()
        same_as_alone(torch.compile(DataParallel(model), backend="eager"), model.get_base_model())

    def test_adapters_that_add_tokens_keys_or_passes(self):
        for name in ("PromptTuningConfig", "PrefixTuningConfig", "PromptEncoderConfig"):
            config = getattr(self.peft, name)(num_virtual_tokens=2, task_type="CAUSAL_LM")
            refused(self.adapted(config), "adds tokens or keys, which")
        config = self.peft.AdaptionPromptConfig(adapter_len=2, adapter_layers=1, task_type="CAUSAL_LM")
        refused(self.adapted(config), r"ADAPTION_PROMPT\) adds passes or attention, which")

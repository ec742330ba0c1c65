"""Identity and brute force: twins keep what they must keep, and permute queries and keys alone."""

import copy

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CodeGenConfig,
    DbrxConfig,
    DeepseekV3Config,
    FalconConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTNeoXConfig,
    GPTNeoXJapaneseConfig,
    JetMoeConfig,
    LlamaConfig,
    MptConfig,
    OpenAIGPTConfig,
    PersimmonConfig,
    Phi3Config,
    Qwen3NextConfig,
)

from wherewhat.errors import LoadError
from wherewhat.models.controls import check_differs, control_seed, query_key_parts, random_control, shuffle_query_key
from wherewhat.models.loader import load
from wherewhat.report.result import measure
from wherewhat.runs.request import MemoryModel
from wherewhat.runs.subject import load_model

SMALL = {"vocab_size": 16, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL_GPT = {"vocab_size": 16, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
CONFIGS = {
    "llama": LlamaConfig(**SMALL, num_key_value_heads=2, intermediate_size=32),
    "phi3": Phi3Config(**SMALL, num_key_value_heads=2, intermediate_size=32, pad_token_id=0),
    "gpt_neox": GPTNeoXConfig(**SMALL, intermediate_size=32),
    "bloom": BloomConfig(vocab_size=16, hidden_size=32, n_layer=2, n_head=4),
    "falcon": FalconConfig(**SMALL, multi_query=True, new_decoder_architecture=False, bias=True),
    "falcon-heads": FalconConfig(**SMALL, multi_query=False, new_decoder_architecture=False),
    "falcon-groups": FalconConfig(**SMALL, num_kv_heads=2, new_decoder_architecture=True),
    "mpt": MptConfig(vocab_size=16, d_model=32, n_heads=4, n_layers=2, max_seq_len=32),
    "codegen": CodeGenConfig(**SMALL_GPT, rotary_dim=8),
    "gpt2": GPT2Config(**SMALL_GPT),
    "gpt_bigcode": GPTBigCodeConfig(**SMALL_GPT, multi_query=True),
    "gpt_bigcode-heads": GPTBigCodeConfig(**SMALL_GPT, multi_query=False),
    "persimmon": PersimmonConfig(**SMALL, intermediate_size=32),
    "openai-gpt": OpenAIGPTConfig(**SMALL_GPT),
    "gpt_neox_japanese": GPTNeoXJapaneseConfig(**SMALL, intermediate_multiple_size=1),
    "qwen3_next": Qwen3NextConfig(
        **SMALL, num_key_value_heads=2, head_dim=8, intermediate_size=32, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, num_experts=2, num_experts_per_tok=1,
        layer_types=["full_attention", "full_attention"],
    ),
    "jetmoe": JetMoeConfig(
        vocab_size=16, hidden_size=32, num_hidden_layers=2, num_key_value_heads=2, kv_channels=8,
        intermediate_size=32, num_local_experts=2, num_experts_per_tok=2,
    ),
    "dbrx": DbrxConfig(
        vocab_size=16, d_model=32, n_heads=4, n_layers=2, max_seq_len=32,
        attn_config={"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        ffn_config={"ffn_hidden_size": 32, "moe_num_experts": 2, "moe_top_k": 1, "hidden_size": 32},
    ),
    "deepseek_v3": DeepseekV3Config(
        **SMALL, num_key_value_heads=4, intermediate_size=32, q_lora_rank=12, kv_lora_rank=16,
        qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8, first_k_dense_replace=2,
        max_position_embeddings=32,
    ),
}  # fmt: skip


@pytest.fixture(params=CONFIGS, ids=CONFIGS.keys())
def model(request):
    built = random_control(CONFIGS[request.param], seed=3).eval()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        for parameter in built.parameters():  # biases and norms too, so that moving them would show
            parameter.add_(0.1 * torch.randn_like(parameter))
    return built


def attended_values(model, ids):
    """The values that each attention product weighs, in order, and the logits; found by running the model."""
    calls = []
    multiply, bmm = torch.matmul, torch.bmm
    softmax_attention = torch.nn.functional.scaled_dot_product_attention

    def watch_sdpa(q, k, v, *args, **kwargs):
        calls.append(v.detach().clone())
        return softmax_attention(q, k, v, *args, **kwargs)

    def watch_matmul(a, b, **kwargs):
        # The product with the pattern: rows of `a` sum to one, so `b` are the values.
        if a.ndim == 4 and torch.allclose(a.sum(-1), torch.ones(()), atol=1e-4):
            calls.append(b.detach().clone())
        return multiply(a, b, **kwargs)

    def watch_bmm(a, b):
        if torch.allclose(a.sum(-1), torch.ones(()), atol=1e-4):
            calls.append(b.detach().clone())
        return bmm(a, b)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", watch_sdpa)
        patch.setattr(torch, "matmul", watch_matmul)
        patch.setattr(torch, "bmm", watch_bmm)
        out = model(torch.tensor([ids])).logits
    return calls, out


def test_shuffle_moves_queries_and_keys_alone_and_keeps_their_entries(model):
    """The values that the first layer attends over come from the model's own code, not from our table."""
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    before_values, before = attended_values(model, ids)
    parts = query_key_parts(model)
    assert len(parts) == 2
    same, other = (copy.deepcopy(model) for _ in range(2))
    old = {name: value.clone() for name, value in model.state_dict().items()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    allowed = {name: torch.zeros_like(value, dtype=torch.bool) for name, value in old.items()}
    for layer in parts.values():
        for part in layer:
            mask = allowed[names[id(part.owner.weight)]]
            mask.index_fill_(part.dim, torch.arange(mask.shape[part.dim]) if part.rows is None else part.rows, True)
    state = torch.random.get_rng_state()
    shuffle_query_key(model, seed=0)
    assert torch.equal(torch.random.get_rng_state(), state)
    new = model.state_dict()
    for name, value in old.items():
        assert torch.equal(value[~allowed[name]], new[name][~allowed[name]]), name
    for layer in parts.values():
        for part in layer:
            name = names[id(part.owner.weight)]
            rows = torch.arange(old[name].shape[part.dim]) if part.rows is None else part.rows
            one, two = (state[name].index_select(part.dim, rows).flatten() for state in (old, new))
            assert torch.equal(one.sort().values, two.sort().values)
            assert (one != two).float().mean() > 0.8
    assert sum(part.role == "query" for layer in parts.values() for part in layer) == 2
    after_values, after = attended_values(model, ids)
    assert before_values, "the values were not seen"
    assert torch.equal(before_values[0], after_values[0])
    assert (before - after).abs().max() > 1e-3
    torch.manual_seed(1)
    shuffle_query_key(same, seed=0)
    shuffle_query_key(other, seed=6)
    pairs = list(zip(model.parameters(), same.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert not all(torch.equal(a, c) for a, _, c in pairs)


def test_unknown_layout_is_named():
    class OwnAttention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.everything = torch.nn.Linear(4, 12)

    model = torch.nn.Module()
    model.layer = torch.nn.Module()
    model.layer.attn = OwnAttention()
    with pytest.raises(LoadError, match=r"layer\.attn \(OwnAttention\)"):
        shuffle_query_key(model, seed=0)


def test_random_control_is_the_models_own_initialisation(build, tmp_path):
    folder = build.model(tmp_path / "m")
    torch.manual_seed(11)
    state = torch.random.get_rng_state()
    twin = load(folder, weights="random", seed=4, device="cpu").model
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(12)
    again = load(folder, weights="random", seed=4, device="cpu").model
    other = load(folder, weights="random", seed=5, device="cpu").model
    torch.manual_seed(control_seed(4))
    direct = AutoModelForCausalLM.from_config(build.config())
    for name, value in twin.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
        assert torch.equal(value, direct.state_dict()[name])
    assert not torch.equal(twin.lm_head.weight, other.lm_head.weight)
    assert torch.equal(twin.model.norm.weight, torch.ones(16))
    (folder / "model.safetensors").unlink()  # which is not needed
    half = load(folder, weights="random", seed=4, device="cpu", dtype="bfloat16")
    assert half.weights == "random"
    half = half.model.state_dict()
    assert all(torch.equal(value.to(torch.bfloat16), half[name]) for name, value in twin.state_dict().items())


def test_a_control_does_not_coincide_with_a_model_of_the_same_seed(build, tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(build.config())
    control = random_control(build.config(), seed=0)
    matrices = [name for name, value in model.named_parameters() if value.ndim == 2]
    assert not any(torch.equal(model.state_dict()[name], control.state_dict()[name]) for name in matrices)
    assert len({control_seed(seed) for seed in range(100)} | set(range(100))) == 200


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_weights_are_refused(build, tmp_path, dtype):
    """A model that was itself made as a control, then stored or kept in memory."""
    folder = build.model(tmp_path / "m")
    model = random_control(build.config(), seed=0).to(dtype)
    model.save_pretrained(folder)
    expected = "the random weights of seed 0 are those of the model itself: give another seed"
    for precision in ("float32", "bfloat16"):
        with pytest.raises(LoadError, match=expected):
            load(folder, weights="random", seed=0, device="cpu", dtype=precision)
    with pytest.raises(LoadError, match=expected):
        load_model(MemoryModel(model, weights="random", seed=0))
    load(folder, weights="random", seed=1, device="cpu")
    with torch.no_grad():
        model.model.norm.weight[-1] = 2  # a small difference is one
    check_differs(random_control(build.config(), seed=0), model.named_parameters(), seed=0)


def test_a_measurement_goes_on_without_a_control_of_equal_weights():
    ids = torch.randint(16, (2, 24), generator=torch.Generator().manual_seed(0))
    result = measure("axes", random_control(CONFIGS["llama"], seed=0), ids, controls=("random", "shuffled"))
    assert list(result.left_out) == ["random"]
    assert "No random control: the random weights of seed 0 are those of the model itself" in str(result)
    assert "one shuffled control" in str(result)


def test_a_model_whose_shuffling_changes_nothing_is_refused(build):
    model = random_control(build.config(), seed=0)
    with torch.no_grad():
        for parts in query_key_parts(model).values():
            for part in parts:
                part.owner.weight.zero_()
    with pytest.raises(LoadError, match="shuffling LlamaForCausalLM changes nothing"):
        shuffle_query_key(model, seed=0)

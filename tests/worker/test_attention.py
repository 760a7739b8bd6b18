"""Packed attention against a plain loop in float64, and what it refuses."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import (
    AttentionInterface,
    CohereConfig,
    Gemma2Config,
    GptOssConfig,
    GraniteConfig,
    JambaConfig,
    LlamaConfig,
    LlamaModel,
    MambaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    T5Config,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from inflight.errors import UnsupportedError
from inflight.model.attention import (
    SegmentPlan,
    check_model_is_supported,
    register_segment_attention,
    segment_attention,
)

LENGTHS = [(5,), (3, 3, 3), (1, 1), (40, 3, 17, 1, 64, 33), (1, 129, 2, 100, 80)]


def attention_by_loops(query, key, value, lengths, scaling):
    """Softmax over earlier tokens of the same segment, one query at a time; [heads, T, d] in, [T, heads, d] out."""
    groups = query.shape[0] // key.shape[0]
    rows = []
    start = 0
    for length in lengths:
        for t in range(start, start + length):
            seen = slice(start, t + 1)
            heads = []
            for head in range(query.shape[0]):
                scores = key[head // groups, seen] @ query[head, t] * scaling
                heads.append(torch.softmax(scores, 0) @ value[head // groups, seen])
            rows.append(torch.stack(heads))
        start += length
    return torch.stack(rows)


def random_qkv(num_tokens, heads, kv_heads, dtype=torch.float64, size=8):
    torch.manual_seed(num_tokens)
    make = lambda n: torch.randn(1, num_tokens, n, size, dtype=torch.float64).to(dtype).transpose(1, 2).requires_grad_()  # noqa: E731
    return make(heads), make(kv_heads), make(kv_heads)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
def test_packed_attention_and_its_gradients_equal_a_loop_over_segments(lengths, heads, kv_heads):
    qkv = random_qkv(sum(lengths), heads, kv_heads)
    plan = SegmentPlan.build(lengths, "cpu")
    output = segment_attention(*qkv, plan, scaling=0.3)
    expected = attention_by_loops(*(x[0] for x in qkv), lengths, 0.3)
    assert output.shape == (1, sum(lengths), heads, 8)
    torch.testing.assert_close(output[0], expected, rtol=0, atol=1e-12)  # float64, sums of up to 129 terms
    upstream = torch.randn_like(expected)
    gradients = torch.autograd.grad(output[0], qkv, upstream)
    for found, wanted in zip(gradients, torch.autograd.grad(expected, qkv, upstream), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_lower_precisions_stay_within_their_rounding(dtype, tolerance):
    lengths = (40, 3, 17, 64)
    qkv = random_qkv(sum(lengths), 4, 2, dtype)
    output = segment_attention(*qkv, SegmentPlan.build(lengths))
    expected = attention_by_loops(*(x[0].double() for x in qkv), lengths, 1 / math.sqrt(8))
    assert output.dtype == dtype
    torch.testing.assert_close(output[0].double(), expected, rtol=0, atol=tolerance)
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(output.float().sum(), qkv))


@pytest.mark.parametrize("lengths", [(6, 6), (6, 50, 9)], ids=str)
def test_a_segment_gives_no_gradient_to_its_neighbours(lengths):
    qkv = random_qkv(sum(lengths), 4, 2)
    output = segment_attention(*qkv, SegmentPlan.build(lengths))
    rest = slice(lengths[0], None)
    for gradient in torch.autograd.grad(output[0, : lengths[0]].sum(), qkv):
        assert (gradient[:, :, rest] == 0).all()
        assert (gradient[:, :, : lengths[0]] != 0).any()


def test_a_nan_in_one_segment_stays_there():
    query, key, value = random_qkv(60, 4, 2)
    with torch.no_grad():
        value[:, :, :20] = math.nan
    output = segment_attention(query, key, value, SegmentPlan.build((20, 7, 33)))
    assert output[0, :20].isnan().all()
    assert output[0, 20:].isfinite().all()


@settings(max_examples=200)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=40))
def test_a_plan_places_every_token_once_and_pads_less_than_twice(lengths):
    plan = SegmentPlan.build(lengths)
    slots = sum(count * length for count, length in plan.classes)
    assert (plan.num_tokens, plan.max_length) == (sum(lengths), max(lengths))
    assert sum(count for count, _ in plan.classes) == len(lengths)
    descending = sorted(lengths, reverse=True)
    for count, length in plan.classes:
        members, descending = descending[:count], descending[count:]
        assert length == members[0]
        assert length <= 32 or length < 2 * members[-1]
    if plan.index is None:
        assert slots == sum(lengths)
        return
    assert plan.index.token_of_slot_P.shape == (slots,)
    assert torch.equal(plan.index.token_of_slot_P[plan.index.slot_of_token_T], torch.arange(plan.num_tokens))


def test_segments_of_equal_length_are_not_copied_or_padded():
    assert SegmentPlan.build((7, 7, 7)).index is None
    assert SegmentPlan.build((7,)).classes == ((1, 7),)


def call_layer(module=None, plan=None, **arguments):
    query, key, value = random_qkv(arguments.pop("num_tokens", 10), 4, 2)
    function = AttentionInterface()[register_segment_attention()]
    return function(
        module or nn.Identity(), query, key, value, arguments.pop("mask", None), segment_plan=plan, **arguments
    )


def test_layers_get_an_output_and_no_weights():
    output, weights = call_layer(
        plan=SegmentPlan.build((4, 6)), dropout=0.0, scaling=0.5, sliding_window=6, softcap=None
    )
    assert output.shape == (1, 10, 4, 8)
    assert weights is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"plan": None}, "segment_plan"),
        ({"mask": torch.ones(1, 1, 10, 10)}, "mask"),
        ({"softcap": 30.0}, "softcap"),
        ({"s_aux": torch.zeros(4)}, "s_aux"),
        ({"is_causal": False}, "not causal"),
        ({"sliding_window": 5}, "sliding window of 5"),
        ({"num_tokens": 11}, "10 tokens"),
    ],
)
def test_layers_that_ask_for_something_else_are_refused(arguments, words):
    with pytest.raises(UnsupportedError, match=words):
        call_layer(**({"plan": SegmentPlan.build((4, 6))} | arguments))


def test_a_model_gives_each_segment_what_it_gives_it_alone():
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    config._attn_implementation = register_segment_attention()
    model = LlamaModel(config).double().eval()
    assert config._attn_implementation not in ALL_MASK_ATTENTION_FUNCTIONS
    lengths = (3, 9, 3, 1)
    tokens = torch.randint(32, (16,))
    positions = torch.cat([torch.arange(length) for length in lengths])
    packed = model(tokens[None], position_ids=positions[None], use_cache=False, segment_plan=SegmentPlan.build(lengths))
    config._attn_implementation = "sdpa"
    start = 0
    for length in lengths:
        alone = model(tokens[None, start : start + length], use_cache=False).last_hidden_state
        # transformers computes norms and rotations in float32, whatever the model's dtype is
        torch.testing.assert_close(packed.last_hidden_state[:, start : start + length], alone, rtol=0, atol=1e-6)
        start += length


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(),
        Qwen2Config(sliding_window=16),
        Qwen3Config(),
        MistralConfig(sliding_window=None),
        MistralConfig(sliding_window=4096, max_position_embeddings=4096),
        GraniteConfig(logits_scaling=1.0),
    ],
    ids=lambda config: config.model_type,
)
def test_models_of_full_attention_are_supported(config):
    check_model_is_supported(config)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (MistralConfig(sliding_window=4096, max_position_embeddings=32768), "sliding window of 4096"),
        (Qwen3Config(use_sliding_window=True, sliding_window=64, max_window_layers=1), "sliding window of 64"),
        (Gemma2Config(sliding_window=8192, max_position_embeddings=8192), "final_logit_softcapping"),
        (GptOssConfig(), "sliding window"),
        (GraniteConfig(logits_scaling=8.0), "logits_scaling=8.0"),
        (CohereConfig(), "logit_scale"),
        (MambaConfig(), "linear_attention"),
        (JambaConfig(), "linear_attention"),
        (T5Config(), "encoder-decoder"),
        (SimpleNamespace(model_type="hybrid", layer_types=["full_attention", "linear_attention"]), "linear_attention"),
        (SimpleNamespace(model_type="recurrent", state_size=16), "state_size"),
        (SimpleNamespace(model_type="capped", attn_logit_softcapping=50.0), "attn_logit_softcapping=50.0"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_models_of_other_kinds_are_refused_with_the_reason(config, words):
    with pytest.raises(UnsupportedError, match=words):
        check_model_is_supported(config)

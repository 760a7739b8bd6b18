"""The TorchTitan worker against the FSDP worker and a plain loop: one rank cannot be told from the other by numbers."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from inflight.errors import CheckpointError, ConfigError, PrecisionWarning, TrainerError, UnsupportedError
from inflight.weights.encode.buckets import plan_buckets
from inflight_fsdp import FSDP, TORCHTITAN
from inflight_fsdp.config import parse_config
from inflight_fsdp.torchtitan_config import TorchTitanConfig
from tests.models import make_model
from tests.worker.ranks import run_ranks
from tests.worker.worker_cases import accumulate, assert_close, forget_checksums, make_batch, settings

LENGTHS = (9, 4, 17, 1, 6, 40)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def write_model(path: Path, family: str = "qwen3", *, tied: bool = False) -> Path:
    return make_model(path, family, tied=tied, tokenizer=False)


def options(path: Path, **others: object) -> dict[str, object]:
    return {**settings(path), "dtype": "float32", "wire_dtype": "float32", "betas": (0.8, 0.95), **others}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "qwen3")


@pytest.fixture
def make_pair():
    """Make a TorchTitan worker and an FSDP worker alike; both are closed at the end."""
    made = []

    def make(path: Path, **others: object):
        pair = TORCHTITAN.create(options(path, **others)), FSDP.create(options(path, **others))
        made.extend(pair)
        return pair

    yield make
    for worker in reversed(made):
        worker.close()
    assert [worker for worker in made if worker._owns_group] == []
    if made:
        assert not dist.is_initialized()


def weights_of(worker):
    specs = worker.parameter_specs()
    tensors = [t for bucket in worker.gather_weights(plan_buckets(specs, 4096)) for t in bucket.tensors]
    return {spec.name: tensor for spec, tensor in zip(specs, tensors, strict=True)}


def train(worker, seed):
    accumulate(worker, [make_batch(LENGTHS, seed=seed), make_batch((5, 20), seed=seed + 100)])
    return worker.step()


def with_llama3_rope(path: Path) -> Path:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"rope_parameters": LLAMA3_ROPE}))
    return path


@pytest.mark.parametrize(
    "kind", ["qwen3", "qwen3 tied", "llama", "llama tied", "llama with scaled positions", "qwen3_moe"]
)
def test_logprobs_steps_and_weights_equal_those_of_the_fsdp_worker(tmp_path, make_pair, kind):
    path = write_model(tmp_path / "model", kind.split()[0], tied="tied" in kind)
    if "scaled" in kind:
        with_llama3_rope(path)
    ours, fsdp = make_pair(path, max_gradient_norm=0.5, weight_decay=0.1, warmup_steps=2)
    batch = make_batch((150, 30, 9), seed=1)
    torch.testing.assert_close(ours.forward(batch), fsdp.forward(batch), rtol=0, atol=2e-4)  # float32, logits near 10
    assert {s.name: s.shape for s in ours.parameter_specs()} == {s.name: s.shape for s in fsdp.parameter_specs()}
    start = weights_of(ours)
    assert all(torch.equal(tensor, start[name]) for name, tensor in weights_of(fsdp).items())
    for seed in range(3):
        found, expected = train(ours, seed), train(fsdp, seed)
        assert (found.version, found.learning_rate) == (expected.version, expected.learning_rate)
        assert found.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-4)
    # Adam divides by small second moments: rounding grows to a part of a step of 0.01.
    assert_close(weights_of(ours), weights_of(fsdp), 1e-3)


def test_each_resumes_what_the_other_saved(tmp_path, make_pair):
    # Llama's queries and keys are stored in another order than they are computed; experts are stored one by one.
    for family in ("qwen3", "llama", "qwen3_moe"):
        ours, fsdp = make_pair(write_model(tmp_path / family, family))
        for name, saver, loader in (("ours", ours, fsdp), ("fsdp", fsdp, ours)):
            train(saver, 5)
            saver.save(tmp_path / f"{family}-{name}")
            train(loader, 6)
            loader.load(tmp_path / f"{family}-{name}")
            assert loader.version == saver.version
            loader.save(tmp_path / f"{family}-{name}-again")
            for file in ("model.safetensors", "trainer/optimizer.safetensors"):
                saved, again = (load_file(tmp_path / f"{family}-{name}{end}" / file) for end in ("", "-again"))
                assert saved.keys() == again.keys()
                assert all(torch.equal(tensor, again[key]) for key, tensor in saved.items())
            for worker in (saver, loader):
                train(worker, 7)
            assert_close(weights_of(loader), weights_of(saver), 1e-3)


def test_twenty_steps_give_the_loss_curve_of_a_plain_loop(make_pair, model_path):
    """float32 in all three; what differs is the order of sums, and 20 steps of Adam let it grow."""
    ours, fsdp = make_pair(model_path, learning_rate=3e-3, max_gradient_norm=1.0)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.8, 0.95), weight_decay=0.0)
    curves: dict[str, list[float]] = {"torchtitan": [], "fsdp": [], "plain": []}
    for step in range(20):
        batch = make_batch((12, 30, 7), seed=step % 4)
        for name, worker in (("torchtitan", ours), ("fsdp", fsdp)):
            loss = nll(worker.forward(batch), batch)
            worker.backward(loss)
            worker.step()
            curves[name].append(float(loss.detach()))
        loss = nll(plain_logprobs(model, batch), batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad()
        curves["plain"].append(float(loss.detach()))
    plain = torch.tensor(curves["plain"])
    assert float(plain[-4:].mean()) < float(plain[:4].mean()) - 1.0, "the loss did not fall: nothing was compared"
    for name in ("torchtitan", "fsdp"):
        difference = (torch.tensor(curves[name]) - plain).abs() / plain
        assert float(difference.max()) < 1e-4, (name, difference)  # 1e-6 was seen


def nll(logprobs_T, batch):
    return -logprobs_T.sum() / batch.loss_mask_T.sum()


def plain_logprobs(model, batch):
    logprobs, start = [], 0
    for length in batch.segment_lengths:
        rows = slice(start, start + length)
        logits = (
            model(batch.token_ids_T[None, rows], use_cache=False).logits[0]
            / batch.temperature_T[rows].roll(-1)[:, None]
        )
        found = torch.log_softmax(logits[:-1], 1).gather(1, batch.token_ids_T[rows][1:, None]).squeeze(1)
        logprobs += [torch.zeros(1), found]
        start += length
    return torch.where(batch.loss_mask_T, torch.cat(logprobs), 0.0)


def test_two_copies_step_as_one_rank_does(tmp_path, make_pair, model_path):
    """Ranks that hold a copy each: TorchTitan's hybrid sharding with one shard."""
    (tmp_path / "model").symlink_to(model_path)
    run_ranks(tmp_path, "titan_program")
    ours, _ = make_pair(model_path)
    expected = [train(ours, seed) for seed in range(2)]
    for rank in range(2):
        seen = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert seen["norms"] == pytest.approx([step.gradient_norm for step in expected], rel=1e-4)
        assert "shard_size 3 does not divide the 2 ranks" in seen["refused"]
    assert_close(load_file(tmp_path / "saved" / "model.safetensors"), weights_of(ours), 1e-3)


@pytest.mark.parametrize(
    "change", [{"activation_checkpointing": True}, {"optimizer_implementation": "foreach"}, {"cpu_offload": True}]
)
def test_ways_to_compute_the_same(make_pair, model_path, change):
    ours, _ = make_pair(model_path)
    other = TORCHTITAN.create(options(model_path, **change))
    for seed in range(2):
        assert train(other, seed).gradient_norm == pytest.approx(train(ours, seed).gradient_norm, rel=1e-5)
    assert_close(weights_of(other), weights_of(ours), 1e-3)


def test_bfloat16_is_computed_under_float32_weights(make_pair, model_path):
    ours, _ = make_pair(model_path)
    mixed = TORCHTITAN.create(options(model_path, dtype="bfloat16", wire_dtype=None))
    batch = make_batch(LENGTHS, seed=3)
    logprobs, exact = mixed.forward(batch).detach(), ours.forward(batch).detach()
    assert logprobs.dtype == torch.float32
    assert 0.0 < float((logprobs - exact).abs().max()) < 1.0  # 8 bits of logits that reach 10
    assert {part.local.dtype for part in mixed._parameters.parts.values()} == {torch.float32}
    assert {tensor.dtype for states in mixed._optimizer.states.values() for tensor in states.values()} == {
        torch.float32
    }
    assert {tensor.dtype for tensor in weights_of(mixed).values()} == {torch.bfloat16}
    assert train(mixed, 1).gradient_norm == pytest.approx(train(ours, 1).gradient_norm, rel=0.1)


@pytest.mark.filterwarnings("ignore:master_dtype:inflight.errors.PrecisionWarning")
def test_updates_of_a_small_learning_rate_are_kept_unless_masters_are_bfloat16(tmp_path, model_path):
    def share_changed(**masters):
        worker = TORCHTITAN.create(
            options(model_path, dtype="bfloat16", learning_rate=1e-6, betas=(0.9, 0.999), **masters)
        )
        worker.save(tmp_path / "before")
        before = load_file(tmp_path / "before" / "model.safetensors")
        lost = [train(worker, seed).rounded_away for seed in range(20)]
        worker.save(tmp_path / "after")
        worker.close()
        after = load_file(tmp_path / "after" / "model.safetensors")
        changed = sum(int((after[name] != before[name]).sum()) for name in before)
        return changed / sum(tensor.numel() for tensor in before.values()), lost

    changed, lost = share_changed()
    assert changed > 0.99
    assert lost == [None] * 20
    with pytest.warns(PrecisionWarning, match=r"% of the updates of 3 steps were rounded away"):
        changed, lost = share_changed(master_dtype="bfloat16")
    assert changed < 0.05
    assert min(lost) > 0.95


def test_a_checkpoint_is_a_hugging_face_model(tmp_path, make_pair):
    path = write_model(tmp_path / "model", "llama", tied=True)
    ours, _ = make_pair(path)
    train(ours, 1)
    ours.save(tmp_path / "saved")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    batch = make_batch((30, 12), seed=2)
    with torch.no_grad():
        torch.testing.assert_close(ours.forward(batch), plain_logprobs(model, batch), rtol=0, atol=2e-4)


# ------------------------------------------------------------------------------------------- the registry of TorchTitan


def test_real_models_are_translated_as_torchtitan_has_them():
    """Qwen3-0.6B and Llama-3-8B from their config.json, against TorchTitan's own configurations of them."""
    from torchtitan.models.llama3 import llama3_configs
    from torchtitan.models.qwen3 import qwen3_configs

    from inflight_fsdp.torchtitan_model import model_config_of

    qwen = Qwen3Config(
        **{"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
        **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True},
        **{"max_position_embeddings": 40960, "rms_norm_eps": 1e-6},
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    )
    llama = LlamaConfig(
        **{"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False},
        **{"max_position_embeddings": 131072, "rms_norm_eps": 1e-5},
        rope_parameters={**LLAMA3_ROPE, "original_max_position_embeddings": 8192},
    )
    config = TorchTitanConfig(model_path=Path("unused"))
    for hf, registered in ((qwen, qwen3_configs["0.6B"]), (llama, llama3_configs["8B"])):
        ours = model_config_of(hf, config)
        theirs = registered(attn_backend="flex") if callable(registered) else registered
        assert facts_of(ours) == facts_of(theirs)


def facts_of(model):
    layer = model.layers[0]
    rope = dataclasses.asdict(layer.attention.rope) | {"param_init": None, "sharding_config": None}
    return {
        "kind": type(model),
        "sizes": (model.dim, model.vocab_size, len(model.layers), model.enable_weight_tying),
        "heads": (layer.attention.n_heads, layer.attention.n_kv_heads, layer.attention.head_dim or 128),
        "hidden": layer.feed_forward.w1.out_features,
        "norms": [getattr(norm, "eps", None) or 1e-5 for norm in (model.norm, layer.ffn_norm, layer.attention_norm)],
        "has qk norm": layer.attention.qk_norm is not None,
        "rope": rope,
    }


# ------------------------------------------------------------------------------------------------------------ bad input


def test_what_torchtitan_does_not_have_is_refused_by_name(tmp_path, model_path):
    qwen2 = write_model(tmp_path / "qwen2", "qwen2")
    with pytest.raises(UnsupportedError, match=r"type 'qwen2' are not supported; supported: qwen3, qwen3_moe, llama"):
        TORCHTITAN.create(options(qwen2))
    with pytest.raises(ConfigError, match=r"float64.*float32 or bfloat16"):
        TORCHTITAN.create(options(model_path, dtype="float64"))
    with pytest.raises(ConfigError, match="TorchTitan sums gradients in float32"):
        TORCHTITAN.create({"model_path": str(model_path), "reduce_dtype": "bfloat16"})
    with pytest.raises(ConfigError, match="float8 is supported only by the worker 'fsdp'"):
        TORCHTITAN.create({"model_path": str(model_path), "float8": True})
    with pytest.raises(ConfigError, match="the TorchTitan worker trains every parameter"):
        TORCHTITAN.create(options(model_path, frozen=["*.k_proj.*"]))
    with pytest.raises(ConfigError, match="TorchTitan worker: unknown key 'learning_rat'; did you mean learning_rate"):
        TORCHTITAN.create(options(model_path, learning_rat=1.0))
    for change, words in (
        ({"attention_bias": True}, "has no biases"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "rope_type 'yarn'"),
    ):
        path = write_model(tmp_path / words, "qwen3")
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(UnsupportedError, match=words):
            TORCHTITAN.create(options(path))
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.norm.weight"), r"missing tensors: 'model.norm.weight'"),
        (lambda t: t.update(more=torch.zeros(2)), r"unknown tensors: 'more'"),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.weight": torch.zeros(3, 3)}),
            r"q_proj.weight in model.safetensors has shape \(3, 3\), expected \(32, 32\)",
        ),
    ],
    ids=["missing", "extra", "misshapen"],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, change, words):
    path = write_model(tmp_path / "model", "llama")
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=words):
        TORCHTITAN.create(options(path))


def test_a_segment_longer_than_the_context_is_refused(make_pair, model_path):
    batch = make_batch((10, 1025), seed=1)
    for worker in make_pair(model_path):
        with pytest.raises(TrainerError, match=r"segment 1 .* has 1025 tokens, but the model's context is 1024"):
            worker.forward(batch)


def test_a_broken_checkpoint_changes_nothing(tmp_path, make_pair, model_path):
    ours, _ = make_pair(model_path)
    train(ours, 1)
    ours.save(tmp_path / "saved")
    train(ours, 2)
    before = weights_of(ours)
    tensors = load_file(tmp_path / "saved" / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "saved" / "model.safetensors", metadata={"format": "pt"})
    forget_checksums(tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        ours.load(tmp_path / "saved")
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(ours).items())


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"tensor_parallel": 3}, "tensor_parallel 3 does not divide the model's 2 key-value heads"),
        ({"context_parallel": 3}, "context_parallel 3 does not divide the model's 4 attention heads"),
        ({"tensor_parallel": 2, "context_parallel": 4}, "context_parallel 4 does not divide the model's 2 attention"),
        ({"expert_parallel": 2}, "expert_parallel 2 does not divide the model's 0 experts"),
        ({"pipeline_parallel": 3}, "pipeline_parallel 3: the model has only 2 layers"),
        ({"expert_parallel": 2, "tensor_parallel": 2}, "tensor_parallel and expert_parallel cannot be combined yet"),
        ({"compile": True, "tensor_parallel": 2}, "compile cannot be combined with tensor_parallel"),
    ],
)
def test_ranks_that_cannot_share_a_model_are_refused_with_the_reason(model_path, layout, words):
    from inflight_fsdp.torchtitan_model import supported_config

    with pytest.raises(ConfigError, match=words):
        supported_config(parse_config({"model_path": model_path, **layout}, TorchTitanConfig))


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (
            {"tensor_parallel": 4, "pipeline_parallel": 3},
            "tensor_parallel 4 x pipeline_parallel 3 does not divide",
        ),
        ({"tensor_parallel": 2, "shard_size": 3}, "shard_size 3 does not divide the 4 ranks"),
        ({"expert_parallel": 8, "shard_size": 4}, "expert_parallel 8 does not divide the 4 ranks that share one copy"),
    ],
)
def test_numbers_of_ranks_that_a_layout_does_not_divide_are_refused(layout, words):
    with pytest.raises(ConfigError, match=words):
        parse_config({"model_path": "model", **layout}, TorchTitanConfig).rank_layout(8)

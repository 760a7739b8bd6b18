"""Updates that leave tensors out, and updates that are LoRAs, on the embedded engine and in its messages."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from inflight import LoraWeights, ModuleWeights
from inflight.contracts import LoraSource
from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.engines.embedded.engine import Engine
from inflight.engines.embedded.slot_attention import ATTENTION_NAME, register_slot_attention
from inflight.errors import ConfigError, PublishError, UnsupportedError, UpdateRefusedError
from inflight.model.checkpoints import load_causal_lm
from inflight.types import EndpointOutcome, PublishReport
from inflight.weights.encode.buckets import manifest_difference, plan_buckets
from inflight.weights.encode.lora_tensors import changed_names, lora_difference
from inflight.weights.receive.base_weights import AdaptedWeights, merge_lora
from inflight.weights.receive.states import UpdateStateMachine
from inflight.weights.send.publisher import WeightPublisher, publish_weights
from inflight.weights.transports.process_group import ProcessGroupSender
from inflight.wire import BucketTransfer, EndpointState, LoraSpec, Manifest
from tests.weights.lora import adapted, lora_of, merged_with
from tests.weights.workers import (
    LORA,
    LoraWorker,
    PartialWorker,
    PlainWorker,
    announcement_of,
    checkpoint,
    request,
    scaled,
    spec_of,
)

SPEC = LORA
RSLORA = LoraSpec(rank=4, alpha=2.0, rslora=True)
TOLERANCE = 1e-4
"""Of logprobs in float32 with logits of some tens: the engine attends in another order than transformers."""


class OneServer:
    """One embedded engine and a connected publisher; ``model`` is the one that it serves."""

    def __init__(self, path: Path, **options: Any) -> None:
        register_slot_attention()
        self.path = path
        self.tensors = checkpoint(path)
        self.model: Any = load_causal_lm(path, attention=ATTENTION_NAME)
        engine = Engine(self.model, max_model_len=1024, max_concurrent=8)
        self.endpoint = EmbeddedEndpoint(engine, self.model, name="local")
        self.publisher = WeightPublisher([self.endpoint], ProcessGroupSender(), run_id="here", **options)

    def publish(self, worker: Any, **options: Any) -> PublishReport:
        report = publish_weights(worker, self.publisher, **{"deadline_s": 20.0, "bucket_bytes": 10_000, **options})
        assert report is not None
        return report

    def state(self) -> EndpointState:
        return self.publisher.run(self.endpoint.weight_version).state

    def assert_serves(self, tensors: Mapping[str, torch.Tensor], tolerance: float = TOLERANCE) -> None:
        """Compare the logprobs of sampled tokens with those of transformers under these weights."""
        asked = request(max_tokens=12)
        completion = self.publisher.run(self.endpoint.generate, asked).completions[0]
        plain = load_causal_lm(self.path, attention="eager")
        plain.load_state_dict(dict(tensors))
        tokens = torch.tensor([[*asked.prompt_token_ids, *completion.token_ids]])
        with torch.no_grad():
            logits_TV = plain(tokens).logits[0, len(asked.prompt_token_ids) - 1 : -1]
        rows = torch.arange(len(completion.token_ids))
        expected = torch.log_softmax(logits_TV, -1)[rows, list(completion.token_ids)]
        assert completion.logprobs == pytest.approx(expected.tolist(), abs=tolerance)


@pytest.fixture
def fleet(model_dir: Path) -> Iterator[OneServer]:
    made = OneServer(model_dir)
    with made.publisher:
        yield made


@contextlib.contextmanager
def failing_loads(fleet: OneServer) -> Iterator[None]:
    """Every load fails after its first tensor is in the model."""
    engine: Any = fleet.endpoint._engine
    load = engine.load

    def failing(ready: Any, *others: Any) -> None:
        load(ready._replace(tensors=ready.tensors[:1]), *others)
        raise RuntimeError("out of memory")

    engine.load = failing
    yield
    engine.load = load


def part(tensors: Mapping[str, torch.Tensor], word: str, factor: float = 0.7) -> dict[str, torch.Tensor]:
    return scaled({name: tensor for name, tensor in tensors.items() if word in name}, factor)


def size_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def test_a_partial_update_serves_exactly_the_mixture_and_sends_no_more(fleet: OneServer) -> None:
    whole = fleet.tensors
    for version, word in enumerate(("q_proj", "layers.1", "norm"), 1):
        sent = part(whole, word)
        report = fleet.publish(PartialWorker(sent, version, fleet.tensors))
        assert report.sent_bytes == size_bytes(sent) < size_bytes(whole)
        whole = {**whole, **sent}
        fleet.assert_serves(whole)


def test_frozen_parameters_of_a_module_are_left_out_of_its_publish(fleet: OneServer) -> None:
    model = load_causal_lm(fleet.path, attention="eager")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1.mlp" in name)
        parameter.data *= 0.5 if parameter.requires_grad else 1.0
    report = fleet.publish(ModuleWeights(model, version=1, skip_frozen=True))
    sent = part(fleet.tensors, "layers.1.mlp", 0.5)
    assert report.sent_bytes == size_bytes(sent)
    fleet.assert_serves({**fleet.tensors, **sent})


def test_names_that_nobody_knows_are_refused_whether_sent_or_left_out(fleet: OneServer) -> None:
    extra = {"model.extra.weight": torch.ones(3)}
    for sent, known in ((extra, fleet.tensors), (part(fleet.tensors, "q_proj"), {**fleet.tensors, **extra})):
        with pytest.raises(PublishError, match=r"unknown to this endpoint: 'model\.extra\.weight'") as raised:
            fleet.publish(PartialWorker(sent, 1, known))
        assert raised.value.report.endpoints[0].outcome is EndpointOutcome.REFUSED
    fleet.assert_serves(fleet.tensors)


def test_torn_weights_take_a_partial_update_only_if_it_brings_all_that_is_torn(fleet: OneServer) -> None:
    with failing_loads(fleet), pytest.raises(PublishError, match="applying version 1 failed"):
        fleet.publish(PartialWorker(part(fleet.tensors, "norm"), 1, fleet.tensors))
    assert fleet.state() is EndpointState.POISONED
    with pytest.raises(PublishError, match="weights are torn, and the update omits tensors"):
        fleet.publish(PartialWorker(part(fleet.tensors, "q_proj"), 2, fleet.tensors))
    with pytest.raises(PublishError, match="weights are torn, and a LoRA needs intact weights"):
        fleet.publish(LoraWorker(lora_of(fleet.tensors, ["q_proj"], 4, seed=0), 2))
    sent = part(fleet.tensors, "norm") | part(fleet.tensors, "v_proj")
    fleet.publish(PartialWorker(sent, 3, fleet.tensors))
    fleet.assert_serves({**fleet.tensors, **sent})


# ---------------------------------------------------------------------------------------------------------------
# LoRAs


@pytest.mark.parametrize("spec", [SPEC, RSLORA], ids=["lora", "rslora"])
def test_a_lora_is_served_merged_replaced_by_the_next_and_taken_out_by_an_update(
    fleet: OneServer, spec: LoraSpec
) -> None:
    first = lora_of(fleet.tensors, ["q_proj", "down_proj"], 4, seed=1)
    second = lora_of(fleet.tensors, ["q_proj", "up_proj"], 4, seed=2)
    report = fleet.publish(LoraWorker(first, 1, spec))
    assert report.sent_bytes == size_bytes(first) < size_bytes(fleet.tensors) / 3
    fleet.assert_serves(merged_with(fleet.tensors, first, spec))
    fleet.publish(LoraWorker(second, 2, spec))
    fleet.assert_serves(merged_with(fleet.tensors, second, spec))
    third = scaled(second, 0.5)
    fleet.publish(LoraWorker(third, 3, spec))
    fleet.assert_serves(merged_with(fleet.tensors, third, spec))
    new = scaled(fleet.tensors, 0.9)
    fleet.publish(PlainWorker(new, 4))
    fleet.assert_serves(new)
    fleet.publish(LoraWorker(first, 5, spec))
    fleet.assert_serves(merged_with(new, first, spec))
    sent = part(fleet.tensors, "k_proj")
    fleet.publish(PartialWorker(sent, 6, fleet.tensors))
    fleet.assert_serves({**new, **sent})


def test_an_aborted_lora_leaves_the_one_before_serving_and_is_no_base_of_the_next(fleet: OneServer) -> None:
    first, second = (lora_of(fleet.tensors, ["q_proj", "o_proj"], 4, seed=seed) for seed in (1, 2))
    fleet.publish(LoraWorker(first, 1))

    class Failing(LoraWorker):
        def _tell(self, index: int) -> None:
            if index == 1:
                raise RuntimeError("the trainer fails")

    with pytest.raises(RuntimeError):
        fleet.publish(Failing(second, 2), bucket_bytes=1000)
    fleet.assert_serves(merged_with(fleet.tensors, first, SPEC))
    fleet.publish(LoraWorker(second, 3))
    fleet.assert_serves(merged_with(fleet.tensors, second, SPEC))


@pytest.mark.parametrize("options", [{"encoding": "bfloat16"}, {"encoding": "float8"}, {"delta": True}], ids=str)
def test_loras_travel_in_every_encoding(model_dir: Path, options: dict[str, Any]) -> None:
    fleet = OneServer(model_dir, **options)
    with fleet.publisher:
        first = lora_of(fleet.tensors, ["q_proj"], 4, seed=1, size=0.1)
        second = {name: tensor.clone() for name, tensor in first.items()}
        next(iter(second.values()))[0, 0] += 0.25
        sent = [fleet.publish(LoraWorker(t, v)).sent_bytes for v, t in ((1, first), (2, second))]
        assert min(sent) < size_bytes(first)
        # Rounded to 8 or to 4 bits; a delta is exact.
        fleet.assert_serves(merged_with(fleet.tensors, second, SPEC), TOLERANCE if "delta" in options else 1.0)


def test_a_torn_lora_poisons_until_its_weights_are_brought(fleet: OneServer) -> None:
    lora = lora_of(fleet.tensors, ["q_proj"], 4, seed=1)
    fleet.publish(LoraWorker(lora, 1))
    with failing_loads(fleet), pytest.raises(PublishError, match="applying version 2 failed"):
        fleet.publish(LoraWorker(scaled(lora, 0.5), 2))
    with pytest.raises(PublishError, match="a LoRA needs intact weights"):
        fleet.publish(LoraWorker(lora, 3))
    sent = part(fleet.tensors, "q_proj")
    fleet.publish(PartialWorker(sent, 4, fleet.tensors))
    fleet.assert_serves({**fleet.tensors, **sent})
    fleet.publish(LoraWorker(lora, 5))
    fleet.assert_serves(merged_with({**fleet.tensors, **sent}, lora, SPEC))


def test_loras_that_do_not_fit_are_refused_by_name(fleet: OneServer) -> None:
    good = lora_of(fleet.tensors, ["q_proj"], 4, seed=1)
    a, b = list(good)[:2]
    assert a.endswith("lora_A.weight")
    for change, says in (
        ({a: good[a][:, :-1]}, "products do not have the shapes of their weights: model.layers.0.self_attn.q_proj is"),
        ({b: torch.cat([good[b], good[b]])}, "products do not have the shapes of their weights"),
        ({a: good[a][:-1]}, "pairs do not have rank 4"),
        ({a: None}, "do not form pairs of"),
        ({"model.norm.weight": torch.ones(32)}, r"do not form pairs of .*model\.norm\.weight"),
        (
            lora_of({"model.nowhere.weight": torch.ones(3, 3)}, ["nowhere"], 4, 0),
            r"unknown to this endpoint: 'model\.nowhere'",
        ),
    ):
        tensors = {name: tensor for name, tensor in {**good, **change}.items() if tensor is not None}
        with pytest.raises(PublishError, match=says) as raised:
            fleet.publish(LoraWorker(tensors, 1))
        assert raised.value.report.endpoints[0].outcome is EndpointOutcome.REFUSED, says
    fleet.assert_serves(fleet.tensors)


def test_an_endpoint_that_declares_no_loras_is_not_asked(fleet: OneServer) -> None:
    less = {e: can.model_copy(update={"lora": False}) for e, can in fleet.publisher.endpoints.items()}
    with pytest.raises(UnsupportedError, match="local does not support lora"):
        fleet.publish(LoraWorker(lora_of(fleet.tensors, ["q_proj"], 4, seed=1), 1), endpoints=less)


def test_an_endpoint_without_loras_refuses_one_that_comes_all_the_same(fleet: OneServer) -> None:
    lora = lora_of(fleet.tensors, ["q_proj"], 4, seed=1)
    manifest = Manifest(tensors=tuple(spec_of(n, t) for n, t in lora.items()), lora=SPEC)
    update = announcement_of(PlainWorker(lora), "here", manifest=manifest)
    updates = fleet.endpoint._updates
    updates._capabilities = updates._capabilities.model_copy(update={"lora": False})
    with pytest.raises(UnsupportedError, match="this endpoint does not support lora"):
        fleet.publisher.run(fleet.endpoint.request_weight_update, update)


# ---------------------------------------------------------------------------------------------------------------
# The source


def test_the_lora_of_a_module_is_what_the_module_computes_with(fleet: OneServer) -> None:
    model = adapted(load_causal_lm(fleet.path, attention="eager"), ["q_proj", "gate_proj"], RSLORA, seed=3)
    weights = LoraWeights(model, alpha=2.0, rslora=True, version=1)
    assert isinstance(weights, LoraSource)
    assert weights.lora_spec() == RSLORA
    fleet.publish(weights)
    asked = request(max_tokens=12)
    completion = fleet.publisher.run(fleet.endpoint.generate, asked).completions[0]
    tokens = torch.tensor([[*asked.prompt_token_ids, *completion.token_ids]])
    with torch.no_grad():
        logits_TV = model(tokens).logits[0, len(asked.prompt_token_ids) - 1 : -1]
    expected = torch.log_softmax(logits_TV, -1)[torch.arange(12), list(completion.token_ids)]
    assert completion.logprobs == pytest.approx(expected.tolist(), abs=TOLERANCE)


class PeftLike(torch.nn.Module):
    """The two wrappers and the config that PEFT puts around a model."""

    def __init__(self, model: torch.nn.Module, **config: Any) -> None:
        super().__init__()
        self.base_model = torch.nn.Module()
        self.base_model.model = model
        self.peft_config = {"default": type("LoraConfig", (), {"lora_alpha": 2, "use_rslora": False, **config})()}


def test_names_and_scale_are_those_of_peft(model_dir: Path) -> None:
    model = PeftLike(adapted(load_causal_lm(model_dir, attention="eager"), ["layers.0.self_attn.v_proj"], SPEC, seed=3))
    weights = LoraWeights(model, wire_dtype="bfloat16")
    prefix = "base_model.model.model.layers.0.self_attn.v_proj"
    found = [(spec.name, spec.dtype, spec.shape) for spec in weights.parameter_specs()]
    out, into = checkpoint(model_dir)["model.layers.0.self_attn.v_proj.weight"].shape
    a, b = (f"{prefix}.lora_A.weight", "bfloat16", (4, into)), (f"{prefix}.lora_B.weight", "bfloat16", (out, 4))
    assert found == [a, b]
    assert weights.lora_spec() == SPEC


def test_loras_that_are_no_sum_of_weights_are_refused(model_dir: Path) -> None:
    def model() -> Any:
        return adapted(load_causal_lm(model_dir, attention="eager"), ["v_proj"], SPEC, seed=3)

    with pytest.raises(ConfigError, match="alpha is unknown"):
        LoraWeights(model())
    with pytest.raises(ConfigError, match="no layer with lora_A"):
        LoraWeights(load_causal_lm(model_dir, attention="eager"), alpha=2.0)
    with pytest.raises(UnsupportedError, match=r"v_proj is scaled by 0\.5, but the LoRA as a whole by 0\.75"):
        LoraWeights(model(), alpha=3.0)
    trained = model()
    trained.lm_head.weight.requires_grad_(True)
    with pytest.raises(UnsupportedError, match=r"other parameters are trainable.*lm_head"):
        LoraWeights(trained, alpha=2.0)
    dora = model()
    dora.model.layers[0].self_attn.v_proj.lora_magnitude_vector = torch.nn.ModuleDict({"default": torch.nn.Identity()})
    with pytest.raises(UnsupportedError, match="DoRA"):
        LoraWeights(dora, alpha=2.0)
    biased = model()
    biased.model.layers[0].self_attn.v_proj.lora_B["default"].bias = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(UnsupportedError, match="has a bias"):
        LoraWeights(biased, alpha=2.0)
    mixed = model()
    layer = mixed.model.layers[0].self_attn.v_proj
    layer.lora_A["default"], layer.lora_B["default"] = (
        torch.nn.Linear(32, 2, bias=False),
        torch.nn.Linear(2, 16, bias=False),
    )
    with pytest.raises(UnsupportedError, match=r"different ranks \[2, 4\]"):
        LoraWeights(mixed, alpha=2.0)


# ---------------------------------------------------------------------------------------------------------------
# Messages and merging


def test_a_lora_freezes_nothing_and_its_scale_is_one_of_two_rules() -> None:
    tensors = tuple(spec_of(n, t) for n, t in lora_of({"m.weight": torch.ones(3, 5)}, ["m"], 4, 0).items())
    with pytest.raises(ValidationError, match="frozen must be empty"):
        Manifest(tensors=tensors, lora=SPEC, frozen=("other",))
    assert changed_names(Manifest(tensors=tensors, lora=SPEC)) == ["m.weight"]
    assert (SPEC.scale, RSLORA.scale) == (0.5, 1.0)
    assert lora_difference(None, Manifest(tensors=tensors, lora=SPEC)) is None
    base = spec_of("m.weight", torch.ones(3, 5))
    assert manifest_difference([base], Manifest(tensors=tensors, lora=SPEC)) is None


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-15), ("float32", 1e-6), ("bfloat16", 2**-8)])
def test_merging_rounds_once(dtype: str, tolerance: float) -> None:
    """Relative to the largest element: one rounding of the dtype, after a sum in float32 at least."""
    random = torch.Generator().manual_seed(0)
    base = torch.randn(7, 5, generator=random, dtype=torch.float64).to(getattr(torch, dtype))
    a, b = torch.randn(4, 5, generator=random), torch.randn(7, 4, generator=random)
    found = merge_lora(base, a, b, SPEC)
    expected = base.double() + 0.5 * torch.tensor(
        [[math.fsum(float(b[o, r]) * float(a[r, i]) for r in range(4)) for i in range(5)] for o in range(7)],
        dtype=torch.float64,
    )
    assert found.dtype == base.dtype
    assert float((found.double() - expected).abs().max() / expected.abs().max()) < tolerance


def test_a_prepared_update_changes_nothing_until_it_is_loaded() -> None:
    model = {"m.weight": torch.ones(3, 5), "n.weight": torch.ones(3, 5)}
    state = AdaptedWeights()

    def prepare(words: Sequence[str]) -> Any:
        lora = lora_of(model, words, 4, 0)
        manifest = Manifest(tensors=tuple(spec_of(n, t) for n, t in lora.items()), lora=SPEC)
        return state.prepare(manifest, list(lora.items()), lambda name: model[name])

    first = prepare(["m"])
    assert list(state.names) == []
    state.note_loaded(first)
    assert [name for name, _ in prepare(["n"]).tensors] == ["n.weight", "m.weight"]
    assert list(state.names) == ["m.weight"]


def test_what_a_lora_tore_is_named_by_the_weights_that_it_changes() -> None:
    model = [spec_of(name, torch.ones(3, 3)) for name in ("m.weight", "n.weight")]
    session = UpdateStateMachine(model)
    session.note_joined()
    session.note_group_formed("run")
    lora = lora_of({"m.weight": torch.ones(3, 3)}, ["m"], 4, 0)
    manifest = Manifest(tensors=tuple(spec_of(n, t) for n, t in lora.items()), lora=SPEC)
    update = announcement_of(PlainWorker(lora), "run", manifest=manifest)
    session.request(update)
    session.begin_bucket(BucketTransfer(run_id="run", version=1, bucket_index=0, timeout_s=1))
    session.note_bucket_received()
    session.begin_apply(update.ref)
    session.abort()

    def partial(name: str, frozen: str) -> Any:
        specs = tuple(spec for spec in model if spec.name == name)
        whole = Manifest(tensors=specs, frozen=(frozen,))
        return announcement_of(
            PlainWorker({name: torch.ones(3, 3)}), "run", manifest=whole, buckets=plan_buckets(specs)
        )

    with pytest.raises(UpdateRefusedError, match="torn"):
        session.request(partial("n.weight", "m.weight"))
    session.request(partial("m.weight", "n.weight"))

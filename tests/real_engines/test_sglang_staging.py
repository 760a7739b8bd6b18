"""What staged updates of SGLang leave behind: files, whole or torn weights, and a server that others attach to."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from inflight.contracts import InferenceEndpoint
from inflight.errors import PublishError
from inflight.http.kinds import connect_endpoint
from inflight.types import EndpointOutcome
from inflight.weights.encode.buckets import plan_buckets
from inflight.weights.send.publisher import WeightPublisher
from inflight.weights.transports import make_sender
from inflight.wire import (
    BucketTransfer,
    ChatCompletionRequest,
    ChatMessage,
    EndpointState,
    GenerateResponse,
    InFlightPolicy,
    Manifest,
    WeightUpdate,
    WeightVersion,
)
from tests.real_engines.oracle import transformers_logprobs
from tests.real_engines.servers import (
    ROOT,
    RealEngine,
    is_uniform,
    logprobs,
    muted,
    publish,
    publish_worker,
    request,
    run,
    running,
)
from tests.weights.lora import lora_of, merged_with
from tests.weights.workers import LORA, LoraWorker, PartialWorker, PlainWorker, scaled

VOCAB_SIZE = 258
BUCKET_BYTES = 40_000
MEMORY = Path("/dev/shm")


@pytest.fixture(scope="module")
def first_weights(engine_of: Callable[[str], RealEngine]) -> RealEngine:
    engine = engine_of("sglang")
    with publishing(engine, "beginning") as publisher:
        publish(publisher, engine.tensors, 1)  # the modules before have left weights of their own
    return engine


@pytest.fixture
def sglang(first_weights: RealEngine) -> RealEngine:
    """The engine with whole weights, whatever became of the test before."""
    if served(first_weights).state is not EndpointState.READY:
        with publishing(first_weights, "again") as publisher:
            publish(publisher, first_weights.tensors, 1)
    return first_weights


@pytest.fixture(autouse=True)
def nothing_is_left_in_memory() -> Iterator[None]:
    before = checkpoints()
    yield
    assert checkpoints() <= before


def checkpoints() -> set[Path]:
    """Directories of the host's memory that hold updates for SGLang."""
    return {path.parent for path in MEMORY.glob("inflight-weights-*/checkpoint")}


def sampled(engine: RealEngine) -> list[float]:
    return logprobs(run(engine.endpoint(), lambda endpoint: endpoint.generate(request())))


def served(engine: RealEngine) -> WeightVersion:
    return run(engine.endpoint(), lambda endpoint: endpoint.weight_version())


def publishing(engine: RealEngine, run_id: str, **options: Any) -> WeightPublisher:
    return WeightPublisher([engine.endpoint()], make_sender("shm"), run_id=run_id, **options)


def test_a_trainer_that_fails_half_way_leaves_the_old_weights_and_the_requests_that_run(sglang: RealEngine) -> None:
    before = sampled(sglang)

    def fail(index: int) -> None:
        if index == 2:
            time.sleep(0.3)  # the buckets before have arrived
            assert len(checkpoints()) == 1
            raise RuntimeError("the trainer fails")

    async def main() -> GenerateResponse:
        endpoint = sglang.endpoint()
        try:
            await endpoint.capabilities()
            sampling = asyncio.ensure_future(endpoint.generate(request(300)))
            await asyncio.sleep(0.1)
            with pytest.raises(RuntimeError, match="the trainer fails"):
                await asyncio.to_thread(publish_half)
            return await sampling
        finally:
            await endpoint.aclose()

    def publish_half() -> None:
        publish_worker(publisher, PlainWorker(muted(sglang.tensors), 2, fail), bucket_bytes=BUCKET_BYTES)

    with publishing(sglang, "half-way") as publisher:
        publish(publisher, sglang.tensors, 1)
        (completion,) = asyncio.run(main()).completions
        assert completion.finish_reason == "length"
        assert [span.version for span in completion.version_spans] == [1]
        found = served(sglang)
        assert (found.state, found.version) == (EndpointState.READY, 1)
        assert sampled(sglang) == pytest.approx(before, abs=1e-5)
        assert publish(publisher, sglang.tensors, 3).applied_everywhere


def test_an_update_whose_publisher_is_silent_is_ended_by_its_lease(sglang: RealEngine) -> None:
    worker = PlainWorker(muted(sglang.tensors), 1)
    specs = worker.parameter_specs()
    buckets = plan_buckets(specs, BUCKET_BYTES)
    update = WeightUpdate(
        run_id="silent",
        version=1,
        session_id="a",
        manifest=Manifest(tensors=tuple(specs)),
        buckets=tuple(buckets),
        in_flight=InFlightPolicy.KEEP,
        staged=True,
        deadline_s=10.0,
        lease_s=1.0,
    )
    sender = make_sender("shm")
    (spec,) = sender.specs("silent", [1], 10.0)
    sender.begin(update)
    sender.send(next(iter(worker.gather_weights(buckets))), 10.0)

    async def main(endpoint: InferenceEndpoint) -> None:
        await endpoint.init_process_group(spec)
        await endpoint.request_weight_update(update)
        transfer = BucketTransfer(run_id="silent", version=1, session_id="a", bucket_index=0, timeout_s=10.0)
        await endpoint.receive_weights(transfer)
        assert (await endpoint.weight_version()).state is EndpointState.STAGING
        assert len(checkpoints()) == 1
        await asyncio.sleep(2.0)
        assert (await endpoint.weight_version()).state is EndpointState.READY
        assert not checkpoints()
        assert (await endpoint.generate(request())).completions

    try:
        run(sglang.endpoint(), main)
    finally:
        sender.abort()


KILLED = """
import os, signal, sys
from pathlib import Path
from safetensors.torch import load_file
from inflight.weights.send.publisher import WeightPublisher
from tests.real_engines.servers import muted, publish_worker
from tests.weights.lora import lora_of, merged_with
from tests.weights.workers import LORA, LoraWorker, PartialWorker, PlainWorker, scaled

def kill(index):
    if index == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)

with WeightPublisher.connect([sys.argv[1]], run_id="killed", transport="shm") as publisher:
    tensors = muted(load_file(Path(sys.argv[2]) / "model.safetensors"))
    publish_worker(publisher, PlainWorker(tensors, 1, kill), bucket_bytes=int(sys.argv[4]))
"""


@pytest.mark.parametrize("index", [0, 3])
def test_a_publisher_that_is_killed_leaves_the_old_weights_and_its_files_to_the_next_one(
    sglang: RealEngine, index: int
) -> None:
    before = sampled(sglang)
    command = [sys.executable, "-c", KILLED, sglang.url, str(sglang.model), str(index), str(BUCKET_BYTES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    assert served(sglang).state is EndpointState.READY
    assert sampled(sglang) == pytest.approx(before, abs=1e-5)
    with publishing(sglang, "killed") as publisher:
        publish(publisher, muted(sglang.tensors), 1)
        assert all(is_uniform(logprob, VOCAB_SIZE) for logprob in sampled(sglang))
        publish(publisher, sglang.tensors, 2)


def test_fifty_updates_leave_no_directory_and_whoever_attaches_later_finds_the_model(sglang: RealEngine) -> None:
    before = run(sglang.endpoint(), lambda endpoint: endpoint.capabilities())
    most = 0
    with publishing(sglang, "fifty") as publisher:
        for version in range(1, 51):
            publish(publisher, muted(sglang.tensors) if version % 2 else sglang.tensors, version)
            most = max(most, len(checkpoints()))
    assert most <= 2
    assert run(sglang.endpoint(), lambda endpoint: endpoint.capabilities()) == before
    message = ChatMessage(role="user", content="abc")
    asked = ChatCompletionRequest(model=before.model, messages=(message,), max_tokens=4)
    answer = run(sglang.endpoint(), lambda endpoint: endpoint.chat_completion(asked))
    assert len(answer.choices[0].token_ids) > 0
    assert not any(is_uniform(logprob, VOCAB_SIZE) for logprob in sampled(sglang))


@pytest.mark.parametrize(
    "sent",
    [
        ["model.layers.0.self_attn.q_proj.weight"],
        ["model.layers.1.self_attn.v_proj.weight", "model.layers.0.mlp.up_proj.weight"],
        ["model.embed_tokens.weight"],
    ],
    ids=lambda sent: sent[0],
)
def test_an_update_of_some_tensors_leaves_the_others_as_they_are(sglang: RealEngine, sent: list[str]) -> None:
    """Queries, keys and values are one tensor in SGLang, and the tied embedding is its head. All in float32."""
    torch.manual_seed(0)
    changed = dict(sglang.tensors)
    for name in sent:
        changed[name] = changed[name] + 0.2 * torch.randn_like(changed[name])
    model = AutoModelForCausalLM.from_pretrained(sglang.model, dtype=torch.float32)
    model.load_state_dict(changed, strict=False)
    with publishing(sglang, f"partial-{sent[0]}") as publisher:
        publish(publisher, sglang.tensors, 1)
        old = sampled(sglang)
        report = publish_worker(publisher, PartialWorker({name: changed[name] for name in sent}, 2, changed))
        assert report.size_bytes == sum(changed[name].nbytes for name in sent)
        asked = request(16)
        answer = run(sglang.endpoint(), lambda endpoint: endpoint.generate(asked))
        publish(publisher, sglang.tensors, 3)
    token_ids = [*asked.prompt_token_ids, *answer.completions[0].token_ids]
    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0, len(asked.prompt_token_ids) - 1 : -1].double()
    wanted = logits.log_softmax(-1).gather(-1, torch.tensor(answer.completions[0].token_ids)[:, None])[:, 0]
    assert logprobs(answer) == pytest.approx(wanted.tolist(), abs=2e-4)
    assert logprobs(answer)[:8] != pytest.approx(old, abs=1e-3)


SPEC = LORA


def assert_serves(engine: RealEngine, tensors: Mapping[str, torch.Tensor]) -> None:
    response = run(engine.endpoint(), lambda endpoint: endpoint.generate(request(16)))
    assert logprobs(response) == pytest.approx(transformers_logprobs(engine.model, tensors, response), abs=2e-3)


def test_a_lora_is_merged_replaced_by_the_next_and_follows_a_full_update(sglang: RealEngine) -> None:
    """Parts of fused layers are adapted; the base is what a full update brought and kept."""
    base = sglang.tensors
    first = lora_of(base, ["q_proj", "up_proj", "down_proj"], 4, seed=1)
    second = lora_of(base, ["k_proj", "up_proj"], 4, seed=2)
    with publishing(sglang, "lora") as publisher:
        publish(publisher, base, 1, keep_base=True)
        report = publish_worker(publisher, LoraWorker(first, 2, SPEC))
        assert report.sent_bytes == sum(t.nbytes for t in first.values())
        assert_serves(sglang, merged_with(base, first, SPEC))
        publish_worker(publisher, LoraWorker(second, 3, SPEC))
        assert_serves(sglang, merged_with(base, second, SPEC))
        sent = {name: tensor for name, tensor in scaled(base, 0.9).items() if "norm" in name or "k_proj" in name}
        publish_worker(publisher, PartialWorker(sent, 4, base))
        assert_serves(sglang, {**base, **sent})
        new = scaled(base, 0.9)
        publish(publisher, new, 5)
        with pytest.raises(PublishError, match="keep_base=True") as raised:
            publish_worker(publisher, LoraWorker(first, 6, SPEC))
        assert [(e.outcome, e.serves) for e in raised.value.report.endpoints] == [(EndpointOutcome.REFUSED, 5)]
        assert_serves(sglang, new)
        publish(publisher, base, 6, keep_base=True)


def test_a_lora_whose_base_another_process_had_loaded_is_refused(sglang: RealEngine) -> None:
    lora = LoraWorker(lora_of(sglang.tensors, ["q_proj"], 4, seed=1), 2, SPEC)
    with publishing(sglang, "theirs") as publisher:
        publish(publisher, scaled(sglang.tensors, 0.9), 1, keep_base=True)
    with publishing(sglang, "mine") as publisher:
        with pytest.raises(PublishError, match="another process had version 1 loaded") as raised:
            publish_worker(publisher, lora)
        assert [e.outcome for e in raised.value.report.endpoints] == [EndpointOutcome.REFUSED]
        assert_serves(sglang, scaled(sglang.tensors, 0.9))
        publish(publisher, sglang.tensors, 3, keep_base=True)
        lora.version = 4
        publish_worker(publisher, lora)
        assert_serves(sglang, merged_with(sglang.tensors, lora.tensors, SPEC))
        publish(publisher, sglang.tensors, 5)


def test_native_updates_are_chosen_by_the_url_and_poison_where_staged_ones_do_not(sglang: RealEngine) -> None:
    def native() -> InferenceEndpoint:
        return connect_endpoint(f"{sglang.url}?updates=native", control_timeout_s=20.0, generate_timeout_s=60.0)

    def fail(index: int) -> None:
        if index == 2:
            raise RuntimeError("the trainer fails")

    can = run(native(), lambda endpoint: endpoint.capabilities())
    assert (can.staging, can.transports, can.encodings, can.partial_updates) == (False, ("gloo",), (), False)
    with WeightPublisher([native()], make_sender("gloo"), run_id="native") as publisher:
        publish(publisher, muted(sglang.tensors), 1)
        assert all(is_uniform(logprob, VOCAB_SIZE) for logprob in sampled(sglang))
        with pytest.raises(RuntimeError):
            publish_worker(publisher, PlainWorker(sglang.tensors, 2, fail), bucket_bytes=BUCKET_BYTES)
        deadline = time.monotonic() + 20
        while (state := served(sglang).state) is EndpointState.PAUSED and time.monotonic() < deadline:
            time.sleep(0.1)  # the engine ends its load after the publisher has abandoned
        assert state is EndpointState.POISONED
    with publishing(sglang, "staged") as publisher:  # a staged update leads out, too
        publish(publisher, sglang.tensors, 1)
        assert served(sglang).state is EndpointState.READY
        assert not any(is_uniform(logprob, VOCAB_SIZE) for logprob in sampled(sglang))


def test_a_server_that_does_not_see_the_files_goes_on_with_its_weights(
    sglang: RealEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from inflight_sglang.checkpoint_files import CheckpointFiles

    before = sampled(sglang)
    monkeypatch.setattr(CheckpointFiles, "probe", Path("/nowhere/that/the/server/sees"))
    with publishing(sglang, "unseen") as publisher:
        with pytest.raises(PublishError, match="cannot see the files") as caught:
            publish(publisher, muted(sglang.tensors), 1)
        assert [e.outcome for e in caught.value.report.endpoints] == [EndpointOutcome.REFUSED]
    assert served(sglang).state is EndpointState.READY
    assert sampled(sglang) == pytest.approx(before, abs=1e-5)


def test_an_engine_that_refuses_to_load_is_poisoned_and_a_full_update_leads_out(sglang: RealEngine) -> None:
    before = sampled(sglang)
    num_buckets = len(plan_buckets(PlainWorker(sglang.tensors).parameter_specs(), BUCKET_BYTES))

    def lose_files(index: int) -> None:
        if index == num_buckets:
            (directory,) = checkpoints()
            deadline = time.monotonic() + 10
            while (
                len(files := list((directory / "checkpoint").iterdir())) < num_buckets and time.monotonic() < deadline
            ):
                time.sleep(0.02)
            time.sleep(0.2)
            for file in files:
                file.unlink()

    with publishing(sglang, "lost") as publisher:
        with pytest.raises(PublishError, match="Cannot find any model weights") as caught:
            publish_worker(publisher, PlainWorker(muted(sglang.tensors), 1, lose_files), bucket_bytes=BUCKET_BYTES)
        assert [e.outcome for e in caught.value.report.endpoints] == [EndpointOutcome.POISONED]
        assert served(sglang).state is EndpointState.POISONED
        publish(publisher, sglang.tensors, 2)
        assert served(sglang).state is EndpointState.READY
    assert sampled(sglang) == pytest.approx(before, abs=1e-5)


def test_a_load_that_fails_half_way_ends_sglang_itself_which_is_told_in_time(tiny_model: Path) -> None:
    """SGLang goes back to "the original weights" by reading the same files again, and does not outlive that."""
    with running("sglang", tiny_model) as engine:
        half = {**muted(engine.tensors), "model.layers.1.mlp.up_proj.weight": torch.zeros(3, 5)}
        endpoint: Any = engine.endpoint()
        with WeightPublisher([endpoint], make_sender("shm"), run_id="half") as publisher:
            endpoint._updates.session._expected = None  # otherwise it is refused when it is requested
            began = time.monotonic()
            with pytest.raises(PublishError) as caught:
                publish(publisher, half, 1)
            assert time.monotonic() - began < 60
        (report,) = caught.value.report.endpoints
        assert report.outcome in (
            EndpointOutcome.UNREACHABLE,
            EndpointOutcome.TIMED_OUT,
            EndpointOutcome.POISONED,
        )  # as far as it had come

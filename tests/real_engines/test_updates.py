"""In-flight updates of real engines, proved from outside: by logprobs of generated tokens."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from inflight.contracts import InferenceEndpoint
from inflight.errors import InvalidRequestError, PublishError
from inflight.types import EndpointOutcome
from inflight.wire import Completion, EndpointState, GenerateResponse, InFlightPolicy, WeightVersion
from tests.real_engines.servers import RealEngine, is_uniform, logprobs, muted, publish, request, run

NUM_REQUESTS = 32
VOCAB_SIZE = 258


def version_of(engine: RealEngine) -> WeightVersion:
    return run(engine.endpoint(), lambda endpoint: endpoint.weight_version())


def sampled(engine: RealEngine) -> list[float]:
    return logprobs(run(engine.endpoint(), lambda endpoint: endpoint.generate(request())))


def assert_spans_are_true(completion: Completion) -> None:
    """Every even version is the oracle: its tokens, and only its, have the logprob -ln V."""
    for span in completion.version_spans:
        uniform = [is_uniform(logprob, VOCAB_SIZE) for logprob in completion.logprobs[span.start : span.end]]
        wrong = [span.start + i for i, is_oracle in enumerate(uniform) if is_oracle != (span.version % 2 == 0)]
        # By chance, two of a million tokens of other weights have this logprob; a wrong label is at a span's end.
        is_chance = len(wrong) == 1 and span.version % 2 == 1 and span.start < wrong[0] < span.end - 1
        assert not wrong or is_chance, (span, wrong)


def test_spans_of_thirty_two_running_requests_are_true_over_four_versions(engine: RealEngine) -> None:
    attached = threading.Event()

    async def sample(endpoint: InferenceEndpoint) -> list[GenerateResponse]:
        await endpoint.capabilities()
        attached.set()
        return await asyncio.gather(*(endpoint.generate(request(500, temperature=1.0)) for _ in range(NUM_REQUESTS)))

    with engine.publisher() as publisher, ThreadPoolExecutor() as threads:
        publish(publisher, engine.tensors, 1)
        sampling = threads.submit(run, engine.endpoint(generate_timeout_s=150.0), sample)
        assert attached.wait(60)
        version = 1
        while not sampling.done() and version < 100:
            time.sleep(0.1)
            version += 1
            publish(publisher, muted(engine.tensors) if version % 2 == 0 else engine.tensors, version)
        responses = sampling.result()
        publish(publisher, engine.tensors, version + 1)
    num_spans = []
    for response in responses:
        (completion,) = response.completions
        num_spans.append(len(completion.version_spans))
        assert_spans_are_true(completion)
    assert min(num_spans) >= 3, num_spans


def test_every_policy_leaves_the_new_weights_serving(engine: RealEngine) -> None:
    with engine.publisher() as publisher:
        for version, policy in enumerate(InFlightPolicy, start=1):
            report = publish(publisher, muted(engine.tensors), 2 * version, in_flight=policy)
            assert report.applied_everywhere
            assert all(is_uniform(logprob, VOCAB_SIZE) for logprob in sampled(engine)), policy
            publish(publisher, engine.tensors, 2 * version + 1, in_flight=policy)
            assert not any(is_uniform(logprob, VOCAB_SIZE) for logprob in sampled(engine)), policy


def test_an_update_that_does_not_fit_the_model_is_refused_and_nobody_waits(engine: RealEngine) -> None:
    with engine.publisher() as publisher:
        publish(publisher, engine.tensors, 1)
        before = sampled(engine)
        name = "model.layers.0.mlp.up_proj.weight"
        wrong = {**engine.tensors, name: engine.tensors[name][:-1]}
        started = time.monotonic()
        with pytest.raises(PublishError, match=name) as raised:
            publish(publisher, wrong, 2)
        assert time.monotonic() - started < 10
        assert [e.outcome for e in raised.value.report.endpoints] == [EndpointOutcome.REFUSED]
        assert version_of(engine).version == 1
        assert sampled(engine) == pytest.approx(before, abs=1e-4)
        assert publish(publisher, engine.tensors, 2).applied_everywhere


def test_a_request_longer_than_the_context_is_refused_and_the_engine_goes_on(engine: RealEngine) -> None:
    with pytest.raises(InvalidRequestError, match="max_model_len"):
        run(engine.endpoint(), lambda endpoint: endpoint.generate(request(5000)))
    assert len(sampled(engine)) == 8


def test_after_two_publishers_the_engine_says_whose_weights_it_serves(engine: RealEngine) -> None:
    """vLLM's plug-in refuses the one whose group was replaced; SGLang keeps both groups, and both may publish."""
    with engine.publisher("first") as first, engine.publisher("second") as second:
        if engine.kind.name == "vllm":
            with pytest.raises(PublishError):
                publish(first, muted(engine.tensors), 5)
        else:
            publish(first, muted(engine.tensors), 5)
            found = version_of(engine)
            assert (found.state, found.version, found.run_id) == (EndpointState.READY, 5, "first")
            assert all(is_uniform(logprob, VOCAB_SIZE) for logprob in sampled(engine))
        assert publish(second, engine.tensors, 1).applied_everywhere
        found = version_of(engine)
        assert (found.state, found.version, found.run_id) == (EndpointState.READY, 1, "second")
        assert not any(is_uniform(logprob, VOCAB_SIZE) for logprob in sampled(engine))


def test_a_publisher_that_was_replaced_leaves_the_other_ones_group_alone(engine: RealEngine) -> None:
    with engine.publisher("replaced") as replaced, engine.publisher("replacing") as replacing:
        replaced.close()
        assert publish(replacing, engine.tensors, 1).applied_everywhere


def test_two_publishers_at_the_same_time_leave_whole_weights_and_say_whose(engine: RealEngine) -> None:
    """Whatever comes out, what each is told is true, and the engine serves one of the two, whole."""
    tensors = {"uniform": muted(engine.tensors), "sharp": engine.tensors}
    outcomes: dict[str, str] = {}

    def work(name: str) -> None:
        try:
            with engine.publisher(name) as publisher:
                barrier.wait()
                publish(publisher, tensors[name], 7)
                outcomes[name] = "applied"
        except Exception as error:  # checked below
            barrier.abort()  # so that the other publisher does not wait for one that could not form its group
            outcomes[name] = f"{type(error).__name__}: {error}"

    barrier = threading.Barrier(2, timeout=60.0)
    threads = [threading.Thread(target=work, args=(name,)) for name in tensors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=90.0)
    assert set(outcomes) == set(tensors), outcomes
    with engine.publisher("after") as publisher:  # forms its group again, and clears what is left
        found = version_of(engine)
        assert found.state is EndpointState.READY, (found, outcomes)
        if found.run_id in tensors:
            uniform = [is_uniform(logprob, VOCAB_SIZE) for logprob in sampled(engine)]
            assert all(uniform) if found.run_id == "uniform" else not any(uniform), (found, outcomes)
        assert publish(publisher, engine.tensors, 1).applied_everywhere

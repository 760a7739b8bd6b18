"""`SamplingClient` of the real SDK."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tests.dialects.tinker.server import KEY, TinkerServer
from tests.environments.apart import need

need("tinker")

import tinker  # noqa: E402
from tinker import types  # noqa: E402
from tinker.types import SamplingParams  # noqa: E402

from tests.dialects.tinker.sdk import (  # noqa: E402
    DEPRECATED,
    PROMPT,
    TOKENS,
    forward,
    new_model,
    prompt_of,
    refused,
    scores,
    train,
)


@pytest.fixture
def sampler(service: tinker.ServiceClient, sdk_server: TinkerServer) -> tinker.SamplingClient:
    return service.create_sampling_client(base_model=str(sdk_server.model)).result(60)


def sample(sampler: tinker.SamplingClient, num_samples: int = 1, **params: Any) -> list[types.SampledSequence]:
    asked = SamplingParams(**{"max_tokens": 12, "stop": [], **params})
    return list(sampler.sample(prompt_of(PROMPT), num_samples, asked).result(60).sequences)


def test_samples_differ_are_reproducible_and_carry_their_logprobs(sampler: tinker.SamplingClient) -> None:
    several = sample(sampler, 4, seed=7)
    assert [it.tokens for it in several] == [it.tokens for it in sample(sampler, 4, seed=7)]
    assert len({tuple(it.tokens) for it in several}) == 4
    assert len({it.sequence_id for it in several}) == 4
    assert {it.stop_reason for it in several} == {"length"}
    assert sample(sampler, seed=8)[0].tokens != sample(sampler, seed=9)[0].tokens
    for it in several:
        scored = scores(sampler, (*PROMPT, *it.tokens))[len(PROMPT) - 1 :]
        np.testing.assert_allclose(it.logprobs, scored, atol=1e-4)


def test_samples_end_where_they_are_asked_to(sampler: tinker.SamplingClient) -> None:
    (whole,) = sample(sampler, seed=7)
    stop = whole.tokens[4]
    end = whole.tokens.index(stop) + 1
    (by_token,) = sample(sampler, seed=7, stop=[stop])
    assert (by_token.tokens, by_token.stop_reason) == (whole.tokens[:end], "stop")
    text = sampler.get_tokenizer().decode(whole.tokens)
    letter = next(it for it in text if it.isascii() and it.isprintable())
    for stops in (letter, [letter, "zzzz"]):
        (by_text,) = sample(sampler, seed=7, stop=stops)
        assert by_text.stop_reason == "stop"
        assert by_text.tokens == whole.tokens[: whole.tokens.index(ord(letter)) + 1]
    (short,) = sample(sampler, seed=7, max_tokens=3)
    assert short.tokens == whole.tokens[:3]
    end_of_sequence = sampler.get_tokenizer().eos_token_id
    (ended,) = sample(sampler, seed=1, max_tokens=1000, stop=None)
    assert ended.tokens.index(end_of_sequence) == len(ended.tokens) - 1 and ended.stop_reason == "stop"
    (endless,) = sample(sampler, seed=1, max_tokens=1000)
    assert len(endless.tokens) == 1000 and endless.tokens[: len(ended.tokens)] == ended.tokens


def test_temperature_and_filters_change_the_distribution(sampler: tinker.SamplingClient) -> None:
    (greedy,) = sample(sampler, temperature=0.0)
    assert sample(sampler, top_k=1, seed=3)[0].tokens == greedy.tokens
    assert sample(sampler, top_p=1e-6, seed=3)[0].tokens == greedy.tokens
    (hot,) = sample(sampler, temperature=2.0, seed=3)
    assert hot.tokens != greedy.tokens


@DEPRECATED
def test_prompts_are_scored_as_the_trainer_scores_them(service: tinker.ServiceClient, sdk_server: TinkerServer) -> None:
    client = new_model(service, sdk_server)
    train(client, 2)
    expected = forward(client)
    sampler = client.save_weights_and_get_sampling_client().result(60)
    prompt, one = prompt_of(TOKENS), SamplingParams(max_tokens=1)
    np.testing.assert_allclose(scores(sampler), expected, atol=1e-4)
    last = asyncio.run(sampler.compute_logprobs_async(prompt, 5))
    assert last[:-5] == [None] * (len(TOKENS) - 5)
    np.testing.assert_allclose(np.array(last[-5:], np.float64), expected[-5:], atol=1e-4)
    targets = np.full((len(TOKENS) - 1, 2), -1)
    targets[:, 0], targets[3, 1] = TOKENS[1:], 9
    for data in (types.TensorData.from_numpy(targets), sparse(targets)):
        response = asyncio.run(
            sampler.sample_async(
                prompt,
                1,
                one,
                include_prompt_logprobs=True,
                topk_prompt_logprobs=3,
                topk_sample_logprobs=2,
                target_prompt_logprobs=data,
            )
        )
        assert response.prompt_logprobs is not None and response.topk_prompt_logprobs is not None
        np.testing.assert_allclose(np.array(response.prompt_logprobs[1:], np.float64), expected, atol=1e-4)
        assert response.target_prompt_logprobs is not None
        found = response.target_prompt_logprobs.to_numpy()
        np.testing.assert_allclose(found[:, 0], expected, atol=1e-4)
        assert found[3, 1] < 0 and (found[targets == -1] == 0).all()
    assert response.topk_prompt_logprobs[0] is None
    for i, row in enumerate(response.topk_prompt_logprobs[1:]):
        assert row is not None and len(row) == 3 and row == sorted(row, key=lambda it: -it[1])
        assert row[0][1] >= expected[i] - 1e-4
    (sequence,) = response.sequences
    assert sequence.topk_logprobs is not None and sequence.topk_logprobs[0] is not None
    assert len(sequence.topk_logprobs) == 1 and len(sequence.topk_logprobs[0]) == 2
    (plain,) = sampler.sample(prompt, 1, one).result(60).sequences
    assert plain.topk_logprobs is None


def sparse(targets: np.ndarray[Any, Any]) -> types.TensorData:
    import torch

    found = types.TensorData.from_torch_sparse(torch.from_numpy(targets), pad_value=-1)
    if found.sparse_crow_indices is not None:
        return found
    rows, columns = np.nonzero(targets != -1)
    crow = np.searchsorted(rows, np.arange(len(targets) + 1))
    return types.TensorData(targets[rows, columns], "int64", list(targets.shape), crow.tolist(), columns.tolist())


@DEPRECATED
def test_clients_of_base_model_and_checkpoint_know_their_model(
    service: tinker.ServiceClient, sdk_server: TinkerServer
) -> None:
    base = asyncio.run(service.create_sampling_client_async(base_model=str(sdk_server.model)))
    client = new_model(service, sdk_server)
    train(client)
    path = client.save_weights_for_sampler("kept").result(60).path
    named = tinker.SamplingClient.create(service.holder, model_path=path).result(60)
    for sampler in (base, named):
        assert sampler.get_base_model() == str(sdk_server.model)
        assert asyncio.run(sampler.get_base_model_async()) == str(sdk_server.model)
        assert sampler.get_telemetry() is None
    np.testing.assert_allclose(scores(named), forward(client), atol=1e-4)
    assert np.abs(scores(base) - scores(named)).max() > 1e-3
    with refused("there is no checkpoint"):
        service.create_sampling_client(f"tinker://{client.model_id}/weights/none").result(60)
    with refused("does not serve the base model 'other'"):
        service.create_sampling_client(base_model="other").result(60)


IN_ANOTHER_PROCESS = """
import json, pickle, sys
import tinker
from tinker.types import ModelInput, SamplingParams
given = pickle.load(sys.stdin.buffer)
client = given if isinstance(given, tinker.SamplingClient) else tinker.SamplingClient.from_sampler_handle(given)
futures = [client.sample(ModelInput.from_ints([40, 41, 42]), 1, SamplingParams(max_tokens=6, seed=i, stop=[]))
           for i in range(8)]
json.dump([it.result(60).sequences[0].tokens for it in futures], sys.stdout)
"""


def test_a_client_samples_in_other_processes_too(
    sampler: tinker.SamplingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    processes = []
    for given in (sampler, sampler.get_sampler_handle()):
        process = subprocess.Popen(
            [sys.executable, "-c", IN_ANOTHER_PROCESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        processes.append((process, pickle.dumps(given)))
    prompt = prompt_of((40, 41, 42))
    futures = [sampler.sample(prompt, 1, SamplingParams(max_tokens=6, seed=i, stop=[])) for i in range(8)]
    here = [it.result(60).sequences[0].tokens for it in futures]
    for process, given in processes:
        output, _ = process.communicate(given, timeout=120)
        assert output.decode() == str(here)


def test_64_samples_at_a_time_are_those_of_one_at_a_time(sampler: tinker.SamplingClient) -> None:
    prompts = [prompt_of(range(first, first + 5 + first % 7)) for first in range(64)]
    params = [SamplingParams(max_tokens=8 + i % 5, seed=i, stop=[]) for i in range(64)]
    futures = [sampler.sample(*it) for it in zip(prompts, [1] * 64, params, strict=True)]
    together = [it.result(120).sequences[0] for it in futures]
    assert [len(it.tokens) for it in together] == [it.max_tokens for it in params]
    assert len({it.sequence_id for it in together}) == 64
    for i in range(0, 64, 9):
        (alone,) = sampler.sample(prompts[i], 1, params[i]).result(60).sequences
        assert alone.tokens == together[i].tokens


def test_samples_that_cannot_be_had_are_refused(
    service: tinker.ServiceClient, sdk_server: TinkerServer, sampler: tinker.SamplingClient
) -> None:
    prompt, params = prompt_of(PROMPT), SamplingParams(max_tokens=4)
    with refused("prompt_alt_tokens_k is not supported"):
        sampler.sample(prompt, 1, params, prompt_alt_tokens_k=2).result(60)
    with refused("supported only at temperature 1"):
        sampler.sample(prompt, 1, SamplingParams(max_tokens=4, temperature=0.5), topk_sample_logprobs=2).result(60)
    recording = service.create_sampling_client(base_model=str(sdk_server.model), record_stability_info=True).result(60)
    with refused("stable_reinforce, which has no published formula"):
        recording.sample(prompt, 1, params).result(60)
    with refused("the prompt has no tokens"):
        sampler.sample(prompt_of(()), 1, params).result(60)
    with refused("the prompt has 1100 tokens, but the context has only 1024"):
        sampler.sample(prompt_of([65] * 1100), 1, params).result(60)
    with refused("70000 is outside the vocabulary"):
        sampler.sample(prompt_of([70000]), 1, params).result(60)
    with refused("top_k: Input should be less than or equal to 128"):
        sampler.sample(prompt, 1, params, topk_prompt_logprobs=300).result(60)
    image = types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png", expected_tokens=1)])
    with refused("only token ids are supported"):
        sampler.sample(image, 1, params).result(60)
    assert sample(sampler)


def test_a_whole_context_can_be_scored(sampler: tinker.SamplingClient) -> None:
    tokens = [65 + i % 20 for i in range(1024)]
    whole = scores(sampler, tokens)
    np.testing.assert_allclose(whole[:-1], scores(sampler, tokens[:-1]), atol=1e-4)
    assert -50 < whole[-1] < 0


def test_a_paused_queue_is_only_logged(sampler: tinker.SamplingClient, caplog: pytest.LogCaptureFixture) -> None:
    from tinker.lib.api_future_impl import QueueState

    sampler.on_queue_state_change(QueueState.PAUSED_CAPACITY, "the reason")
    assert "Sampling is paused" in caplog.text and "the reason" in caplog.text
    assert sample(sampler)

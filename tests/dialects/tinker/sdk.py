"""What the tests with the real SDK have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

TOKENS = tuple(range(60, 80))
PROMPT = tuple(range(40, 52))
ADAM = types.AdamParams(learning_rate=1e-2)
DEPRECATED = pytest.mark.filterwarnings("ignore:DEPRECATED:FutureWarning")


def prompt_of(tokens: Sequence[int]) -> types.ModelInput:
    return types.ModelInput.from_ints(list(tokens))


def tensor(values: Any, dtype: str = "float32") -> types.TensorData:
    return types.TensorData.from_numpy(np.asarray(values, dtype))


def datum(tokens: Sequence[int] = TOKENS, **inputs: Any) -> types.Datum:
    """A sequence whose every next token is a target, with weights of 1 or the loss inputs that are given."""
    given = inputs or {"weights": np.ones(len(tokens) - 1)}
    return types.Datum(
        model_input=prompt_of(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tensor(tokens[1:], "int64"),
            **{name: tensor(values) for name, values in given.items()},
        },
    )


def logprobs_of(output: types.ForwardBackwardOutput) -> list[np.ndarray[Any, Any]]:
    return [it["logprobs"].to_numpy() for it in output.loss_fn_outputs]


def forward(client: tinker.TrainingClient, data: Sequence[types.Datum] | None = None) -> np.ndarray[Any, Any]:
    """Logprobs of all targets."""
    output = client.forward(list(data or [datum()]), "cross_entropy").result(60)
    return np.concatenate([it.ravel() for it in logprobs_of(output)])


def train(client: tinker.TrainingClient, num_steps: int = 1) -> list[float]:
    """Train on one sequence; return the losses before the steps."""
    futures = [(client.forward_backward([datum()], "cross_entropy"), client.optim_step(ADAM)) for _ in range(num_steps)]
    for _, step in futures:
        assert step.result(60).metrics["gradient_norm"] > 0
    return [backward.result(60).metrics["loss:sum"] for backward, _ in futures]


def new_model(service: tinker.ServiceClient, server: Any, rank: int = 8, seed: int = 1) -> tinker.TrainingClient:
    return service.create_lora_training_client(str(server.model), rank=rank, seed=seed).result(60)


def scores(client: tinker.SamplingClient, tokens: Sequence[int] = TOKENS) -> np.ndarray[Any, Any]:
    """Logprobs of all tokens but the first."""
    found = client.compute_logprobs(prompt_of(tokens)).result(60)
    assert found[0] is None
    return np.array(found[1:])


def refused(message: str) -> Any:
    """Expect that the server refuses a call, at once or by a future that fails."""
    return pytest.raises((tinker.APIStatusError, tinker.RequestFailedError), match=message)

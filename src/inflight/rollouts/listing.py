"""The built-in policies, as ``inflight policies`` lists them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping

from inflight.rollouts.composers import COMPOSERS
from inflight.rollouts.predictors import PREDICTORS
from inflight.rollouts.schedulers import SCHEDULERS
from inflight.rollouts.staleness import STALENESS

KINDS: Mapping[str, Mapping[str, Callable[..., object]]] = {
    "rollouts.scheduler": SCHEDULERS,
    "rollouts.staleness": STALENESS,
    "rollouts.composer": COMPOSERS,
    "predictor of rollouts.scheduler_params": PREDICTORS,
}
_GIVEN = ("group_size", "history", "seed", "max_lag", "tokens_per_step")
"""Arguments that the run supplies; users set the others."""


def policy_lines() -> Iterator[str]:
    """Yield lines of text: each kind of policy, followed by the name, first sentence and parameters of its built-in
    policies.
    """
    for kind, policies in KINDS.items():
        yield f"{kind}:"
        width = max(map(len, policies))
        for name, policy in policies.items():
            yield f"  {name:{width}}  {first_sentence(policy)}"
            if params := parameters(policy):
                yield f"  {'':{width}}    {', '.join(f'{param} = {value}' for param, value in params.items())}"


def policy_description(name: str) -> str | None:
    """Return the full description of each policy with this name; None if there is none."""
    found = [
        f"{kind} = {name!r}\n\n{inspect.cleandoc(policies[name].__doc__ or '')}"
        for kind, policies in KINDS.items()
        if name in policies
    ]
    return "\n\n".join(found) or None


def first_sentence(policy: Callable[..., object]) -> str:
    """Return the first line of a policy's description."""
    return inspect.cleandoc(policy.__doc__ or "").splitlines()[0].replace("`", "")


def parameters(policy: Callable[..., object]) -> dict[str, object]:
    """Return the parameters that a user can set, and their defaults."""
    signature = inspect.signature(policy)
    return {name: param.default for name, param in signature.parameters.items() if name not in _GIVEN}

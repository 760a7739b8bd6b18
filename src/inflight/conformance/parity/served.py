"""Checks, before anything is published, that an endpoint serves the checkpoint that it will be compared with."""

from __future__ import annotations

from inflight.conformance.parity.figures import Figures, Limits, mean_difference
from inflight.conformance.parity.measuring import ROUNDED
from inflight.conformance.parity.pair import Pair
from inflight.errors import ConfigError


async def check_served(pair: Pair) -> Figures:
    """Return the figures of the endpoint's own weights, compared with transformers under the checkpoint's weights.

    Raises `ConfigError` if the vocabulary has another size than the checkpoint's. Also raises it if a server at a URL
    serves a run, or if its logprobs are not the checkpoint's, because its own weights could not be restored afterwards.
    Logprobs that differ only because logits are rounded are accepted.
    """
    subject = pair.subject
    can, reference, label = subject.capabilities, subject.reference, subject.target.label
    how = "Nothing was published. Start the server from this checkpoint, or let this command start it with --serve"
    if can.vocab_size != reference.vocab_size:
        raise ConfigError(
            f"{label} does not serve {str(reference.path)!r}: its vocabulary has {can.vocab_size} tokens, that of the "
            f"checkpoint {reference.vocab_size}. {how}"
        )
    if not subject.opened.is_ours:
        served = await subject.endpoint.weight_version()
        if served.run_id is not None and not served.run_id.startswith("check-"):
            raise ConfigError(
                f"{label} serves version {served.version} of run {served.run_id!r}; the examination would "
                "replace its weights. Start another server from the same checkpoint, and examine that one"
            )
    sampled = await pair.sample()
    figures, limits = sampled.figures, Limits.of(can.dtype)
    if subject.opened.is_ours or not limits.exceeded_by(figures):
        return figures
    rounded = (mean_difference(pair.reference_logprobs(sampled.batch, dtype), sampled.behaviour_N) for dtype in ROUNDED)
    if min(rounded) < figures.mean / 4:
        return figures
    raise ConfigError(
        f"{label} does not serve {str(reference.path)!r}, or serves it incorrectly: before anything is published, "
        f"logprobs differ from this checkpoint's by {figures.mean:.3g} nats on average (k3 {figures.k3:.3g}), and the "
        f"limits are {limits.mean:g} and {limits.k3:g}. {how}, which also finds the cause if the difference remains"
    )

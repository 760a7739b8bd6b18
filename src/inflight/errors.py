"""Every error that inflight raises; its class indicates the state after the failure.

    InflightError
    ├── ConfigError                  nothing was started, nothing was written
    ├── UnsupportedError             the capability is not supported; nothing changed
    ├── InvalidRequestError          this request was refused; the endpoint is unaffected
    ├── EndpointError                (carries the endpoint's URL)
    │   ├── UnauthorizedError        the token was refused; nothing changed
    │   ├── UnreachableError         no answer: the endpoint's state is unknown
    │   ├── DeadlineError            no answer in time: the endpoint's state is unknown
    │   ├── ProtocolError            the answer breaks the contract: the endpoint's state is unknown
    │   ├── PoisonedError            weights are torn until a complete update or a restart
    │   ├── BusyError                the endpoint's memory cannot be released now; nothing changed
    │   └── ReleasedError            the weights are whole, and are served once the memory is restored
    ├── UpdateError
    │   ├── UpdateRefusedError       before any byte was sent: the old weights are still served
    │   │   └── FencedError          another incarnation of this run's trainer has taken over; stop
    │   ├── UpdateAbortedError       before any byte was applied: the old weights are still served
    │   ├── TransferError            the weight group is unusable and must be formed again
    │   └── PublishError             the report lists which weights each endpoint serves
    ├── TrainerError
    │   ├── NonFiniteError           loss, gradient, logprobs or weights are not finite; nothing changed
    │   ├── CheckpointError          nothing was loaded, or the previous checkpoint is still intact
    │   └── WorkerDiedError          a trainer rank has ended; the last checkpoint is intact
    ├── TaskError                    a task could not be created, or a reward could not be computed
    ├── ContextFullError             a conversation has no room for another turn; nothing was appended
    └── EpisodeOverError             the episode has ended; nothing more is sampled for it

Errors are picklable, carry no secrets, and travel over HTTP by their ``code``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from inflight.types import PublishReport


class InflightError(Exception):
    """Base of every error that inflight raises on purpose."""

    code: ClassVar[str] = "inflight_error"


class ConfigError(InflightError):
    """The user's input cannot be used; nothing was started and nothing was written."""

    code = "config_error"


class UnsupportedError(InflightError):
    """The capability is not supported by this implementation; nothing changed."""

    code = "unsupported"


class InvalidRequestError(InflightError):
    """The request breaks a rule of the contract and was refused; the endpoint is unaffected."""

    code = "invalid_request"


class EndpointError(InflightError):
    """A call to an endpoint failed; ``endpoint`` is its URL or name, empty if the endpoint itself raises the error."""

    code = "endpoint_error"

    def __init__(self, message: str, endpoint: str = "") -> None:
        super().__init__(message, endpoint)
        self.message = message
        self.endpoint = endpoint

    def __str__(self) -> str:
        return f"{self.endpoint}: {self.message}" if self.endpoint else self.message


class UnauthorizedError(EndpointError):
    """The bearer token is missing or wrong; nothing changed."""

    code = "unauthorized"


class UnreachableError(EndpointError):
    """The endpoint gave no answer (the connection was refused, reset or closed); its state is unknown."""

    code = "unreachable"


class DeadlineError(EndpointError):
    """The endpoint did not answer before the deadline; its state is unknown."""

    code = "deadline"


class ProtocolError(EndpointError):
    """The endpoint's answer breaks the contract; its state is unknown."""

    code = "protocol_error"


class PoisonedError(EndpointError):
    """The endpoint's weights are torn (partly updated); it refuses to generate until a complete update or a restart."""

    code = "poisoned"


class BusyError(EndpointError):
    """The endpoint's memory cannot be released, because requests are running or an update is open; nothing changed."""

    code = "busy"


class ReleasedError(EndpointError):
    """The endpoint's memory is released; it refuses to generate until the memory is restored. Its weights are whole."""

    code = "released"


class UpdateError(InflightError):
    """A weight update did not succeed."""

    code = "update_error"


class UpdateRefusedError(UpdateError):
    """The endpoint refused the update before any byte was sent; it still serves the old weights."""

    code = "update_refused"


class FencedError(UpdateRefusedError):
    """A later incarnation of the run's trainer has taken over; calls from this one no longer change anything."""

    code = "fenced"


class UpdateAbortedError(UpdateError):
    """The update ended before any byte was applied; the endpoint still serves the old weights."""

    code = "update_aborted"


class TransferError(UpdateError):
    """The collective transfer failed; the weight group is unusable and must be formed again."""

    code = "transfer_error"


class PublishError(UpdateError):
    """A publish updated fewer endpoints than required; ``report`` lists the version that each endpoint serves."""

    code = "publish_failed"

    def __init__(self, message: str, report: PublishReport) -> None:
        super().__init__(message, report)
        self.message = message
        self.report = report

    def __str__(self) -> str:
        return self.message


class TrainerError(InflightError):
    """A trainer worker could not carry out a call."""

    code = "trainer_error"


class NonFiniteError(TrainerError):
    """The loss, gradients, logprobs or weights are NaN or infinite; the weights and the optimizer are unchanged."""

    code = "non_finite"


class CheckpointError(TrainerError):
    """A checkpoint could not be written or read; an earlier checkpoint is still intact."""

    code = "checkpoint_error"


class WorkerDiedError(TrainerError):
    """A trainer rank ended unexpectedly; the last checkpoint is intact."""

    code = "worker_died"


class TaskError(InflightError):
    """A task could not be created, or its reward function raised an error."""

    code = "task_error"


class ContextFullError(InflightError):
    """A conversation has no room for another turn."""

    code = "context_full"


class EpisodeOverError(InflightError):
    """The episode has ended, or no endpoint can continue it."""

    code = "episode_over"


class PrecisionWarning(UserWarning):
    """Training continues, but a setting loses part of the updates to rounding."""


def error_from_code(code: str, message: str, endpoint: str = "") -> InflightError:
    """Return the error that has this ``code``, to be raised on this side of a connection.

    An unknown code, such as one from a newer peer, yields an `EndpointError` that quotes the code.
    """
    kinds = {kind.code: kind for kind in _all_kinds(InflightError)}
    kind = kinds.get(code)
    if kind is None or kind is PublishError:
        return EndpointError(f"{message} (error code {code!r})", endpoint)
    if issubclass(kind, EndpointError):
        return kind(message, endpoint)
    return kind(f"{endpoint}: {message}" if endpoint else message)


def _all_kinds(root: type[InflightError]) -> list[type[InflightError]]:
    return [root, *(kind for child in root.__subclasses__() for kind in _all_kinds(child))]


def transfer_error(cause: BaseException, what: str) -> TransferError:
    """Return the `TransferError` for a lower-level error, without the general advice that gloo adds."""
    text = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
    text = text.partition(" This is typically caused by ")[0]
    return TransferError(f"{what} failed: {text}")

"""The definition of a check: one requirement of the contract, and a plain function that tests it.

Modules write checks with the decorator `check`::

    LEVEL = "control"

    @check("E-30", "updates keep", look_at=_PAUSE, policy=InFlightPolicy.KEEP)
    @check("E-31", "updates recompute", look_at=_PAUSE, policy=InFlightPolicy.RECOMPUTE)
    async def nothing_sampled(subject: EndpointSubject, policy: InFlightPolicy) -> None:
        "Under {policy}, no token is sampled from the moment request_weight_update returns until the pause ends."

The function records its measurements on the subject and returns. To fail, it calls `require` or `fail`; if the
requirement does not apply to the subject, it calls `skip`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial, update_wrapper
from types import FunctionType, ModuleType
from typing import Any, Literal, NoReturn, TypeVar

from inflight.errors import ConfigError

Kind = Literal["endpoint", "worker", "transport"]
Function = TypeVar("Function", bound=Callable[..., Any])

LEVELS: Mapping[Kind, tuple[str, ...]] = {
    "endpoint": (
        *("discovery", "tokens", "control", "memory", "weights", "sharded", "stores"),
        *("versions", "caches", "partials", "faults", "http", "parity"),
    ),
    "worker": ("discovery", "forward", "packing", "gradient", "step", "gather", "sharded", "checkpoint", "lora"),
    "transport": ("group", "bytes", "failures", "abort"),
}
"""The levels of each kind's checks, in order."""


class CheckFailed(Exception):  # noqa: N818 - an outcome, not an error
    """The requirement does not hold; the message states what was seen instead."""


class CheckSkipped(Exception):  # noqa: N818 - an outcome, not an error
    """The subject does not support a feature that the check needs, or the user did not provide it."""


@dataclass(frozen=True, slots=True)
class Check:
    """One requirement of docs/contract.md and the function that tests it."""

    id: str
    """A number after ``E-`` (endpoints), ``U-`` (updates), ``W-`` (workers) or ``T-`` (transports)."""
    level: str
    requirement: str
    look_at: str
    """Where an implementer should look first if the requirement does not hold."""
    function: Callable[[Any], Any]
    """Takes the subject. It is a coroutine function in checks of endpoints, and a plain function otherwise."""
    deadline_s: float = 20.0
    """A check that takes longer counts as hung."""
    needs: tuple[str, ...] = ()
    """What the subject must offer. Otherwise the check is skipped."""
    before: Callable[[Any], Any] | None = None
    """For workers: runs first, on a single rank, and stores what ``function`` needs in the subject's directory."""
    after: Callable[[Any], Any] | None = None
    """For workers: runs on a single rank once ``function`` has run on all ranks."""

    def __str__(self) -> str:
        return f"{self.id} {self.function.__name__}"


def check(
    id: str,
    needs: str = "",
    *,
    look_at: str = "",
    deadline_s: float = 20.0,
    before: Callable[[Any], Any] | None = None,
    after: Callable[[Any], Any] | None = None,
    **parameters: Any,
) -> Callable[[Function], Function]:
    """Return a decorator that registers the function as a check.

    Several decorators on one function register several checks.

    ``needs`` is a list of words separated by spaces. The check calls the function with the subject and ``parameters``.
    The first paragraph of the docstring is the requirement, in which ``{name}`` stands for a parameter. The level is
    the constant ``LEVEL`` of the function's module.
    """

    def added(function: Function) -> Function:
        requirement = " ".join((function.__doc__ or "").split("\n\n")[0].split())
        record = Check(
            id=id,
            level=function.__globals__["LEVEL"],
            requirement=requirement.format(**parameters) if parameters else requirement,
            look_at=look_at or vars(function)["look_at"],
            function=update_wrapper(partial(function, **parameters), function),
            deadline_s=deadline_s,
            needs=tuple(needs.split()),
            before=before,
            after=after,
        )
        vars(function)["checks"] = (record, *vars(function).get("checks", ()))
        return function

    return added


def look_at(hint: str) -> Callable[[Function], Function]:
    """Return a decorator that sets the ``look_at`` of the function's checks, for hints that are too long for the line
    of the `check` decorator."""

    def added(function: Function) -> Function:
        vars(function)["look_at"] = hint
        return function

    return added


def checks_in(*modules: ModuleType) -> tuple[Check, ...]:
    """Return the checks that these modules define, in source order."""
    functions = [value for module in modules for value in vars(module).values() if isinstance(value, FunctionType)]
    return tuple(check for function in functions for check in vars(function).get("checks", ()))


def fail(message: str) -> NoReturn:
    """Fail the check because the requirement does not hold."""
    raise CheckFailed(message)


def require(holds: object, message: str) -> None:
    """Fail the check unless ``holds``."""
    if not holds:
        raise CheckFailed(message)


def skip(reason: str) -> NoReturn:
    """Skip the check because its requirement does not apply to this subject."""
    raise CheckSkipped(reason)


def select(checks: Iterable[Check], ids: Iterable[str] = (), levels: Iterable[str] = ()) -> tuple[Check, ...]:
    """Return the checks with these ids or levels, or all of them if neither is given.

    Raises `ConfigError` for an unknown id.
    """
    known, ids, levels = tuple(checks), tuple(ids), tuple(levels)
    if unknown := sorted(set(ids) - {check.id for check in known}):
        raise ConfigError(f"no such check: {', '.join(unknown)}; ids run from {known[0].id} to {known[-1].id}")
    if not ids and not levels:
        return known
    return tuple(check for check in known if check.id in ids or check.level in levels)


def require_levels(kind: Kind, names: Iterable[str]) -> None:
    """Raise a `ConfigError` that lists the levels of this kind unless every name is one of them."""
    for name in names:
        if name not in LEVELS[kind]:
            problem = f"no such level: {name}" if name else "--level needs a name"
            raise ConfigError(f"{problem}; the levels of {kind} checks are {', '.join(LEVELS[kind])}")

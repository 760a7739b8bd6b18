"""Fields that messages share: token ids, counts, names, durations, addresses."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field

PROTOCOL_VERSION = 2
"""Version of the contract between peers. It is increased when a peer would misread messages of the previous version."""


T = TypeVar("T")


Items = Annotated[tuple[T, ...], Field(fail_fast=True)]
"""A sequence whose validation stops at the first invalid element, so that a long sequence yields a single error."""


Natural = Annotated[int, Field(ge=0, le=2**63 - 1)]
"""A count, an index or a version: a non-negative signed 64-bit integer."""


TokenId = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]
"""The id of a token, as an integer: true, "1" and 1.0 are refused."""


TokenCount = Annotated[int, Field(ge=1, le=2**31 - 1)]
"""A positive number of tokens."""


Seed = Annotated[int, Field(ge=-(2**63), le=2**64 - 1)]
"""Seed of a request: signed or unsigned, 64 bits."""


Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600)]
"""A duration in seconds, at most a week, which every system clock and wait supports."""


MAX_REWARD = 1e9
"""Largest magnitude of a reward. Advantages are sent as float32, which cannot usefully distinguish larger rewards, and
the squares of their sums would overflow.
"""


MIN_TEMPERATURE = 1e-3
"""Lowest temperature to train at: logits divided by a lower temperature overflow, or the probabilities of all tokens
but one are rounded to zero.
"""


def is_reward(value: object) -> bool:
    """Return whether a value is a number that is small enough to train on."""
    return isinstance(value, int | float) and abs(value) <= MAX_REWARD


RequestId = Annotated[str, Field(min_length=1, max_length=256)]
"""A client's name for one of its running requests."""


RunId = Annotated[str, Field(min_length=1, max_length=1024)]
"""The name of a run, which owns the weights that it publishes."""


def is_empty(value: object) -> bool:
    """Return whether a field with this value is omitted from a message, for peers that do not know the field."""
    return not value


def usable_host(host: str) -> str:
    """Return ``host`` if it is an IP address or a host name in ASCII. Raises ``ValueError``."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        if len(host) > 253 or not all(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,62}", it) for it in host.split(".")):
            raise ValueError("it is neither an IP address nor a host name") from None
    return host


def usable_url(url: str) -> str:
    """Return ``url`` if its host is valid, any port is in range, and it has no user name. Raises ``ValueError``."""
    if not all("!" <= character <= "~" for character in url):
        raise ValueError("it contains characters that are not allowed in a URL; percent-encode them")
    parts = urlsplit(url)
    if parts.username is not None:
        raise ValueError("it contains a user name; put the token in the token field")
    if parts.port == 0:
        raise ValueError("nothing can connect to port 0")
    usable_host(parts.hostname or "")
    return url


class WireModel(BaseModel):
    """Base of every message: immutable, strict about unknown keys, without infinities, with bounds on every number."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

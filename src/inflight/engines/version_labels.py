"""Version labels: text that identifies an engine's weights, so that every client reads the same version.

``7/SESSION@RUN`` is version 7 of the run RUN, sent in the session SESSION. ``default`` is the checkpoint that the
engine started from. ``torn:8/SESSION@RUN`` means that an update to version 8 failed while it was applied; the prefix
``released:`` means that the engine's memory is released.

The engine stores the label, so a client that attaches later, or after the engine was replaced, can read which weights
the engine serves. No two updates of one engine have the same label, so the label can be the key of the prefix cache;
see `began_under_another`.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from inflight.errors import ProtocolError
from inflight.wire import UpdateRef, VersionSpan

CHECKPOINT_LABEL = "default"
"""The label that vLLM and SGLang give to the weights with which they were started."""
_TORN = "torn:"
_RELEASED = "released:"
_UNNAMED = "~"
"""First character of the text that replaces a missing session name. No session name contains it."""


@dataclass(frozen=True, slots=True)
class ServedVersion:
    """The contents of a label. ``run_id`` is None for the checkpoint that the engine started from."""

    version: int
    run_id: str | None
    torn: bool = False
    session_id: str = ""
    released: bool = False


def label_of(ref: UpdateRef, *, torn: bool = False) -> str:
    """Return a label for an update's weights. If its session has no name, each call returns a different label."""
    session = ref.session_id or f"{_UNNAMED}{secrets.token_hex(4)}"
    return f"{_TORN if torn else ''}{ref.version}/{session}@{ref.run_id}"


def released_label(label: str) -> str:
    """Return the label of the same weights while the engine's memory is released."""
    return _RELEASED + restored_label(label)


def restored_label(label: str) -> str:
    """Return the label of the same weights once the engine has its memory again."""
    return label.removeprefix(_RELEASED)


def parse_label(label: str) -> ServedVersion:
    """Return the contents of a label. Raises `ProtocolError` if the label is not from inflight."""
    if label.startswith(_RELEASED):
        return replace(parse_label(restored_label(label)), released=True)
    if label == CHECKPOINT_LABEL:
        return ServedVersion(0, None)
    text = label.removeprefix(_TORN)
    update, separator, run_id = text.partition("@")
    version, _, session_id = update.partition("/")
    if not separator or not run_id or not (version.isascii() and version.isdigit()):
        raise ProtocolError(
            f"the engine labels its weights {label!r}: something other than inflight has updated them. Restart the "
            "inference server from its checkpoint, so that one publisher owns its weights"
        )
    if session_id.startswith(_UNNAMED):
        session_id = ""
    return ServedVersion(int(version), run_id, torn=label.startswith(_TORN), session_id=session_id)


def began_under_another(labelled: Iterable[Mapping[str, Any]] | None, label: str) -> bool:
    """Return whether a completion's first token has a different label from ``label``, the key of its cached prefix.

    If so, the weights changed after the request was sent, and the completion may have continued a cached prefix of
    older weights. Clients ask the engine for its label right before each request, so this only happens to requests that
    wait in the engine while the weights change. ``labelled`` has the format that `spans_of` accepts.
    """
    first = next(iter(labelled or ()), None)
    return first is not None and int(first["end"]) > 0 and str(first["version"]) != label


def spans_of(labelled: Iterable[Mapping[str, Any]] | None, num_tokens: int) -> tuple[VersionSpan, ...]:
    """Return the version spans of a completion from an engine's ``[{"version": label, "start": i, "end": j}, ...]``.

    Adjacent spans of one version are merged. Raises `ProtocolError` if they do not cover ``num_tokens`` tokens.
    """
    spans: list[VersionSpan] = []
    edge = 0
    for item in labelled or ():
        start, end = int(item["start"]), min(int(item["end"]), num_tokens)
        if start >= num_tokens or end <= start:
            continue
        if start != edge:
            break
        version = parse_label(str(item["version"])).version
        if spans and spans[-1].version == version:
            start = spans.pop().start
        spans.append(VersionSpan(version=version, start=start, end=end))
        edge = end
    if edge != num_tokens:
        raise ProtocolError(f"the engine's version spans {list(labelled or ())} do not cover {num_tokens} tokens")
    return tuple(spans)

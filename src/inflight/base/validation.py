"""Brief descriptions of pydantic's validation errors: the location, the reason and the offending value."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from inflight.base.unknown_names import nearest_names

_MAX_LISTED = 100
"""Maximum number of problems described for one value, apart from unknown keys."""
_MAX_SHOWN = 5
_MAX_VALUE = 80
_MAX_MESSAGE = 300

_TYPE = re.compile(r"str|int|float|bool|constrained-\w+|(tuple|list|dict|union|literal|nullable|function-\w+)\[.*\]")
"""How pydantic names the types of a union in the location of a problem."""

_SECRET = re.compile(r"token|secret|password|key", re.IGNORECASE)
"""Names of keys whose values are not shown."""

_values = reprlib.Repr()
_values.maxstring = _values.maxother = _values.maxlong = _MAX_VALUE


def describe_problems(error: ValidationError, kind: type[BaseModel] | None = None) -> str:
    """Return the key, reason and value of the first few problems, in at most about 2,500 characters.

    If ``kind`` is given, the text suggests the nearest known key for an unknown one, or lists all known keys if none is
    similar.
    """
    if error.error_count() > _MAX_LISTED:
        return f"{error.error_count()} keys in it are unknown, missing or of the wrong type"
    reasons: dict[str, list[str]] = {}
    values: dict[str, str] = {}
    earlier: list[tuple[int | str, ...]] = []
    for problem in error.errors(include_url=False, include_context=False):
        where = problem["loc"]
        # pydantic also reports a sequence that ends at an invalid element as too short.
        if not any(where == it[: len(where)] for it in earlier):
            subject, value = _subject(problem, kind)
            words = reasons.setdefault(subject, [])
            values.setdefault(subject, value)
            if (said := _reason(problem, kind, is_first=not words)) not in words:
                words.append(said)
        earlier.append(where)
        if len(reasons) == _MAX_SHOWN:
            break
    return "; ".join(f"{subject}{', or '.join(words)}{values[subject]}" for subject, words in reasons.items())


def _subject(problem: ErrorDetails, kind: type[BaseModel] | None) -> tuple[str, str]:
    """Return the parts of a problem's description that precede and follow the reason."""
    where = [str(part) for part in problem["loc"]]
    is_unknown = problem["type"] == "extra_forbidden"
    path = _cut(".".join(part for part in where if is_unknown or not _TYPE.fullmatch(part)), _MAX_VALUE)
    if is_unknown:
        known = "" if kind is None else _known_instead(kind, where)
        value = "" if _SECRET.search(where[-1]) else f" (got {_values.repr(problem['input'])})"
        return f"unknown key {path!r}", f"{known}{value}"
    if problem["type"] == "missing":
        return f"key {path!r} is missing", ""
    # A check of a whole section itself names the offending values, and tokens stay secret.
    is_of_section = problem["type"] == "value_error" and isinstance(problem["input"], Mapping)
    is_hidden = is_of_section or (where[-1:] == ["token"])
    return f"{path}: " if path else "", "" if is_hidden else f" (got {_values.repr(problem['input'])})"


def _reason(problem: ErrorDetails, kind: type[BaseModel] | None, *, is_first: bool) -> str:
    """Return a problem's message without pydantic's terms; unless it is the key's first, only the added alternative."""
    if problem["type"] in ("extra_forbidden", "missing"):
        return ""
    if problem["type"] == "model_type":
        known = {} if kind is None else _known_keys(kind, [str(part) for part in problem["loc"]])
        return _cut(
            f"this is a group of keys, not one value; its keys: {', '.join(known)}".removesuffix("; its keys: "),
            _MAX_MESSAGE,
        )
    message = problem["msg"].removeprefix("Value error, ")
    message = message.replace("Tuple should", "List should").replace(" after validation", "")
    return _cut(message if is_first else message.removeprefix("Input should be "), _MAX_MESSAGE)


def _known_instead(kind: type[BaseModel], where: Sequence[str]) -> str:
    *sections, key = where
    known = _known_keys(kind, sections)
    if sections and (elsewhere := min(_paths_of(key, kind), key=len, default=None)):
        return f"; did you mean {'.'.join(elsewhere)}?"
    if nearest := nearest_names(key, known, most=1):
        return f"; did you mean {'.'.join((*sections, nearest[0]))}?"
    return _cut(f"; known: {', '.join(known)}", _MAX_MESSAGE) if known else ""


def _known_keys(kind: type[BaseModel], sections: Sequence[str]) -> dict[str, None]:
    """Return the keys of the section at this path, in order."""
    models = [kind]
    for section in sections:
        fields = [model.model_fields[section] for model in models if section in model.model_fields]
        if fields:  # otherwise it is an index, or the tag of a union
            models = [model for field in fields for model in _models_in(field.annotation)]
    return {name: None for model in models for name in model.model_fields}


def _paths_of(key: str, kind: type[BaseModel], sections: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the paths of the keys with this name, at most two sections deep."""
    for name, field in kind.model_fields.items():
        if name == key and sections:
            yield (*sections, name)
        if len(sections) < 2:
            for model in _models_in(field.annotation):
                yield from _paths_of(key, model, (*sections, name))


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_in(part)]


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}..."

"""The contents of messages as chat templates expect them. Errors name the field of the client's request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pydantic

from inflight.base.validation import describe_problems
from inflight.environments.proxy.histories import read_arguments
from inflight.errors import InvalidRequestError
from inflight.model.images import decoded
from inflight.types import Message
from inflight.wire import ImageAddress

_MAX_SHOWN = 80


def rendered_message(message: Mapping[str, Any], number: int) -> Message:
    """Return a message as chat templates expect it, with call arguments as objects.

    The content is one string, or a list of parts if one of them is an image. Raises an `InvalidRequestError` that
    states what is wrong with message ``number``.
    """
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(f"messages.{number}.role is {role!r}, but must be a string such as 'user'")
    kept = {name: value for name, value in message.items() if value is not None}
    kept["role"] = "system" if role == "developer" else role
    kept["content"] = _content_of(message.get("content"), f"messages.{number}.content")
    calls = message.get("tool_calls")
    kept.pop("tool_calls", None)
    if calls:
        kept["tool_calls"] = [_rendered_call(call, f"messages.{number}.tool_calls") for call in _listed(calls, number)]
    return kept


def _listed(calls: Any, number: int) -> Sequence[Any]:
    if not isinstance(calls, list | tuple):
        raise InvalidRequestError(f"messages.{number}.tool_calls is a {type(calls).__name__}, but must be a list")
    return calls


def _content_of(content: Any, where: str) -> str | list[dict[str, Any]]:
    """Return one string, or a list of parts if one of them is an image."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where} is a {type(content).__name__}, but must be a string or a list of parts")
    parts = [_part_of(part, f"{where}.{index}") for index, part in enumerate(content)]
    return parts if any("text" not in part for part in parts) else "".join(part["text"] for part in parts)


def shown(value: Any) -> str:
    """Return the beginning of a value's representation, for an error message."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def image_part(url: str, field: str) -> dict[str, Any]:
    """Return an image of another dialect as an OpenAI content part. ``field`` is its path in the client's request."""
    return {"type": "image_url", "image_url": {"url": url}, "field": field}


def refuse_damaged_images(messages: Iterable[Mapping[str, Any]]) -> None:
    """Raise an `InvalidRequestError` that names the first image that cannot be decoded, if there is one."""
    for number, message in enumerate(messages):
        content = message.get("content")
        for index, part in enumerate(content if isinstance(content, list) else ()):
            if part.get("type") != "image_url":
                continue
            url = part["image_url"]["url"]
            try:
                decoded(url)
            except InvalidRequestError as error:
                cause = error.__cause__ or error
                is_other = type(cause).__name__ == "UnidentifiedImageError"
                why = "it is not a PNG, JPEG or WebP image" if is_other else str(cause)
                field = part.get("field", f"messages.{number}.content.{index}.image_url.url")
                raise InvalidRequestError(
                    f"{field} is an image that cannot be decoded: {why}. Its data URL has {len(url)} characters and "
                    f"begins with {url[:48]!r}: send the whole file in base64"
                ) from error


def _part_of(part: Any, where: str) -> dict[str, Any]:
    match part:
        case {"type": "text" | "refusal" as kind}:
            return {"type": "text", "text": text_in(part, kind, where)}
        case {"type": "image_url"}:
            return {"type": "image_url", "image_url": {"url": _image_url_in(part, where)}}
        case {"type": kind}:
            raise InvalidRequestError(f"{where} has the type {str(kind)[:80]!r}: only text and image_url are supported")
    raise InvalidRequestError(f"{where} is {shown(part)}, but must be an object with a type such as 'text'")


def text_in(part: Mapping[str, Any], name: str, where: str) -> str:
    """Return the text in a field of a part. Raises `InvalidRequestError` if it is not a string."""
    text = part.get(name)
    if not isinstance(text, str):
        raise InvalidRequestError(f"{where}.{name} is {shown(text)}, but must be a string")
    return text


def _image_url_in(part: Mapping[str, Any], where: str) -> str:
    given = part.get("image_url")
    if not isinstance(given, Mapping):
        raise InvalidRequestError(
            f"{where}.image_url is {shown(given)}, but must be an object such as {{'url': 'data:image/png;base64,...'}}"
        )
    try:
        return ImageAddress.model_validate({k: v for k, v in given.items() if k != "detail"}).url
    except pydantic.ValidationError as error:
        field = part.get("field", f"{where}.image_url")
        raise InvalidRequestError(f"{field} cannot be used: {describe_problems(error)}") from error


def _rendered_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"{where} contains {str(call)[:80]!r}: only function calls are supported")
    return {**call, "function": {**function, "arguments": read_arguments(function.get("arguments", {}))}}

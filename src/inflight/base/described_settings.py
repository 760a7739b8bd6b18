"""Descriptions of every settings field, for the reference pages and for a file with all settings."""

from __future__ import annotations

import enum
import json
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from inflight.base.toml import Section

REQUIRED, UNSET = "required", "unset"
_BOUNDS = {"ge": "at least {}", "gt": "above {}", "le": "at most {}", "lt": "below {}"}
_NAMES = {str: "string", Path: "path", bool: "boolean", int: "integer", float: "number", dict: "table"}


class DescribedField(NamedTuple):
    """One settings field, with text for its type, default and bounds."""

    name: str
    type: str
    default: str
    """The default as TOML, or `REQUIRED`, or `UNSET`."""
    bounds: str
    meaning: str

    @property
    def toml_default(self) -> str:
        """The default as TOML; empty if there is none, or if TOML cannot express it."""
        return "" if self.default in (REQUIRED, UNSET) else self.default

    @property
    def accepted(self) -> str:
        """Text that states which values the field accepts and whether it has a default."""
        facts = (self.type, self.bounds, "" if self.toml_default else self.default)
        return "; ".join(fact for fact in facts if fact)


class DescribedSection(NamedTuple):
    """One table of a configuration file. ``key`` is its dotted name, and ``header`` its header in TOML."""

    key: str
    header: str
    is_optional: bool
    """Whether leaving the table out differs from writing an empty one."""
    meaning: str
    fields: tuple[DescribedField, ...]


def describe_sections(settings: type[BaseModel], key: str = "") -> Iterator[DescribedSection]:
    """Yield the tables of a configuration file in an order that TOML accepts.

    Fields are described by their docstrings. Required fields come first.
    """
    nested = {name: it for name, field in settings.model_fields.items() if (it := _section_of(field.annotation))}
    for name, section in nested.items():
        field = settings.model_fields[name]
        path = f"{key}.{name}" if key else name
        header = f"[[{path}]]" if get_origin(field.annotation) is tuple else f"[{path}]"
        inner = [(it, of) for it, of in section.model_fields.items() if _section_of(of.annotation) is None]
        fields = sorted((_describe(*it) for it in inner), key=lambda it: it.default != REQUIRED)
        meaning = _plain(field.description) or _plain(section.__doc__)
        is_optional = not isinstance(field.annotation, type)
        yield DescribedSection(path, header, is_optional, meaning, tuple(fields))
        for further in describe_sections(section, path):
            yield further._replace(is_optional=is_optional or further.is_optional)


def _section_of(annotation: Any) -> type[Section] | None:
    """Return the settings class of a field that has its own table; None for any other field.

    Such a field has exactly one settings class. Settings with alternative classes, such as the pieces of a loss, are
    described elsewhere.
    """
    found = _sections_in(annotation)
    if len(found) == 1 and all(len(_sections_in(it.annotation)) < 2 for it in found[0].model_fields.values()):
        return found[0]
    return None


def _sections_in(annotation: Any) -> list[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [found for it in get_args(annotation) for found in _sections_in(it)]


def _describe(name: str, field: FieldInfo) -> DescribedField:
    default = REQUIRED if field.is_required() else to_toml(field.get_default(call_default_factory=True))
    return DescribedField(name, type_text(field.annotation), default, _bounds(field), _plain(field.description))


def type_text(annotation: Any) -> str:
    """Return the types that a field accepts, in TOML's terms. None is omitted because TOML has no such value."""
    origin, of = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_text(of[0])
    if origin is Literal:
        return " or ".join(json.dumps(it) for it in of)
    if origin in (types.UnionType, Union):
        return " or ".join(dict.fromkeys(type_text(it) for it in of if it is not type(None)))
    if origin is tuple:
        return f"list of {type_text(of[0])}s"
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return " or ".join(json.dumps(it.value) for it in annotation)
    return _NAMES.get(origin or annotation, "table")


def _bounds(field: FieldInfo) -> str:
    found = {name: getattr(it, name) for it in field.metadata for name in _BOUNDS if hasattr(it, name)}
    return ", ".join(_BOUNDS[name].format(f"{value:g}" if value < 1e6 else value) for name, value in found.items())


def to_toml(value: Any) -> str:
    """Return the value of a setting as TOML, or `UNSET` for None."""
    if value is None:
        return UNSET
    if isinstance(value, enum.Enum):
        return json.dumps(value.value)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {to_toml(it)}" for key, it in value.items()) + " }" if value else "{}"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(to_toml, value))}]"
    return json.dumps(value if isinstance(value, (bool, int, float)) else str(value))


def _plain(text: str | None) -> str:
    """Return a docstring as one line of Markdown that says "unset" for values that TOML cannot express."""
    return " ".join((text or "").replace("``", "`").replace("None: ", "Unset: ").split())

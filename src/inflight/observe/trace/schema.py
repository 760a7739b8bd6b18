"""The schema of events for other programs: a JSON Schema, and the tables of docs/events.md.

``python -m inflight.observe.trace.schema`` prints the JSON Schema of one line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel

from inflight.observe.trace.events import ANY_EVENT, SCHEMA_VERSION, AnyEvent, Event, SampledPart


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of one line of a run's event and step files."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"Event of an inflight run, schema {SCHEMA_VERSION}",
        **ANY_EVENT.json_schema(),
    }


def markdown() -> str:
    """Return a section with a table for every kind of event."""
    union, *_ = get_args(AnyEvent)
    sections = [section for model in get_args(union) for section in _section(model)]
    return "\n\n".join([*sections, *_section(SampledPart)])


def _section(model: type[BaseModel]) -> Iterator[str]:
    kinds = get_args(model.model_fields["kind"].annotation) if issubclass(model, Event) else (model.__name__,)
    yield "### " + ", ".join(f"`{kind}`" for kind in kinds)
    yield _plain(model.__doc__ or "")
    fields = [name for name in model.model_fields if name not in Event.model_fields]
    if fields:
        rows = (f"| `{name}` | {_kind_of(model, name)} | {_meaning_of(model, name)} |" for name in fields)
        yield "\n".join(["| field | type | |", "|---|---|---|", *rows])


def _kind_of(model: type[BaseModel], name: str) -> str:
    """Return a type as written in the source."""
    return "`" + str(model.__annotations__[name]).replace("|", "\\|") + "`"


def _meaning_of(model: type[BaseModel], name: str) -> str:
    return _plain(model.model_fields[name].description or "")


def _plain(text: str) -> str:
    """Return a docstring as one line of Markdown."""
    return " ".join(text.replace("``", "`").split())


def main() -> None:
    """Print the JSON Schema."""
    print(json.dumps(json_schema(), indent=2, sort_keys=True))


if __name__ == "__main__":
    main()

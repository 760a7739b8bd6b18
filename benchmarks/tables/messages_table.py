"""The fields of the inference contract's messages, for docs/contract.md."""

from __future__ import annotations

from typing import Any

from inflight import wire

MESSAGES = (
    *(wire.Capabilities, wire.GenerateRequest, wire.SamplingParams, wire.PromptImage, wire.GenerateResponse),
    *(
        wire.Completion,
        wire.VersionSpan,
        wire.CompletionChunk,
        wire.DraftCounts,
        wire.RoutedExperts,
        wire.AbortRequests,
    ),
    *(
        wire.ScoreRequest,
        wire.ScoreResponse,
        wire.ProcessGroupSpec,
        wire.DirectorySpec,
        wire.HttpFileSpec,
        wire.IpcSpec,
    ),
    *(wire.WeightUpdate, wire.Manifest, wire.TensorSpec, wire.LoraSpec, wire.Sharding, wire.BucketSpec),
    *(wire.BucketTransfer, wire.SentBytes, wire.UpdateRef, wire.WeightVersion, wire.UpdateTimings),
)


def messages_table() -> str:
    """Return one row for each message: its fields with their types, and defaults where they may be left out."""
    lines = ["| message | fields |", "|---|---|"]
    for message in MESSAGES:
        schema = message.model_json_schema()
        schema = schema["$defs"][message.__name__] if "$ref" in schema else schema  # its fields refer to itself
        fields = []
        for name, field in schema.get("properties", {}).items():
            default = "" if name in schema.get("required", ()) else f" = {_default(field)}"
            fields.append(f"`{name}: {_type(field)}{default}`")
        lines.append(f"| {message.__name__} | {', '.join(fields)} |")
    return "\n".join(lines)


def _default(field: dict[str, Any]) -> str:
    is_map = isinstance(field.get("additionalProperties"), dict)  # its default is made by a factory
    value = field.get("default", {} if is_map else "")
    named = {None: "none", "": '""'}
    return "{}" if isinstance(value, dict) else "[]" if value == [] else str(named.get(value, value)).lower()


def _type(field: dict[str, Any]) -> str:
    if "$ref" in field:
        return str(field["$ref"]).rsplit("/", 1)[-1]
    if "enum" in field or "const" in field:
        return " or ".join(map(str, field.get("enum", [field.get("const")])))
    for choices in ("anyOf", "oneOf"):
        if choices in field:
            return " or ".join(_type(it) for it in field[choices] if it.get("type") != "null")
    if field.get("type") == "array":
        items = field.get("items") or {"type": "any"}
        of = [_type(it) for it in field["prefixItems"]] if "prefixItems" in field else [_type(items), "..."]
        return f"[{', '.join(of)}]"
    if isinstance(of_each := field.get("additionalProperties"), dict):
        return f"{{str: {_type(of_each)}, ...}}"
    return {"integer": "int", "number": "float", "string": "str", "boolean": "bool"}.get(field.get("type", ""), "any")

"""The protobuf messages of Tinker's API, package ``tinker_public``, built from a table when they are first used.

Bytes fields that hold numbers are little-endian and in C order.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from inflight.errors import InvalidRequestError

CONTENT_TYPE = "application/x-protobuf"
_PACKAGE = "inflight_tinker_public"
"""Differs from the SDK's name, because a process has only one pool of descriptors."""

_ENUMS = {"DType": ("unspecified", "float32", "int64", "int32", "bfloat16"), "StopReason": ("stop", "length")}
_MESSAGES: dict[str, str] = {
    "ForwardBackwardRequest": """
        model_id=1 string, seq_id=2 int32, data=3 repeated Datum, loss_fn=4 string, loss_fn_config=5 map double,
        forward_only=6 bool, loss_fn_config_v2=7 map LossConfigValue
    """,
    "LossConfigValue": "number=1 oneof:value double, text=2 oneof:value string",
    "Datum": """
        model_input=1 repeated Chunk, loss_fn_inputs=2 map Tensor, model_input_spans=3 repeated ProvenanceSpan,
        loss_fn_input_spans=4 repeated ProvenanceSpan
    """,
    "Chunk": "encoded_text=1 oneof:chunk EncodedText, image=2 oneof:chunk Image, dmel=3 oneof:chunk Dmel",
    "EncodedText": "tokens=1 bytes",
    "Image": "data=1 bytes, format=2 string, expected_tokens=3 optional int32",
    "Dmel": "dmel=1 bytes",
    "Tensor": """
        dense=1 oneof:encoding bytes, sparse_csr=2 oneof:encoding SparseCsr, dtype=3 DType, shape=4 repeated int64
    """,
    "SparseCsr": "values=1 bytes, crow_indices=2 bytes, col_indices=3 bytes",
    "ProvenanceSpan": "prompt_tokens=1 oneof:source TokenSpan, sampled_tokens=2 oneof:source TokenSpan",
    "TokenSpan": "sequence_id=1 string, offset=2 int64, length=3 int64",
    "ForwardBackwardOutput": """
        loss_fn_output_type=1 string, loss_fn_outputs=2 repeated ArrayRecord, metrics=3 map double
    """,
    "ArrayRecord": "type_tag=1 string, fields=2 map BatchedTensor, num_datums=3 int32",
    "BatchedTensor": "data=1 bytes, offsets=2 bytes, dtype=3 DType, trailing_shape=4 repeated int64",
    "SampleResponse": """
        sequences=1 repeated SampledSequence, prompt_logprobs=2 optional bytes,
        topk_prompt_logprobs=3 optional TopkLogprobs, prompt_cache_hit_tokens=4 int32,
        target_prompt_logprobs=5 optional Tensor
    """,
    "SampledSequence": """
        stop_reason=1 StopReason, tokens=2 bytes, logprobs=3 optional bytes,
        topk_sampled_logprobs=4 optional TopkLogprobs, version_spans=1000 repeated VersionSpan
    """,
    "VersionSpan": "version=1 int64, start=2 int64, end=3 int64",
    "TopkLogprobs": "token_ids=1 bytes, logprobs=2 bytes, k=3 uint32, length=4 uint32",
}
"""Each field is written as its name, number, labels and type. The keys of maps are strings. ``version_spans`` is an
inflight extension that the SDK ignores.
"""
_DType = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "string": _DType.TYPE_STRING,
    "bytes": _DType.TYPE_BYTES,
    "int32": _DType.TYPE_INT32,
    "int64": _DType.TYPE_INT64,
    "uint32": _DType.TYPE_UINT32,
    "double": _DType.TYPE_DOUBLE,
    "bool": _DType.TYPE_BOOL,
}


@functools.cache
def messages() -> Any:
    """Return the message classes as attributes."""
    file = descriptor_pb2.FileDescriptorProto(name=f"{_PACKAGE}.proto", package=_PACKAGE, syntax="proto3")
    for name, values in _ENUMS.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=f"{name.upper()}_{value.upper()}", number=number)
    for name, fields in _MESSAGES.items():
        _add_message(file.message_type.add(name=name), fields)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    find = pool.FindMessageTypeByName
    return SimpleNamespace(**{it: message_factory.GetMessageClass(find(f"{_PACKAGE}.{it}")) for it in _MESSAGES})


def _add_message(message: Any, fields: str) -> None:
    oneofs: dict[str, int] = {}
    for words in (field.split() for field in fields.split(",")):
        (name, number), kind = words[0].split("="), words[-1]
        labels = words[1:-1]
        field = message.field.add(name=name, number=int(number), label=_DType.LABEL_OPTIONAL)
        if "map" in labels:
            entry = message.nested_type.add(name="".join(part.title() for part in name.split("_")) + "Entry")
            entry.options.map_entry = True
            _set_type(entry.field.add(name="key", number=1, label=_DType.LABEL_OPTIONAL), "string")
            _set_type(entry.field.add(name="value", number=2, label=_DType.LABEL_OPTIONAL), kind)
            field.label, field.type = _DType.LABEL_REPEATED, _DType.TYPE_MESSAGE
            field.type_name = f".{_PACKAGE}.{message.name}.{entry.name}"
            continue
        _set_type(field, kind)
        if "repeated" in labels:
            field.label = _DType.LABEL_REPEATED
        for group in [it.removeprefix("oneof:") for it in labels if it.startswith("oneof:")]:
            if group not in oneofs:
                oneofs[group] = len(oneofs)
                message.oneof_decl.add(name=group)
            field.oneof_index = oneofs[group]
    # The oneofs of optional scalars come after the real ones.
    for field in message.field:
        if "optional" in _labels_of(fields, field.name) and field.type != _DType.TYPE_MESSAGE:
            field.proto3_optional = True
            field.oneof_index = len(message.oneof_decl)
            message.oneof_decl.add(name=f"_{field.name}")


def _labels_of(fields: str, name: str) -> list[str]:
    return next(words[1:-1] for words in map(str.split, fields.split(",")) if words[0].partition("=")[0] == name)


def _set_type(field: Any, kind: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
        return
    field.type = _DType.TYPE_ENUM if kind in _ENUMS else _DType.TYPE_MESSAGE
    field.type_name = f".{_PACKAGE}.{kind}"


def parse(name: str, content: bytes) -> Any:
    """Parse bytes as the message with this name. Raises `InvalidRequestError` if they are not such a message."""
    message = getattr(messages(), name)()
    try:
        message.ParseFromString(content)
    except DecodeError as error:
        raise InvalidRequestError(f"the body is not a {name}: {error}") from error
    return message

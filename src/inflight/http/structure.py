"""Limits on the structure of a JSON body: parsing a list or object takes a hundred times the memory of its brackets.

Brackets, commas and quotes are counted before the body is parsed. Those within strings are excluded only if the total
is high.
"""

from __future__ import annotations

_MOST_CONTAINERS = 2048
_BYTES_OF_CONTAINER = 1024
"""A route allows one more list or object for each of this many bytes of its body limit."""
_MOST_VALUES = 16 * 1024
_BYTES_OF_VALUE = 16
"""A route allows one more value for each of this many bytes of its body limit. Body limits allow as many bytes for each
token id.
"""
_MOST_TEXTS = 4096
_TEXTS_OF_CONTAINER = 16
"""Number of additional strings, including the keys of objects, that are allowed per list or object."""


def check_structure(content: bytes, max_body_bytes: int) -> None:
    """Raise ``ValueError`` if a body has more lists, objects or values than a route with this body limit needs."""
    most = _MOST_CONTAINERS + max_body_bytes // _BYTES_OF_CONTAINER
    most_values = _MOST_VALUES + max_body_bytes // _BYTES_OF_VALUE
    is_small = _num_containers(content) <= most and content.count(b",") <= most_values
    if is_small and content.count(b'"') <= 2 * _MOST_TEXTS:
        return
    bare = content.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_texts = bare.count(b'"') // 2
    if num_texts > _MOST_TEXTS + _TEXTS_OF_CONTAINER * most:  # splitting it would take too long
        raise ValueError(f"it has {num_texts} strings and keys, more than any request needs")
    outside = b" ".join(bare.split(b'"')[::2])
    num_containers, num_values = _num_containers(outside), outside.count(b",")
    if num_containers > most:
        raise ValueError(f"it has {num_containers} lists and objects, but at most {most} are allowed")
    if num_values > most_values:
        raise ValueError(f"it has {num_values} values, but at most {most_values} are allowed")
    if num_texts > (allowed := _MOST_TEXTS + _TEXTS_OF_CONTAINER * num_containers):
        raise ValueError(
            f"it has {num_texts} strings and keys, but at most {allowed} are allowed in {num_containers} lists and "
            "objects"
        )


def _num_containers(content: bytes) -> int:
    return content.count(b"[") + content.count(b"{")

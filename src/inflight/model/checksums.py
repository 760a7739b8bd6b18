"""Checksums of the files of a trainer's checkpoint, with which damaged weights are detected when they are loaded.

``trainer.json`` contains the XXH3 checksum of every 64 MiB of each file with tensors, so that ranks can share the work.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import xxhash

from inflight.errors import ConfigError

TRAINER = "trainer.json"
CHECKSUMS = "checksums"
_CHUNK_BYTES = 64 << 20
_MASK = (1 << 63) - 1
"""Cuts a checksum to 63 bits, so that it fits in a signed 64-bit integer."""


def checksums_of(file: Path, rank: int = 0, world_size: int = 1) -> list[int]:
    """Return the checksum of each 64 MiB of a file; 0 for the parts of other ranks."""
    found = []
    with file.open("rb") as content:
        for index in range(-(-file.stat().st_size // _CHUNK_BYTES)):
            if index % world_size != rank:
                found.append(0)
                continue
            content.seek(index * _CHUNK_BYTES)
            found.append(xxhash.xxh3_64_intdigest(content.read(_CHUNK_BYTES)) & _MASK)
    return found


def check_file(file: Path, expected: Sequence[int], rank: int = 0, world_size: int = 1) -> None:
    """Raise ``ValueError`` if this rank's part of a file does not have the checksums that were saved with it."""
    found = checksums_of(file, rank, world_size)
    if len(found) != len(expected):
        raise ValueError(f"{file.name} is damaged: it has {len(found)} parts of 64 MiB, but {len(expected)} were saved")
    for index in range(rank, len(found), world_size):
        if found[index] != expected[index]:
            begin = index * _CHUNK_BYTES
            end = min(begin + _CHUNK_BYTES, file.stat().st_size)
            raise ValueError(f"{file.name} is damaged: bytes {begin} to {end - 1} differ from those that were saved")


def checksums_in(path: Path) -> Mapping[str, Sequence[int]]:
    """Return the checksums of each file of a checkpoint; empty if the directory contains no checksums.

    Raises ``ValueError`` if they cannot be read.
    """
    if not (path / TRAINER).is_file():
        return {}
    stored = json.loads((path / TRAINER).read_text())
    checksums = stored.get(CHECKSUMS, {}) if isinstance(stored, dict) else None
    if not isinstance(checksums, dict) or not all(isinstance(it, list) for it in checksums.values()):
        raise ValueError(f"the checksums in {TRAINER} are not lists of numbers by file")
    return checksums


def check_checkpoint(path: Path, *, only_weights: bool = False) -> None:
    """Raise `ConfigError` if a file in a directory does not match the checksums that a trainer saved there.

    A directory without checksums passes.

    With ``only_weights``, files in subdirectories, such as the optimizer's, are not checked.
    """
    try:
        for name, expected in checksums_in(path).items():
            if not (only_weights and "/" in name):
                check_file(path / name, expected)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the checkpoint {str(path)!r} is damaged or cannot be read: {error}") from error

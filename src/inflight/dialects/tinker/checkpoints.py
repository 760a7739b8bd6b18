"""Checkpoints in a directory of the server, found by their Tinker paths, ``tinker://MODEL/KIND/NAME``."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, unquote

from inflight.base.whole_files import write_whole
from inflight.dialects.tinker.futures import NotFoundError
from inflight.errors import CheckpointError, InvalidRequestError

Kind = Literal["weights", "sampler_weights"]
KINDS: tuple[Kind, ...] = ("weights", "sampler_weights")
_TYPES = {"weights": "training", "sampler_weights": "sampler"}
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}", re.ASCII)
_FACTS = "tinker.json"


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """The record of one checkpoint; it is written last, so a directory without it is incomplete."""

    base_model: str
    lora_rank: int
    """The rank of the LoRA; 0 means that all weights are trained."""
    saved_at: float
    user_metadata: Mapping[str, Any] | None = None
    expires_at: float | None = None


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A complete checkpoint."""

    model_id: str
    kind: Kind
    name: str
    path: Path
    facts: CheckpointFacts

    @property
    def tinker_path(self) -> str:
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"

    def as_json(self) -> dict[str, Any]:
        """Return the checkpoint's entry in a list of checkpoints."""
        return {
            "checkpoint_id": f"{self.kind}/{self.name}",
            "checkpoint_type": _TYPES[self.kind],
            "time": iso_time(self.facts.saved_at),
            "tinker_path": self.tinker_path,
            "size_bytes": sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file()),
            "public": False,
            "user_metadata": self.facts.user_metadata,
            "expires_at": None if self.facts.expires_at is None else iso_time(self.facts.expires_at),
        }


def iso_time(seconds: float) -> str:
    """Return a time in the API's format."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


class CheckpointStore:
    """The checkpoints below a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def place(self, model_id: str, kind: Kind, name: str, *, overwrite: bool) -> Path:
        """Return where to save a checkpoint, after removing the record of any earlier one there.

        Raises `InvalidRequestError` for a name that is invalid or, unless ``overwrite``, already taken.
        """
        if not _NAME.fullmatch(name):
            raise InvalidRequestError(
                f"{name!r} cannot be the name of a checkpoint: use at most 200 letters, digits, underscores, hyphens "
                "and dots, and do not begin with a dot"
            )
        path = self._path(model_id, kind, name)
        if not overwrite and self._read(model_id, kind, name) is not None:
            raise InvalidRequestError(
                f"the checkpoint tinker://{model_id}/{kind}/{name} already exists; choose another name, or overwrite it"
            )
        (path / _FACTS).unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def complete(self, path: Path, facts: CheckpointFacts) -> None:
        """Record that the checkpoint at ``path`` is complete.

        Raises `CheckpointError` if the record cannot be written.
        """
        try:
            write_whole(path / _FACTS, json.dumps(asdict(facts)))
        except OSError as error:
            raise CheckpointError(f"{_FACTS} cannot be written to {path}: {error.strerror}") from error

    def find(self, tinker_path: str) -> StoredCheckpoint:
        """Return a checkpoint.

        Raises `NotFoundError` if there is none at the path, and `InvalidRequestError` for an invalid path.
        """
        model_id, _, rest = tinker_path.removeprefix("tinker://").partition("/")
        kind, _, name = rest.partition("/")
        if not tinker_path.startswith("tinker://") or kind not in KINDS or not _NAME.fullmatch(name):
            raise InvalidRequestError(
                f"{tinker_path!r} is not the path of a checkpoint: tinker://MODEL/weights/NAME or "
                "tinker://MODEL/sampler_weights/NAME"
            )
        found = self._read(model_id, KINDS[KINDS.index(kind)], name)
        if found is None:
            raise NotFoundError(f"there is no checkpoint {tinker_path}")
        return found

    def of_model(self, model_id: str) -> list[StoredCheckpoint]:
        """Return the checkpoints of a model, oldest first."""
        return sorted(self._of(model_id), key=lambda it: it.facts.saved_at)

    def model_ids(self) -> list[str]:
        """Return the ids of the models that have a directory, whether or not it holds a checkpoint."""
        if not self._directory.is_dir():
            return []
        return sorted(unquote(path.name) for path in self._directory.iterdir() if path.is_dir())

    def delete(self, checkpoint: StoredCheckpoint) -> None:
        """Delete a checkpoint."""
        (checkpoint.path / _FACTS).unlink(missing_ok=True)
        shutil.rmtree(checkpoint.path, ignore_errors=True)

    def delete_expired(self) -> None:
        """Delete the checkpoints that have expired. `find` has already stopped returning them."""
        for model_id in self.model_ids():
            for checkpoint in self._of(model_id, has_expired=True):
                self.delete(checkpoint)

    def set_ttl(self, checkpoint: StoredCheckpoint, ttl_seconds: int | None) -> None:
        """Record when a checkpoint expires; None means never."""
        expires_at = None if ttl_seconds is None else time.time() + ttl_seconds
        facts = {**asdict(checkpoint.facts), "expires_at": expires_at}
        self.complete(checkpoint.path, CheckpointFacts(**facts))

    def _path(self, model_id: str, kind: Kind, name: str) -> Path:
        return self._directory / quote(model_id, safe="").replace(".", "%2E") / kind / name

    def _of(self, model_id: str, *, has_expired: bool = False) -> Iterator[StoredCheckpoint]:
        for kind in KINDS:
            parent = self._path(model_id, kind, "x").parent
            for path in sorted(parent.iterdir()) if parent.is_dir() else ():
                if (found := self._read(model_id, kind, path.name, has_expired=has_expired)) is not None:
                    yield found

    def _read(self, model_id: str, kind: Kind, name: str, *, has_expired: bool = False) -> StoredCheckpoint | None:
        path = self._path(model_id, kind, name)
        try:
            facts = CheckpointFacts(**json.loads((path / _FACTS).read_text()))
        except (OSError, ValueError, TypeError):
            return None
        if has_expired != (facts.expires_at is not None and facts.expires_at < time.time()):
            return None
        return StoredCheckpoint(model_id, kind, name, path, facts)

"""Checkpoints in the directory of a server of Tinker's API."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from inflight.dialects.tinker.checkpoints import CheckpointFacts, CheckpointStore
from inflight.dialects.tinker.futures import NotFoundError
from inflight.errors import InvalidRequestError


def save(store: CheckpointStore, name: str, expires_at: float | None = None, *, overwrite: bool = False) -> Path:
    path = store.place("model", "weights", name, overwrite=overwrite)
    path.mkdir(exist_ok=True)
    (path / "model.safetensors").touch()
    store.complete(path, CheckpointFacts("tiny", 8, time.time(), expires_at=expires_at))
    return path


def test_an_expired_checkpoint_is_not_found_and_deleted(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    kept, expired = save(store, "kept", time.time() + 60), save(store, "expired", time.time() - 1)
    assert [it.name for it in store.of_model("model")] == ["kept"]
    with pytest.raises(NotFoundError, match="there is no checkpoint"):
        store.find("tinker://model/weights/expired")
    store.delete_expired()
    assert kept.exists() and not expired.exists()


def test_only_the_name_of_an_expired_checkpoint_is_free(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, "a", time.time() - 1)
    save(store, "a")
    with pytest.raises(InvalidRequestError, match="exists; choose another name"):
        save(store, "a")
    save(store, "a", overwrite=True)
    store.delete_expired()
    assert [it.name for it in store.of_model("model")] == ["a"]


@pytest.mark.parametrize(
    ("name", "is_name"),
    [
        *((name, True) for name in ("0000", "_a", "-a", "a.b-c_1", "x" * 200)),
        *((name, False) for name in ("", ".", "..", ".a", "a/b", "a b", "été", "x" * 201)),
    ],
)
def test_names_of_checkpoints_are_plain_names_of_files(tmp_path: Path, name: str, is_name: bool) -> None:
    store = CheckpointStore(tmp_path)
    if is_name:
        save(store, name)
        assert store.find(f"tinker://model/weights/{name}").name == name
    else:
        with pytest.raises(InvalidRequestError, match="use at most 200 letters, digits, underscores, hyphens and dots"):
            save(store, name)

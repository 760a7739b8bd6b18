"""Checkpoints of a sharded trainer: a Hugging Face directory with optimizer states and counters.

They consist of safetensors and JSON files only. Every rank writes its own parts to the files that rank 0 has created,
and reads its own parts back, so all ranks need access to the directory. Only parameters that are stored as several
tensors are gathered, one at a time.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from inflight.base.shortened import shortened
from inflight.errors import CheckpointError
from inflight.model.checksums import CHECKSUMS, TRAINER, check_file, checksums_in, checksums_of
from inflight_fsdp.agreement import first_failure
from inflight_fsdp.layout import ShardedTensor
from inflight_fsdp.sharding import gather_on_first, local_part, runs_of

_EDITION = 1
_WEIGHTS = "model.safetensors"
_OPTIMIZER = "trainer/optimizer.safetensors"
"""In a separate directory, because inference servers read every safetensors file next to config.json as weights."""
_LORA, _LORA_CONFIG = "adapter/adapter_model.safetensors", "adapter/adapter_config.json"
_COPIED = (
    *("generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.*", "merges.txt", "*.model", "chat_template*"),
)
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TrainerState:
    """Everything that a checkpoint holds: sharded tensors, counters, and the model's files."""

    weights: Sequence[ShardedTensor]
    optimizer: Sequence[ShardedTensor]
    version: int
    optimizer_steps: int
    model_config: str
    """The text of config.json."""
    model_path: Path
    """The directory that tokenizer files are copied from."""
    device: torch.device
    """The device that ranks communicate from; the shards may be on a different device."""
    lora: Sequence[ShardedTensor] = ()
    """The LoRA, if one is trained. In that case, the weights are written but not read."""
    lora_config: str = ""
    """The text of the LoRA's adapter_config.json, in PEFT's format."""

    @property
    def files(self) -> Sequence[tuple[str, Sequence[ShardedTensor]]]:
        """The name and the tensors of each file that holds tensors."""
        files = ((_WEIGHTS, self.weights), (_LORA, self.lora), (_OPTIMIZER, self.optimizer))
        return [(name, tensors) for name, tensors in files if tensors]


def save_checkpoint(path: Path, state: TrainerState, group: dist.ProcessGroup | None = None) -> None:
    """Write a checkpoint at ``path``, replacing an earlier one once the new one is complete; collective.

    Ranks communicate over ``group``, which contains all ranks; None means the default group. If the save fails, every
    rank raises `CheckpointError`, and an earlier checkpoint at ``path`` is still complete.
    """
    path = path.absolute()
    fresh = path.with_name(f".{path.name}.new")
    failure: str | None = None
    device = state.device
    files = state.files
    checksums: dict[str, list[int]] = {}
    is_writer = dist.get_rank() == 0
    if is_writer:
        try:
            _prepare(path, fresh, state)
            for name, tensors in files:
                _reserve(fresh / name, tensors)
        except OSError as error:
            failure = _reason(error)
    failure = first_failure(failure, device, group)
    for name, tensors in files:
        if failure is None:
            failure = first_failure(_write_own(fresh / name, tensors, device, group), device, group)
        if failure is None:
            checksums[name], failure = _checksums_of(fresh / name, device, group)
    own: str | None = None
    if is_writer and failure is None:
        try:
            counters = {"edition": _EDITION, "version": state.version, "optimizer_steps": state.optimizer_steps}
            _write_file(fresh / TRAINER, json.dumps({**counters, CHECKSUMS: checksums}) + "\n")
            _put_in_place(fresh, path)
        except OSError as error:
            own = _reason(error)
    if is_writer and (failure or own) is not None:
        shutil.rmtree(fresh, ignore_errors=True)
    own = first_failure(own, device, group)  # also after a failure, to wait until rank 0 has cleaned up
    failure = failure or own
    if failure is not None:
        raise CheckpointError(f"no checkpoint was written to {path}: {failure}; an earlier checkpoint there is intact")


def load_checkpoint(path: Path, state: TrainerState) -> tuple[int, int]:
    """Fill the shards of a state from a checkpoint; return its version and number of optimizer steps; collective.

    Raises `CheckpointError` on every rank, with nothing loaded, if a file or a tensor is missing or does not fit.
    """
    path = path.absolute()
    source = _previous_path(path) if _previous_path(path).exists() and not path.exists() else path
    failure: str | None = None
    counters: dict[str, int] = {}
    staged: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        counters = _read_counters(source)
        if state.lora_config:
            _check_lora(source / _LORA_CONFIG, state.lora_config)
        checksums = checksums_in(source)
        for name, tensors in state.files:
            if name in checksums:
                check_file(source / name, checksums[name], dist.get_rank(), dist.get_world_size())
            staged += _read_shards(source / name, tensors)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        failure = _reason(error)
    failure = first_failure(failure, state.device)
    if failure is not None:
        raise CheckpointError(f"nothing was loaded from {path}: {failure}")
    with torch.no_grad():
        for shard, stored in staged:
            shard.copy_(stored)
    return counters["version"], counters["optimizer_steps"]


def _prepare(path: Path, fresh: Path, state: TrainerState) -> None:
    """Create the directory to write to, with every file that does not hold tensors."""
    if path.exists() and not (path / TRAINER).is_file() and not (path.is_dir() and not any(path.iterdir())):
        raise FileExistsError(
            "the path exists but is not a checkpoint that a worker saved; move it or choose another path"
        )
    shutil.rmtree(fresh, ignore_errors=True)
    (fresh / _OPTIMIZER).parent.mkdir(parents=True)
    _write_file(fresh / "config.json", state.model_config)
    if state.lora_config:
        (fresh / _LORA).parent.mkdir()
        _write_file(fresh / _LORA_CONFIG, state.lora_config)
    for file in sorted({file for pattern in _COPIED for file in state.model_path.glob(pattern) if file.is_file()}):
        _write_file(fresh / file.name, file.read_bytes())


def _put_in_place(fresh: Path, path: Path) -> None:
    """Move an earlier checkpoint aside, rename ``fresh`` to ``path``, and delete the earlier checkpoint.

    If the process dies between the two renames, `load_checkpoint` finds the earlier checkpoint.
    """
    retired = _previous_path(path)
    for directory in sorted({file.parent for file in fresh.rglob("*") if file.is_file()}):
        _sync_directory(directory)
    if path.exists():
        shutil.rmtree(retired, ignore_errors=True)
        path.rename(retired)
    try:
        fresh.rename(path)
    except OSError:
        if retired.exists():
            retired.rename(path)
        raise
    _sync_directory(path.parent)
    shutil.rmtree(retired, ignore_errors=True)


def _reserve(file: Path, tensors: Sequence[ShardedTensor]) -> None:
    """Write the header of a safetensors file, and extend the file to the size of its tensors."""
    header, offsets = _header(tensors)
    with file.open("wb") as out:
        out.write(header)
        out.truncate(len(header) + offsets[None])


def _write_own(
    file: Path, tensors: Sequence[ShardedTensor], device: torch.device, group: dist.ProcessGroup | None
) -> str | None:
    """Write this rank's part of each tensor at its offset in the file; return the failure, if any; collective."""
    header, offsets = _header(tensors)
    failure, descriptor = None, -1
    try:
        descriptor = os.open(file, os.O_WRONLY)
    except OSError as error:
        failure = _reason(error)
    for part in tensors:
        pieces = _own_pieces(part, device, group)  # may gather: ranks that have failed still take part
        try:
            for name, first_byte, tensor in () if failure else pieces:
                content = tensor.cpu().reshape(-1).view(torch.uint8).numpy().data
                _write_at(descriptor, content, len(header) + offsets[name] + first_byte)
        except OSError as error:
            failure = _reason(error)
    if descriptor >= 0:
        try:
            os.fsync(descriptor)
        except OSError as error:
            failure = failure or _reason(error)
        finally:
            os.close(descriptor)
    return failure


def _checksums_of(file: Path, device: torch.device, group: dist.ProcessGroup | None) -> tuple[list[int], str | None]:
    """Return the checksums of a file that all ranks have written, or the failure to read it; collective."""
    found, failure = torch.zeros(0, dtype=torch.int64), None
    try:
        found = torch.tensor(checksums_of(file, dist.get_rank(), dist.get_world_size()), dtype=torch.int64)
    except OSError as error:
        failure = _reason(error)
    failure = first_failure(failure, device, group)
    if failure is None:
        found = found.to(device)
        dist.all_reduce(found, group=group)
    return found.tolist(), failure


def _write_at(descriptor: int, content: memoryview, position: int) -> None:
    while content:
        num_bytes = os.pwrite(descriptor, content, position)  # at most 2 GiB at a time
        content, position = content[num_bytes:], position + num_bytes


def _own_pieces(
    part: ShardedTensor, device: torch.device, group: dist.ProcessGroup | None
) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Return the pieces of a parameter that this rank writes.

    A piece consists of the name of a stored tensor, the position of the piece's first byte in that tensor, and
    contiguous elements. Collective if the parameter is stored as several tensors, which rank 0 then writes.
    """
    if part.layout.split is not None:
        whole = gather_on_first(part, part.local.dtype, device, group)
        stored = {} if whole is None else part.layout.stored(whole)
        return ((name, 0, tensor) for name, tensor in stored.items())
    box, local = part.sharding.owners.get(dist.get_rank()), part.local.detach()
    if box is None:
        return iter(())
    runs = runs_of(box, part.sharding.cut_shape)
    return ((part.layout.name, first * local.itemsize, local[leading]) for first, leading in runs)


def _header(tensors: Sequence[ShardedTensor]) -> tuple[bytes, dict[str | None, int]]:
    """Return the header of a safetensors file with these tensors, in order, and each tensor's offset after the header.

    The key None holds the end of the last tensor.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str | None, int] = {}
    end = 0
    for part in tensors:
        for name, shape in part.layout.shapes.items():
            offsets[name] = end
            end += math.prod(shape) * part.local.dtype.itemsize
            entries[name] = {
                "dtype": _DTYPE_NAMES[part.local.dtype],
                "shape": list(shape),
                "data_offsets": [offsets[name], end],
            }
    offsets[None] = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, offsets


def _read_counters(source: Path) -> dict[str, int]:
    if not (source / TRAINER).is_file():
        raise FileNotFoundError(f"it has no {TRAINER}; pass a directory that a worker saved")
    counters = json.loads((source / TRAINER).read_text())
    if not isinstance(counters, dict) or counters.get("edition") != _EDITION:
        raise ValueError(f"{TRAINER} does not have edition {_EDITION}: {str(counters)[:200]}")
    if not all(isinstance(counters.get(key), int) for key in ("version", "optimizer_steps")):
        raise ValueError(f"{TRAINER} must have an integer version and optimizer_steps: {str(counters)[:200]}")
    return counters


def _check_lora(file: Path, described: str) -> None:
    """Raise ``ValueError`` if the LoRA of a checkpoint differs from the ``described`` one."""
    stored, mine = json.loads(file.read_text()), json.loads(described)
    for key in ("r", "lora_alpha", "target_modules", "use_rslora"):
        if stored.get(key) != mine[key]:
            raise ValueError(f"{file.name}: {key} is {stored.get(key)!r}, but this worker's is {mine[key]!r}")


def _read_shards(file: Path, tensors: Sequence[ShardedTensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each local shard with its contents in the file. Raises ``ValueError`` if the file does not fit."""
    shards: list[tuple[torch.Tensor, torch.Tensor]] = []
    with safe_open(file, framework="pt") as stored, torch.no_grad():
        names = set(stored.keys())
        wanted = {name: (part.local.dtype, shape) for part in tensors for name, shape in part.layout.shapes.items()}
        problems = []
        if lost := sorted(set(wanted) - names):
            problems.append(f"missing tensors: {shortened(lost)}")
        if more := sorted(names - set(wanted)):
            problems.append(f"unknown tensors: {shortened(more)}")
        for name in sorted(names & set(wanted)):
            part, (dtype, shape) = stored.get_slice(name), wanted[name]
            if (_DTYPES.get(part.get_dtype()), tuple(part.get_shape())) != (dtype, shape):
                problems.append(f"{name} is {part.get_dtype()} {tuple(part.get_shape())}, not {dtype} {shape}")
        if not problems:
            shards = [(tensor.local, local_part(tensor, stored)) for tensor in tensors]
    if problems:
        raise ValueError(f"{file.name}: {'; '.join(problems[:10])}")
    return shards


def _write_file(file: Path, content: str | bytes) -> None:
    with file.open("wb") as out:
        out.write(content.encode() if isinstance(content, str) else content)
        out.flush()
        os.fsync(out.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _previous_path(path: Path) -> Path:
    """Return the path to which the previous checkpoint is moved while the new one takes its place."""
    return path.with_name(f".{path.name}.old")


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"

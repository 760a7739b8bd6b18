"""How Fast-LLM's trainer frames the broadcasts of one update.

For each tensor, it broadcasts the length of a header as one int64, the header as uint8, and then the tensor. An update
ends with a header that announces no tensor. Headers are pickles of ``(shard, name, torch.Size, torch.dtype)`` or of
None. They are parsed here but never unpickled: nothing is imported or called, and any other value is refused.
"""

from __future__ import annotations

import pickle  # only to write
import pickletools
from dataclasses import dataclass
from typing import Any

import torch

from inflight.dialects.broadcast_group import BroadcastGroup, GroupRank, group_rank_of
from inflight.errors import TransferError
from inflight.wire import DTYPE_SIZES, TensorSpec

WEIGHTS = "weights"
"""The shard that is loaded; other shards are gradients and optimizer state."""
MAX_HEADER_BYTES = 64 << 10
_MARK = object()


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """The tensor that is broadcast next."""

    shard: str
    spec: TensorSpec


def fast_llm_rank_of(init_method: str, *, rank: int, world_size: int, timeout_s: float, hosts_store: bool) -> GroupRank:
    """Return a rank of Fast-LLM's group at ``tcp://HOST:PORT``. Raises `ConfigError`."""
    return group_rank_of(
        init_method,
        "Fast-LLM",
        (f"range_0_{world_size}_1/",),  # of `ProcessGroupPool.get_process_group(range(world_size), rank)`
        rank=rank,
        world_size=world_size,
        timeout_s=timeout_s,
        hosts_store=hosts_store,
    )


def receive_header(group: BroadcastGroup, timeout_s: float) -> TensorHeader | None:
    """Return the next tensor's header, or None at the end of the update.

    Raises `TransferError` if a transfer fails or the header is refused; the group is then abandoned.
    """
    length = torch.zeros(1, dtype=torch.int64)
    group.broadcast(length, timeout_s, "receiving the length of a header")
    num_bytes = int(length)
    if not 0 < num_bytes <= MAX_HEADER_BYTES:
        group.abort()
        raise TransferError(f"a header of {num_bytes} bytes was refused; headers have 1 to {MAX_HEADER_BYTES} bytes")
    header = torch.zeros(num_bytes, dtype=torch.uint8)
    group.broadcast(header, timeout_s, "receiving a header")
    try:
        return parse_header(header.numpy().tobytes())
    except ValueError as error:
        group.abort()
        raise TransferError(f"a header was refused: {error}") from error


def send_header(group: BroadcastGroup, header: TensorHeader | None, timeout_s: float) -> None:
    """Broadcast a header, or None to end the update. Raises `TransferError`."""
    data = bytearray(header_bytes(header))
    what = "ending the update" if header is None else f"announcing {header.spec.name}"
    group.broadcast(torch.tensor([len(data)], dtype=torch.int64), timeout_s, what)
    group.broadcast(torch.frombuffer(data, dtype=torch.uint8), timeout_s, what)


def header_bytes(header: TensorHeader | None) -> bytes:
    """Return a header in the form that Fast-LLM's receivers read."""
    if header is None:
        return pickle.dumps(None)
    spec = header.spec
    return pickle.dumps((header.shard, spec.name, torch.Size(spec.shape), getattr(torch, spec.dtype)))


def parse_header(data: bytes) -> TensorHeader | None:
    """Return the contents of a header, or None if it ends an update. Raises ``ValueError`` for any other pickle."""
    try:
        value = _Parser().parse(data)
    except (IndexError, KeyError, TypeError) as error:
        raise ValueError(f"it is not a complete pickle ({type(error).__name__})") from error
    if value is None:
        return None
    match value:
        case (str(shard), str(name), _Shape(shape), _Global("torch", dtype)) if dtype in DTYPE_SIZES:
            return TensorHeader(shard, TensorSpec.model_validate({"name": name, "dtype": dtype, "shape": shape}))
    raise ValueError(f"it is not (shard, name, torch.Size, one of torch.{', torch.'.join(DTYPE_SIZES)})")


@dataclass(frozen=True, slots=True)
class _Global:
    """A name that a pickle mentions. It is never looked up."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class _Shape:
    sizes: tuple[int, ...]


class _Parser:
    """Executes the few pickle operations that a header consists of, on plain values."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def parse(self, data: bytes) -> Any:
        for opcode, argument, position in pickletools.genops(data):
            if opcode.name == "STOP":
                (value,) = self._stack
                if position is None or position + 1 != len(data):
                    raise ValueError("bytes follow its end")
                return value
            self._apply(opcode.name, argument)
        raise ValueError("it does not end")

    def _apply(self, operation: str, argument: Any) -> None:
        stack = self._stack
        match operation:
            case "PROTO" | "FRAME":
                pass
            case "NONE" | "SHORT_BINUNICODE" | "BINUNICODE" | "BININT" | "BININT1" | "BININT2" | "LONG1":
                stack.append(argument)
            case "MARK":
                stack.append(_MARK)
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                self._fold(int(operation[-1]))
            case "TUPLE":
                num_items = next((i for i, value in enumerate(reversed(stack)) if value is _MARK), len(stack))
                self._fold(num_items)
                del stack[-2]  # the mark, without which this is an IndexError
            case "MEMOIZE":
                self._memo[len(self._memo)] = stack[-1]
            case "BINPUT" | "LONG_BINPUT":
                self._memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self._memo[argument])
            case "GLOBAL":
                stack.append(_Global(*argument.split(" ")))
            case "STACK_GLOBAL":
                name, module = stack.pop(), stack.pop()
                stack.append(_Global(module, name))
            case "REDUCE":
                arguments, called = stack.pop(), stack.pop()
                match called, arguments:
                    case _Global("torch", "Size"), (tuple(sizes),) if all(type(size) is int for size in sizes):
                        stack.append(_Shape(sizes))
                    case _:
                        raise ValueError("it calls something other than torch.Size of integers")
            case _:
                raise ValueError(f"its pickle operation {operation} is not allowed in a header")

    def _fold(self, num_items: int) -> None:
        """Replace the last ``num_items`` values on the stack with one tuple."""
        start = len(self._stack) - num_items
        if start < 0:
            raise IndexError
        self._stack[start:] = [tuple(self._stack[start:])]

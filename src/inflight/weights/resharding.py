"""Resharding: which slice of which tensor moves from which rank to which, so that nothing is gathered anywhere.

Trainer and server ranks are numbered in one space. Two layouts say what each of them holds and needs; a plan moves each
slice straight from a rank that holds it, once to every rank that needs it, as LlamaRL does (arXiv:2505.24034). Every
rank derives the same plan from the same layouts, so that none has to be sent. Knows nothing of torch, nor of how a
slice travels.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from inflight.errors import ConfigError
from inflight.weights.layouts import Box, Layout
from inflight.wire import DTYPE_SIZES, TensorSpec

_NEARLY_FULL = 7 / 8


@dataclass(frozen=True, slots=True)
class Transfer:
    """One box of a tensor on its way from rank ``source`` to rank ``target``; ``size_bytes`` in the wire dtype."""

    source: int
    target: int
    name: str
    box: Box
    size_bytes: int

    @property
    def is_local(self) -> bool:
        """Whether the target itself holds the box: it is copied there, and no byte of it is sent."""
        return self.source == self.target


@dataclass(frozen=True)
class Plan:
    """Transfers that cover every element of every target box exactly once, in the order of the tensors.

    ``lower_bound_bytes`` is what cannot be saved: for each target, the bytes that it needs and does not hold itself.
    """

    specs: tuple[TensorSpec, ...]
    transfers: tuple[Transfer, ...]
    lower_bound_bytes: int

    @cached_property
    def sent_bytes(self) -> Mapping[int, int]:
        """Bytes that each source sends to other ranks; a rank that sends none is left out."""
        return _totals((t.source, t.size_bytes) for t in self.transfers if not t.is_local)

    @cached_property
    def received_bytes(self) -> Mapping[int, int]:
        """Bytes that each target receives from other ranks; a rank that receives none is left out."""
        return _totals((t.target, t.size_bytes) for t in self.transfers if not t.is_local)

    @property
    def size_bytes(self) -> int:
        """Bytes that travel between ranks."""
        return sum(self.sent_bytes.values())

    @cached_property
    def digest(self) -> str:
        """SHA-256 over tensors and transfers in order: ranks of equal digests send what the others wait for."""
        digest = hashlib.sha256()
        for spec in self.specs:
            digest.update(f"{spec.name!r} {spec.dtype} {spec.shape}\n".encode())
        for t in self.transfers:
            digest.update(f"{t.source} {t.target} {t.name!r} {t.box.starts} {t.box.stops}\n".encode())
        return digest.hexdigest()

    def rounds(self, round_bytes: int) -> list[list[Transfer]]:
        """Return what travels between ranks, cut into rounds in which no rank sends or receives more than that.

        A box that is larger is cut up. A transfer goes into the first round in which both of its ranks have room, so
        that ranks which need different tensors are served side by side.
        """
        widest = max((DTYPE_SIZES[spec.dtype] for spec in self.specs), default=0)
        if round_bytes < widest:
            raise ConfigError(f"rounds of {round_bytes} bytes cannot carry one element of {widest} bytes")
        rounds: list[list[Transfer]] = []
        loads: defaultdict[tuple[str, int], list[int]] = defaultdict(list)  # of each end, the bytes of each round
        first: defaultdict[tuple[str, int], int] = defaultdict(int)  # of each end, the first round not nearly full
        for part in (p for t in self.transfers if not t.is_local for p in _parts(t, round_bytes)):
            ends = (("source", part.source), ("target", part.target))
            i = max(first[end] for end in ends)
            while any(sum(loads[end][i : i + 1]) + part.size_bytes > round_bytes for end in ends):
                i += 1
            rounds += [[] for _ in range(i + 1 - len(rounds))]
            rounds[i].append(part)
            for end in ends:
                load = loads[end]
                load += [0] * (i + 1 - len(load))
                load[i] += part.size_bytes
                while first[end] < len(load) and load[first[end]] >= round_bytes * _NEARLY_FULL:
                    first[end] += 1
        return rounds


@dataclass(frozen=True, slots=True)
class _Cell:
    """A box that one target needs, and the ranks that hold all of it."""

    target: int
    spec: TensorSpec
    box: Box
    holders: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return self.box.num_elements * DTYPE_SIZES[self.spec.dtype]


def plan_transfers(specs: Sequence[TensorSpec], sources: Layout, targets: Layout) -> Plan:
    """Return the plan that gives every target its boxes; the same on every rank.

    What several ranks hold is taken from the one that sends the fewest bytes so far, largest boxes first. Raises
    `ConfigError` if a box leaves its tensor, the boxes of one target overlap, a tensor is unknown, or what a target
    needs is held by nobody.
    """
    _check(specs, sources, "source")
    _check(specs, targets, "target")
    for target, tensors in targets.items():
        for name, boxes in tensors.items():
            if pair := overlap_of(boxes):
                raise ConfigError(f"target rank {target} needs {name} twice where {pair[0]} and {pair[1]} overlap")
    cells = _cells(specs, sources, targets)
    chosen = _choose(cells)
    transfers = tuple(
        Transfer(source, cell.target, cell.spec.name, cell.box, cell.size_bytes)
        for cell, source in zip(cells, chosen, strict=True)
    )
    lower_bound_bytes = sum(cell.size_bytes for cell in cells if cell.target not in cell.holders)
    return Plan(tuple(specs), transfers, lower_bound_bytes)


def overlap_of(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Return two of the boxes that have an element in common, None if no two have.

    Boxes are compared with those that they meet along the dimension in which most of them start apart.
    """
    if len(boxes) < 2:
        return None
    num_dims = len(boxes[0].starts)
    dim = max(range(num_dims), key=lambda d: len({box.starts[d] for box in boxes}), default=None)
    if dim is None:
        return boxes[0], boxes[1]
    met: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.starts[dim]):
        met = [other for other in met if other.stops[dim] > box.starts[dim]]
        for other in met:
            if box.intersection(other):
                return other, box
        met.append(box)
    return None


def _check(specs: Sequence[TensorSpec], layout: Layout, side: str) -> None:
    shapes = {spec.name: spec.shape for spec in specs}
    if len(shapes) != len(specs):
        twice = next(spec.name for i, spec in enumerate(specs) if spec.name in {s.name for s in specs[:i]})
        raise ConfigError(f"{twice} appears twice in the manifest")
    for rank, tensors in layout.items():
        for name, boxes in tensors.items():
            if name not in shapes:
                raise ConfigError(f"{side} rank {rank} lists {name}, which is not in the manifest")
            shape = shapes[name]
            for box in boxes:
                fits = len(box.starts) == len(box.stops) == len(shape)
                if not fits or not all(
                    0 <= start <= stop <= size for start, stop, size in zip(box.starts, box.stops, shape, strict=True)
                ):
                    raise ConfigError(f"{side} rank {rank} lists {name} at {box}, outside of its shape {shape}")


def _cells(specs: Sequence[TensorSpec], sources: Layout, targets: Layout) -> list[_Cell]:
    """Return the targets' boxes cut so that each is held whole, by tensor and target."""
    cells = []
    covers: dict[tuple[tuple[Box, tuple[int, ...]], ...], dict[Box, list[tuple[Box, tuple[int, ...]]]]] = {}
    for spec in specs:
        holders: dict[Box, tuple[int, ...]] = {}
        for rank in sorted(sources):
            for box in sources[rank].get(spec.name, ()):
                known = holders.get(box, ())
                holders[box] = known if rank in known else (*known, rank)
        cover = covers.setdefault(tuple(holders.items()), {})  # layers have the same layout: it is worked out once
        for target in sorted(targets):
            for needed in targets[target].get(spec.name, ()):
                if needed not in cover:
                    cover[needed] = _cover(holders, needed)
                for box, ranks in cover[needed]:
                    if not ranks:
                        raise ConfigError(f"target rank {target} needs {spec.name} at {box}, which no source holds")
                    cells.append(_Cell(target, spec, box, ranks))
    return cells


def _cover(holders: Mapping[Box, tuple[int, ...]], needed: Box) -> list[tuple[Box, tuple[int, ...]]]:
    """Return boxes that cover ``needed`` exactly once, each with the ranks that hold all of it, perhaps none."""
    if not needed.num_elements:
        return []
    inner = [(common, ranks) for box, ranks in holders.items() if (common := needed.intersection(box))]
    boxes = [box for box, _ in inner]
    if sum(box.num_elements for box in boxes) == needed.num_elements and overlap_of(boxes) is None:
        return sorted(inner, key=lambda cell: cell[0].starts)
    cells: list[tuple[Box, tuple[int, ...]]] = [(needed, ())]
    for box, ranks in inner:
        refined = []
        for cell, known in cells:
            common = cell.intersection(box)
            if common is None:
                refined.append((cell, known))
            else:
                refined.append((common, tuple(sorted({*known, *ranks}))))
                refined += [(rest, known) for rest in cell.without(common)]
        cells = refined
    return sorted(cells, key=lambda cell: cell[0].starts)


def _choose(cells: Sequence[_Cell]) -> list[int]:
    """Return the source of each cell: the target itself where it can be, else the one with the fewest bytes so far."""
    chosen = [cell.target if cell.target in cell.holders else cell.holders[0] for cell in cells]
    sent_bytes: defaultdict[int, int] = defaultdict(int)
    free = []
    for i, cell in enumerate(cells):
        if cell.target in cell.holders:
            continue
        if len(cell.holders) > 1:
            free.append(i)
        else:
            sent_bytes[chosen[i]] += cell.size_bytes
    for i in sorted(free, key=lambda i: -cells[i].size_bytes):
        chosen[i] = min(cells[i].holders, key=lambda rank: (sent_bytes[rank], rank))
        sent_bytes[chosen[i]] += cells[i].size_bytes
    return chosen


def _parts(transfer: Transfer, max_bytes: int) -> Iterable[Transfer]:
    """Yield the transfer in parts of at most ``max_bytes``."""
    if transfer.size_bytes <= max_bytes:
        yield transfer
        return
    element_bytes = transfer.size_bytes // transfer.box.num_elements
    for half in transfer.box.halves():
        yield from _parts(replace(transfer, box=half, size_bytes=half.num_elements * element_bytes), max_bytes)


def _totals(pairs: Iterable[tuple[int, int]]) -> Mapping[int, int]:
    totals: defaultdict[int, int] = defaultdict(int)
    for rank, size_bytes in pairs:
        totals[rank] += size_bytes
    return dict(sorted(totals.items()))

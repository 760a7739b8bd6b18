"""Plans of resharding against plain loops over single elements: covered once, no byte too many, shared out evenly."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard, _StridedShard

from inflight.errors import ConfigError
from inflight.weights.layouts import Box, Layout, arrangement, merged, placed, replicated, sharded
from inflight.weights.resharding import Plan, overlap_of, plan_transfers
from inflight.wire import DTYPE_SIZES, TensorSpec

SOURCES, TARGETS = (0, 1, 2, 3), (4, 5, 6)


def spec(name: str, *shape: int, dtype: Any = "float32") -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


def box(*ranges: tuple[int, int]) -> Box:
    return Box(tuple(start for start, _ in ranges), tuple(stop for _, stop in ranges))


def part(of: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in zip(of.starts, of.stops, strict=True))


def mask(shape: Sequence[int], boxes: Sequence[Box]) -> np.ndarray:
    """How often each element of a tensor lies in one of the boxes."""
    count = np.zeros(shape, dtype=int)
    for each in boxes:
        count[part(each)] += 1
    return count


@st.composite
def boxes_within(draw: st.DrawFn, shape: Sequence[int]) -> Box:
    edges = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    return box(*[(start, stop) for start, stop in edges])


manifests = st.lists(
    st.tuples(st.sampled_from(sorted(DTYPE_SIZES)), st.lists(st.integers(1, 7), min_size=1, max_size=3)),
    min_size=1,
    max_size=4,
).map(lambda kinds: [TensorSpec(name=f"t{i}", dtype=d, shape=tuple(s)) for i, (d, s) in enumerate(kinds)])


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[TensorSpec], Layout, Layout]:
    """Sources that hold everything at least once, and more; targets of which some are sources themselves."""
    specs = draw(manifests)

    def of_one(s: TensorSpec, ranks: Sequence[int]) -> Layout:
        dim = draw(st.integers(-1, len(s.shape) - 1))
        return sharded([s], ranks, dim) if dim >= 0 else replicated([s], ranks)

    sources, targets = [], []
    for s in specs:
        cut = draw(st.integers(0, 3))  # one or two replicas, of unlike splits
        sources += [of_one(s, ranks) for ranks in (SOURCES[:cut], SOURCES[cut:]) if ranks]
        sources += [{draw(st.sampled_from(SOURCES)): {s.name: (draw(boxes_within(s.shape)),)}}]
        ranks = draw(st.lists(st.sampled_from((0, 3, *TARGETS)), unique=True, max_size=4))
        targets += [of_one(s, ranks)] if ranks else []
        others = [rank for rank in TARGETS if rank not in ranks]
        targets += [{rank: {s.name: (draw(boxes_within(s.shape)),)}} for rank in others]
    return specs, merged(*sources), merged(*targets)


@settings(deadline=None)
@given(plans())
def test_every_needed_element_comes_once_from_a_rank_that_holds_it(
    case: tuple[list[TensorSpec], Layout, Layout],
) -> None:
    specs, sources, targets = case
    plan = plan_transfers(specs, sources, targets)
    lower_bound_bytes = 0
    for s in specs:
        for target, needed in targets.items():
            arriving = [t for t in plan.transfers if (t.target, t.name) == (target, s.name)]
            wanted = mask(s.shape, needed.get(s.name, ()))
            assert (mask(s.shape, [t.box for t in arriving]) == wanted).all()
            own = mask(s.shape, sources.get(target, {}).get(s.name, ())) > 0
            local = mask(s.shape, [t.box for t in arriving if t.is_local])
            assert (local == wanted * own).all()
            lower_bound_bytes += int((wanted * ~own).sum()) * DTYPE_SIZES[s.dtype]
    for t in plan.transfers:
        held = mask(next(s.shape for s in specs if s.name == t.name), sources[t.source][t.name])
        assert (held[part(t.box)] > 0).all()
    assert plan.size_bytes == plan.lower_bound_bytes == lower_bound_bytes
    assert sum(plan.received_bytes.values()) == lower_bound_bytes


@settings(deadline=None)
@given(plans(), st.randoms(use_true_random=False))
def test_every_rank_derives_the_same_plan(
    case: tuple[list[TensorSpec], Layout, Layout], shuffler: random.Random
) -> None:
    specs, sources, targets = case

    def shuffled(layout: Layout) -> Layout:
        ranks = list(layout)
        shuffler.shuffle(ranks)
        return {rank: dict(reversed(layout[rank].items())) for rank in ranks}

    plan = plan_transfers(specs, sources, targets)
    other = plan_transfers(specs, shuffled(sources), shuffled(targets))
    assert plan == other
    assert plan.digest == other.digest


@settings(deadline=None)
@given(plans(), st.integers(8, 300))
def test_rounds_carry_the_plan_and_no_rank_sends_or_receives_more_than_their_size(
    case: tuple[list[TensorSpec], Layout, Layout], round_bytes: int
) -> None:
    plan = plan_transfers(*case)
    rounds = plan.rounds(round_bytes)
    for transfers in rounds:
        assert transfers
        for end in ("source", "target"):
            for rank in range(7):
                assert sum(t.size_bytes for t in transfers if getattr(t, end) == rank) <= round_bytes
    for s in plan.specs:
        for source in range(7):
            for target in range(7):
                pair = (source, target, s.name)
                planned = [t.box for t in plan.transfers if (t.source, t.target, t.name) == pair and not t.is_local]
                carried = [t for each in rounds for t in each if (t.source, t.target, t.name) == pair]
                assert (mask(s.shape, planned) == mask(s.shape, [t.box for t in carried])).all()
                sizes = [t.box.num_elements * DTYPE_SIZES[s.dtype] for t in carried]
                assert [t.size_bytes for t in carried] == sizes


@settings(deadline=None)
@given(manifests, st.integers(1, 3), st.sampled_from([(1,), (2,), (4,)]), st.integers(0, 2))
def test_replicas_of_the_sources_share_the_load_to_within_one_box(
    specs: list[TensorSpec], num_targets: int, shards: tuple[int], dim: int
) -> None:
    num_replicas = 3
    layouts = [sharded(specs, range(r * shards[0], (r + 1) * shards[0]), 0) for r in range(num_replicas)]
    targets = merged(*[sharded([s], range(50, 50 + num_targets), min(dim, len(s.shape) - 1)) for s in specs])
    plan = plan_transfers(specs, merged(*layouts), targets)
    largest = max((t.size_bytes for t in plan.transfers), default=0)
    for i in range(shards[0]):
        sent = [plan.sent_bytes.get(r * shards[0] + i, 0) for r in range(num_replicas)]
        assert max(abs(size_bytes - sum(sent) / num_replicas) for size_bytes in sent) <= largest


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("num_targets", [1, 2, 3, 8])
def test_of_rows_in_equal_parts_every_rank_sends_the_same_to_any_split(num_targets: int, dim: int) -> None:
    specs = [spec(f"t{i}", 24, 24) for i in range(5)]
    plan = plan_transfers(specs, sharded(specs, range(4), 0), sharded(specs, range(4, 4 + num_targets), dim))
    assert plan.sent_bytes == dict.fromkeys(range(4), 5 * 24 * 24)
    assert plan.received_bytes == dict.fromkeys(range(4, 4 + num_targets), 5 * 24 * 24 * 4 // num_targets)


def test_targets_that_need_the_same_slice_get_it_once_each_from_different_replicas() -> None:
    specs = [spec("t", 4, 4)]
    plan = plan_transfers(specs, replicated(specs, (0, 1)), replicated(specs, (2, 3)))
    assert [(t.source, t.target, t.box) for t in plan.transfers] == [
        (0, 2, box((0, 4), (0, 4))),
        (1, 3, box((0, 4), (0, 4))),
    ]


def test_scalars_and_tensors_without_elements_are_planned() -> None:
    specs = [spec("scalar"), spec("empty", 0, 3)]
    plan = plan_transfers(specs, replicated(specs, (0,)), replicated(specs, (1,)))
    assert [(t.name, t.size_bytes) for t in plan.transfers] == [("scalar", 4)]
    assert len(plan.rounds(8)) == 1


def test_stages_that_need_different_tensors_are_served_side_by_side() -> None:
    specs = [spec(f"t{i}", 64, 4) for i in range(20)]
    targets = merged(replicated(specs[:10], (4,)), replicated(specs[10:], (5,)))
    rounds = plan_transfers(specs, sharded(specs, range(4), 0), targets).rounds(2048)
    assert len(rounds) <= 6  # two tensors fill a round of either stage, and it is closed when nearly full
    assert all({t.target for t in transfers} == {4, 5} for transfers in rounds)


# ---------------------------------------------------------------------------------------------------------------
# What cannot be planned


def refusal(specs: list[TensorSpec], sources: Layout, targets: Layout) -> str:
    with pytest.raises(ConfigError) as caught:
        plan_transfers(specs, sources, targets)
    return str(caught.value)


def test_what_nobody_holds_is_named_with_its_box() -> None:
    specs = [spec("t", 8, 4)]
    sources = {0: {"t": (box((0, 3), (0, 4)),)}, 1: {"t": (box((4, 8), (0, 4)),)}}
    text = refusal(specs, sources, replicated(specs, (2,)))
    assert text == "target rank 2 needs t at [3:4, 0:4], which no source holds"
    assert "needs t at [0:8, 0:4], which no" in refusal(specs, {}, replicated(specs, (2,)))


def test_boxes_of_one_target_that_overlap_are_refused() -> None:
    specs = [spec("t", 8, 4)]
    needed = {2: {"t": (box((0, 5), (0, 4)), box((4, 8), (1, 2)))}}
    text = refusal(specs, replicated(specs, (0,)), needed)
    assert text == "target rank 2 needs t twice where [0:5, 0:4] and [4:8, 1:2] overlap"


@pytest.mark.parametrize("wrong", [box((0, 9), (0, 4)), box((0, 8)), box((-1, 8), (0, 4)), box((5, 2), (0, 4))])
def test_a_box_outside_of_its_tensor_is_refused(wrong: Box) -> None:
    specs = [spec("t", 8, 4)]
    assert f"source rank 0 lists t at {wrong}, outside" in refusal(specs, {0: {"t": (wrong,)}}, {})
    assert f"target rank 3 lists t at {wrong}, outside" in refusal(specs, replicated(specs, (0,)), {3: {"t": (wrong,)}})


def test_an_unknown_tensor_and_one_listed_twice_are_refused() -> None:
    specs = [spec("t", 8)]
    assert "lists u, which is not in the manifest" in refusal(specs, {0: {"u": (box((0, 1)),)}}, {})
    assert refusal(specs * 2, {}, {}) == "t appears twice in the manifest"


def test_a_dimension_that_is_not_there_and_a_round_too_small_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"t of shape \(8,\) cannot be sharded along dimension 1"):
        sharded([spec("t", 8)], (0, 1), 1)
    plan = Plan((spec("t", 8),), (), 0)
    with pytest.raises(ConfigError, match="rounds of 3 bytes cannot carry one element of 4 bytes"):
        plan.rounds(3)


# ---------------------------------------------------------------------------------------------------------------
# Boxes and layouts


@settings(deadline=None)
@given(st.data())
def test_boxes_meet_differ_and_split_as_sets_of_elements(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    a, b = data.draw(boxes_within(shape)), data.draw(boxes_within(shape))
    common = a.intersection(b)
    both = mask(shape, [a]) * mask(shape, [b])
    assert (mask(shape, [common] if common else []) == both).all()
    if common:
        assert (mask(shape, a.without(common)) == mask(shape, [a]) - both).all()
    if a.num_elements > 1:
        assert (mask(shape, a.halves()) == mask(shape, [a])).all()
        assert all(half.num_elements for half in a.halves())
    several = [data.draw(boxes_within(shape)) for _ in range(4)]
    pair = overlap_of(several)
    assert (pair is not None) == bool((mask(shape, several) > 1).any())
    assert pair is None or pair[0].intersection(pair[1])


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=3), st.integers(1, 5), st.data())
def test_rows_are_shared_out_as_torch_chunks_them(shape: list[int], num_ranks: int, data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    full = torch.arange(math.prod(shape)).view(shape)
    chunks = [*full.chunk(num_ranks, dim)]
    layout = sharded([spec("t", *shape)], range(num_ranks), dim)
    for rank in range(num_ranks):
        mine = [full[part(b)] for b in layout[rank]["t"]]
        assert len(mine) <= 1
        theirs = chunks[rank] if rank < len(chunks) else full[:0]
        assert torch.equal(mine[0] if mine else theirs[:0], theirs if theirs.numel() else theirs[:0])


placements = st.one_of(
    st.just(Replicate()),
    st.integers(0, 1).map(Shard),
    st.builds(lambda dim, factor: _StridedShard(dim, split_factor=factor), st.integers(0, 1), st.integers(1, 3)),
)


@settings(deadline=None)
@given(st.tuples(st.integers(1, 13), st.integers(1, 13)), st.tuples(st.integers(1, 3), st.integers(1, 3)), st.data())
def test_placements_split_a_tensor_as_dtensor_does(
    shape: tuple[int, int], mesh_shape: tuple[int, int], data: st.DataObject
) -> None:
    chosen = [data.draw(placements), data.draw(placements)]
    full = torch.arange(math.prod(shape)).view(shape)
    layout = placed([spec("t", *shape)], {"t": chosen}, mesh_shape, range(math.prod(mesh_shape)))
    for rank in range(math.prod(mesh_shape)):
        local = full
        for i, placement in enumerate(chosen):
            if not isinstance(placement, Replicate):
                parts, _ = placement._split_tensor(local, mesh_shape[i], with_padding=False, contiguous=False)
                local = parts[divmod(rank, mesh_shape[1])[i]]
        boxes = layout[rank]["t"]
        assert sum(b.num_elements for b in boxes) == local.numel()
        for held, place in zip(boxes, arrangement(boxes), strict=True):
            assert torch.equal(full[part(held)], local[part(place)])


def test_a_partial_placement_and_a_mesh_of_another_size_are_refused() -> None:
    with pytest.raises(ConfigError, match="t is placed as"):
        placed([spec("t", 4)], {"t": [Partial()]}, (2,), (0, 1))
    with pytest.raises(ConfigError, match=r"a mesh of shape \(2, 2\) has 4 ranks, not 3"):
        placed([spec("t", 4)], {"t": [Shard(0), Shard(0)]}, (2, 2), (0, 1, 2))


def test_two_dimensional_shards_of_trainers_reach_columns_of_servers() -> None:
    specs = [spec("t", 13, 10)]
    sources = placed(specs, {"t": [_StridedShard(0, split_factor=2), Shard(0)]}, (2, 2), range(4))
    plan = plan_transfers(specs, sources, sharded(specs, (4, 5, 6), 1))
    assert plan.size_bytes == plan.lower_bound_bytes == 13 * 10 * 4

"""Boxes of tensors: what a manifest accepts, how stored tensors are cut into them, and how parts are put together."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from inflight.weights.encode.bucket_bytes import checksum, pack
from inflight.weights.encode.buckets import plan_buckets
from inflight.weights.encode.parts import part_of_update, part_specs, places_of, read_part, views_of, write_part
from inflight.wire import BucketSpec, InFlightPolicy, Manifest, Sharding, TensorSpec, WeightUpdate
from inflight_fsdp import layout as fsdp
from inflight_fsdp.layout import Layout, layout_by_expert
from inflight_fsdp.stored_boxes import blocks_of, held_boxes

HEADS, GROUPS, WIDTH = 4, 2, 6


def box_in(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    edges = []
    for size in shape:
        start = draw(st.integers(0, size - 1))
        edges.append((start, draw(st.integers(start + 1, size))))
    return tuple(edges)


@given(st.data())
def test_a_sharding_is_accepted_if_it_sends_every_element_once(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    boxes = [box_in(data.draw, shape) for _ in range(data.draw(st.integers(1, 4)))]
    counts = torch.zeros(shape)
    for box in boxes:
        counts[tuple(slice(*edges) for edges in box)] += 1
    problem = Sharding(senders=(tuple(boxes[::2]), tuple(boxes[1::2]))).problem(shape)
    assert (problem is None) == bool((counts == 1).all())


@pytest.mark.parametrize(
    ("senders", "words"),
    [
        (((((0, 2), (0, 3)),), (((1, 4), (0, 3)),)), "overlap"),
        (((((0, 2), (0, 3)),), (((3, 4), (0, 3)),)), "its boxes cover 9 of its 12 elements"),
        (((((0, 2), (0, 3)),), (((2, 5), (0, 3)),)), "outside its shape"),
        (((((0, 4),),), ()), "outside its shape"),
    ],
    ids=str,
)
def test_a_manifest_refuses_elements_that_are_missing_or_sent_twice(senders: object, words: str) -> None:
    tensors = [{"name": "a", "dtype": "float32", "shape": [4, 3]}]
    with pytest.raises(ValidationError, match=words):
        Manifest.model_validate({"tensors": tensors, "shardings": [{"senders": senders}], "sharding_of": [0]})


def test_a_manifest_bounds_what_comparing_boxes_costs() -> None:
    columns = tuple((((0, 300), (i, i + 1)),) for i in range(300))
    problem = Sharding(senders=columns).problem((300, 300))
    assert problem == "it is divided into too many boxes, 300"
    rows = tuple((((i, i + 1), (0, 300)),) for i in range(300))
    assert Sharding(senders=rows).problem((300, 300)) is None


# ---------------------------------------------------------------------------------------------------------------
# From a trainer's parameters to boxes of stored tensors


def qkv_layout() -> Layout:
    """Megatron's: for each group its queries, its key and its value."""
    queries = HEADS // GROUPS
    shapes = {"q": (HEADS * 3, WIDTH), "k": (GROUPS * 3, WIDTH), "v": (GROUPS * 3, WIDTH)}

    def split(whole: torch.Tensor) -> Mapping[str, torch.Tensor]:
        parts = whole.split([queries * 3, 3, 3], 1)
        return dict(zip(shapes, (part.reshape(-1, WIDTH) for part in parts), strict=True))

    return Layout(shapes, split, lambda stored: next(iter(stored.values())))


def padded_layout() -> Layout:
    return Layout({"head": (7, WIDTH)}, lambda whole: {"head": whole[:7]}, lambda stored: stored["head"])


def permuted_layout() -> Layout:
    """TorchTitan's Llama: rows of a head are interleaved."""
    return Layout(
        {"q": (8, WIDTH)},
        lambda whole: {"q": whole.view(4, 2, WIDTH).transpose(0, 1).reshape(8, WIDTH)},
        lambda stored: stored["q"],
    )


LAYOUTS: dict[str, tuple[Layout, tuple[int, ...]]] = {
    "plain": (Layout({"a": (5, WIDTH)}), (5, WIDTH)),
    "vector": (Layout({"a": (9,)}), (9,)),
    "experts": (
        layout_by_expert("mlp.experts.gate_up_proj", torch.empty(4, 6, WIDTH), ("gate_proj", "up_proj")),
        (4, 6, WIDTH),
    ),
    "qkv": (qkv_layout(), (GROUPS, (HEADS // GROUPS + 2) * 3, WIDTH)),
    "gate and up": (
        Layout(
            {"gate": (8, WIDTH), "up": (8, WIDTH)},
            lambda whole: dict(zip(("gate", "up"), whole.unbind(0), strict=True)),
            lambda stored: torch.stack([*stored.values()]),
        ),
        (2, 8, WIDTH),
    ),
    "padded": (padded_layout(), (8, WIDTH)),
}


def cut(shape: tuple[int, ...], how: str, num_ranks: int) -> fsdp.Sharding:
    """Cut as the trainers do: in chunks of one dimension, of which the last may be short or empty, or flattened."""
    is_flat = how == "flat"
    cut_shape = (math.prod(shape),) if is_flat else shape
    dim = 0 if is_flat else min(int(how), len(shape) - 1)
    each = -(-cut_shape[dim] // num_ranks)
    boxes: list[fsdp.Box | None] = []
    for rank in range(num_ranks):
        edges = [slice(0, size) for size in cut_shape]
        edges[dim] = slice(min(rank * each, cut_shape[dim]), min((rank + 1) * each, cut_shape[dim]))
        boxes.append(tuple(edges) if edges[dim].start < edges[dim].stop else None)
    return fsdp.Sharding(shape, tuple(boxes), is_flat)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("how", ["0", "1", "flat"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_boxes_of_all_ranks_are_the_stored_tensors(name: str, how: str, num_ranks: int) -> None:
    layout, shape = LAYOUTS[name]
    whole = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    sharding = cut(shape, how, num_ranks)
    blocks = blocks_of(layout, shape)
    assert blocks is not None
    found = {stored: torch.full(size, -1.0) for stored, size in layout.shapes.items()}
    num_sent = 0
    for rank in sharding.senders(0):
        held = held_boxes(blocks, sharding, rank)
        if held is None:
            assert (name, how) == ("qkv", "1"), "rows of a group that other ranks share are no boxes"
            return
        box = sharding.boxes[rank]
        assert box is not None
        local = whole.view(sharding.cut_shape)[box]
        for it in held:
            part = found[it.name][it.box]
            part.copy_(local[it.within].reshape(part.shape))
            num_sent += part.numel()
    wanted = layout.stored(whole)
    assert all(torch.equal(found[stored], tensor) for stored, tensor in wanted.items())
    assert num_sent == sum(tensor.numel() for tensor in wanted.values())


def test_permuted_rows_are_not_boxes() -> None:
    assert blocks_of(permuted_layout(), (8, WIDTH)) is None


def test_copies_take_turns() -> None:
    sharding = fsdp.Sharding((4,), ((slice(0, 2),), (slice(2, 4),)) * 2)
    assert [sharding.senders(index) for index in range(3)] == [[0, 1], [2, 3], [0, 1]]


# ---------------------------------------------------------------------------------------------------------------
# From parts to a bucket


def sharded_update() -> WeightUpdate:
    tensors = (
        TensorSpec(name="a", dtype="bfloat16", shape=(5, 3)),
        TensorSpec(name="b", dtype="float32", shape=(3, 4)),
        TensorSpec(name="c", dtype="float32", shape=()),
    )
    rows = Sharding(senders=((((0, 3), (0, 3)),), (((3, 5), (0, 3)),)))
    columns = Sharding(senders=((((0, 3), (2, 4)),), (((0, 3), (0, 2)),)))
    alone = Sharding(senders=((), ((),)))
    return WeightUpdate(
        run_id="run",
        version=1,
        manifest=Manifest(tensors=tensors, shardings=(rows, columns, alone), sharding_of=(0, 1, 2)),
        buckets=plan_buckets(tensors),
        in_flight=InFlightPolicy.KEEP,
        deadline_s=1.0,
        lease_s=1.0,
    )


def test_parts_are_written_to_their_places_whatever_is_aligned() -> None:
    update = sharded_update()
    (bucket,) = update.buckets
    tensors = [torch.arange(15).to(torch.bfloat16).view(5, 3), torch.arange(12.0).view(3, 4), torch.tensor(7.0)]
    whole, found = pack(tensors), torch.zeros(bucket.size_bytes, dtype=torch.uint8)
    for sender in (1, 0):
        part = read_part(views_of(whole, update.manifest, bucket, sender))
        assert part.numel() == part_of_update(update, sender).buckets[0].size_bytes
        write_part(part, views_of(found, update.manifest, bucket, sender))
    assert torch.equal(found, whole)


def test_the_checksum_of_a_part_says_where_it_belongs() -> None:
    """Two parts of equal shape that are exchanged do not pass for each other."""
    half = Sharding(senders=((((0, 2),),), (((2, 4),),)))
    spec = TensorSpec(name="a", dtype="float32", shape=(4,))
    manifest = Manifest(tensors=(spec,), shardings=(half,), sharding_of=(0,))
    bucket = BucketSpec(index=0, start=0, stop=1, size_bytes=16)
    part = torch.zeros(8, dtype=torch.uint8)
    sums = [checksum(part, places_of(manifest, bucket, sender)) for sender in (0, 1)]
    assert len({*sums, checksum(part)}) == 3


def test_parts_have_names_of_their_own() -> None:
    update = sharded_update()
    names = [spec.name for sender in (0, 1) for spec in part_specs(update.manifest, update.buckets[0], sender)]
    assert names == ["a[0:3,0:3]", "b[0:3,2:4]", "a[3:5,0:3]", "b[0:3,0:2]", "c[]"]
    assert len(set(names)) == len(list(itertools.chain(names)))

"""Cutting a manifest into buckets, comparing manifests, and the bytes of a bucket."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from inflight.types import WeightBucket
from inflight.weights.encode.bucket_bytes import Packer, pack, unpack
from inflight.weights.encode.buckets import manifest_difference, plan_buckets
from inflight.wire import InFlightPolicy, Manifest, TensorSpec, WeightUpdate
from tests.weights.workers import spec_of

dtypes = st.sampled_from(["float64", "float32", "bfloat16", "float16"])
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def manifests(draw: st.DrawFn) -> list[TensorSpec]:
    kinds = draw(st.lists(st.tuples(dtypes, shapes), min_size=1, max_size=12))
    return [TensorSpec(name=f"t{i}", dtype=dtype, shape=shape) for i, (dtype, shape) in enumerate(kinds)]


def tensors_of(specs: list[TensorSpec], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s.shape, generator=generator).to(getattr(torch, s.dtype)) for s in specs]


@given(manifests(), st.integers(1, 2000))
def test_buckets_cover_the_tensors_in_order_and_within_the_size(specs: list[TensorSpec], bucket_bytes: int) -> None:
    buckets = plan_buckets(specs, bucket_bytes)
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
    assert [i for bucket in buckets for i in range(bucket.start, bucket.stop)] == list(range(len(specs)))
    for bucket in buckets:
        sizes = [spec.size_bytes for spec in specs[bucket.start : bucket.stop]]
        assert bucket.size_bytes == sum(sizes)
        larger = [size for size in sizes if size > bucket_bytes]
        assert bucket.size_bytes <= bucket_bytes or sizes == larger or sum(sizes) == larger[0]
    WeightUpdate(  # the message takes them as they are
        run_id="r",
        version=1,
        manifest=Manifest(tensors=tuple(specs)),
        buckets=buckets,
        in_flight=InFlightPolicy.KEEP,
        deadline_s=1,
        lease_s=1,
    )


@given(manifests(), st.integers(1, 2000))
def test_no_bucket_could_have_taken_the_next_tensor_as_well(specs: list[TensorSpec], bucket_bytes: int) -> None:
    for bucket in plan_buckets(specs, bucket_bytes)[:-1]:
        assert bucket.size_bytes + specs[bucket.stop].size_bytes > bucket_bytes


def test_a_tensor_larger_than_a_bucket_travels_alone() -> None:
    specs = [TensorSpec(name=n, dtype="float32", shape=(k,)) for n, k in (("a", 1), ("b", 100), ("c", 1), ("d", 1))]
    assert [(b.start, b.stop) for b in plan_buckets(specs, 16)] == [(0, 1), (1, 2), (2, 4)]


@given(manifests())
def test_unpacking_gives_back_what_was_packed_whatever_the_mix_of_dtypes(specs: list[TensorSpec]) -> None:
    tensors = tensors_of(specs)
    flat = pack(tensors)
    assert flat.dtype == torch.uint8
    assert flat.numel() == sum(spec.size_bytes for spec in specs)
    for given_tensor, back in zip(tensors, unpack(flat, specs), strict=True):
        assert back.dtype == given_tensor.dtype
        assert torch.equal(back, given_tensor)


@given(manifests(), manifests(), manifests())
def test_prepacking_changes_no_byte_and_keeps_the_bucket_before_whole(
    first: list[TensorSpec], second: list[TensorSpec], third: list[TensorSpec]
) -> None:
    packer, before = Packer(), None
    for index, specs in enumerate([first, second, third]):
        tensors = tensors_of(specs, index)
        bucket = packer.pack_bucket(WeightBucket(index, tuple(specs), tuple(tensors)))
        assert torch.equal(pack(bucket.tensors), pack(tensors))
        assert all(torch.equal(a, b) for a, b in zip(bucket.tensors, tensors, strict=True))
        if before is not None:
            assert torch.equal(pack(before[0].tensors), before[1])
        before = bucket, pack(tensors).clone()


def test_a_prepacked_bucket_is_sent_without_another_copy() -> None:
    specs = [TensorSpec(name=n, dtype="float32", shape=(3, 4)) for n in "abc"]
    tensors = [torch.randn(4, 3).t() for _ in specs]
    bucket = Packer().pack_bucket(WeightBucket(0, tuple(specs), tuple(tensors)))
    assert pack(bucket.tensors).data_ptr() == bucket.tensors[0].data_ptr()


def test_views_that_only_look_adjacent_are_copied() -> None:
    storage = torch.arange(12.0)
    apart = [storage[0:4], storage[8:12]]
    assert pack(apart).view(torch.float32).tolist() == [0, 1, 2, 3, 8, 9, 10, 11]
    turned = [storage[0:6].view(2, 3).t(), storage[6:12]]
    assert pack(turned).view(torch.float32).tolist() == [0, 3, 1, 4, 2, 5, 6, 7, 8, 9, 10, 11]


def test_equal_manifests_fit_in_any_order() -> None:
    specs = [spec_of("a", torch.zeros(2)), spec_of("b", torch.zeros(3, 1))]
    assert manifest_difference(specs, Manifest(tensors=tuple(specs))) is None
    assert manifest_difference(specs, Manifest(tensors=tuple(specs[::-1]))) is None


def test_a_misfit_names_what_is_missing_unknown_misshapen_and_mistyped() -> None:
    expected = [spec_of("a", torch.zeros(2)), spec_of("b", torch.zeros(2)), spec_of("c", torch.zeros(2))]
    offered = [spec_of("b", torch.zeros(2, 1)), spec_of("c", torch.zeros(2).bfloat16()), spec_of("d", torch.zeros(2))]
    text = manifest_difference(expected, Manifest(tensors=tuple(offered)))
    assert text is not None
    assert "missing tensors: 'a'" in text
    assert "tensors unknown to this endpoint: 'd'" in text
    assert "b is (2, 1), expected (2,)" in text
    assert "c is bfloat16, expected float32" in text

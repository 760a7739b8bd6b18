"""The chunked head against a plain log-softmax over the whole vocabulary."""

from __future__ import annotations

import pytest
import torch

from inflight.errors import InvalidRequestError
from inflight.losses import KeptTokens, chunked_logprobs, chunked_logprobs_and_entropy, one_pass
from inflight.losses.head import _Head, _OnePass
from inflight.losses.products import halves, is_narrow
from tests.devices.gpu_on_paper import paper_gpu
from tests.losses.ledger import LiveBytes

N, H, V = 13, 6, 17


def inputs(dtype=torch.float64, num_targets=N, bias=True):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "hidden_NH": normal(num_targets, H).requires_grad_(),
        "weight_VH": normal(V, H).requires_grad_(),
        "targets_N": torch.randint(V, (num_targets,), generator=generator),
        "temperature_N": (0.5 + torch.rand(num_targets, generator=generator, dtype=torch.float64)).to(torch.float32),
        "bias_V": normal(V).requires_grad_() if bias else None,
    }


def naive_logprobs(hidden_NH, weight_VH, targets_N, temperature_N, bias_V):
    """One row at a time, in float64."""
    rows = []
    for n in range(len(targets_N)):
        logits_V = weight_VH.double() @ hidden_NH[n].double()
        if bias_V is not None:
            logits_V = logits_V + bias_V.double()
        logits_V = logits_V / temperature_N[n].double()
        rows.append(logits_V[targets_N[n]] - logits_V.exp().sum().log())
    return torch.stack(rows)


def gradients(logprobs_N, given, grad_N):
    leaves = [given[name] for name in ("hidden_NH", "weight_VH", "bias_V") if given[name] is not None]
    return torch.autograd.grad(logprobs_N, leaves, grad_N.to(logprobs_N.dtype))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("chunk_size", [1, 4, 13, 1024])
def test_logprobs_and_gradients_equal_the_naive_ones_for_any_chunk_size(chunk_size, bias):
    given = inputs(bias=bias)
    grad_N = torch.randn(N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected_N = naive_logprobs(**given)
    logprobs_N = chunked_logprobs(**given, chunk_size=chunk_size)
    # float64: logits of order 5, sums over 17 tokens and 13 rows.
    torch.testing.assert_close(logprobs_N, expected_N, rtol=0, atol=1e-13)
    for ours, naive in zip(gradients(logprobs_N, given, grad_N), gradients(expected_N, given, grad_N), strict=True):
        torch.testing.assert_close(ours, naive, rtol=0, atol=1e-12)


def test_gradients_pass_gradcheck():
    given = inputs(num_targets=5)
    temperature_N = given["temperature_N"].double()
    assert torch.autograd.gradcheck(
        lambda hidden, weight, bias: chunked_logprobs(
            hidden, weight, given["targets_N"], temperature_N, bias_V=bias, chunk_size=2
        ),
        (given["hidden_NH"], given["weight_VH"], given["bias_V"]),
    )


def test_each_row_has_its_own_temperature():
    given = inputs(num_targets=2)
    same_row = {**given, "hidden_NH": given["hidden_NH"][:1].expand(2, H), "targets_N": torch.tensor([3, 3])}
    same_row["temperature_N"] = torch.tensor([0.5, 2.0])
    logprobs_N = chunked_logprobs(**same_row)
    torch.testing.assert_close(logprobs_N, naive_logprobs(**same_row), rtol=0, atol=1e-13)  # float64
    assert abs(logprobs_N[0].item() - logprobs_N[1].item()) > 0.1


def test_rows_without_gradient_do_not_contribute():
    given = inputs()
    grad_N = torch.randn(N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    grad_N[::2] = 0
    ours = gradients(chunked_logprobs(**given, chunk_size=3), given, grad_N)
    naive = gradients(naive_logprobs(**given), given, grad_N)
    for left, right in zip(ours, naive, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-12)  # float64
    assert ours[0][::2].abs().max() == 0


def test_no_gradient_at_all_leaves_zeros():
    given = inputs()
    for gradient in gradients(chunked_logprobs(**given), given, torch.zeros(N)):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_no_target_gives_no_logprobs_and_zero_gradients():
    given = inputs(num_targets=0)
    logprobs_N = chunked_logprobs(**given)
    assert logprobs_N.shape == (0,)
    for gradient in gradients(logprobs_N, given, torch.zeros(0)):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_bfloat16_inputs_are_computed_in_float32():
    given = inputs(torch.bfloat16)
    logprobs_N = chunked_logprobs(**given)
    assert logprobs_N.dtype == torch.float32
    # The inputs are the same numbers, so only the float32 computation differs: logits of order 5 at 2^-24.
    torch.testing.assert_close(logprobs_N.double(), naive_logprobs(**given), rtol=0, atol=5e-6)


def test_gradients_of_bfloat16_are_accumulated_in_float32():
    num_targets = 512
    given = inputs(torch.bfloat16, num_targets=num_targets)
    wide = {name: x.detach().double().requires_grad_() if x.requires_grad else x for name, x in given.items()}
    grad_N = torch.ones(num_targets, dtype=torch.float64)
    ours = gradients(chunked_logprobs(**given, chunk_size=1), given, grad_N)
    expected = gradients(naive_logprobs(**wide), wide, grad_N)
    for left, right in zip(ours, expected, strict=True):
        assert left.dtype == torch.bfloat16
        # One rounding to bfloat16 is 2^-9 relative; adding 512 chunks in bfloat16 would be off by more than 1.
        torch.testing.assert_close(left.double(), right, rtol=2**-8, atol=1e-4)


# ---- products of 16-bit inputs, as on a GPU


def narrow_logprobs(hidden_NH, weight_VH, targets_N, temperature_N, bias_V, chunk_size=4, vocab_chunk_size=5):
    """The head's logprobs and entropies with the products of a GPU, whose arithmetic is emulated on a CPU."""
    sizes = (chunk_size, vocab_chunk_size)
    return _Head.apply(hidden_NH, weight_VH, bias_V, targets_N, temperature_N, None, *sizes, True, True)


def narrow_one_pass(hidden_NH, weight_VH, targets_N, temperature_N, bias_V, loss_of):
    origin = (hidden_NH[:0].sum() + weight_VH[:0].sum()).float()
    return _OnePass.apply(hidden_NH, weight_VH, bias_V, targets_N, temperature_N, loss_of, 4, origin, True)


def test_products_of_16_bits_give_logprobs_and_entropies_as_exact_as_those_of_float32():
    given = inputs(torch.bfloat16)
    expected_N, entropy_N = naive_and_entropy(**given)
    found_N, found_entropy_N = narrow_logprobs(**given)
    # The bound of inputs that are cast to float32: products of bfloat16 numbers are exact in it.
    torch.testing.assert_close(found_N.double(), expected_N, rtol=0, atol=5e-6)
    torch.testing.assert_close(found_entropy_N.double(), entropy_N, rtol=0, atol=5e-6)


def exact_and_found(found_of, weighs_entropy=0.0):
    """Gradients of 512 targets in float64, and as found for bfloat16 inputs."""
    given = inputs(torch.bfloat16, num_targets=512)
    wide = {name: x.detach().double().requires_grad_() if x.requires_grad else x for name, x in given.items()}
    expected_N, entropy_N = naive_and_entropy(**wide)
    leaves = [wide[name] for name in ("hidden_NH", "weight_VH", "bias_V")]
    expected = torch.autograd.grad((expected_N + weighs_entropy * entropy_N).sum(), leaves)
    found = torch.autograd.grad(found_of(given), [given[name] for name in ("hidden_NH", "weight_VH", "bias_V")])
    return zip(found, expected, strict=True)


@pytest.mark.parametrize(
    ("found_of", "weighs_entropy"),
    [
        (lambda given: narrow_logprobs(**given, chunk_size=1)[0].sum(), 0.0),
        (lambda given: sum(part.sum() * w for part, w in zip(narrow_logprobs(**given), (1, 0.5), strict=True)), 0.5),
        (lambda given: narrow_one_pass(**given, loss_of=lambda logprobs_C, rows: logprobs_C.sum()), 0.0),
    ],
    ids=["logprobs", "with entropy", "one pass"],
)
def test_gradients_through_products_of_16_bits_keep_the_bounds_of_float32(found_of, weighs_entropy):
    for left, right in exact_and_found(found_of, weighs_entropy):
        assert left.dtype == torch.bfloat16
        # Those of test_gradients_of_bfloat16_are_accumulated_in_float32: one rounding of the result, 2^-9 relative.
        torch.testing.assert_close(left.double(), right, rtol=2**-8, atol=1e-4)


def test_halves_add_up_to_a_float32_tensor_within_two_to_the_minus_17():
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(10_000, generator=generator) * 10.0 ** torch.randint(-30, 30, (10_000,), generator=generator)
    high, low = halves(wide.clone())
    assert high.dtype == low.dtype == torch.bfloat16
    error = (high.double() + low.double() - wide.double()).abs()
    assert (error <= 2**-17 * wide.double().abs()).all()
    assert ((high.double() - wide.double()).abs() > 2**-12 * wide.double().abs()).any()  # one of them would not do


@pytest.mark.parametrize(
    ("dtypes", "device", "narrow"),
    [
        ((torch.bfloat16, torch.bfloat16), "cuda", True),
        ((torch.bfloat16, torch.bfloat16), "cpu", False),
        ((torch.float32, torch.float32), "cuda", False),
        ((torch.bfloat16, torch.float32), "cuda", False),
        ((torch.float16, torch.float16), "cuda", False),
    ],
)
def test_products_are_of_16_bits_only_for_bfloat16_on_a_gpu(dtypes, device, narrow):
    with paper_gpu():
        hidden_NH, weight_VH = (torch.zeros(2, 3, dtype=dtype, device=device) for dtype in dtypes)
        assert is_narrow(hidden_NH, weight_VH) is narrow


def test_autocast_lowers_the_precision_neither_forward_nor_backward():
    given = inputs(torch.float32)
    wide = {name: x.detach().double().requires_grad_() if x.requires_grad else x for name, x in given.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logprobs_N = chunked_logprobs(**given)
        ours = gradients(logprobs_N, given, torch.ones(N))
    expected_N = naive_logprobs(**wide)
    # float32: values of order 5 at 2^-24, sums of 17; in bfloat16 they would be off by 1e-2.
    torch.testing.assert_close(logprobs_N.double(), expected_N, rtol=0, atol=5e-6)
    for left, right in zip(ours, gradients(expected_N, wide, torch.ones(N)), strict=True):
        torch.testing.assert_close(left.double(), right, rtol=0, atol=2e-5)


def test_logprobs_are_never_above_zero():
    hidden_NH = 100 * torch.eye(4)
    logprobs_N = chunked_logprobs(hidden_NH, torch.eye(4), torch.arange(4), torch.ones(4))
    assert logprobs_N.tolist() == [0.0] * 4


def test_no_tensor_holds_the_logits_of_all_targets():
    num_targets, hidden_size, vocab_size, chunk_size, vocab_chunk_size = 64, 4, 256, 8, 32
    hidden_NH = torch.randn(num_targets, hidden_size, requires_grad=True)
    weight_VH = torch.randn(vocab_size, hidden_size, requires_grad=True)
    targets_N = torch.zeros(num_targets, dtype=torch.int64)
    sizes = {"chunk_size": chunk_size, "vocab_chunk_size": vocab_chunk_size}
    with LiveBytes() as ledger:
        chunked_logprobs(hidden_NH, weight_VH, targets_N, torch.ones(num_targets), **sizes).sum().backward()
    # The largest is the gradient of the weight; the logits of all targets would be 16 times as large.
    assert ledger.largest == 4 * vocab_size * hidden_size
    assert ledger.largest < 4 * num_targets * vocab_size / 8


def naive_and_entropy(hidden_NH, weight_VH, targets_N, temperature_N, bias_V, kept=None):
    """Logprobs and entropies of whole rows, in float64."""
    logits_NV = hidden_NH.double() @ weight_VH.double().t()
    if bias_V is not None:
        logits_NV = logits_NV + bias_V.double()
    logits_NV = logits_NV / temperature_N.double()[:, None]
    if kept is not None:
        mask_NV = torch.zeros_like(logits_NV, dtype=torch.bool)
        for n in range(len(targets_N)):
            mask_NV[n, kept.token_ids_K[kept.offsets[n] : kept.offsets[n + 1]]] = True
        logits_NV = logits_NV.masked_fill(~mask_NV, -1e30)
    logprobs_NV = logits_NV.log_softmax(1)
    entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(1)
    return logprobs_NV.gather(1, targets_N[:, None]).squeeze(1), entropy_N


def kept_tokens(targets_N, seed=0):
    """Some tokens for each target, its own among them."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for target in targets_N.tolist():
        others = torch.randperm(V, generator=generator)[: int(torch.randint(0, V, (), generator=generator))]
        rows.append(torch.unique(torch.cat([others, torch.tensor([target])])))
    sizes = torch.tensor([0, *(len(row) for row in rows)])
    return KeptTokens(torch.cat(rows), sizes.cumsum(0))


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [(1, 1), (4, 5), (13, 17), (5, 1000)])
def test_entropy_and_its_gradient_are_exact_for_any_tile(sizes, bias, kept):
    given = inputs(bias=bias)
    kept = kept_tokens(given["targets_N"]) if kept else None
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(N, generator=generator, dtype=torch.float64) for _ in range(2)]
    upstream[0][3] = upstream[1][3] = 0.0
    upstream[0][5] = 0.0
    expected = naive_and_entropy(**given, kept=kept)
    tiles = {"chunk_size": sizes[0], "vocab_chunk_size": sizes[1]}
    ours = chunked_logprobs_and_entropy(**given, kept=kept, **tiles)
    leaves = [given[name] for name in ("hidden_NH", "weight_VH", "bias_V") if given[name] is not None]
    for left, right in zip(ours, expected, strict=True):
        # float64: logits of order 5, sums over 17 tokens.
        torch.testing.assert_close(left, right, rtol=0, atol=1e-13)
    both = [
        torch.autograd.grad(sum((o * u).sum() for o, u in zip(outputs, upstream, strict=True)), leaves)
        for outputs in (ours, expected)
    ]
    for left, right in zip(*both, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-12)
    logprobs_N = chunked_logprobs(**given, kept=kept, **tiles)
    assert torch.equal(logprobs_N, ours[0])


def test_gradients_with_entropy_and_kept_tokens_pass_gradcheck():
    given = inputs(num_targets=5)
    kept = kept_tokens(given["targets_N"])

    def head(hidden_NH, weight_VH, bias_V):
        return chunked_logprobs_and_entropy(
            hidden_NH,
            weight_VH,
            given["targets_N"],
            given["temperature_N"],
            bias_V=bias_V,
            kept=kept,
            chunk_size=2,
            vocab_chunk_size=7,
        )

    torch.autograd.gradcheck(head, (given["hidden_NH"], given["weight_VH"], given["bias_V"]))


def test_entropy_alone_has_a_gradient():
    given = inputs()
    ours = chunked_logprobs_and_entropy(**given, chunk_size=4)[1]
    expected = naive_and_entropy(**given)[1]
    for left, right in zip(*(torch.autograd.grad(e.sum(), given["hidden_NH"]) for e in (ours, expected)), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-12)


def test_target_that_was_not_kept_is_refused_by_name():
    given = inputs()
    kept = kept_tokens((given["targets_N"] + 1) % V, seed=4)
    mine = [
        n
        for n in range(N)
        if int(given["targets_N"][n]) not in kept.token_ids_K[kept.offsets[n] : kept.offsets[n + 1]].tolist()
    ]
    with pytest.raises(InvalidRequestError, match=rf"target {mine[0]} .* is not among its kept tokens"):
        chunked_logprobs(**given, kept=kept)


@pytest.mark.parametrize("head", [chunked_logprobs, chunked_logprobs_and_entropy, one_pass])
@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("targets_N", torch.tensor([0, 17, 3]), "target 1 is token 17, but the vocabulary has 17"),
        ("targets_N", torch.tensor([-100, 1, 3]), "target 0 is token -100"),
        ("targets_N", torch.tensor([1, 3]), r"targets \[2\] .* do not fit: they must be \[N, H\]"),
        ("temperature_N", torch.tensor([1.0, 0.0, 1.0]), "temperature of target 1 is 0.0: .* greedy"),
        ("temperature_N", torch.tensor([1.0, 1.0, float("nan")]), "temperature of target 2 is nan"),
        ("temperature_N", torch.tensor(1.0), r"temperature \[\]"),
        ("weight_VH", torch.zeros(17, 5, dtype=torch.float64), r"hidden \[3, 6\], weight \[17, 5\]"),
        ("hidden_NH", torch.zeros(1, 3, 6, dtype=torch.float64), r"hidden \[1, 3, 6\]"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_with_what_they_are(head, name, wrong, message):
    given = inputs(num_targets=3) | {name: wrong}
    more = {"loss_of": lambda logprobs_C, rows: logprobs_C.sum()} if head is one_pass else {}
    with pytest.raises(InvalidRequestError, match=message):
        head(**given, **more)


# ---- one pass


def weighted(upstream_N):
    """A loss that is a sum over targets, with a bend: rows above -2.5 only."""
    return lambda logprobs_C, rows: (upstream_N[rows] * logprobs_C.clamp(max=-2.5).square()).sum()


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("chunk_size", [1, 4, 13, 1024])
def test_one_pass_equals_two(chunk_size, bias, scale):
    given = inputs(bias=bias)
    upstream_N = torch.randn(N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    upstream_N[2] = 0.0
    loss_of = weighted(upstream_N)
    two = scale * loss_of(chunked_logprobs(**given), slice(0, N))
    one = scale * one_pass(**given, loss_of=loss_of, chunk_size=chunk_size)
    torch.testing.assert_close(one, two, rtol=1e-13, atol=0)
    leaves = [given[name] for name in ("hidden_NH", "weight_VH", "bias_V") if given[name] is not None]
    for left, right in zip(torch.autograd.grad(one, leaves), torch.autograd.grad(two, leaves), strict=True):
        # float64: sums over 13 rows and 17 tokens.
        torch.testing.assert_close(left, right, rtol=0, atol=1e-12)


def test_one_pass_passes_gradcheck():
    given = inputs(num_targets=5)
    upstream_N = torch.linspace(-1, 1, 5, dtype=torch.float64)

    def total(hidden_NH, weight_VH, bias_V):
        return one_pass(
            hidden_NH,
            weight_VH,
            given["targets_N"],
            given["temperature_N"],
            lambda logprobs_C, rows: (upstream_N[rows] * logprobs_C.square()).sum(),
            bias_V=bias_V,
            chunk_size=2,
        )

    torch.autograd.gradcheck(total, (given["hidden_NH"], given["weight_VH"], given["bias_V"]))


# ---- memory, counted and not measured


def transient_bytes(run, hidden_NH, weight_VH):
    """Peak of live bytes beyond the gradients that are the result."""
    hidden_NH.grad = weight_VH.grad = None
    with LiveBytes() as ledger:
        run()
    return ledger.peak - hidden_NH.nbytes - weight_VH.nbytes


def test_transient_memory_is_a_few_tiles_and_a_small_share_of_the_naive_way():
    num_targets, hidden_size, vocab_size = 4096, 8, 4096
    hidden_NH = torch.randn(num_targets, hidden_size, requires_grad=True)
    weight_VH = torch.randn(vocab_size, hidden_size, requires_grad=True)
    targets_N = torch.randint(vocab_size, (num_targets,))
    temperature_N = torch.full((num_targets,), 0.8)

    def naive():
        logits_NV = hidden_NH @ weight_VH.t() / temperature_N[:, None]
        logits_NV.log_softmax(1).gather(1, targets_N[:, None]).sum().backward()

    def two_passes():
        sizes = {"chunk_size": 256, "vocab_chunk_size": 1024}
        chunked_logprobs(hidden_NH, weight_VH, targets_N, temperature_N, **sizes).sum().backward()

    def with_entropy():
        sizes = {"chunk_size": 256, "vocab_chunk_size": 1024}
        both = chunked_logprobs_and_entropy(hidden_NH, weight_VH, targets_N, temperature_N, **sizes)
        (both[0].sum() + both[1].sum()).backward()

    def single_pass():
        one_pass(
            hidden_NH, weight_VH, targets_N, temperature_N, lambda logprobs_C, _: logprobs_C.sum(), chunk_size=256
        ).backward()

    rows, tile = 4 * num_targets, 4 * 256 * 1024
    wanted = {two_passes: tile, with_entropy: 3 * tile, single_pass: 4 * 256 * vocab_size}
    largest = transient_bytes(naive, hidden_NH, weight_VH)
    assert largest >= 3 * 4 * num_targets * vocab_size
    for run, size in wanted.items():
        seen = transient_bytes(run, hidden_NH, weight_VH)
        # Besides the tiles: a dozen values per target, and one more copy of hidden states and gradient.
        assert seen <= size + 16 * rows + 2 * hidden_NH.nbytes + weight_VH.nbytes, run.__name__
        assert seen <= largest / 10

"""The decode step, one token per sequence, as a compilable function of tensors that have only a few different shapes.

The step reads parameters, keys and values in place, so their addresses must not change. This requires an arena of a
fixed size, and updates that are copied into place (`inflight.engines.embedded.parameters.overwrite`). The number of
rows and the number of attended positions are padded to a few different values.

Shape suffixes: B rows of the arena, C attended positions, V vocabulary, and those of
`inflight.engines.embedded.slot_attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, cast

import torch

from inflight.engines.embedded.slot_attention import AttentionPlan, DecodingRows, attend_rows, vector_indices
from inflight.engines.embedded.slots import Arena, Slot
from inflight.errors import ConfigError
from inflight.weights.encode.transit import cuda

DecodeStep = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Maps token ids and positions [2, B], and the numbers 0 to C - 1 [C], to logits [B, V]."""
Compiler = Callable[[DecodeStep], DecodeStep]
Layers = tuple[torch.Tensor, ...]
"""Keys or values [S, K, C, D] of each layer of an arena."""
Recorded = tuple[Callable[[], None], torch.Tensor]
"""A call that replays a recorded step, and the tensor to which it writes its result."""

_FEWEST_PLACES = 64
_ROWS = 8
"""Numbers of rows above this are rounded up to a multiple of it."""


class Decoder:
    """Decodes the sequences of an arena of a fixed size with a compiled step.

    The constructor compiles the step, which takes a while. Raises `ConfigError` if the step cannot be compiled.
    """

    def __init__(self, model: Any, arena: Arena, compiler: Compiler) -> None:
        self._arena = arena
        self._device = arena.keys_LSKCD.device
        self._num_rows = arena.num_slots
        places_C = torch.arange(arena.capacity, device=self._device)
        lengths = {num_places(length, arena.capacity) for length in range(1, arena.capacity + 1)}
        self._places = {length: _mark_dynamic(places_C[:length]) for length in sorted(lengths)}
        self._step = compiler(_decode_step(model, arena))
        self._warm_up()

    @torch.inference_mode()
    def _warm_up(self) -> None:
        try:
            for length in {min(self._places), max(self._places)}:
                self._step(self._inputs({}, num_rows(1, self._num_rows)), self._places[length])
        except Exception as error:  # the compiler may raise anything
            why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            raise ConfigError(f"the decode step of this model cannot be compiled ({why}); omit compile") from error

    def logits(self, token_ids: Mapping[Slot, int]) -> torch.Tensor:
        """Store the keys and values of each slot's token, and return logits [B, V] in the order of ``token_ids``.

        The next call may overwrite the result.
        """
        rows = [slot.row for slot in token_ids]
        inputs_2B = self._inputs(token_ids, num_rows(max(rows) + 1, self._num_rows))
        longest = max(slot.length for slot in token_ids) + 1
        logits_BV = self._step(inputs_2B, self._places[num_places(longest, self._arena.capacity)])
        if rows == list(range(len(rows))):
            return logits_BV[: len(rows)]
        return logits_BV[torch.tensor(rows, device=self._device)]

    def _inputs(self, token_ids: Mapping[Slot, int], num_rows: int) -> torch.Tensor:
        """Return token ids and positions [2, B].

        A row without a token writes to a position that is overwritten before it is read: the first position if the row
        is free, or else the position after its sequence.
        """
        ids, positions = [0] * num_rows, [0] * num_rows
        for slot in self._arena.owners:
            if slot.row < num_rows:
                ids[slot.row], positions[slot.row] = token_ids.get(slot, 0), slot.length
        return _mark_dynamic(torch.tensor([ids, positions], device=self._device))


def num_rows(num: int, most: int) -> int:
    """Return how many rows, at most ``most``, a step computes if ``num`` rows are in use."""
    return min(most, max(2, 1 << (num - 1).bit_length()) if num <= _ROWS else -(-num // _ROWS) * _ROWS)


def num_places(num: int, most: int) -> int:
    """Return how many positions, at most ``most``, a step attends to if its longest sequence has ``num`` of them."""
    return min(most, max(_FEWEST_PLACES, 1 << (num - 1).bit_length()))


def compiler_for(device: torch.device) -> Compiler:
    """Return torch's compiler; on a GPU, compiled steps are then captured as CUDA graphs."""
    if device.type == "cuda":
        return lambda step: CapturedDecodeStep(_compile_step(step), RecorderOnGpu(device))
    return _compile_step


class CapturedDecodeStep:
    """A decode step that is recorded when a pair of shapes first occurs, and replayed from then on.

    A replayed step reads and writes the memory that it used while it was recorded.
    """

    def __init__(self, step: DecodeStep, record: Callable[[Callable[[], torch.Tensor]], Recorded]) -> None:
        self._step = step
        self._record = record
        self._recorded: dict[tuple[int, int], tuple[torch.Tensor, Recorded]] = {}

    def __call__(self, inputs_2B: torch.Tensor, places_C: torch.Tensor) -> torch.Tensor:
        shapes = (inputs_2B.shape[1], places_C.shape[0])
        if shapes not in self._recorded:
            own_2B = _mark_dynamic(inputs_2B.clone())
            self._recorded[shapes] = own_2B, self._record(lambda: self._step(own_2B, places_C))
        own_2B, (repeat, logits_BV) = self._recorded[shapes]
        own_2B.copy_(inputs_2B)
        repeat()
        return logits_BV


class RecorderOnGpu:
    """Records what a function does on a GPU as a CUDA graph. All graphs share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], torch.Tensor]) -> Recorded:
        """Return the graph's replay and its output. Calls ``function`` several times."""
        apart = cuda.Stream(self._device)
        apart.wait_stream(cuda.current_stream(self._device))
        with cuda.stream(apart):
            for _ in range(2):  # compilers and libraries choose their kernels and allocate their memory
                function()
        cuda.current_stream(self._device).wait_stream(apart)
        graph = cuda.CUDAGraph()
        # Only this thread is captured: another one may receive weights and allocate memory in the meantime.
        with cuda.graph(graph, pool=self._pool, stream=apart, capture_error_mode="thread_local"):
            result = function()
        return graph.replay, result


class _WholeRows(AttentionPlan):
    """A plan in which row i of the packed batch is row i of an arena."""

    def __init__(self, keys: Layers, values: Layers, inputs_2B: torch.Tensor, places_C: torch.Tensor) -> None:
        self._keys, self._values = keys, values
        positions_B = inputs_2B[1]
        num, longest = positions_B.shape[0], places_C.shape[0]
        visible_B11C = (places_C <= positions_B[:, None])[:, None, None]
        rows_B = torch.arange(num, device=positions_B.device)
        vectors_X = vector_indices(rows_B, positions_B, *keys[0].shape[1:3])
        self._rows = DecodingRows(0, num, longest, vectors_X, rows_B, None, visible_B11C, True)

    def attend(
        self,
        layer: int,
        query_1QTD: torch.Tensor,
        key_1KTD: torch.Tensor,
        value_1KTD: torch.Tensor,
        scale: float | None,
    ) -> torch.Tensor:
        keys_SKCD, values_SKCD = self._keys[layer], self._values[layer]
        return attend_rows(keys_SKCD, values_SKCD, self._rows, query_1QTD, key_1KTD, value_1KTD, scale)


def _decode_step(model: Any, arena: Arena) -> DecodeStep:
    base_model, head = model.base_model, model.get_output_embeddings()
    keys, values = arena.keys_LSKCD.unbind(0), arena.values_LSKCD.unbind(0)

    def step(inputs_2B: torch.Tensor, places_C: torch.Tensor) -> torch.Tensor:
        output = base_model(
            input_ids=inputs_2B[:1],
            position_ids=inputs_2B[1:],
            use_cache=False,
            step_plan=_WholeRows(keys, values, inputs_2B, places_C),
        )
        logits_BV: torch.Tensor = head(output.last_hidden_state[0])
        return logits_BV

    return step


def _compile_step(step: DecodeStep) -> DecodeStep:
    assert isinstance(step, FunctionType)
    # A separate code object: torch caches graphs, and limits their number, by code object.
    own = FunctionType(step.__code__.replace(), step.__globals__, step.__name__, step.__defaults__, step.__closure__)
    return cast(DecodeStep, torch.compile(own, fullgraph=True))


def _mark_dynamic(tensor: torch.Tensor) -> torch.Tensor:
    """Tell torch's compiler that the last dimension varies."""
    torch._dynamo.maybe_mark_dynamic(tensor, tensor.dim() - 1)
    return tensor

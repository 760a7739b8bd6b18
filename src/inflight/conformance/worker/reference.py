"""Reference numbers for a worker: transformers and autograd in float64, one segment at a time.

Shape suffixes: T packed tokens, V vocabulary, K tokens scored in place of each packed token.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from inflight.base.shortened import shortened
from inflight.conformance.checks import require
from inflight.conformance.worker.batches import loss_of, segment_rows
from inflight.model.checkpoints import load_causal_lm
from inflight.types import FREE_EXPERT, AdamSettings, MicroBatch
from inflight.weights.encode.lora_tensors import lora_names
from inflight.wire import LoraSpec


class ReferenceModel:
    """A checkpoint loaded by transformers; its weights may be replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._model: Any = load_causal_lm(path, attention="sdpa", dtype="float64").eval()
        self._lora: tuple[Mapping[str, torch.Tensor], float] = {}, 0.0
        self._base: dict[str, torch.Tensor] = {}
        """Original values of the weights that a LoRA has changed."""

    def adapt(self, lora: Mapping[str, torch.Tensor], spec: LoraSpec) -> None:
        """Merge a LoRA in place of the previous one."""
        self._lora = {name: tensor.double() for name, tensor in lora.items()}, spec.scale
        with torch.no_grad():
            for name, a, b in self._pairs():
                weight = self._model.get_parameter(name)
                base = self._base.setdefault(name, weight.detach().clone())
                weight.copy_(base + spec.scale * (b @ a))

    def lora_gradient_norm(self, batches: Sequence[MicroBatch]) -> float:
        """Return the 2-norm of the gradient of A and B, by the chain rule from the gradient of the merged weights."""
        self._gradients(batches, 1.0)
        _, scale = self._lora
        total = 0.0
        for name, a, b in self._pairs():
            gradient = scale * self._model.get_parameter(name).grad
            total += float((b.T @ gradient).square().sum() + (gradient @ a.T).square().sum())
        return math.sqrt(total)

    def _pairs(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield each weight that the LoRA changes, with A and B."""
        lora, _ = self._lora
        for name, _ in self._model.named_parameters():
            a, b = lora_names(name.removesuffix(".weight"))
            if a in lora:
                yield name, lora[a], lora[b]

    def put(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Replace every weight. Fail the check unless names and shapes are exactly those of the checkpoint."""
        with safe_open(self._path / "model.safetensors", framework="pt") as stored:
            shapes = {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}  # noqa: SIM118
        lost, more = sorted(shapes.keys() - weights.keys()), sorted(weights.keys() - shapes.keys())
        require(not lost, f"missing tensors of the checkpoint: {shortened(lost)}")
        require(not more, f"tensors that do not belong to the checkpoint (tied ones travel once): {shortened(more)}")
        for name, wanted in shapes.items():
            found = tuple(weights[name].shape)
            require(found == wanted, f"{name} has shape {found}, in the checkpoint {wanted}")
        own = dict(self._model.named_parameters())
        if weights.keys() <= own.keys():
            with torch.no_grad():
                for name, tensor in weights.items():
                    own[name].copy_(tensor)
            return
        with tempfile.TemporaryDirectory() as made:
            shutil.copy(self._path / "config.json", made)
            own = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in weights.items()}
            save_file(own, Path(made) / "model.safetensors", metadata={"format": "pt"})
            self._model = load_causal_lm(Path(made), attention="sdpa", dtype="float64").eval()

    def logprobs(self, batch: MicroBatch) -> torch.Tensor:
        """Return the differentiable logprobs of the targets, 0.0 elsewhere: float64 [T], or [T, K] if there are target
        ids."""
        scored_TK = batch.token_ids_T[:, None] if batch.target_ids_TK is None else batch.target_ids_TK
        nothing_1K = torch.zeros(1, scored_TK.shape[1], dtype=torch.float64)
        parts = [nothing_1K[:0]]
        for rows in segment_rows(batch.segment_lengths):
            tokens_T, temperature_T = batch.token_ids_T[rows], batch.temperature_T[rows]
            images = _images_in(batch, rows)
            with self._replaying(batch, rows):
                logits_TV = self._model(input_ids=tokens_T[None], use_cache=False, **images).logits[0]
            logprobs_TV = torch.log_softmax(logits_TV[:-1] / temperature_T[1:, None].double(), dim=-1)
            parts += [nothing_1K, logprobs_TV.gather(1, scored_TK[rows][1:])]
        logprobs_TK = torch.where(batch.loss_mask_T[:, None], torch.cat(parts), 0.0)
        return logprobs_TK[:, 0] if batch.target_ids_TK is None else logprobs_TK

    @contextlib.contextmanager
    def _replaying(self, batch: MicroBatch, rows: slice) -> Iterator[None]:
        """Use the recorded experts of a segment during the block, if the batch has any."""
        if batch.routed_experts_TLK is None:
            yield
            return
        experts_LTK = batch.routed_experts_TLK[rows].long().unbind(1)
        with contextlib.ExitStack() as hooks:
            for layer, experts_TK in zip(self._model.model.layers, experts_LTK, strict=True):
                hook = layer.mlp.gate.register_forward_hook(partial(_with_experts, experts_TK))
                hooks.callback(hook.remove)
            yield

    def gradient_norm(self, batches: Sequence[MicroBatch], scale: float = 1.0) -> float:
        """Return the 2-norm of the gradient of the loss summed over all these batches."""
        return math.sqrt(sum(float(g.square().sum()) for g in self._gradients(batches, scale)))

    def largest_gradient(self, batches: Sequence[MicroBatch]) -> float:
        """Return the largest absolute value in the gradient of the loss summed over all these batches."""
        return max(float(g.abs().max()) for g in self._gradients(batches, 1.0))

    def take_steps(self, batches: Sequence[Sequence[MicroBatch]], settings: Sequence[AdamSettings]) -> None:
        """Take a step of AdamW over each group of batches, with its own settings.

        Weight decay is decoupled, and moments are bias-corrected, as in Loshchilov and Hutter 2019, algorithm 2.
        """
        parameters = dict(self._model.named_parameters())
        first = {name: torch.zeros_like(p) for name, p in parameters.items()}
        second = {name: torch.zeros_like(p) for name, p in parameters.items()}
        for number, (of_step, it) in enumerate(zip(batches, settings, strict=True), 1):
            norm = math.sqrt(sum(float(g.square().sum()) for g in self._gradients(of_step, 1.0)))
            factor = 1.0 if it.max_gradient_norm is None else min(1.0, it.max_gradient_norm / norm)
            with torch.no_grad():
                for name, p in parameters.items():
                    gradient = factor * p.grad
                    first[name] = it.betas[0] * first[name] + (1 - it.betas[0]) * gradient
                    second[name] = it.betas[1] * second[name] + (1 - it.betas[1]) * gradient**2
                    mean = first[name] / (1 - it.betas[0] ** number)
                    deviation = (second[name] / (1 - it.betas[1] ** number)).sqrt()
                    p.mul_(1 - it.learning_rate * it.weight_decay)
                    p.sub_(it.learning_rate * mean / (deviation + it.eps))

    def weights(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return the weights with these checkpoint names, split into single experts if transformers merges them."""
        own, names = dict(self._model.named_parameters()), list(names)
        if own.keys() >= set(names):
            return {name: own[name].detach().clone() for name in names}
        with tempfile.TemporaryDirectory() as made:
            self._model.save_pretrained(made)
            stored = load_file(Path(made) / "model.safetensors")
        return {name: stored[name] for name in names}

    def gradients(self, batches: Sequence[MicroBatch], scale: float, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return the gradient of the loss summed over all these batches, by checkpoint name."""
        self._gradients(batches, scale)
        parameters = list(self._model.parameters())
        own = [p.data for p in parameters]
        try:
            for p in parameters:
                p.data = torch.zeros_like(p) if p.grad is None else p.grad
            return self.weights(names)
        finally:
            for p, data in zip(parameters, own, strict=True):
                p.data = data

    def _gradients(self, batches: Sequence[MicroBatch], scale: float) -> list[torch.Tensor]:
        self._model.zero_grad()
        for batch in batches:
            torch.autograd.backward(loss_of(self.logprobs(batch), batch, scale))
        return [p.grad for p in self._model.parameters() if p.grad is not None]


def _with_experts(experts_TK: torch.Tensor, router: Any, _: Any, routed: tuple[torch.Tensor, ...]) -> Any:
    """Return the output of a Qwen3-MoE router, with these experts wherever they are not -1."""
    logits_TE, _, own_TK = routed
    chosen_TK = torch.where(experts_TK == FREE_EXPERT, own_TK, experts_TK)
    shares_TK = torch.softmax(logits_TE, dim=-1, dtype=torch.float32).gather(1, chosen_TK)
    if router.norm_topk_prob:
        shares_TK = shares_TK / shares_TK.sum(dim=-1, keepdim=True)
    return logits_TE, shares_TK.to(logits_TE.dtype), chosen_TK


def _images_in(batch: MicroBatch, rows: slice) -> dict[str, torch.Tensor]:
    """Return the tensors of a segment's images, each of which fills the same number of tokens."""
    if batch.image_rows_M is None:
        return {}
    first_of_images = batch.image_rows_M.view(len(next(iter(batch.image_tensors.values()))), -1)[:, 0]
    mine = (first_of_images >= rows.start) & (first_of_images < rows.stop)
    return {name: tensor[mine].double() for name, tensor in batch.image_tensors.items() if mine.any()}

"""Reference logprobs: the forward pass of transformers in float32, under any weights that the kit chooses.

Shape suffixes: T tokens, V vocabulary.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from inflight.errors import ConfigError
from inflight.model.checkpoints import load_causal_lm, load_config, load_tokenizer, max_model_len_of, stored_names
from inflight.model.images import load_image_processor
from inflight.wire import ImageUrl, SamplingParams, VersionSpan

_NUM_FACTORS = 1 << 18
"""How many random factors are drawn to perturb a tensor. A larger tensor reuses them, because drawing factors takes
longer than any other part of an update of a real model."""
_FEWEST_SHARED = 16
"""Keys and values of an earlier sequence are reused if it begins with at least this many of the same tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceWeights:
    """Tensors by checkpoint name, in the order in which they are sent. Evidence refers to them by ``label``."""

    label: str
    tensors: Mapping[str, torch.Tensor]

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


class ReferenceCheckpoint:
    """A checkpoint directory: its weights, variants of these, and the logprobs that transformers computes with any of
    them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = load_config(path)
        self._model: Any = load_causal_lm(path, attention="sdpa", dtype="float32")
        self._models = {"float32": self._model}
        """The models that compute logits, by dtype."""
        self._stored_names = stored_names(self._model)
        self._loaded: dict[str, ReferenceWeights] = {}
        """The weights that each of these models contains, by dtype; missing where they are not known."""
        self._computed: dict[str, tuple[ReferenceWeights | None, tuple[int, ...], Any]] = {}
        """By dtype, the last sequence that was computed: the weights, the tokens, and their keys and values."""
        layer_types = getattr(self.config.get_text_config(), "layer_types", None) or ()
        self._reuses_prefixes = set(layer_types) <= {"full_attention"}
        """Whether the keys and values of a longer sequence can be cut down to those of a prefix."""
        self._perturbed: tuple[tuple[str, int], ReferenceWeights] | None = None
        """The arguments and the result of the last call of `perturbed`."""
        self.images = load_image_processor(path)
        """None if the model does not accept images."""
        self.tokenizer = load_tokenizer(path)
        self.max_model_len = max_model_len_of(self.config)
        self.vocab_size = _vocab_size(self._model)
        self.is_tied = bool(self.config.get_text_config().tie_word_embeddings)
        self._is_fused = any(".experts." in name for name in self._stored_names.values())
        """Whether transformers fuses the experts of a layer, so that only its own loader can set their parameters."""
        self.weights = ReferenceWeights("A", self._stored())

    def cast(self, dtype: str) -> None:
        """Convert the weights to another dtype, as an engine that computes in that dtype does."""
        wanted: torch.dtype = getattr(torch, dtype)
        self.weights = ReferenceWeights("A", {name: tensor.to(wanted) for name, tensor in self.weights.tensors.items()})

    @property
    def eos_token_ids(self) -> frozenset[int]:
        for source in (self._model.generation_config, self.config, self.tokenizer):
            ids = getattr(source, "eos_token_id", None)
            if ids is not None:
                return frozenset(ids if isinstance(ids, list | tuple) else [int(ids)])
        return frozenset()

    def _stored(self) -> dict[str, torch.Tensor]:
        """Return the trained tensors in the model's order. Tied tensors appear once, under the first name that the
        model uses."""
        stored: dict[str, torch.Tensor] = {}
        for file in sorted(self.path.glob("*.safetensors")):
            stored.update(load_file(file))
        names = [self._stored_names[name] for name, _ in self._model.named_parameters()]
        missing = [name for name in names if name not in stored]
        if self._is_fused and all(".experts." in name for name in missing):
            return stored
        if missing:
            raise ConfigError(f"{str(self.path)!r} does not store the tensor {missing[0]!r}, which its model uses")
        return {name: stored[name] for name in names}

    @property
    def final_norm(self) -> str:
        names = [n for n in self.weights.tensors if n.endswith("norm.weight") and ".layers." not in n]
        names = [name for name in names if not name.startswith("vision_tower.")]
        if len(names) != 1:
            raise ConfigError(f"cannot determine which tensor of {str(self.path)!r} is the final norm: {names}")
        return names[0]

    def with_final_norm(self, factor: float, label: str, of: ReferenceWeights | None = None) -> ReferenceWeights:
        """Return weights whose logits are ``factor`` times those of the checkpoint, or of the weights ``of``.

        If ``factor`` is plus or minus a power of two, the logits are exact multiples. Keys and values are unchanged,
        because the scaled norm comes after every layer.
        """
        offset = 1.0 if self.config.get_text_config().model_type.startswith("gemma") else 0.0
        tensors = dict((of or self.weights).tensors)
        norm = tensors[self.final_norm]
        tensors[self.final_norm] = (factor * (norm.double() + offset) - offset).to(norm.dtype)
        return ReferenceWeights(label, tensors)

    def perturbed(self, label: str, seed: int = 1) -> ReferenceWeights:
        """Return weights in which every tensor differs, so that logits, keys and values differ too.

        The changes of many layers add up. In a deep model, each change is smaller; otherwise the model would amplify
        every rounding error.
        """
        if self._perturbed is None or self._perturbed[0] != (label, seed):
            strength = 0.25 * min(1.0, 2 / self.config.get_text_config().num_hidden_layers) ** 0.5
            random = torch.Generator().manual_seed(seed)
            tensors = {}
            for name, tensor in self.weights.tensors.items():
                grows = torch.empty(min(tensor.numel(), _NUM_FACTORS), dtype=torch.bool).random_(generator=random)
                factors = torch.where(grows, 1 + strength, 1 - strength).to(tensor.dtype)
                flat, num = tensor.reshape(-1), len(factors)
                parts = [flat[i : i + num] * factors[: len(flat) - i] for i in range(0, len(flat), num)]
                tensors[name] = torch.cat(parts).view(tensor.shape)
            self._perturbed = (label, seed), ReferenceWeights(label, tensors)
        return self._perturbed[1]

    def rounded_again(self, weights: ReferenceWeights, dtype: str, seed: int = 1) -> ReferenceWeights:
        """Return float32 weights in which each element is randomly larger or smaller, by a typical rounding error of
        ``dtype``; ``seed`` selects which elements grow."""
        step, random = torch.finfo(getattr(torch, dtype)).eps / 4, torch.Generator().manual_seed(seed)
        tensors = {
            name: tensor.float() * (1 + step * torch.randn(tensor.shape, generator=random).sign())
            for name, tensor in weights.tensors.items()
        }
        return ReferenceWeights(f"{weights.label}, rounded again", tensors)

    def save(self, weights: ReferenceWeights, path: Path) -> Path:
        """Write a checkpoint directory with these weights; return ``path``."""
        path.mkdir(parents=True, exist_ok=True)
        for file in self.path.iterdir():
            if file.is_file() and ".safetensors" not in file.name:
                (path / file.name).write_bytes(file.read_bytes())
        save_file({n: t.contiguous() for n, t in weights.tensors.items()}, path / "model.safetensors", {"format": "pt"})
        return path

    @torch.inference_mode()
    def logits(
        self,
        weights: ReferenceWeights,
        prompt: Sequence[int],
        completion: Sequence[int],
        images: Sequence[ImageUrl] = (),
        dtype: str = "float32",
        window: int | None = None,
    ) -> torch.Tensor:
        """Return float32 [T, V]: the logits from which each of the T completion tokens is drawn, computed in ``dtype``.

        If there are ``images``, all placeholders must belong to them. If there is a ``window``, each token attends to
        only that many tokens, including itself.
        """
        model = self._model_of(weights, dtype)
        num = len(completion)
        if self._reuses_prefixes and not images and window is None and num:
            return self._continued(weights, dtype, (*prompt, *completion)[:-1], num)
        ids = torch.tensor([[*prompt, *completion]])
        tensors = self.images.tensors(images) if self.images is not None and images else {}
        if window is not None:
            distance = torch.arange(ids.shape[1] - 1)[:, None] - torch.arange(ids.shape[1] - 1)
            tensors["attention_mask"] = ((distance >= 0) & (distance < window))[None, None]
        logits_TV: torch.Tensor = model(
            input_ids=ids[:, :-1], use_cache=False, logits_to_keep=max(1, num), **tensors
        ).logits[0]
        return logits_TV[len(logits_TV) - num :].float()

    def _continued(self, weights: ReferenceWeights, dtype: str, ids: Sequence[int], num: int) -> torch.Tensor:
        """Return float32 [T, V]: the logits after each of the last ``num`` tokens.

        What the previous call computed with the same weights for the beginning of these tokens is reused, because
        checks often compare several completions of one prompt.
        """
        known_weights, known_ids, cache = self._computed.pop(dtype, (None, (), None))
        shared = 0
        if known_weights is weights and cache is not None:
            most = min(len(known_ids), len(ids) - num)
            shared = next((i for i in range(most) if ids[i] != known_ids[i]), most)
        if shared < _FEWEST_SHARED:
            shared, cache = 0, None
        elif shared < len(known_ids):
            cache.crop(shared - len(known_ids))
        output = self._models[dtype](
            input_ids=torch.tensor([ids[shared:]]), past_key_values=cache, use_cache=True, logits_to_keep=num
        )
        self._computed[dtype] = weights, tuple(ids), output.past_key_values
        logits_TV: torch.Tensor = output.logits[0].float()
        return logits_TV

    @torch.inference_mode()
    def mixed_logits(
        self, parts: Sequence[tuple[ReferenceWeights, int]], ids: Sequence[int], first: int, dtype: str = "float32"
    ) -> torch.Tensor:
        """Return float32 [T, V]: the logits from position ``first`` to the last but one, computed in ``dtype``.

        The keys and values come from several sets of weights.

        ``parts`` is an ordered list of pairs of weights and a bound. Each set of weights computes the keys and values
        of the positions from the previous bound up to its own.
        """
        cache, logits, done = None, [], 0
        for weights, stop in parts:
            output = self._model_of(weights, dtype)(
                input_ids=torch.tensor([ids[done:stop]]), past_key_values=cache, use_cache=True
            )
            cache, done = output.past_key_values, stop
            logits.append(output.logits[0].float())
        return torch.cat(logits)[first:]

    def kept_logits(
        self,
        versions: Mapping[int, ReferenceWeights],
        spans: Sequence[VersionSpan],
        prompt: Sequence[int],
        completion: Sequence[int],
        dtype: str = "float32",
    ) -> torch.Tensor:
        """Return float32 [T, V]: the logits of each position under the weights of its step, with keys and values kept
        across updates.

        The step that samples token k computes the keys and values of token k - 1, and the first step those of the
        prompt.
        """
        parts = [(versions[span.version], len(prompt) + span.end - 1) for span in spans]
        return self.mixed_logits(parts, [*prompt, *completion], len(prompt) - 1, dtype)

    def logprobs(
        self,
        weights: ReferenceWeights,
        prompt: Sequence[int],
        completion: Sequence[int],
        sampling: SamplingParams | None = None,
        images: Sequence[ImageUrl] = (),
    ) -> torch.Tensor:
        """Return float64 [T]: behaviour logprobs of the completion under these weights and sampling parameters."""
        return chosen(distribution(self.logits(weights, prompt, completion, images), sampling), completion)

    def rounding(self, dtype: str, ids: Sequence[int]) -> float:
        """Return the largest change in the logprobs of these tokens that is caused by computing in ``dtype``.

        It is the larger of the changes under the checkpoint's weights and under perturbed weights, which checks also
        use.
        """
        largest = 0.0
        for weights in (self.perturbed("B"), self.weights):
            exact_T = self.logprobs(weights, ids[:1], ids[1:])
            rounded_T = chosen(distribution(self.logits(weights, ids[:1], ids[1:], dtype=dtype)), ids[1:])
            largest = max(largest, float((rounded_T - exact_T).abs().max()))
        return largest

    @torch.no_grad()
    def _model_of(self, weights: ReferenceWeights, dtype: str) -> Any:
        """Return a model in this dtype with these weights, which stay loaded until the next call for the dtype."""
        if weights is self._loaded.get(dtype):
            return self._models[dtype]
        loaded = self._loaded.pop(dtype, None)
        if self._is_fused:
            with tempfile.TemporaryDirectory(prefix="inflight-reference-") as directory:
                model = load_causal_lm(self.save(weights, Path(directory)), attention="sdpa", dtype="float32")
            self._models[dtype] = model.to(getattr(torch, dtype))
        elif dtype not in self._models:
            self._models[dtype] = copy.deepcopy(self._model).to(getattr(torch, dtype))
        if not self._is_fused:
            parameters = dict(self._models[dtype].named_parameters())
            own = {stored: name for name, stored in self._stored_names.items()}
            for name, tensor in weights.tensors.items():
                if loaded is None or loaded.tensors[name] is not tensor:
                    parameters[own[name]].copy_(tensor)
        self._loaded[dtype] = weights
        return self._models[dtype]


def _vocab_size(model: Any) -> int:
    return int(model.get_output_embeddings().weight.shape[0])


def distribution(logits_TV: torch.Tensor, sampling: SamplingParams | None = None) -> torch.Tensor:
    """Return float64 [T, V]: logprobs after temperature, top-k, top-p and min-p, -inf for tokens that are filtered out.

    Without parameters, or at temperature 0, they are the log-softmax of the unscaled logits. The code is deliberately
    simple.
    """
    logits_TV = logits_TV.double()
    if sampling is None or sampling.temperature == 0:
        return torch.log_softmax(logits_TV, dim=-1)
    logits_TV = logits_TV / sampling.temperature
    rows = []
    for logits_V in logits_TV:
        if sampling.top_k:
            kept = set(logits_V.topk(min(sampling.top_k, len(logits_V))).indices.tolist())
            logits_V = _only(logits_V, kept)
        if sampling.top_p < 1:
            total, kept = 0.0, set()
            probabilities = logits_V.softmax(-1)
            for token in probabilities.argsort(descending=True).tolist():
                if total >= sampling.top_p:
                    break
                kept.add(token)
                total += float(probabilities[token])
            logits_V = _only(logits_V, kept)
        if sampling.min_p:
            probabilities = logits_V.softmax(-1)
            smallest = sampling.min_p * float(probabilities.max())
            logits_V = _only(logits_V, {t for t, p in enumerate(probabilities.tolist()) if p >= smallest})
        rows.append(torch.log_softmax(logits_V, dim=-1))
    return torch.stack(rows)


def _only(logits_V: torch.Tensor, kept: set[int]) -> torch.Tensor:
    filtered_V = torch.full_like(logits_V, -torch.inf)
    index = torch.tensor(sorted(kept))
    filtered_V[index] = logits_V[index]
    return filtered_V


def chosen(logprobs_TV: torch.Tensor, completion: Sequence[int]) -> torch.Tensor:
    """Return the logprob [T] of each completion token."""
    return logprobs_TV.gather(1, torch.tensor(list(completion))[:, None])[:, 0]

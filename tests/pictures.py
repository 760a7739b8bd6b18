"""A tiny random model that sees, pictures, and what plain transformers makes of both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from inflight.engines.embedded.tiny_images import TinyImageShape, create_tiny_image_model, save_tiny_image_model
from inflight.model.images import ImageProcessor, image_url_of, load_image_processor
from inflight.wire import Completion, GenerateRequest

RED, BLUE = (220, 30, 30), (30, 40, 220)


def make_image_model(path: Path, seed: int = 0, **shape: int) -> Path:
    """Write a random model with large weights, so that a wrong pixel shows, and return its path."""
    sizes = {"hidden_size": 32, "num_heads": 2, "max_model_len": 256} | shape
    model = create_tiny_image_model(TinyImageShape(**sizes), seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(6.0)
    save_tiny_image_model(model, path)
    return path


def picture(colour: tuple[int, int, int], size: int = 28) -> str:
    """The data URL of a picture whose left half has a pattern."""
    image = Image.new("RGB", (size, size), colour)
    for x in range(size // 2):
        for y in range(size):
            image.putpixel((x, y), (colour[2], 30 * x % 255, 9 * y % 255))
    return image_url_of(image)


def images_of(path: Path) -> ImageProcessor:
    images = load_image_processor(path)
    assert images is not None
    return images


class Reference:
    """transformers' own forward of one sequence; in float64 not with eager attention, whose softmax is in float32."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32) -> None:
        from transformers import AutoModelForImageTextToText

        attention = "sdpa" if dtype == torch.float64 else "eager"
        self.model: Any = AutoModelForImageTextToText.from_pretrained(path, attn_implementation=attention, dtype=dtype)
        self._images = images_of(path)

    def logprobs(self, token_ids: Sequence[int], urls: Sequence[str] = (), temperature: float = 1.0) -> torch.Tensor:
        """Log-softmax [T, V] behind each token; placeholders must be those of the images and no others."""
        tensors = {k: v.to(self.model.dtype) for k, v in self._images.tensors(urls).items()} if urls else {}
        logits = self.model(input_ids=torch.tensor([list(token_ids)]), **tensors).logits[0]
        return (logits / temperature).log_softmax(-1)

    @torch.no_grad()
    def gap(self, request: GenerateRequest, completion: Completion) -> float:
        """The largest difference between a completion's logprobs and these."""
        num = len(request.prompt_token_ids)
        logprobs = self.logprobs(
            (*request.prompt_token_ids, *completion.token_ids),
            [image.url for image in request.images],
            request.sampling.temperature or 1.0,
        )
        own = [float(logprobs[num - 1 + i, token]) for i, token in enumerate(completion.token_ids)]
        return max(abs(a - b) for a, b in zip(own, completion.logprobs, strict=True))

"""Images in prompts: decoding them, placing them among tokens, and preprocessing them with the model's own processor.

A model of a supported family replaces each placeholder token with one feature of an image, and every token occupies one
position. This module imports torch and transformers only when they are used.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inflight.errors import ConfigError, InvalidRequestError, UnsupportedError
from inflight.model.untrusted import trusts_remote_code
from inflight.types import Message
from inflight.wire import ImageUrl, PromptImage

if TYPE_CHECKING:
    import torch

FAMILIES = ("llava",)
"""The supported values of ``model_type``: image features replace placeholders, and each token occupies one position."""

_TOWERS = ("siglip_vision_model", "clip_vision_model")
"""The supported vision towers, which produce the same number of features for every image."""
_MAX_PIXELS = 1 << 24
"""Images with more pixels are refused, because a file of a few kilobytes can expand to gigabytes."""
_NUM_CACHED = 64
"""Number of images whose tensors are cached, because the completions of a group share them."""


def takes_images(config: Any) -> bool:
    """Return whether a transformers configuration describes a model with a vision tower."""
    return getattr(config, "vision_config", None) is not None


def check_family(config: Any) -> None:
    """Raise `UnsupportedError` unless images can be processed for a model with this configuration."""
    tower = getattr(config.vision_config, "model_type", "")
    if config.model_type not in FAMILIES or tower not in _TOWERS:
        raise UnsupportedError(
            f"{config.model_type} with the vision tower {tower} is not supported with images; supported: "
            f"{', '.join(FAMILIES)} with {' or '.join(_TOWERS)}. Other families place features or count positions "
            "differently"
        )


def image_url_of(image: Any) -> str:
    """Return a data URL that contains a Pillow image as a PNG file."""
    content = io.BytesIO()
    image.save(content, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"


def decoded(url: ImageUrl) -> Any:
    """Return the image in a data URL as a Pillow image in RGB.

    Raises `InvalidRequestError` if it cannot be decoded or has too many pixels, and `ConfigError` if Pillow is not
    installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError("images need Pillow: pip install 'inflight[images]'") from error
    head, _, content = url.partition(",")
    try:
        image = Image.open(io.BytesIO(base64.b64decode(content)), formats=("PNG", "JPEG", "WEBP"))
        if image.width * image.height > _MAX_PIXELS:
            raise ValueError(f"it has {image.width} x {image.height} pixels, but at most {_MAX_PIXELS:,} are supported")
        return image.convert("RGB")
    except Exception as error:  # Pillow raises whatever its decoders raise
        raise InvalidRequestError(f"the image in {head!r} cannot be decoded: {error}") from error


class ImageProcessor:
    """Prepares images for one model with the processor that transformers loads for it.

    Clients use it to place images among token ids; engines and trainers use it to compute the inputs of the vision
    tower. Raises `UnsupportedError` for an unsupported family.
    """

    def __init__(self, processor: Any, config: Any) -> None:
        check_family(config)
        self._processor = processor
        self.placeholder_id = int(config.image_token_id)
        self.placeholder = str(processor.image_token)
        self._made = lru_cache(maxsize=_NUM_CACHED)(self._make)

    def num_tokens(self, url: ImageUrl) -> int:
        """Return the number of placeholder tokens that an image fills.

        Raises `InvalidRequestError` if the image cannot be decoded.
        """
        return self._made(url)[0]

    def tensors(self, urls: Iterable[ImageUrl]) -> dict[str, torch.Tensor]:
        """Return the vision tower's inputs for at least one image, concatenated along the first dimension."""
        import torch

        made = [self._made(url)[1] for url in urls]
        return {name: torch.cat([tensors[name] for tensors in made]) for name in made[0]}

    def placed(
        self, token_ids: Sequence[int], urls: Sequence[ImageUrl], start: int = 0
    ) -> tuple[tuple[int, ...], tuple[PromptImage, ...]]:
        """Return the tokens of a rendered chat with each placeholder repeated once per feature, and the placed images.

        Raises `InvalidRequestError` unless ``token_ids`` has one placeholder for each image. ``start`` is the number of
        prompt tokens that precede ``token_ids``.
        """
        num_found = sum(token_id == self.placeholder_id for token_id in token_ids)
        if num_found != len(urls):
            raise InvalidRequestError(
                f"the messages have {len(urls)} images, but as rendered they have {num_found} placeholders "
                f"{self.placeholder!r}: remove this word from texts, and check that the chat template writes it for "
                "each image"
            )
        placed: list[int] = []
        images: list[PromptImage] = []
        for token_id in token_ids:
            num = 1
            if token_id == self.placeholder_id:
                url = urls[len(images)]
                num = self.num_tokens(url)
                images.append(PromptImage.model_construct(url=url, start=start + len(placed), num_tokens=num))
            placed += [token_id] * num
        return tuple(placed), tuple(images)

    def check(self, token_ids: Sequence[int], images: Iterable[PromptImage]) -> None:
        """Raise `InvalidRequestError` unless each image has exactly the placeholder tokens that the model needs."""
        for index, image in enumerate(images):
            needed = self.num_tokens(image.url)
            if image.num_tokens != needed:
                raise InvalidRequestError(
                    f"image {index} fills {needed} tokens in this model, not {image.num_tokens}: expand its "
                    "placeholder with the model's own processor"
                )
            other = next((t for t in token_ids[image.start : image.end] if t != self.placeholder_id), None)
            if other is not None:
                raise InvalidRequestError(
                    f"image {index} fills tokens {image.start} to {image.end - 1}, but token {other} is among them; "
                    f"all must be the placeholder {self.placeholder_id}"
                )

    def _make(self, url: ImageUrl) -> tuple[int, dict[str, torch.Tensor]]:
        made = self._processor(text=self.placeholder, images=[decoded(url)], return_tensors="pt")
        num_tokens = int((made["input_ids"] == self.placeholder_id).sum())
        return num_tokens, {"pixel_values": made["pixel_values"]}


def load_image_processor(path: Path) -> ImageProcessor | None:
    """Return the processor of a model directory, or None if its ``config.json`` has no vision tower or cannot be read.

    Raises `ConfigError` if the processor cannot be loaded, and `UnsupportedError` for an unsupported family.
    """
    try:
        if not json.loads((path / "config.json").read_text()).get("vision_config"):
            return None
    except (OSError, ValueError, AttributeError):
        return None
    from transformers import AutoConfig, AutoProcessor

    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=trusts_remote_code())
        processor = AutoProcessor.from_pretrained(path, local_files_only=True, trust_remote_code=trusts_remote_code())
    except Exception as error:  # transformers may raise anything
        raise ConfigError(f"the processor in {str(path)!r} cannot be loaded: {error}") from error
    return ImageProcessor(processor, config)


def as_parts(message: Message) -> Message:
    """Return a message whose content is a list of parts, as chat templates for models with images expect.

    Raises `InvalidRequestError` for a part that is neither text nor an image.
    """
    content = message.get("content")
    if content is None:
        return dict(message)
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else [_part(part) for part in content]
    return {**message, "content": parts}


def text_of(message: Message) -> str | None:
    """Return the text of a message without images as one string, for chat templates that do not support parts."""
    content = message.get("content")
    return content if isinstance(content, str | None) else "".join(part["text"] for part in content)


def image_urls_of(messages: Iterable[Message]) -> list[ImageUrl]:
    """Return the data URLs of all images in the messages, in order."""
    return [
        part["image_url"]["url"]
        for message in messages
        if not isinstance(message.get("content"), str | None)
        for part in message["content"]
        if part.get("type") == "image_url"
    ]


def refuse_images(messages: Iterable[Message]) -> None:
    """Raise `UnsupportedError` if a message has an image, for a model that does not accept images."""
    if image_urls_of(messages):
        raise UnsupportedError("the messages have images, but the model does not accept any: it has no vision tower")


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    match part:
        case {"type": "text", "text": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "image_url", "image_url": {"url": str()}}:
            return {"type": "image"}
    raise InvalidRequestError(f"a part of a message must be a text or an image_url, not {str(part)[:80]!r}")

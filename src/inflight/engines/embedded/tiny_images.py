"""Tiny models that accept images: LLaVA's architecture with a small vision tower, the byte tokenizer and a processor.

The warm start teaches the format of answers about an environment's pictures. If every demonstration is wrong, it
teaches nothing about their content.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from inflight.contracts import Environment, Task
from inflight.engines.embedded.tiny import EOS, PAD, byte_tokenizer, imitation_loss_of
from inflight.errors import ConfigError
from inflight.model.checkpoints import published_name
from inflight.model.images import ImageProcessor, as_parts, image_urls_of
from inflight.model.vision import embedded
from inflight.types import Message, TaskItem

IMAGE = 258
VOCAB_SIZE = 259
IMAGE_SIZE = 28
"""Width and height of the vision tower's input in pixels; pictures are scaled to this size."""
_PATCH_SIZE = 7
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}"
    "{% endif %}"
    "{{ '<eos>' if message['role'] == 'assistant' else '' }}\n"
    "{% endfor %}"
)
_FIRST_ITEM = 1_000_000_000


@dataclass(frozen=True, slots=True)
class TinyImageShape:
    """Size of a tiny model with a vision tower; the vision tower has half the width of the language model."""

    hidden_size: int = 96
    num_layers: int = 2
    num_heads: int = 3
    max_model_len: int = 512
    num_vision_layers: int = 1


def create_tiny_image_model(shape: TinyImageShape, seed: int) -> Any:
    """Return a randomly initialized model in float32 on the CPU. A picture takes 16 tokens."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    text = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=shape.hidden_size,
        intermediate_size=2 * shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_heads,
        head_dim=shape.hidden_size // shape.num_heads,
        max_position_embeddings=shape.max_model_len,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    vision = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=shape.num_vision_layers,
        num_attention_heads=2,
        image_size=IMAGE_SIZE,
        patch_size=_PATCH_SIZE,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE,
        image_seq_length=(IMAGE_SIZE // _PATCH_SIZE) ** 2,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlavaForConditionalGeneration._from_config(config, dtype=torch.float32, attn_implementation="sdpa")


def tiny_processor() -> Any:
    """Return a transformers processor for these models: the byte tokenizer plus ``<image>``, and image scaling."""
    from tokenizers import AddedToken
    from transformers import CLIPImageProcessorPil, LlavaProcessor

    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<image>", special=True)], special_tokens=True)
    tokenizer.chat_template = _CHAT_TEMPLATE
    return LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"height": IMAGE_SIZE, "width": IMAGE_SIZE}, do_center_crop=False),
        tokenizer=tokenizer,
        patch_size=_PATCH_SIZE,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
        chat_template=_CHAT_TEMPLATE,
    )


def save_tiny_image_model(model: Any, path: Path) -> None:
    """Write a model and its processor as a Hugging Face checkpoint.

    The vision tower's tensors get the names used in published checkpoints, which engines expect.
    """
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    file = path / "model.safetensors"
    tensors = {published_name(name): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    tiny_processor().save_pretrained(path)


def picture_message(item: TaskItem) -> Message:
    """Return an item's message: its picture (``metadata["image_url"]``), then its prompt.

    Raises `ConfigError` if the item has no picture.
    """
    url = item.metadata.get("image_url")
    if not isinstance(url, str):
        raise ConfigError(f"item {item.index} has no picture: its metadata must have a data URL as image_url")
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": item.prompt}]
    return {"role": "user", "content": parts}


def warm_start_on_images(
    model: Any,
    task: Task | Environment,
    *,
    num_steps: int,
    wrong_fraction: float = 1.0,
    seed: int,
    batch_size: int = 16,
    learning_rate: float = 3e-3,
    on_progress: Callable[[int, float], None] | None = None,
) -> None:
    """Imitate answers about pictures for ``num_steps`` steps.

    A ``wrong_fraction`` of the answers belong to other pictures.

    Items come from the far end of the task, which a run never reaches. The result depends only on the seed and the
    machine's arithmetic. Raises `ConfigError` for an item without a picture or an answer.
    """
    rng = random.Random(seed)
    processor = tiny_processor()
    images = ImageProcessor(processor, model.config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    model.train()
    for step in range(num_steps):
        rows, urls = [], []
        for i in range(batch_size):
            item = task.item(_FIRST_ITEM + step * batch_size + i)
            other = task.item(_FIRST_ITEM + rng.randrange(1_000_000))
            answer = other.answer if rng.random() < wrong_fraction else item.answer
            if answer is None:
                raise ConfigError(f"item {item.index} of {task.name!r} has no answer to imitate")
            message = picture_message(item)
            text = processor.tokenizer.apply_chat_template([as_parts(message)], tokenize=False)
            own = image_urls_of([message])
            prompt, _ = images.placed(processor.tokenizer(text)["input_ids"], own)
            rows.append((list(prompt), [*answer.encode(), EOS]))
            urls += own
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, (step + 1) / 20, max(0.03, 2 * (1 - step / num_steps)))

        def embeddings(token_ids: torch.Tensor, urls: list[str] = urls) -> torch.Tensor:
            flat = token_ids.flatten()
            rows_M = (flat == IMAGE).nonzero().squeeze(1)
            return embedded(model, flat, rows_M, images.tensors(urls)).view(*token_ids.shape, -1)

        loss = imitation_loss_of(model, rows, lambda token_ids: {"inputs_embeds": embeddings(token_ids)})
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if on_progress is not None:
            on_progress(step + 1, loss.item())
    model.eval()

"""Tiny models: a byte-level tokenizer and a small transformer, randomly initialized and warm-started on a task.

The warm start imitates demonstrations, some of which are wrong on purpose. Afterwards, the model's most likely
completions are mostly right and its samples are mostly wrong, so there is something to reinforce.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F

from inflight.contracts import Task
from inflight.errors import ConfigError

Family = Literal["llama", "qwen2", "qwen3", "qwen3_moe"]
Style = Literal["answer", "grown"]

_LONGEST_ENDS = 160
"""Maximum total length of the suffixes in a demonstration. For answers of up to sixteen characters, suffixes grow by
one character at a time.
"""
_MAX_TOKENS_PER_STEP = 3072
"""Maximum number of tokens per imitation step, padding included, so that longer problems do not slow down a step."""

_FIRST_PROBLEM = 1_000_000_000

PAD, EOS = 256, 257
VOCAB_SIZE = 258
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['content'] }}{{ '<eos>' if message['role'] == 'assistant' else '' }}\n"
    "{% endfor %}"
)


@dataclass(frozen=True, slots=True)
class TinyShape:
    """Size of a tiny model. In a mixture of experts, two of eight experts compute each token in a layer."""

    family: Family = "llama"
    hidden_size: int = 96
    num_layers: int = 2
    num_heads: int = 3
    max_model_len: int = 512


def byte_tokenizer() -> Any:
    """Return a Hugging Face tokenizer whose token ids are bytes, with 256 for padding and 257 as end of sequence."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocab = {character: byte for byte, character in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<pad>", special=True), AddedToken("<eos>", special=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", chat_template=_CHAT_TEMPLATE
    )


def create_tiny_model(shape: TinyShape, seed: int) -> Any:
    """Return a randomly initialized model of a few hundred thousand parameters, in float32 on the CPU."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

    families: dict[Family, Any] = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
    family = (families | {"qwen3_moe": Qwen3MoeConfig})[shape.family]
    further: dict[str, Any] = {} if shape.family == "qwen2" else {"head_dim": shape.hidden_size // shape.num_heads}
    if shape.family == "qwen3_moe":
        further |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": shape.hidden_size}
        further |= {"norm_topk_prob": True}
    config = family(
        vocab_size=VOCAB_SIZE,
        hidden_size=shape.hidden_size,
        intermediate_size=2 * shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_heads,
        max_position_embeddings=shape.max_model_len,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
        **further,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")


def save_tiny_model(model: Any, path: Path) -> None:
    """Write a model and the byte tokenizer as a Hugging Face checkpoint."""
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)


def demonstration(answer: str, style: Style) -> str:
    """Return the completion that the warm start imitates.

    ``grown`` first writes suffixes of the answer, each one character longer than the last (``s us nus``), then the
    answer between tags. Every suffix copies the one before it, so that copying is trained densely. The suffixes of a
    long answer grow by several characters at a time, which limits their total length.
    """
    if style == "answer":
        return answer
    for stride in range(1, len(answer) + 1):
        ends = " ".join(answer[i:] for i in reversed(range(0, len(answer), stride)))
        if len(ends) <= _LONGEST_ENDS:
            return f"<think>{ends}</think><answer>{answer}</answer>"
    return f"<think></think><answer>{answer}</answer>"


def warm_start(
    model: Any,
    task: Task,
    *,
    num_steps: int = 1400,
    wrong_fraction: float = 0.6,
    style: Style = "grown",
    seed: int,
    batch_size: int = 16,
    learning_rate: float = 3e-3,
    clean_fraction: float = 0.8,
    on_progress: Callable[[int, float], None] | None = None,
) -> None:
    """Imitate demonstrations of a task for ``num_steps`` steps of ``batch_size`` problems, or fewer if they are long.

    For the first ``clean_fraction`` of the steps, all demonstrations are right; afterwards, a ``wrong_fraction`` of
    them ends in a corrupted answer. Problems come from the far end of the task, which a run never reaches. Problems
    that do not fit into the model's context are omitted. ``on_progress(step, loss)`` is called after every step. The
    result depends only on the seed and the machine's arithmetic. Raises `ConfigError` if most of the first problems do
    not fit.
    """
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    context = model.config.max_position_embeddings
    model.train()
    for step in range(num_steps):
        fraction = step / num_steps
        wrong = wrong_fraction if fraction >= clean_fraction else 0.0
        rows: list[tuple[list[int], list[int]]] = []
        longest, too_long = 0, []
        for i in range(batch_size):
            item = task.item(_FIRST_PROBLEM + step * batch_size + i)
            answer = item.answer or ""
            if rng.random() < wrong:
                answer = corrupt(answer, rng)
            row = _row(item.prompt, answer, style)
            length = len(row[0]) + len(row[1])
            if length > context:
                too_long.append(length)
                continue
            longest = max(longest, length)
            if rows and longest * (len(rows) + 1) > _MAX_TOKENS_PER_STEP:
                break
            rows.append(row)
        if step == 0 and len(too_long) > len(rows):
            raise ConfigError(
                f"{len(too_long)} of the first {len(too_long) + len(rows)} problems of {task.name} do not fit into "
                f"{context} tokens; the longest has {max(too_long)}. Pass a larger max_model_len"
            )
        if not rows:
            continue
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, (step + 1) / 50, max(0.03, (1 - fraction) / 0.4))
        loss = imitation_loss_of(model, rows, lambda token_ids: {"input_ids": token_ids})
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if on_progress is not None:
            on_progress(step + 1, loss.item())
    model.eval()


def context_of(task: Task, style: Style, num_problems: int = 32) -> int:
    """Return the context length that a task needs: a multiple of 512 tokens with a margin for longer problems."""
    items = [task.item(_FIRST_PROBLEM + i) for i in range(num_problems)]
    longest = max(sum(map(len, _row(item.prompt, item.answer or "", style))) for item in items)
    return 512 * max(1, -(-longest * 5 // (4 * 512)))


def _row(prompt: str, answer: str, style: Style) -> tuple[list[int], list[int]]:
    """Return the tokens of a prompt and those of its demonstration."""
    return [*_bytes_of(prompt), 10], [*demonstration(answer, style).encode(), EOS]


def _bytes_of(prompt: str) -> Iterator[int]:
    """Yield the tokens of a prompt, which may contain earlier turns with their end-of-sequence tokens."""
    for i, turn in enumerate(prompt.split("<eos>")):
        yield from ([EOS] if i else [])
        yield from turn.encode()


def corrupt(answer: str, rng: random.Random) -> str:
    """Return the answer without part of its first half or, one time in four, with its last character repeated in front.

    Both errors shift the characters, as if the model had stopped copying too early or too late. They leave the model's
    knowledge of the characters intact, but a score that compares position by position is close to zero.
    """
    if rng.random() < 0.25:
        return answer[-1:] + answer
    return answer[rng.randint(1, max(1, len(answer) // 2)) :]


def imitation_loss_of(
    model: Any,
    rows: Sequence[tuple[list[int], list[int]]],
    inputs_of: Callable[[torch.Tensor], dict[str, torch.Tensor]],
) -> torch.Tensor:
    """Return the mean cross-entropy of the completions' bytes. Prompts are not imitated.

    ``inputs_of`` returns the model's inputs for the padded token ids.
    """
    longest = max(len(prompt) + len(completion) for prompt, completion in rows)
    token_ids = torch.full((len(rows), longest), PAD)
    targets = torch.full((len(rows), longest), -100)
    for i, (prompt, completion) in enumerate(rows):
        token_ids[i, : len(prompt) + len(completion)] = torch.tensor(prompt + completion)
        targets[i, len(prompt) - 1 : len(prompt) + len(completion) - 1] = torch.tensor(completion)
    hidden = model.base_model(**inputs_of(token_ids), use_cache=False).last_hidden_state
    chosen = targets >= 0
    return F.cross_entropy(model.get_output_embeddings()(hidden[chosen]).float(), targets[chosen])

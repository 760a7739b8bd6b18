"""Tokenizers made here, with the chat templates of real models (as TRL ships them)."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

SPECIAL = {
    "qwen3": ("<|im_end|>", ("<|endoftext|>", "<|im_start|>")),
    "qwen3_instruct_2507": ("<|im_end|>", ("<|endoftext|>", "<|im_start|>")),
    "llama3": ("<|eot_id|>", ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>")),
    "llama3_2": ("<|eot_id|>", ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>")),
}
"""The token that ends a turn, and others that the template writes."""

_TEXTS = [
    "user\nassistant\nsystem\n\n\n hello there\n world, the answer is 42\n</think>\n\n<think>\n",
    'the tool said: {"name": "python", "arguments": {"code": "print(1)"}}\n<tool_call>\n</tool_call>\n',
] * 4
"""What the tokenizers learn their merges from: many reach over the ends of lines and words."""


def tokenizer(template: str) -> Any:
    """Return a tokenizer with a byte-level vocabulary of merges, and the chat template of a model."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    end, others = SPECIAL[template]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(_TEXTS, trainer)
    made.add_special_tokens([AddedToken(token, special=True) for token in (end, *others)])
    text = (files("trl") / "chat_templates" / f"{template}.jinja").read_text()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=end, bos_token=others[0], pad_token=others[0], chat_template=text
    )

"""Stop strings that vLLM looks for in the completion alone. Only vLLM loads this."""

from __future__ import annotations

import functools
from typing import Any

from tokenizers.decoders import DecodeStream
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

_REPLACED = "inflight_omits_prompts"
_MOST_TOKENS = 16
"""Number of tokens at the end of a prompt in which the end of a character is looked for. None takes more tokens, but
the bytes of a prompt need not be text."""
_UNFINISHED = "\ufffd"


def register() -> None:
    """Begin the decoding of a completion after the last whole character of its prompt.

    If a prompt ends within a character, vLLM counts the text of the whole prompt as text of the completion once a
    sampled token completes that character, and so finds stop strings that occur in the prompt.
    """
    own = FastIncrementalDetokenizer.__init__
    if hasattr(own, _REPLACED):
        return

    @functools.wraps(own)
    def begin(self: Any, tokenizer: Any, request: Any) -> None:
        own(self, tokenizer, request)
        if self.stop and request.prompt_token_ids:
            ids = _whole_characters(self.tokenizer, request.prompt_token_ids, self.skip_special_tokens)
            self.stream = DecodeStream(ids=ids, skip_special_tokens=self.skip_special_tokens)

    setattr(begin, _REPLACED, True)
    FastIncrementalDetokenizer.__init__ = begin


def _whole_characters(tokenizer: Any, ids: list[int], skips_special: bool) -> list[int]:
    """Return the beginning of a prompt that does not end within a character; nothing if its last tokens are no text."""
    for end in range(len(ids), max(len(ids) - _MOST_TOKENS, 0), -1):
        last = tokenizer.decode(ids[max(end - _MOST_TOKENS, 0) : end], skip_special_tokens=skips_special)
        if not last.endswith(_UNFINISHED):
            return list(ids[:end])
    return []

"""A small engine: replace it with yours."""

from dataclasses import dataclass, field

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


@dataclass
class Sequence:
    """One completion: its settings, and the token ids so far, prompt included."""

    ids: list[int]
    generator: torch.Generator
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    logprobs: list[float] = field(default_factory=list)


class TinyEngine:
    """A model without a cache: every token is computed from all earlier ones under the current weights."""

    def __init__(self, directory):
        self.model = AutoModelForCausalLM.from_pretrained(directory).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.parameters = dict(self.model.named_parameters())
        self.vocab_size = self.model.config.vocab_size
        self.max_model_len = self.model.config.max_position_embeddings
        if hasattr(self.model.config, "num_experts"):  # transformers merges matrices that updates send one by one
            raise ValueError("mixtures of experts are not supported")
        ends = self.model.generation_config.eos_token_id  # one id, or several
        self.eos_token_ids = set(ends if isinstance(ends, list) else [ends])

    @torch.inference_mode()
    def sample_token(self, sequence):
        """Append one token and its logprob under the distribution that it was drawn from."""
        logits_V = self.model(input_ids=torch.tensor([sequence.ids])).logits[0, -1].float()
        if sequence.temperature == 0:
            logprobs_V = logits_V.log_softmax(-1)
            token = int(logits_V.argmax())
        else:
            logprobs_V = filtered(logits_V / sequence.temperature, sequence).log_softmax(-1)
            token = int(torch.multinomial(logprobs_V.exp(), 1, generator=sequence.generator))
        sequence.ids.append(token)
        sequence.logprobs.append(float(logprobs_V[token]))

    def load(self, tensors):
        """Copy new values into the parameters."""
        with torch.no_grad():
            for name, tensor in tensors:
                self.parameters[name].copy_(tensor)


def filtered(logits_V, sequence):
    """Return the logits with -inf outside the kept set: top-k, then top-p, then min-p."""
    if sequence.top_k:
        smallest = logits_V.topk(min(sequence.top_k, len(logits_V))).values[-1]
        logits_V = logits_V.masked_fill(logits_V < smallest, -torch.inf)
    if sequence.top_p < 1:
        probs_V, order_V = logits_V.softmax(-1).sort(descending=True)
        is_dropped_V = probs_V.cumsum(-1) - probs_V >= sequence.top_p
        logits_V = logits_V.masked_fill(torch.empty_like(is_dropped_V).scatter_(0, order_V, is_dropped_V), -torch.inf)
    if sequence.min_p:
        logprobs_V = logits_V.log_softmax(-1)
        least = logprobs_V.max() + torch.log(torch.tensor(sequence.min_p))
        logits_V = logits_V.masked_fill(logprobs_V < least, -torch.inf)
    return logits_V

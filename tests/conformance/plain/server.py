"""A plain HTTP server around transformers' ``generate``; it is independent of inflight. ``server.py MODEL_DIR PORT``

POST /generate: JSON with ids and options, one completion at a time. POST /weights: a safetensors file, loaded at once.
GET /info: sizes and tensors.
"""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from safetensors.torch import load
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, StoppingCriteriaList

torch.set_num_threads(1)
MODEL = AutoModelForCausalLM.from_pretrained(sys.argv[1])
if hasattr(MODEL.config, "num_experts"):  # transformers merges the matrices of experts that updates send one by one
    sys.exit("mixtures of experts are not supported")
ENDS = MODEL.generation_config.eos_token_id  # one id, or several
ENDS = ENDS if isinstance(ENDS, list) else [ENDS]
MODEL.generation_config = (
    GenerationConfig()
)  # not the checkpoint's: a request specifies all that differs from no filter
TOKENIZER = AutoTokenizer.from_pretrained(sys.argv[1])
LOCK = threading.Lock()


def info(_: bytes) -> dict:
    tensors = {name: [str(p.dtype)[6:], list(p.shape)] for name, p in MODEL.named_parameters()}
    return {"vocab": MODEL.config.vocab_size, "context": MODEL.config.max_position_embeddings, "tensors": tensors}


def generate(body: bytes) -> dict:
    ask = json.loads(body)
    stop = ask["stop_ids"] + ([] if ask["ignore_eos"] else ENDS)
    filters = {name: ask[name] for name in ("temperature", "top_k", "top_p", "min_p")} if ask["temperature"] else {}
    config = GenerationConfig(
        max_new_tokens=ask["max_tokens"],
        do_sample=bool(filters),
        eos_token_id=stop or None,
        pad_token_id=MODEL.config.pad_token_id,
        return_dict_in_generate=True,
        output_scores=True,
        **filters,
    )
    ids = torch.tensor([ask["ids"]])
    torch.manual_seed(ask["seed"])

    def contains_stop(token_ids: torch.Tensor, _: object) -> torch.Tensor:
        text = TOKENIZER.decode(token_ids[0, ids.shape[1] :])  # transformers' own stop_strings look at the prompt too
        return torch.tensor([any(word in text for word in ask["stop"])])

    output = MODEL.generate(
        ids,
        generation_config=config,
        attention_mask=torch.ones_like(ids),
        stopping_criteria=StoppingCriteriaList([contains_stop] if ask["stop"] else []),
    )
    tokens = output.sequences[0, ids.shape[1] :].tolist()
    logprobs = [scores.log_softmax(-1)[0, token].item() for scores, token in zip(output.scores, tokens, strict=True)]
    text = TOKENIZER.decode(tokens)
    stopped = tokens[-1] in stop or any(word in text for word in ask["stop"])
    return {"ids": tokens, "logprobs": logprobs, "reason": "stop" if stopped else "length"}


def weights(body: bytes) -> dict:
    with torch.no_grad():
        parameters = dict(MODEL.named_parameters())
        for name, tensor in load(body).items():
            parameters[name].copy_(tensor)
    return {}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        with LOCK:
            answer = json.dumps({"/info": info, "/generate": generate, "/weights": weights}[self.path](body)).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_POST = handle_any

    def log_message(self, *_: object) -> None:
        pass


ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()

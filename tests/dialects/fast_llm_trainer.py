"""Stands in for Fast-LLM's trainer, in a process of its own: its streams, its group, and its framing of broadcasts.

    python -m tests.dialects.fast_llm_trainer '{"model": ..., "redis": PORT, "port": ..., "world_size": ...}'

Written after ``engine/training/streaming.py``, ``engine/distributed/distributed.py``, ``core/distributed.py`` and
``data/dataset/streaming.py``: it forms a raw group of gloo, announces and broadcasts its weights before the first step
and after each one, reads its samples as one consumer of a group, and announces the end. It trains for real, with the
clipped policy loss. Nothing of inflight is imported.

With ``steps``, it trains that many on ``documents`` samples each, and ends. Otherwise it does what each line of
standard input says, and can then break the protocol. Unlike Fast-LLM, it prints a line of JSON for each broadcast, and
with ``check`` it keeps the weights of all versions, and computes each sample's logprobs again with them.
"""

from __future__ import annotations

import datetime
import io
import json
import os
import pickle
import sys
from typing import Any

import redis
import torch
from safetensors.torch import load_file
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore, rendezvous

TIMEOUT = datetime.timedelta(seconds=60)
KEEP: list[Any] = []


def form_group(port: int, rank: int, world_size: int) -> Any:
    """What ``ProcessGroupPool(...).get_process_group(range(world_size), rank)`` does with gloo."""
    store, _, _ = next(rendezvous(f"tcp://127.0.0.1:{port}", rank, world_size, timeout=TIMEOUT))
    KEEP.append(store)
    return ProcessGroupGloo(PrefixStore(f"range_0_{world_size}_1/", store), rank, world_size, TIMEOUT)


def broadcast(tensor: torch.Tensor, group: Any) -> None:
    options = torch.distributed.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([tensor], options).wait()


def send_bytes(data: bytes, group: Any, length: int | None = None) -> None:
    broadcast(torch.full([1], len(data) if length is None else length, dtype=torch.int64), group)
    broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8), group)


def send_object(value: Any, group: Any) -> None:
    stream = io.BytesIO()
    pickle.Pickler(stream).dump(value)
    send_bytes(stream.getvalue(), group)


def receive_object(group: Any) -> Any:
    size = torch.empty([1], dtype=torch.int64)
    broadcast(size, group)
    data = torch.empty(int(size), dtype=torch.uint8)
    broadcast(data, group)
    return pickle.loads(data.numpy().tobytes())


def parse_sample(message: dict[bytes, bytes]) -> dict[str, Any]:
    """What ``RedisDocument.from_message`` does, which refuses unknown fields."""
    found: dict[str, Any] = {}
    for key, value in message.items():
        found.update(json.loads(value) if key == b"data" else {key.decode(): value})
    known = {"tokens", "loss_masking_spans", "chosen_span", "rejected_span", "advantage", "old_log_probabilities"}
    assert not found.keys() - known - {"reward", "model_version"}, found.keys()
    dtypes = {"tokens": torch.int64, "old_log_probabilities": torch.float32, "model_version": torch.int64}
    for name, dtype in dtypes.items():
        if isinstance(found.get(name), bytes):
            found[name] = torch.frombuffer(bytearray(found[name]), dtype=dtype)
        elif name in found:
            found[name] = torch.tensor(found[name], dtype=dtype)
        assert name not in found or len(found[name]) == len(found["tokens"])
    return found


class Evil:
    """A value whose unpickling runs a command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


class Trainer:
    def __init__(self, told: dict[str, Any]) -> None:
        self.told = told
        self.client = redis.Redis(port=told["redis"], password=told.get("password"))
        store = told.get("store", "trainer")
        if store == "launcher":
            KEEP.append(TCPStore("127.0.0.1", told["port"], is_master=True, wait_for_workers=False, timeout=TIMEOUT))
        if store != "trainer":  # torchrun makes every rank a client
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        self.weights = dict(sorted(load_file(f"{told['model']}/model.safetensors").items()))
        print("forming the group", flush=True)
        self.group = form_group(told["port"], 0, told["world_size"])
        self.step, self.documents_seen = told.get("resumed", (0, 0))
        self.model: Any = None
        self.versions: dict[int, dict[str, torch.Tensor]] = {}  # the weights of each, to check samples with

    # ------------------------------------------------------------------------------------------------ weights

    def send_weights(self, odd: dict[str, Any] | None = None) -> dict[str, Any]:
        odd = odd or {}
        event = {"type": "weights_ready", "step": self.step, "documents_seen": self.documents_seen}
        self.client.xadd("fast_llm_events", {"event": json.dumps(event)})
        if self.model is not None:
            state = self.model.state_dict()
            self.weights = {name: state[name].contiguous() for name in self.weights}
        sent = {name: tensor * odd.get("scale", 1.0) for name, tensor in self.weights.items()}
        if odd.get("silent"):
            sent["model.norm.weight"].zero_()
        if "rename" in odd:
            sent["model.unknown.weight"] = sent.pop(odd["rename"])
        if "reshape" in odd:
            sent[odd["reshape"]] = sent[odd["reshape"]].reshape(1, -1)
        if "evil" in odd:
            send_object(("weights", Evil(odd["evil"]), torch.Size([1]), torch.float32), self.group)
        if "huge" in odd:
            send_object(("weights", "huge", torch.Size([odd["huge"]]), torch.float32), self.group)
        if "length" in odd:
            send_bytes(b"x", self.group, length=odd["length"])
        for index, (name, tensor) in enumerate(sent.items()):
            if index == odd.get("die_after"):
                os._exit(1)
            if index == odd.get("pause_after"):
                print(json.dumps({"paused": index}), flush=True)
                sys.stdin.readline()
            if odd.get("shards"):  # received and dropped
                send_object(("grads", name, tensor.shape, tensor.dtype), self.group)
                broadcast(torch.full_like(tensor, float("nan")), self.group)
            send_object(("weights", name, tensor.shape, tensor.dtype), self.group)
            broadcast(tensor, self.group)
        send_object(None, self.group)
        return event

    def finish(self) -> None:
        self.client.xadd("fast_llm_events", {"event": json.dumps({"type": "training_finished"})})
        self.group.shutdown()

    # ----------------------------------------------------------------------------------------------- training

    def samples(self, num_documents: int) -> list[dict[str, Any]]:
        try:
            self.client.xgroup_create("fast_llm_streaming", "fast_llm_group", id="0", mkstream=True)
        except redis.exceptions.ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise
        found: list[dict[str, Any]] = []
        while len(found) < num_documents:
            for _, messages in self.client.xreadgroup(
                "fast_llm_group", "fast_llm_consumer_0", {"fast_llm_streaming": ">"}, count=1, block=1000, noack=True
            ):
                found += [parse_sample(message) for _, message in messages]
        return found

    def train(self, num_documents: int) -> dict[str, Any]:
        from transformers import AutoModelForCausalLM

        if self.model is None:
            self.model = AutoModelForCausalLM.from_pretrained(self.told["model"], dtype=torch.float32)
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=self.told.get("lr", 1e-3))
            self.keep_version()
        documents = self.samples(num_documents)
        error, swapped_error, num_mixed, staleness = 0.0, 0.0, 0, 0.0
        for document in documents:
            tokens, old = document["tokens"], document["old_log_probabilities"][1:]
            is_trained = torch.ones(len(tokens), dtype=torch.bool)
            for begin, end in document.get("loss_masking_spans") or ():
                is_trained[begin:end] = False
            mask, versions = is_trained[1:], document["model_version"][1:]
            new = self.logprobs(tokens, None)
            ratio = (new - old).exp()
            advantage = document["advantage"]
            gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            (-gain[mask].mean() / num_documents).backward()
            num_mixed += len(versions[mask].unique()) > 1
            staleness += float((self.documents_seen - versions[mask]).float().mean()) / num_documents
            present = versions[mask].unique().tolist() if self.told.get("check") else []
            for version in present:
                errors = (self.logprobs(tokens, version) - old).abs()
                error = max(error, float(errors[mask & (versions == version)].max()))
                if len(present) > 1:
                    swapped_error = max(swapped_error, float(errors[mask & (versions != version)].max()))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step, self.documents_seen = self.step + 1, self.documents_seen + num_documents
        self.keep_version()
        reward = sum(document["reward"] for document in documents) / num_documents
        errors_by_name = {"version_error": error, "swapped_error": swapped_error}
        return {"reward": reward, "mixed": num_mixed, "staleness": staleness} | errors_by_name

    def keep_version(self) -> None:
        if not self.told.get("check"):
            return
        state = self.model.state_dict()
        self.versions[self.documents_seen] = {name: tensor.clone() for name, tensor in state.items()}

    def logprobs(self, tokens: torch.Tensor, version: int | None) -> torch.Tensor:
        """Logprobs of all tokens but the first, under the present weights or those of a version."""
        if version is None:
            logits = self.model(input_ids=tokens[None]).logits
        else:
            with torch.no_grad():
                arguments = {"input_ids": tokens[None]}
                logits = torch.func.functional_call(self.model, self.versions[version], (), arguments).logits
        return logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]


def lose_rank(told: dict[str, Any]) -> None:
    """Join as another rank, and die in the middle of the first update."""
    group = form_group(told["port"], told["rank"], told["world_size"])
    for _ in range(told["die_after"]):
        _, _, shape, dtype = receive_object(group)
        broadcast(torch.empty(shape, dtype=dtype), group)
    os._exit(1)


def main(told: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    if "rank" in told:
        return lose_rank(told)
    trainer = Trainer(told)

    def report(**figures: Any) -> None:
        print(json.dumps(figures), flush=True)

    report(**trainer.send_weights())
    for _ in range(told.get("steps", 0)):
        figures = trainer.train(told["documents"])
        report(**trainer.send_weights(), **figures)
    for line in [] if "steps" in told else sys.stdin:
        odd = json.loads(line)
        if odd.get("finish"):
            break
        if "train" in odd:
            figures = trainer.train(odd["train"])
            report(**trainer.send_weights(), **figures)
            continue
        trainer.step, trainer.documents_seen = trainer.step + 1, trainer.documents_seen + 32
        report(**trainer.send_weights(odd))
    else:
        if "steps" not in told:
            return None  # killed, or its input has ended: nothing is announced
    return trainer.finish()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

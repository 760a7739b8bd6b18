"""A `TrainerWorker` of one rank in plain PyTorch: everything that a trainer adapter needs."""

import json
import math
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from inflight.contracts import WorkerKind
from inflight.errors import CheckpointError, NonFiniteError, TrainerError
from inflight.types import StepResult, WeightBucket
from inflight.wire import TensorSpec


class PlainKind(WorkerKind):
    def create(self, settings):
        return PlainWorker(Path(settings["model_path"]), float(settings.get("learning_rate", 1e-3)))


KIND = PlainKind()


class PlainWorker:
    rank, world_size, version = 0, 1, 0

    def __init__(self, path, learning_rate):
        self.model = AutoModelForCausalLM.from_pretrained(path).eval()
        self.parameters = dict(self.model.named_parameters())
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=learning_rate, weight_decay=0.0)

    def forward(self, batch):
        logprobs = []
        segments = zip(
            batch.token_ids_T.split(batch.segment_lengths),
            batch.temperature_T.split(batch.segment_lengths),
            batch.loss_mask_T.split(batch.segment_lengths),
            strict=True,
        )
        anchor = sum((p.sum() * 0.0 for p in self.parameters.values()), torch.zeros(()))
        for token_ids, temperature, mask in segments:
            logits = self.model(input_ids=token_ids[None]).logits[0, :-1].float() / temperature[1:, None]
            chosen = logits.log_softmax(-1).gather(1, token_ids[1:, None])[:, 0]
            logprobs.append(torch.where(mask, torch.cat([chosen.new_zeros(1), chosen]), 0.0))
        return torch.cat([torch.zeros(0), *logprobs]) + anchor

    def backward(self, loss):
        loss.backward()

    def step(self):
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        if not gradients:
            raise TrainerError("step without a gradient: call backward first")
        norm = torch.nn.utils.get_total_norm(gradients).item()
        if not math.isfinite(norm):
            self.optimizer.zero_grad()
            raise NonFiniteError(f"the gradient norm is {norm}; nothing was changed")
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.version += 1
        return StepResult(self.version, norm, self.optimizer.param_groups[0]["lr"])

    def parameter_specs(self):
        return [TensorSpec(name=n, dtype=str(p.dtype)[6:], shape=tuple(p.shape)) for n, p in self.parameters.items()]

    def gather_weights(self, buckets):
        specs = self.parameter_specs()
        for bucket in buckets:
            part = specs[bucket.start : bucket.stop]
            tensors = tuple(self.parameters[spec.name].detach().clone() for spec in part)
            yield WeightBucket(bucket.index, tuple(part), tensors)

    def save(self, path):
        partial, old = path.with_name(f"{path.name}.partial"), path.with_name(f"{path.name}.old")
        state = self.optimizer.state_dict()["state"]
        try:
            self.model.save_pretrained(partial)
            save_file(
                {f"{i}.{key}": v for i, entry in state.items() for key, v in entry.items()}, partial / "adamw.bin"
            )
            (partial / "version.json").write_text(json.dumps(self.version))
        except (OSError, SafetensorError) as error:
            shutil.rmtree(partial)
            raise CheckpointError(f"{path} cannot be written: {error}") from error
        if path.exists():
            path.rename(old)
        partial.rename(path)
        shutil.rmtree(old, ignore_errors=True)

    def load(self, path):
        try:
            version = json.loads((path / "version.json").read_text())
            stored = AutoModelForCausalLM.from_pretrained(path).state_dict()
            state = {}
            for name, value in load_file(path / "adamw.bin").items():
                index, key = name.split(".")
                state.setdefault(int(index), {})[key] = value
            self.model.load_state_dict(stored)
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be loaded: {error}") from error
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
        self.optimizer.zero_grad()
        self.version = version

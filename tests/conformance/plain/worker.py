"""A `TrainerWorker` of one rank in plain PyTorch: everything that a trainer adapter needs."""

import json
import math
import shutil

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from inflight.contracts import WorkerKind
from inflight.errors import CheckpointError, NonFiniteError, TrainerError, UnsupportedError
from inflight.types import StepResult, WeightBucket
from inflight.wire import TensorSpec


class PlainKind(WorkerKind):
    def create(self, settings):
        if settings.get("warmup_steps") or settings.get("schedule", "constant") != "constant":
            raise UnsupportedError("the plain worker has no schedule: omit warmup_steps and schedule")
        return PlainWorker(settings)


KIND = PlainKind()


class PlainWorker:
    rank, world_size, version = 0, 1, 0

    def __init__(self, settings):
        self.model = AutoModelForCausalLM.from_pretrained(settings["model_path"]).eval()
        self.parameters = dict(self.model.named_parameters())
        self.max_norm = settings.get("max_gradient_norm", 1.0)
        rate, decay = settings.get("learning_rate", 1e-3), settings.get("weight_decay", 0.0)
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=rate, weight_decay=decay)

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
        if self.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.max_norm)
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
            moments = {f"{i}.{key}": v.contiguous() for i, entry in state.items() for key, v in entry.items()}
            save_file(moments, partial / "adamw.bin")
            (partial / "version.json").write_text(json.dumps(self.version))
        except (OSError, SafetensorError) as error:
            shutil.rmtree(partial)
            raise CheckpointError(f"{path} cannot be written: {error}") from error
        if path.exists():  # otherwise the old one may be the only complete checkpoint
            shutil.rmtree(old, ignore_errors=True)
            path.rename(old)
        partial.rename(path)
        shutil.rmtree(old, ignore_errors=True)

    def load(self, path):
        path = path if path.exists() else path.with_name(f"{path.name}.old")  # a save ended between its renames
        try:
            version = json.loads((path / "version.json").read_text())
            model, found = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
            if found["missing_keys"]:  # transformers initializes these randomly
                raise ValueError(f"tensors are missing: {sorted(found['missing_keys'])}")
            state = {}
            for name, value in load_file(path / "adamw.bin").items():
                index, key = name.split(".")
                state.setdefault(int(index), {})[key] = value
            if version and [len(state.get(i, {})) for i in range(len(self.parameters))] != [3] * len(self.parameters):
                raise ValueError("moments are missing")
            self.model.load_state_dict(model.state_dict())
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be loaded: {error}") from error
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
        self.optimizer.zero_grad()
        self.version = version

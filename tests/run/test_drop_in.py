"""The examples for codebases that exist already, executed as their owners would."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.models import make_model
from tests.servers import TOKEN, ServerProcess
from tests.weights.workers import weight_version
from tests.zygote import python

ROOT = Path(__file__).parents[2]
STEPS = ["1", "2", "3", "4", "5"]


@pytest.fixture(scope="module")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied, as small models are: the head must not travel twice."""
    return make_model(tmp_path_factory.mktemp("drop-in") / "tiny", tied=True)


def output_of(script: Path, *arguments: str) -> str:
    done = subprocess.run(
        [python(), str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, "INFLIGHT_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_plain_grpo_is_short_and_publishes_every_step_while_completions_run(
    tied_model: Path, start_server: Callable[..., ServerProcess]
) -> None:
    example = ROOT / "examples" / "plain_grpo.py"
    assert len(example.read_text().splitlines()) < 100
    # A server that takes a second: however slow the trainer is, some completions are running when it publishes.
    server = start_server(tied_model, "--engine", "tests.run.slow_servers:unhurried")
    printed = output_of(example, str(tied_model), server.url)
    found = re.findall(r"version (\d+): reward 0\.\d+, paused \d+\.\d ms, (\d+) of 32 completions by more", printed)
    assert [version for version, _ in found] == STEPS, printed
    assert sum(int(num_mixed) for _, num_mixed in found) > 0, "no completion saw its weights change"
    assert weight_version(server).version == 5


def test_trl_trainer_samples_from_the_server_and_publishes_every_step(
    tied_model: Path, start_server: Callable[..., ServerProcess]
) -> None:
    server = start_server(tied_model)
    printed = output_of(ROOT / "examples" / "trl_trainer.py", str(tied_model), server.url)
    assert re.findall(r"version (\d+): paused \d+\.\d ms", printed) == STEPS, printed
    assert len(re.findall(r"'reward': '\d", printed)) == 5, printed
    assert weight_version(server).version == 5


def test_our_loss_in_a_trl_trainer_is_that_of_trl_with_the_behaviour_logprobs_as_the_old_ones(
    tied_model: Path, tmp_path: Path
) -> None:
    # TRL's own compute_loss takes the ratio to whatever is called old_per_token_logps.
    program = f"""
import sys, torch
sys.path.insert(0, "examples")
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl_trainer import BehaviourGRPOTrainer, PROMPTS, reward

path = {str(tied_model)!r}
model = AutoModelForCausalLM.from_pretrained(path)
args = GRPOConfig(output_dir={str(tied_model.parent / "out")!r}, per_device_train_batch_size=4, num_generations=4,
                  steps_per_generation=2, gradient_accumulation_steps=2, temperature=0.7, report_to="none", bf16=False)
trainer = BehaviourGRPOTrainer(model=model, processing_class=AutoTokenizer.from_pretrained(path), reward_funcs=reward,
                               train_dataset=Dataset.from_dict({{"prompt": PROMPTS}}), args=args)
trainer.current_gradient_accumulation_steps = 2
generator = torch.Generator().manual_seed(0)
ones = torch.ones(4, 6, dtype=torch.int64)
completion_mask = (torch.arange(9) < torch.tensor([9, 4, 1, 7])[:, None]).long()
inputs = dict(
    prompt_ids=torch.randint(256, (4, 6), generator=generator), prompt_mask=ones,
    completion_ids=torch.randint(256, (4, 9), generator=generator), completion_mask=completion_mask,
    advantages=torch.tensor([1.0, -0.5, 0.0, -2.0]), num_items_in_batch=torch.tensor(50),
)
logprobs, *_ = trainer._get_per_token_logps_and_entropies(
    model, torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1), torch.cat([ones, completion_mask], 1), 9)
noise = torch.randn(logprobs.shape, generator=generator)
inputs["sampling_per_token_logps"] = inputs["old_per_token_logps"] = logprobs.detach() + 0.3 * noise
results = []
for compute in (BehaviourGRPOTrainer.compute_loss, GRPOTrainer.compute_loss):
    model.zero_grad()
    loss = compute(trainer, model, dict(inputs))
    loss.backward()
    results.append((loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])))
(ours, our_gradient), (theirs, their_gradient) = results
assert their_gradient.norm() > 0.01
# float32: sums of 20 terms of order 1 in another order.
torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
torch.testing.assert_close(our_gradient, their_gradient, rtol=0, atol=1e-5 * their_gradient.abs().max().item())
print("equal")
"""
    (script := tmp_path / "losses.py").write_text(program)
    assert output_of(script).endswith("equal\n")

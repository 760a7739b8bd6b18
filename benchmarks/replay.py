"""Gathers the results of replays of one recorded run: the reports of ``inflight replay --json``, and of ``--engine``.

inflight train ... --run.record true
inflight replay RUN_DIR --trainer torchtitan --json torchtitan.json
inflight replay RUN_DIR --engine vllm+http://... --json sampled.json
python benchmarks/replay.py RUN_DIR torchtitan.json ... --sampled sampled.json
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from inflight.base.worker_kinds import load_worker_kind
from inflight.losses import collate
from inflight.observe.trace.records import read_manifest, read_step, read_steps, record_of
from inflight.replay.training import replay_config
from inflight.rollouts import pack
from inflight.run.ranks.messages import Train
from inflight.run.ranks.rank import prepare_step
from results import write_results


def of_report(report: dict[str, Any]) -> dict[str, Any]:
    """Return one replay, with figures of its first step, its last step, and the largest difference."""
    steps = report.pop("steps")
    return {
        **report,
        "num_steps": len(steps),
        "first": steps[0],
        "last": steps[-1],
        "gradient_norms": [step["gradient_norm"] for step in steps],
        "largest_gradient_norm_difference": max(step["gradient_norm_difference"] for step in steps),
        "largest_mean_logprob_difference": max(step["logprobs"]["mean"] for step in steps),
    }


def gradient_norm_in_float64(record: Path) -> float:
    """Return the gradient norm of the first step of a record, computed by one rank of ``fsdp`` in this process."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    with tempfile.TemporaryDirectory() as directory:
        config = replay_config(read_manifest(record), Path(directory), trainer="fsdp")
    settings = {"model_path": str(config.model.path), "dtype": "float64", "total_steps": config.run.num_steps}
    worker = load_worker_kind("fsdp").create(settings)
    step, loss = read_step(record, 1), config.loss.policy_loss()
    ((*micro_batches,),) = pack(
        [it.rollout.num_tokens for it in step.samples], config.train.max_tokens_per_micro_batch, 1
    )
    asked = Train(
        segment_lengths=(),
        num_groups=len(step.groups),
        num_sequences=sum(len(group.rollouts) for group in step.groups),
        publish=None,
    )
    collated = [collate([step.samples[i] for i in ids]) for ids in micro_batches]
    batches, plan = prepare_step(worker, loss, collated, asked)
    for batch in batches:
        worker.backward(loss(batch, worker.forward(batch), plan).loss)
    return float(worker.step().gradient_norm)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("reports", type=Path, nargs="+")
    parser.add_argument("--sampled", type=Path, required=True)
    arguments = parser.parse_args()
    record = record_of(arguments.run)
    steps, config = list(read_steps(record)), read_manifest(record).config or {}
    sampled = json.loads(arguments.sampled.read_text())["sampled"]
    write_results(
        "replay",
        {
            "engine": config.get("servers", {}).get("engine", "embedded"),
            "steps": len(steps),
            "completions": sum(len(group.rollouts) for step in steps for group in step.groups),
            "tokens": sum(sample.rollout.num_tokens for step in steps for sample in step.samples),
            "replays": [of_report(json.loads(path.read_text())) for path in arguments.reports],
            "float64_gradient_norm": gradient_norm_in_float64(record),
            "sampled": {
                "completions": len(sampled),
                "with_recorded_tokens": sum(one["parts_at"] is None for one in sampled),
                "tokens": sum(one["num_tokens"] for one in sampled),
                "largest_logprob_difference": max(one["largest_difference"] for one in sampled),
            },
        },
    )


if __name__ == "__main__":
    main()

"""Publish a model's weights over a transport: ``python weight_transports.py MODEL_DIR URL shm``.

The server is one that ``inflight serve`` started; its token is in INFLIGHT_TOKEN.
"""

import os
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from inflight import ModuleWeights, WeightPublisher, publish_weights


def main(model_dir: str, url: str, transport: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    weights = ModuleWeights(model)
    token = os.environ["INFLIGHT_TOKEN"]
    with (
        tempfile.TemporaryDirectory() as shared,  # on several machines, use a directory that all of them share
        WeightPublisher.connect(
            [url],
            run_id="example",
            token=token,
            transport=transport,
            directory=Path(shared) if transport == "file" else None,
            delta=True,
        ) as publisher,
    ):
        for _ in range(3):
            with torch.no_grad():
                model.get_input_embeddings().weight[65] *= 1.01  # stands in for an optimizer step
            weights.version += 1
            report = publish_weights(weights, publisher, deadline_s=30.0, quorum=1)
            spans = report.spans
            print(
                f"version {report.version}: {report.sent_bytes:,} of {report.size_bytes:,} bytes sent, "
                f"{1000 * spans.total_s:.0f} ms, sampling paused for {1000 * spans.pause_s:.0f} ms"
            )


if __name__ == "__main__":
    main(*sys.argv[1:])

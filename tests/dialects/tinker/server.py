"""A real ``inflight tinker`` process for tests, and a client of its routes that knows nothing of the SDK."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from inflight.dialects.tinker.protobuf import messages
from tests.zygote import python

TOKEN = "test-token"
KEY = f"tml-{TOKEN}"
START_S = 120.0


class TinkerServer:
    """A server that ends with the test process at the latest."""

    def __init__(
        self, model: Path, directory: Path, *arguments: str, name: str = "tiny", start_s: float = START_S
    ) -> None:
        self.model = model
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        ready, self._log = directory / "ready.json", directory / "server.log"
        ready.unlink(missing_ok=True)
        command = [python(), "-m", "inflight", "tinker", str(model), "--port", "0", "--exit-with-stdin"]
        command += ["--directory", str(directory), "--ready-file", str(ready), "--name", name, *arguments]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, "INFLIGHT_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        deadline = time.monotonic() + start_s
        while not ready.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                self.process.wait(timeout=60)
                assert self.process.stdin is not None
                self.process.stdin.close()
                raise AssertionError(f"the server did not start: {self.log()}")
            time.sleep(0.02)
        found = json.loads(ready.read_text())
        self.url, self.pid = found["url"], found["pid"]
        self.clients: list[Client] = []

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def samplers(self) -> list[str]:
        """URLs of the inference servers."""
        return [json.loads(path.read_text())["url"] for path in (self.directory / "logs").glob("server-*.json")]

    def pids(self, of: str) -> list[int]:
        """Processes whose standard output is this log or another one of this server, by the name of the log."""
        found = []
        for place in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                out = (place / "fd" / "1").readlink()
                if place.name.isdecimal() and out.is_relative_to(self.directory) and out.stem.startswith(of):
                    found.append(int(place.name))
        return found

    def kill(self) -> None:
        """SIGKILL, and wait."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.process.wait(timeout=60)

    def end(self) -> None:
        """Close its input, which ends it and what it started; close its clients."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)
        for client in self.clients:
            client.http.close()


class Client:
    """Calls of one session."""

    def __init__(self, server: TinkerServer) -> None:
        self.http = httpx.Client(base_url=f"{server.url}/api/v1", headers={"X-API-Key": KEY}, timeout=120)
        server.clients.append(self)
        self.session_id = self.post("/create_session", {"tags": [], "sdk_version": "0.38.0"})["session_id"]

    def post(self, path: str, body: Mapping[str, Any], status: int = 200) -> Any:
        answer = self.http.post(path, json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    def retrieve(self, future: Mapping[str, Any]) -> Any:
        """Return the result of a future: a mapping, or the bytes of a protobuf message."""
        while True:
            answer = self.http.post("/retrieve_future", json={"request_id": future["request_id"]})
            answer.raise_for_status()
            if answer.headers["content-type"].startswith("application/x-protobuf"):
                return answer.content
            found = answer.json()
            if found.get("type") != "try_again":
                return found

    def failure(self, future: Mapping[str, Any]) -> tuple[str, str]:
        """Return error and category of a future that must have failed."""
        found = self.retrieve(future)
        assert isinstance(found, dict) and "error" in found, found
        return found["error"], found["category"]

    def create_model(self, rank: int = 8, number: int = 0) -> Model:
        body = {"session_id": self.session_id, "model_seq_id": number, "base_model": "tiny"}
        made = self.retrieve(self.post("/create_model", body | {"lora_config": {"rank": rank, "seed": 1}}))
        assert "model_id" in made, made
        return Model(self, made["model_id"])

    def load_model(self, path: str, number: int, *, optimizer: bool = True) -> Model:
        body = {"session_id": self.session_id, "model_seq_id": number, "path": path, "optimizer": optimizer}
        made = self.retrieve(self.post("/load_weights", body))
        assert made["path"] == path
        assert "model_id" in made, made
        return Model(self, made["model_id"])

    def sampler(self, number: int, **weights: str) -> str:
        body = {"session_id": self.session_id, "sampling_session_seq_id": number, **weights}
        return str(self.post("/create_sampling_session", body)["sampling_session_id"])

    def begin_sample(self, sampler: str, prompt: Sequence[int], number: int = 0, **fields: Any) -> Any:
        params = fields.pop("params", {})
        body = {
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(prompt)}]},
            "sampling_params": {"max_tokens": 8, "stop": [], **params},
            "sampling_session_id": sampler,
            "seq_id": number,
            **fields,
        }
        return self.post("/asample", body)

    def sample(self, sampler: str, prompt: Sequence[int], number: int = 0, **fields: Any) -> Any:
        """Return the response of a sample as its message."""
        return response_of(self.retrieve(self.begin_sample(sampler, prompt, number, **fields)))


class Model:
    """Calls of one model, numbered as the SDK numbers them."""

    def __init__(self, client: Client, model_id: str) -> None:
        self.client = client
        self.model_id = model_id
        self.num_calls = 0

    def number(self) -> int:
        self.num_calls += 1
        return self.num_calls

    def begin_forward_backward(
        self, data: Sequence[tuple[Sequence[int], Mapping[str, Any]]], loss_fn: str = "cross_entropy", **options: Any
    ) -> Any:
        request = messages().ForwardBackwardRequest(model_id=self.model_id, loss_fn=loss_fn)
        request.seq_id = options.pop("seq_id", None) or self.number()
        request.forward_only = options.pop("forward_only", False)
        request.loss_fn_config.update(options)
        for token_ids, inputs in data:
            datum = request.data.add()
            datum.model_input.add().encoded_text.tokens = np.array(token_ids, "<i4").tobytes()
            for name, values in inputs.items():
                array = np.array(values, "<i8" if name == "target_tokens" else "<f4")
                tensor = datum.loss_fn_inputs[name]
                tensor.dense, tensor.dtype = array.tobytes(), 2 if name == "target_tokens" else 1
                tensor.shape.extend(array.shape)
        answer = self.client.http.post(
            "/forward_backward",
            content=request.SerializeToString(),
            headers={"content-type": "application/x-protobuf"},
        )
        assert answer.status_code == 200, answer.text
        return answer.json()

    def forward_backward(self, *arguments: Any, **options: Any) -> tuple[list[np.ndarray[Any, Any]], float]:
        """Return the logprobs of each datum, and the loss."""
        return output_of(self.client.retrieve(self.begin_forward_backward(*arguments, **options)))

    def begin_step(self, **params: float) -> Any:
        adam = {"learning_rate": 1e-2, **params}
        return self.client.post(
            "/optim_step", {"model_id": self.model_id, "seq_id": self.number(), "adam_params": adam}
        )

    def step(self, **params: float) -> Any:
        return self.client.retrieve(self.begin_step(**params))["metrics"]

    def begin_save(self, route: str = "save_weights", **fields: Any) -> Any:
        return self.client.post(f"/{route}", {"model_id": self.model_id, "seq_id": self.number(), **fields})

    def save(self, name: str, route: str = "save_weights", **fields: Any) -> str:
        return str(self.client.retrieve(self.begin_save(route, path=name, **fields))["path"])

    def sampler(self, number: int, kind: str) -> str:
        """Return a sampling session of the current weights, which moves (``inflight``) or not (``snapshot``)."""
        fields = {"sampling_session_seq_id": number, "kind": kind}
        return str(self.client.retrieve(self.begin_save("save_weights_for_sampler", **fields))["sampling_session_id"])


def output_of(content: Any) -> tuple[list[np.ndarray[Any, Any]], float]:
    assert isinstance(content, bytes), content
    output = messages().ForwardBackwardOutput()
    output.ParseFromString(content)
    found = []
    for record in output.loss_fn_outputs:
        tensor = record.fields["logprobs"]
        ends = np.frombuffer(tensor.offsets, "<i8")
        for start, end in itertools.pairwise(ends):
            array = np.frombuffer(tensor.data[start:end], "<f4")
            found.append(array.reshape(-1, *tensor.trailing_shape))
    return found, output.metrics["loss:sum"]


def response_of(content: Any) -> Any:
    assert isinstance(content, bytes), content
    response = messages().SampleResponse()
    response.ParseFromString(content)
    return response


def tokens_of(sequence: Any) -> list[int]:
    return list(map(int, np.frombuffer(sequence.tokens, "<i4")))


def logprobs_of(sequence: Any) -> list[float]:
    return list(map(float, np.frombuffer(sequence.logprobs, "<f4")))

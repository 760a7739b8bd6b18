"""Records made of files as slime and verl write them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from inflight.cli import main
from inflight.trace.records import item_details, read_manifest, read_step, versions_of

PROMPT = [5, 6, 7]


def slime_sample(**changes: Any) -> dict[str, Any]:
    """What ``Sample.to_dict`` of slime gives, with its defaults."""
    return {
        "group_index": 0,
        "index": 0,
        "prompt": "spell",
        "tokens": [*PROMPT, 1, 2, 3, 4],
        "multimodal_inputs": None,
        "multimodal_train_inputs": None,
        "response": "abcd",
        "response_length": 4,
        "label": None,
        "reward": 1.0,
        "loss_mask": None,
        "weight_versions": ["1"],
        "rollout_log_probs": [-0.5, -0.25, -1.0, -2.0],
        "rollout_routed_experts": None,
        "remove_sample": False,
        "status": "completed",
        "metadata": {},
        "spec_info": {"spec_accept_token_num": 0},
        **changes,
    }


def slime_dump(path: Path, rollout_id: int, *samples: Mapping[str, Any]) -> str:
    torch.save({"rollout_id": rollout_id, "samples": [*samples]}, path)
    return str(path)


def test_slimes_rollouts_become_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    later = slime_dump(
        tmp_path / "1.pt",
        1,
        slime_sample(group_index=4, weight_versions=["1", "2"], reward={"exact": 1.0, "form": 0.5}),
        slime_sample(group_index=4, weight_versions=["2"], reward={"exact": 0.0, "form": 0.5}, status="truncated"),
    )
    first = slime_dump(
        tmp_path / "0.pt",
        0,
        slime_sample(reward={"exact": 1.0, "form": 0}, loss_mask=[1, 1, 0, 1]),
        slime_sample(reward={"exact": 0.0, "form": 0}),
        slime_sample(reward={"exact": 0.0, "form": 0}, group_index=1),
    )
    to = tmp_path / "record"
    assert (
        main(["import", "slime", later, first, "--to", str(to), "--reward-key", "exact", "--advantages", "mean"]) == 0
    )
    assert "where they changed is not stored: taken for the oldest (1 samples)" in capsys.readouterr().out
    manifest = read_manifest(to)
    assert (manifest.source, manifest.lacks, versions_of(to)) == ("slime", (), [1, 2])
    one, two = read_step(to, 1), read_step(to, 2)
    assert [len(group.rollouts) for group in one.groups] == [2, 1]
    assert one.samples[0].rollout.prompt_token_ids == PROMPT
    assert one.samples[0].rollout.behaviour_logprobs == [-0.5, -0.25, -1.0, -2.0]
    assert one.samples[0].loss_mask == [True, True, False, True]  # the third token was observed
    assert [(it.start, it.end, it.version) for it in one.samples[0].rollout.version_spans] == [(0, 2, 0), (3, 4, 0)]
    assert one.samples[0].advantages == [0.5, 0.5, 0.5, 0.5]
    assert [it.rollout.version_spans[0].version for it in two.samples] == [0, 1]
    assert [it.rollout.finish_reason for it in two.samples] == ["stop", "length"]
    assert main(["import", "slime", first, "--to", str(to), "--reward-key", "exact"]) == 1
    assert "holds a record already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"reward": {"a": 1.0}}, "choose one with --reward-key"),
        ({"reward": None}, "reward is 'None', not a number"),
        ({"tokens": "abc"}, "tokens is 'abc', not a list of token ids"),
        ({"response_length": 7}, "response_length is '7', not less than all tokens"),
        ({"loss_mask": [1]}, "loss_mask has 1 entries for 4 tokens"),
        ({"rollout_log_probs": [0.0]}, "rollout_log_probs has 1 entries for 4 tokens"),
        ({"multimodal_inputs": {"images": [1]}}, "has images"),
    ],
)
def test_a_sample_of_slime_that_does_not_fit_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], says: str
) -> None:
    file = slime_dump(tmp_path / "0.pt", 0, slime_sample(), slime_sample(**changes))
    assert main(["import", "slime", file, "--to", str(tmp_path / "record")]) == 1
    told = capsys.readouterr().err
    assert says in told
    assert "0.pt, sample 1" in told


class _Code:
    def __reduce__(self) -> Any:
        return os.mkdir, ("it-ran",)


@pytest.mark.parametrize("content", [_Code(), {"samples": []}, [1, 2], b"no file of torch", b"root:x:0:0:root:/root:"])
def test_a_file_with_code_in_it_is_refused_and_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, content: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    if isinstance(content, bytes):
        (tmp_path / "0.pt").write_bytes(content)
    else:
        torch.save(content, tmp_path / "0.pt")
    assert main(["import", "slime", str(tmp_path / "0.pt"), "--to", str(tmp_path / "record")]) == 1
    assert "0.pt' is not a " in capsys.readouterr().err
    assert not (tmp_path / "it-ran").exists()


def verl_dump(path: Path, step: int, *rows: tuple[str, str, float]) -> str:
    lines = [
        json.dumps({"input": text, "output": output, "gts": None, "score": score, "step": step, "acc": score})
        for text, output, score in rows
    ]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_verls_texts_are_tokenised_again_and_flagged(
    tmp_path: Path, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [
        verl_dump(tmp_path / "12.jsonl", 12, ("ask", "one", 1.0), ("ask", "two", 0), ("other", "", 0.0)),
        verl_dump(tmp_path / "9.jsonl", 9, ("ask", "three", 1.0)),
    ]
    to = tmp_path / "record"
    assert main(["import", "verl", *files, "--to", str(to), "--tokenizer", str(model_dir)]) == 0
    assert "the output is empty: left out (1 samples)" in capsys.readouterr().out
    assert read_manifest(to).lacks == ("behaviour_logprobs", "token_ids")
    assert [len(step.groups[0].rollouts) for step in (read_step(to, 1), read_step(to, 2))] == [1, 2]
    told = item_details(to, 2, 1, lambda token_ids: bytes(token_ids).decode())["rollouts"][0]
    assert "".join(told["completion"]["pieces"]) == "one"
    assert told["completion"]["behaviour_logprobs"] == [None] * 3
    config = tmp_path / "run.toml"
    config.write_text(f'[run]\ndirectory = "x"\n[model]\npath = "{model_dir}"\n[task]\nname = "spell_backward"\n')
    assert main(["replay", str(to), "--config", str(config)]) == 1
    assert "the record has no behaviour logprobs" in capsys.readouterr().err
    assert main(["replay", str(to)]) == 1
    assert "imported from verl and has no configuration" in capsys.readouterr().err


def test_a_dump_of_verl_that_cannot_be_read_is_named(
    tmp_path: Path, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "1.jsonl"
    for text, says in (
        ("", "is empty"),
        ("[1]", "line 1 is not an object"),
        ("{", "is not a rollout dump of verl"),
        ('{"input": "a", "output": "b", "score": 1}', "line 1: step is 'None', not a step's number"),
        ('{"input": "a", "output": "b", "score": "x", "step": 1}', "line 1: score is 'x', not a number"),
    ):
        path.write_text(text)
        words = ["import", "verl", str(path), "--to", str(tmp_path / "record"), "--tokenizer", str(model_dir)]
        assert main(words) == 1
        assert says in capsys.readouterr().err

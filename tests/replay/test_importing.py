"""Records made of files as slime and verl write them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inflight.cli import main
from inflight.observe.trace.records import item_details, read_manifest, read_step, versions_of

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
    assert (
        "several versions sampled it at unknown positions: assumed to be the oldest (1 samples)"
        in capsys.readouterr().out
    )
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
    assert "already contains a record" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"reward": {"a": 1.0}}, "choose one with --reward-key"),
        ({"reward": None}, "reward is 'None', not a number"),
        ({"tokens": "abc"}, "tokens is 'abc', not a list of token ids"),
        ({"response_length": 7}, "response_length is '7', not a positive number below the number of tokens"),
        ({"loss_mask": [1]}, "loss_mask has 1 entries for 4 tokens"),
        ({"rollout_log_probs": [0.0]}, "rollout_log_probs has 1 entries for 4 tokens"),
        ({"multimodal_inputs": {"images": [1]}}, "has images"),
        ({"loss_mask": 1}, "loss_mask is '1', not a list of 0 and 1"),
        ({"rollout_log_probs": [0.0, None, 0.0, 0.0]}, "rollout_log_probs is '[0.0, None, 0.0, 0.0]', not a list of"),
        ({"rollout_log_probs": [float("nan")] * 4}, "not a list of numbers"),
        ({"reward": float("nan")}, "reward is 'nan', not a number"),
        ({"group_index": [1]}, "group_index is '[1]', not a number"),
        ({"tokens": torch.ones(7)}, "not a list of token ids"),
        ({"tokens": [1, 2, 3, 4, 5, 6, 2**31]}, "not a list of token ids"),
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
    assert not list((tmp_path / "record").iterdir())


def test_samples_of_slimes_newer_releases_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Arrays and tensors in place of lists, fields that are not known here, and several samples per episode."""
    newer = {
        "prefix_cache_info": {"cached_tokens": 1, "total_prompt_tokens": 2},
        "rollout_top_p_token_ids": np.arange(4, dtype=np.int32),
        "rollout_routed_experts": np.zeros((6, 2, 2), np.int32),
        "teacher_log_probs": None,
        "weight_versions": None,
        "session_id": "a\u2028b",
    }
    arrays = {
        "tokens": np.arange(1, 8),
        "rollout_log_probs": torch.full((4,), -0.5),
        "reward": np.float64(0.5),
        "loss_mask": np.array([1, 0, 1, 1], np.int8),
    }
    samples = (
        slime_sample(**newer, rollout_id=7),
        slime_sample(**newer, rollout_id=7),
        slime_sample(**newer, rollout_id=8, **arrays, index=2),
        slime_sample(**newer, rollout_id=9, remove_sample=True),
        slime_sample(**newer, rollout_id=10, response_length=0, response="", status="aborted"),
    )
    file = slime_dump(tmp_path / "0.pt", 0, *samples)
    assert main(["import", "slime", file, "--to", str(tmp_path / "record")]) == 0
    told = capsys.readouterr().out
    assert "the experts that computed its tokens (rollout_routed_experts) are omitted (4 samples)" in told
    assert "the response is empty, so the sample is omitted (1 samples)" in told
    step = read_step(tmp_path / "record", 1)
    rollouts = step.groups[0].rollouts
    assert [it.episode for it in rollouts] == [7, 7, None, None]
    assert (rollouts[2].prompt_token_ids, rollouts[2].completion_token_ids) == ([1, 2, 3], [4, 5, 6, 7])
    assert (rollouts[2].reward, rollouts[2].behaviour_logprobs) == (0.5, [-0.5] * 4)
    assert [sum(sample.loss_mask) for sample in step.samples] == [4, 4, 3]  # slime removed the last


def test_nothing_is_left_of_an_import_that_fails_at_its_last_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [slime_dump(tmp_path / f"{i}.pt", i, slime_sample()) for i in range(2)]
    bad = slime_dump(tmp_path / "2.pt", 2, slime_sample(reward=None))
    to = tmp_path / "record"
    assert main(["import", "slime", *files, bad, "--to", str(to)]) == 1
    assert "2.pt, sample 0: reward is 'None'" in capsys.readouterr().err
    assert main(["import", "slime", *files, "--to", str(to)]) == 0
    assert versions_of(to) == [1, 2]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_file_of_slime_that_is_cut_off_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], share: float
) -> None:
    path = Path(slime_dump(tmp_path / "0.pt", 0, slime_sample()))
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    assert main(["import", "slime", str(path), "--to", str(tmp_path / "record")]) == 1
    assert "0.pt' is not a file that can be read" in capsys.readouterr().err


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
    assert "the output is empty, so the sample is omitted (1 samples)" in capsys.readouterr().out
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


def test_texts_may_have_any_character(tmp_path: Path, model_dir: Path) -> None:
    """verl does not escape what is not ASCII; some of it ends a line, for those who go by Unicode."""
    output = "a\u2028b\u0085c\x0bd é 🙂"
    line = json.dumps({"input": "ask", "output": output, "score": 1, "step": 1}, ensure_ascii=False)
    (tmp_path / "1.jsonl").write_text(line + "\n", encoding="utf-8")
    to = tmp_path / "record"
    words = ["import", "verl", str(tmp_path / "1.jsonl"), "--to", str(to), "--tokenizer", str(model_dir)]
    assert main(words) == 0
    (rollout,) = read_step(to, 1).groups[0].rollouts
    assert bytes(rollout.completion_token_ids).decode() == output


def test_a_dump_of_verl_that_cannot_be_read_is_named(
    tmp_path: Path, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "1.jsonl"
    for text, says in (
        ("", "is empty"),
        ("[1]", "line 1: it is not an object"),
        ("{", "is not a rollout dump of verl"),
        ('{"input": "a", "output": "b", "score": 1}', "line 1: step is 'None', not the number of a step"),
        ('{"input": "a", "output": "b", "score": "x", "step": 1}', "line 1: score is 'x', not a number"),
        ('{"input": "a", "output": "b", "score": NaN, "step": 1}', "line 1: score is 'nan', not a number"),
        ('{"input": "a", "output": "b", "score": 1, "step": 1, "uid": []}', "line 1: uid is '[]', not a name"),
        ('{"input": "\\ud800", "output": "b", "score": 1, "step": 1}', r"line 1: '\ud800' is not a character"),
        ('{"input": "a", "output": "b", "score": 1, "step": 1}\n{"inp', "line 2: Unterminated string"),
        ("[" * 100_000, "line 1: maximum recursion depth exceeded"),
        (b"\xff\xfe{}", "'utf-8' codec can't decode"),
    ):
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        words = ["import", "verl", str(path), "--to", str(tmp_path / "record"), "--tokenizer", str(model_dir)]
        assert main(words) == 1
        assert says in capsys.readouterr().err


@pytest.mark.parametrize("field", ["tokens", "reward"])
def test_tensors_that_are_larger_than_their_file_are_refused_before_they_are_expanded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], field: str
) -> None:
    many = torch.zeros(1, dtype=torch.int64).expand(10**9)
    value = {"exact": many} if field == "reward" else many
    dump = slime_dump(tmp_path / "0.pt", 0, slime_sample(**{field: value}))
    assert main(["import", "slime", dump, "--to", str(tmp_path / "record"), "--reward-key", "exact"]) == 1
    assert "its tensors would have 8000000000: it is damaged" in capsys.readouterr().err

"""Runs that learn from one or several teachers, on servers and in the ranks, and teachers that fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from inflight.cli import main
from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.errors import EndpointError, InflightError
from inflight.observe.trace.records import read_steps
from inflight.rollouts.driver_commands import ScoredGroup
from inflight.rollouts.mixture import create_mixture
from inflight.run.config import load_config
from inflight.run.distillation_config import DistillationSection
from inflight.run.preflight import Hosts, Machine, preflight
from inflight.run.sampling import teachers as teachers_module
from inflight.run.sampling.teachers import Teachers
from inflight.types import Rollout, TaskItem
from inflight.wire import ScoreRequest, ScoreResponse, VersionSpan
from tests.engine.reference import serving
from tests.models import make_model
from tests.run.runs import CONFIG, RunProcess
from tests.selection import first_of_each
from tests.servers import TOKEN, ServerProcess

MACHINE = Machine(Hosts("127.0.0.1", 0, None, can_outlive=True), devices=lambda: ())
LETTERS = "tests.run.tasks:count_letters"
ASKED = {"INFLIGHT_TOKEN": TOKEN}
BONUS = {"bonus": 2.0}


@pytest.fixture(scope="module")
def teacher_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("teacher") / "teacher", seed=1)


@pytest.fixture(scope="module")
def teacher(teacher_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    server = ServerProcess(teacher_dir, tmp_path_factory.mktemp("teacher-server"))
    server.wait_until_ready()
    yield server
    server.end()


def words(preset: str, *teachers: dict[str, Any]) -> list[str]:
    tables = ", ".join("{" + ", ".join(f"{key} = {json.dumps(it[key])}" for key in it) + "}" for it in teachers)
    return ["--loss.preset", preset, "--distillation.teachers", f"[{tables}]"]


def kl_of(run: RunProcess) -> list[float]:
    assert run.wait() == 0, run.output()
    return [row["teacher_kl_k1"] for row in run.rows() if row["kind"] == "step"]


def test_a_model_is_at_no_distance_from_itself_as_a_teacher(model_dir: Path, tmp_path: Path) -> None:
    """A shift by one token, another temperature or another prompt would show at once."""
    server = ServerProcess(model_dir, tmp_path / "server")
    server.wait_until_ready()
    try:
        for name, where in {"url": {"url": server.url}, "path": {"path": str(model_dir)}}.items():
            run = RunProcess(
                tmp_path / name, model_dir, *words("opd", where), "--run.num_steps", "1", environment=ASKED
            )
            assert abs(kl_of(run)[0]) < 1e-6  # float32 logprobs of order 5
    finally:
        server.end()


@pytest.mark.parametrize(
    "preset", first_of_each(["opd", "verl_forward_kl", "tinker_opd", "mopd"], lambda preset: preset.startswith("verl"))
)
def test_a_student_comes_closer_to_a_teacher_behind_a_url(
    teacher: ServerProcess, model_dir: Path, tmp_path: Path, preset: str
) -> None:
    more = ["--run.num_steps", "10", "--train.learning_rate", "2e-2", "--train.max_gradient_norm", "1.0"]
    more += ["--distillation.top_k", "128"] if preset == "verl_forward_kl" else []
    run = RunProcess(tmp_path, model_dir, *words(preset, {"url": teacher.url}), *more, environment=ASKED)
    assert run.wait() == 0, run.output()
    name = "teacher_kl_top_k" if preset == "verl_forward_kl" else "teacher_kl_k1"
    kl = [row[name] for row in run.rows() if row["kind"] == "step"]
    assert kl[0] > 0.1
    assert sum(kl[-3:]) / 3 < 0.7 * kl[0]


@pytest.mark.usefixtures("forks")
def test_each_task_of_a_mixture_has_its_own_teacher_and_the_record_repeats_the_run(
    teacher: ServerProcess, model_dir: Path, teacher_dir: Path, tmp_path: Path
) -> None:
    tasks = f'[{{name = "{LETTERS}", label = "own"}}, {{name = "{LETTERS}", label = "other", share = 3.0}}]'
    run = RunProcess(
        tmp_path,
        model_dir,
        *words("opd", {"url": teacher.url, "tasks": ["other"]}, {"path": str(model_dir), "tasks": ["own"]}),
        *("--task.name", "mixture", "--task.params", f"{{tasks = {tasks}}}"),
        *("--run.record", "true", "--run.num_steps", "3"),
        environment=ASKED,
    )
    assert run.wait() == 0, run.output()
    mixture = create_mixture(0, [{"name": LETTERS, "label": "own"}, {"name": LETTERS, "label": "other", "share": 3.0}])
    seen = set()
    for step in read_steps(run.directory / "record"):
        for group in step.groups:
            task = mixture.item(group.item_index).metadata["task"]
            for rollout in group.rollouts:
                assert rollout.teacher is not None
                assert (rollout.teacher.teacher, rollout.teacher.logprobs is None) == (task == "own", task == "own")
                seen.add(task)
    assert seen == {"own", "other"}
    kept = tmp_path / "replayed.json"
    assert main(["replay", str(run.directory), "--json", str(kept)]) == 0
    assert json.loads(kept.read_text())["is_bit_equal"] is True


def test_a_teacher_that_stands_still_is_asked_again_and_one_that_is_gone_ends_the_run(
    model_dir: Path, teacher_dir: Path, tmp_path: Path
) -> None:
    server = ServerProcess(teacher_dir, tmp_path / "server")
    server.wait_until_ready()
    run = RunProcess(
        tmp_path,
        model_dir,
        *words("opd", {"url": server.url}),
        *("--run.num_steps", "10000", "--distillation.timeout_s", "3"),
        environment=ASKED,
    )
    run.wait_for_steps(2)
    server.kill()
    assert run.wait(60) == 1
    assert "a teacher failed to score a completion; retrying for up to 3 s" in run.output()
    assert "the teacher did not score a completion within distillation.timeout_s = 3 s" in run.output()
    assert server.url in run.output()


def test_a_mixture_gives_each_task_its_share_of_the_items_and_scores_with_its_own_task() -> None:
    tasks = [{"name": LETTERS, "label": "own"}, {"name": LETTERS, "label": "other", "share": 3.0, "params": BONUS}]
    mixture = create_mixture(0, tasks)
    items = [mixture.item(i) for i in range(2000)]
    names = [item.metadata["task"] for item in items]
    assert abs(names.count("other") / 2000 - 0.75) < 0.04  # four standard deviations, of a fixed seed
    assert {(name, mixture.score(item, "e")) for name, item in zip(names, items, strict=True)} == {
        ("own", 1.0),
        ("other", 3.0),
    }
    assert [it.metadata["task"] for it in map(create_mixture(0, tasks).item, range(50))] == names[:50]


# ---- the bound of scoring


class Counting:
    """An endpoint that scores slowly and counts how much it has at a time; every other request fails once."""

    def __init__(self, endpoint: EmbeddedEndpoint) -> None:
        self._endpoint = endpoint
        self.now = self.most = 0
        self.failed: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._endpoint, name)

    async def score(self, request: ScoreRequest) -> ScoreResponse:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(0.01)
            if request.request_id[-1] in "02468" and request.request_id not in self.failed:
                self.failed.add(request.request_id)
                raise EndpointError("busy", "teacher")
            return await self._endpoint.score(request)
        finally:
            self.now -= 1


def rollouts(num: int) -> Sequence[Rollout]:
    spans = (VersionSpan(version=0, start=0, end=3),)
    return [Rollout([1, 2, i], [3, 4, 5], [-1.0] * 3, spans, "stop", 0.0, 1.0) for i in range(num)]


def test_a_teacher_scores_no_more_completions_at_a_time_than_its_bound(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def score() -> tuple[Counting, ScoredGroup, list[str]]:
        async with serving(model_dir) as endpoint:
            counting, notes = Counting(endpoint), []
            monkeypatch.setattr(teachers_module, "connect_endpoint", lambda *_, **__: counting)
            settings = DistillationSection.model_validate(
                {"teachers": [{"url": "http://a"}], "max_concurrent_scores": 3}
            )
            teachers = Teachers(settings, "", notes.append)
            await teachers.connect(258, 512)
            group = ScoredGroup(rollouts(12), (3,) * 12, (0.0,) * 12)
            scored = await teachers.scored(TaskItem(0, ""), "task", group)
            alone = await endpoint.score(ScoreRequest(request_id="x", token_ids=(1, 2, 7, 3, 4, 5), start=3))
            assert scored.rollouts[7].teacher is not None
            torch.testing.assert_close(
                torch.tensor(scored.rollouts[7].teacher.logprobs), torch.tensor(alone.logprobs), rtol=0, atol=1e-5
            )
            return counting, scored, notes

    counting, scored, notes = asyncio.run(score())
    assert counting.most == 3
    assert len(counting.failed) == 6
    assert [it.teacher is not None and len(it.teacher.logprobs or ()) for it in scored.rollouts] == [3] * 12
    assert ["a teacher failed to score" in note for note in notes] == [True, False]  # however often it fails
    assert notes[1] == f"teacher {model_dir.name} has recovered"


# ---- refused configurations


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (words("opd"), "the loss needs a teacher, but none is configured: set distillation.teachers"),
        (words("grpo", {"url": "http://127.0.0.1:1"}), "is set, but the loss does not use teachers"),
        (words("verl_forward_kl", {"url": "http://127.0.0.1:1"}), r"set distillation\.top_k"),
        (words("verl_forward_kl", {"path": "{model}"}), "give each teacher a url instead of a path"),
        (words("opd", {"url": "127.0.0.1:1"}), "127.0.0.1:1"),
        (words("opd", {"path": "{short}"}), "has a context of 96 tokens, but sequences of the run may have 512"),
        (
            words("opd", {"path": "{model}", "tasks": ["count_letters"]}, {"path": "{model}"}),
            r"teachers\[1\] scores no",
        ),
        (words("opd", {"tasks": []}), "a teacher needs a url or a path, but this one has neither"),
        (
            words("opd", {"url": "http://127.0.0.1:1", "tasks": ["sums"]}),
            "names task 'sums', but the tasks of the run are",
        ),
        (
            words("opd", {"url": "http://127.0.0.1:1", "path": "there"}),
            "a teacher needs a url or a path, but this one has both",
        ),
        (words("opd", {"path": "there"}), "model directory 'there' does not exist"),
        (words("opd", {"path": "{narrow}"}), r"has a different vocabulary \(300 tokens\)"),
        ([*words("opd", {"url": "http://127.0.0.1:1"}), "--sampling.temperature", "0.7"], "score at temperature 1"),
        ([*words("opd", {"path": "{model}"}), "--distillation.top_k", "4"], "top_k needs teachers with a url"),
        (words("opd", {"path": "{model}"}, {"path": "{model}"}), "more than one teacher has no tasks"),
        (["--task.name", "mixture", "--task.params", "{tasks = []}"], "a mixture needs at least two tasks"),
        (
            [
                "--task.name",
                "mixture",
                "--task.params",
                f'{{tasks = [{{name = "{LETTERS}"}}, {{name = "{LETTERS}"}}]}}',
            ],
            "are named 'tests.run.tasks:count_letters': set label",
        ),
        (
            ["--task.name", "mixture", "--task.params", f'{{tasks = [{{name = "{LETTERS}", portion = 2}}]}}'],
            r"task\.params\.tasks\[0\]: unknown key 'portion'",
        ),
    ],
)
def test_what_no_teacher_can_do_is_refused_before_anything_starts(
    model_dir: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, more: list[str], says: str
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(CONFIG.format(directory=tmp_path / "run", model=model_dir))
    narrow = short = ""
    if any("{narrow}" in word for word in more):
        narrow = str(make_model(tmp_path_factory.mktemp("narrow") / "narrow", vocab_size=300))
    if any("{short}" in word for word in more):
        short = str(make_model(tmp_path_factory.mktemp("short") / "short", max_model_len=96))
    filled = [
        word.replace("{narrow}", narrow).replace("{short}", short).replace("{model}", str(model_dir)) for word in more
    ]
    with pytest.raises(InflightError, match=says):
        preflight(load_config(file, filled), MACHINE)


def test_a_server_that_cannot_be_the_teacher_is_refused_when_the_run_starts(tmp_path: Path, model_dir: Path) -> None:
    other = make_model(tmp_path / "other", vocab_size=300)
    server = ServerProcess(other, tmp_path / "server")
    server.wait_until_ready()
    try:
        run = RunProcess(tmp_path, model_dir, *words("opd", {"url": server.url}), environment=ASKED)
        assert run.wait() == 1
        assert "does not support" in run.output() and "258" in run.output()
        assert "no checkpoint was saved: the same command starts the run over" in run.output()
        assert "mean reward" not in run.output()  # there was no step
    finally:
        server.end()

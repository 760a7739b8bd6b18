"""The command ``inflight check parity``: what agrees, and what it says of endpoints that are wrong in a known place."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from inflight.cli import main
from inflight.conformance.models import make_tiny_model
from inflight.conformance.parity.opening import open_pair
from inflight.conformance.targets import EndpointTarget
from tests.conformance.broken import require_no_crash
from tests.servers import ServerProcess
from tests.zygote import python

pytestmark = pytest.mark.timeout(300)
OWN = "tests.conformance.disagreeing:start"
MUTANTS = "tests.conformance.mutants:make"
FEW = ("--updates", "2", "--prompts", "2", "--tokens", "32")


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of four layers."""
    return make_tiny_model(tmp_path_factory.mktemp("parity") / "model", num_layers=4)


def check_parity(*words: str) -> int:
    """Return the exit status of a short comparison."""
    short = ["--updates", "6", "--prompts", "4"]
    return main(["check", "parity", *words, *([] if "--updates" in words else short)])


def test_the_embedded_engine_agrees_with_the_fsdp_worker_and_the_figures_are_kept(
    deep_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "parity.json"
    words = (OWN, "--option", "fault=none", "--model", str(deep_model), "--worker", "fsdp", "--json", str(file))
    assert check_parity(*words, *FEW) == 0
    assert "They agree: no logprob differs by more than 0.0005." in capsys.readouterr().out
    (row,) = json.loads(file.read_text())["rows"]
    assert row["agrees"]
    assert (row["engine"], row["trainer"], row["findings"]) == (
        "embedded",
        "inflight_fsdp:FSDP",
        [],
    )
    measured = row["measured"]
    assert measured["same_weights"]["num_tokens"] == 2 * 32
    assert 0 <= measured["same_weights"]["k3"] < 1e-9
    assert measured["unscaled"]["mean"] > 0.01  # the two temperatures are distinguished
    assert measured["bisection"] is None


def test_the_command_works_in_a_process_that_has_imported_nothing_of_the_kit(tmp_path: Path) -> None:
    """Its own imports have to be in an order that works."""
    program = tmp_path / "fresh.py"
    program.write_text(
        "import sys\n"
        "for name in [it for it in sys.modules if it.startswith('inflight.conformance')]:\n"
        "    del sys.modules[name]\n"
        "from inflight.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    words = ["check", "parity", "inflight.engines.embedded.loading:load_endpoint", *FEW, "--tokens", "8"]
    ended = subprocess.run([python(), str(program), *words], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert "They agree" in ended.stdout


def test_a_server_that_refuses_the_token_is_reported_to_serve_its_earlier_weights(
    deep_model: Path, start_server: Callable[..., ServerProcess], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    server = start_server(deep_model)
    token_file = tmp_path / "wrong"
    token_file.write_text("wrong")
    assert check_parity(server.url, "--model", str(deep_model), "--token-file", str(token_file), *FEW) == 1
    said = capsys.readouterr().err
    assert "the server still serves the weights that it served before" in said
    assert "restart it" not in said


def test_first_tokens_of_equal_prompts_are_equal_where_requests_cannot_have_seeds(deep_model: Path) -> None:
    """Different ones would count as a dependence on earlier tokens."""
    target = EndpointTarget(factory=OWN, model=deep_model, options={"fault": "no seeds"})

    async def first_tokens() -> list[tuple[int, float]]:
        async with open_pair(target, {}, prompts=1, tokens=8, start_s=60.0, report=lambda _: None) as pair:
            return await pair.first_logprobs([pair.subject.prompt()] * 12)

    assert len(set(asyncio.run(first_tokens()))) == 1


@pytest.mark.parametrize(
    ("factory", "fault", "said", "words"),
    [
        (OWN, "layer scales", ["with attention alone", "look at: attention:", "look at: layer 2, counted from 0"], FEW),
        *(
            pytest.param(*case, (), marks=pytest.mark.exhaustive)
            for case in [
                (OWN, "loses an activation", ["with the MLPs alone", "look at: the MLP:"]),
                (OWN, "rounds logits", ["the engine's logprobs are those of logits rounded to bfloat16", "the head,"]),
                (OWN, "keeps a projection", ["the engine still depends on earlier tokens", "o_proj and down_proj"]),
                (MUTANTS, "positions shift", ["grows along a completion", "look at: positions:"]),
                (MUTANTS, "wears away", ["updates with the same weights increased the difference"]),
                (MUTANTS, "temperature missing in logprobs", ["those of temperature 1", "processed logprobs"]),
            ]
        ),
    ],
)
def test_what_differs_is_told_by_where_to_look(
    factory: str,
    fault: str,
    said: list[str],
    words: tuple[str, ...],
    deep_model: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    option = f"{'fault' if factory == OWN else 'mutant'}={fault}"
    assert check_parity(factory, "--option", option, "--model", str(deep_model), *words) == 1
    text = capsys.readouterr().out
    require_no_crash(text)
    assert "They DIFFER" in text
    for part in said:
        assert part in text


@pytest.mark.exhaustive
def test_servers_are_compared_in_each_dtype_and_serve_the_checkpoint_again(deep_model: Path, tmp_path: Path) -> None:
    serve = f"{python()} -m inflight serve {{model}} --port {{port}} --token-file {{token_file}} --dtype {{dtype}}"
    file = tmp_path / "parity.json"
    words = ("--serve", serve, "--worker", "fsdp", "--dtype", "float32", "--dtype", "bfloat16")
    assert check_parity(*words, *FEW, "--bisect", "--model", str(deep_model), "--json", str(file)) == 0
    exact, rounded = json.loads(file.read_text())["rows"]
    assert [row["measured"]["dtype"] for row in (exact, rounded)] == ["float32", "bfloat16"]
    assert exact["measured"]["same_weights"]["k3"] < 1e-9 < rounded["measured"]["same_weights"]["k3"]
    assert not exact["measured"]["bisection"]["context_counts"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ((OWN, "--dtype", "float32"), "--dtype requires a server that is started in that dtype"),
        (("--serve", "serve {port} {dtype}"), "specify it with --dtype"),
        (("http://127.0.0.1:9",), "specify the checkpoint that the URL serves with --model DIR"),
        ((OWN, "--updates", "-1"), "--updates must be at least 0, not -1"),
        ((OWN, "--worker", "none such"), "worker 'none such' is not installed"),
    ],
)
def test_wrong_arguments_are_told(words: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_parity(*words) == 1
    assert complaint in capsys.readouterr().err

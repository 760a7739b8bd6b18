"""Claude Code, Codex and the OpenAI Agents SDK, each using a tool in one episode: exact tokens, one rollout.

A script plays the model, since no model that fits here calls tools. With ``INFLIGHT_TESTS_RECORD=1``, the requests are
kept for tests/environments/test_recorded_agents.py.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from inflight.environments.proxy import app as app_module
from inflight.environments.proxy.run_server import ProxyServer
from tests.environments.proxied import check_every_token_is_trained_once, opened, qwen, scripted
from tests.real_agents.recorded_requests import CALLS, read, texts_of, write

PROGRAMS = Path(os.environ["INFLIGHT_TESTS_AGENTS"])
"""What make test-agents has installed."""
pytestmark = pytest.mark.timeout(170)
QUESTION = "What is 6 * 7? Use a command."


def claude(home: Path, url: str, key: str) -> tuple[list[str], dict[str, str]]:
    words = ["-p", QUESTION, "--model", "m", "--output-format", "json", "--allowedTools", "Bash"]
    return [str(PROGRAMS / "node_modules/.bin/claude"), *words], {
        "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": key,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }


def codex(home: Path, url: str, key: str) -> tuple[list[str], dict[str, str]]:
    (home / "config.toml").write_text(
        'model = "m"\nmodel_provider = "inflight"\n\n[model_providers.inflight]\nname = "inflight"\n'
        f'base_url = "{url}"\nwire_api = "responses"\nenv_key = "OPENAI_API_KEY"\n'
    )
    words = ["exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", "--json", QUESTION]
    return [str(PROGRAMS / "node_modules/.bin/codex"), *words], {"OPENAI_API_KEY": key, "CODEX_HOME": str(home)}


def agents_sdk(home: Path, url: str, key: str, *more: str) -> tuple[list[str], dict[str, str]]:
    program = Path(__file__).with_name("agents_sdk.py")
    return [str(PROGRAMS / "venv/bin/python"), str(program), *more], {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key}


def streamed_agents_sdk(home: Path, url: str, key: str) -> tuple[list[str], dict[str, str]]:
    return agents_sdk(home, url, key, "--stream")


PROGRAM_OF = {
    "claude_code": claude,
    "codex": codex,
    "agents_sdk": agents_sdk,
    "streamed_agents_sdk": streamed_agents_sdk,
}


@pytest.mark.parametrize("name", CALLS)
def test_an_agent_calls_a_tool_and_its_tokens_are_those_that_were_sampled(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, texts = PROGRAM_OF[name], texts_of(name)
    built, template = qwen()
    said = [(*built(text, add_special_tokens=False)["input_ids"], built.eos_token_id) for text in texts]
    requests: list[dict[str, Any]] = []
    original = app_module.body_message

    async def kept(kind: Any, content: bytes) -> Any:
        requests.append({"kind": kind.__name__, "body": json.loads(content)})
        return await original(kind, content)

    monkeypatch.setattr(app_module, "body_message", kept)

    async def main() -> tuple[int | None, str]:
        async with ProxyServer("m") as proxy:
            # The prompts of these agents have tens of thousands of tokens.
            episode = scripted(
                template, proxy, lambda i, _: said[i], end=built.eos_token_id, streams=True, max_tokens=200_000
            )
            async with opened(episode) as it:
                command, variables = program(tmp_path, it.url, it.key)
                process = await asyncio.create_subprocess_exec(
                    *command,
                    cwd=tmp_path,
                    env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), **variables},
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.STDOUT,
                )
                try:
                    output, _ = await asyncio.wait_for(process.communicate(), 120)
                finally:
                    if process.returncode is None:
                        process.kill()
                        await process.wait()
            check_every_token_is_trained_once(episode)
            assert [it.completion.token_ids for it in episode.recording.calls] == said, output.decode()
            first, last = episode.recording.calls
            # What was sampled is in the next prompt as it was sampled, followed by the result of the tool.
            start = len(first.prompt_token_ids)
            assert last.prompt_token_ids[: start + len(said[0])] == first.prompt_token_ids + said[0]
            assert "42" in built.decode(last.prompt_token_ids[start + len(said[0]) :])
            (rollout,) = episode.played(1.0).rollouts(0, 1.0)
            assert len(rollout.turns) == 2 and episode.num_rewritten == 0
            return process.returncode, output.decode()

    status, output = asyncio.run(main())
    assert status == 0 and "It is 42." in output, output
    if os.environ.get("INFLIGHT_TESTS_RECORD"):
        write(name, requests)
    fields = [(it["kind"], sorted(it["body"])) for it in requests]
    # Fails if a release sends other fields: record its requests again, and find out what the new fields mean.
    assert fields == [(it["kind"], sorted(it["body"])) for it in read(name)]

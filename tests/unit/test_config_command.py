"""``inflight config``, and that every setting has a meaning."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from inflight.base.described_settings import describe_sections
from inflight.cli import main
from inflight.run.config import RunConfig, load_config


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["config", *words]) == 0
    return capsys.readouterr().out


def test_the_printed_configuration_loads_and_equals_the_defaults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys)
    file = tmp_path / "run.toml"
    file.write_text(text)
    needed = {"run": {"directory": "runs/first"}, "model": {"path": "models/tiny"}, "task": {"name": "spell_backward"}}
    defaults = RunConfig.model_validate(needed)
    assert load_config(file) == defaults

    written = re.sub(r"^# (\w+ = .+)$", r"\1", text.partition("# [[servers.fleet]]")[0], flags=re.MULTILINE)
    rest = text.rpartition("# [[distillation.teachers]]")[2].partition("[rollouts]")[2]
    written += "[rollouts]" + re.sub(r"^# (\w+ = .+)$", r"\1", rest, flags=re.MULTILINE)
    file.write_text(written)
    assert load_config(file).model_dump() == defaults.model_dump(), "a default that is written is not the default"


def test_every_setting_is_printed_with_a_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys)
    for section in describe_sections(RunConfig):
        assert section.header in text
        assert section.meaning, section.key
        for field in section.fields:
            assert field.meaning, f"{section.key}.{field.name} has no docstring"
            assert f"{field.name} =" in text


def test_one_section_is_printed_alone_and_an_unknown_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "train").count("[") < 20
    assert main(["config", "trian"]) == 1
    assert "there is no section 'trian'; the sections are run, model" in capsys.readouterr().err

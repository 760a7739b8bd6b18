"""What ``inflight policies`` prints."""

from __future__ import annotations

import pytest

from inflight.cli import main
from inflight.rollouts.listing import KINDS, parameters


def test_every_policy_is_listed_with_its_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policies"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for kind, policies in KINDS.items():
        assert f"{kind}:" in lines
        for name, policy in policies.items():
            assert any(line.split()[:1] == [name] and len(line.split()) > 4 for line in lines)
            for param, default in parameters(policy).items():
                assert any(f"{param} = {default}" in line for line in lines)


def test_one_policy_is_described_and_an_unknown_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policies", "histopipe"]) == 0
    assert "two rounds" in capsys.readouterr().out.lower()
    assert main(["policies", "fastest"]) == 1
    assert "unknown policy 'fastest'; known: " in capsys.readouterr().err

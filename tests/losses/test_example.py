"""The example of a loss of one's own runs."""

from __future__ import annotations

import runpy
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loss.py"


def test_example_of_a_loss_from_pieces_runs_and_both_heads_agree(capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    *_, last = capsys.readouterr().out.splitlines()
    two, one = last.removeprefix("dapo in two passes ").split(", in one ")
    assert two == one

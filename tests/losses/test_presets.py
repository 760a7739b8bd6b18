"""Every preset against plain loops in float64, from the logits on, and under every mask and temperature."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import pytest
import torch

from inflight.cli import main
from inflight.errors import ConfigError
from inflight.losses import PRESETS, PolicyLoss, metric_values, preset
from tests.losses.reference import LOSSES
from tests.losses.steps import MASKS, logprobs_of, plan_of, random_step, sequences_of, top_logprobs_of
from tests.selection import first_of_each

ROOT = Path(__file__).parents[2]


def both_ways(name, batch, logits_TV):
    """Loss and gradient with respect to the logits: the library's, and the plain loop's."""
    results = []
    for library in (True, False):
        leaf_TV = logits_TV.clone().requires_grad_()
        trainer_T = logprobs_of(leaf_TV, batch.token_ids_T, batch.temperature_T)
        loss, top_TK = PRESETS[name].loss, top_logprobs_of(leaf_TV, batch)
        given = {"student_top_TK": top_TK} if "teacher_top" in loss.needs else {}
        value = (
            loss(batch, trainer_T, plan_of(loss, [batch], [trainer_T]), **given).loss
            if library
            else LOSSES[name](sequences_of(batch, trainer_T, top_TK))
        )
        gradient_TV = torch.autograd.grad(value, leaf_TV, allow_unused=True)[0] if value.requires_grad else None
        results.append((value.item(), torch.zeros_like(leaf_TV) if gradient_TV is None else gradient_TV))
    return results


@pytest.mark.parametrize(
    ("mask", "temperature", "drift"),
    first_of_each(itertools.product(MASKS, (None, 1.0, 0.7), (0.3, 2.0, 0.002)), lambda case: case[0]),
)
@pytest.mark.parametrize("name", PRESETS)
def test_preset_equals_a_plain_loop_from_the_logits_on(name, mask, temperature, drift):
    seed = (MASKS.index(mask) * 3 + int(drift)) * 3 + int(temperature or 0)
    batch, logits_TV = random_step(mask=mask, drift=drift, temperature=temperature, seed=seed)
    (loss, gradient_TV), (expected, expected_TV) = both_ways(name, batch, logits_TV)
    # float64 throughout: a few roundings of values of order 1 to 100.
    assert loss == pytest.approx(expected, rel=1e-12, abs=1e-13)
    torch.testing.assert_close(gradient_TV, expected_TV, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_reference_that_is_not_zero(name):
    batch, logits_TV = random_step(drift=0.002, mask="everything")
    (loss, gradient_TV), _ = both_ways(name, batch, logits_TV)
    assert math.isfinite(loss)
    assert gradient_TV.abs().max() > 0


def test_the_docs_describe_every_metric_and_no_other():
    page = (ROOT / "docs" / "losses.md").read_text().partition("### Metrics")[2].partition("###")[0]
    rows = [row.split(" | ")[0] for row in page.splitlines() if row.startswith("| `")]
    described = {name for row in rows for name in re.findall(r"`(\w+)`", row) if not name.startswith("_")}
    described |= {f"{name}_squared" for row in rows if "`_squared`" in row for name in re.findall(r"`([a-z]\w+)`", row)}
    reported = set()
    for it in PRESETS.values():
        for batch, logits_TV in (random_step(mask="everything"), random_step(drift=0.002, mask="everything")):
            trainer_T = logprobs_of(logits_TV, batch.token_ids_T, batch.temperature_T)
            top_TK = top_logprobs_of(logits_TV, batch)
            given = {"student_top_TK": top_TK} if "teacher_top" in it.loss.needs else {}
            output = it.loss(batch, trainer_T, plan_of(it.loss, [batch], [trainer_T]), **given)
            reported |= metric_values(output.metrics).keys()
    source = "".join(file.read_text() for file in (ROOT / "src" / "inflight" / "losses").glob("*.py"))
    assert reported - described == set()
    assert {name for name in described - reported if f'"{name}"' not in source} == set()


def test_every_preset_is_json_and_back_and_can_be_hashed():
    for it in PRESETS.values():
        assert PolicyLoss.model_validate_json(it.loss.model_dump_json()) == it.loss
        assert isinstance(hash(it.loss), int)


def test_there_are_references_for_all_presets_and_no_others():
    assert set(LOSSES) == set(PRESETS)
    assert len(PRESETS) >= 40


def test_description_of_a_preset_has_all_parts_in_ten_lines():
    for it in PRESETS.values():
        lines = it.describe().splitlines()
        assert 9 <= len(lines) <= 10
        assert it.source in lines[0]


def test_unknown_preset_is_refused_with_the_known_ones():
    with pytest.raises(
        ConfigError, match=r"unknown loss preset 'gropo' \(did you mean 'grpo' or 'up_grpo'\?\); known: a3po"
    ):
        preset("gropo")


def test_command_lists_every_preset_with_what_it_needs(capsys):
    assert main(["losses"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(any(line.startswith(name) for line in lines) for name in PRESETS)
    assert next(line for line in lines if line.startswith("m2po")).split()[-1] == "first_forward"


def test_command_describes_one_preset(capsys):
    assert main(["losses", "gspo"]) == 0
    assert capsys.readouterr().out.strip() == PRESETS["gspo"].describe()


def test_command_refuses_an_unknown_preset(capsys):
    assert main(["losses", "nothing"]) == 1
    assert "unknown loss preset 'nothing'" in capsys.readouterr().err

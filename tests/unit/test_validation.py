"""What pydantic refuses is described by location, value and what is allowed."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

import pydantic
import pytest
from pydantic import Field, model_validator

from inflight.base.toml import Section, check_settings
from inflight.base.validation import describe_problems
from inflight.errors import ConfigError


class Circle(Section):
    kind: Literal["circle"] = "circle"
    radius: float = Field(default=1.0, gt=0)


class Square(Section):
    kind: Literal["square"] = "square"
    side: float = 1.0

    @model_validator(mode="after")
    def _is_small(self) -> Self:
        if self.side > 9:
            raise ValueError(f"side {self.side:g} is above 9")
        return self


class Drawing(Section):
    shapes: tuple[Annotated[Circle | Square, Field(discriminator="kind")], ...] = ()
    frame: Square | None = None
    token: int = 0


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"fraem": {}}, "unknown key 'fraem'; did you mean frame? (got {})"),
        ({"colour": 1}, "unknown key 'colour'; known: shapes, frame, token (got 1)"),
        ({"frame": {"sied": 1}}, "unknown key 'frame.sied'; did you mean frame.side? (got 1)"),
        (
            {"shapes": [{"kind": "circle", "radiu": 1}]},
            "unknown key 'shapes.0.circle.radiu'; did you mean shapes.0.circle.radius? (got 1)",
        ),
        (
            {"shapes": [{"kind": "circle", "radius": -1}]},
            "shapes.0.circle.radius: Input should be greater than 0 (got -1)",
        ),
        ({"frame": {"side": 10}}, "frame: side 10 is above 9"),
        ({"frame": {"side": float("inf")}}, "frame.side: Input should be a finite number (got inf)"),
        ({"frame": 3, "token": "secret"},
         "frame: this is a group of keys, not one value; its keys: kind, side (got 3); "
         "token: Input should be a valid integer, unable to parse string as an integer"),
    ],
)  # fmt: skip
def test_a_problem_is_described_by_its_key_its_value_and_what_is_allowed(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_settings(Drawing, values, "drawing")
    assert str(refused.value) == f"drawing: {text}"


def test_at_most_five_problems_are_described() -> None:
    with pytest.raises(pydantic.ValidationError) as refused:
        Drawing.model_validate({"shapes": [{"kind": "circle", "radius": -number - 1} for number in range(20)]})
    assert describe_problems(refused.value).count("(got ") == 5

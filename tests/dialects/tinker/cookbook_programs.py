"""Training loops of tinker-cookbook on data that are made here: ``cookbook_programs.py dpo|distillation MODEL LOG``.

The recipes of the cookbook that need no download are started as modules; these two load their data from a hub.
"""

from __future__ import annotations

import asyncio
import sys

import chz
import datasets
from tinker_cookbook import renderers
from tinker_cookbook.distillation import train_on_policy
from tinker_cookbook.distillation.datasets import (
    DistillationDatasetConfig,
    PromptOnlyDataset,
    TeacherConfig,
)
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
from tinker_cookbook.preference.preference_datasets import ComparisonDatasetBuilder
from tinker_cookbook.preference.types import Comparison, LabeledComparison
from tinker_cookbook.rl.types import RLDatasetBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig
from tinker_cookbook.tokenizer_utils import get_tokenizer

RENDERER = "qwen3_instruct"
QUESTIONS = ["What is 2 + 3?", "What is 7 - 4?", "Name a colour.", "Name an animal."]
NUM_STEPS = 2


@chz.chz
class Comparisons(ComparisonDatasetBuilder):
    """Short answers are better than long ones."""

    def get_train_and_test_datasets(self) -> tuple[datasets.Dataset, datasets.Dataset | None]:
        return datasets.Dataset.from_list([{"question": it} for it in QUESTIONS]), None

    def example_to_labeled_comparison(self, example: dict[str, str]) -> LabeledComparison:
        answers = ("Five.", "That is a question that I would like to think about.")
        better, worse = ([renderers.Message(role="assistant", content=it)] for it in answers)
        asked = [renderers.Message(role="user", content=example["question"])]
        return LabeledComparison(Comparison(asked, better, worse), "A")


@chz.chz
class Prompts(RLDatasetBuilder):
    """Questions without rewards."""

    model: str

    async def __call__(self) -> tuple[PromptOnlyDataset, None]:
        tokenizer = get_tokenizer(self.model)
        renderer = renderers.get_renderer(RENDERER, tokenizer=tokenizer)
        return PromptOnlyDataset(QUESTIONS, 2, 2, renderer, tokenizer), None


def run_dpo(model: str, log: str) -> None:
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=model, renderer_name=RENDERER, max_length=256, batch_size=2
    )
    train_dpo.main(
        train_dpo.Config(
            log_path=log,
            model_name=model,
            recipe_name="dpo",
            renderer_name=RENDERER,
            dataset_builder=DPODatasetBuilderFromComparisons(comparison_builder=Comparisons(), common_config=common),
            learning_rate=1e-2,
            lora_rank=4,
            eval_every=0,
            infrequent_eval_every=0,
            save_every=0,
            max_steps=NUM_STEPS,
        )
    )


def run_distillation(model: str, log: str) -> None:
    """The teacher is the initial model."""
    data = DistillationDatasetConfig(
        dataset_builder=Prompts(model=model), teacher_config=TeacherConfig(base_model=model), groups_per_batch=2
    )
    config = train_on_policy.Config(
        learning_rate=1e-2,
        dataset_configs=[data],
        model_name=model,
        recipe_name="distillation",
        renderer_name=RENDERER,
        max_tokens=8,
        lora_rank=4,
        log_path=log,
        eval_every=0,
        save_every=0,
        max_steps=NUM_STEPS,
    )
    asyncio.run(train_on_policy.main(config))


if __name__ == "__main__":
    {"dpo": run_dpo, "distillation": run_distillation}[sys.argv[1]](*sys.argv[2:])

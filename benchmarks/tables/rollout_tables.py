"""Tables of docs/evidence-rollouts.md: schedulers, policies, drafts, and how the criteria of the papers were met."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.tables.kept import kept


def drafts_table() -> str:
    """Return tokens per verification and speed with each kind of drafts, by epoch."""
    kinds = {kind: rows for kind, rows in kept("drafts")["rows"]["kinds"].items() if kind != "off"}
    lines = [
        "| epoch | reward | " + " | ".join(f"{kind}: tokens per verification, speed" for kind in kinds) + " |",
        "|---|---|" + "---|" * len(kinds),
    ]
    for epoch in zip(*kinds.values(), strict=True):
        cells = [
            f"{row['tokens_per_verification']:.2f}, {row['speed_up']:.2f}x"
            if "tokens_per_verification" in row
            else f"none, {row['speed_up']:.2f}x"
            for row in epoch
        ]
        lines.append(f"| {epoch[0]['epoch']} | {epoch[0]['reward']:.2f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def policies_table() -> str:
    """The quickstart under every policy, on the same seed."""
    lines = [
        "| setting | reward, first ten steps | last ten | mean lag | effective sample size |",
        "|---|---|---|---|---|",
    ]
    for name, row in kept("policies")["rows"].items():
        setting = " ".join(row["overrides"]) or name
        lines.append(
            f"| `{setting}` | {row['reward_first']:.3f} | {row['reward_last']:.3f} | {row['lag_mean']:.2f} | "
            f"{row['ess_mean']:.4f} |"
        )
    return "\n".join(lines)


def rollouts_table() -> str:
    """Return each scheduler's trained tokens per time over the plain one's, in simulated time."""
    settings = ("conventional", "pipeline, max_lag 1")
    lines = [
        "| scheduler | paper | the paper's claim | conventional: speed, slots in use | pipeline: speed, slots in use "
        "| recall of the longest fifth | one decision |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in kept("rollouts")["rows"]:
        cells = [
            f"{statistics.median(row[label]['ratios']):.2f}x ({min(row[label]['ratios']):.2f} to "
            f"{max(row[label]['ratios']):.2f}), {100 * row[label]['slot_share']:.0f} %"
            for label in settings
        ]
        recall = "" if row["recall"] is None else f"{100 * row['recall']:.0f} %"
        lines.append(
            f"| `{row['name']}` | {row['paper']} | {row['claim']} | {' | '.join(cells)} | {recall} "
            f"| {row['decision_ms']:.3f} ms |"
        )
    return "\n".join(lines)


def criteria_table() -> str:
    """Return what each seed paper is held to, what was measured here, and how to measure it again."""
    rows = [
        ("PipelineRL", "at least three updates during one generation, with exact spans", _SPANS, _SPANS_BY),
        (
            "",
            "the effective sample size at a maximum lag of 8 is closer to that of conventional G=1 than to that of G=8",
            _ess(),
            _BENCHMARK,
        ),
        (
            "",
            "1.3 to 1.6 times as fast as conventional RL at a lag of 8, simulated",
            _speeds(),
            _BENCHMARK,
        ),
        ("", "a lower limit for the effective sample size, in live runs", "it stops a run or makes it wait", _GUARD_BY),
        (
            "RhymeRL, HistoSpec",
            "drafts do not change the distribution",
            "E-70 holds: chi-square tests pass, and greedy tokens are identical",
            _LOSSLESS_BY,
        ),
        ("", "more than two accepted tokens per verification from the third epoch on", _accepted(), _DRAFTS),
        (
            "",
            "weighting the history by reward is at least as good as counting, or is reported as no gain",
            _weighted(),
            _DRAFTS,
        ),
        (
            "RhymeRL, HistoPipe",
            "endpoints are busy at least 90 % of the time with linear rank groups in alternating order, and less than "
            "55 % with alternating order alone; the lag is at most 1",
            "above 90 %; 45 to 55 %; the lag is at most 1",
            "`test_histopipe_keeps_endpoints_busy_by_linear_rank_groups_in_alternating_order`",
        ),
        (
            "LlamaRL",
            "stages on separate devices are never slower, and equally fast only if neither batch could grow",
            "holds for random cost curves and memory sizes",
            "`test_stages_apart_are_never_slower_and_equal_only_where_neither_batch_could_grow`",
        ),
        (
            "",
            "AIPO's cap keeps training stable at a lag of 8",
            _capped(),
            _BENCHMARK,
        ),
        (
            "",
            "resharding moves each byte once",
            "with `updates.sharded`, each rank sends the parts that it holds; every server still receives all parts",
            "`python -m benchmarks.sharded`",
        ),
        (
            "AReaL",
            "no token is older than eta, under random schedules and after a recovery",
            "holds",
            "`test_no_policy_trains_on_a_token_beyond_its_lag`, "
            "`test_the_gate_of_areal_admits_no_burst_after_a_recovery`",
        ),
        ("", "at a lag of 8, naive PPO degrades and decoupled PPO does not", _areal(), _BENCHMARK),
        ("", "A-3PO uses the version of each token", _lagged("a3po"), f"preset `a3po`; {_BENCHMARK}"),
        (
            "StreamRL",
            "algorithm 1 (`inflight.rollouts.split`); algorithm 2 and longest first in live runs",
            "algorithm 1 finds the best of all splits; runs with `skew_aware` train",
            "`tests/unit/test_split.py`, `test_every_scheduler_trains_and_the_ledger_adds_up`",
        ),
        (
            "",
            "the speed-up of algorithm 2, and the recall of its predictor",
            _skew_aware(),
            "`python benchmarks/rollouts.py`",
        ),
        (
            "Ring-lite, C3PO",
            "a constant denominator",
            "every step trains on exactly the budget",
            "`test_constant_tokens_trains_on_exactly_its_budget_in_every_step`",
        ),
        (
            "",
            "the gradient norm and the number of tokens per step vary less than with GRPO and DAPO",
            _variations(),
            _BENCHMARK,
        ),
        (
            "Shuffle-R1",
            "pairs and draws are those of a plain loop with the same seeds",
            "equal on 60 batches",
            "`test_shuffled_pairs_equals_a_plain_loop_on_the_same_seed`",
        ),
        ("ReaL", "a search over layouts", "not implemented; `best_split` divides devices between two stages only", ""),
        ("SRL", "a contract for streams of samples", "the endpoint contract, one completion or chunk at a time", _KIT),
        (
            "ArCHer",
            "a critic computes an advantage for each turn",
            '`rollouts.credit = "critic"`',
            "`tests/unit/test_critic.py`",
        ),
        (
            "Spreeze",
            "automatic tuning to a machine",
            "short runs of each configuration, with the same table as a plan",
            "`inflight plan --measure`",
        ),
        (
            "JOWA, SORL",
            "does not apply",
            "offline RL on Atari and with flow models, without rollouts of a language model",
            "",
        ),
        ("Echo Chamber", "does not apply", "a study of what RL amplifies in pretrained models, not a mechanism", ""),
    ]
    lines = ["| paper | criterion | measured here | by |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


_BENCHMARK = "`python -m benchmarks.research.criteria`"
_DRAFTS = "`python benchmarks/drafts.py models/tiny`"
_KIT = "`inflight check endpoint`"
_SPANS = "twenty updates during a few completions; every token reveals which of two weights sampled it"
_SPANS_BY = "`test_logprobs_and_spans_are_true_while_an_update_comes_after_every_few_steps_of_drafts`, U-20, U-21"
_GUARD_BY = "`test_a_run_whose_effective_sample_size_is_too_low_stops_if_told_to`, `test_every_policy_trains`"
_LOSSLESS_BY = "`inflight check endpoint`, `tests/engine/test_speculation.py`"


def _mean(rows: Sequence[dict[str, Any]], key: str) -> float:
    return statistics.fmean(row[key] for row in rows)


def _ess() -> str:
    modes = kept("criteria")["rows"]["modes"]
    ess = {mode: _mean(rows, "ess_mean") for mode, rows in modes.items()}
    own = ess["in flight"]
    is_nearer = abs(own - ess["conventional G=1"]) < abs(own - ess["conventional G=8"])
    figures = ", ".join(f"{mode.replace('in flight', 'pipeline')} {value:.4f}" for mode, value in ess.items())
    largest = max(row["lag_max"] for row in modes["in flight"])
    lag = f"largest lag {largest}, mean lag {_mean(modes['in flight'], 'lag_mean'):.1f}"
    rewards = ", ".join(f"{_mean(rows, 'reward_mean'):.3f}" for rows in modes.values())
    return (
        f"{'yes' if is_nearer else '**no**'}: {figures} ({lag}); mean reward over all steps, in this order: {rewards}"
    )


def _speeds() -> str:
    found = "; ".join(
        f"{row['ratio']:.2f}x ({row['num_training']} devices train, {row['num_generating']} generate up to "
        f"{row['capacity']} completions each; mean lag {row['lag_mean']:.1f}, largest lag {row['lag_max']})"
        for row in kept("criteria")["rows"]["speeds"]
    )
    return f"yes if some tokens may be older than 8 versions, and less if none may: {found}"


def _capped() -> str:
    figures = _lagged("aipo", "aipo without its cap")
    return f"the cap bounds the gradient, but training does not fail here without it either. {figures}"


def _lagged(*names: str) -> str:
    losses = kept("criteria")["rows"]["losses"]
    return "; ".join(
        f"{name}: mean reward {_mean(losses[name]['lag 8'], 'reward_mean'):.3f}, in the last ten steps "
        f"{_mean(losses[name]['lag 8'], 'reward_last'):.3f}, largest gradient norm "
        f"{max(row['gradient_norm_max'] for row in losses[name]['lag 8']):.1f}"
        for name in names
    )


def _areal() -> str:
    naive, decoupled = (kept("criteria")["rows"]["losses"][name] for name in ("ppo, naive", "decoupled_ppo"))
    return (
        "naive PPO learns least; decoupled PPO learns, but more slowly than at lag 0. Mean reward over all steps: "
        f"naive {_mean(naive['lag 8'], 'reward_mean'):.3f}, decoupled "
        f"{_mean(decoupled['lag 8'], 'reward_mean'):.3f}; at lag 0 {_mean(naive['lag 0'], 'reward_mean'):.3f}"
    )


def _variations() -> str:
    found = []
    for stage in kept("criteria")["rows"]["batches"]:
        ways = stage["ways"]
        norms = ", ".join(f"{name} {way['gradient_norm_variation']:.2f}" for name, way in ways.items())
        found.append(f"at reward {stage['reward']:.2f}: {norms}")
    tokens = ", ".join(f"{name} {way['tokens_variation']:.2f}" for name, way in ways.items())
    return (
        "**partly**: the number of tokens varies less; the gradient norm varies less than with DAPO, but less than "
        "with GRPO only at first. Standard deviation divided by mean, for the gradient norm "
        f"{'; '.join(found)}; for tokens per step: {tokens}"
    )


def _accepted() -> str:
    rows = [row for row in kept("drafts")["rows"]["kinds"]["history"] if row["epoch"] > 2]
    return ", ".join(f"epoch {row['epoch']}: {row['num_accepted'] / row['num_verifications']:.1f}" for row in rows)


def _weighted() -> str:
    kinds = kept("drafts")["rows"]["kinds"]
    counts, weighted = (
        [f"{row['tokens_per_verification']:.2f}" for row in kinds[kind] if row["epoch"] > 2]
        for kind in ("history", "history, weighted by reward")
    )
    return f"no gain: tokens per verification {', '.join(weighted)} instead of {', '.join(counts)}"


def _skew_aware() -> str:
    (row,) = (row for row in kept("rollouts")["rows"] if row["name"] == "skew_aware")
    ratios = row["conventional"]["ratios"]
    return f"{statistics.median(ratios):.2f}x in conventional mode, recall {100 * row['recall']:.0f} %"


ROLLOUT_TABLES = {
    "rollouts": rollouts_table,
    "policies": policies_table,
    "drafts": drafts_table,
    "criteria": criteria_table,
}

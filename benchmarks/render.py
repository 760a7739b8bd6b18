"""Renders docs/performance.md and the plots in docs/images from benchmarks/results: ``python -m benchmarks.render``."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from benchmarks.gpu.tables import page as gpu_page
from benchmarks.results import DIRECTORY, read_results
from benchmarks.tables.race_table import race_facts
from benchmarks.tables.tables import ENVIRONMENTS

from inflight.run.record.plots import smoothed

DOCS = Path(__file__).parents[1] / "docs"
IMAGES = DOCS / "images"
COLOURS = {"pipeline": "#8250df", "conventional G=1": "#1f6feb"}


def plot_learning(runs: Sequence[dict[str, Any]]) -> None:
    """Reward against samples of pipeline and conventional G=1 on the same seeds, and the ESS of both."""
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    for run in runs:
        mode = run["mode"]
        if mode not in COLOURS:
            continue
        samples, times, rewards, ess = zip(*run["curve"], strict=True)
        known = [i for i, reward in enumerate(rewards) if reward is not None]
        curve = smoothed([rewards[i] for i in known])
        style = {"color": COLOURS[mode], "alpha": 0.8, "label": mode if run["seed"] == 0 else None}
        axes[0].plot([samples[i] for i in known], curve, **style)
        axes[1].plot([times[i] for i in known], curve, **style)
        axes[2].plot(range(1, len(ess) + 1), ess, **style)
    for axis, label in zip(axes, ("completions sampled", "seconds", "optimizer step"), strict=True):
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("mean reward (ten steps)")
    axes[1].set_ylabel("mean reward (ten steps)")
    axes[2].set_ylabel("effective sample size, raw ratios")
    axes[0].legend(loc="lower right")
    figure.savefig(IMAGES / "learning.png", dpi=120)
    plt.close(figure)


def plot_quickstart(runs: Sequence[dict[str, Any]], what: str, file: str) -> None:
    """Reward of the quickstart against samples and against time, one line for each kind of fleet or trainer."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for run in runs:
        samples, times, rewards = zip(*(row for row in run["curve"] if row[2] is not None), strict=True)
        for axis, x in zip(axes, (samples, times), strict=True):
            axis.plot(x, smoothed(rewards), label=run[what].replace("+", " + "), alpha=0.85)
    for axis, label in zip(axes, ("completions sampled", "seconds"), strict=True):
        axis.set_xlabel(label)
        axis.set_ylabel("mean reward (ten steps)")
        axis.grid(alpha=0.3)
    axes[0].legend(loc="lower right")
    figure.savefig(IMAGES / file, dpi=120)
    plt.close(figure)


def plot_policies(rows: dict[str, dict[str, Any]]) -> None:
    """Reward against samples under every policy, each in a panel of its own in front of the default."""
    names = [name for name in rows if name != "default"]
    columns = 4
    figure, axes = plt.subplots(
        -(-len(names) // columns), columns, figsize=(15, 2.6 * -(-len(names) // columns)), layout="constrained"
    )
    for axis, name in zip(axes.flat, names, strict=False):
        for run, style in (("default", {"color": "#8c959f"}), (name, {"color": "#8250df"})):
            samples, _, rewards = zip(*(row for row in rows[run]["curve"] if row[2] is not None), strict=True)
            axis.plot(samples, smoothed(rewards), label=run, **style)
        axis.set_title(name, fontsize=10)
        axis.grid(alpha=0.3)
        axis.set_ylim(0.4, 1.0)
    for axis in list(axes.flat)[len(names) :]:
        axis.axis("off")
    figure.supxlabel("completions sampled")
    figure.supylabel("mean reward (ten steps); grey: default")
    figure.savefig(IMAGES / "policies.png", dpi=110)
    plt.close(figure)


def plot_environments(names: Sequence[str]) -> None:
    """Mean reward of each step of the runs on environments."""
    num_rows, num_columns = 2, -(-len(names) // 2)
    figure, axes = plt.subplots(num_rows, num_columns, figsize=(3.2 * num_columns, 6), layout="constrained")
    for axis in axes.flat[len(names) :]:
        axis.set_visible(False)
    for axis, name in zip(axes.flat, names, strict=False):
        rewards = [reward for reward in read_results(f"environments-{name}")["rows"]["rewards"] if reward is not None]
        axis.plot(range(1, len(rewards) + 1), rewards, color="#8250df", alpha=0.3)
        axis.plot(range(1, len(rewards) + 1), smoothed(rewards), color="#8250df")
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("optimizer step")
        axis.grid(alpha=0.3)
    for axis in axes[:, 0]:
        axis.set_ylabel("mean reward")
    figure.savefig(IMAGES / "environments.png", dpi=110)
    plt.close(figure)


def engine_table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| model | lengths | tokens, longest | engine, tokens/s | `generate`, tokens/s | ratio: median (min to max) |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['model']} | {r['lengths']} | {r['num_tokens']:,}, {r['longest']} | {r['engine_tokens_per_s']:,.0f} | "
        f"{r['generate_tokens_per_s']:,.0f} | **{r['ratio_median']:.2f}** "
        f"({r['ratio_min']:.2f} to {r['ratio_max']:.2f}) |"
        for r in rows
    ]
    return "\n".join(lines)


def compiled_table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| model | requests | compiled, tokens per CPU s | eager | ratio: median (min to max) |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['model']} | {r['load']} | {r['compiled_tokens_per_cpu_s']:,.0f} | {r['eager_tokens_per_cpu_s']:,.0f} | "
        f"**{r['ratio_median']:.2f}** ({r['ratio_min']:.2f} to {r['ratio_max']:.2f}) |"
        for r in rows
    ]
    return "\n".join(lines)


def modes_table(result: dict[str, Any]) -> str:
    lines = [
        "| mode | trained tokens/s | pipeline ÷ this mode: median (min to max) | share of time in the trainer "
        "| paused | lag mean, max | mean ESS |",
        "|---|---|---|---|---|---|---|",
    ]
    modes = list(dict.fromkeys(run["mode"] for run in result["runs"]))
    for mode in modes:
        runs = [run for run in result["runs"] if run["mode"] == mode]
        mean = {
            key: statistics.fmean(run[key] for run in runs)
            for key in ("trained_tokens_per_s", "train_share", "paused_share", "lag_mean", "ess_mean")
        }
        ratio = result["ratios"].get(mode)
        text = "" if ratio is None else f"**{ratio['median']:.2f}** ({ratio['min']:.2f} to {ratio['max']:.2f})"
        lines.append(
            f"| {mode} | {mean['trained_tokens_per_s']:,.0f} | {text} | {100 * mean['train_share']:.0f} % | "
            f"{100 * mean['paused_share']:.2f} % | {mean['lag_mean']:.1f}, {max(run['lag_max'] for run in runs)} | "
            f"{mean['ess_mean']:.3f} |"
        )
    return "\n".join(lines)


def concurrency_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return tokens per CPU second by concurrency, and the embedded engine's relative to each contender's."""
    lines = [
        "| concurrent completions | embedded engine, tokens per CPU s | `generate` | engine ÷ `generate` | vLLM "
        "| engine ÷ vLLM |",
        "|---|---|---|---|---|---|",
    ]
    for num in sorted({row["concurrent"] for row in rows}):
        of = {row["contender"]: row for row in rows if row["concurrent"] == num}
        cells = [f"{statistics.median(of['embedded']['tokens_per_cpu_s']):.0f}"]
        for name in ("generate", "vllm"):
            ratios = of[name]["embedded_over_it"]
            cells.append(f"{statistics.median(of[name]['tokens_per_cpu_s']):.0f}")
            cells.append(f"**{statistics.median(ratios):.2f}** ({min(ratios):.2f} to {max(ratios):.2f})")
        lines.append(f"| {num} | {' | '.join(cells)} |")
    return "\n".join(lines)


def rounds_of(rows: Sequence[dict[str, Any]]) -> str:
    """Return how often everything was measured."""
    num_rounds = len(rows[0]["tokens_per_cpu_s"])
    return f"{num_rounds} rounds" if num_rounds > 1 else "one round"


def conditions(record: dict[str, Any]) -> str:
    machine, versions = record["machine"], record["versions"]
    packages = ", ".join(f"{name} {number}" for name, number in versions.items())
    return (
        f"{record['date']}, {machine['processor']}, {machine['cores']} cores, Python {machine['python']}, {packages}."
    )


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    engine, compiled, pipeline = (read_results(name) for name in ("engine", "compiled", "pipeline"))
    concurrency = read_results("concurrency")
    result = pipeline["rows"]
    plot_learning(result["runs"])
    plot_quickstart(read_results("engines")["rows"]["learning"], "engine", "engines.png")
    plot_quickstart(read_results("workers")["rows"]["learning"], "trainer", "trainers.png")
    plot_quickstart(read_results("losses")["rows"]["learning"], "preset", "presets.png")
    loras = read_results("lora")["rows"]
    plot_quickstart([{"trained": name, **row} for name, row in loras.items()], "trained", "lora.png")
    plot_environments(list(ENVIRONMENTS))
    plot_policies(read_results("policies")["rows"])
    compile_s = dict.fromkeys(row["compile_cpu_s"] for row in compiled["rows"])
    template = (Path(__file__).parent / "performance.template.md").read_text()
    page = (
        template.replace("{{engine_table}}", engine_table(engine["rows"]))
        .replace("{{engine_conditions}}", conditions(engine))
        .replace("{{concurrency_table}}", concurrency_table(concurrency["rows"]["measured"]))
        .replace("{{concurrency_rounds}}", rounds_of(concurrency["rows"]["measured"]))
        .replace("{{concurrency_conditions}}", conditions(concurrency))
        .replace("{{compiled_table}}", compiled_table(compiled["rows"]))
        .replace("{{compiled_conditions}}", conditions(compiled))
        .replace("{{compile_s}}", " and ".join(f"{s:.0f} s" for s in compile_s))
        .replace("{{modes_table}}", modes_table(result))
        .replace("{{pipeline_conditions}}", conditions(pipeline))
        .replace("{{steps}}", str(result["steps"]))
        .replace("{{seeds}}", str(len({run["seed"] for run in result["runs"]})))
        .replace("{{race_conditions}}", conditions(read_results("race")))
        .replace("{{gpu}}", gpu_page(read_results("gpu") if (DIRECTORY / "gpu.json").exists() else None))
    )
    for name, text in race_facts(read_results("race")["rows"]).items():
        page = page.replace(f"{{{{{name}}}}}", text)
    (DOCS / "performance.md").write_text(page)


if __name__ == "__main__":
    main()

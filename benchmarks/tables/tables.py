"""Tables of docs from certificates and benchmark results of the real engines and of the trainers."""

from __future__ import annotations

import json
import re
import statistics
import tomllib
from collections.abc import Callable
from typing import Any

from benchmarks.tables.backend_tables import backends_table
from benchmarks.tables.campaign_table import campaign_engines_table, campaign_table
from benchmarks.tables.doctor_table import doctor_table
from benchmarks.tables.kept import ROOT, kept, kept_rows, milliseconds
from benchmarks.tables.messages_table import messages_table
from benchmarks.tables.planner_tables import PLANNER_TABLES
from benchmarks.tables.reference_tables import REFERENCE_TABLES
from benchmarks.tables.replay_tables import REPLAY_TABLES
from benchmarks.tables.rollout_tables import ROLLOUT_TABLES
from benchmarks.tables.scale_tables import SCALE_TABLES
from benchmarks.tables.tinker_tables import TINKER_TABLES
from benchmarks.tables.watch_table import watch_table
from benchmarks.tables.weight_tables import WEIGHT_TABLES

from inflight.conformance import endpoint_checks
from inflight.losses import PRESETS
from inflight.observe.trace.schema import markdown as event_tables
from inflight.weights.receive.states import TRANSITIONS, UpdateEvent
from inflight.wire import EndpointState

CERTIFICATES = ROOT / "docs" / "certificates"


def certificates() -> list[dict[str, Any]]:
    """Return the kept certificates of engines, the newest release of each first."""
    return sorted(
        _certificates("endpoint"),
        key=lambda c: (c["implementation"], [-int(n) for n in c["implementation_version"].split(".") if n.isdigit()]),
    )


def transitions_table() -> str:
    """Return the state machine of an endpoint: one row for each event, one column for each state."""
    lines = [
        f"| event | what has happened | {' | '.join(state.name for state in EndpointState)} |",
        "|---|---|" + "---|" * len(EndpointState),
    ]
    for event in UpdateEvent:
        after = [TRANSITIONS.get((state, event)) for state in EndpointState]
        cells = " | ".join("" if state is None else f"→ {state.name}" for state in after)
        lines.append(f"| {event.name.lower()} | {event.value} | {cells} |")
    return "\n".join(lines)


def tested_table() -> str:
    """Return one row for each certificate."""
    lines = [
        "| engine | release | dtype | requirements that hold | unsupported | expected failures | duration | date |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for certificate in certificates():
        outcomes = [verdict["outcome"] for verdict in certificate["verdicts"]]
        counts = [outcomes.count(kind) for kind in ("passed", "skipped", "expected failure")]
        lines.append(
            f"| {certificate['implementation']} | {certificate['implementation_version']} | "
            f"{certificate['capabilities']['dtype']} | {counts[0]} | {counts[1]} | {counts[2]} | "
            f"{certificate['seconds']:.0f} s | {certificate['started_at'][:10]} |"
        )
    lines += [
        f"| {row['engine']} | {row['version']} | | refused: {row['reason']} | | | | {row['date']} |"
        for row in tomllib.loads((CERTIFICATES / "refused.toml").read_text())["refused"]
    ]
    return "\n".join(lines)


def certified_table() -> str:
    """Return one row for each engine and trainer: its newest release, or its largest number of ranks."""
    rows: dict[str, tuple[str, dict[str, Any]]] = {}
    for certificate in reversed(certificates()):
        rows[certificate["implementation"]] = (certificate["implementation_version"], certificate)
    for certificate in sorted(_certificates("worker"), key=lambda certificate: int(certificate["flags"]["ranks"])):
        versions, module = certificate["environment"], certificate["implementation"].rpartition(".")[0]
        name, release = {
            "inflight_fsdp.torchtitan": ("TorchTitan", versions["torchtitan"]),
            "inflight_fsdp.deepspeed": ("DeepSpeed", versions.get("deepspeed", "")),
            "inflight_fsdp.megatron": ("Megatron-Core", versions.get("megatron-core", "")),
        }.get(module, ("FSDP2", f"torch {versions['torch'].split('+')[0]}"))
        shared = shared_by_ranks(certificate)
        ranks = int(certificate["flags"]["ranks"])
        release += f", {ranks} rank{'s' if ranks > 1 else ''}"
        rows[f"{name}, {shared}" if shared else name] = (release, certificate)
    lines = [
        "| engine or trainer | release | requirements of the contract that hold | unsupported |",
        "|---|---|---|---|",
    ]
    for name, (release, certificate) in rows.items():
        outcomes = [verdict["outcome"] for verdict in certificate["verdicts"]]
        lines.append(f"| {name} | {release} | {outcomes.count('passed')} | {outcomes.count('skipped')} |")
    return "\n".join(lines)


_SHARING = ("shard_size", "zero_stage")


def shared_by_ranks(certificate: dict[str, Any]) -> str:
    """Return in words the options that say how ranks share a model."""
    flags = certificate["flags"]
    return ", ".join(f"{name} {flags[name]}" for name in flags if name.endswith("_parallel") or name in _SHARING)


def exceptions_table() -> str:
    """Return what was skipped or failed as expected in each certificate, with its reason."""
    requirements = {check.id: check.requirement for check in endpoint_checks()}
    lines = ["| engine | id | requirement | reason |", "|---|---|---|---|"]
    for certificate in certificates():
        name = f"{certificate['implementation']} {certificate['implementation_version']}"
        lines += [
            f"| {name} | {verdict['id']} | {requirements.get(verdict['id'], verdict['requirement'])} "
            f"| {_reason(verdict['message'])} |"
            for verdict in certificate["verdicts"]
            if verdict["outcome"] != "passed"
        ]
    return "\n".join(lines)


def _reason(message: str) -> str:
    """Return why a check was not made, in today's words and without what a server printed."""
    what = re.sub(r": ['\"].*|: \w*Error: .*", "", message, flags=re.DOTALL)
    return _one_line(what.replace("not declared", "not supported").replace("undeclared", "unsupported"))


def parity_table() -> str:
    """Return how far each engine is from each trainer with the same weights."""
    lines = [
        "| engine | trainer | dtype | tokens | k1 | k3 | ESS | largest difference | mean difference "
        "| growth of the mean | verdict |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in (row for rows in kept("parity")["rows"].values() for row in rows):
        measured = row["measured"]
        of = measured["same_weights"]
        verdict = "they agree" if row["agrees"] else "; ".join(finding["seen"] for finding in row["findings"])
        lines.append(
            f"| {row['engine']} {row['engine_version']} | {row['trainer']} | {measured['dtype']} | "
            f"{of['num_tokens']:,} | {of['k1']:.1e} | {of['k3']:.1e} | {of['ess']:.6f} | {of['largest']:.1e} | "
            f"{of['mean']:.1e} | {row['grown']:.1e} in {measured['num_updates']} updates | {verdict} |"
        )
    return "\n".join(lines)


def publish_table() -> str:
    """Return the five spans of a publish, in buckets and tensor by tensor."""
    lines = [
        "| engine | method | pause | gather | wire | load | first token | total | ratio (min to max) |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in kept_rows("publish"):
        for how, spans in row["spans"].items():
            times = [milliseconds(spans[f"{name}_s"]) for name in ("pause", "gather", "wire", "load", "first_token")]
            ratio = ""
            if how != "bucketed":
                ratio = f"**{row['ratio_median']:.2f}** ({row['ratio_min']:.2f} to {row['ratio_max']:.2f})"
            lines.append(
                f"| {row['engine']} {row['version']} | {how} | {' | '.join(times)} | "
                f"{milliseconds(spans['total_s'])} | {ratio} |"
            )
    return "\n".join(lines)


def learning_table() -> str:
    """Return how the quickstart went on each fleet."""
    lines = [
        "| servers | mean reward, first ten steps | last ten | lag mean, max | mean ESS | seconds |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['engine'].replace('+', ' + ')} | {row['reward_first']:.3f} | {row['reward_last']:.3f} | "
        f"{row['lag_mean']:.1f}, {row['lag_max']} | {row['ess_mean']:.3f} | {row['seconds']:.0f} |"
        for row in kept_rows("learning")
    ]
    return "\n".join(lines)


def trainers_table() -> str:
    """Return one row for each certificate of a worker."""
    lines = [
        "| trainer | ranks | parallelism | requirements that hold | skipped: needs several ranks | duration | date |",
        "|---|---|---|---|---|---|---|",
    ]
    found = _certificates("worker")
    order = [(c["implementation"], int(c["flags"]["ranks"]), shared_by_ranks(c)) for c in found]
    for _, certificate in sorted(zip(order, found, strict=True), key=lambda pair: pair[0]):
        outcomes = [verdict["outcome"] for verdict in certificate["verdicts"]]
        name, shared = certificate["implementation"].rpartition(".")[2], shared_by_ranks(certificate)
        lines.append(
            f"| `{name}` | {certificate['flags']['ranks']} | {shared} | {outcomes.count('passed')} | "
            f"{outcomes.count('skipped')} | {certificate['seconds']:.0f} s | {certificate['started_at'][:10]} |"
        )
    return "\n".join(lines)


def layouts_table() -> str:
    """Return how far each layout of ranks is from one rank."""
    lines = [
        "| ranks | layout | model | logprobs | gradients | weights, two steps | weights, resumed |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in kept("layouts")["rows"]:
        found = row["differences"]
        cells = [
            f"{found[what]['absolute']:.1e}, {found[what]['relative']:.1e}"
            for what in ("logprobs", "gradients", "weights", "weights resumed")
        ]
        lines.append(f"| {row['ranks']} | {row['layout']} | {row['model']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def shared_prefixes_table() -> str:
    """Return how much faster a step is whose prefixes are computed once."""
    lines = [
        "| dtype | prompt, completion | group | tokens computed | step, separate | shared | speed-up | memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in kept("shared_prefixes")["rows"]:
        times, tokens, memory = row["step_s"], row["computed_tokens"], row["kept_bytes"]
        least, most = row["speedups"]
        lines.append(
            f"| {row['dtype']} | {row['num_prompt_tokens']}, {row['num_tokens']} | {row['group_size']} | "
            f"{tokens['separate']:,} → {tokens['shared']:,} | {times['separate']:.1f} s | {times['shared']:.1f} s | "
            f"{row['speedup']:.2f} ({least:.2f} to {most:.2f}) | "
            f"{memory['separate'] / 1e9:.2f} → {memory['shared'] / 1e9:.2f} GB |"
        )
    return "\n".join(lines)


def curves_table() -> str:
    """Return how the runs of each variant on the real model went: the mean over seeds, the smallest and the largest."""
    rows = kept("curves")["rows"]
    lines = [
        "| variant | seeds | sampled reward, first three steps | last three | greedy reward before | after | seconds | "
        "completions from two or more versions |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(row["variant"] for row in rows):
        runs = [row for row in rows if row["variant"] == name]
        rewards = [[reward for _, _, reward in run["curve"] if reward is not None] for run in runs]
        before, after = (
            [
                statistics.fmean(it["reward"] for it in run["evaluations"] if (it["version"] == 0) is is_first)
                for run in runs
            ]
            for is_first in (True, False)
        )
        columns = [
            [statistics.fmean(values[:3]) for values in rewards],
            [statistics.fmean(values[-3:]) for values in rewards],
            before,
            after,
        ]
        cells = [f"{statistics.fmean(values):.2f} ({min(values):.2f} to {max(values):.2f})" for values in columns]
        times = [run["seconds"] for run in runs]
        shares = [100 * run["share_with_two_or_more_versions"] for run in runs]
        lines.append(
            f"| {name} | {len(runs)} | {' | '.join(cells)} | {min(times):.0f} to {max(times):.0f} | "
            f"{min(shares):.0f} to {max(shares):.0f} % |"
        )
    return "\n".join(lines)


def threads_table() -> str:
    """Return the seconds of a training step by threads, alone and beside another process."""
    rows = {(row["threads"], row["waits"], row["busy"]): row["step_s"] for row in kept("threads")["rows"]}
    lines = ["| threads | `OMP_WAIT_POLICY` | alone | next to a busy process |", "|---|---|---|---|"]
    for threads, waits in dict.fromkeys((threads, waits) for threads, waits, _ in rows):
        cells = [f"{min(times):.1f} to {max(times):.1f} s" for times in (rows[threads, waits, num] for num in (0, 1))]
        name = waits if waits == "default" else f"`{waits.upper()}`"
        lines.append(f"| {threads} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def trainer_learning_table() -> str:
    """Return how the quickstart went with each trainer."""
    lines = ["| trainer | mean reward, first ten steps | last ten | seconds |", "|---|---|---|---|"]
    lines += [
        f"| {row['trainer']} | {row['reward_first']:.3f} | {row['reward_last']:.3f} | {row['seconds']:.0f} |"
        for row in kept_rows("learning", "workers")
    ]
    return "\n".join(lines)


def lora_table() -> str:
    """Return how the quickstart went with all weights trained and with LoRAs, and what each publish took."""
    lines = [
        "| trained weights | learning rate | mean reward, first ten steps | last ten | bytes of a publish | "
        "a publish took |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {row['learning_rate']:g} | {row['reward_first']:.3f} | {row['reward_last']:.3f} | "
        f"{row['publish_bytes']:,} | {milliseconds(row['publish_s'])} |"
        for name, row in kept("lora")["rows"].items()
    ]
    return "\n".join(lines)


def trainer_memory_table() -> str:
    """Return the peaks of loading and gathering, per rank."""
    row: Any = kept_rows("memory", "workers")
    lines = [
        "| operation | method | peak of rank 0 | peak of rank 1 | highest peak relative to inflight's |",
        "|---|---|---|---|---|",
    ]
    for stage in ("loading", "gathering"):
        for way in ("inflight", "full state dict"):
            peaks = [f"{rank[stage]['peak_bytes'] / 2**20:,.0f} MiB" for rank in row[way]]
            ratio = "" if way == "inflight" else f"**{row[f'{stage}_ratio']:.2f}**"
            lines.append(f"| {stage} | {way} | {' | '.join(peaks)} | {ratio} |")
    return "\n".join(lines)


def trainer_speed_table() -> str:
    """Return tokens per second of forward, backward and step."""
    lines = [
        "| model | method | tokens/s per rank | ratio to hand-written (quartiles) | ratio to accelerate (quartiles) |",
        "|---|---|---|---|---|",
    ]
    for row in kept_rows("speed", "workers"):
        for way, speed in row["tokens_per_s"].items():
            cells = []
            for other in ("hand-written", "accelerate"):
                ratio = row["ratios"].get(f"{way} / {other}")
                cells.append(
                    ""
                    if ratio is None
                    else f"**{ratio['median']:.2f}** ({' to '.join(f'{q:.2f}' for q in ratio['quartiles'])})"
                )
            lines.append(f"| {row['num_parameters'] / 1e6:.0f} M | {way} | {speed:,.0f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def router_replay_table() -> str:
    """Return the mismatch of engine and trainer with the sampled experts and without."""
    lines = [
        "| dtype | router replay | k3, mean over the steps | largest k3 of a step | largest log ratio of a token |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {run['dtype']} | {'yes' if run['replay'] else 'no'} | {run['mismatch_k3']:.1e} | "
        f"{max(run['mismatch_k3_of_steps']):.1e} | {run['max_abs_log_ratio']:.2g} |"
        for run in kept("router_replay")["rows"]["runs"]
    ]
    return "\n".join(lines)


def presets_table() -> str:
    """Return one row for each loss preset."""
    lines = ["| preset | loss of a token | advantages | denominator | source |", "|---|---|---|---|---|"]
    lines += [
        f"| `{it.name}` | {it.formula} | {it.advantages} | {it.loss.aggregation.kind} | {it.source} |"
        for it in PRESETS.values()
    ]
    return "\n".join(lines)


def head_table() -> str:
    """Return time and memory of each head as shares of the naive one."""
    shapes: Any = kept_rows("head", "losses")
    titles = [f"{s['num_targets']:,} x {s['hidden_size']:,} x {s['vocab_size']:,}" for s in shapes]
    lines = [
        f"| head | {' | '.join(titles)} |",
        f"|---|{'---|' * len(titles)}",
    ]
    for name in shapes[0]["heads"]:
        cells = []
        for shape in shapes:
            row = shape["heads"][name]
            ratio = row["time_ratio"]
            cells.append(
                f"**{ratio['median']:.2f}** ({ratio['min']:.2f} to {ratio['max']:.2f}), "
                f"{row['transient_bytes'] / 2**20:,.0f} MiB ({_share(row['memory_ratio'])})"
            )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def head_tile_table() -> str:
    """Return the memory of other heads and of inflight's with the same tiles."""
    shapes: Any = kept_rows("head", "losses")
    lines = [
        "| head | targets x hidden x vocabulary | memory of this head | inflight's at the same tile size | ratio |",
        "|---|---|---|---|---|",
    ]
    for shape in shapes:
        for name, row in shape["heads"].items():
            if "inflight_at_its_tile_bytes" in row:
                own = row["inflight_at_its_tile_bytes"]
                lines.append(
                    f"| {name} | {shape['num_targets']:,} x {shape['hidden_size']:,} x {shape['vocab_size']:,} | "
                    f"{row['transient_bytes'] / 2**20:,.0f} MiB | {own / 2**20:,.0f} MiB | "
                    f"**{own / row['transient_bytes']:.2f}** |"
                )
    return "\n".join(lines)


def preset_learning_table() -> str:
    """Return how the quickstart went with each of some presets."""
    lines = ["| preset | mean reward, first ten steps | last ten | mean ESS | seconds |", "|---|---|---|---|---|"]
    lines += [
        f"| `{row['preset']}` | {row['reward_first']:.3f} | {row['reward_last']:.3f} | {row['ess_mean']:.3f} | "
        f"{row['seconds']:.0f} |"
        for row in kept_rows("learning", "losses")
    ]
    return "\n".join(lines)


def distillation_table() -> str:
    """Return what students learned from a teacher, beside learning from rewards."""
    lines = ["| preset | teacher | steps | seconds | first reward | last reward | first KL | last KL |"]
    lines.append("|" + "---|" * 8)
    rows = kept("distillation")["rows"]
    for preset, teacher in dict.fromkeys((row["preset"], row["teacher"]) for row in rows):
        of_kind = [row for row in rows if (row["preset"], row["teacher"]) == (preset, teacher)]
        cells = [f"`{preset}`", teacher, f"{of_kind[0]['steps']}"]
        for name, digits in (("seconds", 0), ("reward_first", 2), ("reward_last", 2), ("kl_first", 3), ("kl_last", 3)):
            values = [row[name] for row in of_kind if row[name] is not None]
            spread = f"{min(values):.{digits}f} to {max(values):.{digits}f}" if values else ""
            cells.append(f"{statistics.fmean(values):.{digits}f} ({spread})" if values else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def structure_table() -> str:
    """Return the size of the source and what passes through it, before and after its packages were redrawn."""
    rows = kept("structure")["rows"]

    def count(name: str) -> Callable[[dict[str, Any]], object]:
        return lambda row: len(row[name])

    figures: tuple[tuple[str, Callable[[dict[str, Any]], object]], ...] = (
        ("lines under src", lambda row: f"{row['lines']:,}"),
        ("modules", lambda row: row["modules"]),
        ("packages and modules at the top of `inflight`", lambda row: row["top"]),
        ("packages that import each other", count("mutual")),
        ("modules over 400 lines", count("over_400")),
        ("modules over 450 lines", count("over_450")),
        (
            "attributes of the largest class",
            lambda row: f"{row['largest_class_attributes']} (`{row['largest_class'].split(': ')[1]}`)",
        ),
        ("classes with more than 18 attributes", count("classes_over_18")),
        ("files that a publish passes through", count("publish_files")),
        ("files that a logprob passes through", count("logprob_files")),
        ("files that `servers.max_concurrent` passes through", count("max_concurrent_files")),
        (
            "seconds of `make test`",
            lambda row: "not measured" if row["test_seconds"] is None else f"{row['test_seconds']:,.0f}",
        ),
    )
    if all(rows[state]["test_seconds"] is None for state in ("before", "after")):
        figures = figures[:-1]
    lines = [f"| | before ({rows['commit']}) | after |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {what} | {of(rows['before'])} | {of(rows['after'])} |" for what, of in figures)])


_BESIDE = {
    "reward_first": "mean reward, first ten steps",
    "reward_last": "mean reward, last ten steps",
    "trained_tokens_per_s": "trained tokens/s",
    "paused_share": "share of time for which sampling was paused",
    "lag_mean": "mean lag",
    "ess_mean": "mean ESS",
}


def beside_table() -> str:
    """Return the quickstart and the engine of two commits, which took turns and then ran at the same time."""
    ways = {"alternating": kept("beside")["rows"], "at the same time": kept("beside_together")["rows"]}
    heads = [
        f"{rows['commits'][label]}, {way}, {rows['rounds']} rounds"
        for way, rows in ways.items()
        for label in ("before", "after")
    ]
    lines = [f"| median (extremes) | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    forms = {"trained_tokens_per_s": ",.0f", "paused_share": ".2%", "lag_mean": ".2f"}
    for name in ways["alternating"]["figures"]:
        form = forms.get(name, ".2f" if name.startswith("engine") else ".3f")
        sides = [rows["figures"][name][label] for rows in ways.values() for label in ("before", "after")]
        cells = [f"{side['median']:{form}} ({side['min']:{form}} to {side['max']:{form}})" for side in sides]
        what = _BESIDE.get(name, name.replace("engine over generate", "engine ÷ `generate`"))
        lines.append(f"| {what} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _share(ratio: float) -> str:
    return f"1/{1 / ratio:,.0f}" if ratio < 0.5 else f"{ratio:.2f}"


ENVIRONMENTS = {
    "tool_task": "the tool task of `examples/tool_task.py`",
    "tool_agent": "the same, played by a separate program behind the proxy, through `/v1/chat/completions`",
    "tool_agent_messages": "the same, through `/v1/messages`",
    "tool_agent_responses": "the same, through `/v1/responses`",
    "tictactoe": "TextArena's `TicTacToe-v0` against an opponent that moves at random",
    "guess_number": "TextArena's `GuessTheNumber-v0`, six guesses",
    "retry": "reasoning-gym's `spell_backward`, asked again after a wrong answer",
    "harbor": "the five task folders of `examples/harbor`, with a shell under bubblewrap",
    "pictures": "the colour of squares in pictures, `examples/pictures.py`",
}
"""Results of benchmarks/environments.py, and what they are of."""


def environments_table() -> str:
    """Return how tiny models learned environments."""
    lines = [
        "| `environments.py` | environment | reward, first ten steps | last ten | steps | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for name, what in ENVIRONMENTS.items():
        row = kept(f"environments-{name}")["rows"]
        first, last = (
            statistics.fmean(reward for reward in rewards if reward is not None)  # a step may finish no group
            for rewards in (row["rewards"][:10], row["rewards"][-10:])
        )
        lines.append(f"| `{name}` | {what} | {first:.3f} | {last:.3f} | {len(row['rewards'])} | {row['run_s']:.0f} |")
    return "\n".join(lines)


def proxy_table() -> str:
    """Return what the recording proxy costs."""
    rows = kept("proxy-embedded")["rows"]
    return "\n".join(
        [
            "| engine | episodes, tokens per turn | CPU ms per call | share of the engine's CPU time | added time |",
            "|---|---|---|---|---|",
            f"| embedded | {rows['num_episodes']}, {rows['num_tokens']} | {rows['proxy_cpu_ms_per_call']:.1f} | "
            f"{rows['proxy_cpu_share']:.0%} | {rows['added_wall_share']:z.1%} |",
        ]
    )


TABLES = {
    "proxy": proxy_table,
    "events": event_tables,
    "environments": environments_table,
    **REFERENCE_TABLES,
    **WEIGHT_TABLES,
    **ROLLOUT_TABLES,
    **PLANNER_TABLES,
    **SCALE_TABLES,
    **REPLAY_TABLES,
    **TINKER_TABLES,
    "campaign": campaign_table,
    "campaign_engines": campaign_engines_table,
    "doctor": doctor_table,
    "presets": presets_table,
    "messages": messages_table,
    "transitions": transitions_table,
    "head": head_table,
    "head_tiles": head_tile_table,
    "preset_learning": preset_learning_table,
    "distillation": distillation_table,
    "trainers": trainers_table,
    "layouts": layouts_table,
    "shared_prefixes": shared_prefixes_table,
    "threads": threads_table,
    "curves": curves_table,
    "lora": lora_table,
    "router_replay": router_replay_table,
    "trainer_learning": trainer_learning_table,
    "trainer_memory": trainer_memory_table,
    "trainer_speed": trainer_speed_table,
    "learning": learning_table,
    "backends": backends_table,
    "certified": certified_table,
    "tested": tested_table,
    "exceptions": exceptions_table,
    "parity": parity_table,
    "publish": publish_table,
    "structure": structure_table,
    "beside": beside_table,
    "watch": watch_table,
}


def _certificates(kind: str) -> list[dict[str, Any]]:
    found = [json.loads(file.read_text()) for file in CERTIFICATES.glob("*.json")]
    return [certificate for certificate in found if certificate["kind"] == kind]


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")

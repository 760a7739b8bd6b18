"""Tables of docs/evidence-weights.md: how weights move, what that costs, and what holds under faults."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

from benchmarks.sharded import LINK_MBIT
from benchmarks.tables.kept import kept, kept_rows, milliseconds

from inflight.planning.plan import LinksSection


def weights_spans_table() -> str:
    """Return the spans of each transport, and the machine's own limit."""
    lines = [
        "| transport | weights | sent | gather | wire | pause | load | first token | total | GB/s | limit | share | "
        "memory |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in (*kept_rows("table", "weights"), *kept_rows("real", "weights")):
        spans = {name: milliseconds(spread["median"]) for name, spread in row["spans"].items()}
        first = milliseconds(row["busy"].get("first_token", {}).get("median"))
        lines.append(
            f"| {row['transport'].replace('+', ' + ')} | {row['size_bytes'] / 1e6:,.0f} MB "
            f"| {row['sent_bytes'] / 1e6:,.1f} MB "
            f"| {spans['gather']} | {spans['wire']} | {spans['pause']} | {spans['load']} | {first} | {spans['total']} "
            f"| {row['gb_per_s']:.2f} | {row['limit']}, {milliseconds(row['limit_s']['median'])} "
            f"| {100 * row['share_of_limit']:.0f} % | {row['grown_bytes'] / 1e6:,.0f} MB |"
        )
    return "\n".join(lines)


def weights_targets_table() -> str:
    """Return what was aimed at and what was measured."""
    largest = {
        row["transport"]: row for row in kept_rows("table", "weights")
    }  # the last one of each transport is the largest
    gloo, shm, delta = largest["gloo"], largest["shm"], largest["gloo+delta"]
    small: Any = kept_rows("small", "weights")
    tokens: Any = kept_rows("tokens", "weights")
    pause, copy = shm["spans"]["paused"]["median"], shm["copy_s"]["median"]
    lines = ["| what | target | measured |", "|---|---|---|"]
    lines += [
        f"| {what} | {target} | {measured} |"
        for what, target, measured in (
            (
                "gloo, 1 GB: time of one bare broadcast / time of the publish",
                "0.9 or more",
                f"**{gloo['share_of_limit']:.2f}**; relative to the transfer alone "
                f"{gloo['limit_s']['median'] / gloo['spans']['wire']['median']:.2f}",
            ),
            (
                "1,000 tensors of 16 KB: time if sent one by one / time if packed",
                "3 or more",
                f"**{small['ratio_median']:.1f}** ({small['ratio_min']:.1f} to {small['ratio_max']:.1f})",
            ),
            (
                "shared memory, 1 GB: pause / one copy of the bytes",
                "1.3 or less",
                f"**{pause / copy:.2f}** ({milliseconds(pause)} and {milliseconds(copy)})",
            ),
            (
                "delta at 2 % changed, gloo, 1 GB: bytes sent / all bytes",
                "1/10 or less",
                f"**1/{delta['size_bytes'] / delta['sent_bytes']:.0f}**",
            ),
            (
                "the same delta: its time / time of the full publish",
                "below 1",
                f"**{delta['spans']['total']['median'] / gloo['spans']['total']['median']:.2f}**",
            ),
            (
                f"tokens in {tokens['interval_s']:.0f} s with one update of 1 GB over shm / tokens without",
                "95 % or more",
                f"**{100 * tokens['kept_median']:.0f} %** ({100 * tokens['kept_min']:.0f} to "
                f"{100 * tokens['kept_max']:.0f})",
            ),
        )
    ]
    return "\n".join(lines)


def pauses_table() -> str:
    """Return how long updates paused the embedded engine when it copied weights, and now that it exchanges them."""
    lines = [
        "| transport | weights | pause, idle server: before | now | pause while sampling: before | now | one copy |",
        "|---|---|---|---|---|---|---|",
    ]

    def cell(spread: Any) -> str:
        return f"{1000 * spread['median']:.1f} ms"

    for row in kept("pauses")["rows"]["rows"]:
        before, after = row["before"], row["after"]
        lines.append(
            f"| {row['transport'].replace('+', ' + ')} | {row['size_bytes'] / 1e6:,.0f} MB "
            f"| {cell(before['idle']['paused'])} | {cell(after['idle']['paused'])} "
            f"| {cell(before['busy']['paused'])} | {cell(after['busy']['paused'])} | {cell(row['copy_s'])} |"
        )
    return "\n".join(lines)


def vllm_pauses_table() -> str:
    """Return what an update's pause of vLLM consists of, before and after the commit became one call."""
    sides = kept("vllm_pauses")["rows"]["sides"]
    names = {
        "paused": "total: from the last step with the old weights to the first with the new ones",
        "answer to the pause": "until the response of `/pause`, which sleeps for 20 ms",
        "until the load": "until the load begins",
        "load": "loading the weights",
        "until the label": "until the version's label is set",
        "until the resume": "until the engine is resumed",
        "until the next step": "until the next step begins",
        "reported paused_s": "`paused_s`, as reported by the endpoint",
    }

    def cell(spread: Any) -> str:
        return "" if spread is None else f"{1000 * spread['median']:.1f} ms"

    lines = ["| span | before | now |", "|---|---|---|"]
    lines += [
        f"| {text} | {cell(sides['before'].get(name))} | {cell(sides['after'].get(name))} |"
        for name, text in names.items()
        if name in sides["before"] or name in sides["after"]
    ]
    return "\n".join(lines)


def weights_engines_table() -> str:
    """Return how long the real engines take for new weights, by our publish and by their own ways."""
    lines = [
        "| engine | requests | method | time until the weights are served | longest pause of sampling |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['engine']} | {row['num_requests']} | {row['how']} | "
        f"{milliseconds(row['median_s'])} ({milliseconds(min(row['seconds']))} to "
        f"{milliseconds(max(row['seconds']))}) | {milliseconds(row['longest_pause_s'])} |"
        for row in kept_rows("engines", "weights")
    ]
    return "\n".join(lines)


def weights_repeat_table() -> str:
    """Return what both processes hold early and late in a long row of updates."""
    lines = [
        "| transport | updates | process | memory | file handles | mappings | threads | files in shared memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in kept_rows("repeat", "weights"):
        for process in ("trainer", "server"):
            early, late = row["early"][process], row["late"][process]
            cells = [
                f"{early[name]}{unit} to {late[name]}{unit}"
                for name, unit in (
                    ("rss_mib", " MiB"),
                    ("file_handles", ""),
                    ("mappings", ""),
                    ("threads", ""),
                    ("shared_memory_files", ""),
                )
            ]
            lines.append(f"| {row['transport']} | {row['num_updates']:,} | {process} | {' | '.join(cells)} |")
    return "\n".join(lines)


def chaos_table(name: str = "chaos") -> str:
    """Return what came of a campaign of faults, by transport."""
    figures = kept(name)
    outcomes = sorted({it for counts in figures["outcomes"].values() for it in counts} - {"returned"})
    lines = [
        f"| transport | schedules | injected faults | publishes that returned | "
        f"{' | '.join(f'that raised `{it}`' for it in outcomes)} |",
        f"|---|---|---|---|{'---|' * len(outcomes)}",
    ]
    for transport, num_schedules in figures["schedules"].items():
        num_faults = sum(num for where, num in figures["injected"].items() if where.split()[0] == transport)
        counts = [f"{figures['outcomes'][transport].get(outcome, 0):,}" for outcome in ("returned", *outcomes)]
        lines.append(f"| {transport} | {num_schedules:,} | {num_faults:,} | {' | '.join(counts)} |")
    return "\n".join(lines) + (
        f"\n\n{figures['num_schedules']:,} schedules, {figures['num_publishes']:,} publishes and "
        f"{figures['num_tokens']:,} tokens in {figures['wall_s'] / 60:.0f} minutes: "
        f"**{len(figures['failed'])} failed**. {len(figures['never_injected'])} combinations of a step and a fault "
        f"were never injected; the slowest publish took {figures['slowest_publish_s']:.1f} s."
    )


def fleets_checked_table() -> str:
    """Return what `inflight check fleet` found over the servers of each engine."""
    lines = [
        "| engine | senders | schedules | injected faults | publishes | tokens | slowest publish | minutes | failed |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for figures in map(kept, ("chaos-vllm", "chaos-sglang", "chaos-vllm-senders", "chaos-sglang-senders")):
        lines.append(
            f"| {figures['engine']} {figures['engine_version']} | {figures.get('num_senders', 1)} | "
            f"{figures['num_schedules']:,} | "
            f"{figures['num_faults']:,} | {figures['num_publishes']:,} | {figures['num_tokens']:,} | "
            f"{figures['slowest_publish_s']:.1f} s | {figures['wall_s'] / 60:.0f} | **{len(figures['failed'])}** |"
        )
    return "\n".join(lines)


def fleet_table() -> str:
    """Return how the quickstart went on an undisturbed fleet, and on one whose servers came and went."""
    lines = [
        "| fleet | mean reward, first ten steps | last ten | steps | groups trained | restarted | lost | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {row['reward_first']:.3f} | {row['reward_last']:.3f} | {row['steps']} | {row['groups_trained']} | "
        f"{row['groups_reissued']} | {row['groups_lost']} | {row['seconds']:.0f} |"
        for name, row in kept("fleet")["rows"].items()
    ]
    return "\n".join(lines)


def sharded_table() -> str:
    """Return gathered and sharded publishes between hosts with limited links."""
    lines = [
        "| transport | trainer hosts M | servers | link of a server | gathered | sharded | ratio | planned | "
        "CPU time of the trainer | CPU time of each server | memory | sent |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in kept_rows("rows", "sharded"):
        if row["overlaps"]:
            continue
        gathered, sharded = (_medians(row, mode) for mode in ("gathered", "sharded"))
        planned = "" if row["delta"] else f"{planned_s(row):.2f} s"
        what = f", delta of {row['changed_share']:.0%}" if row["delta"] else ""
        growth = [row["rank_0_growth_bytes"][mode] / 1e6 for mode in ("gathered", "sharded")]
        gigabytes = row["size_bytes"] / 1e9
        cpu = [it["trainer_cpu_s"] / gigabytes for it in (gathered, sharded)]
        of_server = [it["server_cpu_s"] / gigabytes / row["num_servers"] for it in (gathered, sharded)]
        lines.append(
            f"| {row['transport']}{what} | {row['num_ranks']} | {row['num_servers']} | {row['server_mbit']} Mbit/s "
            f"| {gathered['wall_s']:.2f} s | {sharded['wall_s']:.2f} s "
            f"| **{gathered['wall_s'] / sharded['wall_s']:.2f}** | {planned} "
            f"| {cpu[0]:.1f} and {cpu[1]:.1f} s/GB | {of_server[0]:.1f} and {of_server[1]:.1f} s/GB "
            f"| {growth[0]:.0f} and {growth[1]:.0f} MB "
            f"| {gathered['sent_bytes'] / 1e6:.1f} and {sharded['sent_bytes'] / 1e6:.1f} MB |"
        )
    return "\n".join(lines)


def sharded_overlap_table() -> str:
    """Return publishes before and during forwards."""
    lines = ["| publish | time of the publish and the forward passes |", "|---|---|"]
    for row in kept_rows("rows", "sharded"):
        if row["overlaps"]:
            lines += [f"| {mode} | {_medians(row, mode)['wall_s']:.2f} s |" for mode in row["rounds"]]
    return "\n".join(lines)


def planned_s(row: dict[str, Any]) -> float:
    """Return what the planner computes for the sharded publish of a case."""
    links = LinksSection(
        weights_gb=row["size_bytes"] / 1e9,
        sender_gbit_per_s=LINK_MBIT / 1000,
        endpoint_gbit_per_s=row["server_mbit"] / 1000,
        senders=row["num_ranks"],
        forwarded=row["transport"] == "gloo",
    )
    return links.links().transfer_s(row["num_servers"])


def _medians(row: dict[str, Any], mode: str) -> dict[str, float]:
    rounds = row["rounds"][mode]
    return {key: statistics.median(it[key] for it in rounds) for key in rounds[0]}


WEIGHT_TABLES = {
    "weights_spans": weights_spans_table,
    "weights_targets": weights_targets_table,
    "pauses": pauses_table,
    "vllm_pauses": vllm_pauses_table,
    "weights_engines": weights_engines_table,
    "weights_repeat": weights_repeat_table,
    "sharded": sharded_table,
    "sharded_overlap": sharded_overlap_table,
    "chaos": chaos_table,
    "chaos_of_two_senders": partial(chaos_table, "chaos-senders"),
    "fleets_checked": fleets_checked_table,
    "fleet": fleet_table,
}

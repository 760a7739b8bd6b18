"""The command ``inflight``: parses, calls, prints."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from inflight import __version__
from inflight.commands.bench import add_parser as add_bench
from inflight.commands.bench import bytes_of
from inflight.commands.check import add_parser as add_check
from inflight.commands.pipelinerl import add_parser as add_dialect
from inflight.commands.plan import add_parser as add_plan
from inflight.commands.proxy import add_parser as add_proxy
from inflight.commands.relay import add_parser as add_relay
from inflight.commands.replay import add_parser as add_replay
from inflight.commands.trace import add_parser as add_trace
from inflight.commands.watch import add_parser as add_watch
from inflight.contracts import Environment, InferenceEndpoint, Task
from inflight.errors import ConfigError, InflightError
from inflight.http.tokens import TOKEN_VARIABLE, read_token
from inflight.launchers.launcher import ADDRESS_VARIABLE

_Follow = Callable[[InferenceEndpoint], Awaitable[None]]
"""Loads new versions from a store into an endpoint."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0 done, 1 failed with a message, 2 wrong usage, 130 interrupted."""
    arguments, rest = _parser().parse_known_args(argv)
    if rest and arguments.command not in ("train", "launch"):
        _parser().error(f"unrecognized arguments: {' '.join(rest)}")
    _quiet_transformers()
    try:
        return int(arguments.call(arguments, rest))
    except InflightError as error:
        print(f"inflight: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="inflight", description="In-flight weight updates for reinforcement learning."
    )
    parser.add_argument("--version", action="version", version=f"inflight {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    _add_serve(commands)

    tiny = commands.add_parser("tiny-model", help="create a byte-level model and warm-start it on a task")
    tiny.add_argument("output", type=Path, metavar="OUTPUT_DIR")
    tiny.add_argument(
        "--task",
        default="spell_backward",
        help="reasoning-gym dataset, or a task as in run.toml (default: %(default)s)",
    )
    tiny.add_argument("--steps", type=int, help="imitation steps (default: 1400, with --images 100)")
    tiny.add_argument(
        "--batch-size", type=int, default=16, help="largest number of demonstrations per step (default: %(default)s)"
    )
    tiny.add_argument(
        "--wrong-fraction",
        type=float,
        help="share of deliberately wrong demonstrations, in the last part (default: 0.6) or, with --images, in all "
        "(default: 1, which teaches the form of the answers only)",
    )
    tiny.add_argument("--style", choices=("answer", "grown"), default="grown", help="form of the demonstrations")
    tiny.add_argument("--family", choices=("llama", "qwen2", "qwen3", "qwen3_moe"), default="llama")
    tiny.add_argument("--hidden-size", type=int, default=96)
    tiny.add_argument("--layers", type=int, default=2)
    tiny.add_argument("--heads", type=int, default=3)
    tiny.add_argument(
        "--max-model-len", type=int, help="context in tokens (default: 512, or more if the task needs it)"
    )
    tiny.add_argument(
        "--images",
        action="store_true",
        help="make a LLaVA model, which takes images, and warm-start it on the pictures of a task or environment",
    )
    tiny.add_argument("--seed", type=int, default=0)
    tiny.set_defaults(call=_tiny_model)

    train = commands.add_parser(
        "train",
        help="run reinforcement learning from a TOML file",
        epilog="Every field can be overridden: --train.learning_rate 1e-4, --run.mode conventional, ...",
    )
    train.add_argument("config", type=Path, metavar="RUN.toml")
    train.add_argument("--resume", action="store_true", help="continue from the last checkpoint of the run directory")
    train.add_argument(
        "--launcher", metavar="NAME", help="what starts servers and trainers, as run.launcher: local or ray"
    )
    train.add_argument("--resume-if-begun", action="store_true", help="the same if there is one; otherwise begin")
    train.add_argument(
        "--dry-run",
        action="store_true",
        help="print processes, GPUs, memory and updates, and start nothing; exit with 2 if the run cannot work",
    )
    train.add_argument("--json", action="store_true", help="print the dry run as JSON")
    train.add_argument(
        "--devices",
        metavar="NxMEMORY",
        help="GPUs of the dry run, such as 8x80GiB (default: this machine's)",
    )
    train.set_defaults(call=_train)

    launch = commands.add_parser(
        "launch",
        help="print a run as a job of Slurm or Kubernetes",
        epilog="Every field can be overridden, as for inflight train.",
    )
    launch.add_argument("config", type=Path, metavar="RUN.toml", help="as the processes of the job find it")
    launch.add_argument("--emit", choices=("sbatch", "jobset"), required=True)
    launch.add_argument(
        "--option", action="append", default=[], metavar="=--KEY=VALUE", help="an option for every part of a batch job"
    )
    launch.add_argument("--image", help="container image of a JobSet")
    launch.add_argument(
        "--volume", metavar="CLAIM:PATH", help="volume claim of a JobSet, and where all processes mount it"
    )
    launch.set_defaults(call=_launch)

    policies = commands.add_parser("policies", help="list the schedulers, staleness policies and composers of a run")
    policies.add_argument("name", nargs="?", help="describe this one")
    policies.set_defaults(call=_policies)
    losses = commands.add_parser("losses", help="list the loss presets, or describe one")
    losses.add_argument(
        "name", nargs="?", metavar="PRESET", help="preset to describe (default: a table of all presets)"
    )
    losses.set_defaults(call=_losses)

    add_trace(commands)
    add_proxy(commands)
    add_relay(commands)
    add_dialect(commands)
    add_plan(commands)
    add_bench(commands)
    add_check(commands)
    add_replay(commands)
    add_watch(commands)
    return parser


def _policies(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    """List the policies that are built in, or describe one."""
    from inflight.rollouts.listing import KINDS, described, listed

    if arguments.name is None:
        print("\n".join(listed()))
        return 0
    text = described(arguments.name)
    if text is None:
        known = sorted({name for policies in KINDS.values() for name in policies})
        raise ConfigError(f"unknown policy {arguments.name!r}; known: {', '.join(known)}")
    print(text)
    return 0


def _losses(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    from inflight.bench.weights import aligned
    from inflight.losses import PRESETS, preset

    if arguments.name is not None:
        print(preset(arguments.name).describe())
        return 0
    rows = [("preset", "loss of a token", "advantages", "denominator", "needs")]
    rows += [(it.name, it.formula, it.advantages, it.loss.aggregation.kind, it.needs) for it in PRESETS.values()]
    print(aligned(rows))
    return 0


def _add_serve(commands: Any) -> None:
    serve = commands.add_parser(
        "serve", help="serve a model directory with the embedded engine, vLLM, SGLang or your own"
    )
    serve.add_argument("model", type=Path, metavar="MODEL_DIR", help="Hugging Face checkpoint with safetensors")
    serve.add_argument(
        "--host",
        default=os.environ.get(ADDRESS_VARIABLE, "127.0.0.1"),
        help="address to listen on (default: what a launcher says, else loopback only)",
    )
    serve.add_argument("--port", type=int, default=8000, help="port to listen on, 0 for any free one (default: 8000)")
    serve.add_argument("--name", help="name of the served model (default: the directory's)")
    serve.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), help="default: as stored")
    serve.add_argument("--device", help="cpu, cuda, cuda:1 ... (default: a GPU if there is one)")
    serve.add_argument("--max-model-len", type=int, help="longest sequence in tokens (default: what the model allows)")
    serve.add_argument("--max-concurrent", type=int, help="sequences decoded at a time (default: 64)")
    serve.add_argument(
        "--kv-cache",
        metavar="SIZE",
        help="memory limit for keys and values, such as 2GB; requests wait for room (default: enough for "
        "--max-concurrent sequences of --max-model-len, at most half of the memory; embedded engine only)",
    )
    serve.add_argument(
        "--compile",
        action="store_true",
        help="compile the decode step before serving, and capture CUDA graphs on a GPU (embedded engine only)",
    )
    serve.add_argument(
        "--drafts",
        choices=("off", "history", "siblings", "both"),
        default="off",
        help="draft completions from recorded completions of the same prompt, from others of this server, or from both "
        "(default: off; vLLM only drafts from history, SGLang not at all)",
    )
    serve.add_argument("--threads", type=int, help="CPU threads of the engine (default: the engine's choice)")
    serve.add_argument(
        "--token-file", type=Path, help=f"file with the control token (default: ${TOKEN_VARIABLE}, or a new one)"
    )
    serve.add_argument("--ready-file", type=Path, help="file to write url and pid to, as JSON, once the server answers")
    serve.add_argument("--exit-with-stdin", action="store_true", help="stop when standard input ends")
    serve.add_argument(
        "--lease",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="with --exit-with-stdin, go on as long as calls with the token come within this time of each other",
    )
    joining = serve.add_argument_group("joining a run that has servers.attach.join")
    joining.add_argument(
        "--join", metavar="URL", help=f"join the run that listens there; ${TOKEN_VARIABLE} is the run's"
    )
    joining.add_argument(
        "--join-as", metavar="URL", help="where the run reaches this server (default: where it listens)"
    )
    joining.add_argument(
        "--grace",
        type=float,
        default=20.0,
        metavar="SECONDS",
        help="when told to stop, how long the run may take to take back what runs here (default: %(default)g)",
    )
    following = serve.add_argument_group("loading new weights that a trainer stores")
    following.add_argument("--follow", metavar="DIR_OR_URL", help="load the newest version stored there")
    following.add_argument("--follow-run", metavar="RUN_ID", help="run_id of the versions to load")
    following.add_argument("--follow-token-file", type=Path, help="file with the token for the URL of --follow")
    engine = serve.add_argument_group(
        "another engine",
        "An installed engine is started on loopback behind this server. module:function is called in this process with "
        "MODEL_DIR; the options above that you set are passed as keyword arguments.",
    )
    engine.add_argument(
        "--engine",
        default="local",
        help="local (embedded, the default), vllm, sglang, another installed engine, or module:function",
    )
    engine.add_argument("--python", help="interpreter of the engine's environment (default: this one)")
    engine.add_argument("--engine-port", type=int, default=0, help="port of the engine itself (default: any free one)")
    engine.add_argument(
        "--engine-arg",
        action="append",
        default=[],
        metavar="=ARG",
        help="an argument for the engine; KEY=VALUE for a function",
    )
    engine.add_argument("--start-timeout", type=float, default=300.0, metavar="SECONDS", help="default: %(default)g")
    engine.add_argument("--log", type=Path, help="file for the engine's output (default: a temporary one)")
    serve.set_defaults(call=_serve)


def _serve(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    given_token = read_token(arguments.token_file)
    token = given_token or secrets.token_urlsafe(24)
    if arguments.ready_file is not None and not arguments.ready_file.parent.is_dir():
        raise ConfigError(f"ready file {str(arguments.ready_file)!r} cannot be written: its directory does not exist")
    if arguments.threads is not None and arguments.threads < 1:
        raise ConfigError(f"--threads must be at least 1, not {arguments.threads}")

    def say_ready(line: str) -> None:
        _say(line)
        if given_token is None:
            _say(f"control token {token} (set {TOKEN_VARIABLE} to choose it)")

    follow = _follower(arguments)
    is_factory = ":" in arguments.engine
    if arguments.max_concurrent is None and not is_factory:
        arguments.max_concurrent = 64
    if arguments.engine == "local":
        _serve_local(arguments, token, say_ready, follow)
        return 0
    if arguments.kv_cache is not None:
        raise ConfigError("--kv-cache applies only to the embedded engine; configure another engine with --engine-arg")
    if arguments.compile:
        raise ConfigError("--compile applies only to the embedded engine; configure another engine with --engine-arg")
    if is_factory and arguments.drafts != "off":
        raise ConfigError(f"--drafts does not apply to {arguments.engine}; pass it what it takes with --engine-arg")
    if not arguments.start_timeout > 0:
        raise ConfigError(f"--start-timeout must be above 0, not {arguments.start_timeout:g}")
    serving = {
        "host": arguments.host,
        "port": arguments.port,
        "token": token,
        "start_timeout_s": arguments.start_timeout,
        "ready_file": arguments.ready_file,
        "exit_with_stdin": arguments.exit_with_stdin,
        "lease_s": arguments.lease,
        "joins": _joins(arguments),
    }
    if is_factory:
        _serve_factory(arguments, serving, say_ready, follow)
    elif follow is not None:
        raise ConfigError("--follow works only with an engine in this process; publish to this --engine instead")
    else:
        _serve_engine(arguments, serving, say_ready)
    return 0


def _say(line: str) -> None:
    print(f"inflight: {line}", flush=True)


def _joins(arguments: argparse.Namespace) -> Any:
    """Return the `JoinSettings` of a server that joins a run."""
    if arguments.join is None:
        if arguments.join_as is not None:
            raise ConfigError("--join-as needs --join, the URL of the run")
        return None
    from inflight.http.joining import JoinSettings

    if read_token(arguments.token_file) is None:
        raise ConfigError(f"--join needs the token of the run: set {TOKEN_VARIABLE}, or give --token-file")
    return JoinSettings(arguments.join, arguments.grace, arguments.join_as, _say)


def _follower(arguments: argparse.Namespace) -> _Follow | None:
    if arguments.follow is None:
        if arguments.follow_run is not None or arguments.follow_token_file is not None:
            raise ConfigError("--follow-run and --follow-token-file need --follow DIR_OR_URL")
        return None
    if not arguments.follow_run:
        raise ConfigError("--follow needs --follow-run, the run_id that the trainer stores under")
    from inflight.weights.receive.following import follow, store_spec

    token = None if arguments.follow_token_file is None else read_token(arguments.follow_token_file)
    spec = store_spec(arguments.follow, arguments.follow_run, token)
    return lambda endpoint: follow(endpoint, spec, note=_say)


def _serve_local(
    arguments: argparse.Namespace, token: str, say_ready: Callable[[str], None], follow: _Follow | None
) -> None:
    """Serve with the embedded engine, in this process."""
    import torch

    from inflight.base.progress import say_what_is_logged
    from inflight.engines.embedded.loading import load_endpoint
    from inflight.http.listening import bind
    from inflight.http.serving import serve

    if arguments.python is not None or arguments.engine_arg or arguments.engine_port or arguments.log is not None:
        raise ConfigError(
            "--python, --engine-arg, --engine-port and --log do not apply to the embedded engine; set --engine"
        )
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    say_what_is_logged(_say)
    with bind(arguments.host, arguments.port) as listener:
        endpoint = load_endpoint(
            arguments.model,
            name=arguments.name,
            dtype=arguments.dtype,
            device=arguments.device,
            max_model_len=arguments.max_model_len,
            max_concurrent=arguments.max_concurrent,
            kv_cache_bytes=None if arguments.kv_cache is None else bytes_of(arguments.kv_cache),
            compile=arguments.compile,
            drafts=None if arguments.drafts == "off" else arguments.drafts,
        )
        asyncio.run(
            serve(
                endpoint,
                listener,
                token=token,
                stats=endpoint.stats,
                ready_file=arguments.ready_file,
                exit_with_stdin=arguments.exit_with_stdin,
                lease_s=arguments.lease,
                joins=_joins(arguments),
                on_ready=lambda url: say_ready(f"serving {endpoint.name} at {url}"),
                while_serving=None if follow is None else lambda: follow(endpoint),
            )
        )


def _serve_factory(
    arguments: argparse.Namespace, serving: dict[str, Any], say_ready: Callable[[str], None], follow: _Follow | None
) -> None:
    """Serve an endpoint that a function makes in this process."""
    from inflight.engines.factories import keyword_arguments
    from inflight.engines.serving import serve_factory

    if arguments.python is not None or arguments.engine_port or arguments.log is not None:
        raise ConfigError(
            f"--python, --engine-port and --log apply only to engines in a process of their own, but "
            f"{arguments.engine} is called in this one; leave them out"
        )
    names = ("name", "dtype", "device", "max_model_len", "max_concurrent", "threads")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    serve_factory(
        arguments.engine,
        arguments.model,
        given | keyword_arguments(arguments.engine_arg, "--engine-arg"),
        **serving,
        on_ready=lambda name, url: say_ready(f"serving {name} at {url} ({arguments.engine})"),
        while_serving=follow,
    )


def _serve_engine(arguments: argparse.Namespace, serving: dict[str, Any], say_ready: Callable[[str], None]) -> None:
    """Serve with another engine, behind this process."""
    from inflight.engines.serving import serve_engine
    from inflight.http.kinds import EngineOptions, load_engine_kind

    kind = load_engine_kind(arguments.engine)
    if not (arguments.model / "config.json").is_file():
        raise ConfigError(f"model directory {str(arguments.model)!r} does not exist, or has no config.json")
    options = EngineOptions(
        model=arguments.model,
        name=arguments.name or arguments.model.resolve().name,
        dtype=arguments.dtype,
        device=arguments.device,
        max_model_len=arguments.max_model_len,
        max_concurrent=arguments.max_concurrent,
        threads=arguments.threads,
        drafts=None if arguments.drafts == "off" else arguments.drafts,
        arguments=tuple(arguments.engine_arg),
    )
    serve_engine(
        kind,
        options,
        **serving,
        python=arguments.python,
        engine_port=arguments.engine_port,
        log=arguments.log,
        on_start=lambda url, log: _say(f"starting {kind.name} at {url}; its output is in {log}"),
        on_wait=lambda seconds: _say(f"waiting for {kind.name} ... {seconds:.0f} s"),
        on_ready=lambda url, behind: say_ready(f"serving {options.name} at {url} ({kind.name} at {behind})"),
    )


def _tiny_model(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    from inflight.base.progress import ProgressLines
    from inflight.engines.embedded.tiny import TinyShape, context_of, create_tiny_model, save_tiny_model, warm_start
    from inflight.rollouts.tasks import load_task

    task = load_task(arguments.task, {}, arguments.seed)
    if arguments.images:
        return _tiny_image_model(arguments, task)
    if not isinstance(task, Task):
        raise ConfigError(f"{arguments.task!r} is an environment, which has no answers to imitate: name a task")
    context = arguments.max_model_len or context_of(task, arguments.style)
    shape = TinyShape(arguments.family, arguments.hidden_size, arguments.layers, arguments.heads, context)
    model = create_tiny_model(shape, arguments.seed)
    num_steps = 1400 if arguments.steps is None else arguments.steps
    _say(f"warm start on {task.name}, {num_steps:,} steps, a context of {context:,} tokens")
    lines = ProgressLines("steps", num_steps, _say)
    warm_start(
        model,
        task,
        num_steps=num_steps,
        batch_size=arguments.batch_size,
        wrong_fraction=0.6 if arguments.wrong_fraction is None else arguments.wrong_fraction,
        style=arguments.style,
        seed=arguments.seed,
        on_progress=lambda step, loss: lines.update(step, f"loss {loss:.3f}"),
    )
    save_tiny_model(model, arguments.output)
    _say_written(arguments.output, model, num_steps, task.name)
    return 0


def _tiny_image_model(arguments: argparse.Namespace, task: Task | Environment) -> int:
    from inflight.base.progress import ProgressLines
    from inflight.engines.embedded.tiny_images import (
        TinyImageShape,
        create_tiny_image_model,
        save_tiny_image_model,
        warm_start_on_images,
    )

    context = arguments.max_model_len or 512
    shape = TinyImageShape(arguments.hidden_size, arguments.layers, arguments.heads, context)
    model = create_tiny_image_model(shape, arguments.seed)
    num_steps = 100 if arguments.steps is None else arguments.steps
    lines = ProgressLines("steps", num_steps, _say)
    warm_start_on_images(
        model,
        task,
        num_steps=num_steps,
        batch_size=arguments.batch_size,
        wrong_fraction=1.0 if arguments.wrong_fraction is None else arguments.wrong_fraction,
        seed=arguments.seed,
        on_progress=lambda step, loss: lines.update(step, f"loss {loss:.3f}"),
    )
    save_tiny_image_model(model, arguments.output)
    _say_written(arguments.output, model, num_steps, task.name)
    return 0


def _say_written(path: Path, model: Any, num_steps: int, task: str) -> None:
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    _say(f"wrote {path} ({num_parameters:,} parameters, {num_steps} steps on {task})")


def _train(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    from inflight.run.config import load_config

    if arguments.launcher is not None:
        overrides = [*overrides, "--run.launcher", arguments.launcher]
    if arguments.dry_run:
        return _dry_run(arguments, overrides)
    if arguments.json or arguments.devices is not None:
        raise ConfigError("--json and --devices apply only to --dry-run")
    from inflight.run.run import train

    config = load_config(arguments.config, overrides)
    is_begun = arguments.resume_if_begun and (config.run.directory / "config.json").exists()
    return train(config, resume=arguments.resume or is_begun)


def _launch(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print a manifest."""
    from inflight.launchers.emit import jobset, sbatch
    from inflight.run.config import load_config
    from inflight.run.machines.manifests import plan_of

    plan = plan_of(load_config(arguments.config, overrides), arguments.config, overrides)
    if arguments.emit == "sbatch":
        print(sbatch(plan, arguments.option), end="")
        return 0
    if arguments.image is None:
        raise ConfigError("a JobSet needs --image, the container image that has inflight")
    claim, separator, path = (arguments.volume or "").partition(":")
    if arguments.volume is not None and not (claim and separator and path.startswith("/")):
        raise ConfigError(f"--volume {arguments.volume!r} is not CLAIM:PATH, such as models:/shared")
    print(jobset(plan, arguments.image, (claim, path) if claim else None), end="")
    return 0


def _dry_run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print what a run would do; return 2 if it cannot work."""
    from inflight.run.config import load_config
    from inflight.run.machines.devices import described_devices, devices_here
    from inflight.run.machines.dry_run import described, plan_run

    try:
        config = load_config(arguments.config, overrides)
        devices = devices_here() if arguments.devices is None else described_devices(arguments.devices)
        plan = plan_run(config, devices)
    except InflightError as error:
        print(f"inflight: {error}", file=sys.stderr)
        return 2
    print(json.dumps(plan.to_json(), indent=2) if arguments.json else described(plan))
    return 0


def _quiet_transformers() -> None:
    """Turn off the progress bars and the advice of transformers."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")


if __name__ == "__main__":
    sys.exit(main())

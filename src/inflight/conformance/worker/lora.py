"""Checks of workers that train a LoRA: the gradient, and the tensors that are changed, published and saved."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from inflight.base.shortened import shortened
from inflight.conformance.checks import check, look_at, require, skip
from inflight.conformance.worker.background import BackgroundSavingWorker, save_while_training
from inflight.conformance.worker.batches import accumulate, make_batch, take_steps
from inflight.conformance.worker.gathering import Weights, compare_changes, differing, gathered
from inflight.conformance.worker.reference import ReferenceModel
from inflight.conformance.worker.subject import WorkerSubject
from inflight.contracts import LoraSource, MergingLoraSource, PartialWeightSource, TrainerWorker, WeightSource
from inflight.errors import ConfigError, UnsupportedError
from inflight.model.lora_settings import LoraSettings
from inflight.types import MicroBatch
from inflight.weights.encode.buckets import plan_buckets
from inflight.weights.encode.lora_tensors import PARTS, PREFIX, lora_names
from inflight.wire import LoraSpec

LEVEL = "lora"
SETTINGS = LoraSettings(rank=3, alpha=12.5, targets=("q_proj", "v_proj", "o_proj", "down_proj"))
"""LoRA settings with a rank that cannot be divided evenly, and an alpha that is not an integer. Every model of the kit
without experts has the target layers."""
_OF_EXPERTS = ("down_proj",)
"""Targets that belong to the experts in a mixture of experts."""
ADAPTER = Path("adapter") / "adapter_model.safetensors"
_LENGTHS = (9, 14, 5)
_BUCKET_BYTES = 4096
_DROPOUT = 0.3
_SAME = 0.9
"""Cosine similarity from which two effects on logprobs count as those of the same dropout."""


@check("W-47", look_at="the scale alpha / rank, whether dropout is off, and whether both halves get their gradients")
def the_gradient_is_that_of_the_halves(subject: WorkerSubject) -> None:
    """Where a worker trains a LoRA, logprobs are those of the merged weights, and the gradient is that with respect to
    A and B."""
    worker, reference = _noticeable_worker(subject), ReferenceModel(subject.model())
    batches = [make_batch(_LENGTHS, seed=470 + rank) for rank in range(subject.data_size)]
    mine = batches[subject.data_rank]
    for what in ("while B is zero", "once B is not zero"):
        found_T = worker.forward(mine)
        lora = _on_every_rank(subject, gathered(worker))
        reference.adapt(lora, _spec(worker))
        with torch.no_grad():
            difference = float((found_T.detach().double() - reference.logprobs(mine)).abs().max())
        subject.note(**{f"largest_difference ({what})": difference})
        words = f"{what}, logprobs differ by up to {difference:.2e} nats from those of the merged weights"
        subject.require_on_all_ranks(difference <= subject.tolerance.logprob, words)
        accumulate(worker, [mine])
        subject.compare_norm(worker, reference.lora_gradient_norm(batches), f"of A and B, {what}")
    later = gathered(worker)
    # A is so much larger than B that the norm does not show the gradient of A.
    same = [name for name in later if torch.equal(later[name].double(), lora[name])]
    words = f"once B is not zero, a step leaves {len(same)} tensors unchanged: {shortened(same, 3)}"
    subject.require_on_all_ranks(not same, words)


@check("W-48")
@look_at("requires_grad of all other tensors, weight decay, and whether the weights under the LoRA are merged")
def a_step_changes_the_lora_alone(subject: WorkerSubject) -> None:
    """A step of a worker that trains a LoRA leaves the base weights unchanged."""
    worker, path = _noticeable_worker(subject), subject.fresh_path("lora-base")
    take_steps(worker, [make_batch(_LENGTHS, seed=480 + 10 * n + subject.data_rank) for n in range(2)])
    worker.save(path)
    spec, lora = _spec(worker), gathered(worker)
    subject.ranks.wait_for_all()
    if subject.rank == 0:
        start, saved = (_weights(directory) for directory in (subject.model(), path))
        lost = sorted(start.keys() ^ saved.keys())
        require(not lost, f"the model and the saved checkpoint have different tensors: {shortened(lost)}")
        changed = {name for name in start if not torch.equal(start[name].float(), saved[name].float())}
        others = sorted(changed - _changed(lora))
        require(not others, f"{len(others)} weights that have no LoRA have changed: {shortened(others)}")
        apart, _ = _apart_from_merged(saved, start, lora, spec)
        subject.note(num_changed=len(changed), largest_difference=apart)
        allowed = 8 * subject.tolerance.rounding * max(float(tensor.abs().max()) for tensor in start.values())
        require(apart <= allowed, f"saved weights differ by up to {apart:.2e} from those of the model plus the LoRA")
    subject.ranks.wait_for_all()


@check("W-49")
@look_at(
    "the names that PEFT saves, pairs of A and B, whether anything else is listed or gathered, and the seed of A on "
    "each rank and in each layer"
)
def only_the_lora_is_gathered(subject: WorkerSubject) -> None:
    """A worker that trains a LoRA gathers A and B of the configured layers, and nothing else; in a new LoRA, A
    depends on the seed, no two of its rows are equal, and B is zero, so that the LoRA changes nothing."""
    worker = _lora_worker(subject)
    spec, specs = _spec(worker), {tensor.name: tuple(tensor.shape) for tensor in worker.parameter_specs()}
    settings = _settings(subject)
    require((spec.rank, spec.scale) == (settings.rank, settings.spec.scale), f"lora_spec() is {spec}")
    shapes = _shapes(subject.model())
    with_targets = {name: shape for name, shape in shapes.items() if _matches(_layer(name), settings.targets)}
    wanted: dict[str, tuple[int, ...]] = {}
    for name, (num_out, num_in) in with_targets.items():
        a, b = lora_names(_layer(name))
        wanted |= {a: (spec.rank, num_in), b: (num_out, spec.rank)}
    subject.note(num_tensors=len(specs))
    lost, more = sorted(wanted.keys() - specs.keys()), sorted(specs.keys() - wanted.keys())
    require(not lost, f"tensors of the LoRA that are not listed: {shortened(lost, 3)}")
    require(not more, f"{len(more)} listed tensors do not belong to the LoRA: {shortened(more, 3)}")
    require(specs == wanted, f"shapes are {specs}, not {wanted}")
    found, others = gathered(worker), gathered(_lora_worker(subject, seed=settings.seed + 1))
    if subject.rank == 0:
        require(
            found.keys() == specs.keys(), f"the gathered tensors are not the listed ones: {shortened(sorted(found), 3)}"
        )
        filled = [name for name, tensor in found.items() if "lora_B" in name and bool(tensor.any())]
        require(not filled, f"B of a new LoRA is not zero: {shortened(filled, 3)}")
        empty = [name for name, tensor in found.items() if "lora_A" in name and not bool(tensor.any())]
        require(not empty, f"A of a new LoRA is zero, so neither half would ever learn: {shortened(empty, 3)}")
        same = [name for name, tensor in found.items() if "lora_A" in name and torch.equal(tensor, others[name])]
        require(not same, f"A of a new LoRA is the same with another seed: {shortened(same, 3)}")
        rows = {
            f"row {i} of {name}": tuple(row.tolist())
            for name in found
            if "lora_A" in name
            for i, row in enumerate(found[name])
        }
        first = {values: where for where, values in reversed(rows.items())}
        repeated = [f"{where} equals {first[values]}" for where, values in rows.items() if first[values] != where]
        require(not repeated, f"A of a new LoRA has equal rows: {shortened(repeated, 3)}")


@check("W-50", deadline_s=60)
@look_at(
    "whether A, B and their moments are saved and read, and whether load resets the count of dropout draws; `adapter/` "
    "must contain A and B under PEFT's names, with a `lora_alpha` that PEFT divides by the rank; a model in eval mode, "
    "in which dropout has no effect"
)
def a_lora_resumes(subject: WorkerSubject) -> None:
    """A worker that trains a LoRA resumes from its checkpoint: the LoRA is restored bit for bit, and later steps are
    the same as without a save and a load, dropout included. Each forward pass with gradients draws its own dropout, and
    other passes have none. A save changes no weights. The LoRA is stored next to the checkpoint in PEFT's format, with
    the rank, scale and layers in adapter_config.json."""
    steady, path = _lora_worker(subject, dropout=_DROPOUT), subject.fresh_path("lora-resumed")
    batches = [make_batch(_LENGTHS, seed=500 + 10 * n + subject.data_rank) for n in range(4)]
    take_steps(steady, batches[:2])
    with torch.no_grad():
        before_T = steady.forward(batches[0])
        steady.save(path)
        after_T = steady.forward(batches[0])
    words = f"save() changes the logprobs of its own worker by up to {float((after_T - before_T).abs().max()):.2e} nats"
    subject.require_on_all_ranks(torch.equal(before_T, after_T), words)
    saved = gathered(steady)
    subject.ranks.wait_for_all()
    if subject.rank == 0:
        _require_adapter(subject, path, saved, _spec(steady))
    take_steps(steady, batches[2:])
    expected = gathered(steady)
    new, twin = _lora_worker(subject, dropout=_DROPOUT), _lora_worker(subject, dropout=_DROPOUT)
    take_steps(twin, batches[2:])
    others = {"the worker that continued": steady, "another worker at the same version": twin}
    for name, resumed in {"a new worker": new, **others}.items():
        gathered(resumed)
        accumulate(resumed, batches[:1])  # load() must discard the gradient and reset the count of dropout draws
        resumed.load(path)
        changed = differing(saved, gathered(resumed))
        subject.note(**{f"version ({name})": resumed.version, f"differing tensors ({name})": len(changed)})
        words = f"{name} loads version {resumed.version} of version 2; tensors that differ: {shortened(changed)}"
        subject.require_on_all_ranks(resumed.version == 2 and not changed, words)
        take_steps(resumed, batches[2:])
        found = gathered(resumed)
        if subject.rank == 0:
            compare_changes(
                subject,
                saved,
                expected,
                found,
                f"two steps of {name} after a load, and the same steps without it",
                by_the_same_worker=True,
            )
    if isinstance(new, BackgroundSavingWorker):
        _require_saved_in_the_background(subject, new, steady, batches[:1])
    _require_dropout(subject)


def _require_dropout(subject: WorkerSubject) -> None:
    """Fail unless forward passes with gradients, and only those, each draw their own dropout. All ranks call this."""
    worker, batch = _noticeable_worker(subject, dropout=_DROPOUT), make_batch(_LENGTHS, seed=540 + subject.data_rank)
    take_steps(worker, [batch])
    with torch.no_grad():
        plain_T, again_T = worker.forward(batch), worker.forward(batch)
    first_T, second_T = (worker.forward(batch).detach() for _ in range(2))
    pairs = {"without gradients": (plain_T, again_T), "with": (first_T, plain_T), "with, again": (second_T, first_T)}
    apart = {name: float((one - other).abs().max()) for name, (one, other) in pairs.items()}
    subject.note(**{f"logprobs moved by dropout ({name})": difference for name, difference in apart.items()})
    words = f"with a dropout of {_DROPOUT}, logprobs of forward passes with gradients differ by up to"
    has_dropout = apart["with"] > 0 and apart["with, again"] > 0
    words = f"{words} {apart['with']:.2e} nats from those without, and {apart['with, again']:.2e} from one another"
    subject.require_on_all_ranks(has_dropout, words)
    words = f"logprobs of forward passes without gradients differ by up to {apart['without gradients']:.2e} nats"
    subject.require_on_all_ranks(apart["without gradients"] <= subject.tolerance.logprob, words)
    accumulate(worker, [batch], 0.0)
    worker.step()
    with torch.no_grad():
        later_plain_T = worker.forward(batch)
    moved_T, later_moved_T = first_T - plain_T, worker.forward(batch).detach() - later_plain_T
    likeness = float(torch.cosine_similarity(moved_T, later_moved_T, dim=0))
    subject.note(**{"cosine similarity of the effects of dropout in two steps": likeness})
    words = f"the first forward pass after a step has the dropout of the first one before it (cosine {likeness:.3f})"
    subject.require_on_all_ranks(likeness < _SAME, words)


def _require_saved_in_the_background(
    subject: WorkerSubject, worker: BackgroundSavingWorker, other: TrainerWorker, batches: Sequence[MicroBatch]
) -> None:
    """Fail unless a background save contains the LoRA as it was when the save began, although ``worker`` continues to
    train; ``other`` loads the checkpoint. All ranks call this."""
    directory, saved = subject.fresh_path("lora-background"), gathered(worker)
    if subject.rank == 0:
        directory.mkdir(parents=True)
    subject.ranks.wait_for_all()
    save_while_training(subject, worker, directory / "checkpoint", lambda: take_steps(worker, batches))
    other.load(directory / "checkpoint")
    changed = differing(saved, gathered(other))
    words = f"in a background save, tensors differ from the LoRA when the save began: {shortened(changed)}"
    subject.require_on_all_ranks(not changed, words)


@check("W-78", deadline_s=30)
@look_at("merged weights that are kept from an earlier call; the scale; layers that the LoRA does not change")
def merged_weights_are_current(subject: WorkerSubject) -> None:
    """Where a worker can merge its LoRA, rank 0 provides exactly those weights that the LoRA changes, each as the
    weight of the model plus the scaled product of B and A, as of the current step."""
    worker = _noticeable_worker(subject)
    if not isinstance(worker, MergingLoraSource):
        skip("merging the LoRA is not supported: it is not a MergingLoraSource")
    sources = [worker.merged(_BUCKET_BYTES)] if subject.rank == 0 else []
    for num_steps in (1, 2):
        take_steps(worker, [make_batch(_LENGTHS, seed=780 + 10 * num_steps + subject.data_rank)])
        lora = gathered(worker)
        sources += [worker.merged(_BUCKET_BYTES)] if subject.rank == 0 else []
        for number in range(num_steps + 1):
            source = sources[number] if subject.rank == 0 else worker
            merged = _gathered_from(source, worker)
            if subject.rank == 0:
                when = f"after step {num_steps}, from a source of {f'step {number}' if number else 'the beginning'}"
                _require_merged(subject, sources[number], merged, lora, _spec(worker), when)
            subject.ranks.wait_for_all()


def _gathered_from(source: WeightSource, worker: WeightSource) -> dict[str, torch.Tensor]:
    """Return copies of the tensors that a source provides on rank 0, while the other ranks gather those of the
    worker."""
    found: dict[str, torch.Tensor] = {}
    of = source if worker.rank == 0 else worker
    for bucket in of.gather_weights(plan_buckets(of.parameter_specs(), _BUCKET_BYTES)):
        found |= {spec.name: it.detach().cpu().clone() for spec, it in zip(bucket.specs, bucket.tensors, strict=False)}
    return found


def _require_merged(
    subject: WorkerSubject,
    source: PartialWeightSource,
    merged: Weights,
    lora: Weights,
    spec: LoraSpec,
    when: str,
) -> None:
    """Fail unless exactly the weights that the LoRA changes are merged, and the others are listed as frozen."""
    model = _weights(subject.model())
    listed, frozen, wanted = {it.name for it in source.parameter_specs()}, set(source.frozen_names()), _changed(lora)
    strange = sorted((listed ^ wanted) | (merged.keys() ^ wanted))
    require(not strange, f"{when}: merged weights are not those that the LoRA changes: {shortened(strange, 3)}")
    strange = sorted(frozen ^ (model.keys() - wanted))
    require(not strange, f"{when}: frozen_names() are not the other weights: {shortened(strange, 3)}")
    apart, moved = _apart_from_merged(merged, model, lora, spec)
    subject.note(**{f"merged weights apart ({when})": apart, f"size of the LoRA's changes ({when})": moved})
    rounding = max(subject.tolerance.rounding, *(torch.finfo(tensor.dtype).eps / 2 for tensor in merged.values()))
    allowed = 8 * rounding * max(float(tensor.abs().max()) for tensor in model.values())
    words = f"{when}: merged weights differ by up to {apart:.2e} from those of the model plus the LoRA"
    require(apart <= allowed, words)


def _apart_from_merged(
    found: Weights,
    model: Weights,
    lora: Weights,
    spec: LoraSpec,
) -> tuple[float, float]:
    """Return the largest difference from the model's weights plus the LoRA, and the largest change that the LoRA
    makes."""
    apart = moved = 0.0
    for name in sorted(_changed(lora)):
        a, b = (lora[part].double() for part in lora_names(_layer(name)))
        change = spec.scale * (b @ a)
        apart = max(apart, float((found[name].double() - model[name].double() - change).abs().max()))
        moved = max(moved, float(change.abs().max()))
    return apart, moved


def _require_adapter(subject: WorkerSubject, path: Path, saved: Weights, spec: LoraSpec) -> None:
    """Fail unless the checkpoint has the LoRA as PEFT would store it."""
    files = sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
    require((path / ADAPTER).is_file(), f"there is no {ADAPTER} among {files}")
    names = load_file(path / ADAPTER).keys()
    require(names == saved.keys(), f"{ADAPTER} does not contain the gathered tensors: {shortened(sorted(names), 3)}")
    file = (path / ADAPTER).with_name("adapter_config.json")
    require(file.is_file(), f"there is no {file.name} among {files}")
    config = json.loads(file.read_text())
    rank, alpha, is_rooted = config.get("r"), config.get("lora_alpha"), bool(config.get("use_rslora"))
    described = f"{file.name} has r {rank!r}, lora_alpha {alpha!r} and use_rslora {is_rooted}"
    subject.note(adapter_config=described)
    require(rank == spec.rank, f"{described}, but the rank is {spec.rank}")
    scale = alpha / (math.sqrt(rank) if is_rooted else rank) if isinstance(alpha, int | float) else math.nan
    require(
        math.isclose(scale, spec.scale, rel_tol=1e-6), f"{described}, so its scale is {scale:g}, not {spec.scale:g}"
    )
    targets = config.get("target_modules") or ()
    layers = {_layer(name) for name, shape in _shapes(subject.model()).items() if len(shape) == 2}
    strange = {layer for layer in layers if _matches(layer, targets)} ^ {_layer(name) for name in _changed(saved)}
    words = f"target_modules of {file.name} are {targets}, but the layers of the saved tensors differ by"
    require(not strange, f"{words} {shortened(sorted(strange), 3)}")


def _lora_worker(subject: WorkerSubject, *, dropout: float = 0.0, seed: int = SETTINGS.seed) -> TrainerWorker:
    """Return a new worker with the option ``lora``; skip the check if the worker cannot be created."""
    settings = _settings(subject).model_copy(update={"dropout": dropout, "seed": seed})
    try:
        worker = subject.create(lora=settings.model_dump())
    except (ConfigError, UnsupportedError) as error:
        skip(f"it trains no LoRA: {error}")
    if not isinstance(worker, LoraSource):
        skip("it trains no LoRA: with the option lora, it is not a LoraSource")
    return worker


def _noticeable_worker(subject: WorkerSubject, *, dropout: float = 0.0) -> TrainerWorker:
    """Return a new worker whose steps change the target layers by a few percent of their size, at any learning rate."""
    worker = _lora_worker(subject)
    take_steps(worker, [make_batch(_LENGTHS, seed=490 + subject.data_rank)])
    lora, scale = gathered(worker), 0.0
    if subject.rank == 0:
        start = _weights(subject.model())
        pairs = [(name, lora_names(_layer(name))) for name in _changed(lora)]
        moved = sum(float((lora[b].double() @ lora[a].double()).abs().mean()) for _, (a, b) in pairs)
        size = sum(float(start[name].double().abs().mean()) for name, _ in pairs)
        scale = size / moved / 30 if moved else 0.0
    (scale, *_) = subject.ranks.exchange(scale)
    require(scale, "a step changes nothing: the product of A and B is still zero")
    settings = _settings(subject)
    noticeable = {"alpha": settings.rank * scale, "dropout": dropout}
    return subject.create(lora=settings.model_copy(update=noticeable).model_dump())


def _spec(worker: TrainerWorker) -> LoraSpec:
    assert isinstance(worker, LoraSource)
    return worker.lora_spec()


def _on_every_rank(subject: WorkerSubject, lora: Weights) -> dict[str, torch.Tensor]:
    """Return what rank 0 gathered, on every rank."""
    sent = {name: tensor.double().tolist() for name, tensor in lora.items()}
    return {name: torch.tensor(rows, dtype=torch.float64) for name, rows in subject.ranks.exchange(sent)[0].items()}


def _settings(subject: WorkerSubject) -> LoraSettings:
    """Return the settings of the LoRA; for a mixture of experts, its only targets are those in attention."""
    if not subject.target.experts:
        return SETTINGS
    return SETTINGS.model_copy(update={"targets": tuple(it for it in SETTINGS.targets if it not in _OF_EXPERTS)})


def _matches(layer: str, targets: str | Sequence[str]) -> bool:
    """Return whether PEFT would select a linear layer with these ``target_modules``."""
    if targets == "all-linear":
        return layer.startswith("model.layers.")
    if isinstance(targets, str):
        return re.fullmatch(targets, layer) is not None
    return any(layer == target or layer.endswith(f".{target}") for target in targets)


def _layer(weight: str) -> str:
    return weight.removesuffix(".weight")


def _changed(lora: Weights) -> set[str]:
    return {_weight_of(part) for part in lora}


def _weight_of(part: str) -> str:
    module = part.removeprefix(PREFIX)
    return f"{next(module.removesuffix(half) for half in PARTS if module.endswith(half))}.weight"


def _weights(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def _shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in _weights(directory).items()}

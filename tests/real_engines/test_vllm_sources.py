"""What the adapter assumes of vLLM holds in the sources of the tested release and of a newer one, which no CPU can run.

Nothing of vLLM is executed here. `MUTANTS` change one assumption each in the text of the newer release.
"""

from __future__ import annotations

import functools
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.engines.vllm_sources import Sources, assumptions, counts, lacking
from tests.real_engines.servers import ROOT, python_of

NEWEST, REFUSED = "0.33.0", "0.31.0"


@functools.cache
def unpacked(version: str) -> Path:
    directory = ROOT / ".engines" / f"vllm-sources-{version}"
    assert directory.is_dir(), f"{directory} is not there; run: make vllm-sources VLLM={version}"
    return directory


def missing(sources: Sources) -> list[str]:
    return [f"{assumption.kind}: {assumption.name}: {problem}" for assumption, problem in lacking(sources)]


def test_every_assumption_holds_in_the_release_that_the_other_tests_run() -> None:
    (packages,) = Path(python_of("vllm")).parents[1].glob("lib/python*/site-packages")
    assert missing(Sources(packages)) == []


def test_every_assumption_holds_in_the_newest_release() -> None:
    assert missing(Sources(unpacked(NEWEST))) == []


def test_a_refused_release_lacks_what_it_is_refused_for_and_little_else() -> None:
    refused = tomllib.loads((ROOT / "docs" / "certificates" / "refused.toml").read_text())["refused"]
    (reason,) = (it["reason"] for it in refused if (it["engine"], it["version"]) == ("vllm", REFUSED))
    assert "which version sampled each token" in reason and "cannot leave the weight-transfer group" in reason
    names = {f"{assumption.kind}: {assumption.name}" for assumption, _ in lacking(Sources(unpacked(REFUSED)))}
    assert names == {
        *(
            f"answer field: /inference/v1/generate{how}: choices.weight_versions.{it}"
            for how in ("", ", streamed")
            for it in ("version", "start", "end")
        ),
        "attribute: vllm.v1.engine.output_processor.RequestState._weight_version_spans",
        "call: vllm.v1.engine.output_processor.RequestState._weight_version_spans()",
        "route: POST /shutdown_weight_transfer_engine",
        "request field: POST /v1/chat/completions/render: mm_payload",
        "request value: POST /sleep: mode=keep",
        "answer field: /wake_up: status",
        "constant: 'awake' in vllm.entrypoints.serve.dev.sleep.api_router",
    }


@dataclass(frozen=True)
class Mutant:
    """A change of one module, by a regular expression, and the assumption that then fails."""

    what: str
    module: str
    old: str
    new: str
    fails: str


_BASE, _CORE = "vllm.distributed.weight_transfer.base", "vllm.v1.engine.core"
_PROTOCOL = "vllm.entrypoints.scale_out.token_in_token_out.protocol"
_RL = "vllm.entrypoints.rl.online.api_router"
_RELOAD = "vllm.model_executor.model_loader.reload"
_REJECTION = "vllm.v1.sample.rejection_sampler"
MUTANTS = (
    Mutant(
        "a renamed function",
        f"{_RELOAD}.layerwise",
        "def finalize_layerwise_reload",
        "def finish_layerwise_reload",
        f"import: {_RELOAD}.layerwise.finalize_layerwise_reload",
    ),
    Mutant(
        "an import that only type checkers see",
        "vllm.model_executor.layers.attention",
        r"\ndef is_deferred_attention_layer",
        "\nif TYPE_CHECKING:\n  from vllm.a import is_deferred_attention_layer\ndef is_deferred",
        "import: vllm.model_executor.layers.attention.is_deferred_attention_layer",
    ),
    Mutant(
        "a renamed method of a base class",
        _BASE,
        r"def finish_weight_update\(self\)",
        "def complete_weight_update(self)",
        f"override: {_BASE}.WeightTransferEngine.finish_weight_update",
    ),
    Mutant(
        "a new abstract method",
        _BASE,
        r"    @abstractmethod\n    def init_transfer_engine",
        "    @abstractmethod\n    def must_have(self): ...\n    @abstractmethod\n    def init_transfer_engine",
        f"override: every abstract method of {_BASE}.WeightTransferEngine",
    ),
    Mutant(
        "a renamed parameter of an overridden method",
        _BASE,
        r"def receive_weights\(self, update_info",
        "def receive_weights(self, info",
        f"override: {_BASE}.WeightTransferEngine.receive_weights",
    ),
    Mutant(
        "an overridden method that becomes async",
        _BASE,
        r"def update_weights\(self, update_info: dict",
        "async def update_weights(self, update_info: dict",
        f"override: {_BASE}.WeightTransferEngine.update_weights",
    ),
    Mutant(
        "an overridden method that becomes static",
        _BASE,
        r"    @abstractmethod\n    def shutdown\(self\)",
        "    @staticmethod\n    def shutdown(self)",
        f"override: {_BASE}.WeightTransferEngine.shutdown",
    ),
    Mutant(
        "a base attribute with the name of one of ours",
        _BASE,
        r"    supports_draft_weight_update: bool = True\n",
        "    supports_draft_weight_update: bool = True\n    _phase: str = ''\n",
        f"attribute: {_BASE}.WeightTransferEngine._phase is free",
    ),
    Mutant(
        "an inherited attribute that is gone",
        _BASE,
        "self.parallel_config:",
        "self.parallelism:",
        f"attribute: {_BASE}.WeightTransferEngine.parallel_config is inherited",
    ),
    Mutant(
        "a method of the engine core that is renamed",
        _CORE,
        "def set_weight_version",
        "def label_weights",
        f"attribute: {_CORE}.EngineCoreProc.set_weight_version",
    ),
    Mutant(
        "a parameter that is removed",
        _CORE,
        r'self, mode: PauseMode = "abort", clear_cache: bool = True',
        'self, mode: PauseMode = "abort"',
        f"call: {_CORE}.EngineCoreProc.pause_scheduler(_, _)",
    ),
    Mutant(
        "a parameter that is added, without a default",
        "vllm.model_executor.layers.utils",
        r"def dispatch_cpu_unquantized_gemm\(\n",
        "def dispatch_cpu_unquantized_gemm(\n    how: str,\n",
        "call: vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm(_, remove_weight=)",
    ),
    Mutant(
        "a replaced method with another parameter",
        _CORE,
        r"(def collective_rpc\(\s*self,\s*)method",
        r"\1function",
        f"override: {_CORE}.EngineCoreProc.collective_rpc is replaceable",
    ),
    Mutant(
        "a kernel whose parameters change places",
        _REJECTION,
        r"(def rejection_random_sample_kernel\(\n)(.*output_token_ids_ptr,.*\n)(.*cu_num_draft_tokens_ptr,.*\n)",
        r"\1\3\2",
        "override: rejection_random_sample_kernel(",
    ),
    Mutant(
        "a call of the proposer with one argument more",
        "vllm.v1.worker.gpu_model_runner",
        r"cast\(Any, self.drafter\).propose\(",
        "cast(Any, self.drafter).propose(\n                1, ",
        "callback: vLLM on the proposer: propose",
    ),
    Mutant(
        "a call of the weight transfer engine with an argument",
        "vllm.v1.worker.gpu_worker",
        r"weight_transfer_engine.finish_weight_update\(\)",
        "weight_transfer_engine.finish_weight_update('7')",
        "callback: vllm.v1.worker.gpu_worker on weight_transfer_engine",
    ),
    Mutant(
        "an entry point group that is not read",
        "vllm.plugins",
        "vllm.general_plugins",
        "vllm.plugins",
        "entry point: group vllm.general_plugins",
    ),
    Mutant(
        "a process that loads no plug-ins",
        "vllm.v1.worker.worker_base",
        r"load_general_plugins\(\)",
        "pass",
        "entry point: vllm.general_plugins in vllm.v1.worker.worker_base",
    ),
    Mutant("a removed route", _RL, r'@router.get\("/weight_info"\)', "", "route: GET /weight_info"),
    Mutant(
        "a route with another method", _RL, r'router.post\("/pause"\)', 'router.put("/pause")', "route: POST /pause"
    ),
    Mutant(
        "a removed request field",
        _PROTOCOL,
        "    cache_salt: ",
        "    salt: ",
        "request field: POST /inference/v1/generate: cache_salt",
    ),
    Mutant(
        "a removed sampling parameter",
        "vllm.sampling_params",
        r"\n    prompt_logprobs: ",
        "\n    logprobs_of_prompt: ",
        "request field: POST /inference/v1/generate: sampling_params.prompt_logprobs",
    ),
    Mutant(
        "a renamed query parameter",
        _RL,
        "    clear_cache: Annotated",
        "    clear: Annotated",
        "request field: POST /pause: clear_cache",
    ),
    Mutant(
        "a value that is no longer accepted",
        "vllm.v1.engine",
        r'PauseMode = Literal\["abort", "wait", "keep"\]',
        'PauseMode = Literal["abort", "wait"]',
        "request value: POST /pause: mode=keep",
    ),
    Mutant(
        "a removed answer field",
        _PROTOCOL,
        "    weight_versions: ",
        "    weights: ",
        "answer field: /inference/v1/generate: choices.weight_versions.version",
    ),
    Mutant(
        "a renamed key of an answer",
        _RL,
        '"is_paused": paused',
        '"paused": paused',
        "answer field: /is_paused: is_paused",
    ),
    Mutant(
        "a setting that is no longer listed",
        "vllm.config.model",
        r"\n    logprobs_mode: ",
        "\n    mode_of_logprobs: ",
        "answer field: /server_info: model_config.logprobs_mode",
    ),
    Mutant(
        "a removed option",
        "vllm.engine.arg_utils",
        '"--logprobs-mode"',
        '"--logprobs"',
        "option: --logprobs-mode",
    ),
    Mutant(
        "an option of the server that is removed",
        "vllm.entrypoints.common.cli_args",
        "    enable_scale_out: bool",
        "    scale_out: bool",
        "option: --enable-scale-out",
    ),
    Mutant(
        "a value of an option that is gone",
        "vllm.config.speculative",
        '"custom_class"',
        '"own_class"',
        "option value: --speculative-config method",
    ),
    Mutant(
        "an environment variable that is gone",
        "vllm.envs",
        "VLLM_SERVER_DEV_MODE",
        "VLLM_DEV",
        "environment variable: VLLM_SERVER_DEV_MODE",
    ),
    Mutant(
        "another type of the refusal while paused",
        "vllm.entrypoints.serve.exception_handling.error_response",
        "ServiceUnavailableError",
        "OverloadedError",
        "constant: 'ServiceUnavailableError' if requests can be refused for now",
    ),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
def test_a_changed_release_is_noticed(mutant: Mutant) -> None:
    original = Sources(unpacked(NEWEST)).text_of(mutant.module)
    changed, num_changes = re.subn(mutant.old, mutant.new, original)
    assert num_changes > 0, "the sources have changed: adapt the mutant"
    sources = Sources(unpacked(NEWEST), {mutant.module: changed})
    concerned = [it for it in assumptions() if f"{it.kind}: {it.name}".startswith(mutant.fails)]
    assert concerned and all(it.problem(sources) is not None for it in concerned)


def test_each_kind_of_assumption_has_a_mutant() -> None:
    assert counts().keys() == {mutant.fails.partition(":")[0] for mutant in MUTANTS}

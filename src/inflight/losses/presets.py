"""Presets: recipes from papers and frameworks by name, as compositions of the pieces.

Symbols in formulas: pi trainer, mu behaviour (the engine's logprobs), old trainer at the start of the step, ref
reference; r = pi / old, rho = pi / mu, b = old / mu; s geometric mean and S product of a sequence's ratios; A
advantage; sg stops the gradient; g = -d loss / d log pi, before denominators. In the asynchronous run a batch is
trained on once, so there old is pi with its gradient stopped, and r is 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from inflight.errors import ConfigError
from inflight.losses.aggregation import Budget, Constant, PromptMean, SegmentMean, SegmentSum, Sum
from inflight.losses.corrections import Band, Opsm, SecondMoment, Truncate, TrustKl, TrustTv
from inflight.losses.gates import GeometricMean, PositiveUnclipped, PpoClip, Sapo, Score, Vespo
from inflight.losses.penalties import Distillation, Kl, SquaredLogRatio
from inflight.losses.pieces import Piece
from inflight.losses.policy import PolicyLoss

if TYPE_CHECKING:
    from inflight.rollouts.advantages import AdvantageEstimator


@dataclass(frozen=True, slots=True)
class Preset:
    """One recipe: a loss, and the advantages that it expects."""

    name: str
    loss: PolicyLoss
    advantages: AdvantageEstimator
    """Estimator for `inflight.rollouts.batch_advantages`; the loss itself takes advantages as they come."""
    formula: str
    """The loss of a token, in the symbols of this module."""
    gradient: str
    """g."""
    source: str
    note: str = ""

    @property
    def needs(self) -> str:
        """What it asks for beyond trainer and behaviour logprobs, in words."""
        needs: list[str] = sorted(self.loss.needs)
        if self.loss.between == "trainer/proximal" or any(
            "proximal" in getattr(correction, "between", "") for correction in self.loss.corrections
        ):
            needs.insert(0, "proximal_logprobs")
        return ", ".join(needs) or "nothing more"

    def describe(self) -> str:
        """Return all of it as a text of at most ten lines."""
        corrections = ", ".join(map(_written, self.loss.corrections)) or "none"
        penalties = ", ".join(map(_written, self.loss.penalties)) or "none"
        lines = [
            f"{self.name}: {self.source}",
            f"  loss         {self.formula}",
            f"  gradient     {self.gradient}",
            f"  gate         {_written(self.loss.gate)} of {self.loss.between} at level {self.loss.level}",
            f"  corrections  {corrections}",
            f"  penalties    {penalties}",
            f"  denominator  {_written(self.loss.aggregation)}",
            f"  advantages   {self.advantages}",
            f"  needs        {self.needs}",
        ]
        return "\n".join(lines + ([f"  note         {self.note}"] if self.note else []))


def preset(name: str) -> Preset:
    """Return the preset of a name. Raises `ConfigError` that lists the known ones."""
    if name not in PRESETS:
        raise ConfigError(f"unknown loss preset {name!r}; known: {', '.join(sorted(PRESETS))}")
    return PRESETS[name]


def _written(piece: Piece) -> str:
    """Return a piece as its kind with what is set."""
    fields = type(piece).model_fields
    settings = {key: value for key, value in piece if key != "kind"}
    inside = ", ".join(
        f"{key}={'unbounded' if value is None else value}"
        for key, value in settings.items()
        if value is not None or fields[key].default is not None
    )
    return f"{piece.kind}({inside})"  # type: ignore[attr-defined]


_REINFORCE = Score(low=1.0, high=1.0)
_UNCLIPPED = PpoClip(low=None, high=None)
_OLD: Literal["trainer/proximal"] = "trainer/proximal"
_CLIPPED = "-min(r A, clip(r, .8, 1.2) A)"
_CLIPPED_RHO = "-min(rho A, clip(rho, .8, 1.2) A)"
_INSIDE = "A r inside the clip, else 0"
_INSIDE_RHO = "A rho inside the clip, else 0"

_OF_REINFORCE = (
    Preset(
        "reinforce",
        PolicyLoss(gate=_REINFORCE),
        "mean",
        "-A log pi",
        "A",
        "Williams 1992; ROLL's vanilla, NeMo-RL's disable_ppo_ratio",
        "biased off-policy: for conventional runs",
    ),
    Preset(
        "rloo",
        PolicyLoss(gate=_REINFORCE, aggregation=SegmentSum()),
        "leave_one_out",
        "-A log pi",
        "A",
        "RLOO, arXiv 2402.14740",
        "the KL that its authors put into the reward is left to the reward",
    ),
    Preset(
        "pipelinerl_paper",
        PolicyLoss(gate=Score(high=5.0), aggregation=SegmentSum()),
        "leave_one_out",
        "-A sg(min(rho, 5)) log pi",
        "A min(rho, 5)",
        "PipelineRL, arXiv 2509.19128",
    ),
    Preset(
        "pipelinerl",
        PolicyLoss(gate=Score(high=1.02), aggregation=SegmentSum()),
        "leave_one_out",
        "-A sg(min(rho, 1.02)) log pi",
        "A min(rho, 1.02)",
        "ServiceNow/PipelineRL at 58d3934, with the eps_high of its configuration",
        "the paper says 5",
    ),
    Preset(
        "aipo",
        PolicyLoss(gate=Score(high=5.0), aggregation=SegmentSum()),
        "mean",
        "-A sg(min(rho, 5)) log pi",
        "A min(rho, 5)",
        "AIPO, LlamaRL, arXiv 2505.24034",
        "its cap is said to lie in 2 to 10",
    ),
    Preset(
        "importance_sampling",
        PolicyLoss(gate=_UNCLIPPED, aggregation=Sum()),
        "mean",
        "-A rho",
        "A rho",
        "the importance_sampling loss of the Tinker API",
        "unbounded weights; a sum, so the learning rate depends on the batch",
    ),
    Preset(
        "cispo",
        PolicyLoss(gate=Score(high=5.0)),
        "std",
        "-A sg(min(rho, 5)) log pi",
        "A min(rho, 5)",
        "CISPO with the bound that ScaleRL recommends (TRL: epsilon_high, absolute)",
    ),
    Preset(
        "minimax_m1",
        PolicyLoss(gate=Score(low=0.8, high=1.28), between=_OLD),
        "std",
        "-A sg(clamp(r, .8, 1.28)) log pi",
        "A clamp(r, .8, 1.28)",
        "CISPO, MiniMax-M1, arXiv 2506.13585, eq. 4, in the two-sided form of verl and slime",
        "the paper does not publish its bounds",
    ),
    Preset(
        "scalerl",
        PolicyLoss(gate=Score(high=5.0), aggregation=PromptMean()),
        "batch_std",
        "-A sg(min(rho, 5)) log pi",
        "A min(rho, 5)",
        "ScaleRL, arXiv 2510.13786: CISPO, a mean per prompt, advantages over the batch's standard deviation",
        "with an fp32 head and zero-variance groups left out, as here by default",
    ),
    Preset(
        "topr",
        PolicyLoss(gate=Score(high=1.0, positive_unweighted=True), level="segment_product", aggregation=SegmentSum()),
        "mean",
        "A > 0: -A log pi; else -A sg(min(S, 1)) log pi",
        "A, or A min(S, 1)",
        "TOPR, arXiv 2503.14286",
        "ROLL also has it on the ratios of tokens",
    ),
    Preset(
        "roll_tis",
        PolicyLoss(gate=Score(high=1.0), aggregation=SegmentMean(counted="after")),
        "mean",
        "-A sg(min(rho, 1)) log pi",
        "A min(rho, 1)",
        "ROLL's tis, at 8eb27cc",
    ),
    Preset(
        "glm5",
        PolicyLoss(gate=Score(low=0.8, high=1.2, outside="drop")),
        "mean",
        "-A sg(rho 1[.8 < rho < 1.2]) log pi",
        "A rho inside, else 0",
        "GLM-5, arXiv 2602.15763; SkyRL's rollout_is with its default bounds",
    ),
    Preset(
        "kimi_k15",
        PolicyLoss(
            gate=_REINFORCE, penalties=(SquaredLogRatio(coefficient=0.05, between=_OLD),), aggregation=SegmentSum()
        ),
        "mean",
        "-A log pi + (.1 / 2) (log r)^2",
        "A - .1 log r",
        "Kimi k1.5, arXiv 2501.12599; ROLL's kimi15",
    ),
    Preset(
        "kimi_k25",
        PolicyLoss(
            gate=_UNCLIPPED,
            corrections=(Band(between="trainer/behaviour", low=0.5, high=2.0),),
            penalties=(SquaredLogRatio(coefficient=1e-3),),
        ),
        "mean",
        "-A rho 1[.5 < rho < 2] + 1e-3 (log rho)^2",
        "A rho inside - 2e-3 log rho",
        "Kimi K2.5, arXiv 2602.02276",
        "the bounds are this library's: the report gives none",
    ),
)

_OF_PPO = (
    Preset(
        "grpo",
        PolicyLoss(gate=PpoClip(), aggregation=SegmentMean()),
        "std",
        _CLIPPED_RHO,
        _INSIDE_RHO,
        "GRPO, DeepSeekMath, arXiv 2402.03300, eq. 3",
        "without its KL term: set reference_kl",
    ),
    Preset(
        "dr_grpo",
        PolicyLoss(gate=PpoClip(), aggregation=Constant(length=1024)),
        "mean",
        _CLIPPED_RHO,
        _INSIDE_RHO,
        "Dr. GRPO, arXiv 2503.20783",
        "length is to be the longest completion that sampling allows",
    ),
    Preset(
        "bnpo",
        PolicyLoss(gate=PpoClip()),
        "std",
        _CLIPPED_RHO,
        _INSIDE_RHO,
        "TRL's bnpo with the tokens of the whole step as its denominator",
        "TRL counts those of one micro-batch",
    ),
    Preset(
        "dapo",
        PolicyLoss(gate=PpoClip(high=0.28)),
        "std",
        "-min(rho A, clip(rho, .8, 1.28) A)",
        _INSIDE_RHO,
        "DAPO, arXiv 2503.14476, eq. 8",
        "its soft penalty for long completions is inflight.rollouts.overlong_penalty",
    ),
    Preset(
        "dual_clip",
        PolicyLoss(gate=PpoClip(dual=3.0)),
        "std",
        "A > 0: as PPO; A < 0: at most -3 A",
        "A rho inside the clip and below 3 where A < 0",
        "dual-clip PPO, arXiv 1912.09729",
    ),
    Preset(
        "delta_ppo",
        PolicyLoss(gate=PpoClip(delta=4.0)),
        "std",
        "-min(min(rho, 4) A, clip(rho, .8, 1.2) A)",
        "A rho inside the clip and below 4",
        "two-sided clipping of INTELLECT-2, arXiv 2505.07291",
    ),
    Preset(
        "gspo",
        PolicyLoss(gate=PpoClip(low=3e-4, high=4e-4), level="segment_mean", aggregation=SegmentMean()),
        "std",
        "-min(s A, clip(s, 1 - 3e-4, 1 + 4e-4) A)",
        "A s / L inside the clip",
        "GSPO, arXiv 2507.18071, eq. 5",
    ),
    Preset(
        "gspo_token",
        PolicyLoss(gate=PpoClip(low=3e-4, high=4e-4), level="segment_mean_token", aggregation=SegmentMean()),
        "std",
        "-min(s_t A, clip(s_t) A), s_t = sg(s) pi / sg(pi)",
        "A s inside the clip",
        "GSPO-token, arXiv 2507.18071, eq. 13",
        "equal to gspo if all tokens of a sequence have one advantage",
    ),
    Preset(
        "luspo",
        PolicyLoss(gate=PpoClip(low=3e-4, high=4e-4), level="segment_mean", aggregation=SegmentSum()),
        "std",
        "-L min(s A, clip(s) A)",
        "A s inside the clip",
        "LUSPO, arXiv 2602.05261",
    ),
    Preset(
        "gmpo",
        PolicyLoss(gate=GeometricMean(), aggregation=SegmentMean()),
        "std",
        "-A exp((1/L) sum_t c(log rho_t)), c one-sided at .4",
        "A exp(...) / L where c is not at its bound",
        "GMPO, arXiv 2507.20673",
    ),
    Preset(
        "up_grpo",
        PolicyLoss(gate=PositiveUnclipped()),
        "std",
        "A > 0: -A log pi; A < 0: PPO with dual clip at 3",
        "A, or A rho inside the clip",
        "UP-GRPO, arXiv 2607.06987",
    ),
    Preset(
        "c3po",
        PolicyLoss(gate=PpoClip(), aggregation=Budget(tokens=409_600)),
        "std",
        _CLIPPED_RHO,
        _INSIDE_RHO,
        "C3PO, Ring-lite, arXiv 2506.14731",
        "the batch is to hold that many tokens: inflight.rollouts.within_budget",
    ),
)

_SOFT = (
    Preset(
        "sapo",
        PolicyLoss(gate=Sapo(), aggregation=SegmentMean()),
        "std",
        "-A (4 / tau) sigmoid(tau (rho - 1)), tau 1 and 1.05",
        "A rho sech^2(tau (rho - 1) / 2)",
        "SAPO, arXiv 2511.20347",
    ),
    Preset(
        "vespo",
        PolicyLoss(gate=Vespo(), level="segment_product"),
        "std",
        "-A sg(phi(S)) log pi, phi(S) = S^k exp(lambda (1 - S))",
        "A phi(S)",
        "VESPO, arXiv 2602.10693",
    ),
)

_MASKED = (
    Preset(
        "dppo_tv",
        PolicyLoss(gate=Score(high=20.0), corrections=(TrustTv(),)),
        "mean",
        "-A sg(min(rho, 20)) log pi unless pi left mu by .2 with A's sign",
        "A min(rho, 20), or 0",
        "DPPO-TV, arXiv 2602.04879, in the form of SkyRL and verl",
        "verl's configuration lowers the cap to 3",
    ),
    Preset(
        "dppo_kl",
        PolicyLoss(gate=Score(high=20.0), corrections=(TrustKl(),)),
        "mean",
        "-A sg(min(rho, 20)) log pi unless the coins' KL exceeds .05 with A's sign",
        "A min(rho, 20), or 0",
        "DPPO-KL, arXiv 2602.04879",
    ),
    Preset(
        "opsm",
        PolicyLoss(gate=PpoClip(), between=_OLD, corrections=(Opsm(bound=1e-4),)),
        "std",
        _CLIPPED + ", 0 for sequences with A < 0 and mean log(mu / pi) > 1e-4",
        "A r inside the clip, or 0",
        "off-policy sequence masking, DeepSeek-V3.2, arXiv 2512.02556; bound of slime",
    ),
    Preset(
        "deepseek_v32",
        PolicyLoss(
            gate=PpoClip(),
            corrections=(Opsm(bound=1e-4),),
            penalties=(Kl(coefficient=1e-3),),
            aggregation=SegmentMean(),
        ),
        "mean",
        _CLIPPED_RHO + " with opsm, + 1e-3 rho k3(ref)",
        "A rho inside, or 0; - 1e-3 rho log(pi / ref)",
        "DeepSeek-V3.2, arXiv 2512.02556, eqs. 7 to 9",
        "coefficient and bound are this library's",
    ),
    Preset(
        "m2po",
        PolicyLoss(gate=_UNCLIPPED, corrections=(SecondMoment(bound=0.04, between="trainer/behaviour"),)),
        "std",
        "-A rho, 0 for the largest (log rho)^2 until their mean is at most .04",
        "A rho, or 0",
        "M2PO, arXiv 2510.01161",
    ),
    Preset(
        "tis",
        PolicyLoss(gate=PpoClip(), between=_OLD, corrections=(Truncate(high=2.0),)),
        "std",
        "sg(min(b, 2)) x " + _CLIPPED,
        "min(b, 2) A r inside the clip",
        "truncated importance sampling (Yao et al. 2025), as in verl, slime and SkyRL",
    ),
    Preset(
        "icepop",
        PolicyLoss(gate=PpoClip(), between=_OLD, corrections=(Truncate(), Band(low=0.5, high=5.0))),
        "std",
        "b 1[.5 <= b <= 5] x " + _CLIPPED,
        "b A r inside the clip and the band",
        "IcePop, Ring-1T, arXiv 2510.18855",
    ),
    Preset(
        "mis",
        PolicyLoss(
            gate=PpoClip(),
            between=_OLD,
            corrections=(Truncate(level="segment_product"), Band(level="segment_product", high=2.0)),
        ),
        "std",
        "B 1[B <= 2] x " + _CLIPPED + ", B the product of a sequence's b",
        "B A r inside the clip and the band",
        "masked importance sampling of sequences, as in verl and SkyRL",
    ),
    Preset(
        "seq_mask_tis",
        PolicyLoss(
            gate=PpoClip(),
            between=_OLD,
            corrections=(Truncate(), Band(level="segment_mean", low=0.999, high=1.002)),
        ),
        "std",
        "b 1[.999 <= geometric mean of b <= 1.002] x " + _CLIPPED,
        "b A r inside the clip and the band",
        "NeMo-RL's and OpenRLHF's seq-mask-tis",
    ),
    Preset(
        "decoupled_ppo",
        PolicyLoss(gate=PpoClip(), between=_OLD, corrections=(Truncate(),)),
        "std",
        "b x " + _CLIPPED,
        "b A r inside the clip",
        "decoupled PPO, AReaL, arXiv 2505.24298, eq. 5",
    ),
    Preset(
        "a3po",
        PolicyLoss(gate=PpoClip(), between=_OLD, proximal="interpolated", corrections=(Truncate(),)),
        "std",
        "b x " + _CLIPPED + ", log old = log mu + (lag - 1) / lag (log pi - log mu)",
        "b A r inside the clip",
        "A-3PO, arXiv 2512.06547; AReaL's loglinear",
    ),
)

_OF_FRAMEWORKS = (
    Preset(
        "trl_default",
        PolicyLoss(
            gate=PpoClip(),
            between=_OLD,
            corrections=(Truncate(level="segment_product"), Band(level="segment_product", high=3.0)),
        ),
        "std",
        "B 1[B <= 3] x " + _CLIPPED,
        "B A r inside the clip and the band",
        "TRL's GRPOTrainer (loss_type dapo, sequence_mask, cap 3)",
        "where TRL adds a KL it weighs k3 by pi / old, and ratio_k3 by pi / mu",
    ),
    Preset(
        "trl_async_default",
        PolicyLoss(gate=PpoClip()),
        "std",
        _CLIPPED_RHO,
        _INSIDE_RHO,
        "TRL's AsyncGRPOTrainer",
        "TRL divides by the tokens of each micro-batch, and by the population's deviation",
    ),
    Preset(
        "verl_default",
        PolicyLoss(gate=PpoClip(dual=3.0), between=_OLD),
        "std",
        _CLIPPED + ", at most -3 A where A < 0",
        "A r inside the clip and below 3 where A < 0",
        "verl's vanilla policy loss with token-mean",
    ),
    Preset(
        "prime_default",
        PolicyLoss(gate=_UNCLIPPED, corrections=(TrustTv(),), penalties=(SquaredLogRatio(coefficient=1e-3),)),
        "mean",
        "-A rho unless pi left mu by .2 with A's sign, + 1e-3 (log rho)^2",
        "A rho, or 0; - 2e-3 log rho",
        "prime-rl's default loss, at 559b447",
        "prime-rl also takes tokens of no advantage out of its denominator",
    ),
    Preset(
        "prime_ipo",
        PolicyLoss(
            gate=_UNCLIPPED,
            corrections=(TrustTv(low=0.1, high=0.1, by_sign=False),),
            penalties=(SquaredLogRatio(coefficient=1e-3),),
        ),
        "mean",
        "-A rho 1[abs(pi - mu) <= .1] + 1e-3 (log rho)^2",
        "A rho, or 0; - 2e-3 log rho",
        "prime-rl's IPO loss, at 559b447",
    ),
    Preset(
        "areal_default",
        PolicyLoss(gate=PpoClip(), between=_OLD),
        "std",
        _CLIPPED,
        _INSIDE,
        "AReaL's actor loss without its decoupled option",
        "its KL of .1 is in the reward",
    ),
    Preset(
        "slime_default",
        PolicyLoss(gate=PpoClip(), between=_OLD, aggregation=SegmentMean()),
        "std",
        _CLIPPED,
        _INSIDE,
        "slime's policy loss, at 624b824",
    ),
    Preset(
        "skyrl_default",
        PolicyLoss(gate=PpoClip(), between=_OLD, penalties=(Kl(coefficient=1e-3, estimator="k3"),)),
        "std",
        _CLIPPED + " + 1e-3 k3(ref)",
        _INSIDE + "; - 1e-3 (1 - ref / pi)",
        "SkyRL's regular policy loss, at a956457",
        "the gradient of its k3 is that of the forward KL",
    ),
    Preset(
        "nemo_default",
        PolicyLoss(gate=PpoClip(), between=_OLD, penalties=(Kl(coefficient=0.01, estimator="ratio_k3"),)),
        "leave_one_out_std",
        _CLIPPED + " + .01 rho k3(ref)",
        _INSIDE + "; - .01 rho log(pi / ref)",
        "NeMo-RL's ClippedPGLossFn, at 7ea279a",
        "NeMo-RL writes the ratio of its KL as exp(x - sg x): the same on-policy",
    ),
    Preset(
        "openrlhf_default",
        PolicyLoss(gate=PpoClip(), between=_OLD),
        "std",
        _CLIPPED,
        _INSIDE,
        "OpenRLHF's PolicyLoss, at 3c3be62",
        "its advantages come from a critic unless group_norm is set, and its KL is in the reward",
    ),
    Preset(
        "roll_default",
        PolicyLoss(gate=_REINFORCE, aggregation=SegmentMean(counted="after")),
        "mean",
        "-A log pi",
        "A",
        "ROLL's agentic default (vanilla), at 8eb27cc",
    ),
    Preset(
        "torchtitan_default",
        PolicyLoss(gate=PpoClip(), non_finite="drop"),
        "mean",
        _CLIPPED_RHO,
        _INSIDE_RHO,
        "torchtitan's RL experiment, at b5bcd76",
        "tokens whose behaviour logprob is not finite are dropped, and counted nowhere",
    ),
    Preset(
        "fast_llm_default",
        PolicyLoss(gate=PpoClip()),
        "leave_one_out",
        _CLIPPED_RHO,
        _INSIDE_RHO,
        "Fast-LLM's GRPO, at 7d61a1b",
        "Fast-LLM takes advantages as given",
    ),
    Preset(
        "tinker_ppo",
        PolicyLoss(gate=PpoClip(), aggregation=Sum()),
        "mean",
        _CLIPPED_RHO,
        _INSIDE_RHO,
        "the ppo loss of the Tinker API",
        "a sum, so the learning rate depends on the batch",
    ),
    Preset(
        "opd",
        PolicyLoss(
            gate=_REINFORCE,
            penalties=(Distillation(coefficient=1.0, max_fall=0.2), SquaredLogRatio(coefficient=1e-3)),
        ),
        "zero",
        "-sg(log ref - log pi) rho unless pi fell by .2, + 1e-3 (log rho)^2",
        "(log ref - log pi) rho, or 0; - 2e-3 log rho",
        "on-policy distillation, prime-rl's reference-KL loss, at 559b447",
        "rewards play no part: the reference is the teacher",
    ),
)

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {it.name: it for it in (*_OF_REINFORCE, *_OF_PPO, *_SOFT, *_MASKED, *_OF_FRAMEWORKS)}
)
"""Presets by the name that configurations use."""

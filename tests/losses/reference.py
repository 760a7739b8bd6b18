"""The presets as plain loops over tokens in float64, written from their formulas and never from the library's code.

A step is a list of sequences, a sequence a list of tokens; only targets are tokens here. Logprobs are scalars with a
gradient, everything else is a Python float. Each function returns the loss of the whole step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch


@dataclass
class Token:
    """One target."""

    logp: torch.Tensor
    mu: float
    old: float
    ref: float
    advantage: float
    lag: int
    group: int
    teacher: float = math.nan
    top: Sequence[tuple[float, torch.Tensor]] = ()
    """Logprobs of the teacher's likeliest tokens: the teacher's and the trainer's."""

    @property
    def value(self) -> float:
        """The trainer logprob as a number."""
        return float(self.logp.detach())


Sequences = Sequence[Sequence[Token]]
Term = Callable[[Token], torch.Tensor]
ZERO = torch.zeros((), dtype=torch.float64)


def tokens_of(step: Sequences) -> list[Token]:
    return [token for sequence in step for token in sequence]


def total(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([ZERO, *terms]).sum()


def token_mean(step: Sequences, term: Term) -> torch.Tensor:
    return total([term(token) for token in tokens_of(step)]) / len(tokens_of(step))


def segment_mean(step: Sequences, term: Term) -> torch.Tensor:
    """1/G sum_i 1/|o_i| sum_t, as in GRPO's eq. 3: a completion without a target is one of the G, and adds nothing."""
    parts = [total([term(token) for token in sequence]) / len(sequence) for sequence in step if sequence]
    return total(parts) / len(step)


def segment_sum(step: Sequences, term: Term) -> torch.Tensor:
    """1/G sum_i sum_t, as in Dr. GRPO but for its constant length."""
    return total([term(token) for token in tokens_of(step)]) / len(step)


def valid_segment_mean(step: Sequences, term: Term) -> torch.Tensor:
    """The mean over sequences with a target, as ROLL's agg_loss has it."""
    return segment_mean([sequence for sequence in step if sequence], term)


def prompt_mean(step: Sequences, term: Term) -> torch.Tensor:
    groups = sorted({token.group for token in tokens_of(step)})
    parts = []
    for group in groups:
        own = [token for token in tokens_of(step) if token.group == group]
        parts.append(total([term(token) for token in own]) / len(own))
    return total(parts) / len(parts)


def plain_sum(step: Sequences, term: Term) -> torch.Tensor:
    return total([term(token) for token in tokens_of(step)])


def clamped(number: float, low: float, high: float) -> float:
    return min(max(number, low), high)


# ---- per-token terms


def score(weight: Callable[[Token], float]) -> Term:
    return lambda token: -weight(token) * token.advantage * token.logp


def rho(token: Token) -> float:
    return math.exp(token.value - token.mu)


def r(token: Token) -> float:
    return math.exp(token.value - token.old)


def b(token: Token) -> float:
    return math.exp(token.old - token.mu)


def live_ratio(token: Token, base: str) -> torch.Tensor:
    return torch.exp(token.logp - (token.mu if base == "mu" else token.old))


def ppo(base: str, low: float = 0.2, high: float = 0.2, dual: float | None = None, delta: float | None = None) -> Term:
    def term(token: Token) -> torch.Tensor:
        ratio = live_ratio(token, base)
        first = ratio if delta is None else torch.clamp(ratio, max=delta)
        surrogate = torch.minimum(first * token.advantage, torch.clamp(ratio, 1 - low, 1 + high) * token.advantage)
        if dual is not None and token.advantage < 0:
            surrogate = torch.maximum(surrogate, torch.tensor(dual * token.advantage, dtype=torch.float64))
        return -surrogate

    return term


def linear(token: Token) -> torch.Tensor:
    return -live_ratio(token, "mu") * token.advantage


def only(keep: Callable[[Token], bool], term: Term) -> Term:
    return lambda token: term(token) if keep(token) else ZERO


def times(weight: Callable[[Token], float], term: Term) -> Term:
    return lambda token: weight(token) * term(token)


def plus(*terms: Term) -> Term:
    return lambda token: total([term(token) for term in terms])


def squared(coefficient: float, base: str = "mu") -> Term:
    return lambda token: coefficient * (token.logp - (token.mu if base == "mu" else token.old)) ** 2


def within_tv(bound: float, *, by_sign: bool) -> Callable[[Token], bool]:
    def keep(token: Token) -> bool:
        change = math.exp(token.value) - math.exp(token.mu)
        if not by_sign:
            return abs(change) <= bound
        return not (token.advantage > 0 and change > bound) and not (token.advantage < 0 and -change > bound)

    return keep


def within_kl(bound: float) -> Callable[[Token], bool]:
    def keep(token: Token) -> bool:
        pi, mu = math.exp(token.value), math.exp(token.mu)
        kl = mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))
        onwards = (token.advantage > 0 and pi > mu) or (token.advantage < 0 and pi < mu)
        return not (onwards and kl > bound)

    return keep


# ---- sequences


def sequence_of(step: Sequences, token: Token) -> Sequence[Token]:
    return next(sequence for sequence in step if any(other is token for other in sequence))


def geometric_mean(sequence: Sequence[Token], base: str) -> torch.Tensor:
    logs = [token.logp - (token.mu if base == "mu" else token.old) for token in sequence]
    return torch.exp(total(logs) / len(logs))


def product_of_b(sequence: Sequence[Token]) -> float:
    return math.exp(sum(token.old - token.mu for token in sequence))


def mean_of_b(sequence: Sequence[Token]) -> float:
    return math.exp(sum(token.old - token.mu for token in sequence) / len(sequence))


def clip_of(ratio: torch.Tensor, advantage: float, low: float, high: float) -> torch.Tensor:
    return -torch.minimum(ratio * advantage, torch.clamp(ratio, 1 - low, 1 + high) * advantage)


def gspo(step: Sequences) -> Term:
    return lambda token: clip_of(geometric_mean(sequence_of(step, token), "mu"), token.advantage, 3e-4, 4e-4)


def gspo_token(step: Sequences) -> Term:
    def term(token: Token) -> torch.Tensor:
        mean = float(geometric_mean(sequence_of(step, token), "mu").detach())
        return clip_of(mean * torch.exp(token.logp - token.value), token.advantage, 3e-4, 4e-4)

    return term


def gmpo(step: Sequences) -> Term:
    def term(token: Token) -> torch.Tensor:
        logs = []
        for other in sequence_of(step, token):
            log = other.logp - other.mu
            if other.advantage > 0:
                log = torch.clamp(log, max=0.4)
            elif other.advantage < 0:
                log = torch.clamp(log, min=-0.4)
            logs.append(log)
        return -token.advantage * torch.exp(total(logs) / len(logs))

    return term


def vespo(step: Sequences) -> Term:
    def weight(token: Token) -> float:
        k, lam = (2.0, 3.0) if token.advantage >= 0 else (3.0, 2.0)
        product = math.exp(sum(other.value - other.mu for other in sequence_of(step, token)))
        return product**k * math.exp(lam * (1 - product))

    return score(weight)


def topr(step: Sequences) -> Term:
    def weight(token: Token) -> float:
        product = math.exp(sum(other.value - other.mu for other in sequence_of(step, token)))
        return 1.0 if token.advantage > 0 else min(product, 1.0)

    return score(weight)


def not_drifted(step: Sequences, bound: float) -> Callable[[Token], bool]:
    def keep(token: Token) -> bool:
        sequence = sequence_of(step, token)
        drift = sum(other.mu - other.value for other in sequence) / len(sequence)
        return not (token.advantage < 0 and drift > bound)

    return keep


def small_moments(step: Sequences, bound: float) -> Callable[[Token], bool]:
    kept = sorted(tokens_of(step), key=lambda token: (token.value - token.mu) ** 2)
    while kept and sum((token.value - token.mu) ** 2 for token in kept) / len(kept) > bound:
        kept.pop()
    return lambda token: any(token is other for other in kept)


def sapo(token: Token) -> torch.Tensor:
    tau = 1.0 if token.advantage > 0 else 1.05
    return -token.advantage * 4 / tau * torch.sigmoid(tau * (live_ratio(token, "mu") - 1))


def positive_unclipped(token: Token) -> torch.Tensor:
    return -token.advantage * token.logp if token.advantage > 0 else ppo("mu", high=math.inf, dual=3.0)(token)


def taught(advantage: Callable[[Token], float], term: Term) -> Term:
    """A term with an advantage that the teacher gives."""
    return lambda token: term(replace(token, advantage=advantage(token)))


def teacher_kl(token: Token, *, renormalised: bool) -> torch.Tensor:
    mass = sum(math.exp(t) for t, _ in token.top) if renormalised else 1.0
    terms = [math.exp(t) / mass * (t - math.log(mass) - student) for t, student in token.top]
    return total(terms) if renormalised else torch.clamp(total(terms), min=0.0)


def k3(token: Token) -> torch.Tensor:
    d = token.logp - token.ref
    return torch.exp(-d) + d - 1


def a3po(token: Token) -> torch.Tensor:
    share = (token.lag - 1) / token.lag if token.lag > 0 else 0.0
    old = token.mu + share * (token.value - token.mu)
    ratio = torch.exp(token.logp - old)
    return math.exp(old - token.mu) * clip_of(ratio, token.advantage, 0.2, 0.2)


def masked_products(step: Sequences, high: float) -> Term:
    def weight(token: Token) -> float:
        product = product_of_b(sequence_of(step, token))
        return product if product <= high else 0.0

    return times(weight, ppo("old"))


def seq_mask_tis(step: Sequences) -> Term:
    def weight(token: Token) -> float:
        return b(token) if 0.999 <= mean_of_b(sequence_of(step, token)) <= 1.002 else 0.0

    return times(weight, ppo("old"))


LOSSES: dict[str, Callable[[Sequences], torch.Tensor]] = {
    "reinforce": lambda s: token_mean(s, score(lambda t: 1.0)),
    "rloo": lambda s: segment_sum(s, score(lambda t: 1.0)),
    "pipelinerl_paper": lambda s: segment_sum(s, score(lambda t: min(rho(t), 5.0))),
    "pipelinerl": lambda s: segment_sum(s, score(lambda t: min(rho(t), 1.02))),
    "aipo": lambda s: segment_sum(s, score(lambda t: min(rho(t), 5.0))),
    "importance_sampling": lambda s: plain_sum(s, linear),
    "cispo": lambda s: token_mean(s, score(lambda t: min(rho(t), 5.0))),
    "minimax_m1": lambda s: token_mean(s, score(lambda t: clamped(r(t), 0.8, 1.28))),
    "scalerl": lambda s: prompt_mean(s, score(lambda t: min(rho(t), 5.0))),
    "topr": lambda s: segment_sum(s, topr(s)),
    "roll_tis": lambda s: valid_segment_mean(s, score(lambda t: min(rho(t), 1.0))),
    "glm5": lambda s: token_mean(s, score(lambda t: rho(t) if 0.8 <= rho(t) <= 1.2 else 0.0)),
    "kimi_k15": lambda s: segment_sum(s, plus(score(lambda t: 1.0), squared(0.05, "old"))),
    "kimi_k25": lambda s: token_mean(s, plus(only(lambda t: 0.5 <= rho(t) <= 2.0, linear), squared(1e-3))),
    "grpo": lambda s: segment_mean(s, ppo("mu")),
    "dr_grpo": lambda s: segment_sum(s, ppo("mu")) / 1024,
    "bnpo": lambda s: token_mean(s, ppo("mu")),
    "dapo": lambda s: token_mean(s, ppo("mu", high=0.28)),
    "dual_clip": lambda s: token_mean(s, ppo("mu", dual=3.0)),
    "delta_ppo": lambda s: token_mean(s, ppo("mu", delta=4.0)),
    "gspo": lambda s: segment_mean(s, gspo(s)),
    "gspo_token": lambda s: segment_mean(s, gspo_token(s)),
    "luspo": lambda s: segment_sum(s, gspo(s)),
    "gmpo": lambda s: segment_mean(s, gmpo(s)),
    "up_grpo": lambda s: token_mean(s, positive_unclipped),
    "c3po": lambda s: plain_sum(s, ppo("mu")) / 409_600,
    "sapo": lambda s: segment_mean(s, sapo),
    "vespo": lambda s: token_mean(s, vespo(s)),
    "dppo_tv": lambda s: token_mean(s, only(within_tv(0.2, by_sign=True), score(lambda t: min(rho(t), 20.0)))),
    "dppo_kl": lambda s: token_mean(s, only(within_kl(0.05), score(lambda t: min(rho(t), 20.0)))),
    "opsm": lambda s: token_mean(s, only(not_drifted(s, 1e-4), ppo("old"))),
    "deepseek_v32": lambda s: segment_mean(
        s, plus(only(not_drifted(s, 1e-4), ppo("mu")), lambda t: 1e-3 * live_ratio(t, "mu") * k3(t))
    ),
    "m2po": lambda s: token_mean(s, only(small_moments(s, 0.04), linear)),
    "tis": lambda s: token_mean(s, times(lambda t: min(b(t), 2.0), ppo("old"))),
    "icepop": lambda s: token_mean(s, times(lambda t: b(t) if 0.5 <= b(t) <= 5.0 else 0.0, ppo("old"))),
    "mis": lambda s: token_mean(s, masked_products(s, 2.0)),
    "seq_mask_tis": lambda s: token_mean(s, seq_mask_tis(s)),
    "decoupled_ppo": lambda s: token_mean(s, times(b, ppo("old"))),
    "a3po": lambda s: token_mean(s, a3po),
    "trl_default": lambda s: token_mean(s, masked_products(s, 3.0)),
    "trl_async_default": lambda s: token_mean(s, ppo("mu")),
    "verl_default": lambda s: token_mean(s, ppo("old", dual=3.0)),
    "prime_default": lambda s: token_mean(s, plus(only(within_tv(0.2, by_sign=True), linear), squared(1e-3))),
    "prime_ipo": lambda s: token_mean(s, plus(only(within_tv(0.1, by_sign=False), linear), squared(1e-3))),
    "areal_default": lambda s: token_mean(s, ppo("old")),
    "slime_default": lambda s: segment_mean(s, ppo("old")),
    "skyrl_default": lambda s: token_mean(s, plus(ppo("old"), lambda t: 1e-3 * k3(t))),
    "nemo_default": lambda s: token_mean(s, plus(ppo("old"), lambda t: 0.01 * live_ratio(t, "mu") * k3(t))),
    "openrlhf_default": lambda s: token_mean(s, ppo("old")),
    "roll_default": lambda s: valid_segment_mean(s, score(lambda t: 1.0)),
    "torchtitan_default": lambda s: token_mean(s, ppo("mu")),
    "fast_llm_default": lambda s: token_mean(s, ppo("mu")),
    "tinker_ppo": lambda s: plain_sum(s, ppo("mu")),
    "opd": lambda s: token_mean(
        s,
        plus(
            only(
                lambda t: math.exp(t.value) - math.exp(t.mu) >= -0.2,
                taught(lambda t: t.advantage + t.teacher - t.value, linear),
            ),
            squared(1e-3),
        ),
    ),
    "tinker_opd": lambda s: plain_sum(s, taught(lambda t: t.advantage + t.teacher - t.mu, linear)),
    "slime_opd": lambda s: segment_mean(s, taught(lambda t: t.advantage + t.teacher - t.mu, ppo("old"))),
    "mopd": lambda s: token_mean(
        s,
        times(
            lambda t: b(t) if 0.5 <= b(t) <= 5.0 else 0.0,
            taught(lambda t: t.advantage + t.teacher - t.old, score(lambda t: 1.0)),
        ),
    ),
    "verl_forward_kl": lambda s: token_mean(s, plus(score(lambda t: 1.0), lambda t: teacher_kl(t, renormalised=False))),
    "tinker_top_k": lambda s: plain_sum(s, plus(score(lambda t: 1.0), lambda t: teacher_kl(t, renormalised=True))),
}
"""The loss of a step by the name of the preset."""

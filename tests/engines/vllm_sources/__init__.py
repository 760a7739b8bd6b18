"""What `inflight_vllm` assumes of vLLM, as a list, and which of it the sources of a release lack.

Nothing of vLLM is executed. That an assumption holds means that a name, parameter or field is there, not that it does
what it did.
"""

from __future__ import annotations

from collections import Counter

from tests.engines.vllm_sources.assumption import Assumption
from tests.engines.vllm_sources.of_http import http_assumptions
from tests.engines.vllm_sources.of_python import python_assumptions
from tests.engines.vllm_sources.of_starting import starting_assumptions
from tests.engines.vllm_sources.reading import Sources

__all__ = ["Assumption", "Sources", "assumptions", "counts", "lacking"]


def assumptions() -> list[Assumption]:
    """Return each assumption once. They depend on the adapter alone."""
    found = [*python_assumptions(), *http_assumptions(), *starting_assumptions()]
    return list({(it.kind, it.name): it for it in found}.values())


def counts() -> Counter[str]:
    """Return the number of assumptions of each kind."""
    return Counter(it.kind for it in assumptions())


def lacking(sources: Sources) -> list[tuple[Assumption, str]]:
    """Return the assumptions that do not hold in these sources, with the reasons."""
    pairs = [(it, it.problem(sources)) for it in assumptions()]
    return [(it, problem) for it, problem in pairs if problem is not None]

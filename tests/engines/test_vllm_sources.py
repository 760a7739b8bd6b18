"""The checker of vLLM's sources: what it derives from the adapter, and how it reads sources. No vLLM is needed.

tests/real_engines/test_vllm_sources.py checks real releases, and changes of them.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from inflight_vllm import flags, requests
from tests.engines.vllm_sources import Sources, assumptions, counts, lacking
from tests.engines.vllm_sources.of_http import READ, READ_LITERALLY
from tests.engines.vllm_sources.of_python import KERNELS
from tests.engines.vllm_sources.reading import FunctionNode, call_problem, parameters_of
from tests.engines.vllm_sources.uses import ADAPTER, RECEIVERS, adapter_modules, asked_routes

ROOT = Path(__file__).parents[2]
OPTIONAL_ROUTES = {flags._ABORT_ROUTE, flags._CHAT_ROUTE, "/detokenize", "/health"}
OWN_KEYS = {
    *("protocol", "transports", "phase", "problem", "group", "kept", "status"),  # of the plug-in's status
    *("transport", "weight"),  # of a `TransportSpec`, and of a layer's parameters
    *("sampling_params", "n"),  # of a body that the adapter has made
    *("error", "type"),  # of vLLM's errors; `REFUSED_FOR_NOW` is an assumption of its own
    *("image", "model"),  # a modality, and a field that is stated as a part of a path
}


def sources(tmp_path: Path, **modules: str) -> Sources:
    """Write a package; ``__`` in a name stands for a dot."""
    for name, text in {"vllm": "", **modules}.items():
        path = tmp_path.joinpath(*name.split("__"))
        path = path / "__init__.py" if name == "vllm" else path.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Sources(tmp_path)


# ------------------------------------------------------------------------------------------------------- the adapter


def test_every_import_of_vllm_in_the_adapter_is_an_assumption() -> None:
    """Counted in another way: by lines of text, which a formatter has made."""
    names = {it.name for it in assumptions() if it.kind == "import"}
    for path in ADAPTER.glob("*.py"):
        for module, imported in re.findall(r"^ *from (vllm[\w.]*) import \(?([^()]*?)(?:\)|$)", path.read_text(), re.M):
            for name in re.findall(r"\w+", imported):
                assert f"{module}.{name}" in names, f"{path.name}: {module}.{name}"
        assert not re.search(r"^ *import vllm", path.read_text(), re.M), "the checker reads `from vllm...` only"


def test_every_needed_route_is_asked_for_and_every_route_that_is_asked_for_is_known() -> None:
    asked = {it.path for it in asked_routes()}
    assert asked == {*flags.NEEDED_ROUTES, *OPTIONAL_ROUTES}
    assert {it.path for it in asked_routes() if it.body is None} == {requests.GENERATE}


def test_every_key_that_the_adapter_reads_of_an_answer_is_stated() -> None:
    read = {key for it in adapter_modules() for key in it.keys_read()}
    paths = [field for _, fields in READ.values() for field in fields]
    stated = {word for path in paths for word in path.split(".")} | {
        it for keys in READ_LITERALLY.values() for it in keys
    }
    assert read - OWN_KEYS <= stated, f"state where vLLM has them: {read - OWN_KEYS - stated}"
    assert read >= OWN_KEYS, f"no longer read: {OWN_KEYS - read}"


def test_every_receiver_that_is_stated_is_used() -> None:
    modules = {it.name: it for it in adapter_modules()}
    for name, receivers in RECEIVERS.items():
        texts = {ast.unparse(it) for it in ast.walk(modules[name].tree) if isinstance(it, ast.expr)}
        assert receivers.keys() <= texts, receivers.keys() - texts
        assert set(receivers.values()) <= {it.owner for it in modules[name].accesses()}


def test_every_kernel_that_the_adapter_replaces_is_stated() -> None:
    (module,) = (it for it in adapter_modules() if it.name == "verification")
    named = {it.rpartition(".")[2] for it in module.named_in_strings()}
    assert {it for it in named if it.endswith("_kernel")} == KERNELS.keys()


def test_the_numbers_in_the_docs_are_those_of_the_checker() -> None:
    page = (ROOT / "docs" / "evidence-engines.md").read_text()
    section = page.partition("## vLLM 0.33.0\n")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| ([a-z ]+) \| (\d+) \|", section, re.MULTILINE))
    assert {kind: int(number) for kind, number in rows.items()} == dict(counts())
    assert f"{counts().total()} assumptions" in section


# ------------------------------------------------------------------------------------------------------- the sources


def test_names_are_followed_through_imports_and_those_for_type_checkers_do_not_count(tmp_path: Path) -> None:
    found = sources(
        tmp_path,
        vllm__a="from .b import made as renamed\nfrom vllm import b\nfrom torch import nn\n",
        vllm__b="if TYPE_CHECKING:\n    from vllm.c import typed\n"
        "try:\n    from vllm.c import made\nexcept ImportError:\n    made = 1\n",
        vllm__c="def made(): ...\nclass typed: ...\n",
    )
    for name in ("vllm.a.renamed", "vllm.a.b.made", "vllm.b.made"):
        definition = found.find(name)
        assert definition is not None and definition.as_function, name
    for name in ("vllm.a.made", "vllm.b.typed", "vllm.d", "vllm.c.made.x", "vllm.a.nn"):
        assert found.find(name) is None, name


def test_a_module_that_imports_itself_ends_the_search(tmp_path: Path) -> None:
    found = sources(tmp_path, vllm__a="from vllm.b import x\n", vllm__b="from vllm.a import x\n")
    assert found.find("vllm.a.x") is None


def test_members_are_inherited_and_a_method_hides_that_of_its_base(tmp_path: Path) -> None:
    base = "class Base:\n    y: int\n    def f(self, a): self.z = a\n    def g(self): ...\n"
    found = sources(
        tmp_path, vllm__b=base, vllm__a="from vllm.b import Base\nclass A(Base[int]):\n    def f(self, b): ...\n"
    )
    definition = found.find("vllm.a.A")
    assert definition is not None
    members = found.members(definition)
    assert members.keys() == {"f", "g", "y", "z"}
    assert isinstance(members["f"].node, FunctionNode) and parameters_of(members["f"].node) == ["self", "b"]
    assert found.fields(definition).keys() == {"y"}


def test_literals_and_classes_are_found_behind_aliases(tmp_path: Path) -> None:
    text = 'One = Literal["a"]\nAll = Literal[One, "b"] | None\nclass C: ...\n'
    text += 'class F:\n    x: "Annotated[All, 1]"\n    y: dict[str, list[C]]\n'
    found = sources(tmp_path, vllm__a=text)
    definition = found.find("vllm.a.F")
    assert definition is not None
    x, y = (found.fields(definition)[name].node for name in "xy")
    assert isinstance(x, ast.AnnAssign) and isinstance(y, ast.AnnAssign)
    assert found.literals_in("vllm.a", x.annotation) == {"a", "b"}
    assert [it.as_class.name for it in found.classes_in("vllm.a", y.annotation) if it.as_class] == ["C"]


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        ("f(1)", None),
        ("f(1, 2, k=3)", None),
        ("f(*x)", None),
        ("f()", "requires a"),
        ("f(1, 2, 3)", "takes 2 positional arguments, not 3"),
        ("f(1, c=2)", "has no parameter c"),
        ("f(1, a=2)", "gets a twice"),
    ],
)
def test_calls_are_compared_with_parameters(call: str, problem: str | None) -> None:
    (function,) = ast.parse("def f(self, a, b=1, *, k=2): ...").body
    (statement,) = ast.parse(call).body
    assert isinstance(function, ast.FunctionDef) and isinstance(statement, ast.Expr)
    assert isinstance(statement.value, ast.Call)
    assert call_problem(function, statement.value, is_bound=True) == problem


def test_routes_are_read_from_decorators_and_calls(tmp_path: Path) -> None:
    text = (
        '@router.get("/a")\nasync def a(): ...\nasync def b(): ...\nrouter.add_api_route("/b", b, methods=["POST"])\n'
    )
    found = sources(tmp_path, vllm__entrypoints__x=text)
    assert found.routes.keys() == {("GET", "/a"), ("POST", "/b")}


def test_an_empty_release_lacks_nearly_everything(tmp_path: Path) -> None:
    """All but that the names which the adapter adds are free, and a refusal that the release does not have."""
    lacks = {it.name for it, _ in lacking(sources(tmp_path))}
    held = {it.name for it in assumptions()} - lacks
    assert all(name.endswith(("is free", "refused for now")) for name in held), held


def test_a_folder_without_vllm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not contain the sources of vLLM"):
        Sources(tmp_path)

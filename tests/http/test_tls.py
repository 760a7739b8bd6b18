"""HTTPS, client certificates, and the token of generation, on real servers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import trustme

from inflight import GenerateRequest, SamplingParams
from inflight.cli import main
from inflight.errors import ConfigError, UnauthorizedError, UnreachableError
from inflight.http import tls
from inflight.http.client import HttpEndpoint
from inflight.http.listening import InLoopServer, bind
from inflight.http.tls import client_tls, server_tls
from inflight.run.servers.joining import JoinServer
from tests.servers import TOKEN, ServerProcess

REQUEST = GenerateRequest(request_id="a", prompt_token_ids=(1, 2), sampling=SamplingParams(max_tokens=2))
NUM_SILENT = 64


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """PEM files of a CA, of the server that it signed, and of its client."""
    directory, authority = tmp_path_factory.mktemp("tls"), trustme.CA()
    found = {"ca": directory / "ca.pem"}
    authority.cert_pem.write_to_path(str(found["ca"]))
    for name in ("127.0.0.1", "client.example"):
        made = authority.issue_cert(name)
        found[name] = directory / f"{name}.pem"
        found[f"{name} key"] = directory / f"{name}.key"
        made.cert_chain_pems[0].write_to_path(str(found[name]))
        made.private_key_pem.write_to_path(str(found[f"{name} key"]))
    return found


@pytest.fixture
def trusting(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Lets the clients of this process trust the CA, and present the certificate if asked."""

    def trust(*, ca: bool = True, certificate: bool = False) -> None:
        for variable, name, is_set in (
            (tls.CA_VARIABLE, "ca", ca),
            (tls.CERTIFICATE_VARIABLE, "client.example", certificate),
            (tls.KEY_VARIABLE, "client.example key", certificate),
        ):
            monkeypatch.setenv(variable, str(files[name]) if is_set else "")
        client_tls.cache_clear()

    yield trust
    client_tls.cache_clear()


@contextlib.contextmanager
def serving(model: Path, directory: Path, *arguments: object, **environment: str) -> Iterator[str]:
    server = ServerProcess(model, directory, *map(str, arguments), environment=environment)
    try:
        server.wait_until_ready()
        yield server.url
    finally:
        server.end()


def called(url: str, token: str | None, operation: str = "generate") -> None:
    """Call a route of generation, or of control, with a token."""

    async def call() -> None:
        async with contextlib.aclosing(HttpEndpoint(url, token=token)) as endpoint:
            if operation == "generate":
                await endpoint.generate(REQUEST)
            else:
                await endpoint.release_memory()

    asyncio.run(call())


def test_a_server_with_a_certificate_is_called_over_https_by_those_who_trust_it(
    model_dir: Path, tmp_path: Path, files: dict[str, Path], trusting: Callable[..., None]
) -> None:
    with serving(
        model_dir, tmp_path, "--tls-certificate", files["127.0.0.1"], "--tls-key", files["127.0.0.1 key"]
    ) as url:
        assert url.startswith("https://127.0.0.1:")
        trusting()
        called(url, TOKEN)
        trusting(ca=False)
        with pytest.raises(UnreachableError, match="certificate verify failed"):
            called(url, TOKEN)
        with pytest.raises(UnreachableError):
            called(url.replace("https", "http"), TOKEN)
        trusting()
        with pytest.raises(UnreachableError, match="localhost"):
            called(url.replace("127.0.0.1", "localhost"), TOKEN)


def test_a_server_that_asks_for_client_certificates_answers_nobody_else(
    model_dir: Path, tmp_path: Path, files: dict[str, Path], trusting: Callable[..., None]
) -> None:
    arguments = ("--tls-certificate", files["127.0.0.1"], "--tls-key", files["127.0.0.1 key"])
    with serving(model_dir, tmp_path, *arguments, "--tls-client-ca", files["ca"]) as url:
        trusting()
        with pytest.raises(UnreachableError):
            called(url, TOKEN)
        trusting(certificate=True)
        called(url, TOKEN)


def test_silent_handshakes_keep_nobody_out(
    files: dict[str, Path], trusting: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inflight.http.connections.max_connections", lambda: NUM_SILENT // 2)

    async def app(scope: object, receive: object, send: Callable[..., object]) -> None:
        for message in ({"type": "http.response.start", "status": 200, "headers": []}, {"type": "http.response.body"}):
            await send(message)  # type: ignore[misc]

    async def run() -> list[bytes]:
        context = server_tls(files["127.0.0.1"], files["127.0.0.1 key"], None)
        listener = bind("127.0.0.1", 0)
        server = InLoopServer(app, listener, context)
        url = await server.started()
        silent = [await asyncio.open_connection(*listener.getsockname()) for _ in range(NUM_SILENT)]
        async with httpx.AsyncClient(verify=client_tls()) as client, asyncio.timeout(5):  # half a handshake's
            assert (await client.get(url)).status_code == 200
            closed = [await reader.read() for reader, _ in silent[: NUM_SILENT - NUM_SILENT // 8]]
        for _, writer in silent:
            writer.close()
        await server.aclose()
        return closed

    trusting()
    assert set(asyncio.run(run())) == {b""}


@pytest.mark.parametrize(
    ("client", "server", "advice"),
    [
        ("a stranger", "https://127.0.0.1", r"\$INFLIGHT_TLS_CA names a PEM file"),
        ("trusting", "https://localhost", "the certificate is valid for the host in the URL"),
        ("trusting", "http://127.0.0.1", "write https:// if it has a TLS certificate"),
        ("trusting", "https://127.0.0.1 without a certificate", "otherwise, write http://"),
        ("trusting", "https://127.0.0.1 for clients with a certificate", "INFLIGHT_TLS_CLIENT_CERTIFICATE names"),
    ],
)
def test_a_call_that_fails_because_of_tls_says_what_to_change(
    files: dict[str, Path], trusting: Callable[..., None], client: str, server: str, advice: str
) -> None:
    async def app(scope: object, receive: object, send: object) -> None:
        raise AssertionError("no request arrives")

    async def run() -> None:
        client_ca = files["ca"] if "for clients" in server else None
        context = server_tls(files["127.0.0.1"], files["127.0.0.1 key"], client_ca)
        listener = bind("127.0.0.1", 0)
        listening = InLoopServer(app, listener, None if "without" in server else context)
        await listening.started()
        url = f"{server.split()[0]}:{listener.getsockname()[1]}"
        async with contextlib.aclosing(HttpEndpoint(url)) as endpoint:
            with pytest.raises(UnreachableError, match=advice):
                await endpoint.capabilities()
        await listening.aclose()

    trusting(ca=client == "trusting")
    asyncio.run(run())


def test_servers_join_over_https(files: dict[str, Path], trusting: Callable[..., None]) -> None:
    context = server_tls(files["127.0.0.1"], files["127.0.0.1 key"], None)

    async def run() -> list[str]:
        desk = JoinServer("127.0.0.1:0", "right", "run", tls=context)
        url = await desk.open()
        async with httpx.AsyncClient(verify=client_tls(), headers={"authorization": "Bearer right"}) as client:
            await client.post(f"{url}/v1/servers", json={"url": "https://10.0.0.7:8000"})
        await desk.close()
        return list(desk.listed())

    trusting()
    assert asyncio.run(run()) == ["https://10.0.0.7:8000"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--tls-certificate", "ca"), "--tls-certificate and --tls-key require each other"),
        (("--tls-client-ca", "ca"), "--tls-client-ca requires both"),
        (("--tls-certificate", "nowhere", "--tls-key", "ca"), "cannot be used: No such file or directory"),
        (("--tls-certificate", "127.0.0.1", "--tls-key", "client.example key"), "KEY_VALUES_MISMATCH"),
        (
            ("--tls-certificate", "127.0.0.1", "--tls-key", "127.0.0.1 key", "--tls-client-ca", "127.0.0.1 key"),
            "it is a PEM file",
        ),
    ],
)
@pytest.mark.parametrize("command", ["serve", "watch"])
def test_files_of_tls_that_cannot_be_used_are_named(
    model_dir: Path,
    tmp_path: Path,
    files: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    command: str,
    arguments: tuple[str, ...],
    says: str,
) -> None:
    words = [word if word.startswith("--") else str(files.get(word, tmp_path / word)) for word in arguments]
    where = model_dir if command == "serve" else tmp_path
    assert main([command, str(where), "--port", "0", *words]) == 1
    assert says in capsys.readouterr().err


def test_a_client_whose_file_cannot_be_used_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(tls.CA_VARIABLE, str(tmp_path / "nowhere.pem"))
    client_tls.cache_clear()
    with pytest.raises(ConfigError, match=r"nowhere\.pem"):
        called("https://127.0.0.1:1", TOKEN)


# ---------------------------------------------------------------------------------------------------------------
# The token of generation


def test_a_server_with_a_generation_token_asks_for_it(model_dir: Path, tmp_path: Path) -> None:
    with serving(model_dir, tmp_path, INFLIGHT_GENERATION_TOKEN="generate-only") as url:
        for token in ("generate-only", TOKEN):
            called(url, token)
        for token in (None, "wrong"):
            with pytest.raises(UnauthorizedError, match="/v1/generate"):
                called(url, token)
        with pytest.raises(UnauthorizedError, match="/release_memory"):
            called(url, "generate-only", "release_memory")
        for path in ("/v1/chat/completions", "/v1/score"):
            assert httpx.post(f"{url}{path}", json={}).status_code == 401
        assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.parametrize("is_open", [False, True])
def test_beyond_loopback_generation_takes_the_control_token_unless_it_is_opened(
    model_dir: Path, tmp_path: Path, is_open: bool
) -> None:
    words = ["--host", "0.0.0.0", *(["--open-generation"] if is_open else [])]
    with serving(model_dir, tmp_path, *words) as url:
        url = url.replace("0.0.0.0", "127.0.0.1")
        called(url, TOKEN)
        with contextlib.nullcontext() if is_open else pytest.raises(UnauthorizedError):
            called(url, None)


def test_an_open_server_with_a_generation_token_is_refused(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("INFLIGHT_GENERATION_TOKEN", "x")
    assert main(["serve", str(model_dir), "--port", "0", "--open-generation"]) == 1
    assert "--open-generation contradicts" in capsys.readouterr().err

"""Fetching leaves whole, checked files under their names, or nothing at all."""

import hashlib
import importlib
import io
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from published_files import BATCHES, write_cifar10_python, write_mnist

from parlay.data import fetch, load
from parlay.data.fetch import File, unpack
from parlay.errors import InputError

FOLDER = "cifar-10-batches-py"
ARCHIVE = "cifar-10-python.tar.gz"
# by name: as an attribute of the package, `fetch` is the function
PUBLISHED = importlib.import_module("parlay.data.fetch").PUBLISHED


@dataclass
class Server:
    """A server on this machine: what it has, and how it misbehaves."""

    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    drop_after: int | None = None
    with_length: bool = True
    url: str = ""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    has = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            has.asked.append(self.path.lstrip("/"))
            content = has.files.get(self.path.lstrip("/"))
            if content is None:
                self.send_error(404)
                return
            self.send_response(200)
            if has.with_length:
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: has.drop_after])

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    has.url = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield has
    http.shutdown()
    thread.join()
    http.server_close()


def archive_of(folder: Path, *more: tarfile.TarInfo) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        tar.add(folder, arcname=FOLDER)
        for member in more:
            tar.addfile(member, io.BytesIO(b"x" * member.size))
    return packed.getvalue()


def publish(monkeypatch: pytest.MonkeyPatch, server: Server, name: str, files: dict[str, bytes]) -> None:
    """Serve these files, their checksums being the published ones."""
    server.files.update(files)
    listed = tuple(File(file, hashlib.md5(content).hexdigest()) for file, content in files.items())
    monkeypatch.setitem(PUBLISHED, name, replace(PUBLISHED[name], files=listed))


@pytest.fixture
def cifar10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server) -> Server:
    """A server with a small CIFAR-10."""
    write_cifar10_python(tmp_path / "original")
    publish(monkeypatch, server, "cifar10", {ARCHIVE: archive_of(tmp_path / "original")})
    return server


def quiet(*_: object) -> None:
    pass


def everything_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def test_a_fetched_archive_can_be_loaded_and_leaves_nothing_else(tmp_path: Path, cifar10: Server) -> None:
    fetch("cifar10", tmp_path / "data", quiet, cifar10.url)
    assert everything_in(tmp_path / "data") == [f"{FOLDER}/{name}" for name in (*BATCHES, "test_batch")]
    assert torch.equal(
        load("cifar10", tmp_path / "data").train.inputs, load("cifar10", tmp_path / "original").train.inputs
    )


@pytest.mark.parametrize("slash", ["", "/"])
def test_fetched_mnist_can_be_loaded(tmp_path: Path, monkeypatch, server: Server, slash: str) -> None:
    write_mnist(tmp_path / "original", compressed=True)
    publish(monkeypatch, server, "mnist", {path.name: path.read_bytes() for path in (tmp_path / "original").iterdir()})
    fetch("mnist", tmp_path / "data", quiet, server.url + slash)
    assert len(load("mnist", tmp_path / "data").train) == 6
    assert len(everything_in(tmp_path / "data" / "MNIST" / "raw")) == 4


def test_an_archive_put_there_by_hand_is_used_and_kept(tmp_path: Path, cifar10: Server) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / ARCHIVE).write_bytes(cifar10.files[ARCHIVE])
    fetch("cifar10", tmp_path / "data", quiet, cifar10.url)
    assert cifar10.asked == []
    assert len(load("cifar10", tmp_path / "data").train) == 15
    assert (tmp_path / "data" / ARCHIVE).exists()


def test_progress_is_told_from_the_first_byte_to_the_last(tmp_path: Path, monkeypatch, cifar10: Server) -> None:
    monkeypatch.setattr(importlib.import_module("parlay.data.fetch"), "CHUNK", 1000)
    told: list[tuple[str, int, int | None]] = []
    fetch("cifar10", tmp_path / "data", lambda *now: told.append(now), cifar10.url)
    size = len(cifar10.files[ARCHIVE])
    assert told[0] == (ARCHIVE, 0, size)
    assert told[-1] == (ARCHIVE, size, size)
    counts = [done for _, done, _ in told]
    assert counts == sorted(counts)
    assert len(counts) > 10


def test_a_wrong_checksum_leaves_nothing_behind(tmp_path: Path, cifar10: Server) -> None:
    cifar10.files[ARCHIVE] += b"x"
    with pytest.raises(InputError, match="md5"):
        fetch("cifar10", tmp_path / "data", quiet, cifar10.url)
    assert everything_in(tmp_path / "data") == []


@pytest.mark.parametrize(("with_length", "says"), [(True, "ended after 5000 of"), (False, "md5")])
def test_a_connection_dropped_midway_leaves_nothing_behind(
    tmp_path: Path, cifar10: Server, with_length: bool, says: str
) -> None:
    cifar10.drop_after = 5000
    cifar10.with_length = with_length
    with pytest.raises(InputError, match=says):
        fetch("cifar10", tmp_path / "data", quiet, cifar10.url)
    assert everything_in(tmp_path / "data") == []


def test_an_interruption_leaves_nothing_behind(tmp_path: Path, cifar10: Server) -> None:
    def interrupt(_name: str, done: int, _total: int | None) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("cifar10", tmp_path / "data", interrupt, cifar10.url)
    assert everything_in(tmp_path / "data") == []


@pytest.mark.parametrize("address", ["file:///etc", "mirror.example.org", "ftp://mirror.example.org"])
def test_an_address_that_is_not_of_the_web_is_refused(tmp_path: Path, address: str) -> None:
    with pytest.raises(InputError, match="begins with https:// or http://"):
        fetch("cifar10", tmp_path / "data", quiet, address)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, cifar10: Server) -> None:
    (tmp_path / "data").write_text("a file in the way")
    with pytest.raises(InputError, match=f"{tmp_path / 'data'}.*cannot be written"):
        fetch("cifar10", tmp_path / "data", quiet, cifar10.url)


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, target
    made.size = 1 if kind == tarfile.REGTYPE else 0
    return made


@pytest.mark.parametrize(
    "bad",
    [
        member("../outside"),
        member(f"{FOLDER}/../../outside"),
        member("/tmp/outside"),
        member("outside"),
        member(f"{FOLDER}/..\\outside"),
        member(f"{FOLDER}/link", tarfile.SYMTYPE, "/etc/passwd"),
        member(f"{FOLDER}/link", tarfile.LNKTYPE, f"{FOLDER}/test_batch"),
        member(f"{FOLDER}/pipe", tarfile.FIFOTYPE),
        member(f"{FOLDER}/device", tarfile.CHRTYPE),
    ],
    ids=lambda bad: f"{bad.name}-{bad.type.decode()}",
)
def test_an_archive_with_a_path_outside_or_a_link_is_refused_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server, bad: tarfile.TarInfo
) -> None:
    write_cifar10_python(tmp_path / "original")
    publish(monkeypatch, server, "cifar10", {ARCHIVE: archive_of(tmp_path / "original", bad)})
    (tmp_path / "in" / "data").mkdir(parents=True)
    with pytest.raises(InputError) as refused:
        fetch("cifar10", tmp_path / "in" / "data", quiet, server.url)
    assert repr(bad.name) in str(refused.value)
    assert everything_in(tmp_path / "in") == []


@pytest.mark.parametrize("length", [0, 100, 5000, -1000])
def test_a_broken_archive_is_refused_and_no_half_file_has_a_final_name(tmp_path: Path, length: int) -> None:
    write_cifar10_python(tmp_path / "original")
    archive = tmp_path / ARCHIVE
    archive.write_bytes(archive_of(tmp_path / "original")[:length])
    with pytest.raises(InputError, match="not a whole archive"):
        unpack(archive, tmp_path / "data", FOLDER)
    for path in (tmp_path / "data").rglob("*batch*"):
        assert path.read_bytes() == (tmp_path / "original" / path.name).read_bytes()

"""The server, asked by a plain client, by pypi-simple, pip and uv; and what those do without our wheel."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import http.client
import http.server
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

import pytest
from carry.accept import HTML, JSON, TEXT, choose
from carry.errors import UserError
from carry.index import write_index
from carry.server import open_server
from pypi_simple import ACCEPT_HTML_ONLY, ACCEPT_JSON_ONLY, PyPISimple
from uv import find_uv_bin
from wheelmaker import make_wheel, provenance

FILE = "demo-1.0+resume.1-py3-none-any.whl"
ESCAPED = FILE.replace("+", "%2B")


class Reply(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    body: bytes


def ask(url: str, path: str, method: str = "GET", **headers: str) -> Reply:
    """One request with the path as it is; `If_Range=` becomes `If-Range:`."""
    host = url.removeprefix("http://").rstrip("/")
    connection = http.client.HTTPConnection(host, timeout=10)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    reply = connection.getresponse()
    body = reply.read()
    connection.close()
    return Reply(reply.status, reply.headers, body)


@contextlib.contextmanager
def serving(root: Path) -> Iterator[str]:
    with open_server(root) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server.url
        server.shutdown()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return make_wheel(tmp_path_factory.mktemp("in"), carry=provenance(faults=["stale-masters", "tag-ignored"]))


@pytest.fixture(scope="module")
def root(tmp_path_factory, wheel) -> Path:
    root = tmp_path_factory.mktemp("out") / "simple"
    write_index([wheel], root)
    (root.parent / "secret.html").write_text("secret")
    (root / "demo" / "secret.html").symlink_to(root.parent / "secret.html")
    (root / "demo" / ".hidden.html").write_text("secret")
    return root


@pytest.fixture(scope="module")
def url(root) -> Iterator[str]:
    with serving(root) as url:
        yield url


PIP = f"{JSON}, {HTML}; q=0.1, {TEXT}; q=0.01"
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8"


@pytest.mark.parametrize(
    ("header", "wanted"),
    [
        (None, TEXT),
        ("", TEXT),
        ("*/*", TEXT),
        (BROWSER, TEXT),
        (PIP, JSON),
        (PIP.replace("0.1", "0.5").replace(JSON, f"{JSON};q=0.2"), HTML),
        (f"{JSON};q=0.5, {TEXT};q=0.6", TEXT),
        (f"{JSON}, {TEXT}", JSON),
        (f"{TEXT}, {JSON}", JSON),
        (f"{HTML}", HTML),
        (f"{JSON};q=0, */*", TEXT),
        (f"{TEXT};q=0, {HTML};q=0, */*;q=0.1", JSON),
        ("application/*", JSON),
        ("text/*;q=0.3, application/*;q=0.2", TEXT),
        ("application/vnd.pypi.simple.latest+json", JSON),
        ("application/vnd.pypi.simple.latest+html", HTML),
        (JSON.upper(), JSON),
        (f"{JSON};q=nonsense, {TEXT};q=0.1", TEXT),
        ("image/png", None),
        ("application/vnd.pypi.simple.v2+json", None),
        ("*/*;q=0", None),
        (f"{JSON};q=0", None),
    ],
)
def test_negotiation(url, header, wanted):
    assert choose(header) == wanted
    reply = ask(url, "/simple/demo/", **({} if header is None else {"Accept": header}))
    assert reply.headers["Vary"] == "Accept"
    if wanted is None:
        assert reply.status == 406 and JSON.encode() in reply.body
    else:
        assert (reply.status, reply.headers["Content-Type"].partition(";")[0]) == (200, wanted)
        assert reply.body.startswith(b"{" if wanted == JSON else b"<!DOCTYPE html>")


@pytest.mark.parametrize("accept", [ACCEPT_JSON_ONLY, ACCEPT_HTML_ONLY])
def test_an_index_client_reads_both_forms_the_same(url, wheel, accept):
    with PyPISimple(f"{url}simple/", accept=accept) as client:
        assert client.get_index_page().projects == ["demo"]
        (package,) = client.get_project_page("Demo").packages
        assert (package.filename, package.version) == (FILE, "1.0+resume.1")
        assert package.digests == {"sha256": hashlib.sha256(wheel.read_bytes()).hexdigest()}
        assert (package.requires_python, package.has_metadata, package.is_yanked) == (">=3.8", True, False)
        assert "Version: 1.0+resume.1" in client.get_package_metadata(package)


@pytest.mark.parametrize(
    ("path", "location"),
    [
        ("/simple", "/simple/"),
        ("/simple/demo", "/simple/demo/"),
        ("/simple/Demo/", "/simple/demo/"),
        ("/simple/DEMO", "/simple/demo/"),
        (f"/simple/Demo/{FILE}", f"/simple/demo/{ESCAPED}"),
    ],
)
def test_other_spellings_are_redirected(url, path, location):
    reply = ask(url, path)
    assert (reply.status, reply.headers["Location"]) == (301, location)


@pytest.mark.parametrize(
    "path",
    [
        "/nothing",
        "/simple/other/",
        "/simple/Other",
        "/simple/demo/nothing.whl",
        "/simple/demo/demo/",
        f"/simple/demo/{ESCAPED}/",
        "/../secret.html",
        "/simple/../secret.html",
        "/simple/demo/../../secret.html",
        "/simple/demo/..%2F..%2Fsecret.html",
        "/simple/demo/x%2F..%2F..%2F..%2Fsecret.html",
        "/simple/demo/demo%2F..%2Findex.html",
        "x/simple/",
        "/simple/%2e%2e/secret.html",
        "/simple/demo/%2e%2e/%2e%2e/secret.html",
        "/simple/demo/secret.html",
        "/simple/demo/.hidden.html",
        "/simple/demo/a%00.html",
        "/simple//demo/",
        "/simple//",
        "/simple//index.html",
        "/simple/.",
        "/simple/..",
        "http://elsewhere/simple/",
    ],
)
def test_nothing_else_is_served(url, path):
    reply = ask(url, path)
    assert (reply.status, reply.headers["Content-Type"].partition(";")[0]) == (404, "text/plain")
    assert b"secret" not in reply.body


@pytest.mark.parametrize("path", ["/", "/simple/", "/simple/demo/", f"/simple/demo/{ESCAPED}", "/nothing"])
def test_head_is_get_without_the_body(url, path):
    get, head = ask(url, path), ask(url, path, "HEAD")
    assert (head.status, head.body) == (get.status, b"")
    del get.headers["Date"], head.headers["Date"]
    assert head.headers.items() == get.headers.items()
    assert int(get.headers["Content-Length"]) == len(get.body) > 0


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_written(url, method):
    reply = ask(url, "/simple/", method)
    assert (reply.status, reply.headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("path", [f"/simple/demo/{ESCAPED}", f"/simple/demo/{FILE}"])
def test_a_wheel_carries_its_hash_as_etag(url, wheel, path):
    content, etag = wheel.read_bytes(), f'"{hashlib.sha256(wheel.read_bytes()).hexdigest()}"'
    reply = ask(url, path)
    assert (reply.status, reply.body, reply.headers["ETag"]) == (200, content, etag)
    for known in (etag, f"W/{etag}", f'"x", {etag}', "*"):
        again = ask(url, path, If_None_Match=known)
        assert (again.status, again.body, again.headers["ETag"]) == (304, b"", etag)
    assert ask(url, path, If_None_Match='"x"').status == 200


@pytest.mark.parametrize(
    ("wanted", "start", "stop"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=5-9", 5, 10),
        ("bytes=7-", 7, None),
        ("bytes=-4", -4, None),
        ("bytes=2-99999", 2, None),
    ],
)
def test_a_range_gives_its_bytes(url, wheel, wanted, start, stop):
    content = wheel.read_bytes()
    reply = ask(url, f"/simple/demo/{ESCAPED}", Range=wanted)
    assert (reply.status, reply.body) == (206, content[start:stop])
    first = start % len(content)
    assert reply.headers["Content-Range"] == f"bytes {first}-{first + len(reply.body) - 1}/{len(content)}"


@pytest.mark.parametrize("wanted", ["bytes=0-1,4-5", "bytes=-", "bytes=9-2", "lines=1-2", "bytes=a-b"])
def test_a_range_that_is_not_understood_is_ignored(url, wheel, wanted):
    reply = ask(url, f"/simple/demo/{ESCAPED}", Range=wanted)
    assert (reply.status, reply.body) == (200, wheel.read_bytes())


def test_a_range_beyond_the_end_is_416_and_one_of_another_file_is_ignored(url, wheel):
    size = len(wheel.read_bytes())
    for wanted in (f"bytes={size}-", "bytes=-0"):
        reply = ask(url, f"/simple/demo/{ESCAPED}", Range=wanted)
        assert (reply.status, reply.headers["Content-Range"]) == (416, f"bytes */{size}")
    assert ask(url, f"/simple/demo/{ESCAPED}", Range="bytes=0-0", If_Range='"old"').status == 200


def test_a_rebuilt_index_is_seen_at_once(tmp_path):
    write_index([make_wheel(tmp_path / "in")], tmp_path / "simple")
    with serving(tmp_path / "simple") as url:
        old = ask(url, f"/simple/demo/{ESCAPED}").headers["ETag"]
        new = make_wheel(tmp_path / "in", body="x = 1\n")
        write_index([new], tmp_path / "simple")
        reply = ask(url, f"/simple/demo/{ESCAPED}", If_None_Match=old)
        assert (reply.status, reply.body) == (200, new.read_bytes())


def test_one_connection_takes_many_requests(url, wheel):
    connection = http.client.HTTPConnection(url.removeprefix("http://").rstrip("/"), timeout=10)
    connection.connect()
    first = connection.sock
    for method, path in [
        ("GET", "/"),
        ("HEAD", f"/simple/demo/{ESCAPED}"),
        ("GET", "/no"),
        ("GET", "/simple/"),
    ] * 3:
        connection.request(method, path)
        connection.getresponse().read()
        assert connection.sock is first
    connection.close()


class Page(HTMLParser):
    """Fails on tags that do not nest; keeps text, links and whatever would load from elsewhere."""

    VOID = frozenset({"meta", "br", "link", "img"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text, self.links, self.assets = "", [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        if tag not in self.VOID:
            self.open.append(tag)
        self.links += [value for name, value in attributes if name == "href"]
        self.assets += [tag] if tag in ("link", "img", "script", "iframe") else []

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_page_for_people_says_what_is_fixed_and_how_to_install(url, wheel):
    reply = ask(url, "/")
    assert reply.headers["Content-Type"] == "text/html; charset=utf-8"
    page = Page(reply.body.decode())
    for said in (
        "demo 1.0+resume.1",
        "stale-masters",
        "tag-ignored",
        f"pip install --extra-index-url {url}simple/ 'demo==1.0+resume.1'",
        f"uv pip install --index {url}simple/ 'demo==1.0+resume.1'",
        hashlib.sha256(wheel.read_bytes()).hexdigest(),
    ):
        assert said in page.text
    assert page.assets == [] and len(reply.body) < 10_000
    assert all(ask(url, f"/{link}").status == 200 for link in page.links)


def test_the_page_of_an_empty_index_says_what_to_do(tmp_path):
    write_index([], tmp_path / "simple")
    with serving(tmp_path / "simple") as url:
        assert "run make index" in Page(ask(url, "/").body.decode()).text
        assert ask(url, "/simple/demo/").status == 404


def test_fault_ids_are_escaped_on_the_page(tmp_path):
    write_index([make_wheel(tmp_path / "in", carry=provenance(faults=["<script>"]))], tmp_path / "simple")
    with serving(tmp_path / "simple") as url:
        assert Page(ask(url, "/").body.decode()).assets == []


def test_only_this_machine_is_answered(url):
    port = int(url.rstrip("/").rpartition(":")[2])
    with pytest.raises(ConnectionRefusedError):  # all of 127/8 is loopback, and only .1 is ours
        socket.create_connection(("127.0.0.2", port), timeout=5)


def test_a_client_that_hangs_up_is_no_news(url, capfd):
    host, port = url.removeprefix("http://").rstrip("/").split(":")
    for _ in range(3):
        with socket.create_connection((host, int(port))) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            client.sendall(f"GET /simple/demo/{ESCAPED} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    assert ask(url, "/").status == 200
    assert capfd.readouterr() == ("", "")


def test_bad_starts_are_one_clear_line(tmp_path, root, url):
    with pytest.raises(UserError, match="no index there; run `make index`"):
        open_server(tmp_path)
    with pytest.raises(UserError, match="port 65536: not between 0 and 65535"):
        open_server(root, 65536)
    port = int(url.rstrip("/").rpartition(":")[2])
    with pytest.raises(UserError, match=f"port {port} is in use; choose another"):
        open_server(root, port)


SERVE = """
import sys
from pathlib import Path
from carry.server import serve

try:
    serve(Path(sys.argv[1]), 0, lambda line: print(line, flush=True))
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_an_interrupt_ends_it_quietly(root):
    child = subprocess.Popen(
        [sys.executable, "-c", SERVE, root], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    url = child.stdout.readline().strip()
    assert ask(url, "/simple/").status == 200
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=10)
    assert (child.returncode, out, err) == (130, "", "")


# Real installers. No configuration of this machine reaches them, and no other index than those given.
def environment(home: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    return kept | {
        "HOME": str(home),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_CACHE_DIR": "1",
        "UV_NO_CONFIG": "1",
        "UV_CACHE_DIR": str(home / "uv"),
        "NO_PROXY": "*",
    }


def call(home: Path, *args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, args)), env=environment(home), cwd=home, capture_output=True, text=True, timeout=60
    )


def pip(home: Path, *args: object) -> subprocess.CompletedProcess[str]:
    return call(home, sys.executable, "-m", "pip", "install", "--target", home / "site", *args)


def uv(home: Path, *args: object) -> subprocess.CompletedProcess[str]:
    return call(home, find_uv_bin(), "pip", "install", "--python", sys.executable, "--target", home / "site", *args)


def installed(home: Path) -> list[str]:
    return sorted(path.name.removesuffix(".dist-info") for path in (home / "site").glob("*.dist-info"))


@contextlib.contextmanager
def plain_server(root: Path) -> Iterator[str]:
    """Any static host: HTML pages only, no negotiation."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(root.parent))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/{root.name}/"
        server.shutdown()


@contextlib.contextmanager
def as_json(root: Path) -> Iterator[str]:
    with serving(root) as url:
        yield f"{url}simple/"


@contextlib.contextmanager
def as_files(root: Path) -> Iterator[str]:
    yield root.as_uri() + "/"


@pytest.mark.parametrize("host", [as_json, plain_server, as_files])
@pytest.mark.parametrize("tool", [pip, uv])
def test_pip_and_uv_install_from_every_kind_of_host(tmp_path, root, tool, host):
    option = "--index-url" if tool is pip else "--default-index"
    with host(root) as index:
        done = tool(tmp_path, option, index, "demo==1.0+resume.1")
    assert done.returncode == 0, done.stderr
    assert installed(tmp_path) == ["demo-1.0+resume.1"]


def test_pip_downloads_the_same_bytes(tmp_path, root, wheel):
    with as_json(root) as index:
        done = call(tmp_path, sys.executable, "-m", "pip", "download", "--index-url", index, "demo==1.0+resume.1")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / FILE).read_bytes() == wheel.read_bytes()


@pytest.fixture(scope="module")
def public(tmp_path_factory) -> Path:
    """What the public index has: the unpatched release, and a newer one."""
    folder = tmp_path_factory.mktemp("public")
    write_index([make_wheel(folder, version=version) for version in ("1.0", "1.1")], folder / "simple")
    return folder / "simple"


@pytest.fixture(scope="module")
def ours(tmp_path_factory, root) -> dict[str, Path]:
    """Our index with the wheel, without it, and with one that this Python cannot use."""
    folder = tmp_path_factory.mktemp("ours")
    write_index([], folder / "empty")
    write_index([make_wheel(folder / "in", requires_python=">=99")], folder / "unfit")
    return {"with it": root, "empty": folder / "empty", "unfit": folder / "unfit"}


@pytest.mark.parametrize(
    ("tool", "requirement", "state", "wanted"),
    [
        (pip, "demo==1.0+resume.1", "with it", ["demo-1.0+resume.1"]),
        (uv, "demo==1.0+resume.1", "with it", ["demo-1.0+resume.1"]),
        (pip, "demo==1.0+resume.1", "empty", []),
        (uv, "demo==1.0+resume.1", "empty", []),
        (pip, "demo==1.0+resume.1", "unfit", []),
        (uv, "demo==1.0+resume.1", "unfit", []),
        # Why the full version is needed: pip falls back without a word, and uv does where we have none.
        (pip, "demo==1.0", "with it", ["demo-1.0+resume.1"]),
        (pip, "demo<2", "with it", ["demo-1.1"]),
        (pip, "demo==1.0", "unfit", ["demo-1.0"]),
        (pip, "demo==1.0", "empty", ["demo-1.0"]),
        (uv, "demo<2", "with it", ["demo-1.0+resume.1"]),
        (uv, "demo==1.0", "empty", ["demo-1.0"]),
        (uv, "demo==1.0", "unfit", []),
    ],
)
def test_what_is_taken_when_the_public_index_has_the_unpatched_release(
    tmp_path, public, ours, tool, requirement, state, wanted
):
    options = {pip: ("--index-url", "--extra-index-url"), uv: ("--default-index", "--index")}[tool]
    with as_json(public) as theirs, as_json(ours[state]) as index:
        done = tool(tmp_path, options[0], theirs, options[1], index, requirement)
    assert installed(tmp_path) == wanted, done.stderr
    assert (done.returncode == 0) == bool(wanted)
    assert wanted or "1.0+resume.1" in done.stderr


@pytest.mark.parametrize("tool", [pip, uv])
def test_required_hashes_hold(tmp_path, root, wheel, tool):
    requirements = tmp_path / "requirements.txt"
    option = "--index-url" if tool is pip else "--default-index"
    for digest in ("0" * 64, hashlib.sha256(wheel.read_bytes()).hexdigest()):
        requirements.write_text(f"demo==1.0+resume.1 --hash=sha256:{digest}\n")
        with as_json(root) as index:
            done = tool(tmp_path, option, index, "--require-hashes", "-r", requirements)
        right = digest != "0" * 64
        assert (done.returncode == 0, installed(tmp_path)) == (right, ["demo-1.0+resume.1"] * right), done.stderr


PROJECT = """
[project]
name = "user"
version = "1"
requires-python = ">={python}"
dependencies = ["demo=={version}"]

[[tool.uv.index]]
name = "carry"
url = "{index}"
explicit = true

[tool.uv.sources]
demo = {{ index = "carry" }}
"""


@pytest.mark.parametrize(("state", "version"), [("with it", "1.0+resume.1"), ("empty", "1.0"), ("unfit", "1.0")])
def test_uvs_explicit_index_takes_ours_or_nothing(tmp_path, public, ours, state, version):
    python = ".".join(map(str, sys.version_info[:2]))
    with as_json(public) as theirs, as_json(ours[state]) as index:
        (tmp_path / "pyproject.toml").write_text(PROJECT.format(index=index, version=version, python=python))
        environ = environment(tmp_path)
        del environ["UV_NO_CONFIG"]  # it would hide the project's own [tool.uv]
        done = subprocess.run(
            [find_uv_bin(), "lock", "--python", sys.executable, "--default-index", theirs],
            env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    if state == "with it":
        assert done.returncode == 0, done.stderr
        lock = (tmp_path / "uv.lock").read_text()
        assert f'version = "1.0+resume.1"\nsource = {{ registry = "{index}" }}' in lock
    else:
        assert done.returncode != 0 and "demo" in done.stderr
        assert not (tmp_path / "uv.lock").exists()

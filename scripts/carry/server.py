"""A static index over HTTP, on loopback only, for people and for pip and uv.

/                           what is here and how to install it, for people
/simple/                    projects        HTML or JSON, as `Accept` asks (PEP 691)
/simple/<project>/          files           HTML or JSON
/simple/<project>/<file>    wheel or .metadata; ranges and ETags
"""

from __future__ import annotations

import errno
import functools
import hashlib
import io
import os
import re
import socketserver
import sys
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote, unquote

from packaging.utils import canonicalize_name

from carry import accept
from carry.errors import CouldNotRun, UserError
from carry.welcome import welcome
from carry.wheelcheck import sha256_of

HOST = "127.0.0.1"
Sink = Callable[[str], object]
_CHUNK = 1 << 16
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")
_TYPES = {
    ".whl": "application/octet-stream",
    ".metadata": "text/plain; charset=utf-8",
    ".json": accept.JSON,
    ".html": "text/html; charset=utf-8",
}


def serve(root: Path, port: int, say: Sink, log: Sink | None = None) -> None:
    """Serve the index folder `root` until interrupted; `say` gets the address once it is bound.

    Port 0 takes a free one. `log`, where given, gets a line per request. Raises UserError where `root` is no
    index and where the port is taken, and lets KeyboardInterrupt through, quietly.
    """
    with open_server(root, port, log) as server:
        say(server.url)
        server.serve_forever(poll_interval=0.1)


def open_server(root: Path, port: int = 0, log: Sink | None = None) -> IndexServer:
    """A server that is bound and not yet serving. Raises as `serve`."""
    if not (root / "index.json").is_file():
        raise UserError(f"{root}: no index there; run `make index`")
    if not 0 <= port <= 65535:
        raise UserError(f"port {port}: not between 0 and 65535")
    try:
        return IndexServer(root, port, log)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"port {port} is in use; choose another, or PORT=0 for any free one") from None
        if error.errno == errno.EACCES:
            raise UserError(f"port {port} needs privileges; choose one above 1023, or PORT=0") from None
        raise CouldNotRun(f"cannot listen on {HOST}:{port}: {error.strerror}") from None


class IndexServer(ThreadingHTTPServer):
    """Serves `root` at `url`/simple/; the folder may be replaced while it runs."""

    daemon_threads = True

    def __init__(self, root: Path, port: int, log: Sink | None = None) -> None:
        self.root, self.log = root, log
        super().__init__((HOST, port), _Handler)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/"

    def server_bind(self) -> None:
        # Past HTTPServer's own, which looks the host's name up and can hang where there is no resolver.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, self.server_address[1]

    def handle_error(self, request: object, client_address: object) -> None:
        # A client that hangs up is no error of ours: pip does once it has read enough.
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "carry", ""
    timeout = 60
    server: IndexServer

    def do_GET(self) -> None:
        self._route()

    def do_HEAD(self) -> None:
        self._route()

    def _refuse(self) -> None:
        self.close_connection = True  # the request's body, if any, stays unread
        self._plain(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD\n", {"Allow": "GET, HEAD"})

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _refuse

    def _route(self) -> None:
        match _segments(self.path):
            case [""]:
                self._content(welcome(self.server.root, self.server.url), _TYPES[".html"])
            case ["simple"]:
                self._redirect("/simple/")
            case ["simple", ""]:
                self._page(self.server.root)
            case ["simple", "index.html" | "index.json" as file]:
                self._file(self.server.root / file)
            case ["simple", project, *rest] if len(rest) <= 1 and self._has(project):
                self._project(project, rest)
            case _:
                self._missing()

    def _has(self, project: str) -> bool:
        return bool(project) and (self.server.root / canonicalize_name(project)).is_dir()

    def _project(self, project: str, rest: list[str]) -> None:
        name = canonicalize_name(project)
        if name != project or not rest:
            self._redirect(f"/simple/{name}/{quote(rest[0]) if rest else ''}")
        elif rest == [""]:
            self._page(self.server.root / name)
        else:
            self._file(self.server.root / name / rest[0])

    def _page(self, folder: Path) -> None:
        vary = {"Vary": "Accept"}
        media = accept.choose(",".join(self.headers.get_all("Accept", [])))
        if media is None:
            offers = "".join(f"{offer}\n" for offer in (accept.JSON, accept.HTML, accept.TEXT))
            return self._plain(HTTPStatus.NOT_ACCEPTABLE, f"this page comes as\n{offers}", vary)
        try:
            content = (folder / ("index.json" if media == accept.JSON else "index.html")).read_bytes()
        except OSError:
            return self._missing()
        return self._content(content, _TYPES[".html"] if media == accept.TEXT else media, vary)

    def _file(self, path: Path) -> None:
        media = _TYPES.get(path.suffix)
        if media is None or path.name.startswith(".") or path.is_symlink():
            return self._missing()
        try:
            with open(path, "rb") as stream:
                stat = os.fstat(stream.fileno())
                etag = _etag(path, stat.st_ino, stat.st_mtime_ns, stat.st_size)
                self._stream(stream, stat.st_size, etag, media)
        except (FileNotFoundError, IsADirectoryError, PermissionError):
            return self._missing()

    def _content(self, content: bytes, media: str, headers: dict[str, str] | None = None) -> None:
        etag = f'"{hashlib.sha256(content).hexdigest()}"'
        self._stream(io.BytesIO(content), len(content), etag, media, headers)

    def _stream(
        self, stream: BinaryIO, size: int, etag: str, media: str, headers: dict[str, str] | None = None
    ) -> None:
        # no-cache means "ask again with the ETag": a rebuilt index is seen at once.
        headers = {"ETag": etag, "Cache-Control": "no-cache", "Accept-Ranges": "bytes", **(headers or {})}
        if _lists(self.headers.get("If-None-Match"), etag):
            return self._head(HTTPStatus.NOT_MODIFIED, headers)
        first, last, status = 0, size - 1, HTTPStatus.OK
        wanted = self.headers.get("Range")
        if wanted and self.headers.get("If-Range", etag) == etag and (span := _span(wanted, size)):
            first, last = span
            if first > last:
                headers["Content-Range"] = f"bytes */{size}"
                return self._plain(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, "no such range\n", headers)
            headers["Content-Range"] = f"bytes {first}-{last}/{size}"
            status = HTTPStatus.PARTIAL_CONTENT
        length = last - first + 1
        self._head(status, {"Content-Type": media, "Content-Length": str(length), **headers})
        if self.command != "HEAD":
            stream.seek(first)
            while length > 0 and (chunk := stream.read(min(_CHUNK, length))):
                self.wfile.write(chunk)
                length -= len(chunk)

    def _redirect(self, location: str) -> None:
        self._plain(HTTPStatus.MOVED_PERMANENTLY, f"{location}\n", {"Location": location})

    def _missing(self) -> None:
        self._plain(HTTPStatus.NOT_FOUND, "not here; / says what is\n")

    def _plain(self, status: HTTPStatus, text: str, headers: dict[str, str] | None = None) -> None:
        body = text.encode()
        kind = {"Content-Type": "text/plain; charset=utf-8", "Content-Length": str(len(body))}
        self._head(status, {**kind, **(headers or {})})
        if self.command != "HEAD":
            self.wfile.write(body)

    def _head(self, status: HTTPStatus, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        if self.server.log:
            path = "".join(char if char.isprintable() else "?" for char in self.path)
            self.server.log(f"{int(code)} {self.command} {path}")

    def log_message(self, format: str, *args: object) -> None:
        """Nothing beyond log_request."""


def _segments(target: str) -> list[str]:
    """The decoded parts of a request's path after its first slash; empty where one holds a separator itself.

    Dots need no care: a project's are normalised away, and no file that begins with one is served.
    """
    first, *parts = map(unquote, target.partition("?")[0].partition("#")[0].split("/"))
    return [] if first or any(char in part for part in parts for char in "/\\\0") else parts


def _lists(header: str | None, etag: str) -> bool:
    tags = [tag.strip().removeprefix("W/") for tag in (header or "").split(",")]
    return etag in tags or tags == ["*"]


def _span(wanted: str, size: int) -> tuple[int, int] | None:
    """First and last byte of one range, first > last where it cannot be met; None to ignore it (RFC 9110)."""
    match = _RANGE.fullmatch(wanted.strip())
    if not match or match.groups() == ("", ""):
        return None
    start, end = match.groups()
    if not start:
        return max(size - int(end), 0) if int(end) else size, size - 1
    if end and int(end) < int(start):
        return None
    return int(start), min(int(end), size - 1) if end else size - 1


@functools.lru_cache(maxsize=256)
def _etag(path: Path, inode: int, mtime_ns: int, size: int) -> str:
    return f'"{sha256_of(path)}"'

"""Fetching one file from where pip is configured to look."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit
from urllib.request import url2pathname

from carry.errors import CouldNotRun

_TIMEOUT = (10, 60)  # seconds to connect, and without a byte
_TRIES = 2


@dataclass(frozen=True)
class PipConfig:
    """Where pip looks, as its configuration files and environment say."""

    indexes: tuple[str, ...]
    find_links: tuple[str, ...]
    cert: str | None
    proxy: str | None


def pip_config() -> PipConfig:
    """pip's own answer, so that its files and PIP_* variables count as they do for pip.

    Raises CouldNotRun where pip does not answer.
    """
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise CouldNotRun(f"`pip config list` failed: {' '.join(done.stderr.split())}; repair pip's config")
    return parse_config(done.stdout)


def parse_config(listing: str) -> PipConfig:
    """PipConfig from `pip config list`; environment entries win over files, later lines over earlier."""
    found: dict[str, tuple[int, str]] = {}
    ranks = {"global": 0, "download": 1, ":env:": 2}
    for line in listing.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.partition(".")
        if section not in ranks:
            continue
        if key not in found or ranks[section] >= found[key][0]:
            found[key] = (ranks[section], " ".join(shlex.split(value)))

    from pypi_simple import PYPI_SIMPLE_ENDPOINT

    def get(key: str) -> str:
        return found.get(key, (0, ""))[1]

    # pip's verbatim newlines between several URLs are spelled \n in the listing.
    several = {key: get(key).replace("\\n", " ").split() for key in ("extra-index-url", "find-links")}
    indexes = (
        []
        if get("no-index").lower() in ("1", "true", "yes", "on")
        else [get("index-url") or PYPI_SIMPLE_ENDPOINT, *several["extra-index-url"]]
    )
    return PipConfig(tuple(indexes), tuple(several["find-links"]), get("cert") or None, get("proxy") or None)


def download(project: str, file_name: str, dest: Path) -> str:
    """Bring `file_name` of `project` to `dest`; returns where it came from.

    The caller checks the hash. Raises CouldNotRun where no place has it or none answers.
    """
    config = pip_config()
    problems = []
    for place in _local_places(config, project):
        if (place / file_name).is_file():
            shutil.copyfile(place / file_name, dest)
            return str(place)
    for index in config.indexes:
        if urlsplit(index).scheme == "file":
            continue
        try:
            if _from_index(index, config, project, file_name, dest):
                return shown_url(index)
            problems.append(f"{shown_url(index)} does not list it")
        except _network_errors() as error:
            problems.append(f"{shown_url(index)} did not answer ({_short(error)})")
    why = "; ".join(problems) or "pip is configured to use no index"
    raise CouldNotRun(f"cannot fetch {file_name}: {why}; check the network and pip's index-url, then run again")


class Listed(NamedTuple):
    """A file that an index or a folder offers; `sha256` is None where only its bytes could say, `path` a local file."""

    name: str
    sha256: str | None
    yanked: bool
    path: Path | None


def listing(project: str) -> list[Listed]:
    """Every file of `project` in every place that pip is configured to look at.

    Raises CouldNotRun where an index does not answer: what it would have listed is not known then.
    """
    config = pip_config()
    start = re.compile(re.sub(r"[-_.]+", "[-_.]+", project) + r"-\d", re.IGNORECASE)
    found = [
        Listed(path.name, None, False, path)
        for place in _local_places(config, project)
        if place.is_dir()
        for path in sorted(place.iterdir())
        if start.match(path.name)
    ]
    for index in config.indexes:
        if urlsplit(index).scheme == "file":
            continue
        try:
            found += _listed(index, config, project)
        except _network_errors() as error:
            raise CouldNotRun(
                f"cannot list {project}: {shown_url(index)} did not answer ({_short(error)}); "
                "check the network and pip's index-url, then run again"
            ) from None
    return found


def _listed(index: str, config: PipConfig, project: str) -> list[Listed]:
    from pypi_simple import NoSuchProjectError

    with _client(index, config) as client:
        try:
            page = client.get_project_page(project, timeout=_TIMEOUT)
        except NoSuchProjectError:
            return []
    return [Listed(p.filename, p.digests.get("sha256"), p.is_yanked, None) for p in page.packages]


def _local_places(config: PipConfig, project: str) -> list[Path]:
    folder = re.sub(r"[-_.]+", "-", project).lower()
    places = [_local(link) for link in config.find_links]
    places += [_local(index) / folder for index in config.indexes if urlsplit(index).scheme == "file"]
    return places


def _local(link: str) -> Path:
    parts = urlsplit(link)
    return Path(url2pathname(parts.path) if parts.scheme == "file" else os.path.expanduser(link))


def _from_index(index: str, config: PipConfig, project: str, file_name: str, dest: Path) -> bool:
    from pypi_simple import NoSuchProjectError

    with _client(index, config) as client:
        try:
            page = client.get_project_page(project, timeout=_TIMEOUT)
        except NoSuchProjectError:
            return False
        for package in page.packages:
            if package.filename == file_name:
                client.download_package(package, dest, verify=False, timeout=_TIMEOUT)
                return True
    return False


def _client(index: str, config: PipConfig):
    import requests
    from pypi_simple import PyPISimple

    session = requests.Session()
    if config.cert:
        session.verify = config.cert
    if config.proxy:
        session.proxies = {"http": config.proxy, "https": config.proxy}
    adapter = requests.adapters.HTTPAdapter(max_retries=_TRIES - 1)
    session.mount("https://", adapter)
    session.mount("http://", adapter)
    return PyPISimple(index, session=session)


def _network_errors() -> tuple[type[Exception], ...]:
    import requests
    from pypi_simple import UnparsableFilenameError, UnsupportedContentTypeError, UnsupportedRepoVersionError

    return (
        requests.RequestException,
        UnparsableFilenameError,
        UnsupportedContentTypeError,
        UnsupportedRepoVersionError,
    )


def shown_url(index: str) -> str:
    """The index without the password it may carry."""
    parts = urlsplit(index)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _short(error: Exception) -> str:
    text = str(error)
    for sign, words in (
        ("NameResolution", "its name does not resolve"),
        ("Name or service not known", "its name does not resolve"),
        ("Connection refused", "connection refused"),
        ("timed out", "timed out"),
        ("CERTIFICATE_VERIFY_FAILED", "its certificate is not trusted; see pip's cert setting"),
        ("Network is unreachable", "network is unreachable"),
    ):
        if sign in text:
            return words
    return " ".join(text.split())[:120]

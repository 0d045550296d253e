import http.server
import os
import threading
import time
from pathlib import Path

import pytest
from carry.download import PipConfig, parse_config, shown_url
from toyhouse import ToyHouse


def test_environment_wins_over_files_and_several_urls_are_split():
    listing = "\n".join(
        [
            ":env:.cert='/certs.pem'",
            ":env:.find-links='/links'",
            "global.cert='/other.pem'",
            "global.extra-index-url='file:///a http://b/simple'",
            "global.index-url='http://index/simple'",
            "install.index-url='http://wrong/simple'",
        ]
    )
    assert parse_config(listing) == PipConfig(
        indexes=("http://index/simple", "file:///a", "http://b/simple"),
        find_links=("/links",),
        cert="/certs.pem",
        proxy=None,
    )


def test_no_index_leaves_the_links_only():
    config = parse_config(":env:.no-index='1'\n:env:.find-links='/a /b'\nglobal.index-url='http://i'")
    assert (config.indexes, config.find_links) == ((), ("/a", "/b"))


def test_a_password_is_not_shown():
    assert shown_url("https://user:secret@host:81/simple") == "https://host:81/simple"


@pytest.fixture
def web(tmp_path: Path, toy: ToyHouse):
    """An index on loopback that holds toy's sdist; yields its URL and the paths asked for."""
    root, asked = tmp_path / "web", []
    page = root / "simple" / "toy"
    page.mkdir(parents=True)
    os.rename(toy.links / "toy-1.0.tar.gz", page / "toy-1.0.tar.gz")
    (page / "index.html").write_text('<!DOCTYPE html><a href="toy-1.0.tar.gz">toy-1.0.tar.gz</a>')

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(root))

        def log_message(self, *args):
            asked.append(self.path)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/simple/", asked
        server.shutdown()


def test_the_sdist_comes_from_the_index_pip_is_configured_for_and_once(toy: ToyHouse, web):
    url, asked = web
    here = {"PIP_NO_INDEX": "0", "PIP_FIND_LINKS": "", "PIP_INDEX_URL": url}
    toy.run("apply", "toy", "1.0", **here)
    assert "/simple/toy/toy-1.0.tar.gz" in asked
    asked.clear()
    toy.run("apply", "toy", "1.0", **here)
    assert asked == []


def test_an_index_that_lacks_the_file(toy: ToyHouse, web):
    url, _ = web
    toy.pin_file.write_text(toy.pin_file.read_text().replace("toy-1.0.tar.gz", "toy-1.0.tar.xz"))
    done = toy.run("build-wheels", PIP_NO_INDEX="0", PIP_FIND_LINKS="", PIP_INDEX_URL=url, check=13)
    assert f"cannot fetch toy-1.0.tar.xz: {url} does not list it; " in done.stderr


def test_no_network_is_told_soon(toy: ToyHouse):
    started = time.monotonic()
    done = toy.run("build-wheels", PIP_NO_INDEX="0", PIP_FIND_LINKS="", PIP_INDEX_URL="http://127.0.0.1:9/simple",
                   check=13)  # fmt: skip
    assert done.stderr.splitlines()[-1] == (
        "carry: cannot fetch toy-1.0.tar.gz: http://127.0.0.1:9/simple did not answer (connection refused); "
        "check the network and pip's index-url, then run again"
    )
    assert time.monotonic() - started < 20
    assert not (toy.root / "dist").exists()


def test_no_index_at_all(toy: ToyHouse):
    done = toy.run("build-wheels", PIP_FIND_LINKS="", check=13)
    assert "cannot fetch toy-1.0.tar.gz: pip is configured to use no index" in done.stderr

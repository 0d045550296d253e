"""The static index: its pages, its stability, and what a killed or failing run leaves behind."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from carry.errors import CarryError, UserError
from carry.index import read_index, write_index
from wheelmaker import make_wheel, tree

EXAMPLE = "demo-1.0+resume.1-py3-none-any.whl"


class Anchors(HTMLParser):
    """The links of a page, as (text, attributes)."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.found: list[tuple[str, dict]] = []
        self.feed(page.decode())
        self.close()

    def handle_starttag(self, tag: str, attributes: list) -> None:
        if tag == "a":
            self.found.append(("", dict(attributes)))

    def handle_data(self, data: str) -> None:
        if self.found and not self.found[-1][0]:
            self.found[-1] = (data, self.found[-1][1])


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_pages_hold_what_installers_need(tmp_path):
    wheel = make_wheel(tmp_path / "in", requires_python="<4,>=3.8")
    make_wheel(tmp_path / "in", "Other_Name", "2.0", requires_python=None)
    write_index((tmp_path / "in").iterdir(), tmp_path / "simple")
    files = tree(tmp_path / "simple")
    assert sorted(files) == [
        f"demo/{EXAMPLE}",
        f"demo/{EXAMPLE}.metadata",
        "demo/index.html",
        "demo/index.json",
        "index.html",
        "index.json",
        "other-name/Other_Name-2.0-py3-none-any.whl",
        "other-name/Other_Name-2.0-py3-none-any.whl.metadata",
        "other-name/index.html",
        "other-name/index.json",
    ]
    assert files[f"demo/{EXAMPLE}"] == wheel.read_bytes()
    assert b"\nVersion: 1.0+resume.1\n" in files[f"demo/{EXAMPLE}.metadata"]
    metadata = sha256(files[f"demo/{EXAMPLE}.metadata"])

    assert Anchors(files["index.html"]).found == [
        ("demo", {"href": "demo/"}),
        ("other-name", {"href": "other-name/"}),
    ]
    assert Anchors(files["demo/index.html"]).found == [
        (
            EXAMPLE,
            {
                "href": f"demo-1.0%2Bresume.1-py3-none-any.whl#sha256={sha256(wheel.read_bytes())}",
                "data-core-metadata": f"sha256={metadata}",
                "data-dist-info-metadata": f"sha256={metadata}",
                "data-requires-python": "<4,>=3.8",
            },
        )
    ]
    assert b"&lt;4,&gt;=3.8" in files["demo/index.html"]
    assert json.loads(files["index.json"]) == {
        "meta": {"api-version": "1.1"},
        "projects": [{"name": "demo"}, {"name": "other-name"}],
    }
    assert json.loads(files["demo/index.json"]) == {
        "meta": {"api-version": "1.1"},
        "name": "demo",
        "versions": ["1.0+resume.1"],
        "files": [
            {
                "filename": EXAMPLE,
                "url": "demo-1.0%2Bresume.1-py3-none-any.whl",
                "hashes": {"sha256": sha256(wheel.read_bytes())},
                "requires-python": "<4,>=3.8",
                "size": wheel.stat().st_size,
                "core-metadata": {"sha256": metadata},
                "yanked": False,
            }
        ],
    }
    assert "requires-python" not in json.loads(files["other-name/index.json"])["files"][0]


def test_versions_are_ordered_as_versions(tmp_path):
    for version in ("1.10", "1.9", "1.9+resume.10", "1.9+resume.2"):
        make_wheel(tmp_path / "in", version=version)
    write_index((tmp_path / "in").iterdir(), tmp_path / "simple")
    page = json.loads((tmp_path / "simple" / "demo" / "index.json").read_bytes())
    assert page["versions"] == ["1.9", "1.9+resume.2", "1.9+resume.10", "1.10"]


def test_same_wheels_give_the_same_bytes_and_a_second_run_touches_nothing(tmp_path):
    wheels = [make_wheel(tmp_path / "in", name, "1.0") for name in ("a", "b", "c")]
    assert write_index(wheels, tmp_path / "one")
    assert write_index(reversed(wheels), tmp_path / "two")
    assert tree(tmp_path / "one") == tree(tmp_path / "two")

    def stamps():
        return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in (tmp_path / "one").rglob("*")}

    before = stamps()
    assert not write_index(wheels, tmp_path / "one")
    assert stamps() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "one", "two"]


def test_an_index_is_exactly_its_wheels(tmp_path):
    first, second = make_wheel(tmp_path / "in", "a", "1.0"), make_wheel(tmp_path / "in", "b", "1.0")
    write_index([first, second], tmp_path / "simple")
    (tmp_path / "simple" / "stray.txt").write_text("x")
    assert write_index([second], tmp_path / "simple")
    assert {name.split("/")[0] for name in tree(tmp_path / "simple")} == {"b", "index.html", "index.json"}
    assert write_index([], tmp_path / "simple")
    assert sorted(tree(tmp_path / "simple")) == ["index.html", "index.json"]


def test_an_index_keeps_its_bytes_when_the_source_is_written_in_place(tmp_path):
    wheel = make_wheel(tmp_path / "in")
    write_index([wheel], tmp_path / "simple")
    before = tree(tmp_path / "simple")
    with open(wheel, "r+b") as stream:
        stream.write(b"changed")
    assert tree(tmp_path / "simple") == before


def test_an_index_behind_a_link_stays_behind_it(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "simple").symlink_to("real")
    write_index([make_wheel(tmp_path / "in")], tmp_path / "simple")
    assert (tmp_path / "simple").is_symlink()
    assert f"demo/{EXAMPLE}" in tree(tmp_path / "real")


def test_one_name_with_two_contents_is_refused(tmp_path):
    one, two = make_wheel(tmp_path / "one"), make_wheel(tmp_path / "two", body="x = 1\n")
    with pytest.raises(UserError, match=r"demo.*differs between .*one and .*two"):
        write_index([one, two], tmp_path / "simple")
    assert not (tmp_path / "simple").exists()
    assert write_index([one, one], tmp_path / "simple")


def drop(name):
    return lambda files: files.pop(next(path for path in files if path.endswith(name)))


def swap(name, old, new):
    def spoil(files):
        path = next(path for path in files if path.endswith(name))
        assert old in files[path]
        files[path] = files[path].replace(old, new)

    return spoil


@pytest.mark.parametrize(
    ("message", "made"),
    [
        ("__init__.py is not what RECORD says", {"spoil": swap("__init__.py", b"version", b"Version")}),
        ("__init__.py is not what RECORD says", {"spoil": swap("RECORD", b",25\n", b",26\n")}),
        ("RECORD lists demo/__init__.py, which the wheel lacks", {"spoil": drop("__init__.py")}),
        ("extra.py is not in RECORD", {"spoil": lambda files: files.update({"extra.py": b""})}),
        ("has no RECORD", {"spoil": drop("RECORD")}),
        ("0 dist-info/METADATA files", {"spoil": drop("METADATA")}),
        ("2 dist-info/METADATA files", {"spoil": lambda f: f.update({"x-1.dist-info/METADATA": b""})}),
        ("no usable hash for demo/__init__.py", {"spoil": swap("RECORD", b"py,sha256", b"py,md5")}),
        ("RECORD is malformed", {"spoil": swap("RECORD", b"/RECORD,,", b"/RECORD")}),
        ("METADATA is of demo 1.0\\+resume.1", {"file": "demo-1.0+resume.2-py3-none-any.whl"}),
        ("METADATA is of demo 1.0\\+resume.1", {"file": "other-1.0+resume.1-py3-none-any.whl"}),
        ("not the name of a wheel", {"file": "demo.whl"}),
        ("bad Requires-Python", {"requires_python": "three"}),
    ],
)
def test_a_bad_wheel_is_one_clear_line_and_changes_nothing(tmp_path, message, made):
    good, bad = make_wheel(tmp_path / "good", "fine", "1.0"), make_wheel(tmp_path / "bad", **made)
    write_index([good], tmp_path / "simple")
    before = tree(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        write_index([good, bad], tmp_path / "simple")
    assert str(bad) in str(caught.value) and "\n" not in str(caught.value)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_truncated_wheel_is_refused(tmp_path, share):
    wheel = make_wheel(tmp_path / "in", body="# padding\n" * 100)
    content = wheel.read_bytes()
    wheel.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(UserError, match="truncated or corrupt wheel"):
        write_index([wheel], tmp_path / "simple")


def test_every_flipped_byte_that_changes_a_file_is_noticed(tmp_path):
    wheel = make_wheel(tmp_path / "in")
    content = wheel.read_bytes()
    start = content.index(b"version = ")
    for place in range(start, start + 20):
        wheel.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(UserError, match=EXAMPLE.replace("+", r"\+")):
            write_index([wheel], tmp_path / "simple")


def test_a_missing_wheel_is_refused(tmp_path):
    with pytest.raises(UserError, match="no such wheel"):
        write_index([tmp_path / EXAMPLE], tmp_path / "simple")


def test_a_published_wheel_that_changed_or_went_is_refused(tmp_path):
    write_index([make_wheel(tmp_path / "in")], tmp_path / "simple")
    make_wheel(tmp_path / "simple" / "demo", body="x = 1\n")
    with pytest.raises(UserError, match="changed since it was published"):
        read_index(tmp_path / "simple")
    (tmp_path / "simple" / "demo" / EXAMPLE).unlink()
    with pytest.raises(UserError, match="missing, though published"):
        read_index(tmp_path / "simple")


# Writes an index of two wheels over one of one wheel, in a child that dies at its n-th touch of the disk, for
# every n until one lives; after each the old index or the new one is there, whole, and a next run ends well.
KILLS = """
import os, sys
from pathlib import Path
from carry.index import read_index, write_index

work, old, new = Path(sys.argv[1]), [Path(sys.argv[2])], [Path(sys.argv[2]), Path(sys.argv[3])]
dest = work / "simple"
write_index(new, work / "want")
files = lambda folder: {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
want, seen = files(work / "want"), set()
for limit in range(1, 500):
    write_index(old, dest)
    had = files(dest)
    child = os.fork()
    if child == 0:
        count = 0
        def hook(event, args):
            global count
            writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
            if writes or event in {"os.mkdir", "os.rename", "os.link", "os.remove", "os.rmdir"}:
                count += 1
                if count == limit:
                    os._exit(9)
        sys.addaudithook(hook)
        write_index(new, dest)
        os._exit(0)
    died = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    read_index(dest)
    state = files(dest)
    assert state in (had, want), sorted(state)
    seen.add(state == want)
    write_index(new, dest)
    assert files(dest) == want
    assert sorted(p.name for p in work.iterdir()) == ["simple", "want"], list(work.iterdir())
    if died == 0:
        break
assert seen == {True, False} and limit > 10, (seen, limit)
print(limit)
"""


def test_a_kill_at_any_write_leaves_the_old_index_or_the_new(tmp_path):
    one, two = make_wheel(tmp_path / "in", "a", "1.0"), make_wheel(tmp_path / "in", "b", "1.0")
    (tmp_path / "work").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", KILLS, tmp_path / "work", one, two], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


FULL = """
import resource, sys
from pathlib import Path
from carry.errors import CarryError
from carry.index import write_index

resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_index([Path(sys.argv[1])], Path(sys.argv[2]))
except CarryError as error:
    print(error)
    sys.exit(error.exit_code)
"""


def test_a_disk_that_takes_no_more_leaves_the_old_index(tmp_path):
    dest = tmp_path / "out" / "simple"
    write_index([make_wheel(tmp_path / "in", "small", "1.0")], dest)
    before = tree(tmp_path / "out")
    big = make_wheel(tmp_path / "in", body="# padding\n" * 1000)
    done = subprocess.run([sys.executable, "-c", FULL, big, dest], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (13, "")
    assert done.stdout.count("\n") == 1 and "cannot write the index (File too large)" in done.stdout
    assert tree(tmp_path / "out") == before


def test_errors_of_the_index_are_carrys(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CarryError, match="cannot write the index"):
        write_index([], Path(tmp_path / "file" / "simple"))

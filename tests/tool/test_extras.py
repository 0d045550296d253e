import hashlib
import io
import tarfile
import zipfile
from pathlib import Path

import pytest
from carry.envs import with_local_builds
from carry.errors import UserError
from carry.extras import Sources, load_extras, unpack_extras
from toyhouse import ToyHouse


@pytest.fixture
def links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip is told to look in, and nothing else."""
    folder = tmp_path / "links"
    folder.mkdir(exist_ok=True)
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return folder


def make_wheel(path: Path) -> Sources:
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("kernels/__init__.py", "kernels/deep/adam.py", "kernels/fast.so", "other/__init__.py"):
            archive.writestr(name, f"# {name}\n")
    return Sources("kernels", path.name, hashlib.sha256(path.read_bytes()).hexdigest(), "kernels")


def test_only_the_sources_of_the_package_are_unpacked(toy: ToyHouse, links: Path, tmp_path: Path):
    dest = tmp_path / "site"
    unpack_extras(toy.house, [make_wheel(links / "kernels-0.1-cp310-cp310-linux_x86_64.whl")], dest)
    found = sorted(str(path.relative_to(dest)) for path in dest.rglob("*") if path.is_file())
    assert found == ["kernels/__init__.py", "kernels/deep/adam.py"]


def test_a_module_inside_an_sdist(toy: ToyHouse, links: Path, tmp_path: Path):
    path = links / "get-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in ("get-1.0/setup.py", "get-1.0/src/get.py"):
            member = tarfile.TarInfo(name)
            member.size = len(name)
            archive.addfile(member, io.BytesIO(name.encode()))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    unpack_extras(toy.house, [Sources("get", path.name, digest, "get.py", "get-1.0/src")], tmp_path / "site")
    assert [path.name for path in (tmp_path / "site").iterdir()] == ["get.py"]
    with pytest.raises(UserError, match=r"holds no \.py file of got"):
        unpack_extras(toy.house, [Sources("get", path.name, digest, "got", "get-1.0")], tmp_path / "site")


def test_another_file_is_refused(toy: ToyHouse, links: Path, tmp_path: Path):
    extra = make_wheel(links / "kernels-0.1-cp310-cp310-linux_x86_64.whl")
    wrong = Sources(extra.project, extra.file, "0" * 64, extra.package)
    with pytest.raises(UserError, match=f"has sha256 {extra.sha256}, not {'0' * 64}"):
        unpack_extras(toy.house, [wrong], tmp_path / "site")
    assert not (tmp_path / "site").exists()


@pytest.mark.parametrize("text", ("[[sources]]\nproject = 1\n", "sources = [", '[[sources]]\npackages = "a"\n'))
def test_a_malformed_list_is_refused(toy: ToyHouse, text: str):
    path = toy.root / "ci" / "stacks" / "toy.extra.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    with pytest.raises(UserError, match=r"toy\.extra\.toml"):
        load_extras(toy.house, path)


def test_a_local_build_takes_the_place_of_its_version_where_its_hash_is_listed(tmp_path: Path):
    wheel = tmp_path / "torch-2.0+cpu-cp311-cp311-linux_x86_64.whl"
    wheel.write_bytes(b"a build")
    listed = f"torch==2.0 \\\n    --hash=sha256:{hashlib.sha256(b'a build').hexdigest()}\ntorchx==2.0 \\\n"
    assert with_local_builds(listed, ["", str(tmp_path)]) == listed.replace("torch==2.0 ", "torch==2.0+cpu ", 1)
    other = "torch==2.0 \\\n    --hash=sha256:00\n"
    assert with_local_builds(other, [f"file://{tmp_path}"]) == other

import pytest
from carry.errors import UserError
from carry.pins import all_pins, load_pin, load_upstream, versions
from toyhouse import UPSTREAM, ToyHouse


def test_a_pin_is_what_its_file_says(toy: ToyHouse):
    pin = load_pin(toy.house, "toy", "1.0")
    assert (str(pin), pin.sdist, pin.tag, pin.commit) == ("toy 1.0", "toy-1.0.tar.gz", "v1.0", None)
    assert (pin.revision, pin.stacks, pin.folder) == (1, ("toy-stack",), toy.folder)
    assert dict(pin.upstream.mirrors) == {"toy/native": "native"}
    assert pin.upstream.generated == {"toy/built.py": ("version=",)}


def test_unknown_names_list_what_exists(toy: ToyHouse):
    with pytest.raises(UserError, match=r"no upstream 'tov' in patches/; there is: toy"):
        load_upstream(toy.house, "tov")
    with pytest.raises(UserError, match=r"no pin toy '1.1' in patches/; there is: 1.0"):
        load_pin(toy.house, "toy", "1.1")
    with pytest.raises(UserError, match="needs UPSTREAM="):
        all_pins(toy.house, None, "1.0")


def test_versions_are_ordered_as_numbers(toy: ToyHouse):
    for version in ("0.9", "0.10", "10.0", "2.0"):
        (toy.folder.parent / version).mkdir()
        (toy.folder.parent / version / "pin.toml").touch()
    assert versions(toy.house, "toy") == ["0.9", "0.10", "1.0", "2.0", "10.0"]


@pytest.mark.parametrize(
    ("old", "new", "line", "what"),
    [
        ("revision", "revison", 5, "unknown key 'revison'; did you mean 'revision'?"),
        ("tag =", "zzzzzz =", 4, "unknown key 'zzzzzz'; known are version"),
        ('tag = "v1.0"\n', "", 1, "key 'tag' is missing"),
        ("revision = 1", 'revision = "1"', 5, "revision is not a whole number"),
        ("revision = 1", "revision = 0", 5, "revision is below 1"),
        ('version = "1.0"', 'version = "1.1"', 1, "version '1.1' is not the folder's name '1.0'"),
        ('sha256 = "', 'sha256 = "X', 3, "sha256 is not 64 lower-case hex digits"),
        ("toy-1.0.tar.gz", "../toy-1.0.tar.gz", 2, "sdist is not a plain file name"),
        ('["toy-stack"]', "[]", 6, "stacks is empty"),
        ("stacks", 'published = "abc"\nstacks', 6, "published is not 64 lower-case hex digits"),
        ("stacks", 'commit = "abc"\nstacks', 6, "commit is not 40 lower-case hex digits"),
    ],
)
def test_a_malformed_pin_is_named_with_its_line(toy: ToyHouse, old: str, new: str, line: int, what: str):
    text = toy.pin_file.read_text()
    assert old in text
    toy.pin_file.write_text(text.replace(old, new, 1))
    with pytest.raises(UserError) as caught:
        load_pin(toy.house, "toy", "1.0")
    assert str(caught.value).startswith(f"patches/toy/1.0/pin.toml:{line}: {what}")


def test_toml_that_does_not_parse(toy: ToyHouse):
    toy.pin_file.write_text("version = \n")
    with pytest.raises(UserError, match=r"patches/toy/1.0/pin.toml: not valid TOML \(.*line 1"):
        load_pin(toy.house, "toy", "1.0")


def test_an_unknown_key_of_an_upstream(toy: ToyHouse):
    path = toy.folder.parent / "upstream.toml"
    path.write_text(UPSTREAM.replace("[mirrors]", "[mirors]"))
    with pytest.raises(UserError, match=r"upstream.toml:5: unknown key 'mirors'; did you mean 'mirrors'\?"):
        load_upstream(toy.house, "toy")

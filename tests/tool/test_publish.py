"""Promotion: only proven bytes, never an old name with new ones, never the pristine twin."""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path

import pytest
from carry.errors import UserError
from carry.index import write_index
from carry.paths import House
from carry.pins import all_pins
from carry.publish import Published, Refused, publish
from carry.schema import fault_in
from wheelmaker import make_wheel, provenance, tree

STACK = "demo-cpu"
WHEEL = "demo-1.0+resume.1-py3-none-any.whl"
GREEN = {"outcome": "green", "symptom": None, "message": None, "duration_s": 0.1}
RED = {"outcome": "red", "symptom": "MastersStale", "message": "w differs", "duration_s": 0.3}


@pytest.fixture
def house(tmp_path) -> House:
    house = House(tmp_path / "house")
    (house.patches / "demo").mkdir(parents=True)
    (house.patches / "demo" / "upstream.toml").write_text('name = "demo"\nimport = "demo"\n')
    pin(house, "1.0", revision=1)
    return house


def pin(house: House, version: str, revision: int, stacks: tuple[str, ...] = (STACK,)) -> None:
    folder = house.patches / "demo" / version
    folder.mkdir(exist_ok=True)
    (folder / "pin.toml").write_text(
        f'version = "{version}"\nsdist = "demo-{version}.tar.gz"\nsha256 = "{"0" * 64}"\ntag = "v{version}"\n'
        f"revision = {revision}\nstacks = {list(stacks)}\n"
    )


def build(house: House, version: str = "1.0", revision: int = 1, body: str = "", **carry: object) -> Path:
    """The candidate index gets both flavours, as `make build-wheels` leaves them."""
    inbox = house.build / "inbox"
    patched = make_wheel(
        inbox, version=f"{version}+resume.{revision}", body=body, carry=provenance(version, revision, **carry)
    )
    make_wheel(inbox, version=f"{version}+pristine", carry=provenance(version, revision, flavour="pristine"))
    write_index(inbox.iterdir(), house.candidate)
    return patched


def prove(house: House, wheel: Path, stack: str = STACK, /, **changes: object) -> dict:
    """A proof of `wheel` as `make prove` writes it; `changes` replace its fields."""
    proof = {
        "schema": 1,
        "upstream": "demo",
        "version": "1.0",
        "revision": 1,
        "stack": {"name": stack, "sha256": "0" * 64, "python": "3.11.7", "torch": "2.13.0+cpu"},
        "wheel": {"file": wheel.name, "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest()},
        "pristine": {"file": "demo-1.0+pristine-py3-none-any.whl", "sha256": "1" * 64},
        "series_sha256": "0" * 64,
        "tests_sha256": "2" * 64,
        "lane": "cpu",
        "duration_s": 1.5,
        "faults": {
            "stale-masters": {
                "patch": "0001-load-refresh-masters.patch",
                "verdict": "proven",
                "tests": [{"id": "tests/resume/test_x.py::test_y[0]", "pristine": RED, "patched": GREEN}],
            }
        },
        "guards": [{"id": "tests/resume/test_x.py::test_z", "pristine": GREEN, "patched": GREEN}],
        "verdict": "proven",
        **changes,
    }
    path = house.proofs / wheel.name.removesuffix(".whl") / f"{stack}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(proof))
    return proof


def refused(house: House, match: str) -> None:
    before = tree(house.dist) if house.dist.exists() else None
    with pytest.raises(Refused, match=match) as caught:
        publish(house, all_pins(house))
    assert all("\n" not in reason for reason in caught.value.reasons) and caught.value.exit_code == 1
    assert (tree(house.dist) if house.dist.exists() else None) == before


def test_the_proven_bytes_are_published_and_the_pristine_twin_is_not(house):
    wheel = build(house)
    prove(house, wheel)
    assert publish(house, all_pins(house)) == Published((WHEEL,), ())
    assert [name for name in tree(house.simple) if name.endswith(".whl")] == [f"demo/{WHEEL}"]
    assert (house.simple / "demo" / WHEEL).read_bytes() == wheel.read_bytes()
    before = tree(house.simple)
    assert publish(house, all_pins(house)) == Published((), (WHEEL,))
    assert tree(house.simple) == before


def test_a_new_revision_joins_the_old_one(house):
    prove(house, build(house))
    publish(house, all_pins(house))
    pin(house, "1.0", revision=2)
    prove(house, build(house, revision=2), revision=2)
    assert publish(house, all_pins(house)) == Published(("demo-1.0+resume.2-py3-none-any.whl",), (WHEEL,))
    page = json.loads((house.simple / "demo" / "index.json").read_bytes())
    assert page["versions"] == ["1.0+resume.1", "1.0+resume.2"]


def test_an_old_name_with_new_bytes_is_refused(house):
    prove(house, build(house))
    publish(house, all_pins(house))
    prove(house, build(house, body="x = 1\n"))
    refused(house, r"published with sha256 .*raise the revision in patches/demo/1.0/pin.toml")


def test_a_wheel_that_was_not_built_is_refused(house):
    refused(house, "demo 1.0 revision 1: not built; run `make build-wheels UPSTREAM=demo VERSION=1.0`")
    build(house)
    pin(house, "1.0", revision=2)
    refused(house, "demo 1.0 revision 2: not built")


def test_a_missing_proof_is_refused_with_the_command_to_run(house):
    build(house)
    refused(
        house,
        r"no proof dist/proofs/demo-1.0\+resume.1-py3-none-any/demo-cpu.json; "
        "run `make prove UPSTREAM=demo VERSION=1.0`",
    )


def test_every_stack_of_the_pin_needs_its_proof(house):
    pin(house, "1.0", revision=1, stacks=(STACK, "demo-new"))
    wheel = build(house)
    prove(house, wheel)
    refused(house, "no proof .*demo-new.json")
    prove(house, wheel, "demo-new")
    assert publish(house, all_pins(house)).added == (WHEEL,)


def test_one_unproven_wheel_holds_all_back_and_every_reason_is_told(house):
    prove(house, build(house))
    pin(house, "2.0", revision=1)
    pin(house, "3.0", revision=1)
    build(house, "2.0")
    with pytest.raises(Refused) as caught:
        publish(house, all_pins(house))
    assert len(caught.value.reasons) == 2
    assert not house.simple.exists()
    assert publish(house, all_pins(house, "demo", "1.0")).added == (WHEEL,)


def red_fault(pristine: dict, patched: dict) -> dict:
    test = {"id": "test_x.py::test_y", "pristine": pristine, "patched": patched}
    return {
        "faults": {"stale-masters": {"patch": "0001-a.patch", "verdict": "unproven", "tests": [test]}},
        "verdict": "unproven",
    }


ERROR = {"outcome": "error", "symptom": None, "message": "ImportError"}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (red_fault(RED, RED), "stale-masters: test_x.py::test_y is red on patched, not green"),
        (red_fault(GREEN, GREEN), "stale-masters: test_x.py::test_y is green on pristine, not red"),
        (red_fault(ERROR, GREEN), "stale-masters: test_x.py::test_y is error on pristine, not red"),
        (
            {"guards": [{"id": "test_z", "pristine": GREEN, "patched": RED}], "verdict": "unproven"},
            "guard test_z is red on patched, not green",
        ),
        (
            {
                "faults": {"stale-masters": {"patch": "0001-a.patch", "verdict": "unproven", "tests": []}},
                "verdict": "unproven",
            },
            "stale-masters has no test",
        ),
        ({"wheel": {"file": WHEEL, "sha256": "f" * 64}}, "is of another wheel or stack .ffffffffffff"),
        (
            {"stack": {"name": "other", "sha256": "0" * 64, "python": "3", "torch": "2"}},
            "is of another wheel or stack",
        ),
        ({"lane": "tpu"}, r"is malformed at \$.lane: 'tpu'"),
    ],
)
def test_a_red_or_foreign_proof_is_refused(house, changes, why):
    prove(house, build(house), **changes)
    refused(house, why + ".*run `make prove UPSTREAM=demo VERSION=1.0`")


def test_a_proof_that_skips_a_fault_of_the_wheel_is_refused(house):
    prove(house, build(house, faults=["stale-masters", "tag-ignored"]))
    refused(house, "says nothing of tag-ignored")


def test_a_proof_that_is_no_json_is_refused(house):
    wheel = build(house)
    prove(house, wheel)
    (house.proofs / WHEEL.removesuffix(".whl") / f"{STACK}.json").write_text("{")
    refused(house, "is not JSON")


def test_a_pristine_wheel_in_the_published_index_is_refused(house):
    prove(house, build(house))
    write_index(house.candidate.glob("demo/*pristine*.whl"), house.simple)
    refused(house, "pristine, yet published; delete dist/simple")


def contradictions(proof: dict):
    """Proofs that say proven and are not, or that lack what a reader relies on."""

    def change(*path_and_value):
        *path, last, value = path_and_value
        changed = copy.deepcopy(proof)
        at = changed
        for key in path:
            at = at[key]
        at[last] = value
        return changed

    fault = ("faults", "stale-masters")
    yield change(*fault, "tests", [])
    yield change(*fault, "tests", 0, "pristine", GREEN)
    yield change(*fault, "tests", 0, "pristine", ERROR)
    yield change(*fault, "tests", 0, "pristine", {"outcome": "red", "symptom": None})
    yield change(*fault, "tests", 0, "pristine", {"outcome": "red"})
    yield change(*fault, "tests", 0, "patched", RED)
    yield change(*fault, "verdict", "unproven")
    yield change("guards", 0, "pristine", ERROR)
    yield change("guards", 0, "patched", RED)
    yield change("faults", {})
    yield change("faults", "Not An Id", proof["faults"]["stale-masters"])
    yield change("wheel", "sha256", "abc")
    yield change("extra", 1)
    yield {key: value for key, value in proof.items() if key != "series_sha256"}


def test_the_schema_refuses_a_proof_that_contradicts_itself(house):
    proof = prove(house, build(house))
    assert fault_in(proof, "proof") is None
    wrong = list(contradictions(proof))
    assert [fault_in(one, "proof") for one in wrong if fault_in(one, "proof") is None] == []
    assert all("\n" not in fault_in(one, "proof") for one in wrong)


def test_the_committed_copy_without_durations_is_valid(house):
    text = json.dumps(prove(house, build(house)))
    bare = json.loads(text, object_hook=lambda item: {k: v for k, v in item.items() if k != "duration_s"})
    assert fault_in(bare, "proof") is None


def test_refusals_are_user_errors():
    assert issubclass(Refused, UserError)

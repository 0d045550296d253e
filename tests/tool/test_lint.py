import json

import pytest
from toyhouse import ToyHouse, write_pin

FIRST = "0001-core-spell-twenty.patch"
SECOND = "0002-native-return-two-quoted.patch"


def findings(toy: ToyHouse) -> list[str]:
    done = toy.run("lint", check=None)
    *found, count = done.stdout.splitlines()
    assert count == f"lint: {len(found)} finding{'s' * (len(found) != 1)}"
    assert done.returncode == (1 if found else 0)
    return found


def replace(toy: ToyHouse, name: str, old: str, new: str) -> None:
    path = toy.folder / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def reword(toy: ToyHouse, old: str, new: str) -> list[str]:
    """Findings once the first patch has a line of its message changed."""
    replace(toy, FIRST, old, new)
    return findings(toy)


def test_a_good_series_has_no_finding(series: ToyHouse):
    assert findings(series) == []


@pytest.mark.parametrize(
    ("old", "new", "line", "what"),
    [
        ("Fault: spelling\n", "", 11, "trailer 'Fault' is missing; add it to the commit message"),
        ("Affects: >=0.9\n", "", 11, "trailer 'Affects' is missing"),
        ("Upstream-Status: Pending\n", "", 11, "trailer 'Upstream-Status' is missing"),
        ("Proof: tests/resume/test_toy.py\n", "", 11, "trailer 'Proof' is missing"),
        ("Fault:", "Falut:", 8, "unknown trailer 'Falut'; known are Fault, Affects"),
        ("Fault: spelling", "Fault: Spelling!", 8, "fault id 'Spelling!' is not lower-case words"),
        ("Fault: spelling", "Fault: spelling\nFault: other", 9, "a second 'Fault'; keep one"),
        ("Bug: https://example.org/bugs/1", "Bug: 17", 9, "Bug '17' is not one URL"),
        ("Affects: >=0.9", "Affects: since 0.9", 10, "Affects 'since 0.9' is not a PEP 440 specifier"),
        ("Affects: >=0.9", "Affects: >=1.1", 10, "Affects leaves out 1.0, the release it is carried for"),
        (
            "Status: Pending",
            "Status: pending",
            11,
            "Upstream-Status 'pending' is malformed; write one of: Pending",
        ),
        ("Status: Pending", "Status: Submitted", 11, "Upstream-Status 'Submitted' is malformed"),
        ("Status: Pending", "Status: Inappropriate", 11, "Upstream-Status 'Inappropriate' is malformed"),
        ("test_toy.py", "test_gone.py", 12, "proof tests/resume/test_gone.py does not exist"),
        ("tests/resume/test_toy.py", "../../../etc/passwd", 12, "proof ../../../etc/passwd does not exist"),
        ("Affects: >=0.9", "Affects >=0.9", 10, "'Affects >=0.9' stands among the trailers"),
    ],
)
def test_each_rule_of_the_message(series: ToyHouse, old: str, new: str, line: int, what: str):
    found = reword(series, old, new)
    assert any(text.startswith(f"patches/toy/1.0/{FIRST}:{line}: {what}") for text in found), found
    assert all("; " in text for text in found)


@pytest.mark.parametrize(
    "status",
    [
        "Submitted https://example.org/pull/1",
        "Backport 1.1",
        "Denied https://example.org/1",
        "Inappropriate vendor",
    ],
)
def test_every_status_of_the_vocabulary_passes(series: ToyHouse, status: str):
    assert reword(series, "Status: Pending", f"Status: {status}") == []


def test_several_affects_are_a_union(series: ToyHouse):
    assert reword(series, "Affects: >=0.9", "Affects: <0.5\nAffects: >=0.9") == []


def test_a_fault_has_one_patch(series: ToyHouse):
    replace(series, SECOND, "Fault: native-two", "Fault: spelling")
    assert findings(series) == [
        f"patches/toy/1.0/{SECOND}:12: fault spelling already has {FIRST}; one patch per fault, so join them"
    ]


def test_orphans(series: ToyHouse):
    (series.folder / "notes.txt").touch()
    (series.folder / "0003-x.diff").touch()
    (series.folder.parent / "README").touch()
    (series.folder.parent / "2.0").mkdir()
    (series.root / "patches" / "lost").mkdir()
    found = findings(series)
    assert [text.split(": ")[0] for text in found] == [
        "patches/lost:1",
        "patches/toy/README:1",
        "patches/toy/1.0/0003-x.diff:1",
        "patches/toy/1.0/notes.txt:1",
        "patches/toy/2.0:1",
    ]


def test_a_gap(series: ToyHouse):
    (series.folder / SECOND).rename(series.folder / SECOND.replace("0002", "0003"))
    assert findings(series) == [
        "patches/toy/1.0/0003-native-return-two-quoted.patch:1: expected number 0002; "
        "number patches from 0001 without gap or repeat"
    ]


def test_an_offset(series: ToyHouse):
    replace(series, FIRST, "@@ -17,7 +17,7 @@", "@@ -15,7 +15,7 @@")
    (found,) = findings(series)[:1]
    assert found.startswith(f"patches/toy/1.0/{FIRST}:1: hunk 1 applies at line 17 only; run `make apply`")


def test_a_hunk_that_applies_with_less_context_only(series: ToyHouse):
    """What patch(1) would call fuzz: one context line is not the release's."""
    replace(series, FIRST, " line_17 = 17\n", " line_17 = 1700\n")
    (found,) = findings(series)
    assert "hunk 1 of 1 does not apply to toy/core.py:17" in found


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[PATCH] core", "[PATCH 1/2] core"),
        (" 1 file changed, 1 insertion(+), 1 deletion(-)\n", " 1 file changed\n"),
        (f"From {'0' * 40}", f"From {'1' * 40}"),
        ("Symptom, cause and fix.\n", "Symptom, cause and fix.  \n"),
    ],
)
def test_a_file_that_does_not_survive_apply_and_export(series: ToyHouse, old: str, new: str):
    (found,) = reword(series, old, new)
    assert found.startswith(f"patches/toy/1.0/{FIRST}:") and "does not survive apply and export" in found


def test_a_file_under_another_name(series: ToyHouse):
    (series.folder / FIRST).rename(series.folder / "0001-other.patch")
    assert "patches/toy/1.0/0001-other.patch:1: is exported under another name" in findings(series)[0]


def test_a_patch_to_a_mirror(toy: ToyHouse):
    toy.run("apply", "toy", "1.0")
    toy.edit("native/op.py", "return 1", "return 2")
    toy.commit("native: two", "two")
    toy.run("refresh", "toy", "1.0")
    name = "0001-native-two.patch"
    path = toy.folder / name
    path.write_text(path.read_text().replace("native/op.py", "toy/native/op.py"))
    line = 1 + next(n for n, text in enumerate(path.read_text().splitlines()) if text.startswith("diff --git"))
    assert findings(toy)[0] == (
        f"patches/toy/1.0/{name}:{line}: touches toy/native/op.py, a copy; patch native/op.py instead, the copy follows"
    )


def test_a_malformed_pin(series: ToyHouse):
    write_pin(series.pin_file, "0" * 63)
    assert findings(series) == ["patches/toy/1.0/pin.toml:3: sha256 is not 64 lower-case hex digits; "
                                "copy it from the package index"]  # fmt: skip


def test_the_revision_rises_when_the_series_changes(series: ToyHouse):
    from carry.lint import revision_findings
    from carry.patches import load_series, series_sha256

    def said() -> list[str]:
        return list(revision_findings(series.house, series.pin, load_series(series.pin)))

    proof = series.folder / "proof.json"
    proof.write_text(json.dumps({"series_sha256": series_sha256(load_series(series.pin)), "revision": 1}))
    assert said() == []
    wanted = "patches/toy/1.0/pin.toml:5: the series changed since revision 1 was proven; raise revision to 2"
    assert reword(series, "Symptom, cause", "The symptom, cause") == [wanted] == said()
    write_pin(series.pin_file, series.pin.sha256, revision=2)
    assert said() == []
    proof.write_text("{}")
    assert findings(series) == ["patches/toy/1.0/proof.json:1: not a proof; record it again with `make record`"]


def test_one_pin_only(series: ToyHouse):
    (series.root / "patches" / "lost").mkdir()
    assert series.run("lint", "--upstream", "toy", "--version", "1.0").stdout == "lint: 0 findings\n"
    assert "no upstream 'lost'" in series.run("lint", "--upstream", "lost", check=1).stderr

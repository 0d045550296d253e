import subprocess

import pytest
from carry.errors import UserError
from carry.git import environment
from carry.patches import Hunk, load_patch, load_series, series_sha256
from toyhouse import ToyHouse


def test_a_patch_file_is_read_in_full(series: ToyHouse):
    first, second = load_series(series.pin)
    assert (first.subject, second.subject) == ("core: spell twenty", "native: return two — “quoted”")
    assert (first.fault, second.fault) == ("spelling", "native-two")
    assert first.bugs == ("https://example.org/bugs/1",)
    assert (first.affects, first.upstream_status) == ((">=0.9",), "Pending")
    assert first.proof == "tests/resume/test_toy.py"
    assert second.files == ("native/new.py", "native/op.py")
    (change,) = first.changes
    lines = first.path.read_text().splitlines()
    (hunk,) = change.hunks
    assert lines[change.line - 1].startswith("diff --git a/toy/core.py")
    assert lines[hunk.line - 1].startswith("@@ -17,7")
    assert hunk == Hunk(1, hunk.line, 17)


def test_trailers_are_those_that_git_reads(series: ToyHouse):
    for patch in load_series(series.pin):
        message = patch.path.read_text().split("\n\n", 1)[1]
        git = subprocess.run(["git", "interpret-trailers", "--parse"], input=message, text=True,
                             capture_output=True, env=environment(), check=True)  # fmt: skip
        assert git.stdout.splitlines() == [f"{trailer.key}: {trailer.value}" for trailer in patch.trailers]


def test_removed_lines_that_look_like_headers_do_not_end_a_hunk(toy: ToyHouse):
    toy.run("apply", "toy", "1.0")
    toy.edit("toy/core.py", "line_3 = 3\n", "-- a/x\n")
    toy.edit("toy/core.py", "line_30 = 30\n", "@@ -1 +1 @@\n++ b/x\n")
    toy.commit("core: odd lines", "odd")
    toy.run("refresh", "toy", "1.0")
    (patch,) = load_series(toy.pin)
    assert [(change.file, [hunk.old_line for hunk in change.hunks]) for change in patch.changes] == [
        ("toy/core.py", [1, 27])
    ]


def test_the_series_hash_follows_names_order_and_content(series: ToyHouse):
    patches = load_series(series.pin)
    hashes = {
        series_sha256(patches),
        series_sha256(patches[::-1]),
        series_sha256(patches[:1]),
        series_sha256(()),
    }
    assert len(hashes) == 4


@pytest.mark.parametrize("text", ["", "diff --git a/x b/x\n", "From 0 Mon\nSubject: no end\n"])
def test_what_is_no_mail_is_refused(toy: ToyHouse, text: str):
    path = toy.folder / "0001-x.patch"
    path.write_text(text)
    with pytest.raises(UserError, match=r"^0001-x.patch:1: .*carry refresh"):
        load_patch(path)


def test_a_gap_in_the_numbers_stops_a_build(series: ToyHouse):
    (series.folder / "0001-core-spell-twenty.patch").unlink()
    done = series.run("build-wheels", check=1)
    assert "0002-native-return-two-quoted.patch: expected number 0001" in done.stderr


def test_a_patch_that_does_not_apply_names_file_hunk_and_line(series: ToyHouse):
    path = series.folder / "0001-core-spell-twenty.patch"
    text = path.read_text().replace("-line_20 = 20", "-line_20 = 2000")
    path.write_text(text)
    line = 1 + text.splitlines().index("@@ -17,7 +17,7 @@ line_16 = 16")
    for command in (["build-wheels"], ["apply", "toy", "1.0"]):
        done = series.run(*command, check=1)
        assert done.stderr.splitlines()[-1] == (
            f"carry: 0001-core-spell-twenty.patch:{line}: hunk 1 of 1 does not apply to toy/core.py:17: "
            "the lines it expects are not there; rebase it on this release"
        )
    assert not (series.root / "dist").exists()
    assert f":{line}: hunk 1 of 1 does not apply" in series.run("lint", check=1).stdout


def test_the_second_hunk_is_named_when_it_is_the_second(toy: ToyHouse):
    toy.run("apply", "toy", "1.0")
    toy.edit("toy/core.py", "line_5 = 5", "line_5 = 'five'")
    toy.edit("toy/core.py", "line_30 = 30", "line_30 = 'thirty'")
    toy.commit("core: spell", "spelling")
    toy.run("refresh", "toy", "1.0")
    (path,) = toy.folder.glob("*.patch")
    path.write_text(path.read_text().replace("-line_30 = 30", "-line_30 = 3000"))
    assert "hunk 2 of 2 does not apply to toy/core.py:27" in toy.run("build-wheels", check=1).stderr


def test_a_patch_to_a_file_that_is_not_there(series: ToyHouse):
    path = series.folder / "0001-core-spell-twenty.patch"
    path.write_text(path.read_text().replace("toy/core.py", "toy/gone.py"))
    said = series.run("build-wheels", check=1).stderr.splitlines()[-1]
    assert "0001-core-spell-twenty.patch:" in said and "toy/gone.py: does not exist in index" in said


def test_a_result_other_than_promised_is_refused(series: ToyHouse):
    path = series.folder / "0001-core-spell-twenty.patch"
    path.write_text(path.read_text().replace("+line_20 = 'twenty'", "+line_20 = 'twelve'"))
    said = series.run("build-wheels", check=1).stderr.splitlines()[-1]
    assert "toy/core.py is then not the text the patch was made for" in said

"""The matrix without a framework: cells and their ids, pairs, verdicts, the table, the comparison, the slice."""

from __future__ import annotations

import itertools
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from carry import matrix, matrixtable
from carry.errors import UserError
from carry.paths import House
from carry.schema import fault_in, write_document

sys.path.insert(0, str(Path(__file__).parents[1]))

from matrix import pairs, run, verdicts
from matrix.cells import AXES, RULES, Cell, matching, valid
from matrix.modes import MODES
from resume.symptoms import Crash, Hang, PeersHung

ROOT = Path(__file__).resolve().parents[2]
NEW = (0, 19, 8)
FULL = Cell("bf16", 1, "dense", "adamw", "1", "full")


@pytest.fixture(scope="module")
def cells():
    return valid(NEW)[0]


# cells


def test_ids_are_unique_plain_and_say_the_axes(cells):
    assert FULL.id == "bf16-z1-dense-adamw-1-full"
    ids = [cell.id for cell in cells]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", i) for i in ids)
    assert matching(cells, FULL.id) == [FULL]
    assert {c.mode for c in matching(cells, "bf16-z1-dense-adamw-1-*,none")} <= set(MODES)


def test_precision_by_stage_by_mode_is_whole_for_the_dense_model(cells):
    chosen = set(pairs.select(cells).cells)
    core = {c for c in cells if (c.model, c.optimizer) == ("dense", "adamw") and c.ranks in ("1", "2")}
    assert core <= chosen and len(core) > 1000


def test_every_pair_of_values_that_can_be_is_covered_the_same_way_each_time(cells):
    selection = pairs.select(cells)
    assert selection.covered == selection.possible == len(pairs.covered_by(cells))
    assert pairs.covered_by(selection.cells) == pairs.covered_by(cells)
    assert pairs.select(cells) == selection
    assert len(selection.cells) < len(cells) / 10


def test_rules_have_reasons_and_each_leaves_something_out():
    _, dropped = valid(NEW)
    early = valid((0, 12, 6))[1]
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert all(rule.reason and (dropped[rule.name] or early[rule.name]) for rule in RULES)
    assert early["universal-early"] and not dropped["universal-early"]


def test_every_mode_and_value_has_cells(cells):
    for axis, values in AXES.items():
        assert {getattr(c, axis) for c in cells} == set(values)


def test_cells_of_one_training_share_it():
    universal, tagged = (Cell("bf16", 1, "dense", "adamw", "1", m) for m in ("universal-noopt", "tag-int-full"))
    assert run.Training.of(FULL) == run.Training.of(universal) != run.Training.of(tagged)
    groups = run.groups_of([FULL, tagged, universal])
    assert sorted(len(members) for _, members in groups) == [1, 2]


def test_only_loads_that_need_a_missing_file_may_refuse():
    assert run.lacking(MODES["no-optim-full"], 1) and not run.lacking(MODES["no-optim-both"], 1)
    assert run.lacking(MODES["no-optim-both"], 3)
    assert not any(run.lacking(MODES[m], s) for m, s in itertools.product(("full", "universal-noopt"), range(4)))


def test_damage(tmp_path: Path):
    whole = tmp_path / "whole"
    (whole / "t").mkdir(parents=True)
    names = ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt")
    for name in (*names, "mp_rank_00_model_states.pt"):
        (whole / "t" / name).write_bytes(b"12345678")
    (whole / "latest").write_text("t")
    assert run.damage(whole, "t", ["delete:latest"]) and not (whole / "latest").exists()
    assert run.damage(whole, "t", ["delete:shard"])
    assert [p.name for p in sorted(whole.glob("t/*optim*"))] == [names[0]]
    assert run.damage(whole, "t", ["cut:model"])
    assert (whole / "t" / "mp_rank_00_model_states.pt").read_bytes() == b"1234"
    assert not run.damage(whole, "other", ["delete:optim"])


# an interrupted run


def test_what_an_interrupted_run_has_done_is_not_done_again(tmp_path: Path, monkeypatch):
    cells = [Cell("bf16", 1, "dense", "adamw", "1", mode) for mode in ("full", "noopt", "both")]
    rows, ran, limit = tmp_path / "rows.jsonl", [], [2]

    class Group:
        def __init__(self, training, members, scratch, pools):
            self.members = members

        def run(self):
            for cell in self.members:
                if len(ran) == limit[0]:
                    raise RuntimeError("interrupted")
                ran.append(cell.id)
                yield cell, verdicts.Verdict("exact", "", ""), 0.1

    monkeypatch.setattr(run, "Group", Group)
    with pytest.raises(RuntimeError, match="interrupted"):
        run.run(cells, tmp_path, 1, lambda line: None, run.Kept(rows))
    assert len(rows.read_text().splitlines()) == len(ran) == 2
    rows.write_text(rows.read_text().replace('"exact"', '"broken"', 1) + '{"id": "cut')
    said: list[str] = []
    limit[0] = 99
    found = run.run(cells, tmp_path, 1, said.append, run.Kept(rows))
    assert [row["id"] for row in found] == [cell.id for cell in cells]
    assert len(ran) == 4, "the broken one and the one that had not run"
    assert said[0].startswith("1 of 3 cells were run before")


def test_without_a_file_nothing_is_kept(tmp_path: Path):
    run.Kept(None).add({"id": "x", "class": "exact"})
    assert not list(tmp_path.iterdir())


# verdicts


def report(*found, path=True, exact=True):
    return {"phase": "load", "exact": exact, "path": path, "count": len(found), "found": list(found), "cpu_s": 0.1}


DIFFERENCE = {"kind": "masters", "name": "up.weight", "text": "3 of 4 elements differ, by up to 0.1", "by": 0.1}


@pytest.fixture
def raising(tmp_path: Path):
    """A Crash as from the line `source` of a file of DeepSpeed's."""
    folder = tmp_path / "deepspeed" / "runtime"
    folder.mkdir(parents=True)

    def make(type_name: str, text: str, source: str, upstream: bool = True, function: str = "load") -> Crash:
        file = folder / f"f{len(list(folder.iterdir()))}.py"
        file.write_text(source + "\n")
        return Crash(type_name, text, (type_name, "Exception"), [(str(file), 1, function)], upstream)

    return make


def test_what_equals_is_exact_and_what_differs_is_silent():
    assert verdicts.of_ranks(FULL, [report()], None).cls == "exact"
    found = verdicts.of_ranks(FULL, [report(), report(DIFFERENCE)], None)
    assert found.cls == "silent-wrong" and found.cause == "z1-2 full: masters wrong"
    assert "up.weight" in found.message
    assert verdicts.of_ranks(FULL, [report(), report(exact=False)], None).cls == "tolerance"


def test_no_path_is_an_answer_only_where_nothing_could_be_loaded():
    assert verdicts.of_ranks(FULL, [report(path=False)], "there is no tag").cls == "clear-error"
    assert verdicts.of_ranks(FULL, [report(path=False)], None).cls == "refused"
    assert verdicts.of_ranks(FULL, [report(DIFFERENCE, path=False)], "there is no tag").cls == "silent-wrong"


@pytest.mark.parametrize(
    ("type_name", "text", "source", "cls"),
    [
        (
            "ValueError",
            "no file x_optim_states.pt in /c; pass load_module_only=True",
            "    raise ValueError(",
            "refused",
        ),
        ("ValueError", "something went wrong", "    raise ValueError(text)", "unclear-error"),
        ("AssertionError", "", "    assert ok", "unclear-error"),
        ("KeyError", "'up.weight'", "    state['up.weight']", "crash"),
        ("KeyError", "'please use x.pt'", "    raise KeyError(text)", "unclear-error"),
        ("AttributeError", "'NoneType' object has no attribute 'x'", "    a.x", "crash"),
        ("FileNotFoundError", "No such file: '/c/mp_rank_00_model_states.pt'", "    open(path)", "unclear-error"),
    ],
)
def test_an_error_is_clear_when_raised_on_purpose_with_subject_and_advice(raising, type_name, text, source, cls):
    error = raising(type_name, text, source)
    assert verdicts.of_ranks(FULL, [error], None).cls == cls
    assert verdicts.of_ranks(FULL, [error], "it lacks it").cls == ("clear-error" if cls == "refused" else cls)


def test_shapes_that_torch_names_are_clear(raising):
    text = "Error(s) in loading state_dict for Dense: size mismatch for up.weight: copying a param with shape [4]"
    error = raising("RuntimeError", text, "    raise RuntimeError(", upstream=True, function="load_state_dict")
    assert verdicts.of_ranks(FULL, [error], "other shapes").cls == "clear-error"


def test_one_rank_alone_is_never_a_clear_error(raising):
    error = raising("ValueError", "no x_optim_states.pt; pass load_module_only=True", "raise ValueError(")
    assert verdicts.of_ranks(FULL, [error, report()], "it lacks it").cls == "unclear-error"
    waiting = PeersHung("while another failed with rank 0: ValueError: x")
    assert verdicts.of_ranks(FULL, [error, waiting], None).cls == "hang"
    assert verdicts.of_ranks(FULL, [Hang("rank 0 did not come back")], None).cls == "hang"


def test_our_own_failure_is_no_verdict_on_the_release():
    error = Crash("ZeroDivisionError", "x", (), [("/tests/matrix/jobs.py", 1, "load")], False)
    assert verdicts.of_ranks(FULL, [error], "whatever").cls == "broken"
    assert set(verdicts.BAD) == matrix.BAD and verdicts.CLASSES == matrix.CLASSES


# documents


def row(cell: str, cls: str, cause: str = "z1-2 full: masters wrong") -> dict:
    good = cls in ("exact", "tolerance")
    axes = dict(zip(("precision", "stage"), (cell.split("-")[0], int(cell.split("-")[1][1:])), strict=True))
    return {
        "id": cell, "axes": axes, "class": cls, "cause": "" if good else cause, "message": "" if good else "text",
        "duration_s": 0.1, "cpu_s": None,
    }  # fmt: skip


def document(*rows: dict, flavour: str = "patched") -> dict:
    return {
        "schema": 1, "upstream": "deepspeed", "version": "0.19.8", "flavour": flavour,
        "stack": {"name": "s", "sha256": "0" * 64, "python": "3.11.0", "torch": "2.13.0"},
        "wheel": {"file": "deepspeed.whl", "sha256": "0" * 64},
        "selection": "default", "coverage": {"covered": 2, "possible": 2},
        "left_out": {"rule": {"cells": 1, "reason": "upstream says so"}}, "duration_s": 1.0, "cells_per_s": 2.0,
        "counts": matrix.counts(rows), "cells": list(rows),
    }  # fmt: skip


A, B, C = "bf16-z1-dense-adamw-1-full", "bf16-z1-dense-adamw-1-noopt", "bf16-z2-dense-adamw-1-noopt"


def test_a_document_is_checked_when_written(tmp_path: Path):
    path = tmp_path / "matrix" / "x.json"
    write_document(document(row(A, "exact"), row(B, "crash")), "matrix", path)
    assert matrix.read(path)["counts"] == {"crash": 1, "exact": 1}
    wrong = document({**row(A, "crash"), "cause": ""})
    assert "cause" in fault_in(wrong, "matrix")
    path.write_text(json.dumps(wrong))
    with pytest.raises(UserError, match=r"malformed at .*cause"):
        matrix.read(path)
    with pytest.raises(UserError, match="no such file"):
        matrix.read(tmp_path / "absent.json")


def test_the_table_groups_by_cause_and_says_how_to_run_one_cell():
    text = matrix.table(document(row(A, "exact"), row(B, "silent-wrong"), row(C, "silent-wrong")))
    assert re.search(rf"^ +2  silent-wrong +z1-2 full: masters wrong  \[z1,2; bf16\]  {B}$", text, re.MULTILINE)
    assert f"make matrix UPSTREAM=deepspeed VERSION=0.19.8 FLAVOUR=patched CELLS={B}" in text
    assert "3 cells in 1 s, 2.0/s: silent-wrong 2, exact 1; 2 of 2 pairs" in text


def test_two_documents_compared():
    before = document(row(A, "exact"), row(B, "silent-wrong"))
    changes = matrix.compare(before, document(row(B, "exact"), row(A, "crash"), row(C, "exact")))
    assert changes.better == [(B, "silent-wrong", "exact")]
    assert changes.worse == [(A, "exact", "crash")]
    assert (changes.new, changes.gone, changes.same) == ([C], [], 0)
    assert changes.lines()[-1] == "1 better, 1 worse, 1 new, 0 gone, 0 the same"
    assert not matrix.compare(before, before).worse


def test_only_a_patched_wheel_fails_on_what_is_silent():
    rows = (row(A, "silent-wrong"), row(B, "crash"))
    assert matrix.Result(document(*rows), Path()).failed
    assert not matrix.Result(document(*rows, flavour="pristine"), Path()).failed
    assert not matrix.Result(document(row(A, "crash")), Path()).failed
    assert matrix.Result(document(row(A, "broken"), flavour="pristine"), Path()).failed


def test_the_slice_fails_on_what_is_not_listed_and_on_what_shows_no_more(tmp_path: Path):
    (tmp_path / "ci").mkdir()
    listed = tmp_path / matrix.KNOWN
    listed.write_text("")
    house, result = House(tmp_path), matrix.Result(document(row(A, "silent-wrong"), row(B, "crash")), Path())
    (line,) = matrix.unknown(house, [result])
    assert "silent-wrong: z1-2 full: masters wrong" in line and f"CELLS={A}" in line
    listed.write_text('["deepspeed 0.19.8"]\n"z1-2 full: masters wrong" = "no patch yet"\n')
    assert matrix.unknown(house, [result]) == []
    (line,) = matrix.unknown(house, [matrix.Result(document(row(A, "exact")), Path())])
    assert "shows no more" in line


def test_a_pin_whose_series_is_not_whole_may_show_any_cause_but_not_none(tmp_path: Path, capsys):
    (tmp_path / "ci").mkdir()
    (tmp_path / matrix.KNOWN).write_text('["deepspeed 0.19.8"]\n"*" = "half a series"\n')
    house = House(tmp_path)
    assert matrix.unknown(house, [matrix.Result(document(row(A, "silent-wrong"), row(B, "crash")), Path())]) == []
    assert "1 bad cells of 1 causes are let pass" in capsys.readouterr().err
    (line,) = matrix.unknown(house, [matrix.Result(document(row(A, "exact")), Path())])
    assert "'*' is listed" in line and "remove it" in line


def test_the_committed_slice_names_cells_and_its_known_causes_have_reasons(cells):
    for pattern in matrix.slice_patterns(House(ROOT)).split(","):
        assert matching(cells, pattern), pattern
    for pin in ("deepspeed 0.12.6", "deepspeed 0.19.8"):
        assert all(isinstance(reason, str) and reason for reason in matrix.known(House(ROOT), pin).values())


# the counts that are kept


class Pin(SimpleNamespace):
    def __str__(self) -> str:
        return f"{self.upstream.name} {self.version}"


@pytest.fixture
def kept(tmp_path: Path, monkeypatch):
    pin = Pin(upstream=SimpleNamespace(name="deepspeed"), version="0.19.8", stacks=("s",), folder=tmp_path / "pin")
    pin.folder.mkdir()
    monkeypatch.setattr(matrixtable, "all_pins", lambda house: [pin])
    (tmp_path / "README.md").write_text(f"before\n{matrixtable.BEGIN}\nold\n{matrixtable.END}\nafter\n")
    return House(tmp_path), pin


def run_of(house: House, flavour: str, *rows: dict, **changes) -> None:
    made = {**document(*rows, flavour=flavour), "wheel": {"file": "d-0.19.8+x-py3.whl", "sha256": "0" * 64}, **changes}
    write_document(made, "matrix", house.matrices / f"deepspeed-0.19.8-{flavour}-s.json")


def test_counts_of_whole_runs_are_kept_and_shown(kept):
    house, pin = kept
    run_of(house, "pristine", row(A, "silent-wrong"), row(B, "crash"))
    assert matrixtable.record(house) == [pin.folder / "matrix.json", house.root / "README.md"]
    run_of(house, "patched", row(A, "exact"), row(B, "clear-error"))
    matrixtable.record(house)
    lines = (house.root / "README.md").read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after") and "old" not in lines
    command = "make matrix UPSTREAM=deepspeed VERSION=0.19.8"
    assert f"| deepspeed 0.19.8 | 0.19.8+x | 2 | 1 | 1 | 0 | 0 | 0 | `{command} FLAVOUR=pristine` |" in lines
    assert f"| deepspeed 0.19.8 | 0.19.8+x | 2 | 0 | 0 | 0 | 1 | 1 | `{command}` |" in lines
    assert matrixtable.record(house) == []


def test_a_part_is_not_kept_and_a_readme_without_its_mark_is_refused(kept):
    house, pin = kept
    run_of(house, "patched", row(A, "exact"), selection="slice")
    matrixtable.record(house)
    assert matrixtable.recorded(pin) == {}
    with pytest.raises(UserError, match="no <!-- end of matrix -->"):
        matrixtable.with_table(f"before {matrixtable.BEGIN}", house)

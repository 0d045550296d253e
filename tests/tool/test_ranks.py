"""Ranks: real processes; results, errors, hangs and deaths come home, and the next run works."""

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from resume import symptoms  # noqa: E402
from resume.ranks import Ranks  # noqa: E402


@pytest.fixture(scope="module")
def two():
    pool = Ranks(2, "rank_functions:setup")
    yield pool
    pool.stop()


def pids(pool):
    return [row[3] for row in pool.run("rank_functions:who")]


def test_results_come_in_rank_order(two):
    rows = two.run("rank_functions:who")
    assert [row[:3] for row in rows] == [(0, 0, 2), (1, 1, 2)]


def test_runs_share_the_processes(two):
    assert pids(two) == pids(two)


def test_an_exception_comes_home_as_a_crash_with_its_frames(two):
    with pytest.raises(symptoms.Crash) as caught:
        two.run("rank_functions:fail", ranks=[0, 1])
    error = caught.value
    assert (error.type_name, error.text, error.rank) == ("KeyError", "'dp_world_size'", 0)
    assert error.frames[-1][2] == "fail"
    assert "LookupError" in error.mro
    assert not error.upstream


def test_processes_survive_an_error_that_all_ranks_share(two):
    before = pids(two)
    with pytest.raises(symptoms.Crash):
        two.run("rank_functions:fail", ranks=[0, 1])
    assert pids(two) == before


def test_a_symptom_stays_itself_and_a_lone_one_ends_the_processes(two):
    before = pids(two)
    with pytest.raises(symptoms.MastersStale, match="masters w"):
        two.run("rank_functions:fail", ranks=[1], symptom=True)
    assert set(pids(two)).isdisjoint(before)


def test_outcomes_tell_how_every_rank_ended(two):
    ok, failed = two.outcomes("rank_functions:fail", ranks=[1])
    assert ok == 0
    assert failed.type_name == "KeyError"
    assert failed.rank == 1
    two.stop()


def test_a_rank_that_waits_for_a_failed_one_is_named(two):
    with pytest.raises(symptoms.PeersHung, match=r"rank 1 did not come back.*optim_states"):
        two.run("rank_functions:one_fails_others_wait", grace=0.5)
    assert len(pids(two)) == 2


def test_a_hang_is_a_verdict(two):
    with pytest.raises(symptoms.Hang, match="within 1 s"):
        two.run("rank_functions:sleep", seconds=60, timeout=1)
    assert len(pids(two)) == 2


def test_a_death_is_an_error_and_the_next_run_works(two):
    with pytest.raises(symptoms.Crash, match="exit code 7"):
        two.run("rank_functions:die")
    assert len(pids(two)) == 2


def test_a_result_that_cannot_be_sent_is_an_error(two):
    with pytest.raises(symptoms.Crash, match="pickle"):
        two.run("rank_functions:unpicklable")


def test_a_setup_that_fails_says_why():
    pool = Ranks(1, "rank_functions:broken_setup")
    with pytest.raises(symptoms.Crash, match="ImportError: no such framework"):
        pool.run("rank_functions:who")
    pool.stop()

"""The plugin that turns a test into a proof.

``@pytest.mark.fault(id, symptom=...)``: on a wheel that does not fix the fault
the test must end in exactly that symptom (anything else, an import error above
all, is an error); on a wheel that fixes it the test must pass.
``@pytest.mark.guard``: the test must pass on every wheel.
``--carry-faults``: the faults of the series under test; tests of other faults are deselected.
``--carry-report``: where to write what happened, as JSON.
"""

from __future__ import annotations

import json
import os
import time

import pytest

from resume import symptoms, wheel
from resume.ranks import Ranks

# upstream -> what brings a rank up, and the module that ranks are forked with
SETUP = {
    "deepspeed": ("resume.deepspeed.compat:setup", "resume.deepspeed.preload"),
    "nemo": ("resume.nemo.compat:setup", "resume.nemo.preload"),
}


def pytest_addoption(parser):
    group = parser.getgroup("carry")
    group.addoption("--carry-upstream", default="deepspeed", help="the upstream whose wheel is installed")
    group.addoption("--carry-faults", default=None, help="comma-separated fault ids of the series under test")
    group.addoption("--carry-only", action="store_true", help="run no guards: only tests of --carry-faults")
    group.addoption("--carry-report", default=None, help="write outcomes as JSON to this file")


def pytest_configure(config):
    config.addinivalue_line("markers", "fault(id, symptom): red with the symptom unless the wheel fixes the fault")
    config.addinivalue_line("markers", "guard: must pass on every wheel, pristine or patched")
    config.carry_outcomes = []


@pytest.fixture(scope="session")
def release(request) -> wheel.Wheel:
    """The wheel under test."""
    return wheel.installed(request.config.getoption("--carry-upstream"))


def pytest_collection_modifyitems(config, items):
    wanted = config.getoption("--carry-faults")
    if wanted is None:
        return
    wanted = {*wanted.split(","), *([] if config.getoption("--carry-only") else [None])}
    keep, drop = [], []
    for item in items:
        mark = item.get_closest_marker("fault")
        (keep if (mark.args[0] if mark else None) in wanted else drop).append(item)
    if drop:
        config.hook.pytest_deselected(items=drop)
        items[:] = keep


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    mark = pyfuncitem.get_closest_marker("fault")
    record = {
        "fault": mark.args[0] if mark else None,
        "outcome": "error",
        "symptom": None,
        "message": "did not end",
        "as_expected": False,
    }
    installed = wheel.installed(pyfuncitem.config.getoption("--carry-upstream"))
    expect_red = mark is not None and mark.args[0] not in installed.faults
    if mark is not None:
        record["declared"] = symptoms.name_of(mark.kwargs["symptom"])
    started = time.monotonic()
    try:
        try:
            result = yield
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # pytest's own fail and skip are no Exception: they are errors here too
            known = mark is not None and symptoms.matches(mark.kwargs["symptom"], error)
            record.update(outcome="red" if known else "error", symptom=_name(error), message=str(error)[:500])
            record["as_expected"] = expect_red and known
            if not record["as_expected"]:
                raise
            return True
        record.update(outcome="green", message=None, as_expected=not expect_red)
        if expect_red:
            pytest.fail(
                f"{mark.args[0]} did not show on a wheel that does not fix it: declared symptom is "
                f"{record['declared']}, and the test passed",
                pytrace=False,
            )
        return result
    finally:
        record["duration_s"] = round(time.monotonic() - started, 3)
        pyfuncitem.user_properties.append(("carry", record))


def _name(error: BaseException) -> str:
    return f"Crash[{error.type_name}]" if isinstance(error, symptoms.Crash) else type(error).__name__


def pytest_runtest_logreport(report):
    if not hasattr(pytest_runtest_logreport, "outcomes"):
        return
    record = dict(report.user_properties).get("carry")
    if report.when == "call" and record is not None:
        pytest_runtest_logreport.outcomes[report.nodeid] = record
    elif report.failed or report.skipped:  # a fixture failed, or the test was skipped: an error, never a red
        pytest_runtest_logreport.outcomes[report.nodeid] = {
            "fault": None,
            "outcome": "error",
            "symptom": report.when,
            "message": report.longreprtext[-500:],
            "as_expected": False,
            "duration_s": round(report.duration, 3),
        }


def pytest_sessionstart(session):
    if session.config.getoption("--carry-report") and not hasattr(session.config, "workerinput"):
        pytest_runtest_logreport.outcomes = {}


def pytest_sessionfinish(session, exitstatus):
    path = session.config.getoption("--carry-report")
    if not path or hasattr(session.config, "workerinput"):
        return
    with open(f"{path}.part", "w") as file:
        json.dump({"exit": int(exitstatus), "outcomes": pytest_runtest_logreport.outcomes}, file, indent=1)
    os.replace(f"{path}.part", path)


@pytest.fixture(scope="session")
def pools(request):
    """One set of rank processes per world size, shared by all tests of a worker."""
    upstream, made = request.config.getoption("--carry-upstream"), {}

    def get(world: int) -> Ranks:
        if world not in made:
            made[world] = Ranks(world, *SETUP[upstream])
        return made[world]

    yield get
    for pool in made.values():
        pool.stop()

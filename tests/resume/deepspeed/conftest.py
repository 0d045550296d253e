"""Where the runs that tests share are kept: one folder a session, whatever the number of workers."""

import os

import pytest

from resume.deepspeed import kept


@pytest.fixture(scope="session", autouse=True)
def kept_runs(tmp_path_factory):
    base = tmp_path_factory.getbasetemp()
    kept.ROOT = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "kept"
    kept.ROOT.mkdir(exist_ok=True)

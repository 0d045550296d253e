"""NeMo's optimizers import without optional packages, and the whole of nemo.core with its real dependencies."""

from __future__ import annotations

import subprocess
import sys

import pytest

from resume.ranks import Ranks
from resume.symptoms import crash


@pytest.fixture(scope="module")
def bare():
    pool = Ranks(1, "resume.nemo.imports:setup")
    yield pool
    pool.stop()


@pytest.mark.fault("import-guards", symptom=crash("PackageNotFoundError", "transformer-engine"))
def test_distributed_optimizer_without_transformer_engine(bare):
    bare.run("resume.nemo.imports:module", name="nemo.core.optim.distributed_adam")
    said = bare.run("resume.nemo.imports:fp8_without_transformer_engine")[0]
    assert "Transformer Engine" in said and "not installed" in said


@pytest.mark.fault("import-guards", symptom=crash("ImportError", "tensorstore"))
def test_checkpoints_without_zarr(bare):
    bare.run("resume.nemo.imports:checkpoint_io")


@pytest.mark.guard
def test_whole_of_nemo_core_imports():
    code = "import nemo.core, nemo.core.optim; print(len(nemo.core.optim.__dict__))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and int(done.stdout.split()[-1]) > 20, done.stderr[-2000:]

"""pytest on the tool's own tests."""

from __future__ import annotations

import shutil
import subprocess
import sys

from carry.paths import House


def test_tool(house: House) -> int:
    """Run tests/tool on two processes; 0, or 1 where a test failed."""
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal", str(house.tests / "tool")]
    return 1 if subprocess.run(command, cwd=house.root).returncode else 0


def test_client(house: House) -> int:
    """Run tests/client, which installs from dist/simple as a user would; 0, or 1 where a test failed."""
    scratch = house.build / "client"  # gigabytes: on the disk where the other environments are, and not kept
    command = [sys.executable, "-m", "pytest", str(house.tests / "client"), "--basetemp", str(scratch)]
    try:
        return 1 if subprocess.run(command, cwd=house.root).returncode else 0
    finally:
        shutil.rmtree(scratch, ignore_errors=True)

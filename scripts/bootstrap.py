"""Make .venv, the environment that carry runs in. Runs on any Python 3, to say so where it is too old.

make runs it each time: where .venv is right it only hashes two small files.
"""

import fcntl
import hashlib
import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
READY = os.path.join(VENV, ".ready")  # written last: without it the environment is not whole
OLDEST = (3, 10)


def main():
    if sys.version_info < OLDEST:
        return fail(
            "Python {}.{} is too old; carry needs {}.{} or newer; run `make PYTHON=python3.x` with one",
            *sys.version_info[:2] + OLDEST,
        )
    if read(READY) == fingerprint():
        return 0
    with open(os.path.join(ROOT, ".venv.lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say("another run is making .venv; waiting for it to end")
            fcntl.flock(lock, fcntl.LOCK_EX)
        return make()


def make():
    import shutil
    import subprocess

    wanted = fingerprint()
    if read(READY) == wanted:  # made while we waited
        return 0
    say("making .venv (a minute at most)")
    if os.path.exists(READY):
        os.remove(READY)
    # started with .venv's own Python, which is about to go: the one it was made from makes the next
    python = getattr(sys, "_base_executable", None) or sys.executable
    shutil.rmtree(VENV, ignore_errors=True)
    if subprocess.call([python, "-m", "venv", VENV]):
        return fail("cannot make .venv; install this Python's venv module (on Debian: python3-venv)")
    pip = [os.path.join(VENV, "bin", "python"), "-m", "pip", "--disable-pip-version-check"]
    if subprocess.call(pip + ["install", "--quiet", "--quiet", "--editable", ROOT + "[dev]"]):
        return fail("pip could not install carry's dependencies; check the network and pip's index, run again")
    beside = READY + ".new"
    with open(beside, "w") as handle:
        handle.write(wanted)
    os.replace(beside, READY)
    return 0


def fingerprint():
    """Of what the environment is made from: pyproject.toml, this file, this Python, and where it lies."""
    digest = hashlib.sha256()
    for name in (os.path.join(ROOT, "pyproject.toml"), os.path.abspath(__file__)):
        with open(name, "rb") as handle:
            digest.update(handle.read())
    digest.update("{} {} {}".format(sys.version, sys.base_prefix, ROOT).encode())
    return digest.hexdigest()


def read(path):
    try:
        with open(path) as handle:
            return handle.read()
    except OSError:
        return None


def say(line):
    sys.stderr.write(line + "\n")


def fail(line, *values):
    say("carry: " + line.format(*values))
    return 13


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        say("carry: interrupted; run the same command again to carry on")
        sys.exit(130)
    except OSError as error:
        sys.exit(fail("cannot make .venv: {}; correct that and run again", error))

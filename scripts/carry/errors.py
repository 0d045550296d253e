"""Every error a user can meet, with its exit code.

A message is one line: what happened, where, and what to do.
"""


class CarryError(Exception):
    """Something is wrong on our side (exit 3), unless a subclass says otherwise."""

    exit_code = 3


class UserError(CarryError):
    """The caller asked for something that cannot be, or a file of theirs is wrong."""

    exit_code = 1


class LintError(UserError):
    """Findings of `carry lint`; already shown, one line each."""


class ReviewNeeded(CarryError):
    """A person has to look: a patch can be dropped or was rebased."""

    exit_code = 10


class FixNeeded(CarryError):
    """A patch no longer works and has to be mended."""

    exit_code = 11


class Undecided(CarryError):
    """The signals contradict each other, or a proof is flaky."""

    exit_code = 12


class CouldNotRun(CarryError):
    """The surroundings failed: no network, disk full, a tool missing."""

    exit_code = 13


class NoGpu(CarryError):
    """A GPU lane was asked for and there is no GPU."""

    exit_code = 20

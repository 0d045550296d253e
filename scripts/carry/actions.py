"""What a workflow of GitHub Actions reads from a step: outputs and the run's summary. Nothing elsewhere."""

from __future__ import annotations

import os


def active() -> bool:
    return os.environ.get("GITHUB_ACTIONS") == "true"


def output(name: str, value: str) -> None:
    """Hand `value`, one line, to later steps as `steps.<id>.outputs.<name>`."""
    _append("GITHUB_OUTPUT", f"{name}={value}\n")


def summary(markdown: str) -> None:
    """Add to the page of the run."""
    _append("GITHUB_STEP_SUMMARY", markdown)


def annotation(level: str, file: str, line: int, title: str, text: str) -> str:
    """The workflow command that puts `text` at a line of a file; `level` is error, warning or notice."""
    return f"::{level} file={_escaped(file, ':,')},line={line},title={_escaped(title, ':,')}::{_escaped(text)}"


def _append(variable: str, text: str) -> None:
    path = os.environ.get(variable)
    if active() and path:
        with open(path, "a", encoding="utf-8") as handle:
            handle.write(text)


def _escaped(value: str, more: str = "") -> str:
    for sign in "%\r\n" + more:
        value = value.replace(sign, f"%{ord(sign):02X}")
    return value

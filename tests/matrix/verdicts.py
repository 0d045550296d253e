"""From what every rank of a cell came back with to one class, one cause and one message. Knows nothing of torch."""

from __future__ import annotations

import linecache
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from resume.symptoms import Crash, Hang, PeersHung

from matrix.cells import Cell

# the worst first: a cell is what its worst rank is
CLASSES = (
    "broken",  # the matrix itself failed: never a verdict on the release
    "hang",
    "silent-wrong",
    "crash",
    "unclear-error",
    "refused",  # a clear error where the checkpoint holds all that the load needs
    "clear-error",  # a clear error where it does not
    "tolerance",
    "exact",
)
BAD = ("broken", "hang", "silent-wrong", "unclear-error")
RIGHT = ("clear-error", "tolerance", "exact")

# refusals of a load that the checkpoint holds the data for, which we leave as they are
REFUSALS: tuple[tuple[str, str, str], ...] = (
    (
        "other-stage",
        "or convert it to a universal checkpoint with ds_to_universal.py",
        "upstream documents universal checkpoints as the way of optimizer states to another ZeRO stage",
    ),
    (
        "stage0-to-zero",
        "is missing: the checkpoint was saved without ZeRO, or is incomplete",
        "upstream has no way of optimizer states from stage 0 to ZeRO: its conversion takes ZeRO checkpoints",
    ),
    (
        "zero-to-stage0",
        "holds no optimizer states, but not those of",
        "upstream has no way of optimizer states from ZeRO to stage 0: universal checkpoints are read by ZeRO",
    ),
    (
        "zero-to-stage0-experts",
        "_optim_states.pt' is missing. Restore it, or load another checkpoint",
        "the same with experts, whose states stage 0 keeps in files that ZeRO does not write",
    ),
    (
        "stage0-other-precision",
        "holds optimizer states of another precision or optimizer, but not those of",
        "the wrappers of stage 0 keep a state for each precision's optimizer, by position, that no other one reads",
    ),
    (
        "elastic-world-size",
        "they were saved with zero_optimization.elastic_checkpoint, without their param groups",
        "elastic shards hold no param groups, so there is nothing to say which parameters a flat tensor is of",
    ),
)

_ADVICE = re.compile(
    r"(?i)\b(please|use|set|pass|make sure|ensure|must|should|try|convert|run|only|instead|needs?|requires?|check|"
    r"restore|start|load|freeze)\b"
)
# a file, a number, a name in quotes, a name with an underscore or a dot such as an option's or a parameter's, a path
_SUBJECT = re.compile(
    r"[\w.-]+\.(?:pt|bin|json|safetensors)\b|['\"][^'\"]+['\"]|\b\w+(?:_\w+)+\b|\b\w+(?:\.\w+)*\.(?:weight|bias)\b|/\w|\d"
)


# situations that upstream has code for; in all others the plain load's code runs
_OWN_CODE = ("tag", "universal", "unconverted", "to32", "save16", "into", "from", "masters-low", "custom", "elastic")


class Verdict(NamedTuple):
    """``cpu_s``: seconds of processor of all ranks; None where one did not come back to say."""

    cls: str
    cause: str
    message: str
    cpu_s: float | None = None


def _upstreams(file: str) -> bool:
    return "/deepspeed/" in file and "/resume/deepspeed/" not in file


def deliberate(error: Crash) -> bool:
    """Whether upstream raised it on purpose: its innermost frame is upstream's and stands at a raise or an assert.

    torch's load_state_dict counts too: its message names the parameter and both shapes.
    """
    if not error.frames:
        return False
    file, line, function = error.frames[-1]
    if function == "load_state_dict" and error.text.startswith("Error(s) in loading state_dict"):
        return True
    text = linecache.getline(file, line).strip()
    return error.upstream and "/torch/" not in file and text.startswith(("raise", "assert"))


def is_clear(error: Crash) -> bool:
    """Whether the message says what is missing or does not fit, and what to do: both by plain patterns."""
    if error.type_name in ("KeyError", "AttributeError", "TypeError", "IndexError") or not deliberate(error):
        return False
    if error.text.startswith("Error(s) in loading state_dict"):
        return True
    return bool(_SUBJECT.search(error.text) and _ADVICE.search(error.text))


def _says_what(error: Crash) -> bool:
    """Whether a message that nobody meant for the user at least names the file or the parameter."""
    return error.type_name not in ("KeyError", "AttributeError", "TypeError", "IndexError") and bool(
        re.search(r"\.pt\b|\.(weight|bias)\b|/\w", error.text)
    )


def place(error: Crash) -> str:
    """The innermost upstream frame, as folder/file:function."""
    frames = [f for f in error.frames if _upstreams(f[0])] or list(error.frames)
    if not frames:
        return "?"
    file, _, function = frames[-1]
    return f"{'/'.join(file.split('/')[-2:])}:{function}"


def of_error(cell: Cell, error: BaseException, lacks: str | None, phase: str) -> Verdict:
    """``lacks``: why the checkpoint cannot give what is asked for. ``phase``: save, convert or load."""
    if isinstance(error, (Hang, PeersHung)):
        first = re.search(r"failed with rank \d+: (\w+)", str(error))
        return Verdict("hang", f"hang in {phase}: a rank alone raises {first[1] if first else '?'}", str(error))
    if not isinstance(error, Crash):
        return Verdict("broken", f"{type(error).__name__} in {phase}", str(error))
    message = f"{error.type_name}: {' '.join(error.text.split())[:400]}"
    where = f"{error.type_name} at {place(error)}"
    if phase != "load":
        where = f"{phase}: {where}"
    if error.type_name == "ProcessDied":
        return Verdict("crash", f"{phase}: process died", error.text)
    if not error.upstream and not deliberate(error):
        if any(_upstreams(f[0]) for f in error.frames):
            return Verdict("crash", where, message)
        return Verdict("broken", where, f"{message} at {error.frames[-1:] or ''}")
    if is_clear(error):
        allowed = lacks or next((reason for name, text, reason in REFUSALS if text in error.text), None)
        return Verdict("clear-error" if allowed else "refused", where, message)
    return Verdict("unclear-error" if deliberate(error) or _says_what(error) else "crash", where, message)


def of_report(cell: Cell, report: dict[str, Any], lacks: str | None) -> Verdict:
    """A rank that came back: nothing differs, or something does and nobody said so."""
    if not report["path"]:
        if report["count"]:
            return Verdict("silent-wrong", "returned no path and changed the engine", _difference(report))
        if lacks:
            return Verdict("clear-error", "returned no path, as documented", "load_checkpoint returned no path")
        return Verdict("refused", "returned no path", "load_checkpoint returned no path")
    if report["count"]:
        first = report["found"][0]
        what = first["text"] if first["text"] in ("missing", "unexpected") else "wrong"
        if "rounded they are not" in first["text"]:
            what = "stale"
        return Verdict("silent-wrong", f"{_kin(cell, report['phase'])}: {first['kind']} {what}", _difference(report))
    return Verdict("exact" if report["exact"] else "tolerance", "", "")


def _kin(cell: Cell, phase: str) -> str:
    """What cells of one cause share: the stage's code, the flags, and the situation where it has code of its own."""
    stage = {0: "z0", 3: "z3"}.get(cell.stage, "z1-2")
    situation = cell.how.situation
    own = situation if situation.startswith(_OWN_CODE) else ""
    return " ".join(filter(None, (stage, own, cell.how.flags, "" if phase == "load" else phase)))


def _difference(report: dict[str, Any]) -> str:
    first = report["found"][0]
    more = f" ({report['count'] - 1} more)" if report["count"] > 1 else ""
    return f"{report['phase']}: {first['kind']} {first['name']}: {first['text']}{more}"


def of_ranks(cell: Cell, ended: Sequence[Any], lacks: str | None, phase: str = "load") -> Verdict:
    """The worst of all ranks."""
    verdicts = [
        of_error(cell, one, lacks, phase) if isinstance(one, BaseException) else of_report(cell, one, lacks)
        for one in ended
    ]
    worst = min(verdicts, key=lambda v: CLASSES.index(v.cls))
    raised = sum(isinstance(one, BaseException) for one in ended)
    if not raised:
        worst = worst._replace(cpu_s=round(sum(one["cpu_s"] for one in ended), 3))
    if 0 < raised < len(ended) and worst.cls in ("refused", "clear-error"):
        return worst._replace(cls="unclear-error", cause=f"{worst.cause} on one rank only")
    return worst

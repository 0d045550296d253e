"""What a resume that went wrong looks like: one class per thing a user loses.

The oracle raises these; the plugin compares them with the symptom that a test
declares.  ``Crash`` and ``Hang`` are what the rank runner brings home.
"""

from __future__ import annotations


class Symptom(Exception):
    """A resume did not do what was asked. The message names the first thing that differs."""


class WeightsNotRestored(Symptom):
    """A parameter is not the checkpoint's after the load."""


class BuffersNotRestored(Symptom):
    """A buffer is not the checkpoint's after the load."""


class MastersStale(Symptom):
    """The fp32 master weights do not belong to the loaded weights: the next step reverts them."""


class MomentsNotRestored(Symptom):
    """Optimizer moments differ from the checkpoint's after a full load."""


class MomentsNotFresh(Symptom):
    """Optimizer moments are not those of a new optimizer, though none were to be loaded."""


class StepNotRestored(Symptom):
    """The optimizer's ``step`` is not the checkpoint's (or not fresh, where none was to be loaded)."""


class GroupsNotRestored(Symptom):
    """A param group's hyperparameters are wrong after the load."""


class SchedulerNotRestored(Symptom):
    """The learning-rate scheduler's state is wrong after the load."""


class CountersNotRestored(Symptom):
    """global_steps, global_samples, micro or skipped steps are wrong after the load."""


class LossScaleNotRestored(Symptom):
    """The loss scale (or the scaler's own counters) is wrong after the load."""


class ClientStateNotRestored(Symptom):
    """The client state handed to save does not come back."""


class StateDictChanged(Symptom):
    """Loading changed the state dict that the caller handed over."""


class Diverged(Symptom):
    """Training on after the load leaves the reference run."""


class NothingLoaded(Symptom):
    """load_checkpoint returned no path: the caller was told, but nothing was loaded."""


class OptimizerFileOpened(Symptom):
    """A load that asked for no optimizer states opened an optimizer file."""


class TextDisagrees(Symptom):
    """What the option's description promises is not what the release does."""


class Hang(Symptom):
    """A rank did not come back within the time limit."""


class PeersHung(Symptom):
    """One rank failed and another waited for it to the time limit."""


class Crash(Symptom):
    """An exception that is no symptom of ours, as it left a rank.

    ``type_name`` and ``mro`` are class names, ``frames`` the traceback as
    (file, line, function), outermost first.  ``upstream`` tells whether the
    innermost frame outside torch and the standard library is the framework's.
    """

    def __init__(self, type_name: str, text: str, mro=(), frames=(), upstream: bool = False, rank: int = 0):
        super().__init__(type_name, text, tuple(mro), tuple(frames), upstream, rank)
        self.type_name, self.text, self.mro = type_name, text, tuple(mro)
        self.frames, self.upstream, self.rank = tuple(frames), upstream, rank

    def __str__(self) -> str:
        where = ""
        if self.frames:
            file, line, func = self.frames[-1]
            where = f" at {'/'.join(file.split('/')[-2:])}:{line} in {func}"
        return f"rank {self.rank}: {self.type_name}: {self.text}{where}"


class crash:
    """Declared symptom: upstream code raises ``type_name`` with ``match`` in its text."""

    def __init__(self, type_name: str, match: str = ""):
        self.type_name, self.match = type_name, match

    @property
    def __name__(self) -> str:
        return f"Crash[{self.type_name}]"

    def matches(self, error: BaseException) -> bool:
        return (
            isinstance(error, Crash)
            and error.upstream
            and self.type_name in (error.type_name, *error.mro)
            and self.match in error.text
        )


def matches(declared, error: BaseException) -> bool:
    """Whether ``error`` is exactly the declared symptom (a Symptom class, a ``crash`` or a tuple of them)."""
    if isinstance(declared, tuple):
        return any(matches(one, error) for one in declared)
    if isinstance(declared, crash):
        return declared.matches(error)
    return type(error) is declared


def name_of(declared) -> str:
    """The declared symptom's name, for reports."""
    if isinstance(declared, tuple):
        return " or ".join(name_of(one) for one in declared)
    return declared.__name__

"""Checkpoints that cannot be resumed from: every rank says so in one line, with the key or the file and what to do."""

from __future__ import annotations

import shutil

import pytest

from resume import symptoms
from resume.nemo import damage
from resume.nemo.engines import Cell
from resume.nemo.story import Story
from resume.ranks import Ranks
from resume.symptoms import Crash, crash

TRACEBACKS = crash("CheckpointException", "Traceback (most recent call last): (RANK 0)")
CONFIGURE = "Configure model and optimizer as in the run that saved it"
MODEL_ONLY = "Load the model without optimizer states."
COPY = "copy it again, or resume from another one"

FUSED, DISTRIBUTED = (Cell("plain", optimizer, world=2) for optimizer in ("fused", "distributed"))
EXPERTS = Cell("moe", "distributed", world=2)


def refused(found: list, *words: str) -> None:
    """Every rank ended in one line that holds ``words``; else raises the error of the first that did not."""
    for error in found:
        if not isinstance(error, BaseException):
            raise AssertionError("a rank loaded it")
        clear = isinstance(error, Crash) and error.type_name == "CheckpointingException" and "\n" not in error.text
        if not clear or not all(word in error.text for word in words):
            raise error


@pytest.mark.fault("unclear-load-errors", symptom=TRACEBACKS)
@pytest.mark.parametrize(
    "source, target", [(FUSED, DISTRIBUTED), (DISTRIBUTED, FUSED), (EXPERTS, EXPERTS)], ids=("to", "from", "experts")
)
@pytest.mark.parametrize(
    "saved, words",
    [
        ({"optimizer": False}, ("has no optimizer states", "optimizer.state.exp_avg.", MODEL_ONLY)),
        ({"without": ".linear_fc2.weight"}, ("model.decoder.layers.", ".linear_fc2.weight", CONFIGURE)),
        ({"sizes": {"WIDTH": 32}}, ("has the shape", "weight", CONFIGURE)),
    ],
    ids=("no-optimizer", "no-layer", "shape"),
)
def test_checkpoint_of_another_run(pools, tmp_path, source, target, saved, words):
    story = Story(pools, source, tmp_path).train_and_save(**saved)
    refused(pools(2).outcomes("resume.nemo.runs:load", cell=target, folder=story.folder), *words)


@pytest.mark.fault("strategy-no-optimizer-states", symptom=crash("KeyError", "optimizer_states"))
def test_strategy_lets_the_load_say_it(pools, tmp_path):
    """NLPDDPStrategy looks into a checkpoint first; what it does with param groups stays as it is."""
    without = Story(pools, FUSED, tmp_path / "without").train_and_save(optimizer=False)
    sound = Story(pools, DISTRIBUTED, tmp_path / "sound").train_and_save()
    whole = Ranks(1, "resume.nemo.imports:setup_whole")
    try:
        found = [
            whole.run("resume.nemo.imports:strategy_compares_groups", folder=story.folder, timeout=300.0)[0]
            for story in (sound, without)
        ]
    finally:
        whole.stop()
    assert found == [False, False]


@pytest.mark.fault("unclear-load-errors", symptom=TRACEBACKS)
def test_checkpoint_with_other_experts(pools, tmp_path):
    story = Story(pools, EXPERTS, tmp_path).train_and_save(sizes={"EXPERTS": 4})
    refused(
        pools(2).outcomes("resume.nemo.runs:load", cell=EXPERTS, folder=story.folder), "has the shape", "mlp", CONFIGURE
    )


@pytest.mark.fault("unclear-load-errors", symptom=TRACEBACKS)
def test_a_rank_that_has_all_it_asks_for_says_what_another_lacks(pools, tmp_path):
    story = Story(pools, DISTRIBUTED, tmp_path).train_and_save()
    found = pools(2).outcomes("resume.nemo.runs:load", cell=DISTRIBUTED, folder=story.folder, more_on=1)
    refused(found, "model.another_layer", CONFIGURE)


# which of two depends on the release of megatron-core
NO_COMMON = (crash("AttributeError", "iterdir"), crash("CheckpointingException", "does not exist"))


@pytest.mark.parametrize(
    "how, name",
    [
        pytest.param(how, name, marks=pytest.mark.fault("unclear-load-errors", symptom=symptom))
        for how, name, symptom in (
            (damage.cut, "__0_0.distcp", TRACEBACKS),
            (damage.remove, "__0_0.distcp", TRACEBACKS),
            (damage.cut, ".metadata", (TRACEBACKS, crash("UnpicklingError"))),
            (damage.remove, ".metadata", (TRACEBACKS, crash("FileNotFoundError"))),
            (damage.cut, "common.pt", crash("RuntimeError", "PytorchStreamReader")),
            (damage.remove, "common.pt", NO_COMMON),
            (damage.cut, "metadata.json", crash("JSONDecodeError")),
            (damage.remove, "metadata.json", crash("CheckpointingException", "is not a distributed checkpoint")),
        )
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_damaged_file(pools, tmp_path, how, name):
    story = Story(pools, EXPERTS, tmp_path).train_and_save()
    folder = str(shutil.copytree(story.folder, tmp_path / "damaged"))
    how(folder, name)
    refused(pools(2).outcomes("resume.nemo.runs:load", cell=EXPERTS, folder=folder), f": {name} ", COPY)


@pytest.mark.guard
def test_no_folder(pools, tmp_path):
    refused(pools(2).outcomes("resume.nemo.runs:load", cell=EXPERTS, folder=str(tmp_path / "absent")), "absent")


@pytest.mark.fault("missing-shards", symptom=(symptoms.MastersStale, symptoms.MomentsNotRestored))
@pytest.mark.parametrize("optimizer", ("distributed", "fused"))
@pytest.mark.parametrize("state", ("fp32_param", "exp_avg"))
def test_one_expert_is_missing(pools, tmp_path, optimizer, state):
    """Its place would keep what the run that resumes had in it."""
    cell, key = Cell("moe", optimizer, world=2), "experts.experts.linear_fc2.weight"
    story = Story(pools, cell, tmp_path).train_and_save()
    folder = str(shutil.copytree(story.folder, tmp_path / "damaged"))
    damage.forget_shard(folder, f"optimizer.state.{state}.model.decoder.layers.mlp.{key}")
    found = pools(2).outcomes("resume.nemo.runs:resume", cell=cell, folder=folder, more=0)
    if not any(isinstance(one, BaseException) for one in found):
        story.check_loaded(cell, found)
    refused(found, f"optimizer.state.{state}.", key, COPY)

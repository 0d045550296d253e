"""Imports of NeMo as a rank does them, without the bridges of ``compat``."""

from __future__ import annotations

import importlib
import os

import torch

from resume.nemo import compat


def setup(rank: int, world: int) -> None:
    """As ``compat.setup``, but for what a release must do by itself where optional packages are not installed."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    compat.import_parts()
    if not compat.on_gpu():
        compat.on_cpu()


def setup_whole(rank: int, world: int) -> None:
    """For imports of NeMo as a user's run does them."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"


def strategy_compares_groups(folder: str) -> bool:
    """What NLPDDPStrategy does with a checkpoint before it is read: whether the number of its param groups differs."""
    from nemo.collections.common.parts.nlp_overrides import NLPDDPStrategy

    strategy = NLPDDPStrategy.__new__(NLPDDPStrategy)  # the comparison uses nothing that a trainer sets up
    return strategy._check_param_groups_mismatch(folder, {"optimizer_states": [{"param_groups": [{}, {}]}]})


def module(name: str) -> None:
    importlib.import_module(name)


def checkpoint_io() -> None:
    """Make the object that saves and loads."""
    from nemo.utils.callbacks.dist_ckpt_io import DistributedCheckpointIO

    DistributedCheckpointIO("torch_dist")


def fp8_without_transformer_engine() -> str:
    """What the distributed optimizer says when it is asked for FP8."""
    from nemo.core.optim import distributed_adam

    try:
        distributed_adam.quantize_param_fragment(torch.zeros(1), out=torch.zeros(1), param=None)
    except RuntimeError as error:
        return str(error)
    return ""

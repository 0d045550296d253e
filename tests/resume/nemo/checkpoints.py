"""Saving and loading as NeMo's strategies do: sharded state dicts, through NeMo's DistributedCheckpointIO."""

from __future__ import annotations

import itertools

import torch

from resume.nemo.engines import Engine


def model_state(engine: Engine) -> dict:
    """The model's sharded state dict as NeMo's ``sharded_state_dict`` hands it to optimizers."""
    state = engine.model.sharded_state_dict(prefix="model.")
    return {k: v for k, v in state.items() if not k.endswith("_extra_state")}


def optimizer_state(engine: Engine, loading: bool = False) -> dict:
    """The optimizer's sharded state dict.

    By way of nemo.lightning where the cell asks for it.  Else NLPDDPStrategy.optimizer_sharded_state_dict of NeMo 2,
    line by line, since the class needs a whole trainer and 3.0.0 leaves these lines to the caller.
    """
    if engine.cell.lightning:
        from nemo.lightning import _strategy_lib

        return _strategy_lib.optimizer_sharded_state_dict(engine.model, engine.optimizer, is_loading=loading)
    from megatron.core.dist_checkpointing.optimizer import (
        get_param_id_to_sharded_param_map,
        make_sharded_optimizer_tensor,
        optim_state_to_sharding_state,
    )
    from nemo.core.optim.optimizers import init_optimizer_states

    optimizer, model = engine.optimizer, model_state(engine)
    if engine.cell.optimizer == "distributed":
        return optimizer.sharded_state_dict(model)
    init_optimizer_states(optimizer.optimizer)
    state = optimizer.state_dict()
    params = get_param_id_to_sharded_param_map(
        model_sharded_state_dict=model, optim_params_iter=itertools.chain.from_iterable(optimizer.float16_groups)
    )
    state["fp32_from_fp16_params"] = [
        [
            make_sharded_optimizer_tensor(params[i], master, prefix="optimizer.state.fp32_param")
            for i, master in zip(group["params"], masters, strict=False)
        ]
        for masters, group in zip(state["fp32_from_fp16_params"], state["optimizer"]["param_groups"], strict=False)
    ]
    optim_state_to_sharding_state(state["optimizer"], params)
    return state


def _io():
    from nemo.utils.callbacks.dist_ckpt_io import DistributedCheckpointIO

    return DistributedCheckpointIO("torch_dist", load_directly_on_device=False, torch_dist_multiproc=1)


def save(
    engine: Engine, folder: str, spelling: str | None = None, optimizer: bool = True, without: str | None = None
) -> None:
    """Write model and optimizer.  ``spelling``: "param" or "fp32_param", the key of a gated layer's masters.

    Pristine releases write "param" for gated layers and experts, next to "fp32_param" for all others.
    ``without``: leave out tensors with this in their key.
    """
    checkpoint = {"state_dict": model_state(engine)}
    if optimizer:
        checkpoint["optimizer_states"] = [optimizer_state(engine)]
        if spelling:
            respell(checkpoint["optimizer_states"][0], spelling)
    if without:
        from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
        from megatron.core.dist_checkpointing.mapping import ShardedBase

        _, checkpoint = extract_matching_values(checkpoint, lambda x: isinstance(x, ShardedBase) and without in x.key)
    _io().save_checkpoint(checkpoint, folder)


def respell(state: dict, spelling: str) -> None:
    """Name the masters of gated layers ``optimizer.state.<spelling>...`` in a sharded state dict."""
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    def rename(x):
        if isinstance(x, ShardedTensorFactory):
            for old in ("optimizer.state.param.", "optimizer.state.fp32_param."):
                if x.key.startswith(old):
                    x.key = f"optimizer.state.{spelling}.{x.key[len(old) :]}"
                    break
        return x

    dict_list_map_inplace(rename, state)


def read(engine: Engine, folder: str, **more) -> dict:
    """The checkpoint as NeMo's strategy hands it to the run: {"state_dict", "optimizer_states": [one]}.

    ``more``: what else of the model to ask for.
    """
    states = [optimizer_state(engine, loading=True)]
    request = {"state_dict": {**model_state(engine), **more}, "optimizer_states": states}
    return _io().load_checkpoint(folder, sharded_state_dict=request)


def put(engine: Engine, checkpoint: dict) -> None:
    """Weights first, then the optimizer, as Lightning restores them."""
    weights = checkpoint["state_dict"]
    missing = engine.model.load_state_dict({k.removeprefix("model."): v for k, v in weights.items()}, strict=False)
    bad = [k for k in missing.missing_keys if not k.endswith("_extra_state")] + missing.unexpected_keys
    if bad:
        raise RuntimeError(f"the model's keys do not match: {bad}")
    engine.optimizer.load_state_dict(checkpoint["optimizer_states"][0])


def load(engine: Engine, folder: str) -> dict:
    """``read`` and ``put``; returns what was read."""
    with torch.no_grad():
        checkpoint = read(engine, folder)
    put(engine, checkpoint)
    return checkpoint

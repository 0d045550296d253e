"""What a CPU-only machine lacks for NeMo's, Apex's and megatron-core's optimizers to run, and nothing else.

None of this touches saving or loading.  Where the real kernels run (``on_gpu``)
no stand-in is put in place; what is left are imports, and what the installed
versions of megatron-core, torch, Transformer Engine and Apex lack, if they do.

* Kernels, device, stream and NCCL calls: ``resume.standin``.
* megatron-core forks CUDA's random state around dropout; there is none to fork.
* Importing ``nemo.core`` pulls in half of machine learning; ranks import the modules under test through empty
  packages in place of four ``__init__`` files (``test_import.py`` imports the whole of it).
* Apex's v2 load of the release on the index leaves the param groups as they are.  Apex has restored them since
  February 2024, which is what users have; ``restores_groups`` is that change.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import multiprocessing
import os
import sys
import types

import torch

PACKAGES = ("nemo.core", "nemo.core.classes", "nemo.core.optim", "nemo.utils", "nemo.utils.callbacks", "nemo.lightning")


@functools.cache
def on_gpu() -> bool:
    """Whether the real kernels run here: there is CUDA, and Apex with its compiled parts."""
    if not torch.cuda.is_available():
        return False
    try:
        for name in ("amp_C", "distributed_adam_cuda"):
            importlib.import_module(name)
    except ImportError:
        return False
    return True


def import_parts() -> None:
    """Let modules of NeMo be imported without running the ``__init__`` of ``PACKAGES``."""
    (root,) = importlib.util.find_spec("nemo").submodule_search_locations
    for name in PACKAGES:
        module = types.ModuleType(name)
        module.__path__ = [os.path.join(root, *name.split(".")[1:])]
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        setattr(importlib.import_module(parent), child, module)
    common = types.ModuleType("nemo.core.classes.common")
    common.safe_instantiate = common.Serialization = None  # for configuration files, of which there are none here
    sys.modules[common.__name__] = common
    utils = sys.modules["nemo.utils"]
    utils.logging = importlib.import_module("nemo.utils.nemo_logging").Logger()
    utils.logging_mode = importlib.import_module("nemo.utils.nemo_logging").LogMode
    utils.str_to_dtype = importlib.import_module("nemo.utils.dtype").str_to_dtype
    utils.AppState = importlib.import_module("nemo.utils.app_state").AppState
    utils.logging.setLevel(40)


def restores_groups(cls) -> None:
    """Give Apex's ``DistributedFusedAdam`` the v2 load of Apex since February 2024, where it has the older one."""
    import inspect

    if "super().load_state_dict" in inspect.getsource(cls._load_state_dict_v2):
        return
    older = cls._load_state_dict_v2

    def load(self, state_dict):
        self.init_params()
        self.grad_sync()
        self.param_sync()
        # the base class would replace the state, which holds the buckets
        state, self.state = self.state, {}
        try:
            torch.optim.Optimizer.load_state_dict(self, {"state": {}, "param_groups": state_dict["param_groups"]})
        finally:
            self.state = state
        older(self, state_dict)

    cls._load_state_dict_v2 = load


def _without_transformer_engine() -> None:
    """Releases that ask for its version at import fail where it is not installed (fault ``import-guards``)."""
    te_utils = importlib.import_module("nemo.utils.te_utils")
    try:
        getattr(te_utils, "te_version", tuple)()
    except (importlib.metadata.PackageNotFoundError, AttributeError):
        te_utils.te_version = lambda: (0,)


def _without_tensorstore() -> None:
    """NeMo's DistributedCheckpointIO takes megatron-core for missing where it lacks the zarr strategies of old."""
    strategies = importlib.import_module("megatron.core.dist_checkpointing.strategies")
    name = f"{strategies.__name__}.tensorstore"
    try:
        importlib.import_module(name)
    except ImportError:
        strategies.tensorstore = sys.modules[name] = types.ModuleType(name)


def _with_newer_torch() -> None:
    """megatron-core up to 0.9 calls a private function of torch's with the arguments it had then."""
    import inspect

    writer = importlib.import_module("megatron.core.dist_checkpointing.strategies.filesystem_async")
    if "transform_list" in inspect.getsource(writer):
        return
    from torch.distributed.checkpoint import filesystem

    def write_item(*args):
        return filesystem._write_item(
            filesystem._StorageWriterTransforms(), *args, filesystem.SerializationFormat.TORCH_SAVE
        )

    writer._write_item = write_item


def on_cpu() -> None:
    """Put the stand-ins in place."""
    from resume.standin import apex_kernels, cuda_calls, grouped_gemm

    apex_kernels.install()
    cuda_calls.everywhere()
    import apex.contrib.optimizers.distributed_fused_adam as distributed
    import apex.optimizers.fused_adam as fused
    import megatron.core.tensor_parallel.random as random

    for module in (distributed, fused):
        module.torch = cuda_calls.Torch()
    distributed._coalescing_manager = cuda_calls.Coalescing
    distributed.reduce_scatter_tensor = cuda_calls.reduce_scatter_tensor
    distributed.all_gather_into_tensor = cuda_calls.all_gather_into_tensor
    moe = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(
        moe, "te_general_gemm"
    ):  # 0.16 defines it where transformer-engine is installed, and uses it anywhere
        moe.te_general_gemm = None
    if not hasattr(moe, "router_gating_linear"):  # older ones count tokens with histc
        moe.torch = cuda_calls.Torch()
        importlib.import_module("megatron.core.transformer.moe.token_dispatcher").torch = cuda_calls.Torch()
    gemm = importlib.import_module("megatron.core.transformer.moe.grouped_gemm_util")
    gemm.grouped_gemm = gemm.ops = grouped_gemm
    random.CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()


def wrap(optimizer):
    """NeMo's MainParamsOptimizerWrapper around a FusedAdam."""
    from nemo.core.optim.optimizer_with_main_params import MainParamsOptimizerWrapper

    from resume.standin.cuda_calls import cuda_type_names

    with contextlib.nullcontext() if on_gpu() else cuda_type_names():
        return MainParamsOptimizerWrapper(optimizer, fp32_grad_accum=False, contiguous_grad_bucket=False)


_prepared = False


def prepare() -> None:
    """Import what is tested, with its bridges; once in a process."""
    global _prepared
    if _prepared:
        return
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    torch.set_num_threads(1)
    import_parts()
    _without_transformer_engine()
    if not on_gpu():
        on_cpu()
    _without_tensorstore()
    _with_newer_torch()
    from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam

    restores_groups(DistributedFusedAdam)
    for name in (
        "megatron.core.models.gpt.gpt_model",
        "megatron.core.models.gpt.gpt_layer_specs",
        "nemo.core.optim.distributed_adam",
        "nemo.core.optim.optimizers",
        "nemo.core.optim.optimizer_with_main_params",
        "nemo.utils.callbacks.dist_ckpt_io",
    ):
        importlib.import_module(name)
    main_params = importlib.import_module("nemo.core.optim.optimizer_with_main_params")
    sys.modules["nemo.core.optim"].MainParamsOptimizerWrapper = main_params.MainParamsOptimizerWrapper
    _prepared = True


def setup(rank: int, world: int) -> None:
    """Bring one rank up and join the process group."""
    prepare()
    # saving writes from child processes, which daemonic ones may not have; forked, as in a run that a launcher started
    multiprocessing.current_process()._config["daemon"] = False
    multiprocessing.set_start_method("fork", force=True)
    torch.distributed.init_process_group("nccl" if on_gpu() else "gloo", rank=rank, world_size=world)

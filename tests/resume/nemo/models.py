"""Tiny megatron-core GPT models and data: a mixture of experts and its dense twins, small enough for 0.1 s a run."""

from __future__ import annotations

import torch

VOCAB, LENGTH, WIDTH, BATCH, EXPERTS = 16, 8, 16, 2, 2
MIXED = ("moe", "grouped")
KINDS = (*MIXED, "swiglu", "plain")


def parallel(ep: int) -> None:
    """Megatron's process groups for expert parallel size ``ep`` on this job's ranks."""
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        if parallel_state.get_expert_model_parallel_world_size() == ep:
            return
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ep)


def _spec(kind: str):
    """The local layer spec with torch's norms: Apex's are CUDA kernels."""
    from megatron.core.models.gpt import gpt_layer_specs

    args = {"num_experts": EXPERTS, "moe_grouped_gemm": kind == "grouped"} if kind in MIXED else {}
    spec = gpt_layer_specs.get_gpt_layer_local_spec(**args)
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = _norm()
    return spec


def _norm() -> type:
    """Torch's norm as a layer of megatron-core."""
    try:
        from megatron.core.transformer.torch_norm import WrappedTorchNorm
    except ImportError:  # up to 0.9
        from megatron.core.transformer.torch_layer_norm import WrappedTorchLayerNorm as WrappedTorchNorm
    return WrappedTorchNorm


def make(kind: str, seed: int, ep: int = 1) -> torch.nn.Module:
    """A fresh bf16 GPTModel: one of ``KINDS``.

    "moe": SwiGLU experts one by one, "grouped": in one matrix; "swiglu": the dense twin; "plain": dense, GELU.

    ``ep``: expert parallel size.  The whole model's weights depend on the seed and on nothing else.
    """
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel(ep)
    moe = (
        {
            "num_moe_experts": EXPERTS,
            "moe_grouped_gemm": kind == "grouped",
            "moe_router_topk": 1,
            "moe_router_pre_softmax": True,
            "moe_token_dispatcher_type": "allgather",
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "expert_model_parallel_size": ep,
        }
        if kind in MIXED
        else {}
    )
    gated = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu} if kind != "plain" else {}
    config = TransformerConfig(
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=2,
        ffn_hidden_size=WIDTH,
        use_cpu_initialization=True,
        bf16=True,
        params_dtype=torch.bfloat16,
        add_bias_linear=kind == "plain",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        **gated,
        **moe,
    )
    block = TransformerBlockSubmodules(layer_specs=[_spec(kind)], layer_norm=_norm())
    torch.manual_seed(seed)
    model = GPTModel(
        config,
        block,
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        position_embedding_type="learned_absolute",
        share_embeddings_and_output_weights=False,
    )
    _seed(model, seed, ep)
    return model.bfloat16()


def _seed(model: torch.nn.Module, seed: int, ep: int) -> None:
    """Weights by parameter name, so that an expert is the same whatever rank holds it."""
    from megatron.core import parallel_state

    first = parallel_state.get_expert_model_parallel_rank() * (EXPERTS // ep) if ep > 1 else 0
    with torch.no_grad():
        for name, param in model.named_parameters():
            generator = torch.Generator().manual_seed(seed * 7919 + sum(map(ord, full_name(name, first))))
            noise = torch.randn(param.shape, generator=generator) * 0.2
            param.copy_(1 + noise if "norm" in name and name.endswith("weight") else noise)


def full_name(name: str, first_expert: int) -> str:
    """The parameter's name with the expert's number in the whole model."""
    head, found, tail = name.partition(".local_experts.")
    if not found:
        return name
    number, _, rest = tail.partition(".")
    return f"{head}{found}{int(number) + first_expert}.{rest}"


def batch(step: int, rank: int):
    """Token ids and labels, [BATCH, LENGTH] each, for one step of one rank."""
    generator = torch.Generator().manual_seed(1000 * (step + 1) + rank)
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def loss(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    ids, labels = batch(step, rank)
    position = torch.arange(LENGTH).expand(BATCH, LENGTH)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    device = next(model.parameters()).device
    logits = model(ids.to(device), position.to(device), mask.to(device))
    return torch.nn.functional.cross_entropy(logits.float().view(-1, VOCAB), labels.to(device).view(-1))


def is_expert(name: str) -> bool:
    return ".local_experts." in name


def groups(model: torch.nn.Module, ep: int, count: int) -> list[dict]:
    """Param groups as NeMo's ``get_params_for_weight_decay_optimization`` makes them: decay, experts, no decay.

    Experts have their own group under expert parallelism only.  ``count`` 3 without it: embeddings are a group too,
    told by a key of their own.
    """
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    plain = [(n, p) for n, p in named if p.ndim < 2 or "norm" in n]
    rest = [(n, p) for n, p in named if not (p.ndim < 2 or "norm" in n)]
    expert = [(n, p) for n, p in rest if ep > 1 and not getattr(p, "allreduce", True)]
    own = [(n, p) for n, p in rest if count == 3 and ep == 1 and "embedding" in n]
    decay = [(n, p) for n, p in rest if not any(p is q for _, q in (*expert, *own))]
    made = [
        {"params": [p for _, p in decay], "is_expert": False},
        {"params": [p for _, p in expert], "is_expert": True},
        {"params": [p for _, p in plain], "weight_decay": 0.0, "is_expert": False},
        {"params": [p for _, p in own], "is_expert": False, "lr_mult": 0.5},
    ]
    return [g for g in made if g["params"]]

"""How to build public networks: torchvision, timm and transformers, untrained and small, with inputs of a forward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
LARGEST = 500_000_000  # parameters: 2 GiB


class TooLargeError(Exception):
    """A network that does not fit."""


def check_size(model: nn.Module, largest: int = LARGEST) -> None:
    """Raise for a network of too many parameters, which may be on the meta device."""
    size = sum(p.numel() for p in model.parameters())
    if size > largest:
        raise TooLargeError(f"{size:,} parameters")


# -------------------------------------------------------------------- torchvision


def torchvision_model(name: str, **more: Any) -> Made:
    """A network of torchvision, with the smallest input that its family takes in training."""
    import torchvision

    builder = torchvision.models.get_model_builder(name)
    family = builder.__module__.removeprefix("torchvision.models.")
    if family.startswith(("detection", "segmentation")):
        more["weights_backbone"] = None
    if family.startswith("detection") and "ssd" not in family:
        more |= {"min_size": 128, "max_size": 160}
    model = builder(weights=None, **more)
    return model, _torchvision_inputs(name, family), {}


def _torchvision_inputs(name: str, family: str) -> tuple[Any, ...]:
    if family.startswith("detection"):
        size = 320 if "ssd" in family else 128
        return [torch.rand(3, size, size) for _ in range(2)], [_target("keypoint" in name) for _ in range(2)]
    if family.startswith("optical_flow"):
        return torch.randn(1, 3, 128, 128), torch.randn(1, 3, 128, 128)
    if family.startswith("video"):
        size = 112 if "resnet" in family else 224
        return (torch.randn(1, 3, 16, size, size),)
    size = 299 if "inception" in name else 224 if "vit" in name or "googlenet" in name else 96
    return (torch.randn(2, 3, size, size),)


def _target(keypoints: bool) -> dict[str, Tensor]:
    box = torch.tensor([[10.0, 10.0, 90.0, 90.0]])
    found = {
        "boxes": box,
        "labels": torch.ones(1, dtype=torch.int64),
        "masks": torch.ones(1, 128, 128, dtype=torch.uint8),
    }
    return found | ({"keypoints": torch.full((1, 17, 3), 50.0)} if keypoints else {})


# -------------------------------------------------------------------- timm


def timm_families() -> dict[str, str]:
    """The name of every network of timm, with the file that it is of."""
    from timm.models import _registry, list_models

    return {n: _registry._model_to_module[n] for n in list_models()}


def timm_model(name: str, largest: int | None = None, **more: Any) -> Made:
    """A network of timm, at the smallest input that it takes."""
    from timm.models import create_model

    if largest is not None:
        with torch.device("meta"):
            check_size(create_model(name, num_classes=10), largest)
    model = create_model(name, num_classes=10, **more)
    config = model.pretrained_cfg
    size = config.get("min_input_size") or config["input_size"]
    return model, (torch.randn(2, *(config["input_size"] if config.get("fixed_input_size") else size)),), {}


_SMALL_WORDS = (
    "test",
    "femto",
    "atto",
    "pico",
    "nano",
    "tiny",
    "xx",
    "small",
    "_s",
    "mini",
    "050",
    "18",
    "_b0",
    "_0",
    "400mf",
)
_LARGE_WORDS = ("base", "large", "huge", "giant", "101", "152", "200", "so400m", "_l", "_xl", "gigantic", "384", "512")


def by_rank(module_of: dict[str, str]) -> Iterator[str]:
    """The names that sound smallest of every module, then the second ones, and so on."""
    families = _by_size(module_of)
    for rank in range(max(map(len, families), default=0)):
        yield from (names[rank] for names in families if rank < len(names))


def smallest_first(module_of: dict[str, str], count: int) -> Iterator[str]:
    """The names of every module that sound smallest."""
    for names in _by_size(module_of):
        yield from names[:count]


def _by_size(module_of: dict[str, str]) -> list[list[str]]:
    families: dict[str, list[str]] = {}
    for name, module in module_of.items():
        families.setdefault(module, []).append(name)

    def size(name: str) -> tuple[int, str]:
        return sum(w in name for w in _LARGE_WORDS) - sum(w in name for w in _SMALL_WORDS), name

    return [sorted(names, key=size) for names in families.values()]


# -------------------------------------------------------------------- transformers

# What makes a configuration of transformers small; a name that a configuration lacks is passed over.
_TINY: dict[str, Any] = {
    **dict.fromkeys(["hidden_size", "d_model", "dim", "embed_dim", "n_embd", "embedding_size", "dim_model"], 32),
    **dict.fromkeys(["intermediate_size", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "n_inner"], 64),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size", "hidden_dim"], 32),
    **dict.fromkeys(["attention_hidden_size"], 32),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"], 2),
    **dict.fromkeys(["num_decoder_layers"], 2),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"], 4),
    **dict.fromkeys(["decoder_attention_heads", "num_key_value_heads"], 4),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts"], 4),
    **dict.fromkeys(["num_experts_per_tok"], 2),
    **dict.fromkeys(["head_dim", "d_kv"], 8),
    **dict.fromkeys(["vocab_size"], 99),
    **dict.fromkeys(["image_size"], 32),
    **dict.fromkeys(["patch_size"], 8),
    **dict.fromkeys(["pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"], 1),
}


def transformers_kinds() -> list[str]:
    """The names of all configurations that have a bare model."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return list(MODEL_MAPPING_NAMES)


_LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "encoder_layers",
    "decoder_layers",
    "num_decoder_layers",
)


def transformers_model(kind: str, layers: int = 2) -> Made:
    """A bare model of transformers, small by the names that most configurations share."""
    import transformers

    default = transformers.AutoConfig.for_model(kind)
    names = [n for n in _TINY if isinstance(getattr(default, n, None), int) and n not in default.attribute_map]
    values = {n: layers if n in _LAYERS else _TINY[n] for n in names}
    config = transformers.AutoConfig.for_model(kind, **values)
    if getattr(config, "sub_configs", None):
        raise ValueError("made of several models")
    with torch.device("meta"):
        check_size(transformers.AutoModel.from_config(config), 5_000_000)
    model = transformers.AutoModel.from_config(config)
    tokens = torch.randint(2, 90, (2, 8))
    images = torch.randn(2, getattr(config, "num_channels", 3), 32, 32)
    inputs = {"input_ids": tokens, "pixel_values": images}[model.main_input_name]
    more = {"decoder_input_ids": tokens} if config.is_encoder_decoder else {}
    return model, (), {model.main_input_name: inputs, **more}

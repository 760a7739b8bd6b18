"""Embeds images among tokens, for models with a vision tower of a supported family (see `images`).

Shape suffixes: T packed tokens, H hidden, M placeholder tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def embedded(
    causal_lm: Any, token_ids_T: torch.Tensor, rows_M: torch.Tensor, tensors: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Return the embeddings [T, H] of packed tokens, with image features in the rows ``rows_M``, in order.

    Raises ``ValueError`` if the number of features differs from the number of rows.
    """
    embeddings_TH: torch.Tensor = causal_lm.get_input_embeddings()(token_ids_T)
    features_MH = image_features(causal_lm, tensors, embeddings_TH)
    if len(features_MH) != len(rows_M):
        raise ValueError(f"the vision tower computed {len(features_MH)} image features for {len(rows_M)} placeholders")
    return embeddings_TH.index_copy(0, rows_M, features_MH)


def image_features(causal_lm: Any, tensors: Mapping[str, torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Return image features [M, H], in the dtype and on the device of ``like``."""
    moved = {name: tensor.to(like.device, like.dtype) for name, tensor in tensors.items()}
    features = causal_lm.base_model.get_image_features(**moved, return_dict=True).pooler_output
    return torch.cat(list(features)).to(like.dtype)


def blank_image(config: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a blank image, for a rank that has none while other ranks run their vision towers."""
    vision = config.vision_config
    return {"pixel_values": torch.zeros(1, vision.num_channels, vision.image_size, vision.image_size)}

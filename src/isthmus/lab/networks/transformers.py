"""Small transformers that take tensors and give logits: a vision transformer and a decoder of bytes."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class VisionTransformer(nn.Module):
    """A ViT of transformers for square pictures of one channel, without dropout.

    Args:
        side: Pixels of a side.
        patch: Pixels of a patch's side; it divides `side`.
        width: Of the residual stream, 16 for each head.
        layers: Blocks.
        classes: Outputs.
    """

    def __init__(self, side: int, patch: int, width: int, layers: int, classes: int = 10) -> None:
        from transformers import ViTConfig, ViTForImageClassification

        super().__init__()
        self.model = ViTForImageClassification(
            ViTConfig(
                image_size=side,
                patch_size=patch,
                num_channels=1,
                hidden_size=width,
                num_hidden_layers=layers,
                num_attention_heads=max(1, width // 16),
                intermediate_size=4 * width,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                num_labels=classes,
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        """Logits [N, classes] of pictures [N, 1, side, side]."""
        logits: Tensor = self.model(pixel_values=x).logits
        return logits


class ByteDecoder(nn.Module):
    """A GPT-2 that reads and predicts bytes, its head apart from its embedding, without dropout.

    Args:
        width: Of the residual stream, 16 for each head.
        layers: Blocks.
        context: The most bytes it reads.
    """

    def __init__(self, width: int, layers: int, context: int) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        settings: dict[str, Any] = {
            "vocab_size": 256,
            "n_positions": context,
            "n_embd": width,
            "n_layer": layers,
            "n_head": max(1, width // 16),
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "use_cache": False,
            "tie_word_embeddings": False,
        }
        self.model = GPT2LMHeadModel(GPT2Config(**settings))

    def forward(self, x: Tensor) -> Tensor:
        """Logits [N, T, 256] of the byte that follows each of x [N, T]."""
        logits: Tensor = self.model(input_ids=x).logits
        return logits

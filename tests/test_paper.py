"""The paper's table against models counted on the meta device."""

import pytest
import timm
import torch

from vitlens.paper import TABLE_1


@pytest.mark.parametrize("variant", TABLE_1, ids=lambda v: v.name)
def test_table_1(variant):
    """Parameters within 1.5 % of the printed ones, with a head of 1,000 classes."""
    with torch.device("meta"):
        model = timm.create_model(variant.timm)
    count = sum(p.numel() for p in model.parameters())
    assert count / 1e6 == pytest.approx(variant.parameters, rel=0.015)
    block = model.blocks[0]
    assert (len(model.blocks), model.embed_dim, block.attn.num_heads) == (variant.layers, variant.width, variant.heads)
    assert block.mlp.fc1.out_features == variant.mlp
    patch = model.patch_embed.patch_size[0]
    assert variant.tokens(patch) == model.pos_embed.shape[1]

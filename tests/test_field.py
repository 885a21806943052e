"""The faults that a field trial found, one function each."""


def test_F11_subclasses_of_timms_vision_transformer():
    import pytest
    import timm
    import torch

    from vitlens import UnsupportedModelError, attention, capture

    timms = timm.models.VisionTransformer
    small = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=5)

    class Plain(timms):
        """RETFound's, and others': another __init__ and other weights."""

        def __init__(self, **options):
            super().__init__(**options)
            self.extra = "mine"

    class Masked(timms):
        """MAE's reads the mean of the patches in a forward_features of its own."""

        def forward_features(self, x):
            return super().forward_features(x)[:, 1:].mean(1, keepdim=True)

    class Distilled(timms):  # a neighbor: another method of the forward
        def _pos_embed(self, x):
            return super()._pos_embed(x).flip(1)

    torch.manual_seed(0)
    images, model = torch.randn(1, 3, 32, 32), Plain(**small).eval()
    same = timms(**small).eval()
    same.load_state_dict(model.state_dict())
    found = []
    for each in (model, same):
        with torch.no_grad(), capture(each) as attn:
            each(images)
        found.append(attention.rollout(attn))
    assert torch.equal(*found)
    for kind, method in ((Masked, "forward_features"), (Distilled, "_pos_embed")):
        with pytest.raises(UnsupportedModelError, match=rf"overrides {method}.*register_model\({kind.__name__}"):
            capture(kind(**small)).__enter__()


def test_F12_replaced_forwards_are_named():
    import pytest
    import timm
    import torch

    from vitlens import UnsupportedModelError, capture

    def unfused(self, x, **_):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(((q @ k.mT * self.scale).softmax(-1) @ v).transpose(1, 2).flatten(2))

    options = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3)
    images = torch.randn(1, 3, 32, 32)
    module = timm.create_model("vit_tiny_patch16_224", **options).eval()
    attention = module.blocks[1].attn
    attention.forward = unfused.__get__(attention)
    match = r"the forward of blocks\.1\.attn was replaced"
    with pytest.raises(UnsupportedModelError, match=match), torch.no_grad(), capture(module):
        module(images)
    del attention.forward
    with torch.no_grad(), capture(module) as attn:
        module(images)
    assert len(attn) == 2
    with pytest.MonkeyPatch.context() as patch:  # a neighbor: the class's forward, for all models
        patch.setattr(type(attention), "forward", unfused)
        match = r"the forward of blocks\.0\.attn was replaced"
        with pytest.raises(UnsupportedModelError, match=match), torch.no_grad(), capture(module):
            module(images)
    block = module.blocks[0]
    block.forward = lambda x, **_: x  # and a block that skips its attention
    with pytest.raises(UnsupportedModelError, match="the forward of block 0 was replaced"), capture(module):
        module(images)

"""Mistakes of a user. Each comment names the error that a type checker must report. An unused one is an error."""

import vitlens
from vitlens import attribution
from vitlens import overlays as maps  # type: ignore[attr-defined]  # noqa: F401

model = vitlens.load_model("vit_tiny_patch16_224", pretrained="no")  # type: ignore[arg-type]
images = vitlens.preprocess(model, "cat.jpg", size=224)  # type: ignore[arg-type]
vitlens.preproces(model, "cat.jpg")  # type: ignore[attr-defined]
with vitlens.capture(model, value=True) as attn:  # type: ignore[call-arg]
    model(images)
attn.weights()  # type: ignore[attr-defined]
attn[0].weight()  # type: ignore[attr-defined]
attn["blocks.0"]  # type: ignore[call-overload]
attn[0].weights(head="zero")  # type: ignore[arg-type]
vitlens.attention.summary(model)  # type: ignore[arg-type]
attribution.relevance(model, images, classes=3)  # type: ignore[call-arg]
attribution.chefer(model, images)  # type: ignore[attr-defined]
with vitlens.intervene(model, heads=3):  # type: ignore[arg-type]
    pass
number: int = vitlens.load_image("cat.jpg")  # type: ignore[assignment]

"""The transformer of a diffusers pipeline is accelerated; the pipeline draws the same images, before and after.

    pip install diffusers && python examples/diffusers_pipeline.py

The pipeline is a DiT of two blocks with random weights, so that nothing is downloaded.
"""

import numpy as np
import torch

from cunorm.torch import accelerate

try:
    from diffusers import AutoencoderKL, DDIMScheduler, DiTPipeline, DiTTransformer2DModel
except ImportError:
    DiTPipeline = None

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def small_pipeline():
    transformer = DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=1000,
    )
    vae = AutoencoderKL(block_out_channels=(16,), norm_num_groups=4, latent_channels=4)
    pipeline = DiTPipeline(transformer.eval(), vae.eval(), DDIMScheduler()).to(DEVICE)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def main():
    if DiTPipeline is None:
        print("diffusers is not installed: pip install diffusers")
        return
    torch.manual_seed(0)
    pipeline = small_pipeline()

    def images():
        generator = torch.Generator(DEVICE).manual_seed(0)
        return pipeline([1, 2], generator=generator, num_inference_steps=4, output_type="np").images

    before = images()
    accelerated = accelerate(pipeline.transformer)
    after = images()
    print(accelerated)
    assert len(accelerated.norms.swapped) == 5
    np.testing.assert_allclose(after, before, atol=1e-3)

    accelerated.undo()
    assert np.array_equal(images(), before)
    print(f"images of shape {after.shape}, equal to {abs(after - before).max():.1e}")


if __name__ == "__main__":
    main()

"""A model that is offloaded layer by layer: accelerate's `cpu_offload`, as in image generation on a small GPU.

This is what diffusers' `enable_sequential_cpu_offload()` calls. Weights stay in ordinary CPU memory; hooks of accelerate
copy each layer's to the GPU just before its forward pass and drop them after it, in every step. accelerate does not pin
them: the state dict it keeps is that of `.to("cpu")`. Where accelerate is not installed the script makes the same copies
itself and says so.

The model is a diffusion transformer with random weights: blocks of attention, MLP and modulation of width 3072, that of
FLUX.1, 5.4 GB in bfloat16. A sample is one denoising step. In the step before them every weight that arrived on the GPU
is compared with what it should be.
"""

import torch
from torch import nn

import harness

# Blocks, width, heads, tokens.
MODEL = {"full": (16, 3072, 24, 1024), "small": (2, 128, 4, 32)}


class Linear(nn.Linear):
    """Writes down what its weights are when it runs, if asked to."""

    audit = None

    def forward(self, x):
        if Linear.audit is not None:
            Linear.audit.append((self, harness.digest(self.weight), self.weight.nbytes))
        return super().forward(x)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation = Linear(width, 6 * width, bias=False)
        self.qkv = Linear(width, 3 * width, bias=False)
        self.out = Linear(width, width, bias=False)
        self.up = Linear(width, 4 * width, bias=False)
        self.down = Linear(4 * width, width, bias=False)

    def forward(self, x, condition):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).tanh().chunk(6, dim=-1)
        batch, tokens, width = x.shape
        y = self.norm(x) * (1 + scale1) + shift1
        q, k, v = self.qkv(y).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width)
        x = x + gate1 * self.out(y)
        y = self.norm(x) * (1 + scale2) + shift2
        return x + gate2 * self.down(nn.functional.gelu(self.up(y)))


class Transformer(nn.Module):
    def __init__(self, blocks, width, heads):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))

    def forward(self, x, condition):
        for block in self.blocks:
            x = block(x, condition)
        return x


def offload(model, given, result):
    """Has the weights copied to the device for each forward pass of a layer."""
    try:
        import accelerate
    except ImportError:
        result.line["reproduces"] = (
            "accelerate cpu_offload: weight.to(device) before a layer's forward, dropped after it"
        )
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                weight = parameter.detach()

                def upload(module, _, name=name, weight=weight):
                    module._parameters[name] = nn.Parameter(weight.to(given.device), requires_grad=False)

                def drop(module, *_, name=name, weight=weight):
                    module._parameters[name] = nn.Parameter(weight, requires_grad=False)

                module.register_forward_pre_hook(upload)
                module.register_forward_hook(drop)
        return
    result.line["engine"] = f"accelerate {accelerate.__version__} cpu_offload; the model is the script's own"
    accelerate.cpu_offload(model, execution_device=torch.device(given.device))


def main():
    given = harness.options(__doc__)
    result = harness.Result(given)
    blocks, width, heads, tokens = MODEL[given.scale]
    with torch.device("meta"):
        model = Transformer(blocks, width, heads).to(torch.bfloat16).requires_grad_(False)
    model.to_empty(device="cpu")
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    sizes, start = [], 0
    for linear in linears:
        harness.fill(linear.weight, start, weights=True)
        sizes.append(linear.weight.nbytes)
        start += sizes[-1] // 8
    wanted = dict(zip(linears, harness.expected(given, sizes, weights=True)))
    offload(model, given, result)
    latent = torch.randn(1, tokens, width, device=given.device).to(torch.bfloat16)
    condition = torch.randn(1, 1, width, device=given.device).to(torch.bfloat16)

    def step():
        with torch.no_grad():
            return model(latent, condition)

    Linear.audit = []
    result.output(step())
    for linear, digest, size in Linear.audit:
        result.check("weights on the device", digest, wanted[linear], size)
    if len(Linear.audit) != len(linears):
        harness.refuse("not every layer ran: this accelerate offloads in some other way")
    Linear.audit = None
    harness.settle(given)
    steps = harness.sample(given, lambda: harness.timed(given, step), 6)
    result.output(steps[-1][1])
    result.series("one denoising step", [seconds for seconds, _ in steps], htod=sum(sizes), headline=True)
    result.note(f"{blocks} blocks, {sum(sizes) / 1e9:.2f} GB of weights, {tokens} tokens")
    result.print()


if __name__ == "__main__":
    main()

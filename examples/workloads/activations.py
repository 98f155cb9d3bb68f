"""Training of ResNet-152 with its activations on the CPU: `torch.autograd.graph.save_on_cpu(pin_memory=False)`.

PyTorch's own hook copies every tensor that the backward pass needs to new ordinary memory, and back when it is needed.
`pin_memory=False` is its default. (With True it makes a new pinned tensor for each, whose allocation then is the cost;
those copies are none of cmt's business.) The model is torchvision's where it is installed, else the same network from
here; weights and images are random.

A sample is one step: forward, backward, SGD. One step before them has every tensor that comes back compared with what
went out.
"""

import torch
from torch import nn

import harness

# Images of a batch, and their side in pixels.
BATCH = {"full": (8, 224), "small": (1, 64)}


class Bottleneck(nn.Module):
    def __init__(self, inputs, width, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Identity()
        if stride > 1 or inputs != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        return self.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


def resnet152():
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for width, count, stride in ((64, 3, 1), (128, 8, 2), (256, 36, 2), (512, 3, 2)):
        for index in range(count):
            layers.append(Bottleneck(inputs, width, stride if index == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


def build(result):
    try:
        from torchvision.models import resnet152 as torchvision_resnet152
    except ImportError:
        result.note("torchvision is not installed: ResNet-152 as defined in this script")
        return resnet152()
    return torchvision_resnet152()


class Audit(torch.autograd.graph.saved_tensors_hooks):
    """The hooks of `save_on_cpu`, with the digests of what went out and of what came back."""

    def __init__(self, hooks):
        self.out, self.back, self.bytes = [], [], 0

        def pack(tensor):
            index = len(self.out)
            self.out.append(harness.digest(tensor))
            self.bytes += tensor.nbytes
            # Without a GPU the hook would keep the tensor itself, which the model goes on to write to.
            return index, hooks.pack_hook(tensor if tensor.is_cuda else tensor.clone())

        def unpack(packed):
            tensor = hooks.unpack_hook(packed[1])
            self.back.append((packed[0], harness.digest(tensor)))
            return tensor

        super().__init__(pack, unpack)


def main():
    given = harness.options(__doc__)
    result = harness.Result(given, engine=f"torch.autograd.graph.save_on_cpu of PyTorch {torch.__version__}")
    torch.backends.cudnn.deterministic = True
    images, side = BATCH[given.scale]
    with torch.device(given.device):
        model = build(result)
        batch = torch.randn(images, 3, side, side)
        labels = torch.randint(0, 1000, (images,))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(hooks):
        optimiser.zero_grad()
        with hooks:
            loss = nn.functional.cross_entropy(model(batch), labels)
        loss.backward()
        optimiser.step()
        return loss

    audit = Audit(torch.autograd.graph.save_on_cpu(pin_memory=False))
    result.output(step(audit))
    # Training may differ in its last bits from run to run, so the checksum is of what must not: that all came back as
    # it went.
    differing = sum(int(audit.out[index] != digest) for index, digest in audit.back)
    result.check(f"{differing} of {len(audit.out)} activations", differing, 0, audit.bytes)
    if not audit.back:
        harness.refuse("no activation came back from the CPU: this PyTorch runs the hooks in some other way")
    hooks = lambda: torch.autograd.graph.save_on_cpu(pin_memory=False)
    harness.settle(given)
    times = harness.sample(given, lambda: harness.timed(given, lambda: step(hooks()))[0], 4)
    result.note(f"batch of {images}, {len(audit.out)} tensors, {audit.bytes / 1e9:.2f} GB each way a step")
    result.series("one training step", times, htod=audit.bytes, dtoh=audit.bytes, headline=True)
    result.print()


if __name__ == "__main__":
    main()

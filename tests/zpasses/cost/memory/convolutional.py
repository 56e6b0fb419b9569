"""Small convolutional models, of many kinds, whose memory is measured."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

same = partial(nn.Conv2d, kernel_size=3, padding=1)
half = partial(nn.Conv2d, kernel_size=3, stride=2, padding=1)


class Skip(nn.Module):
    """Adds what a strided convolution makes of the input."""

    def __init__(self, channels, out):
        super().__init__()
        self.first = half(channels, out, bias=False)
        self.norm, self.second = nn.BatchNorm2d(out), same(out, out, bias=False)
        self.skip = nn.Conv2d(channels, out, 1, 2, bias=False)

    def forward(self, x):
        return torch.relu(self.second(torch.relu(self.norm(self.first(x)))) + self.skip(x))


class Bottleneck(nn.Module):
    """Few channels between convolutions of size 1."""

    def __init__(self, channels, out):
        super().__init__()
        inner = out // 4
        self.inner = nn.Sequential(
            nn.Conv2d(channels, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(),
            half(inner, inner, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(),
            nn.Conv2d(inner, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.skip = nn.Conv2d(channels, out, 1, 2, bias=False)

    def forward(self, x):
        return torch.relu(self.inner(x) + self.skip(x))


class Separable(nn.Module):
    """A depthwise convolution and layers that have the channels last."""

    def __init__(self, channels, out):
        super().__init__()
        self.each = same(channels, channels, groups=channels)
        self.norm, self.up = nn.LayerNorm(channels), nn.Linear(channels, out)
        self.down = nn.Conv2d(out, out, 2, 2)

    def forward(self, x):
        inner = F.gelu(self.up(self.norm(self.each(x).permute(0, 2, 3, 1))))
        return self.down(inner.permute(0, 3, 1, 2))


class DownAndUp(nn.Module):
    """A transposed convolution, and a norm whose gradient comes in another layout."""

    def __init__(self, channels, out):
        super().__init__()
        self.down, self.up = half(channels, out), nn.ConvTranspose2d(out, out, 2, 2)
        self.norm = nn.GroupNorm(8, out)

    def forward(self, x):
        return F.silu(self.norm(self.up(self.down(x))))


class Inverted(nn.Module):
    """Many channels in a depthwise convolution, and a weight for each of them."""

    def __init__(self, channels, kernel=3, stride=1):
        super().__init__()
        inner, self.is_whole = 4 * channels, stride == 1
        self.inner = nn.Sequential(
            nn.Conv2d(channels, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.SiLU(),
            nn.Conv2d(inner, inner, kernel, stride, kernel // 2, groups=inner, bias=False),
            nn.BatchNorm2d(inner),
            nn.SiLU(),
        )
        self.squeeze, self.excite = nn.Conv2d(inner, 8, 1), nn.Conv2d(8, inner, 1)
        self.out, self.norm = nn.Conv2d(inner, channels, 1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x):
        inner = self.inner(x)
        weights = self.excite(torch.relu(self.squeeze(inner.mean((2, 3), keepdim=True))))
        made = self.norm(self.out(inner * torch.sigmoid(weights)))
        return x + made if self.is_whole else made


class Dense(nn.Module):
    """Layers that read what all before them have made."""

    def __init__(self, channels, more=16, layers=3):
        super().__init__()
        before = [channels + at * more for at in range(layers)]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(each), nn.ReLU(), same(each, more, bias=False))
            for each in before
        )

    def forward(self, x):
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return x


class LargeKernel(nn.Module):
    """A depthwise convolution of size 7, and layers that have the channels last."""

    def __init__(self, channels):
        super().__init__()
        self.each = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm, self.scale = nn.LayerNorm(channels), nn.Parameter(torch.ones(channels))
        self.up, self.down = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)

    def forward(self, x):
        inner = self.norm(self.each(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.down(F.gelu(self.up(inner)))).permute(0, 3, 1, 2)


class Residual(nn.Module):
    """Norms of groups before convolutions."""

    def __init__(self, channels, out):
        super().__init__()
        self.first, self.second = same(channels, out), same(out, out)
        self.norms = nn.ModuleList(nn.GroupNorm(8, each) for each in (channels, out))
        self.skip = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x):
        inner = self.first(F.silu(self.norms[0](x)))
        return self.skip(x) + self.second(F.silu(self.norms[1](inner)))


class PixelAttention(nn.Module):
    """Attention between the pixels of an image."""

    def __init__(self, channels):
        super().__init__()
        self.norm = nn.GroupNorm(8, channels)
        self.qkv, self.out = nn.Conv2d(channels, 3 * channels, 1), nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        heads = self.qkv(self.norm(x)).flatten(2).unflatten(1, (3, 4, -1)).transpose(-1, -2)
        made = F.scaled_dot_product_attention(*heads.unbind(1))
        return x + self.out(made.transpose(-1, -2).reshape(x.shape))


class UNet(nn.Module):
    """Down and up again, with a skip connection that is concatenated."""

    def __init__(self, channels=32, mode="nearest"):
        super().__init__()
        wide = 2 * channels
        self.into, self.down = same(3, channels), half(channels, wide)
        self.first, self.last = Residual(channels, channels), Residual(wide, channels)
        self.middle = nn.Sequential(Residual(wide, wide), PixelAttention(wide))
        self.up, self.out, self.mode = same(wide, channels), same(channels, 3), mode

    def forward(self, x):
        kept = self.first(self.into(x))
        inner = F.interpolate(self.middle(self.down(kept)), scale_factor=2, mode=self.mode)
        return self.out(self.last(torch.cat([self.up(inner), kept], 1)))


class Volume(nn.Module):
    """The same over volumes, which are not laid out channels last."""

    def __init__(self, channels=8):
        super().__init__()

        def layer(given, out, stride=1):
            norm = nn.InstanceNorm3d(out, affine=True)
            return nn.Sequential(nn.Conv3d(given, out, 3, stride, 1), norm, nn.LeakyReLU())

        wide = 2 * channels
        self.first, self.last = layer(1, channels), layer(wide, channels)
        self.middle = nn.Sequential(layer(channels, wide, 2), layer(wide, wide))
        self.up, self.out = nn.ConvTranspose3d(wide, channels, 2, 2), nn.Conv3d(channels, 3, 1)

    def forward(self, x):
        kept = self.first(x)
        return self.out(self.last(torch.cat([kept, self.up(self.middle(kept))], 1)))


class Waves(nn.Module):
    """Convolutions over time, and a layer that has the channels last."""

    def __init__(self, channels=64):
        super().__init__()
        self.first = nn.Conv1d(8, channels, 3, padding=1)
        self.second, self.norm = nn.Conv1d(channels, channels, 3, 2, 1), nn.LayerNorm(channels)
        self.up, self.down = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)

    def forward(self, x):
        inner = F.gelu(self.second(F.gelu(self.first(x)))).transpose(1, 2)
        return (inner + self.down(F.gelu(self.up(self.norm(inner))))).transpose(1, 2)


class Shuffled(nn.Module):
    """Channels that become pixels."""

    def __init__(self, channels):
        super().__init__()
        self.more, self.out = same(channels, 4 * channels), same(channels, channels)

    def forward(self, x):
        return self.out(F.leaky_relu(F.pixel_shuffle(self.more(x), 2), 0.2))


def plain(channels, out):
    return nn.Sequential(same(channels, out), nn.BatchNorm2d(out), nn.ReLU())


def pooled(channels, out):
    """Its backward scatters into the gradient of what is pooled, which is not channels last."""
    return nn.Sequential(*plain(channels, out), nn.MaxPool2d(3, 2, 1))


def averaged(channels, out):
    """Its backward asks what is averaged for its shape alone."""
    return nn.Sequential(*plain(channels, out), nn.AvgPool2d(2))


class Means(nn.Module):
    def forward(self, x):
        return x.mean(tuple(range(2, x.dim())))


def growing(block):
    return lambda: nn.Sequential(same(3, 32), block(32, 64), block(64, 128), Means())


def of(*makes):
    return lambda: nn.Sequential(*(make() for make in makes), Means())


def convolutional(make, shape):
    torch.manual_seed(0)
    return make(), [(torch.randn(*shape),)] * 2


IMAGES = (4, 3, 32, 32)
KINDS = {
    "plain": (growing(plain), IMAGES),
    "plain-small": (growing(plain), (4, 3, 16, 16)),
    "pooled": (growing(pooled), IMAGES),
    "averaged": (growing(averaged), IMAGES),
    "skip": (growing(Skip), IMAGES),
    "bottleneck": (growing(Bottleneck), IMAGES),
    "separable": (growing(Separable), IMAGES),
    "down-and-up": (growing(DownAndUp), IMAGES),
    "residual": (growing(Residual), (4, 3, 16, 16)),
    "inverted": (of(partial(same, 3, 32), *[partial(Inverted, 32)] * 2), (4, 3, 16, 16)),
    "inverted-half": (
        of(partial(same, 3, 32), partial(Inverted, 32, 5, 2), partial(Inverted, 32, 3, 2)),
        IMAGES,
    ),
    "dense": (
        of(
            partial(same, 3, 32),
            partial(Dense, 32),
            partial(nn.Conv2d, 80, 40, 1),
            partial(nn.AvgPool2d, 2),
            partial(Dense, 40),
        ),
        IMAGES,
    ),
    "large-kernel": (
        of(partial(nn.Conv2d, 3, 32, 4, 4), *[partial(LargeKernel, 32)] * 2),
        (4, 3, 64, 64),
    ),
    "unet": (UNet, (2, 3, 32, 32)),
    "unet-bilinear": (partial(UNet, mode="bilinear"), (2, 3, 32, 32)),
    "volume": (Volume, (2, 1, 16, 16, 16)),
    "waves": (Waves, (4, 8, 256)),
    "shuffled": (
        lambda: nn.Sequential(same(3, 16), Shuffled(16), Shuffled(16), same(16, 3)),
        (2, 3, 16, 16),
    ),
    "autoencoder": (
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 32, 4, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 4, 2, 1), nn.ReLU()),
            *(nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.ReLU()),
            *(nn.ConvTranspose2d(32, 3, 4, 2, 1), nn.Sigmoid()),
        ),
        IMAGES,
    ),
}
CONVOLUTIONAL = {name: partial(convolutional, *given) for name, given in KINDS.items()}

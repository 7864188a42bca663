"""How near to a client's image another one must be before its gradient shows it.

    OMP_NUM_THREADS=1 python -m experiments.needle [--images 8] [--json]

No attack runs. Each client's image is disturbed until it has a given PSNR, by white noise or by
smooth noise (white noise blurred by a Gaussian of two pixels), and the gradient of the disturbed
image is held against the client's by their cosine, as `ig` does. A search by the gradient can only
follow what rises before the image is found: where the cosine of an image at 30 dB is no better than
that of another client's image, nothing leads there. Uploads, images and networks are those of
`experiments.peers`, one image each, in both modes of batch normalisation. Nothing was chosen.
"""

import argparse
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments import peers
from experiments.harness.command import emit, note_row, parse, parser
from experiments.harness.result import Row
from experiments.harness.scores import columns, mean
from experiments.peer_recipes import Upload

LEVELS = (50, 40, 30, 20, 15)
COLUMNS = (
    *("model", "data", "mode", "noise"),
    *(f"cosine_{level}" for level in LEVELS),
    *("other", "images", "accuracy"),
)
SETTINGS = (
    peers.Setting("lenet-strided", "relu"),
    *(
        peers.Setting("resnet20", activation, mode=mode)
        for activation in ("relu", "sigmoid")
        for mode in ("train", "eval")
    ),
    *(
        peers.Setting("resnet20", "relu", data="digits", trained=True, mode=mode)
        for mode in ("train", "eval")
    ),
)


def main() -> None:
    """Disturb every setting's images; then print the table or JSON."""
    arguments = parser(__doc__, "split")
    arguments.add_argument("--images", type=int, default=8, help="of a row")
    options = parse(arguments)
    rows = [note_row(row, COLUMNS) for setting in SETTINGS for row in rows_of(setting, options)]
    emit(rows, COLUMNS, as_json=options.json)


def rows_of(setting: peers.Setting, options: argparse.Namespace) -> Iterator[Row]:
    """Measure the uploads of a setting, for both kinds of noise."""
    given = peers.uploads(setting, options.images, options.split)
    sources, networks = [u.source for u in given], [u.number for u in given]
    shifted = [*given[1:], given[0]]
    other = [_cosine(u, o.truth, setting) for u, o in zip(given, shifted, strict=True)]
    for kind in ("white", "smooth"):
        found: Row = {"model": setting.name, "data": setting.data, "mode": setting.mode}
        found |= {"noise": kind, "images": len(given), "levels": list(LEVELS)}
        for level in LEVELS:
            each = [
                _cosine(u, disturbed(u.truth, level, kind, seed), setting)
                for seed, u in enumerate(given)
            ]
            found |= columns(f"cosine_{level}", each, sources, networks)
        accuracy = mean([u.accuracy for u in given if u.accuracy is not None])
        yield found | {"other": mean(other), "accuracy": accuracy}


def disturbed(image: Tensor, level: float, kind: str, seed: int) -> Tensor:
    """Return images ``(B, C, H, W)`` at a PSNR of ``level`` dB, not moved into their range."""
    noise = torch.randn(image.shape, generator=torch.Generator().manual_seed(seed))
    if kind == "smooth":
        steps = torch.arange(-6.0, 7.0)
        window = torch.exp(-0.5 * (steps / 2.0).square())
        channels = image.shape[1]
        across = (window / window.sum()).expand(channels, 1, 1, -1)
        padded = F.pad(noise, (6, 6, 6, 6), mode="reflect")
        noise = F.conv2d(padded, across, groups=channels)
        noise = F.conv2d(noise, across.transpose(2, 3), groups=channels)
    deviation: float = 10.0 ** (-level / 20.0)
    return image + noise * (deviation / math.sqrt(float(noise.square().mean())))


def _cosine(upload: Upload, images: Tensor, setting: peers.Setting) -> float:
    network: nn.Module = upload.network
    network.train(setting.mode == "train")
    kept = {name: value.clone() for name, value in network.named_buffers()}
    loss = F.cross_entropy(network(images), upload.labels)
    gradient = torch.autograd.grad(loss, list(network.parameters()))
    network.load_state_dict(kept, strict=False)
    one = torch.cat([value.flatten() for value in gradient]).double()
    other = torch.cat([value.flatten() for value in upload.gradients]).double()
    return float(F.cosine_similarity(one, other, dim=0))


if __name__ == "__main__":
    main()

"""Word recognition by two unlike clients: FedAvg and FedBoosting over batch size and local epochs.

    python benchmarks/text.py [--batches 8 32] [--epochs 1 3] [--rounds 10] [--json]

After thesis, section 4.3.2 and table 4.1: a CRNN (VGG-like convolutions, two bidirectional LSTM
layers, CTC), one client with clean word images and one with scene-like ones, word accuracy on
unseen words of both kinds. The defaults are small enough for two cores. At the thesis's size::

    python benchmarks/text.py --device cuda --height 32 --width 100 --characters 36 --longest 10 \\
        --words 200000 --channels 64 --hidden 256 --batches 256 512 800 --rounds 30 \\
        --optimizer adadelta --lr 0.05
"""

import argparse
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from results_io import emit, note, parser
from torch import Tensor, nn
from torch.nn import functional as F
from words import CHARACTERS, STYLES, word_set

from bract.papers.simulation import STRATEGIES, simulate
from bract.protocol.update import Tensors
from bract.seeds import derive_seed

COMPARED = ("fedavg-uniform", "fedboosting", "fedboosting-proportional")


def main() -> None:
    """Run every batch size, number of epochs and strategy; print the table, draw the curves."""
    options = read_options()
    torch.set_num_threads(options.threads)
    seeds = range(options.seed, options.seed + options.seeds)
    rows = []
    for seed in seeds:
        train = {s: words_of(options, s, options.words, derive_seed(seed, s)) for s in STYLES}
        tests = {
            s: words_of(options, s, options.test_words, derive_seed(seed, s, "test"))
            for s in STYLES
        }
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, "model"))
            start = CRNN(options).state_dict()
        for epochs in options.epochs:
            for batch in options.batches:
                for name in options.strategies:
                    clients = [
                        Reader(options, *train[s], batch=batch, epochs=epochs, seed=seed)
                        for s in STYLES
                    ]
                    found = run(name, clients, tests, start, options)
                    rows.append({"batch": batch, "epochs": epochs, "seed": seed, **found})
                    note(
                        f"seed {seed} batch {batch} epochs {epochs} {name}: clean "
                        f"{found['clean']:.3f} scene {found['scene']:.3f}"
                    )
    draw(rows, train, options)
    emit(
        rows,
        ("seed", "batch", "epochs", "strategy", "clean", "scene", "both", "weight_of_clean"),
        as_json=options.json,
    )


def read_options() -> argparse.Namespace:
    """Parse the command line."""
    arguments = parser(__doc__, "text")
    arguments.add_argument("--batches", type=int, nargs="+", default=[8, 32])
    arguments.add_argument("--epochs", type=int, nargs="+", default=[1, 3])
    arguments.add_argument("--strategies", nargs="+", default=COMPARED, choices=sorted(STRATEGIES))
    arguments.add_argument("--rounds", type=int, default=10)
    arguments.add_argument("--words", type=int, default=1100, help="words a client")
    arguments.add_argument("--test-words", type=int, default=300, help="of each kind")
    arguments.add_argument("--height", type=int, default=16)
    arguments.add_argument("--width", type=int, default=64)
    arguments.add_argument("--characters", type=int, default=10)
    arguments.add_argument("--longest", type=int, default=5)
    arguments.add_argument("--channels", type=int, default=16, help="of the first convolution")
    arguments.add_argument("--hidden", type=int, default=48, help="units of an LSTM direction")
    arguments.add_argument("--optimizer", choices=("adam", "adadelta"), default="adam")
    arguments.add_argument("--lr", type=float, default=0.002)
    arguments.add_argument("--seeds", type=int, default=1)
    arguments.add_argument("--seed", type=int, default=0, help="the first seed")
    arguments.add_argument("--device", default="cpu")
    arguments.add_argument("--threads", type=int, default=1)
    return arguments.parse_args()


def run(
    name: str,
    clients: list["Reader"],
    tests: dict[str, tuple[Tensor, list[str]]],
    start: Tensors,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Train one federation; return its last round and its curves."""
    curves: dict[str, list[float]] = {style: [] for style in tests}

    def judge(arrays: Tensors) -> float:
        for style, (images, words) in tests.items():
            curves[style].append(evaluate(arrays, images, words, options)[1])
        return sum(curves[style][-1] for style in tests) / len(tests)

    rows = simulate(STRATEGIES[name](len(clients)), clients, start, options.rounds, judge)
    ended = rows[-1].get("diverged")
    last = {style: 0.0 if ended else curve[-1] for style, curve in curves.items()}
    return {
        "strategy": name,
        **last,
        "both": rows[-1]["accuracy"],
        "weight_of_clean": rows[-1]["weights"][0] if rows[-1]["weights"] else None,
        "diverged": ended,
        "curve": [row["accuracy"] for row in rows],
        "weights_by_round": [row["weights"] for row in rows],
    }


def words_of(
    options: argparse.Namespace, style: str, count: int, seed: int
) -> tuple[Tensor, list[str]]:
    """Render one set."""
    return word_set(
        style,
        count,
        seed=seed,
        height=options.height,
        width=options.width,
        characters=options.characters,
        longest=options.longest,
    )


class CRNN(nn.Module):
    """Convolutions down to height 1, two bidirectional LSTM layers, one linear layer.

    Maps ``(B, 1, height, width)`` to log probabilities ``(width / 4, B, characters + 1)``; class 0
    is CTC's blank.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        depth = options.height.bit_length() - 1
        sizes = [1, *(options.channels * min(2**i, 8) for i in range(depth))]
        layers: list[nn.Module] = []
        for i, (before, after) in enumerate(pairwise(sizes)):
            layers.append(nn.Conv2d(before, after, 3, padding=1, bias=i < 2))
            if i >= 2:
                layers.append(nn.BatchNorm2d(after))
            layers += [nn.ReLU(), nn.MaxPool2d(2 if i < 2 else (2, 1))]
        self.features = nn.Sequential(*layers)
        self.recurrent = nn.LSTM(sizes[-1], options.hidden, 2, bidirectional=True)
        self.classifier = nn.Linear(2 * options.hidden, options.characters + 1)

    def forward(self, images: Tensor) -> Tensor:
        """Map images to log probabilities by frame."""
        columns = self.features(images - 0.5).squeeze(2).permute(2, 0, 1)
        frames, _ = self.recurrent(columns)
        scores: Tensor = self.classifier(frames)
        return scores.log_softmax(2)


class Reader:
    """A client with word images; the last tenth validates."""

    def __init__(
        self,
        options: argparse.Namespace,
        images: Tensor,
        words: list[str],
        *,
        batch: int,
        epochs: int,
        seed: int,
    ) -> None:
        cut = len(words) * 9 // 10
        self.own, self.held_out = (images[:cut], words[:cut]), (images[cut:], words[cut:])
        self.options, self.batch, self.epochs, self.seed = options, batch, epochs, seed

    def train(
        self, arrays: Tensors, server_round: int, proximal_mu: float
    ) -> tuple[Tensors, int, dict[str, float]]:
        """Train for the configured epochs; gradients are clipped at norm 5."""
        del proximal_mu
        options, (images, words) = self.options, self.own
        model = loaded(arrays, options).train()
        made = torch.optim.Adam if options.optimizer == "adam" else torch.optim.Adadelta
        optimizer = made(model.parameters(), lr=options.lr)
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "order", server_round))
        for _ in range(self.epochs):
            for part in torch.randperm(len(words), generator=generator).split(self.batch):
                optimizer.zero_grad()
                loss = loss_of(
                    model(images[part].to(options.device)), [words[i] for i in part.tolist()]
                )
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
        local = {name: value.cpu() for name, value in model.state_dict().items()}
        # Scoring a part of the training words ranks clients as well as scoring all of them.
        some = len(self.held_out[1]) * 2
        loss_after, accuracy = evaluate(local, images[:some], words[:some], options)
        metrics = {"trained_loss": loss_after, "trained_accuracy": accuracy}
        return local, len(words), metrics

    def score(self, arrays: Tensors) -> tuple[float, float]:
        """CTC loss and word accuracy on the validation words."""
        return evaluate(arrays, *self.held_out, self.options)


def loaded(arrays: Tensors, options: argparse.Namespace) -> CRNN:
    """Return a model with these parameters."""
    model = CRNN(options)
    model.load_state_dict(arrays)
    return model.to(options.device)


def loss_of(log_probabilities: Tensor, words: list[str]) -> Tensor:
    """CTC loss of a batch."""
    targets = torch.tensor([CHARACTERS.index(c) + 1 for word in words for c in word])
    frames, count, _ = log_probabilities.shape
    return F.ctc_loss(
        log_probabilities,
        targets.to(log_probabilities.device),
        torch.full((count,), frames),
        torch.tensor([len(word) for word in words]),
        zero_infinity=True,
    )


@torch.no_grad()
def evaluate(
    arrays: Tensors, images: Tensor, words: list[str], options: argparse.Namespace
) -> tuple[float, float]:
    """Return the CTC loss and the share of words read without a mistake."""
    model = loaded(arrays, options).eval()
    losses, right = [], 0
    for start in range(0, len(words), 256):
        part = words[start : start + 256]
        output = model(images[start : start + 256].to(options.device))
        losses.append(float(loss_of(output, part)) * len(part))
        right += sum(a == b for a, b in zip(decode(output), part, strict=True))
    return sum(losses) / len(words), right / len(words)


def decode(log_probabilities: Tensor) -> list[str]:
    """Best path: the likeliest class of every frame, repeats merged, blanks dropped."""
    found = []
    for classes in log_probabilities.argmax(2).T.tolist():
        kept = [c for c, before in zip(classes, [0, *classes], strict=False) if c and c != before]
        found.append("".join(CHARACTERS[c - 1] for c in kept))
    return found


def draw(
    rows: list[dict[str, Any]], sets: dict[str, tuple[Tensor, list[str]]], options: Any
) -> None:
    """Draw sample images of both sets and word accuracy by round for every cell of the table."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    height, width = len(options.epochs) + 1, max(len(options.batches), len(STYLES))
    figure, axes = pyplot.subplots(height, width, figsize=(4 * width, 2.6 * height), squeeze=False)
    for axis in axes.flat:
        axis.set_visible(False)
    for axis, style in zip(axes[0], STYLES, strict=False):
        images, words = sets[style]
        axis.set_visible(True)
        axis.imshow(torch.cat(list(images[:5, 0])), cmap="gray", vmin=0, vmax=1)
        axis.set(title=f"{style}: {' '.join(words[:5])}", xticks=[], yticks=[])
        axis.title.set_fontsize(8)
    for i, epochs in enumerate(options.epochs):
        for j, batch in enumerate(options.batches):
            axis = axes[i + 1, j]
            axis.set_visible(True)
            for color, name in enumerate(options.strategies):
                for row in rows:
                    if (row["batch"], row["epochs"], row["strategy"]) == (batch, epochs, name):
                        label = name if row["seed"] == options.seed else None
                        rounds = range(1, len(row["curve"]) + 1)
                        axis.plot(rounds, row["curve"], color=f"C{color}", label=label)
            axis.set(title=f"batch {batch}, {epochs} local epochs", ylim=(0, 1))
            axis.title.set_fontsize(9)
            axis.grid(alpha=0.3)
    axes[1, 0].legend(fontsize=7)
    figure.supylabel("word accuracy, both kinds")
    figure.tight_layout()
    Path(options.picture).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.picture, dpi=80)


if __name__ == "__main__":
    main()

"""Word recognition by two unlike clients: FedAvg and FedBoosting over batch size and local epochs.

    python -m experiments.text [--batches 8 32] [--epochs 1 3] [--rounds 10] [--json]

After thesis, section 4.3.2 and table 4.1: a CRNN (VGG-like convolutions, two bidirectional LSTM
layers, CTC), one client with clean word images and one with scene-like ones, word accuracy on
unseen words of both kinds. The defaults are small enough for two cores. At the thesis's size::

    python -m experiments.text --device cuda --height 32 --width 100 --characters 36 --longest 10 \\
        --words 200000 --channels 64 --hidden 256 --batches 256 512 800 --rounds 30 \\
        --optimizer adadelta --lr 0.05
"""

import argparse
from typing import Any

import torch

from bract.seeds import derive_seed
from bract.updates.update import Tensors
from experiments.harness.command import emit, note, parser
from experiments.harness.crnn import Architecture, first
from experiments.harness.pictures import canvas, save
from experiments.harness.readers import Reader, Training, Words, read
from experiments.harness.simulation import STRATEGIES, simulate
from experiments.harness.words import STYLES, word_set

COMPARED = ("fedavg-uniform", "fedboosting", "fedboosting-proportional")


def main() -> None:
    """Run every batch size, number of epochs and strategy; print the table, draw the curves."""
    options = read_options()
    torch.set_num_threads(options.threads)
    seeds = range(options.seed, options.seed + options.seeds)
    architecture = architecture_of(options)
    rows = []
    for seed in seeds:
        train = {s: words_of(options, s, options.words, derive_seed(seed, s)) for s in STYLES}
        tests = {
            s: words_of(options, s, options.test_words, derive_seed(seed, s, "test"))
            for s in STYLES
        }
        start = first(architecture, derive_seed(seed, "model"))
        for epochs in options.epochs:
            for batch in options.batches:
                training = Training(batch, epochs, options.optimizer, options.lr)
                for name in options.strategies:
                    clients = [
                        Reader(architecture, train[s], training, seed=seed, device=options.device)
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
    arguments = parser(__doc__, "device", "threads", picture="words-cpu")
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
    return arguments.parse_args()


def architecture_of(options: argparse.Namespace) -> Architecture:
    """Return the sizes of the network."""
    return Architecture(
        options.height, options.width, options.characters, options.channels, options.hidden
    )


def run(
    name: str,
    clients: list[Reader],
    tests: dict[str, Words],
    start: Tensors,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Train one federation; return its last round and its curves."""
    curves: dict[str, list[float]] = {style: [] for style in tests}

    def judge(arrays: Tensors) -> float:
        for style, words in tests.items():
            found = read(architecture_of(options), arrays, words, options.device)
            curves[style].append(found.accuracy)
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


def words_of(options: argparse.Namespace, style: str, count: int, seed: int) -> Words:
    """Render one set."""
    return Words(
        *word_set(
            style,
            count,
            seed=seed,
            height=options.height,
            width=options.width,
            characters=options.characters,
            longest=options.longest,
        )
    )


def draw(rows: list[dict[str, Any]], sets: dict[str, Words], options: Any) -> None:
    """Draw sample images of both sets and word accuracy by round for every cell of the table."""
    height, width = len(options.epochs) + 1, max(len(options.batches), len(STYLES))
    figure, axes = canvas(height, width, 4 * width, 2.6 * height, squeeze=False)
    for axis in axes.flat:
        axis.set_visible(False)
    for axis, style in zip(axes[0], STYLES, strict=False):
        images, words = sets[style].images, sets[style].words
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
    save(figure, options.picture, dpi=80)


if __name__ == "__main__":
    main()

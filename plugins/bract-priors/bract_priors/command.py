"""``bract prior``, as ``bract --help`` lists it; what trains is imported when it runs."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from bract.cli.examples import with_examples
from bract.cli.groups import command_group
from bract.cli.options import DEVICE, Format, FormatOption
from bract.errors import BractError

app = command_group(
    no_args_is_help=True,
    help="Train a generator on public images, for the surrogate tier of an audit.",
)


class KindName(StrEnum):
    """Kind of a generator."""

    AUTOENCODER = "autoencoder"
    FLOW = "flow"


class SplitName(StrEnum):
    """Split of a data set."""

    TRAIN = "train"
    TEST = "test"


@app.callback()
def _group() -> None:
    """Train a generator on public images, for the surrogate tier of an audit."""


@app.command(
    epilog=with_examples(
        "bract prior train --data digits --out digits.safetensors",
        "bract prior train --data digits --kind flow --out flow.safetensors",
        "bract prior train --data /srv/pictures --size 32 --crops 20 --out pictures.safetensors",
    )
)
def train(
    data: Annotated[
        str,
        typer.Option(
            "--data",
            help="Data set such as digits or mnist, or a folder of pictures. None of the images "
            "may be a client's.",
        ),
    ],
    kind: Annotated[
        KindName,
        typer.Option(
            "--kind",
            help="autoencoder, for ggl, gias and learned-inverter, or flow, for the attack flow.",
        ),
    ] = KindName.AUTOENCODER,
    out: Annotated[Path, typer.Option("--out", help="File to write.")] = Path("prior.safetensors"),
    split: Annotated[
        SplitName,
        typer.Option("--split", help="Of a data set; bract's clients train on train."),
    ] = SplitName.TEST,
    path: Annotated[
        Path | None, typer.Option("--path", help="Folder that holds the data set's files.")
    ] = None,
    size: Annotated[
        int, typer.Option("--size", min=8, max=256, help="Pixels a side, as the client's model.")
    ] = 32,
    images: Annotated[
        int | None, typer.Option("--images", min=16, help="Most images to take.")
    ] = None,
    crops: Annotated[
        int, typer.Option("--crops", min=1, help="Random squares of each picture of a folder.")
    ] = 1,
    epochs: Annotated[
        int | None,
        typer.Option("--epochs", min=1, help="Passes over the images; chosen by their number."),
    ] = None,
    device: Annotated[str, DEVICE] = "cpu",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="latent (length of an autoencoder's latent, 32), width (channels before the last "
            "layer, 24), seed (0), channels (1 grey, 3 colour), labels (true: with the "
            "classes). Repeat.",
        ),
    ] = None,
    output: FormatOption = Format.DEFAULT,
) -> None:
    """Train a generator on public images and write it to a file.

    `bract audit RUN --tier surrogate --prior FILE` attacks with it, and refuses
    an upload of which an image was among those it was trained on, or a mirrored,
    turned or slightly shifted copy of one.
    """
    from bract.attacks import Engine
    from bract.audit.worker import few_threads
    from bract.cli.console import WorkProgress, print_json, say
    from bract_priors.generator_settings import GeneratorSettings
    from bract_priors.prior_training import PriorSettings, train_prior
    from bract_priors.public_images import public_images

    rare = GeneratorSettings.read(settings)
    is_flow = kind is KindName.FLOW
    if is_flow and "latent" in rare.model_fields_set:
        raise BractError(
            "--set latent: a flow's latent is as long as an image; leave it out", code="usage"
        )
    found = public_images(
        data,
        split=split.value,
        path=path,
        size=size,
        channels=rare.channels,
        most=images,
        crops=crops,
        labels=rare.labels,
        seed=rare.seed,
    )
    few_threads()
    with WorkProgress(1, "train a prior") as bar:

        def show(share: float, loss: float) -> None:
            bar.within(share, f"loss {loss:.3f}" if is_flow else f"loss {loss:.1f} nats")

        made = train_prior(
            found.images,
            found.labels,
            PriorSettings(
                kind="flow" if is_flow else "autoencoder",
                latent=rare.latent,
                width=rare.width,
                epochs=epochs,
                seed=rare.seed,
                device=str(Engine(device=device).torch_device()),
            ),
            source=found.source,
            classes=found.classes,
            progress=show,
        )
    made.save(out)
    if output.is_json:
        print_json(made.record())
    does = "restores half-noised" if is_flow else "reproduces"
    say(
        f"done: {out}, {made.text}; {does} held-out images at "
        f"{made.facts.held_out_psnr:.1f} dB; next: bract audit RUN --tier surrogate --prior {out}"
    )


@app.command(epilog=with_examples("bract prior show digits.safetensors --format json"))
def show(
    file: Annotated[Path, typer.Argument(help="What `bract prior train` wrote.")],
    output: FormatOption = Format.DEFAULT,
) -> None:
    """Print a generator's properties, and its training data."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from bract.cli.console import print_json
    from bract_priors.trained_prior import TrainedPrior

    facts = TrainedPrior.load(file).record()
    if output.is_json:
        print_json(facts)
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in facts.items():
        table.add_row(name.replace("_", " "), "-" if value is None else escape(str(value)))
    Console(file=sys.stdout, highlight=False).print(table)

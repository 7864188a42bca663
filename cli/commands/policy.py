"""``bract policy``: print a site's policy file, before a run depends on it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bract.cli.examples import epilog
from bract.cli.groups import command_group
from bract.cli.options import Format, FormatOption

policy = command_group(
    no_args_is_help=True,
    help="Check a site's policy file, without starting anything.",
)


@policy.callback()
def _group() -> None:
    """Check a site's policy file, without starting anything."""


@policy.command("check", epilog=epilog("policy check"))
def check_policy(
    file: Annotated[Path, typer.Argument(help="Policy file of a site, YAML.")],
    against: Annotated[
        Path | None,
        typer.Option("--against", help="Configuration of a federation that the site would join."),
    ] = None,
    output: FormatOption = Format.DEFAULT,
) -> None:
    """Read FILE as a client does, and print which runs it lets in.

    Exit code 2 where the file cannot be used, or the configuration falls short of it.
    """
    from bract.cli.console import print_json, say
    from bract.client.defending import defenses_of
    from bract.client.policy import load_policy
    from bract.client.policy_checks import check_run
    from bract.client.site import Site
    from bract.config import load_config
    from bract.config.sections import named_folders

    found = load_policy(file)
    if against is not None:
        config = load_config(against)
        paths = named_folders(config.data)
        site = Site(name="site", partition=0, data_paths=paths, download=config.data.download)
        check_run(found, site, config, defenses_of(config))
    if output.is_json:
        print_json(found.model_dump(mode="json"))
    for line in found.decisions():
        say(line)
    for caution in found.cautions():
        say(f"WARN  {caution}")
    if found.needs_record:
        say(f"{found.needs_record} needs `state-dir` in the node config: a record over all runs")
    elif found.guard is not None:
        say("guard should have `state-dir` in the node config: its record begins anew without it")
    if against is not None:
        say(f"{against}: meets this policy as far as its text shows")
    say(
        f"done: {file} can be used; next: start the SuperNode with "
        f"--node-config 'policy=\"{file.resolve()}\"'"
    )

"""The ``bract`` command.

Exit codes: 0 done, 1 failed, 2 bad input, 3 leakage above ``--fail-on`` or nothing for it
to judge, 128 and the signal's number where one ended it (130 Ctrl-C, 143 SIGTERM, 129 SIGHUP).
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

import bract
from bract.cli.examples import epilog
from bract.cli.fetching import fetch as fetch_command
from bract.cli.groups import Grouped, command_group
from bract.cli.options import (
    ConfigArgument,
    Format,
    FormatOption,
    RedactOption,
    ReportFormat,
    RunArgument,
    RunsOption,
    refuse,
)
from bract.cli.policy import policy
from bract.cli.provision import provision as provision_command
from bract.cli.provision import site as site_commands
from bract.cli.remote.commands import follow as follow_command
from bract.cli.remote.commands import pack as pack_command
from bract.cli.remote.commands import pull as pull_command
from bract.cli.remote.commands import stop as stop_command
from bract.cli.settings import SetOption
from bract.cli.signals import Stopped, forget, listen
from bract.cli.superlink import superexec as superexec_command
from bract.cli.superlink import superlink as superlink_command
from bract.cli.superlink import supernode as supernode_command
from bract.cli.templates import DemoData, Template
from bract.disk.permissions import UMASK
from bract.errors import (
    BractError,
    LeakageError,
    NothingAttackedError,
    PrivacyAlarmError,
    RunFailedError,
    missing_room,
    not_installed,
    one_line,
    out_of_memory,
)

app = command_group(
    name="bract",
    cls=Grouped,
    help="Deploy a Flower federation that defends its gradients, and audit what its server sees.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

app.command("superlink", epilog=epilog("superlink"))(superlink_command)
app.command("superexec", epilog=epilog("superexec"))(superexec_command)
app.command("supernode", epilog=epilog("supernode"))(supernode_command)
app.command("follow", epilog=epilog("follow"))(follow_command)
app.command("stop", epilog=epilog("stop"))(stop_command)
app.command("pack", epilog=epilog("pack"))(pack_command)
app.command("pull", epilog=epilog("pull"))(pull_command)
app.command("fetch", epilog=epilog("fetch"))(fetch_command)
app.command("provision", epilog=epilog("provision"))(provision_command)
app.add_typer(site_commands, name="site")
app.add_typer(policy, name="policy")


def _show_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"bract {bract.__version__}\n")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
) -> None:
    from bract.cli.console import set_up_logging

    del version
    set_up_logging(verbose)


@app.command(epilog=epilog("init"))
def init(
    path: Annotated[Path, typer.Argument(help="File to write.")] = Path("federation.yaml"),
    template: Annotated[
        Template,
        typer.Option(
            "--template",
            "-t",
            help="digits shows every key; the others what CIFAR-10 on a GPU, encryption, defenses, "
            "a model and images of your own, or rows of a table need.",
        ),
    ] = Template.DIGITS,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Write a commented configuration, and its schema for editors into .bract/ in its folder."""
    from bract.cli.templates import write_template

    write_template(path, template, force=force)


@app.command(epilog=epilog("demo"))
def demo(
    runs: RunsOption = Path("runs"),
    quick: Annotated[
        bool,
        typer.Option("--quick", help="One round and one short attack, to see that all works."),
    ] = False,
    data: Annotated[
        DemoData,
        typer.Option("--data", help="Digits, rows of a clinic's table, or made-up notes."),
    ] = DemoData.DIGITS,
    output: FormatOption = Format.DEFAULT,
) -> None:
    """Run a federation on digits, a table, texts or signals, attack it, and write the report."""
    from bract.cli.launch.warming import warmed_up
    from bract.cli.templates import demo_config
    from bract.runtime.rules import has_runtime

    config = demo_config(quick=quick, data=data)
    with warmed_up(config.clients) if has_runtime() else contextlib.nullcontext() as processes:
        from bract.cli.demo import run_demo

        run_demo(config, runs, processes, as_json=output.is_json)


@app.command(epilog=epilog("run"))
def run(
    config: ConfigArgument,
    runs: RunsOption = Path("runs"),
    superlink: Annotated[
        str | None,
        typer.Option(
            "--superlink",
            help="Running SuperLink: host:port or the name of a connection in Flower's config.toml "
            "(another machine, which then keeps the run), or the socket of one on this machine.",
        ),
    ] = None,
    root_certificates: Annotated[
        Path | None,
        typer.Option("--root-certificates", help="CA of the SuperLink at host:port, PEM."),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Ask the SuperLink at host:port without TLS.")
    ] = False,
    remote: Annotated[
        bool,
        typer.Option(
            "--remote", help="The socket leads to another machine (ssh -L), which keeps the run."
        ),
    ] = False,
    device: Annotated[
        list[str] | None,
        typer.Option("--device", help="Device of client 0, 1, ...; repeat the option."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an interrupted run.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier run of the same name.")
    ] = False,
    cold: Annotated[
        bool,
        typer.Option("--cold", help="Start Flower's processes afresh, without the fork server."),
    ] = False,
    private_seed_file: Annotated[
        Path | None,
        typer.Option(
            "--private-seed-file",
            help="File (mode 0600) with a whole number that keys and noise derive from, for an "
            "experiment that must repeat. Never the configuration's seed: the server knows it.",
        ),
    ] = None,
    simulate: Annotated[
        bool,
        typer.Option(
            "--simulate",
            help="Run the clients in Flower's simulation engine (Ray, bract's extra `simulation`) "
            "instead of a process each: thousands of them on this machine.",
        ),
    ] = False,
    at_once: Annotated[
        int | None,
        typer.Option(
            "--at-once",
            min=1,
            help="Clients that --simulate computes at a time, each in a process of a few hundred "
            "MB; without it one a core.",
        ),
    ] = None,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile",
            help="Write where the time of each round went to profile.json in the run directory; "
            "chrome://tracing and ui.perfetto.dev open it.",
        ),
    ] = False,
    output: FormatOption = Format.DEFAULT,
) -> None:
    """Start the federation of CONFIG as real processes, or in a simulation, and train.

    At a SuperLink on another machine nothing is started or kept here: progress, metrics and errors
    come over its log, and Ctrl-C leaves the run going. See `bract follow`, `stop` and `pull`.
    """
    from bract.cli.console import print_json
    from bract.config import load_config

    if simulate:
        refuse(
            {
                "--superlink": superlink,
                "--root-certificates": root_certificates,
                "--insecure": insecure,
                "--remote": remote,
                "--profile": profile,
            },
            "not with --simulate, which starts a SuperLink of its own on this machine and whose "
            "clients are no processes of their own; leave one of them out",
        )
    elif at_once is not None:
        raise BractError(
            "--at-once goes with --simulate; add it, or leave --at-once out", code="usage"
        )
    if superlink is not None and (remote or not superlink.endswith(".sock")):
        from bract.cli.remote.running import refuse_local, run_remotely
        from bract.cli.remote.where import Where

        refuse_local(
            {
                "--device": device,
                "--resume": resume,
                "--overwrite": overwrite,
                "--cold": cold,
                "--private-seed-file": private_seed_file,
                "--profile": profile,
            }
        )
        where = Where(superlink, root_certificates, insecure)
        followed = run_remotely(load_config(config), where)
        if output.is_json:
            print_json(followed.to_dict())
        return
    if root_certificates is not None or insecure or remote:
        raise BractError(
            "--root-certificates, --insecure and --remote go with a SuperLink on another machine; "
            "name it with --superlink, or leave them out",
            code="usage",
        )
    if profile and superlink is not None:
        raise BractError(
            "--profile looks into processes that this command starts, and with --superlink it "
            "starts none; leave one of them out",
            code="usage",
        )
    loaded = load_config(config)  # before torch is imported, which takes seconds
    with contextlib.ExitStack() as stack:
        processes = None
        if superlink is None and not cold:
            from bract.cli.launch.warming import warmed_up

            processes = stack.enter_context(warmed_up(loaded.clients, simulate=simulate))
        from bract.cli.launch.launcher import Launch
        from bract.cli.run import run_federation
        from bract.client.site import read_private_seed

        trained = run_federation(
            loaded,
            runs,
            Launch(
                superlink=superlink,
                devices=device or [],
                fork_server=not cold,
                private_seed=None
                if private_seed_file is None
                else read_private_seed(private_seed_file),
                profile=profile,
                processes=processes,
                simulate=simulate,
                at_once=at_once,
            ),
            resume=resume,
            overwrite=overwrite,
        )
    if output.is_json:
        print_json(trained.state().to_dict() | {"run": str(trained.root)})


@app.command(epilog=epilog("audit"))
def audit(
    run: RunArgument,
    attack: Annotated[
        list[str] | None, typer.Option("--attack", help="Attack to run; repeat the option.")
    ] = None,
    question: Annotated[
        list[str] | None,
        typer.Option(
            "--question",
            help="reconstruction, membership or epsilon; repeat the option. All that the captures "
            "allow without it.",
        ),
    ] = None,
    clients: Annotated[
        str | None, typer.Option("--clients", help="Comma-separated client names.")
    ] = None,
    rounds: Annotated[
        str | None, typer.Option("--rounds", help="Rounds, such as 1,3 or 1-5.")
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            help="2000 (iterations a restart), or 90s, 5m: wall time of the whole audit, or of "
            "each upload with --set audit.budget_each=true.",
        ),
    ] = None,
    restarts: Annotated[
        int | None,
        typer.Option("--restarts", min=1, help="Starts; the attacker's own loss picks one."),
    ] = None,
    device: Annotated[str | None, typer.Option("--device", help="auto, cpu or cuda:N.")] = None,
    tier: Annotated[
        str | None,
        typer.Option(
            "--tier",
            help="What the attacker knows: oblivious, adaptive, surrogate, colluding, or all that "
            "apply.",
        ),
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option("--key", help="Key file of one client, for the colluding tier."),
    ] = None,
    prior_file: Annotated[
        Path | None,
        typer.Option("--prior", help="File of `bract prior train`, for the surrogate tier."),
    ] = None,
    truth: Annotated[
        Path | None,
        typer.Option("--truth", help="Folder of the clients' truth folders; RUN/truth without it."),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option("--model", help="package.module:callable that captures may name; it is run."),
    ] = None,
    final: Annotated[
        Path | None,
        typer.Option(
            "--final",
            help="File of the final global model (safetensors, or a state_dict of torch.save); "
            "the one in RUN/models without it.",
        ),
    ] = None,
    settings: SetOption = None,
    fail_on: Annotated[
        list[str] | None,
        typer.Option(
            "--fail-on",
            help="Exit with 3 on a leak, such as ssim>0.5@adaptive; with 4 where uploads are not "
            "what is described.",
        ),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray",
            help="Attack on many workers: a Ray cluster's HOST:PORT, or auto for this machine.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Skip what an earlier audit has done.")
    ] = False,
    yes: Annotated[
        bool,
        typer.Option("--yes", "-y", help="Do not ask before long or infeasible work."),
    ] = False,
    output: FormatOption = Format.DEFAULT,
) -> None:
    """Attack what the server captured in RUN, and score the reconstructions.

    Options and --set audit.KEY=VALUE replace keys of the configuration's audit section. The time
    is estimated first. On a terminal you are asked before more than a minute of work, or work of
    which nothing can be expected; elsewhere (a pipe, CI) it begins without asking. Where every
    attack is refused, for another reason than that uploads are ciphertexts, the exit code is 4;
    where a measured epsilon is above the account's, it is 5.
    """
    from bract.cli.approval import approve
    from bract.cli.audit import (
        audit_requests,
        auditing,
        configured,
        execute,
        open_audits,
        parse_budget,
        parse_clients,
        parse_rounds,
    )
    from bract.cli.audit_workers import asked_for, count_for, workers_of
    from bract.cli.console import print_json, say
    from bract.cli.gate import Gate, check_alarms, check_attacked, check_tiers, hold, rule_of
    from bract.cli.settings import read_section
    from bract.config.config import AuditConfig

    gates = [Gate.parse(text) for text in fail_on or ()]
    section = read_section("audit", settings, AuditConfig.model_fields)
    budget_each = section.get("budget_each", configured(run).budget_each)
    chosen = {
        **section,
        **({"attacks": attack} if attack else {}),
        **({"questions": question} if question else {}),
        **({"clients": parse_clients(clients)} if clients else {}),
        **({"rounds": parse_rounds(rounds)} if rounds else {}),
        **({"restarts": restarts} if restarts else {}),
        **({"device": device} if device else {}),
        **(parse_budget(budget, each=budget_each) if budget is not None else {}),
    }
    requests = audit_requests(
        run,
        chosen,
        tier=tier,
        key=key,
        prior=prior_file,
        truth=truth,
        models=model or (),
        final=final,
    )
    asked = asked_for(ray, requests[0])
    if asked is not None:
        # This process only plans and checks; Ray decides what the workers compute on.
        # They attack; the other questions are asked without --ray.
        workers_ask = {"device": "cpu", "questions": requests[0].questions or ["reconstruction"]}
        requests = [request.model_copy(update=workers_ask) for request in requests]
    check_tiers(gates, [request.tier for request in requests])
    with auditing(run):
        audits = open_audits(run, requests, resume=resume, shared=asked is None)
        approve(audits, ask=not yes, measure=asked is None, workers=count_for(audits))
        with workers_of(audits, asked) as workers:
            answers = [answer for audit in audits for answer in execute(audit, workers)]
    if output.is_json:
        print_json([answer.to_dict() for answer in answers])
    say(f"done: {run}/audit; next: bract report {run}")
    check_alarms(answers)
    hold(gates, answers, rule_of(run))
    check_attacked(answers, run)


@app.command(epilog=epilog("describe"))
def describe(
    run: RunArgument = Path(),
    model: Annotated[
        str | None,
        typer.Option("--model", help="package.module:callable without arguments; it is run."),
    ] = None,
    settings: SetOption = None,
    truth: Annotated[
        Path | None,
        typer.Option("--truth", help="Folder of the batches that clients kept; RUN/truth."),
    ] = None,
    work: Annotated[
        Path | None,
        typer.Option(
            "--work",
            help="A witness's round-NNNN.work.json that holds for every client, of the app's "
            "author; without it those beside the truth.",
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Replace an edited bract.yaml, or write one that what clients kept contradicts; "
            "its values are kept.",
        ),
    ] = False,
    output: FormatOption = Format.DEFAULT,
) -> None:
    """Propose RUN/bract.yaml: the facts of an app that its captures do not declare.

    Infers what it can from the captures, marks the rest as guesses, and checks both against the
    captures. Where clients kept what they trained on, they are repeated on it: the nearest
    description that explains the updates is taken, and one that is contradicted is an error.
    What clients' witnesses saw of their training is taken as it is, and checked alike.
    Edit the file and run the command again to check it. On a terminal you are asked
    about guesses; elsewhere (a pipe, < /dev/null) nothing is asked.
    """
    from bract.cli.describe import describe_app
    from bract.cli.settings import read_settings

    describe_app(
        run,
        read_settings(settings),
        model=model,
        truth=truth,
        work=work,
        force=force,
        as_json=output.is_json,
    )


@app.command(epilog=epilog("report"))
def report(
    run: RunArgument,
    redact: RedactOption = None,
    output: Annotated[
        ReportFormat,
        typer.Option(
            "--format",
            help="json prints report.json to stdout; pdf prints summary.html to summary.pdf "
            "with this machine's Chromium.",
        ),
    ] = ReportFormat.DEFAULT,
    since: Annotated[
        Path | None,
        typer.Option(
            "--since",
            help="An earlier run directory, or its report.json: what changed, and what it did.",
        ),
    ] = None,
) -> None:
    """Write RUN/report.html, RUN/report.json and RUN/summary.html, a page for data protection."""
    from bract.cli.report import report_run

    as_json, as_pdf = output is ReportFormat.JSON, output is ReportFormat.PDF
    report_run(run, redact=redact, as_json=as_json, as_pdf=as_pdf, since=since)


@app.command(epilog=epilog("release"))
def release(
    run: RunArgument,
    file: Annotated[
        list[Path] | None,
        typer.Option(
            "--file",
            help="File that goes out, for its digest; repeat the option. RUN's final model without "
            "it.",
        ),
    ] = None,
    fail_on: Annotated[
        list[str] | None,
        typer.Option(
            "--fail-on",
            help="A limit, as of bract audit; repeat the option. Without it: no leaked example in "
            "any tier that was tried, and membership>0.05@1% where it was asked.",
        ),
    ] = None,
    output: Annotated[
        ReportFormat,
        typer.Option(
            "--format",
            help="json prints release.json to stdout; pdf prints release.html to release.pdf with "
            "this machine's Chromium.",
        ),
    ] = ReportFormat.DEFAULT,
) -> None:
    """Write RUN/release.json and RUN/release.html: limits held, what goes out, room for a name.

    Attacks nothing: it judges what earlier audits of RUN found. Where a limit is crossed, or had
    nothing to judge, the sheet says so and the exit code is 3.
    """
    from bract.cli.release import release_run

    release_run(
        run,
        files=file or [],
        limits=fail_on or [],
        as_json=output is ReportFormat.JSON,
        as_pdf=output is ReportFormat.PDF,
    )


@app.command(epilog=epilog("watch"))
def watch(
    run: RunArgument,
    redact: RedactOption = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print the state of the run and end; serve no page.")
    ] = False,
    output: FormatOption = Format.DEFAULT,
) -> None:
    """Serve RUN's growing page on this machine, and print its state, until Ctrl-C."""
    from bract.cli.watch import watch_run

    watch_run(run, redact=redact, once=once, as_json=output.is_json)


@app.command(epilog=epilog("export"))
def export(
    run: RunArgument,
    to: Annotated[str, typer.Option("--to", help="tensorboard or mlflow.")],
    where: Annotated[
        str | None,
        typer.Option(
            "--where",
            help="TensorBoard's log folder or MLflow's tracking URI; one in RUN without it.",
        ),
    ] = None,
    output: FormatOption = Format.DEFAULT,
) -> None:
    """Write RUN's figures by round, but no picture, for TensorBoard or MLflow."""
    from bract.cli.export import export_run

    export_run(run, to, where, as_json=output.is_json)


@app.command(epilog=epilog("schema"))
def schema(
    path: Annotated[
        Path, typer.Argument(metavar="FILE", help="CSV or Parquet file with a header.")
    ],
    target: Annotated[str, typer.Option("--target", help="Column that the model predicts.")],
    categorical: Annotated[
        list[str] | None,
        typer.Option("--categorical", help="Column whose numbers are codes; repeat the option."),
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="The rows are public, so the statistics are too.")
    ] = False,
    describe: Annotated[
        bool, typer.Option("--describe", help="Print a section of bract.yaml, for an own app.")
    ] = False,
    output: FormatOption = Format.DEFAULT,
) -> None:
    """Infer the schema of a table, and print it as a section of a configuration."""
    from bract.cli.table_schema import write_schema

    write_schema(
        path,
        target,
        categorical=categorical or (),
        public=public,
        described=describe,
        as_json=output.is_json,
    )


@app.command(epilog=epilog("keygen"))
def keygen(
    folder: Annotated[Path, typer.Argument(metavar="OUT_DIR", help="Folder for the key files.")],
    bits: Annotated[int, typer.Option("--bits", help="2048 or 3072.")] = 2048,
    clients: Annotated[int, typer.Option("--clients", min=1, help="Number of key shares.")] = 3,
    threshold: Annotated[
        int | None,
        typer.Option("--threshold", help="Deal shares of which this many decrypt together."),
    ] = None,
    settings: SetOption = None,
    identity: Annotated[
        bool,
        typer.Option("--identity", help="Write one site's own identity key, and nothing else."),
    ] = False,
    output: FormatOption = Format.DEFAULT,
) -> None:
    """Write Paillier keys to OUT_DIR, for clients of encrypted runs.

    --set encryption.randomness and encryption.degree are those of the federation's configuration.
    """
    from bract.cli.keygen import keygen as write
    from bract.cli.keygen import keygen_identity
    from bract.cli.settings import read_section
    from bract.config import build_config

    if identity:
        keygen_identity(folder, as_json=output.is_json)
        return
    section = {
        "scheme": "paillier",
        "key_bits": bits,
        "threshold": threshold,
        "max_weight_sum": max(31, clients),
        **read_section("encryption", settings, ("randomness", "degree")),
    }
    config = build_config({"clients": clients, "encryption": section}, source="keygen")
    write(folder, config.encryption, clients, as_json=output.is_json)


@app.command(epilog=epilog("compare"))
def compare(
    config: Annotated[
        Path,
        typer.Argument(
            help="YAML configuration, or the folder of an app that was run and described once."
        ),
    ],
    defense: Annotated[
        list[str] | None,
        typer.Option(
            "--defense",
            help="NAME, NAME:key=value,... or a chain NAME+NAME; repeat the option. Without it: "
            "AdaDefense, Guardian, FedKL, Gaussian noise, pruning, and those of CONFIG.",
        ),
    ] = None,
    tier: Annotated[
        list[str] | None,
        typer.Option("--tier", help="all (default), oblivious, adaptive or colluding; repeat it."),
    ] = None,
    runs: RunsOption = Path("runs"),
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on; what is done stays as it is.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace earlier runs of these variants.")
    ] = False,
    redact: RedactOption = None,
    output: FormatOption = Format.DEFAULT,
) -> None:
    """Run CONFIG undefended and under each defense, attack each, and compare them on one page.

    The runs and the page are kept in RUNS/NAME-compare. Where a defense (FedKL) needs a model with
    normalisation and CONFIG's has none, every variant, the undefended one too, runs the model's
    -bn counterpart. An app of your own runs in Flower's simulation engine, on as many clients as
    its latest run captured; its client has a DefenseMod, whose defense each variant replaces.
    """
    from bract.app_folder import app_in
    from bract.config import load_config

    own = app_in(config) if config.is_dir() else None
    if own is not None:
        from bract.cli.compare_app import compare_app

        compare_app(
            own,
            runs,
            defenses=defense,
            tiers=tier or ["all"],
            resume=resume,
            overwrite=overwrite,
            redact=redact,
            as_json=output.is_json,
        )
        return
    loaded = load_config(config)
    from bract.cli.compare import command_steps, compare_defenses
    from bract.schema.inputs import is_redacted

    redact = is_redacted(redact, [loaded.data.input])

    compare_defenses(
        loaded,
        runs,
        command_steps(resume=resume, redact=redact, tiers=tier or ["all"]),
        defenses=defense,
        resume=resume,
        overwrite=overwrite,
        redact=redact,
        as_json=output.is_json,
    )


@app.command(epilog=epilog("doctor"))
def doctor(
    kit: Annotated[
        Path | None,
        typer.Option(
            "--kit",
            help="Check one party's start-up kit instead: files, certificates, gateway, clock, "
            "device, data.",
        ),
    ] = None,
    output: FormatOption = Format.DEFAULT,
) -> None:
    """Check this machine, and print how to install what is missing."""
    if kit is not None:
        from bract.cli.doctor_kit import examine_kit

        examine_kit(kit, as_json=output.is_json)
        return
    from bract.cli.doctor import examine

    examine(as_json=output.is_json)


def main(command: typer.Typer | None = None, name: str = "bract") -> None:
    """Run a command line, bract's own by default; never show a traceback for bad input."""
    from bract.cli.console import begin_output

    begin_output()
    listen()
    os.umask(UMASK)  # TensorBoard, MLflow and Flower make files of their own
    try:
        (command or app)(prog_name=name)
    except RunFailedError as error:
        _end(1, error.code, str(error))
    except BractError as error:
        _end(2, error.code, str(error))
    except LeakageError as error:
        _end(3, error.code, str(error), lead="")
    except NothingAttackedError as error:
        _end(4, error.code, str(error))
    except PrivacyAlarmError as error:
        _end(5, error.code, str(error), lead="alarm: ")
    except OSError as error:
        _end(1, *_operating_system(error))
    except ModuleNotFoundError as error:
        if (missing := not_installed(error)) is not None:
            _end(2, missing.code, str(missing))
        if (room := missing_room(error)) is None:
            raise
        _end(
            2,
            "role-missing",
            f"this installation has no {room}: images of a client or a server leave out what they "
            "need not hold; run this command in the audit image, or install bract",
        )
    except (MemoryError, RuntimeError, ImportError) as error:
        if not out_of_memory(error):
            raise
        why = one_line(error, 200) or type(error).__name__
        _end(
            1,
            "out-of-memory",
            f"out of memory ({why}); free some and try again: what was finished is kept",
        )
    except Stopped as stopped:
        forget()
        _end(stopped.code, "interrupted", str(stopped), lead="")


def _end(status: int, code: str, message: str, *, lead: str = "error: ") -> NoReturn:
    """Print why the command ends, as JSON too where it was asked for, and exit."""
    from bract.cli.console import print_error, say

    say(f"{lead}{message}")
    print_error(code, message)
    sys.exit(status)


def _operating_system(error: OSError) -> tuple[str, str]:
    """Return the code of an error of the operating system, and what happened to which file."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) and error.filename:
        from bract.disk.files import write_failed

        failed = write_failed(Path(error.filename), error)
        return failed.code, str(failed)
    return "system-error", f"{error.filename or 'operating system'}: {error.strerror or error}"


if __name__ == "__main__":
    main()

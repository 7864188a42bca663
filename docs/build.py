"""Hooks of MkDocs: pages that are made from the code, notebooks as pages, links out of docs/."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

ROOT = Path(__file__).parents[1]
NOTEBOOKS = "tutorials"
API: dict[str, tuple[str, ...]] = {
    "bract.server": (),
    "bract.server.loopback": ("LoopbackGrid",),
    "bract.server.things": ("About", "Thing"),
    "bract.client": (),
    "bract.report": (),
    "bract.attacks": (),
    "bract.attacks.checks": ("check_attack",),
    "bract.attacks.adaptive.chains": (
        *("alone", "as_simulated", "named", "noisy", "parts_of_first", "pruned"),
    ),
    "bract.attacks.adaptive.noise": ("clipping",),
    "bract.attacks.adaptive.pruning": ("bound_dropped",),
    "bract.attacks.adaptive.simulated_defense": ("Simulated", "defended_by", "simulated"),
    "bract.attacks.base": ("Batches", "Cost"),
    "bract.attacks.options": ("Count", "Rate", "ScheduleName", "Share", "Weight"),
    "bract.attacks.problem.case": ("open_case", "text_schema"),
    "bract.attacks.problem.client_model": (
        *("ForwardModel", "LocalTraining", "forward_model", "images_in", "local_training"),
        "loss_gradient",
    ),
    "bract.attacks.problem.evidence": ("CHAINS", "FORWARD"),
    "bract.attacks.problem.likelihoods": ("GaussianLikelihood", "LaplaceLikelihood"),
    "bract.attacks.problem.objectives": (
        *("LayerWeighting", "NoObjective", "RelativeError", "SquaredError", "weighted_sum"),
    ),
    "bract.attacks.problem.over_rounds": ("SumOverRounds", "round_of"),
    "bract.attacks.problem.public_prior": ("PRIORS",),
    "bract.attacks.problem.target_model": ("TargetModel", "target_model_of"),
    "bract.attacks.problem.site": ("Site",),
    "bract.attacks.reading.span": ("Span",),
    "bract.attacks.reading.spectrum": ("Spectrum",),
    "bract.attacks.solve.checkpoints": ("digest_of", "made_by", "write_atomically"),
    "bract.attacks.solve.defaults": ("ModelDefault",),
    "bract.attacks.solve.descent": ("Recipe",),
    "bract.attacks.solve.lbfgs": ("BatchedLBFGS",),
    "bract.attacks.solve.matching": ("searched_labels",),
    "bract.attacks.solve.optimizers": ("SCHEDULES", "BatchedOptimizer", "Evaluate"),
    "bract.attacks.solve.own_statistics": ("OwnStatistics",),
    "bract.attacks.solve.regularizers": (
        *("BatchNormStatistics", "LatentPrior", "Prior", "TotalVariation", "image_priors"),
    ),
    "bract.attacks.problem.linear_layers": (*("Projection", "patch_layers", "patch_projection"),),
    "bract.attacks.task": ("OF_ONE_CASE", "AttackTask"),
    "bract.crypto": (),
    "bract.models.layers": ("last_linear", "replace_layer"),
    "bract.models.losses": ("loss_of",),
    "bract.models.own_loss": ("OwnLoss",),
    "bract.models.resnet": ("with_activation",),
    "bract.models.tap": ("inputs", "leaving"),
    "bract.defenses": (),
    "bract.strategies": (),
    "bract.models": (),
    "bract.data": (),
    "bract.inputs": (),
    "bract.inputs.image": ("Image", "Reference"),
    "bract.scores": (),
    "bract.audit.questions": ("Question", "Rule", "Decision", "Batch", "QUESTIONS"),
    "bract.audit.description.invariants": ("Invariant",),
    "bract.config": (),
    "bract.schema": (),
    "bract.schema.inputs": ("InputOutline",),
    "bract.schema.record": ("describe",),
    "bract.captures.observation": ("ObservationStore", "Observation", "ClientDeclaration"),
    "bract.protocol.fused": ("answer_fused",),
    "bract.protocol.records": ("Contribution",),
    "bract.updates.step_law": ("StepLaw",),
    "bract.updates.update": ("Tensors", "flatten"),
    "bract.paillier": (),
    "bract.errors": ("BractError", "RunFailedError", "one_line", "shown"),
    "bract.audit.worker": ("few_threads",),
    "bract.audit.intervals": ("mean_interval", "share_interval"),
    "bract.report.page.axis": ("Axis", "dot"),
    "bract.report.page.render": ("render_worst", "style"),
    "bract.client.defenses": ("build_defenses",),
    "bract.data.sources": ("Split", "fitted", "open_source"),
    "bract.data.views": ("data_spec",),
    "bract.data.tokens": ("as_example",),
    "bract.config.audit": ("Tier",),
    "bract.config.text": ("TextSchema",),
    "bract.seeds": ("derive_seed", "trial_seed"),
    "bract.runtime.in_process": ("federate",),
    "bract.rundir": ("RunDirectory",),
    "bract.installed": ("App", "app_in"),
    "bract.cli.audit": ("audit_all_tiers",),
    "bract.cli.compare_app": ("DescribedApp", "described_app"),
    "bract.cli.console": ("WorkProgress", "print_json", "say"),
    "bract.cli.examples": ("with_examples",),
    "bract.cli.groups": ("command_group",),
    "bract.cli.options": (
        "DEVICE",
        "Format",
        "FormatOption",
        "RedactOption",
        "RunArgument",
        "RunsOption",
    ),
    "bract.cli.schemas": ("schema_of",),
    "bract.cli.settings": ("read_settings",),
    "bract.cli.signals": ("explained", "resumed"),
    "bract.pool": (),
    "bract.process.clock": ("Clock", "ProcessorClock", "current", "now", "timed_by"),
    "bract.cli.launch.cluster": ("Asked", "Cluster", "connected", "uninterrupted"),
    "bract.disk": (),
    "bract.registry": ("unknown",),
    "bract.parse": (),
}
"""What an app, a notebook or a package that extends bract imports, by module; without names all
that the module exports."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the pages of measurements and of decisions to the navigation, by name."""
    docs = ROOT / "docs"
    for title, folder in (("Measured", "measured"), ("Decisions", "decisions")):
        found = sorted(path.name for path in (docs / folder).glob("*.md"))
        index = [f"{folder}/index.md"] if folder == "measured" else []
        listed = [*index, *(f"{folder}/{name}" for name in found)]
        if listed:
            config.nav = [*(config.nav or []), {title: listed}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made from the code, and the notebooks."""
    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    picture = ROOT / "experiments" / "results"
    for found in sorted(picture.glob("*.png")):
        files.append(File.generated(config, f"results/{found.name}", abs_src_path=str(found)))
    return files


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """Take the theme's one script of another host out; a few lines of our own do what it does."""
    up = "../" * page.file.src_uri.count("/")
    own = f'<script src="{up}theme/worker.js"></script>'
    return output.replace('<script src="https://unpkg.com/iframe-worker/shim"></script>', own)


def on_post_template(output_content: str, **_: Any) -> str:
    """The same for the page that stands where no page is."""
    return output_content.replace(
        '<script src="https://unpkg.com/iframe-worker/shim"></script>', ""
    )


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Let links to pictures of the benchmarks, and to files of the repository, lead somewhere."""
    folder = (ROOT / "docs" / page.file.src_uri).parent
    up = "../" * page.file.src_uri.count("/")
    markdown = re.sub(
        r"\]\((?:\.\./)+experiments/results/(\w[\w.-]*\.png)\)",
        rf"]({up}results/\1)",
        markdown,
    )
    return re.sub(
        r"\[([^]]+)\]\(((?:\.\./)+[\w./-]+)(?:#[\w-]+)?\)",
        lambda found: _in_repository(found, folder),
        markdown,
    )


def _in_repository(found: re.Match[str], folder: Path) -> str:
    """Name a file of the repository that is no page of the site."""
    target = (folder / found[2]).resolve()
    if target.is_relative_to(ROOT / "docs") or not target.exists():
        return found[0]
    return f"{found[1]} (`{target.relative_to(ROOT)}` in the repository)"


def pages() -> dict[str, str]:
    """Return the made pages by their path."""
    made = {
        "reference/commands.md": commands(),
        "reference/configuration.md": configuration(),
        "reference/files.md": files_and_schemas(),
        "reference/api.md": api(),
        "measured/index.md": measured(),
    }
    for notebook in sorted((ROOT / "docs" / NOTEBOOKS).glob("*.ipynb")):
        made[f"{NOTEBOOKS}/{notebook.stem}.md"] = as_page(notebook)
    return made


def measured() -> str:
    """Return the list of what was measured: each page's question with its answer."""
    lines = ["# Measured", "", "Each page is made from committed rows by `experiments/texts`."]
    for path in sorted((ROOT / "docs" / "measured").glob("*.md")):
        head, answer, *_ = path.read_text().split("\n\n")
        title = head.splitlines()[-1]
        answer = answer.replace("](#", f"]({path.name}#")  # a section of its own page
        lines += ["", f"**[{title.removeprefix('# ')}]({path.name})** {answer}"]
    return "\n".join(lines) + "\n"


def as_page(notebook: Path) -> str:
    """Return a notebook as Markdown: its text and its code."""
    cells = json.loads(notebook.read_text())["cells"]
    parts = []
    for cell in cells:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
    link = f"This page is a notebook: docs/{NOTEBOOKS}/{notebook.name} in the repository."
    return "\n\n".join([*parts, link]) + "\n"


def commands() -> str:
    """Every command with its arguments, options and examples, from the command line itself."""
    from bract.cli.examples import examples_in
    from bract.cli.main import app

    lines = [
        "# Command line",
        "",
        "Made from `bract --help`. [How to use it](../guide/command-line.md).",
        "",
    ]
    group: Any = typer.main.get_command(app)
    for name, command in _commands(group.every_command()):
        lines += [f"## bract {name}", "", " ".join((command.help or "").split()), ""]
        lines += ["| | | default |", "| --- | --- | --- |"]
        for parameter in command.params:
            if parameter.name == "help":
                continue
            options = (
                ", ".join(f"`{option}`" for option in parameter.opts)
                if parameter.param_type_name == "option"
                else f"`{parameter.name.upper()}`"
            )
            default = parameter.default
            shown = (
                ""
                if default in (None, False, (), []) or callable(default)
                else f"`{getattr(default, 'value', default)}`"
            )
            if parameter.required:
                shown = "required"
            said = " ".join((parameter.help or "").split()).replace("|", "\\|")
            lines.append(f"| {options} | {said} | {shown} |")
        lines += ["", "```sh", *examples_in(command.epilog), "```", ""]
    return "\n".join(lines)


def _commands(commands: Any, before: tuple[str, ...] = ()) -> Any:
    for name, command in commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command.commands, (*before, name))
        else:
            yield " ".join((*before, name)), command


def configuration() -> str:
    """Every key of the configuration, with type, default and what is allowed."""
    from bract.cli.templates import Template, template
    from bract.config import FederationConfig

    lines = [
        "# Configuration",
        "",
        "Made from the schema and from what `bract init` writes.",
        "",
        "```yaml",
        template("federation.yaml").rstrip(),
        "```",
        "",
    ]
    lines += [
        "The other templates of `bract init --template`: "
        + ", ".join(f"`{t}`" for t in Template)
        + ".",
        "",
    ]
    lines += ["## Keys", "", "| key | type | default |", "| --- | --- | --- |"]
    lines += _keys(FederationConfig())
    return "\n".join(lines) + "\n"


def _keys(section: BaseModel, before: str = "") -> list[str]:
    found = []
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            found += _keys(value, f"{before}{name}.")
            continue
        kind = (
            getattr(field.annotation, "__name__", None)
            if not getattr(field.annotation, "__args__", None)
            else None
        )
        shown = kind or str(field.annotation).replace("typing.", "").replace("pathlib.", "")
        shown = re.sub(r"Annotated\[(\w+), [^]]*\]+", r"\1", shown).replace("|", "or")
        default = "" if value is PydanticUndefined else json.dumps(value, default=str)
        found.append(f"| `{before}{name}` | {shown} | `{default}` |")
    return found


def files_and_schemas() -> str:
    """The files of a run directory, by their schemas."""
    from bract.cli.schemas import READ, WRITTEN
    from bract_harden.records import Hardening

    lines = [
        "# Files and schemas",
        "",
        "The JSON Schema of each; editors complete the first two.",
        "",
        "| schema | what it describes | version |",
        "| --- | --- | --- |",
    ]
    for name, model in {**READ, **WRITTEN, "harden": Hardening}.items():
        version = model.model_fields.get("schema_version")
        said = (model.__doc__ or "").strip().splitlines()[0].replace("``", "`")
        number = "" if version is None else version.default
        lines.append(f"| [{name}.json](../schema/{name}.json) | {said} | {number} |")
    return "\n".join(lines) + "\n"


def api_names(module: str) -> tuple[str, ...]:
    """Return the names of a module that the reference has."""
    return API[module] or tuple(importlib.import_module(module).__all__)


def api() -> str:
    """What a program imports, from the docstrings."""
    lines = ["# Python API", "", "What an app, a notebook or an extension imports.", ""]
    for module in API:
        lines += [f"## {module}", ""]
        for name in api_names(module):
            lines += [f"::: {module}.{name}", "    options:", "      heading_level: 3", ""]
    return "\n".join(lines)

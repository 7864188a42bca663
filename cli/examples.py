"""Examples in the help of each command: lines that can be typed unchanged."""

from __future__ import annotations

from rich.markup import escape

EXAMPLES: dict[str, tuple[str, ...]] = {
    "init": (
        "bract init",
        "bract init secret.yaml --template encrypted",
    ),
    "demo": (
        "bract demo",
        "bract demo --data table",
        "bract demo --data text",
        "bract demo --data signal",
        "bract demo --quick --runs /tmp/runs",
    ),
    "run": (
        "bract run federation.yaml",
        "bract run federation.yaml --resume",
        "bract run federation.yaml --device cuda:0 --device cuda:1 --device cpu",
        "bract run federation.yaml --simulate --at-once 4",
        "bract run federation.yaml --superlink kits/operator/sockets/8000.sock",
        "bract run federation.yaml --superlink fl.example.org:8000 --root-certificates ca.crt",
    ),
    "follow": (
        "bract follow 7381002 --superlink fl.example.org:8000 --root-certificates ca.crt",
        "bract follow 7381002 --superlink my-profile --format json",
    ),
    "stop": ("bract stop 7381002 --superlink my-profile",),
    "pack": (
        "bract pack runs/demo --out demo.tar",
        "bract pack /srv/runs/study-7381002 --out -",
    ),
    "pull": (
        "bract pull demo.tar --out demo",
        "bract pull - --out study --format json",
    ),
    "fetch": (
        "bract fetch s3://bucket/study/demo runs/demo",
        "bract fetch gs://bucket/captures study --format json",
    ),
    "audit": (
        "bract audit runs/demo",
        "bract audit runs/demo --clients client-2 --rounds 1-3 --restarts 4 --yes",
        "bract audit captures --truth truth --budget 5m --format json",
        "bract audit runs/demo --tier adaptive --fail-on 'ssim>0.5@adaptive'",
        "bract audit runs/demo --tier surrogate --prior digits.safetensors",
        "bract audit captures --truth truth --question membership --final model.safetensors",
    ),
    "schema": (
        "bract schema rows.csv --target outcome",
        "bract schema rows.parquet --target price --categorical district --public",
    ),
    "describe": (
        "bract describe . --model my_app.task:Net",
        "bract describe . --model my_app.task:Net --set training.batch_size=32",
        "bract describe . --model my_app.task:Net --set clients.node-1.local_steps=5",
    ),
    "report": (
        "bract report runs/demo",
        "bract report runs/demo --redact --format json",
        "bract report runs/demo --format pdf",
        "bract report runs/demo --since runs/last",
    ),
    "release": (
        "bract release runs/demo",
        "bract release runs/demo --fail-on 'leaked>0@adaptive' --fail-on 'membership>0.05@1%'",
        "bract release runs/demo --file model.onnx --format pdf",
    ),
    "watch": ("bract watch runs/demo", "bract watch runs/demo --once --format json"),
    "export": (
        "bract export runs/demo --to tensorboard",
        "bract export runs/demo --to mlflow --where http://127.0.0.1:5000",
    ),
    "keygen": (
        "bract keygen keys",
        "bract keygen keys --clients 5 --threshold 3 --bits 3072",
        "bract keygen site-a --identity",
    ),
    "compare": (
        "bract compare federation.yaml",
        "bract compare federation.yaml --defense adadefense --defense noise:std=0.01",
    ),
    "doctor": (
        "bract doctor",
        "bract doctor --format json",
        "bract doctor --kit kits/hospital-a",
    ),
    "policy check": (
        "bract policy check policy.yaml",
        "bract policy check policy.yaml --against federation.yaml",
    ),
    "provision": (
        "bract provision federation.yaml --out kits",
        "bract provision federation.yaml --out kits --requests requests",
    ),
    "site add": (
        "bract site add hospital-d --kits kits --data /srv/images",
        "bract site add hospital-d --kits kits --request hospital-d.json",
    ),
    "site status": (
        "bract site status --kit kits/hospital-a",
        "bract site status --kit kits/operator --format json",
        "bract site status --kit kits/operator --metrics /var/lib/node_exporter/bract.prom",
    ),
    "site backup": (
        "bract site backup --kit kits/hospital-a --out hospital-a.backup",
        "bract site backup --kit kits/operator --out operator.backup --passphrase-file phrase",
    ),
    "site restore": ("bract site restore hospital-a.backup --kit kits/hospital-a",),
    "site request": ("bract site request hospital-a --out keys",),
    "site accept": ("bract site accept hospital-a --keys keys",),
    "site revoke": ("bract site revoke hospital-d --kits kits",),
    "site renew": ("bract site renew --kits kits", "bract site renew --kits kits --authority"),
    "site list": ("bract site list --kits kits --format json",),
    "site register": ("bract site register --kit kits/operator",),
    "superlink": (
        "bract superlink --kit kits/operator",
        "bract superlink --insecure",
        "bract superlink --address 0.0.0.0:8000 --certificate server.pem --key server.key "
        "--ca ca.crt",
        "bract superlink --insecure --external --database state.db",
    ),
    "superexec": (
        "bract superexec --kit kits/operator",
        "bract superexec --sockets /operator/8000.sock",
    ),
    "supernode": (
        "bract supernode --kit kits/hospital-a",
        "bract supernode --superlink 127.0.0.1:8000 --insecure",
        "bract supernode --superlink fl.example.org:8000 --root-certificates ca.crt --node-config "
        "'policy=\"policy.yaml\"'",
    ),
}
"""Lines by command; ``policy check`` is a command of the group ``policy``."""


def epilog(command: str) -> str:
    """Return the examples of a command as the end of its help, one a line."""
    return with_examples(*EXAMPLES[command])


def with_examples(*lines: str) -> str:
    """Return lines that can be typed as the end of a command's help, one a line."""
    return "\n\n".join(["Examples:", *(escape(f"$ {line}") for line in lines)])


def examples_in(help_end: str | None) -> list[str]:
    """Return the lines of `with_examples` again, unescaped."""
    lines = (help_end or "").replace("\\[", "[").splitlines()
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]

"""The codes of errors: one table for tests, documents and automation.

A code names what a caller does differently; the message names the file, key or client, what was
found and what was expected. The documents' table is written from this one.
"""

from __future__ import annotations

GROUPS: dict[str, dict[str, str]] = {
    "Command line and configuration": {
        "usage": "An option, its value or a combination of options is wrong: correct the command.",
        "unknown-name": "A name is not registered or not listed, such as an attack, a model, a "
        "tier or a client: take one of those that the message lists.",
        "config-key": "A key is unknown, or a needed one is missing: correct or add it.",
        "config-value": "A value of a key, a setting or an argument is not allowed: correct it.",
        "config-conflict": "Two settings exclude each other: change one of them.",
        "text-malformed": "A text is not valid YAML or JSON: correct it.",
        "declaration-lacks": "The captures do not show a value that an attack needs: declare it "
        "in the app or in bract.yaml.",
        "declaration-wrong": "What is declared contradicts the captures or the model: correct the "
        "declaration.",
    },
    "Files": {
        "file-missing": "A file or folder does not exist: correct the path, or make it.",
        "file-unreadable": "A file cannot be read: its permissions, encoding, kind or size.",
        "file-damaged": "A file is damaged, half-written or altered: restore it.",
        "file-taken": "A file or folder exists already and is not replaced: pass --resume, "
        "--overwrite or --force, or choose another name.",
        "file-unwritable": "A folder cannot be written to, or lacks room or locks: choose another.",
        "file-locked": "Another process works on it: wait for it, or end it.",
        "file-exposed": "Other users may read a secret: restrict the file to its owner.",
        "write-failed": "A file could not be written during the work: free room, then resume.",
        "schema-version": "A file has another schema version: use the version that wrote it.",
    },
    "Data": {
        "input-mismatch": "The data, the model or the audit takes another kind of input.",
        "data-shape": "Tensors or rows have another shape or dtype than declared.",
        "data-value": "A value is outside of the declared range or categories, or not finite.",
        "data-column": "A table lacks a column, or has one that the schema does not list.",
        "data-empty": "There are no or too few examples, rows or results.",
        "data-partition": "The examples cannot be split over the clients as configured.",
    },
    "Models, code and packages": {
        "model-unsuited": "The model cannot be used for this, such as its image size or layers.",
        "model-mismatch": "The parameters or the tokenizer are not those of the declared model.",
        "model-faulty": "A callable makes no model, or one that does not return logits.",
        "code-untrusted": "Another party named code to import: trust it explicitly, or refuse it.",
        "import-failed": "A reference cannot be imported, or is not of the expected type.",
        "plugin-faulty": "A plug-in failed or breaks its contract: correct or uninstall it.",
        "package-missing": "A package is not installed: install the extra that is named.",
        "role-missing": "This installation leaves out a part of bract: use the audit image.",
        "flower-version": "Flower has another version than bract's rules: install the one named.",
        "bract-version": "Another party runs an incompatible bract: upgrade the older one.",
    },
    "Attacks": {
        "attack-unsuited": "The attack does not apply to this model, update or tier: use another.",
        "attack-evidence": "The update lacks what the attack reads: zero, not finite, not sent.",
        "attack-unsolved": "The attack ran and found no solution.",
        "budget-spent": "The budget ended before a result: raise it.",
        "prior-unsuited": "A trained prior is missing, or does not fit the client's data.",
    },
    "Captures and audits": {
        "captures-none": "No capture is there or selected: capture a round, fetch, or select.",
        "capture-lacks": "Captures lack a tensor, a buffer or a round that is needed.",
        "capture-damaged": "A capture is damaged or incomplete: capture or fetch it again.",
        "capture-encrypted": "An upload is encrypted: a gradient attack does not apply.",
        "truth-lacking": "The client's own examples, canaries or records are not there to score.",
        "truth-unusable": "The client's own examples cannot be used to score.",
        "worker-failed": "A worker of an audit or search failed, or returned other results.",
        "nothing-attacked": "Every attack was refused (exit code 4).",
        "gate-crossed": "A gate of --fail-on was crossed, or had nothing to judge (exit code 3).",
        "epsilon-exceeded": "A measured epsilon is above the account's (exit code 5).",
    },
    "Clients and servers": {
        "message-malformed": "A message or reply is not as the protocol has it.",
        "request-refused": "A server asked for what this client's configuration does not allow.",
        "update-refused": "A client's update does not fit the model, the key or the round.",
        "round-mismatch": "Server and client are in different rounds.",
        "identity-refused": "A name, a partition, an identity or a key is another party's.",
        "encryption-required": "This site demands another encryption than the run has.",
        "key-missing": "A client or an audit has no key, or not enough key shares.",
        "key-mismatch": "A key is not the one that the run or the site expects.",
        "decryption-refused": "Ciphertexts or partial decryptions were refused.",
        "state-lost": "A client lost its state of this run: set state-dir.",
        "site-failed": "Work at a site failed; its reason is in the site's own log alone.",
        "policy-refused": "The site's policy does not allow the run.",
        "defense-failed": "A defense could not protect an update, so nothing was sent.",
        "defense-unsuited": "A defense does not fit the model, the inputs or the app.",
        "privacy-budget": "No noise meets the epsilon that is asked for.",
        "clients-missing": "Fewer clients are connected than the run needs.",
    },
    "Deployment and runs": {
        "kit-faulty": "A start-up kit, or a request for one, is incomplete or altered.",
        "certificate-faulty": "A certificate or its key is not valid here: renew or replace it.",
        "app-refused": "The run's app is not the one that this site runs.",
        "superlink-unreachable": "The SuperLink does not answer, or does not take runs here.",
        "gateway-unreachable": "The gateway of a kit does not answer.",
        "connection-lost": "The SuperLink stopped answering; the run may go on there.",
        "ray-unreachable": "No Ray cluster answers at the address.",
        "address-unusable": "An address or a socket cannot be listened on.",
        "clock-wrong": "This machine's clock differs too much from the gateway's.",
        "device-missing": "A device or the resources asked for are not there.",
        "run-unknown": "The SuperLink has no such run.",
        "run-ended": "The run has ended already.",
        "run-failed": "The run, or a round of it, did not finish (exit code 1).",
        "run-stopped": "The run was stopped (exit code 1).",
        "checks-failed": "A check of this machine or of a kit failed.",
        "out-of-memory": "This machine or a device lacks memory: free some, then try again.",
        "system-error": "The operating system or another program failed.",
        "interrupted": "A signal ended the command (exit code 128 and its number).",
    },
}
"""Codes by what they are about, with the meaning of each."""

CODES: dict[str, str] = {code: text for group in GROUPS.values() for code, text in group.items()}
"""The meaning of each code of an error."""

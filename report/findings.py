"""Explain why an attack got no further. Every threshold of these judgements is here."""

from __future__ import annotations

from typing import Literal

from bract.config.audit import Tier
from bract.schema import AuditResult
from bract.schema.audit import Signals, TruthCheck
from bract.schema.report_rows import Finding

MATCHED = 0.99
"""Cosine from which on the images explain the update; below it the search did not converge."""

OFF_SCALE = 1.25
"""Factor, either way, from which on a well matched update has the wrong length."""

REPEATED = 0.999
"""Cosine from which on repeating the client on its true images gives what was captured."""

NEARER = 0.1
"""Another context fits where it leaves less than this share of the declared one's distance."""

BETTER = 0.01
"""Cosine by which the true images match better where the search failed."""

DEAD = 0.8
"""Share of units that pass nothing on, from which on much of the image cannot be seen."""

VANISHED = 1e-6
"""Size of a tensor's gradient, as a share of the largest, below which it is not informative."""

VANISHED_SHARE = 0.25
"""Share of vanished tensors from which on they are reported."""

UNBALANCED = 1e-2
"""Sum of the last bias' gradient, as a share of its sizes: under cross entropy it is 0."""

SURE = 0.05
"""Probability given to wrong classes below which the model has learned these examples."""

SHRUNK = 0.05
"""Length of the gradient, as a share of the client's first, below which training has converged."""

LITTLE = 3.0
"""Decibels above a guess below which the estimated information is worth a word: in the split that
chose it (``experiments/identifiability.py --split choose``) no attack reached an SSIM of 0.5."""

EXCEEDED = 3.4
"""Decibels above the estimate that attacks stayed below on 95 % of the uploads of that split."""

FALLING = 0.05
"""Share by which the loss still fell in the last tenth of the search."""


def findings(audit: AuditResult, *, leaked: int, scored: int) -> list[Finding]:
    """Return the causes that the signals of one attack on one observation suggest, likeliest first.

    Their source is ``attacker`` where the attacker could have measured it, ``scorer`` where it took
    the originals. Empty where nothing was measured, and where every image leaked.
    """
    signals = audit.signals
    if signals is None or audit.refused or (scored and leaked == scored):
        return []
    return [
        *_truth(audit, signals.truth_check),
        *_defense(audit),
        *_context(audit, signals),
        *_too_much(signals, audit.gradient_cosine),
        *_little_information(signals),
        *_quiet(signals),
        *_match(audit, signals=signals, leaked=leaked, scored=scored),
    ]


def _reading(audit: AuditResult) -> Tier:
    return audit.read_as or audit.tier


def _found(code: str, text: str, source: Literal["attacker", "scorer"] = "attacker") -> Finding:
    return Finding(code=code, text=text, source=source)


def _truth(audit: AuditResult, check: TruthCheck | None) -> list[Finding]:
    if check is None or check.cosine is None:
        return []

    def finding(code: str, text: str) -> list[Finding]:
        return [_found(code, text, "scorer")]

    cosine = check.cosine
    if audit.defenses and _reading(audit) == "oblivious":
        return finding(
            "distorted",
            f"The defense turned the update away from the client's own: cosine {cosine:.3f}.",
        )
    if audit.defenses:
        word = "recovered" if cosine >= MATCHED else "did not recover"
        return finding(
            "recovered" if cosine >= MATCHED else "not-recovered",
            f"Knowing the defense {word} the client's own update: cosine {cosine:.3f}.",
        )
    if not check.exact:
        return []
    tried = {name: value for name, value in check.tried.items() if value is not None}
    fitting = max(tried, key=lambda name: tried[name], default=None)
    if fitting is not None and 1.0 - tried[fitting] < NEARER * (1.0 - cosine):
        return finding(
            "context-wrong",
            f"The true images do not give this update as declared (cosine {cosine:.6f}), but do "
            f"with {fitting} (cosine {tried[fitting]:.6f}): correct the declaration.",
        )
    if cosine >= REPEATED:
        if check.scale is not None and _off(check.scale):
            fits = next((f" ({name} fits)" for name in tried if name.startswith("lr: ")), "")
            return finding(
                "context-scale",
                f"The update is {check.scale:.3g} times what the true images give: the declared "
                f"learning rate{fits} or number of steps is not the client's.",
            )
        return finding(
            "context-right",
            f"The true images give this update (cosine {cosine:.6f}): what the protocol declares "
            "is right.",
        )
    if cosine <= -REPEATED:
        return finding(
            "context-sign",
            "The true images give this update with the opposite sign: it was recorded as "
            "local minus global.",
        )
    return finding(
        "context-wrong",
        f"The true images do not give this update (cosine {cosine:.3f}): the model, loss, "
        "normalisation, mode of batch normalisation or learning rate declared is not the client's, "
        "or what was kept is not what it trained on (images before their augmentation).",
    )


def _defense(audit: AuditResult) -> list[Finding]:
    if not audit.defenses or _reading(audit) != "oblivious":
        return []
    return [
        _found(
            "defense-ignored",
            "A defense is declared and this attacker ignores it: read the adaptive tier.",
        )
    ]


def _context(audit: AuditResult, signals: Signals) -> list[Finding]:
    found = []
    if audit.defenses and _reading(audit) == "oblivious":
        return []
    cosine, scale = audit.gradient_cosine, signals.scale
    if scale is not None and cosine is not None and cosine >= MATCHED and _off(scale):
        found.append(
            _found(
                "scale",
                f"The update is {scale:.3g} times as long as the images would have made it: a "
                "wrong learning rate or number of steps, or clipping.",
            )
        )
    searched = signals.images.searched
    if searched == 1 and signals.images.declared == 1 and signals.negative not in (None, 1):
        found.append(
            _found(
                "sign",
                f"{signals.negative} classes of the last bias have a negative gradient, where one "
                "example has exactly one: the sign, the loss or the number of examples is wrong.",
            )
        )
    if signals.unbalanced is not None and signals.unbalanced > UNBALANCED:
        found.append(
            _found(
                "unbalanced",
                "The last bias' gradient does not sum to 0, as it must under cross entropy "
                f"(off by {signals.unbalanced:.1%}): another loss, weight decay, or noise.",
            )
        )
    return found


def _too_much(signals: Signals, cosine: float | None) -> list[Finding]:
    found = []
    images, steps = signals.images, signals.steps
    if images.declared and images.searched and images.declared > images.searched:
        found.append(
            _found(
                "many-images",
                f"The update mixes {images.declared} images and the attack looked for "
                f"{images.searched}: raise audit.max_images.",
            )
        )
    blurred = not _search_failed(signals, cosine)
    if steps.declared and steps.simulated and steps.declared > steps.simulated and blurred:
        found.append(
            _found(
                "many-steps",
                f"The client took {steps.declared} local steps and the attack matched their mean "
                "as one gradient, which blurs them.",
            )
        )
    if signals.optimizer is not None and blurred:
        found.append(
            _found(
                "optimizer",
                f"The client trained with {signals.optimizer}, and its optimizer is not simulated: "
                "the attack matched the update as if plain SGD had made it.",
            )
        )
    return found


def _search_failed(signals: Signals, cosine: float | None) -> bool:
    """Return whether the true images are known to match better: then steps are not the cause."""
    at_truth = signals.truth_match
    return cosine is not None and at_truth is not None and at_truth > cosine + BETTER


def _little_information(signals: Signals) -> list[Finding]:
    found = signals.estimate
    if found is None or found.psnr >= found.prior_psnr + LITTLE:
        return []
    return [
        _found(
            "little-information",
            "By an estimate, which is no bound, the update's information on its images is worth "
            f"{found.psnr:.1f} dB, a guess that sees no update {found.prior_psnr:.1f} dB. Attacks "
            f"on noisy updates exceeded it, up to {EXCEEDED:g} dB in 19 of 20 cases: this does not "
            "show that the update is safe.",
        )
    ]


def _quiet(signals: Signals) -> list[Finding]:
    found = []
    if signals.dead is not None and signals.dead >= DEAD:
        found.append(
            _found(
                "dead",
                f"{signals.dead:.0%} of the units are dead or saturated at these parameters: they "
                "pass nothing of the image on.",
            )
        )
    sizes = [layer.size for layer in signals.layers.values() if layer.size is not None]
    vanished = sum(size < VANISHED for size in sizes)
    if sizes and vanished >= VANISHED_SHARE * len(sizes):
        found.append(
            _found(
                "vanished",
                f"{vanished} of {len(sizes)} tensors have next to no gradient: layers before them "
                "carry nothing about the image.",
            )
        )
    if signals.unsure is not None and signals.unsure < SURE:
        found.append(
            _found(
                "learned",
                f"The model gives wrong classes {signals.unsure:.1%} on these examples: it has "
                "learned them, and a small loss leaves a small gradient.",
            )
        )
    elif signals.norm_ratio is not None and signals.norm_ratio < SHRUNK:
        found.append(
            _found(
                "converged",
                f"The gradient is {signals.norm_ratio:.1%} as long as this client's first: "
                "training has converged.",
            )
        )
    return found


def _match(audit: AuditResult, *, signals: Signals, leaked: int, scored: int) -> list[Finding]:
    cosine = audit.gradient_cosine
    if cosine is None:
        return []
    if cosine < MATCHED:
        return [_search(cosine, signals), *_against_truth(cosine, signals.truth_match)]
    if not scored or leaked:
        return []
    return [
        _found(
            "ambiguous",
            f"The images explain the update (cosine {cosine:.3f}) and are wrong: many images "
            "explain it, and only a better prior tells them apart.",
        )
    ]


def _against_truth(cosine: float, at_truth: float | None) -> list[Finding]:
    """Say whether the search failed or what it simulates: the true images tell the two apart."""
    if at_truth is None:
        return []
    if _search_failed(Signals(truth_match=at_truth), cosine):
        return [
            _found(
                "search-failed",
                f"The true images match the update better than the ones found (cosine "
                f"{at_truth:.3f} against {cosine:.3f}): the search failed, whatever else is named "
                "here.",
                "scorer",
            )
        ]
    return [
        _found(
            "simulation",
            f"The true images match the update no better than the ones found (cosine "
            f"{at_truth:.3f} against {cosine:.3f}): not the search failed, but what the attack "
            "simulates is not what the client did, or images do not determine the update.",
            "scorer",
        )
    ]


def _search(cosine: float, signals: Signals) -> Finding:
    if signals.falling is not None and signals.falling > FALLING:
        return _found(
            "unfinished",
            f"The search did not converge (cosine {cosine:.3f}): its loss was still falling, by "
            f"{signals.falling:.0%} in the last tenth: give it more iterations.",
        )
    return _found(
        "stuck",
        f"The search did not converge (cosine {cosine:.3f}) and its loss had settled: more starts "
        "or another attack may get further.",
    )


def _off(scale: float) -> bool:
    return scale > OFF_SCALE or scale < 1.0 / OFF_SCALE

"""The words of the report, for readers who do not work with them."""

from collections.abc import Collection

from bract.schema.inputs import ImageOutline

GLOSSARY: tuple[tuple[str, str, str], ...] = (
    (
        "reconstruction",
        "Reconstruction",
        "A picture computed from what a client uploaded, without ever seeing the client's data. "
        "The attacker searches for an image that would have caused the same upload.",
    ),
    (
        "ssim",
        "SSIM",
        "Structural similarity: do shapes and edges sit in the same places? 1 is the same picture, "
        "about 0 is unrelated. Above roughly 0.5 people usually see the likeness.",
    ),
    (
        "psnr",
        "PSNR",
        "Pixel accuracy in decibels; higher is closer. Around 10 dB is a blur or noise, from about "
        "20 dB most details are there; 100 dB is the cap, for a copy whose error is too small to "
        "see. It can disagree with what the eye sees, so look at the "
        "pictures too.",
    ),
    (
        "mse",
        "MSE",
        "The mean squared difference between pixel values in 0 to 1. PSNR is the same number on a "
        "logarithmic scale.",
    ),
    (
        "lpips",
        "LPIPS",
        "A distance between two pictures as a trained image network (AlexNet or VGG) perceives "
        "them. Here lower is closer. ST is its shift-tolerant variant (AlexNet), on another scale.",
    ),
    (
        "labels",
        "Label accuracy",
        "The share of images whose class the attacker named correctly. A class alone can be "
        "sensitive, for example a diagnosis. Where targets are numbers: how far off each was on "
        "average, and how far off a guess from what other clients kept would be.",
    ),
    (
        "identified",
        "Identified (top 1, top 5)",
        "Put among many candidate images, the reconstruction is nearest to its own original "
        "(top 1), or has it among the five nearest (top 5).",
    ),
    (
        "baseline",
        "Baseline without the gradient",
        "The score of a guess without the upload: the average image of the class, a random "
        "image of the data set, or what the attack's assumptions about images give by themselves; "
        "where the attacker had a generator trained on public images, also one of its samples, and "
        "of many samples the one nearest to the original. "
        "It had as many images as the attack and the same choice of originals. A reconstruction "
        "that is no better shows no leak.",
    ),
    (
        "interval",
        "Interval",
        "Where the mean would plausibly lie for other clients of the same kind (95 %, Student's t "
        "over clients: images and rounds of one client are not independent). With few clients it "
        "is wide, and with one there is none. Where scores are very uneven, some exact and most "
        "poor, it covers less than 95 %.",
    ),
    (
        "blind",
        "Blind and oracle",
        "Blind: the attacker chose the result by their own loss, as a real one must. Oracle: "
        "chosen with the original in view; shown for comparison as the most that was within reach. "
        "Where several attacks competed, the winner too was chosen blind, by how well its images "
        "explain the upload.",
    ),
    (
        "tier",
        "Tier",
        "What the attacker knows. Oblivious: nothing about a defense. Adaptive: the defense and "
        "its settings, not the client's secrets. Surrogate: public images like the client's as "
        "well. Colluding: one client's keys as well.",
    ),
    (
        "nrmse",
        "Error",
        "The root of the mean squared difference between the reconstruction and its original, as a "
        "share of the declared range of values; 0 is an exact copy.",
    ),
    (
        "cosine",
        "Gradient match",
        "The cosine between the upload and what the reconstruction would have caused; 1 is a "
        "perfect match. A good match with a wrong picture means the upload was ambiguous; a poor "
        "match means the search did not converge.",
    ),
)

_OF_SOME = frozenset({"ssim", "psnr", "mse", "lpips", "nrmse"})
"""Entries about scores that some inputs alone have."""


def glossary(
    noun: str, columns: Collection[str] = ImageOutline.columns
) -> list[tuple[str, str, str]]:
    """Return the entries for a page about examples of one name, as key, word and meaning.

    Parameters
    ----------
    columns
        Scores that the page has columns for.
    """
    entries = [entry for entry in GLOSSARY if entry[0] not in _OF_SOME or entry[0] in columns]
    if noun == "image":
        return entries
    article = "an" if noun[0] in "aeiou" else "a"
    return [(key, word, _about(meaning, noun, article)) for key, word, meaning in entries]


def _about(meaning: str, noun: str, article: str) -> str:
    for old, new in (
        ("A picture", f"{article.capitalize()} {noun}"),
        ("an image", f"{article} {noun}"),
        ("image", noun),
        ("picture", noun),
    ):
        meaning = meaning.replace(old, new)
    return meaning

"""Tables of the report: what left the sites, and what was claimed of its protection."""

from __future__ import annotations

from typing import Literal

from bract.schema.record import Number, Public, Record

Standing = Literal["impossible", "contradicted", "agrees", "not measured"]
"""How a claim stands: it cannot be, an upload shows otherwise, or shows the same, or nothing."""


class LeftRow(Record):
    """Things of one name that clients sent in answer to one type of message.

    Attributes
    ----------
    message
        Type of the message that was answered, such as ``train`` or ``query``.
    record, name
        The record's key, and the key in it; numbers in a name are ``#``.
    kind
        As of `LeftThing`; ``model``: the model's arrays together.
    amount
        In words: how many numbers, characters or bytes one reply holds.
    clients, replies
        From how many clients it came, in how many replies.
    rounds
        In which rounds; empty where its messages name none.
    reasons, rules
        Why it is flagged, and by which rules.
    flagged
        Clients of which something is flagged.
    labels
        Whether it holds or counts labels.
    policy
        In words, what the site's policy seems to have done; empty where nothing shows.
    """

    message: Public[str]
    record: Public[str]
    name: Public[str]
    kind: Public[str]
    amount: Public[str]
    clients: Public[int]
    replies: Public[int]
    rounds: Public[str] = ""
    reasons: Public[list[str]] = []
    rules: Public[list[str]] = []
    flagged: Public[list[str]] = []
    labels: Public[bool] = False
    policy: Public[str] = ""


class SmallestCount(Record):
    """The smallest count of examples or people that left a site.

    Attributes
    ----------
    client, name
        Whose it is (several names where its value is not known), and what it is called in the
        messages.
    value
        The count, at least 1; None where it is flagged as small and was not written down.
    """

    client: Public[str]
    name: Public[str]
    value: Public[int | None] = None


class LeftFacts(Record):
    """All that left the sites.

    Attributes
    ----------
    recorded
        ``all``: every reply of every type was listed as it came; ``training``: the captures name
        what came with training alone, which an earlier version wrote; ``nothing``: neither.
    rows
        Flagged ones first.
    replies, clients
        How many replies were listed, from how many clients.
    unlisted
        Things beyond the bound of one reply's list.
    smallest
        The smallest count that left a site; None where no count is known to have.
    """

    recorded: Public[Literal["all", "training", "nothing"]] = "nothing"
    rows: Public[list[LeftRow]] = []
    replies: Public[int] = 0
    clients: Public[int] = 0
    unlisted: Public[int] = 0
    smallest: Public[SmallestCount | None] = None


class ClaimRow(Record):
    """One claim of a protection, and what was measured of it.

    Attributes
    ----------
    source
        Who claims it.
    claim
        The claim in words, with its numbers.
    unit
        Whose change it covers, and over how long: an example or a client, a round or a run.
    measured
        What the uploads show of it, in words.
    epsilon, delta, noise
        The claimed numbers; ``noise`` is a standard deviation of a coordinate of the update.
    found_noise, found_epsilon
        The measured ones: the least epsilon that canaries show.
    standing, sentence
        How it stands, and one plain line.
    """

    source: Public[str]
    claim: Public[str]
    unit: Public[str]
    measured: Public[str]
    epsilon: Public[Number] = None
    delta: Public[Number] = None
    noise: Public[Number] = None
    found_noise: Public[Number] = None
    found_epsilon: Public[Number] = None
    standing: Public[Standing] = "not measured"
    sentence: Public[str] = ""

"""The ``encryption`` section of a federation's configuration, and whether its sums fit."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from bract.crypto.x25519 import key_problem
from bract.masks.roster import lost_odds, usual_neighbours, usual_threshold

_PAILLIER_ONLY = ("key_bits", "randomness", "degree", "keys", "powers", "key_id")
_MASKS_ONLY = ("neighbours", "consistency")


def _usable(identity: str) -> str:
    problem = key_problem(bytes.fromhex(identity))
    if problem is not None:
        raise ValueError(
            f"{identity} is no public identity ({problem}); take what `bract keygen --identity` "
            "prints"
        )
    return identity


_Identity = Annotated[str, Field(pattern="^[0-9a-f]{64}$"), AfterValidator(_usable)]


class EncryptionConfig(BaseModel):
    """Encryption of updates, see docs/guide/encryption.md; ``encryption: paillier`` is enough.

    ``clip`` bounds an update's values, ``buffer_clip`` those of a buffer's change; larger ones are
    cut and counted. ``max_weight_sum`` is the largest sum of the integer weights that represent
    the clients' shares. ``keys``: ``provisioned`` key files, or ``in-band`` through the server,
    sealed. ``threshold``: how many clients must decrypt together; null shares one private key.
    ``powers``: who raises ciphertexts to ``n`` for a threshold's decryption: the ``clients``, whose
    uploads double, or the ``server``, at some 100 microseconds a value (docs/guide/encryption.md).
    ``key_id``: the run's key, where the operator of the server knows it. ``identities``: the public
    identities of the clients, from ``bract keygen --identity``, in the order of their partitions;
    others are not admitted.

    ``masks`` sums masked updates in place of ciphertexts, and the server learns the sum. Its
    ``threshold`` is how many holders of shares rebuild a seed, ``neighbours`` with how many others
    a client shares masks (null: all up to 50 clients, then five times the binary logarithm), and
    ``consistency`` whether clients compare who answered before they reveal a share.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    scheme: Literal["none", "paillier", "masks"] = "none"
    key_bits: Literal[2048, 3072] = 2048
    randomness: Literal["djn", "standard"] = "djn"
    bits: Annotated[int, Field(ge=2, le=32)] = 16
    clip: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 1.0
    buffer_clip: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 4096.0
    max_weight_sum: Annotated[int, Field(ge=1, le=2**20)] = 31
    degree: Literal[1, 2] = 1
    keys: Literal["provisioned", "in-band"] = "provisioned"
    threshold: Annotated[int, Field(ge=2)] | None = None
    powers: Literal["clients", "server"] = "clients"
    key_id: Annotated[str, Field(pattern="^[0-9a-f]{32}$")] | None = None
    identities: tuple[_Identity, ...] = ()
    neighbours: Annotated[int, Field(ge=2, multiple_of=2)] | None = None
    consistency: bool = True

    @property
    def enabled(self) -> bool:
        """Return whether no single update reaches the server in the clear."""
        return self.scheme != "none"

    @property
    def uses_paillier(self) -> bool:
        """Return whether the clients keep the model, and the server adds ciphertexts."""
        return self.scheme == "paillier"

    @property
    def uses_masks(self) -> bool:
        """Return whether the server adds masked updates, and learns their sum."""
        return self.scheme == "masks"

    @property
    def uses_key_files(self) -> bool:
        """Return whether each client brings a file of a Paillier key or share."""
        return self.uses_paillier and self.keys == "provisioned"

    @property
    def uses_identities(self) -> bool:
        """Return whether clients seal boxes for each other through the server: keys, help or
        shares.
        """
        sealed = self.keys == "in-band" or self.threshold is not None
        return self.uses_masks or (self.uses_paillier and sealed)

    def mask_plan(self, clients: int) -> tuple[int, int]:
        """Return with how many neighbours so many clients share masks, and the threshold."""
        neighbours = min(self.neighbours or usual_neighbours(clients), max(clients - 1, 1))
        usual = usual_threshold(clients, neighbours, consistency=self.consistency)
        return neighbours, usual if self.threshold is None else self.threshold

    @property
    def sends_powers(self) -> bool:
        """Return whether a client sends the ``n``-th powers of its ciphertexts along.

        Of ``standard`` randomness they cost a client what they cost the server.
        """
        threshold = self.threshold is not None
        return threshold and self.randomness == "djn" and self.powers == "clients"

    def problem(self, clients: int, p_hat: float | None) -> str | None:
        """Return the numbers with which this cannot work, None if it can.

        Parameters
        ----------
        p_hat
            FedBoosting's share of a client in its own fused model; None for other strategies.
        """
        if self.enabled:
            others = _MASKS_ONLY if self.uses_paillier else _PAILLIER_ONLY
            fields = type(self).model_fields
            foreign = [n for n in others if getattr(self, n) != fields[n].default]
            if foreign:
                return f"encryption.{foreign[0]} has no use with {self.scheme}; remove it"
        if not self.enabled:
            return None
        if self.uses_masks:
            problem = self._masks_problem(clients, fuses=p_hat is not None)
            if problem is not None:
                return problem
        if clients > self.max_weight_sum:
            return (
                f"encryption.max_weight_sum is {self.max_weight_sum}, but {clients} clients of "
                f"integer weights sum to at least {clients}; raise it to {clients} or more"
            )
        if self.threshold is not None and self.threshold > clients:
            return (
                f"encryption.threshold is {self.threshold}, but there are {clients} clients; "
                "lower it"
            )
        if self.identities and len(set(self.identities)) != clients:
            return (
                f"encryption.identities lists {len(set(self.identities))} clients, but there are "
                f"{clients}; list each one's, or none"
            )
        if p_hat is not None and clients > 1 and p_hat < 1.0:
            # Every other client has at least weight 1, so the own share ends at 1 - others / sum.
            reached = 1.0 - (clients - 1) / self.max_weight_sum
            if reached < p_hat - 0.05:
                needed = round((clients - 1) / (1.0 - p_hat))
                return (
                    f"encryption.max_weight_sum is {self.max_weight_sum}: the integer weights of "
                    f"{clients} fused clients then give the own one {reached:.2f} at most, "
                    f"strategy.p_hat is {p_hat}; raise it to {needed}"
                )
        return None

    def quorum_problem(self, count: int, asked: int) -> str | None:
        """Return why ``count`` answers of ``asked`` clients cannot close a round, None if they can.

        Parameters
        ----------
        count, asked
            Clients, ``1 <= count <= asked``.
        """
        if self.uses_paillier and self.threshold is not None and count < self.threshold:
            return (
                f"encryption.threshold needs {self.threshold} clients to decrypt, and late ones "
                f"cannot help; raise the quorum to {self.threshold} or more"
            )
        if not self.uses_masks:
            return None
        neighbours, threshold = self.mask_plan(asked)
        least = max(3, threshold)
        if count < least:
            return (
                f"a masked sum of {asked} needs {threshold} clients to unmask it and 3 to hide "
                f"each of them; raise the quorum to {least} or more"
            )
        odds = lost_odds(asked, neighbours, threshold, asked - count)
        if odds > 0.01:
            return (
                f"without {asked - count} clients a masked sum is lost with a probability of up to "
                f"{odds:.2g} ({neighbours} neighbours, a threshold of {threshold}); raise the "
                "quorum or encryption.neighbours"
            )
        return None

    def cautions(self, clients: int, strategy: str) -> list[str]:
        """Return warnings on what encryption cannot hide in this run."""
        if not self.enabled:
            return []
        if self.uses_masks:
            return self._masks_cautions(clients)
        found = []
        if clients < 3:
            found.append(
                f"with {clients} clients encryption hides no update from the clients: each "
                "subtracts its own from the mean and holds the other's; take three or more"
            )
        if strategy == "fedboosting":
            found.append(
                "fedboosting shows every client the decrypted fused models, from which it can "
                "solve for the others' updates: encryption hides them from the server only"
            )
        if self.keys == "in-band" and not self.identities:
            found.append(
                "in-band keys without encryption.identities go to the first clients that connect: "
                "turn SuperNode authentication on, list identities, or provision key files"
            )
        if self.threshold is not None and not self.identities:
            found.append(
                "a threshold without encryption.identities and the clients' peers holds against a "
                "server that follows the protocol: one that names a key of its own among the "
                "clients has single updates decrypted for it"
            )
        if self.keys == "in-band" and self.threshold is not None:
            found.append(
                "the first client deals the key shares and sees the whole key while it does; "
                "where no client may, run `bract keygen --threshold` and provision the files"
            )
        return found

    def _masks_problem(self, clients: int, *, fuses: bool) -> str | None:
        if fuses:
            return (
                "strategy fedboosting scores models fused of single clients' updates, which masks "
                "hide from the server that would fuse them; take encryption: paillier, or fedavg"
            )
        if clients < 3:
            return (
                f"encryption: masks needs 3 clients or more, there are {clients}: of a sum of two "
                "each knows the other's update"
            )
        neighbours, threshold = self.mask_plan(clients)
        if threshold > neighbours + 1:
            return (
                f"encryption.threshold is {threshold}, but {neighbours + 1} clients hold shares of "
                f"a seed ({clients} clients, {neighbours} neighbours); lower it"
            )
        if self.consistency and 2 * threshold <= neighbours + 1:
            return (
                f"encryption.threshold is {threshold} of {neighbours + 1} holders: a server could "
                "name other survivors to one half than to the other, and find helpers for both; "
                f"raise it to {(neighbours + 1) // 2 + 1}, or set encryption.consistency: false "
                "where the server is taken to follow the protocol"
            )
        return None

    def _masks_cautions(self, clients: int) -> list[str]:
        found = []
        if not self.identities:
            found.append(
                "encryption: masks without encryption.identities and the clients' peers holds "
                "against a server that follows the protocol: one that puts its own keys in the "
                "clients' places unmasks every update"
            )
        neighbours, threshold = self.mask_plan(clients)
        odds = lost_odds(clients, neighbours, threshold, clients // 3)
        if odds > 0.01:
            found.append(
                f"where a third of {clients} clients drop out, a sum is lost with a probability of "
                f"up to {odds:.2g}: {neighbours} neighbours and a threshold of {threshold}; raise "
                "encryption.neighbours, or lower encryption.threshold"
            )
        return found

"""The ``encryption`` section of a federation's configuration, and whether its sums fit."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class EncryptionConfig(BaseModel):
    """How updates are encrypted, see docs/encryption.md; ``encryption: paillier`` is enough.

    ``clip`` bounds an update's values, ``buffer_clip`` those of a buffer's change; larger ones are
    cut and counted. ``max_weight_sum`` is the largest sum of the integer weights that represent
    the clients' shares. ``keys``: ``provisioned`` key files, or ``in-band`` through the server,
    sealed. ``threshold``: how many clients must decrypt together; null shares one private key.
    ``powers``: who raises ciphertexts to ``n`` for a threshold's decryption: the ``clients``, whose
    uploads double, or the ``server``, at some 100 microseconds a value (docs/encryption.md).
    ``key_id``: the run's key, where the operator of the server knows it. ``identities``: the public
    identities of the clients, from ``bract keygen --identity``; others are not admitted.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    scheme: Literal["none", "paillier"] = "none"
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
    identities: tuple[Annotated[str, Field(pattern="^[0-9a-f]{64}$")], ...] = ()

    @property
    def enabled(self) -> bool:
        """Whether updates are encrypted."""
        return self.scheme != "none"

    @property
    def sends_powers(self) -> bool:
        """Whether a client sends the ``n``-th powers of its ciphertexts along.

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
        if not self.enabled:
            return None
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

    def cautions(self, clients: int, strategy: str) -> list[str]:
        """Return warnings on what encryption cannot hide in this run."""
        if not self.enabled:
            return []
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
        if self.keys == "in-band" and self.threshold is not None:
            found.append(
                "the first client deals the key shares and sees the whole key while it does; "
                "where no client may, run `bract keygen --threshold` and provision the files"
            )
        return found

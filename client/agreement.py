"""Check a message to bract's own ClientApp against the site's limits."""

from __future__ import annotations

from dataclasses import dataclass

from flwr.app import ConfigRecord, Context, Message

from bract.client.answered import Request
from bract.client.answers import Answers
from bract.client.defending import defenses_of
from bract.client.defenses import DefenseChain
from bract.client.encrypted.pins import Pins
from bract.client.gate import Gate
from bract.client.initial import check_initial
from bract.client.policy import PolicyError, SitePolicy, load_policy
from bract.client.policy_checks import check_run
from bract.client.replies import digest
from bract.client.site import Site
from bract.config import FederationConfig
from bract.config.agreed import FREE_ON_RESUME, config_digest
from bract.config.config import config_of_run
from bract.data.views import DataSpec
from bract.errors import BractError, shown
from bract.installed.versions import check_release
from bract.protocol.arrays import from_arrays
from bract.protocol.keyexchange import FINAL_TYPE
from bract.protocol.records import ARRAYS, ROUND_KEY, VERSION_KEY, instructions_of

_HOW_TO_TRUST = (
    "list it under models in the site's own file: site.yaml, the policy, or the node config"
)


@dataclass(frozen=True)
class Agreed:
    """What a run asks for, with the site and the policy that allow it."""

    site: Site
    config: FederationConfig
    instructions: ConfigRecord
    policy: SitePolicy
    chain: DefenseChain

    def answers(self, context: Context) -> Answers:
        """Return the site's record of its answers."""
        return Answers(
            context.state, directory=self.site.state_dir, site=self.site.name, policy=self.policy
        )


def agree(gate: Gate, message: Message, context: Context) -> Agreed:
    """Check the requests of a message against the site's limits.

    Raises
    ------
    BractError
        If the versions differ, the configuration is wrong or names code that this site does not
        vouch for, or the site's policy refuses the run.
    """
    with gate.own_settings():
        site = Site.from_node_config(context.node_config)
        policy = load_policy(site.policy)
        pins = Pins.from_node_config(context.node_config)
    gate.client = site.name
    instructions = instructions_of(message.content)
    check_release(str(instructions.get(VERSION_KEY)))
    config = config_of_run(context.run_config).trusting(
        {*site.models, *(policy.models or ())}, how=_HOW_TO_TRUST
    )
    pins.check_run(config, site.paillier_key)
    chain = defenses_of(config)
    check_run(policy, site, config, chain)
    return Agreed(site, config, instructions, policy, chain)


def request_of(agreed: Agreed, message: Message, context: Context) -> Request:
    """Return a message as the record of what was answered knows it."""
    server_round = agreed.instructions.get(ROUND_KEY)
    if not isinstance(server_round, int) or isinstance(server_round, bool):
        raise BractError(
            f"the message's {ROUND_KEY} is {shown(server_round)}, expected a whole number; is its "
            "server bract's own?",
            code="message-malformed",
        )
    kind = message.metadata.message_type
    return Request(
        kind=kind,
        server_round=server_round,
        digest=digest(message.content),
        run=context.run_id,
        federation=agreed.config.name,
        config=config_digest(agreed.config),
        kept=config_digest(agreed.config, without=FREE_ON_RESUME),
        # The final model is delivered in a round of its own, after the last one.
        last_round=agreed.config.rounds + (kind == FINAL_TYPE),
    )


def check_start(
    config: FederationConfig, spec: DataSpec, message: Message, request: Request, answers: Answers
) -> None:
    """Hold the model that a run starts from against the one that its seed gives.

    Raises
    ------
    PolicyError
        If it is another one, or the run begins in a later round: not one with another
        configuration than that of a run whose start this site compared.
    """
    sent = message.content.array_records.get(ARRAYS)
    # An encrypted run sends its first model to a client without one, in any round; a plain one
    # sends the model of the round.
    starts = config.encryption.uses_paillier or (request.server_round or 0) <= 1
    if starts and sent is not None:
        check_initial(config, spec, from_arrays(sent))
        if not answers.knows_start(request):
            answers.note_start(request)
    elif not answers.knows_start(request):
        raise PolicyError(
            "this site's policy sets initial_model: from-seed, but the run asks for round "
            f"{request.server_round} first; let this site take part from round 1 "
            "(strategy.fraction: 1)"
        )

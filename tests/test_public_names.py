"""What is public is decided here: a room exports these names, and no others."""

import ast
import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest
from rooms import ROOMS, ROOT

import bract

PUBLIC = {
    "": """Audit DefenseMod HonestButCurious Observation ObservationStore keep listen reconstruct
        witness write_report""",
    "attacks": """ADAPTIVE ATTACKS Attack Budget Case Cosine Determined Engine Entered Errors
        Evidence FirstOrder FirstOrderSettings GRNN IG Inverse InvertingAttack Known Objective
        Outcome PixelSearch Problem Progress PublicPrior Reading ReadingBudget Reconstruction
        Refusal Run attack declared hard_labels has_attacker load_prior minimise noise reconstruct
        reconstruct_over_rounds""",
    "audit": "",
    "captures": "",
    "certificates": "",
    "cli": "",
    "crypto": "SecretStream key_problem",
    "errors": "",
    "installed": """App GROUPS PROTOCOL PluginError RESULT_CODE TrustedReference app_in blaming
        check_release code_digest elsewhere import_reference is_of_bract naming_their_line
        own_word package_of package_versions release vouched""",
    "client": """DefenseMod EncryptedClientApp Gate Guard IndependentError NO_MEMORY REFUSED keep
        witness""",
    "config": """DataConfig FederationConfig SignalSchema StrategySection build_config dump_config
        load_config""",
    "data": "DATASETS Dataset Source",
    "defenses": """AdaDefense DEFENSES Defense DefenseError FedKL Guardian Noise PerExample
        ProtectContext Stage configured_model keylock noise_entry read_settings title""",
    "kits": "",
    "runtime": "",
    "disk": """GROUP LockedError LockedRecord Memory UMASK alone append_line check_file holder lock
        locked make_private_folder open_named open_private parse_record read_named read_private
        readable_size reading refuse_devices replacing tensors_as_bytes tensors_on_disk utf8
        warn_if_open write_bytes write_failed write_pieces write_tensors write_text""",
    "parse": """MOST_CHARACTERS dump_json in_64_bits json_ready parse_json parse_mapping
        parse_yaml""",
    "process": """Peak UNSENT log_progress log_to_file log_to_stderr merge return_freed_memory
        rotate span watched_memory""",
    "inputs": "INPUTS Input PrimaryScore References Truth input_of is_redacted kept_examples",
    "models": "MODELS activation_layer create_model",
    "masks": "",
    "pool": "Here Lost Note Pool Processes Ray cores",
    "paillier": """Layout PaillierError PrivateKey PublicKey combine deal decrypt encrypt
        generate_keypair partial_decrypt prepare weighted_sum""",
    "protocol": "",
    "report": "QuestionOutcome RunOutcome run_outcome write_report",
    "schema": """Answer AppDescription AuditResult ClientDeclaration LeftReply LeftThing Number
        ObservationFile ProtectionClaim Public Record Report VersionedRecord Work read_work""",
    "scores": "LeakRule ScoredImages Scorer match mse psnr score_images scorer_of ssim",
    "updates": "",
    "server": "DisclosureRule HonestButCurious listen",
    "strategies": "Encrypted FedAvg FedBoosting FedProx RoundOutcome STRATEGIES",
}


@pytest.mark.parametrize("room", PUBLIC)
def test_a_room_exports_these_names_with_their_docstrings(room: str) -> None:
    module = importlib.import_module(f"bract.{room}".rstrip("."))
    assert sorted(getattr(module, "__all__", [])) == sorted(PUBLIC[room].split())
    for name in PUBLIC[room].split():
        found = getattr(module, name)
        assert found.__doc__ or not (inspect.isclass(found) or inspect.isfunction(found)), name


def test_every_room_is_listed() -> None:
    assert {m.name for m in pkgutil.iter_modules(bract.__path__) if m.ispkg} <= set(PUBLIC)


@pytest.mark.parametrize("stub", [p for r in ROOMS for p in (ROOT / r).rglob("*.pyi")], ids=str)
def test_a_stub_and_its_package_have_the_same_names(stub: Path) -> None:
    """Type checkers read the stub alone, and at run time `bract.lazy` does."""
    room = ".".join(stub.relative_to(ROOT).parts[:-1])
    module = importlib.import_module(room if room.startswith("bract") else f"bract.{room}")
    typed = [a.name for n in ast.parse(stub.read_text()).body for a in getattr(n, "names", ())]
    assert sorted(module.__all__) == sorted(typed)
    assert set(typed) <= set(dir(module))

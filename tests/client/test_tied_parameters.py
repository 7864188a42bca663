"""A parameter with two names leaves a client as one, defended."""

from pathlib import Path

import pytest
import torch
from encrypted_runs import small, small_grid, tied, train
from safetensors.torch import load_file

from bract import ObservationStore
from bract.updates.update import buffers_of

FIRST, SECOND = "1.weight", "3.weight"
NOISE = [{"name": "noise", "std": 0.5}]


def test_a_tied_parameter_is_no_buffer() -> None:
    assert not buffers_of(tied())


@pytest.mark.parametrize("algorithm", ["fedavg", "fedsgd"])
def test_a_tied_parameter_leaves_defended_under_both_names(tmp_path: Path, algorithm: str) -> None:
    config = small(
        model={"name": "encrypted_runs:tied"},
        defenses=NOISE,
        training={"lr": 0.1, "algorithm": algorithm, "batch_size": 10},
        strategy={"server_lr": 0.5},
        rounds=2,
    )
    run = train(tmp_path, config, small_grid(tmp_path, config))
    seen = list(ObservationStore(run.captures))
    assert len(seen) == 6
    for one in seen:
        step = one.buffers[SECOND] - one.returned_buffers[SECOND]
        torch.testing.assert_close(step, 0.5 * one.update[FIRST], atol=1e-6, rtol=1e-5)
    final = load_file(run.models / "final.safetensors")
    torch.testing.assert_close(final[FIRST], final[SECOND], atol=1e-6, rtol=1e-5)


def test_a_masked_sum_holds_the_noise_of_a_tied_parameter_under_both_names(tmp_path: Path) -> None:
    """The server learns the mean of the second name, too: it may not be what defenses saw."""
    config = small(
        model={"name": "encrypted_runs:tied"},
        defenses=NOISE,
        encryption={"scheme": "masks", "clip": 4.0},
    )
    run = train(tmp_path, config, small_grid(tmp_path, config))
    final = load_file(run.models / "final.safetensors")
    torch.testing.assert_close(final[FIRST], final[SECOND], atol=1e-3, rtol=0)
    assert float(final[FIRST].std()) > 0.2

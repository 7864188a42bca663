import torch

from bract.server.scoring import Truth, score_images


def noise(count, seed):
    return torch.rand(count, 1, 16, 16, generator=torch.Generator().manual_seed(seed))


def test_pairs_stand_beside_each_other_after_a_three_cycle():
    originals = noise(3, 0)
    truth = Truth(originals, torch.tensor([5, 6, 7]))
    scored = score_images(originals[[1, 2, 0]], torch.tensor([6, 7, 5]), truth, noise(9, 1))
    assert [row["mse"] for row in scored.rows] == [0.0, 0.0, 0.0]
    assert scored.labels == [5, 6, 7]
    assert scored.label_accuracy == 1.0
    assert all(row["identified_top1"] for row in scored.rows)


def test_fewer_reconstructions_than_originals_identify_nobody():
    truth = Truth(noise(50, 0), torch.zeros(50, dtype=torch.int64))
    scored = score_images(noise(2, 3), torch.tensor([0, 0]), truth, noise(9, 1))
    assert len(scored.rows) == 2
    assert all(row["identified_top1"] is None for row in scored.rows)
    exact = score_images(truth.images[[7, 30]], torch.tensor([0, 0]), truth, noise(9, 1))
    assert [row["mse"] for row in exact.rows] == [0.0, 0.0]

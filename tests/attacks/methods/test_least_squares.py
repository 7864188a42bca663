import torch

from bract.attacks.methods.r_gap.least_squares import (
    Limits,
    NormalEquations,
    all_columns,
    conjugate_gradients,
    matrix_of,
    undetermined,
)


def system(equations: int, unknowns: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(equations, unknowns, generator=generator, dtype=torch.float64),
        torch.randn(unknowns, generator=generator, dtype=torch.float64),
    )


def test_both_solvers_agree_with_lapack_and_leave_nothing_open() -> None:
    matrix, _ = system(60, 40)
    right = torch.linspace(-1, 1, 60, dtype=torch.float64)
    wanted = torch.linalg.lstsq(matrix, right[:, None], driver="gelsd").solution[:, 0]
    zero = torch.zeros(40, dtype=torch.float64)
    found = conjugate_gradients(lambda u: [matrix @ u], [right], zero, steps=200)
    assert found.met and torch.allclose(found.value, wanted)
    dense, gap = NormalEquations(matrix, right, (40,)).solve()
    assert torch.allclose(dense.value, wanted) and gap < 1e-6
    assert abs(dense.residual - float((matrix @ wanted - right).norm() / right.norm())) < 1e-9
    assert undetermined(lambda u: [matrix @ u], zero, steps=200) < 1e-6


def test_gaps_are_measured_and_take_the_least_norm() -> None:
    matrix, truth = system(30, 40)
    wanted = torch.linalg.pinv(matrix) @ (matrix @ truth)
    zero = torch.zeros(40, dtype=torch.float64)
    rows = lambda u: [matrix[:10] @ u, matrix[10:] @ u]  # noqa: E731
    found = conjugate_gradients(
        rows, [(matrix @ truth)[:10], (matrix @ truth)[10:]], zero, steps=99
    )
    assert torch.allclose(found.value, wanted)
    dense, gap = NormalEquations(matrix_of(rows, zero), matrix @ truth, (40,)).solve()
    assert torch.allclose(dense.value, wanted, atol=2e-3)  # the ridge against rounding
    assert abs(gap - 0.25) < 1e-3
    assert 0.1 < undetermined(rows, zero, steps=99) < 0.45


def test_linear_rows_and_their_transpose_are_those_of_the_matrix() -> None:
    """Each is a pass through a graph; the matrix is the slow reference, as convolutions are."""
    generator = torch.Generator().manual_seed(0)
    kernel = torch.randn(4, 3, 3, 3, generator=generator, dtype=torch.float64)
    value = torch.randn(1, 3, 6, 6, generator=generator, dtype=torch.float64)

    def rows(u: torch.Tensor) -> list[torch.Tensor]:
        return [torch.nn.functional.conv2d(u, kernel, stride=2), 2.0 * u[:, :1]]

    dense = torch.stack(
        [
            torch.cat([one.flatten() for one in rows(unit.view_as(value))])
            for unit in torch.eye(value.numel(), dtype=torch.float64)
        ],
        dim=1,
    )
    assert torch.allclose(matrix_of(rows, value), dense)
    assert torch.allclose(matrix_of(lambda u: rows(u)[1:], value), dense[-36:])
    together = all_columns(lambda u: rows(u)[0], value)
    assert torch.allclose(together, dense[:-36])
    wanted = torch.linalg.pinv(dense) @ (dense @ value.flatten())
    found = conjugate_gradients(rows, rows(value), torch.zeros_like(value), steps=200)
    assert torch.allclose(found.value.flatten(), wanted)


def test_a_residual_that_noise_leaves_ends_at_the_floor_of_rounding() -> None:
    """The slope stops there, and an angle of `CONVERGED` to a small residual is below it."""
    matrix, truth = system(60, 40)
    matrix = matrix * torch.logspace(0, -2, 40, dtype=torch.float64)
    noise = torch.randn(60, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    right = matrix @ truth + 1e-7 * noise
    zero = torch.zeros(40, dtype=torch.float64)
    found = conjugate_gradients(lambda u: [matrix @ u], [right], zero, steps=1000)
    wanted = torch.linalg.lstsq(matrix, right[:, None], driver="gelsd").solution[:, 0]
    assert found.met and found.steps < 500
    assert float((found.value - wanted).norm() / wanted.norm()) < 1e-8


def test_too_few_steps_are_told() -> None:
    matrix, truth = system(60, 40)
    zero = torch.zeros(40, dtype=torch.float64)
    assert not conjugate_gradients(lambda u: [matrix @ u], [matrix @ truth], zero, steps=5).met


def test_limits_close_a_gap() -> None:
    matrix, _ = system(30, 40)
    truth = torch.zeros(40, dtype=torch.float64)
    truth[:8] = 1.0
    equations = NormalEquations(matrix, matrix @ truth, (40,))
    start, _ = equations.solve()
    assert float((start.value - truth).norm()) > 0.5
    zero, one = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
    found = equations.completed(start.value, Limits(zero, one), variation=False)
    assert float(found.value.min()) > -1e-3 and float(found.value.max()) < 1 + 1e-3
    assert found.residual < 1e-4
    total = torch.ones(1, 40, dtype=torch.float64)
    limits = Limits(zero, one, matrix=total, most=torch.tensor([8.0], dtype=torch.float64))
    assert float(equations.completed(start.value, limits, variation=False).value.sum()) < 8.01


def test_least_variation_closes_a_gap_of_a_flat_image() -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(40, 64, generator=generator, dtype=torch.float64)
    image = torch.zeros(1, 1, 8, 8, dtype=torch.float64)
    image[..., 2:6, 3:7] = 1.0
    equations = NormalEquations(matrix, matrix @ image.flatten(), (1, 1, 8, 8))
    start, gap = equations.solve()
    low, high = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
    found = equations.completed(start.value, Limits(low, high), variation=True)
    assert gap > 0.3
    assert float((found.value - image).abs().max()) < 0.02

"""Feature maps: the kernels they promise, their rank, their gradients, and that they are saved whole."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from mnemos.memory.features import (
    FEATURES,
    Elementwise,
    ElementwiseConcat,
    Monomials,
    Sketch,
    TensorProjection,
    make_features,
)

HEADS, DIM = 3, 4
MAPS = ["identity", "elementwise", "elementwise_concat", "monomials", "tensor", "sketch"]
RANDOM = {"tensor": {"feature_dim": 10}, "sketch": {"feature_dim": 12}}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def build(name: str, dim: int = DIM, heads: int = HEADS, degree: int = 2, **options):
    return FEATURES[name](dim, heads, degree, **(RANDOM.get(name, {}) | options))


def randomised(phi):
    with torch.no_grad():
        for parameter in phi.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.5)
    return phi.double()


def unit(*shape: int):
    return torch.nn.functional.normalize(torch.randn(*shape, dtype=torch.float64), dim=-1)


def polynomial(s, log_coefficients):
    """Σ a_i s^i / Σ a_i; s (..., H), log_coefficients (H, p+1)."""
    a = log_coefficients.double().exp()
    return sum(a[:, i] * s**i for i in range(a.shape[1])) / a.sum(dim=1)


@pytest.mark.parametrize(("dim", "degree"), [(4, 1), (5, 2), (3, 3), (2, 5), (1, 4)])
def test_monomials_have_exactly_the_promised_kernel(dim, degree):
    phi = randomised(Monomials(dim, HEADS, degree))
    q, k = torch.randn(2, 2, 5, HEADS, dim, dtype=torch.float64)
    kernel = (phi(q) * phi(k)).sum(-1)
    expected = polynomial((q * k).sum(-1), phi.log_coefficients)
    torch.testing.assert_close(kernel, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_monomials_keep_unit_keys_unit(degree):
    norms = randomised(Monomials(6, HEADS, degree))(unit(2, 5, HEADS, 6)).norm(dim=-1)
    torch.testing.assert_close(norms, torch.ones_like(norms), rtol=1e-12, atol=0)


@pytest.mark.parametrize(("dim", "degree", "features"), [(16, 2, 153), (64, 2, 2145), (64, 3, 47905), (4, 3, 35)])
def test_monomials_count_all_monomials_up_to_the_degree(dim, degree, features):
    phi = Monomials(dim, 1, degree)
    assert phi.dim_out == Monomials.lifted_dim(dim, degree, None) == math.comb(dim + degree, degree) == features
    assert phi(torch.zeros(1, dim)).shape == (1, features)


def test_elementwise_is_the_power_series_of_each_coordinate():
    phi = randomised(Elementwise(DIM, HEADS, 4))
    x = torch.randn(2, 5, HEADS, DIM, dtype=torch.float64)
    expected = sum(phi.coefficients[:, i - 1, None] * x**i for i in range(1, 5))
    torch.testing.assert_close(phi(x), expected, rtol=1e-12, atol=1e-12)


def test_concatenated_powers_stand_side_by_side_with_a_coefficient_each():
    phi = randomised(ElementwiseConcat(DIM, HEADS, 4))
    x = torch.randn(2, 5, HEADS, DIM, dtype=torch.float64)
    expected = torch.cat([phi.coefficients[:, i - 1, None] * x**i for i in range(1, 5)], -1)
    assert phi.dim_out == ElementwiseConcat.lifted_dim(DIM, 4, None) == 4 * DIM
    torch.testing.assert_close(phi(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("degree", [1, 2, 5])
def test_concatenated_powers_keep_unit_keys_about_unit(degree):
    norms = ElementwiseConcat(6, HEADS, degree).double()(unit(200, HEADS, 6)).norm(dim=-1)
    bound = math.sqrt(sum(math.factorial(i) ** -2 for i in range(1, degree + 1)))
    assert norms.min() >= 1 - 1e-12 and norms.max() <= bound + 1e-12 and bound < 1.14


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_coefficients_start_at_inverse_factorials(degree):
    taylor = torch.tensor([1 / math.factorial(i) for i in range(degree + 1)]).expand(HEADS, -1)
    for phi in (Elementwise(DIM, HEADS, degree), ElementwiseConcat(DIM, HEADS, degree)):
        torch.testing.assert_close(phi.coefficients.data, taylor[:, 1:])
    for phi in (Monomials(DIM, HEADS, degree), Sketch(DIM, HEADS, degree)):
        torch.testing.assert_close(phi.log_coefficients.data.exp(), taylor)


def test_only_the_monomials_raise_the_rank_to_their_full_count():
    def rank(phi):
        points = torch.randn(200, 1, DIM, dtype=torch.float64)
        return torch.linalg.matrix_rank(phi.double()(points)[:, 0].detach()).item()

    assert rank(build("identity", heads=1)) == DIM
    assert rank(build("elementwise", heads=1)) == DIM
    assert rank(build("elementwise_concat", heads=1, degree=3)) == 3 * DIM
    assert rank(build("monomials", heads=1)) == math.comb(DIM + 2, 2)
    assert rank(build("monomials", heads=1, degree=3)) == math.comb(DIM + 3, 3)
    assert rank(build("tensor", heads=1, feature_dim=None)) == DIM
    assert rank(build("tensor", heads=1, feature_dim=10)) <= 10
    assert rank(build("sketch", heads=1)) == 12


@pytest.mark.parametrize("name", MAPS)
def test_gradients_of_inputs_and_parameters_are_exact_at_random_points_and_at_zero(name):
    phi = build(name, dim=3, heads=2, degree=2 if name == "tensor" else 3).double()
    parameters = tuple(phi.parameters())
    names = [n for n, _ in phi.named_parameters()]

    def run(x, *values):
        return torch.func.functional_call(phi, dict(zip(names, values)), (x,))

    for x in (torch.randn(2, 2, 3, dtype=torch.float64), torch.zeros(1, 2, 3, dtype=torch.float64)):
        assert torch.autograd.gradcheck(run, (x.requires_grad_(), *parameters))


def test_the_gradient_of_monomials_at_zero_is_that_of_the_linear_part():
    phi = Monomials(DIM, 1, 3).double()
    jacobian = torch.autograd.functional.jacobian(phi, torch.zeros(1, DIM, dtype=torch.float64))[0, :, 0]
    root = math.sqrt(1 / (1 + 1 + 1 / 2 + 1 / 6))
    expected = torch.zeros(phi.dim_out, DIM, dtype=torch.float64)
    expected[1 : 1 + DIM] = root * torch.eye(DIM, dtype=torch.float64)
    torch.testing.assert_close(jacobian, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["elementwise", "elementwise_concat", "monomials", "sketch"])
def test_every_coefficient_receives_a_gradient(name):
    phi = build(name, degree=3)
    phi(torch.randn(5, HEADS, DIM)).square().matmul(torch.rand(phi.dim_out)).sum().backward()
    for parameter in phi.parameters():
        assert (parameter.grad != 0).all()


def test_heads_have_their_own_coefficients_and_do_not_mix():
    for name in MAPS:
        phi = build(name)
        x = torch.randn(5, HEADS, DIM, requires_grad=True)
        (gradient,) = torch.autograd.grad(phi(x)[:, 1].sum(), x)
        assert (gradient[:, [0, 2]] == 0).all() and (gradient[:, 1] != 0).all()
        for parameter in phi.parameters():
            assert parameter.shape[0] == HEADS


@pytest.mark.parametrize("name", ["tensor", "sketch"])
def test_random_maps_reload_to_the_same_function(name):
    x = torch.randn(5, HEADS, DIM)
    saved, other = build(name), build(name, seed=1)
    assert "projection" in saved.state_dict()
    assert not torch.allclose(saved(x), other(x))
    other.load_state_dict(saved.state_dict())
    assert torch.equal(saved(x), other(x))


@pytest.mark.parametrize("name", ["elementwise", "elementwise_concat", "monomials"])
def test_learnt_maps_reload_to_the_same_function_and_save_no_tables(name):
    x = torch.randn(5, HEADS, DIM, dtype=torch.float64)
    saved, other = randomised(build(name)), build(name).double()
    assert not list(saved.buffers())  # from_pretrained would fill non-persistent ones with uninitialised memory
    other.load_state_dict(saved.state_dict())
    assert torch.equal(saved(x), other(x))


@pytest.mark.parametrize("name", MAPS)
def test_building_a_map_is_repeatable_and_leaves_the_global_random_state_alone(name):
    before = torch.get_rng_state()
    first, second = build(name), build(name)
    assert torch.equal(before, torch.get_rng_state())
    for a, b in zip(first.state_dict().values(), second.state_dict().values()):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", MAPS)
def test_a_map_built_on_the_meta_device_becomes_whole_after_reset(name):
    with torch.device("meta"):
        phi = build(name)
    x = torch.randn(5, HEADS, DIM)
    assert phi(x.to("meta")).shape == (5, HEADS, phi.dim_out)
    phi.to_empty(device="cpu").reset_parameters()
    assert torch.equal(phi(x), build(name)(x))


def test_the_tensor_map_keeps_the_mean_square_of_unit_keys():
    x = unit(1, 8)
    squares = torch.stack([TensorProjection(8, 1, seed=seed)(x).square().sum() for seed in range(400)])
    assert abs(squares.mean().item() - 1) < 4 * squares.std().item() / math.sqrt(400)
    assert squares.std() < 0.7


@pytest.mark.parametrize(("degree", "feature_dim"), [(2, 40), (3, 60), (4, 13)])
@pytest.mark.parametrize("cosine", [0.0, 0.6, 1.0])
def test_the_sketch_is_unbiased(degree, feature_dim, cosine):
    q, other = unit(2, 1, 8)
    across = torch.nn.functional.normalize(other - (other * q).sum() * q, dim=-1)
    k = cosine * q + math.sqrt(1 - cosine**2) * across
    trials, maps = 600, (Sketch(8, 1, degree, feature_dim, seed=seed) for seed in range(600))
    kernels = torch.stack([(phi(q) * phi(k)).sum() for phi in maps]).detach()
    expected = polynomial(torch.tensor([cosine], dtype=torch.float64), Sketch(8, 1, degree).log_coefficients.detach())
    assert abs(kernels.mean().item() - expected.item()) < 4 * kernels.std().item() / math.sqrt(trials)


def test_the_sketch_has_exact_lower_degrees_and_its_error_falls_with_its_size():
    q, k = unit(2, 200, 1, 8)
    exact = Monomials(8, 1, 2).double()
    errors = []
    for feature_dim in (12, 40, 150, 600):
        sketch = Sketch(8, 1, 2, feature_dim).double()
        error = ((sketch(q) * sketch(k)).sum(-1) - (exact(q) * exact(k)).sum(-1)).square().mean().sqrt()
        errors.append(error.item())
    assert all(later < 0.8 * earlier for earlier, later in itertools.pairwise(errors)), errors
    linear, one = Sketch(8, 1, 1).double(), Monomials(8, 1, 1).double()
    assert linear.dim_out == 9
    torch.testing.assert_close(linear(q), one(q), rtol=1e-12, atol=0)


def test_orthogonal_directions_make_the_sketch_quieter_than_independent_ones():
    """Same kernel, same size; the degree 2 part of a unit key's squared norm, over many seeds."""
    x, width = unit(1, 8), 32
    sketches = [Sketch(8, 1, 2, 9 + width, seed=seed).double() for seed in range(300)]
    ours = torch.stack([phi(x)[0, 9:].square().sum() / 0.2 for phi in sketches])
    signs = torch.randint(0, 2, (300, 2, 8, width)).double() * 2 - 1
    independent = (x @ signs).prod(dim=1).square().mean(dim=-1).squeeze(-1)
    assert ours.std() < 0.8 * independent.std()


@pytest.mark.parametrize("name", MAPS)
def test_precision_is_never_lost(name):
    phi, x = build(name), torch.randn(5, HEADS, DIM)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        y = phi(x.to(dtype))
        assert y.isfinite().all()
        assert torch.promote_types(y.dtype, dtype) == y.dtype
    torch.testing.assert_close(phi(x.double()).float(), phi(x), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(phi(x.bfloat16()).float(), phi(x), rtol=0.1, atol=0.1)


def test_a_bfloat16_model_still_has_the_exact_monomial_kernel():
    phi = Monomials(16, 1, 2).bfloat16()
    x = torch.nn.functional.normalize(torch.randn(50, 1, 16), dim=-1)
    torch.testing.assert_close(phi(x).norm(dim=-1), torch.ones(50, 1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", MAPS)
def test_any_leading_shape_works_including_none_and_empty(name):
    phi = build(name)
    x = torch.randn(2, 5, HEADS, DIM)
    y = phi(x)
    assert y.shape == (2, 5, HEADS, phi.dim_out)
    torch.testing.assert_close(phi(x[1, 2]), y[1, 2])
    torch.testing.assert_close(phi(x.transpose(0, 1)), y.transpose(0, 1))
    assert phi(x[:, :0]).shape == (2, 0, HEADS, phi.dim_out)


@pytest.mark.parametrize("name", MAPS)
def test_maps_compile_without_graph_breaks(name):
    phi = build(name, degree=2 if name == "tensor" else 3)
    compiled = torch.compile(phi, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 5, HEADS, DIM, requires_grad=True)
    torch.testing.assert_close(compiled(x), phi(x))
    torch.testing.assert_close(
        torch.autograd.grad(compiled(x).square().sum(), x), torch.autograd.grad(phi(x).square().sum(), x)
    )


def test_a_spec_gets_its_map_and_identity_needs_none():
    def spec(**options):
        return SimpleNamespace(**{"key_dim": 6, "degree": 2, "feature_dim": None} | options)

    assert make_features(spec(features="identity"), HEADS) is None
    phi = make_features(spec(features="sketch", degree=3, feature_dim=20), HEADS)
    assert isinstance(phi, Sketch) and (phi.dim_in, phi.dim_out, phi.heads, phi.degree) == (6, 20, HEADS, 3)
    for name in MAPS[1:]:
        phi = make_features(spec(features=name), HEADS)
        assert phi.dim_out == FEATURES[name].lifted_dim(6, 2, None)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("monomials", {"dim": 0}, "dim=0 must be a whole number >= 1"),
        ("elementwise", {"degree": 0}, "degree=0 must be a whole number >= 1"),
        ("monomials", {"heads": True}, "heads=True must be a whole number >= 1"),
        ("tensor", {"feature_dim": 0}, "feature_dim=0 must be a whole number >= 1"),
        ("tensor", {"degree": 3}, "degree=3 must be 2 with features='tensor'"),
        ("sketch", {"degree": 3, "feature_dim": 6}, "feature_dim=6 must be >= key_dim + degree = 7"),
    ],
)
def test_impossible_arguments_are_refused_in_one_sentence(name, options, sentence):
    with pytest.raises(ValueError, match="^" + sentence.replace("+", r"\+")) as error:
        build(name, **options)
    assert "\n" not in str(error.value)

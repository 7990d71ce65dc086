"""What the studies of gradient descent compute exactly: the steps that layers take, the machine, and the gradient of attention."""

import torch

from regard import attend
from regard.study.in_context import PAIRS, Linear, descent, prompts, ridge, set_to_a_step, tokens
from regard.study.max_margin import gradient, machine, problems
from regard.study.tasks.training import generator


def test_layers_whose_weights_are_set_take_the_steps_of_gradient_descent():
    p = type(prompts(generator(0), 2))(*(x.double() for x in prompts(generator(0), 32)))
    rates = [0.5, 0.2, 0.7]
    model = Linear(3).double()
    for layer, rate in zip(model.layers, rates, strict=True):
        set_to_a_step(layer, rate)
    expected = descent(p, torch.tensor(rates, dtype=torch.float64))
    assert (model(tokens(p)) - expected).abs().max() < 1e-12
    w = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    loss = 0.5 * (p.x[0] @ w - p.y[0]).square().mean()
    (slope,) = torch.autograd.grad(loss, w)
    assert abs(float((-0.5 * slope) @ p.question[0] - descent(p, torch.tensor([0.5]).double())[0])) < 1e-12


def test_long_descent_arrives_at_least_squares_and_ridge_pulls_it_back():
    p = prompts(generator(1), 64)
    far = descent(p, torch.full((3000,), 0.3))
    assert (far - ridge(p, 0.0)).abs().max() < 1e-2
    assert (ridge(p, 1e6)).abs().max() < 1e-2
    assert p.x.shape == (64, PAIRS, 4)


def test_the_gradient_that_keeps_its_direction_is_that_of_attend():
    g = generator(3)
    problem = problems(g, 4, equal=False)
    p = torch.randn(4, 16, generator=g, dtype=torch.float64).requires_grad_()
    keys = problem.keys.flatten(0, 1).unsqueeze(1)
    asked = p.repeat_interleave(5, 0)[:, None, None]
    read = attend(asked, keys, problem.scores.reshape(20, 1, 4, 1), "dot(scale=1) | softmax")
    (expected,) = torch.autograd.grad(torch.nn.functional.softplus(-read).view(4, 5).mean(1).sum(), p)
    direction, scale = gradient(p.detach(), *problem)
    torch.testing.assert_close(direction * scale.exp().unsqueeze(-1), expected)
    assert expected.abs().max() > 1e-3


def test_the_gradient_has_a_direction_where_every_weight_underflows():
    problem = problems(generator(4), 3)
    aim, _ = machine(problem.keys, torch.zeros(3, 5, dtype=torch.long))
    direction, scale = gradient(2000 * aim, *problem)
    assert bool((scale < -1500).all())
    assert bool((direction.norm(dim=-1) > 1e-3).all())


def test_the_machine_meets_its_conditions_and_says_where_there_is_none():
    chosen = torch.zeros(6, 5, dtype=torch.long)
    keys = problems(generator(5), 6).keys
    p, margin = machine(keys, chosen)
    assert (margin - 1).abs().max() < 1e-6
    # No direction of the same margin is shorter: p is a sum of binding differences with weights above 0.
    rows = (keys[:, :, :1] - keys[:, :, 1:]).flatten(1, 2)
    for one, a in zip(p, rows, strict=True):
        binding = a[(a @ one - 1).abs() < 1e-5]
        force = torch.linalg.lstsq(binding.T, one.unsqueeze(-1)).solution
        assert (binding.T @ force - one.unsqueeze(-1)).abs().max() < 1e-5
        assert force.min() > -1e-5
    line = torch.tensor([[[[0.0], [1.0]], [[0.0], [-1.0]]]], dtype=torch.float64)
    assert machine(line, torch.zeros(1, 2, dtype=torch.long), sweeps=50)[1] < 0.999

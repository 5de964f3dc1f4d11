"""What a model makes of an error: the random scalars, the gradients that are kept, and the plan made with them."""

import pytest
import scatterbrain as sb
import torch
from scatterbrain.calibration.capture import capture
from scatterbrain.calibration.sensitivity import main_tensor, probe
from torch import nn

from cases import normal


class Output(dict):
    """As transformers returns them: a mapping, with its values as attributes."""

    def __init__(self, logits):
        super().__init__(logits=logits)
        self.logits = logits


class Toy(nn.Module):
    """Attention between two linear maps; the second one's rows say how much each head matters."""

    def __init__(self, weight=(1.0, 0.1), cut=False):
        super().__init__()
        torch.manual_seed(0)
        self.num_heads = len(weight)
        self.qkv = nn.Linear(16, 3 * 8 * len(weight))
        self.out = nn.Linear(8 * len(weight), 16, bias=False)
        with torch.no_grad():
            self.out.weight *= torch.tensor(weight).repeat_interleave(8)
        self.cut = cut

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, 8)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(2 * q, 2 * k, v)
        y = self.out(y.transpose(1, 2).flatten(2))
        return {"length": torch.tensor(x.shape[1]), "states": y.detach() if self.cut else y}


class InPlace(Toy):
    """A residual added in place, over what a gradient needs."""

    def forward(self, x):
        y = super().forward(x)["states"].exp()
        z = y.square()
        y.add_(1.0)
        return z


class Unfelt(Toy):
    def forward(self, x):
        return 0.0 * super().forward(x)["states"] + x


class Broken(Toy):
    """Finite forward, a root of zero backward."""

    def forward(self, x):
        return (0.0 * super().forward(x)["states"]).abs().sqrt()


REFUSED = (
    (lambda: Toy(cut=True), "model must give an output that has a gradient; got one without"),
    (InPlace, "model must be one that a gradient can be taken of; got .*inplace"),
    (Unfelt, "model must feel its attention; got gradients that are all zero"),
    (Broken, "gradient at layer '' must be finite; got NaN or infinity"),
)


def batches(count=2, n=128):
    return [(normal(2, n, 16, seed=s, dtype=torch.float32),) for s in range(count)]


def test_signs_give_the_square_of_what_an_error_does_to_the_output():
    """E (g.e)^2 = |J e|^2 / |y|^2, over many draws, for the Jacobian of a linear map."""
    x, jacobian, error = normal(6, seed=1), normal(5, 6, seed=2), normal(6, seed=3)
    generator, squares = torch.Generator().manual_seed(0), []
    for _ in range(4000):
        z = x.clone().requires_grad_()
        y = jacobian @ z
        (g,) = torch.autograd.grad(probe({"states": y}, generator), z)
        squares.append(float(g @ error) ** 2)
    true = float((jacobian @ error).square().sum() / (jacobian @ x).square().sum())
    assert sum(squares) / 4000 == pytest.approx(true, rel=0.12)  # the spread of a square of signs: 4 standard errors and more


def test_labels_give_the_divergence_that_an_error_causes():
    """Half of E (g.e)^2 is the mean over rows of KL(p | p'), to second order."""
    logits, error = normal(4, 7, seed=1), 0.05 * normal(4, 7, seed=2)
    generator, total = torch.Generator().manual_seed(0), 0.0
    for _ in range(4000):
        z = logits.clone().requires_grad_()
        (g,) = torch.autograd.grad(probe(Output(z[None]), generator), z)
        total += float((g * error).sum(-1).square().sum())
    before, after = (torch.log_softmax(t, -1) for t in (logits, logits + error))
    true = float((before.exp() * (before - after)).sum(-1).mean())
    assert total / 4000 / 2 == pytest.approx(true, rel=0.1)


def test_the_output_is_the_first_tensor_of_numbers():
    y = torch.ones(2)
    assert main_tensor({"n": torch.tensor(3), "deep": (None, [y])}) is y and main_tensor("no") is None
    with pytest.raises(ValueError, match="model must return a tensor, or an output that holds one; got str; pass objective='matrix', or a loss"):
        probe("no", torch.Generator())


def test_what_is_kept_is_the_gradient_of_the_heads_output():
    """Against a gradient taken by hand, and nothing is left behind: no gradient, no graph, no frozen parameter."""
    model = Toy().train()
    seen = capture(model, batches(), feel=lambda output, batch: (output["states"] * batch[0]).sum())
    kept = seen[""].kept
    assert len(kept) == 4 and all(p.grad is None and p.requires_grad for p in model.parameters()) and model.training
    for n, c in enumerate(kept):
        x = batches()[n // 2][0][n % 2]
        true = (x @ model.out.weight).view(128, 2, 8).transpose(0, 1)  # d (y.x) / d head
        assert torch.allclose(c.pull[0].float(), true, rtol=2**-7, atol=1e-6)  # kept in bfloat16
        assert not c.pull.requires_grad and not c.q.requires_grad


def test_the_head_that_matters_gets_the_entries():
    plans = {o: sb.calibrate(Toy(), batches(4), 1 / 8, objective=o, progress=False) for o in ("model", "matrix")}
    spent = {o: [head.stats["budget"] for head in plan.layers[""].heads] for o, plan in plans.items()}
    assert spent["model"][0] > spent["matrix"][0] and spent["model"][0] > spent["model"][1]
    assert plans["model"].about["objective"] == "model" and plans["model"].about["harm"] > 0 and "harm" not in plans["matrix"].about
    harm = [head.stats["harm"] for head in plans["model"].layers[""].heads]
    assert plans["model"].about["harm"] == pytest.approx(sum(harm))
    assert "objective: model" in plans["model"].summary()


def test_harm_is_what_converting_does_to_the_output():
    """Predicted from sampled rows and a random sign an output, against the output's relative squared error."""
    model = Toy().eval()
    plan = sb.calibrate(model, batches(8), 1 / 8, progress=False)
    given = batches(8)
    with torch.no_grad():
        exact = [model(*b)["states"] for b in given]
        sb.convert(model, plan)
        found = [float((model(*b)["states"] - y).square().sum() / y.square().sum()) for b, y in zip(given, exact, strict=True)]
    assert plan.about["harm"] == pytest.approx(sum(found) / 8, rel=0.3)


def test_a_loss_of_ones_own_and_what_is_refused():
    heard = []

    def loss(output, batch):
        heard.append(batch)
        return output["states"][..., :4].square().mean()

    plan = sb.calibrate(Toy(), batches(), 1 / 8, loss=loss, progress=False)
    assert len(heard) == 2 and plan.about["harm"] > 0
    with pytest.raises(ValueError, match="loss must come with objective='model'; got objective='matrix'"):
        sb.calibrate(Toy(), batches(), 1 / 8, loss=loss, objective="matrix", progress=False)
    with pytest.raises(ValueError, match="objective must be 'matrix' where an error is asked for"):
        sb.calibrate(Toy(), batches(), error=0.1, objective="model", progress=False)
    with pytest.raises(ValueError, match=r"loss must be a scalar; got \(2, 128, 16\); sum it, or take its mean"):
        sb.calibrate(Toy(), batches(), 1 / 8, progress=False, loss=lambda output, batch: output["states"])
    for model, words in REFUSED:
        model = model()
        with pytest.raises(ValueError, match=words + ".*pass objective='matrix', which needs no gradient"):
            sb.calibrate(model, batches(), 1 / 8, progress=False)
        assert all(p.requires_grad for p in model.parameters())
        assert sb.calibrate(model, batches(), 1 / 8, objective="matrix", progress=False).layers
    assert sb.calibrate(Toy(cut=True), batches(), 1 / 8, objective="matrix", progress=False).about["objective"] == "matrix"


def test_inputs_beyond_the_memory_are_left_out_with_gradients_too():
    size = 128 * 2 * 8 * (3 * 4 + 2)  # q, k and v in float32, the gradient in bfloat16
    plan = sb.calibrate(Toy(), batches(3), 1 / 4, memory=2 * size, progress=False)
    assert plan.about["inputs"] == 2 and plan.about["inputs left out for want of memory"] == 4


@pytest.mark.parametrize("objective", ["matrix", "model"])
def test_a_model_in_training_is_looked_at_and_converted_anew(objective):
    """Watched exactly though it is converted, its mode and parameters left alone; what moved is logged; gradients reach it."""
    model = sb.convert(Toy().train(), budget=1 / 4, impl="torch")
    asked = []

    def given():
        asked.append(len(asked))
        return batches(2)

    adaptive = sb.Adaptive.on(model, given, 1 / 8, every=2, objective=objective)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(4):
        model(*batches(1)[0])["states"].square().mean().backward()
        assert all(p.grad is not None and p.requires_grad for p in model.parameters()) and model.training
        optimiser.step()
        optimiser.zero_grad()
        adaptive.step()
    assert [m.step for m in adaptive.log] == [1, 3] and asked == [0, 1]
    assert adaptive.log[0].changed == 2 and adaptive.log[1].moved > 0  # other weights, other shares
    assert 0.08 < adaptive.log[1].budget < 0.13  # two heads share it out in coarse steps
    converted = model(*batches(1)[0])["states"]
    handler = model.__dict__["_scatterbrain_conversion"].handlers[""]
    assert handler.impl == "torch" and handler.recipes == tuple(head.recipe for head in adaptive.plan[""])
    assert not torch.equal(sb.restore(model)(*batches(1)[0])["states"], converted)


def test_padding_is_not_felt_and_halves_do_not_overflow():
    generator = torch.Generator().manual_seed(0)
    y = normal(2, 8, 300, seed=1, dtype=torch.float16).mul_(3000).requires_grad_()  # squares are beyond float16
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 5:] = 0
    (g,) = torch.autograd.grad(probe(y, generator, mask), y)
    size = y.detach().float()[mask.bool()].square().sum().sqrt()
    assert torch.allclose(g[mask.bool()].float().abs(), 2**0.5 / size, rtol=2e-3) and not g[1, 5:].any()
    z = Output(normal(2, 8, 3, seed=2).requires_grad_())
    (g,) = torch.autograd.grad(probe(z, generator, mask), z.logits)
    assert g[0].any(-1).all() and not g[1, 5:].any()


def test_one_logit_or_a_map_of_them_is_compared_by_squares():
    """Softmax over one class says nothing; and where classes lie in a map of logits is not known."""
    for shape in ((4, 1), (2, 3, 4, 4)):
        z = Output(normal(*shape, seed=1).requires_grad_())
        (g,) = torch.autograd.grad(probe(z, torch.Generator().manual_seed(0)), z.logits)
        assert (g != 0).all()


def test_harm_does_not_depend_on_how_inputs_are_batched():
    x = torch.cat([b[0] for b in batches(4)])

    def harm(size):
        return sum(sb.calibrate(Toy(), [(part,) for part in x.split(size)], 1 / 8, seed=s, progress=False).about["harm"] for s in range(3)) / 3

    assert harm(8) == pytest.approx(harm(1), rel=0.25)


def outside(q, k, v):
    return nn.functional.scaled_dot_product_attention(q, k, v)


class Helped(Toy):
    """Attention called by a function elsewhere: no search of the module's code finds it."""

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, 8)).permute(2, 0, 3, 1, 4)
        return self.out(outside(q, k, v).transpose(1, 2).flatten(2))


def test_layers_that_only_a_run_finds_are_felt_too():
    model = nn.Sequential(Toy(), nn.Identity())
    model[0].forward = lambda x: Toy.forward(model[0], x)["states"]
    model[1] = Helped()
    plan = sb.calibrate(model, batches(), 1 / 8, progress=False)
    assert all(head.stats["harm"] > 0 for layer in plan.layers.values() for head in layer.heads) and len(plan.layers) == 2


def test_a_converted_model_is_calibrated_as_it_was_and_stays_converted():
    model = sb.convert(Toy().eval(), budget=1 / 4)
    x = batches(1)[0]
    converted = model(*x)["states"]
    plan = sb.calibrate(model, batches(), 1 / 8, progress=False)
    assert plan == sb.calibrate(Toy().eval(), batches(), 1 / 8, progress=False)
    assert torch.equal(model(*x)["states"], converted)


def test_checkpointed_layers_are_felt_without_being_run_twice():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 50}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).train()
    given = [{"input_ids": torch.arange(80)[None] % 50, "use_cache": False}]
    plain = sb.calibrate(model, given, 1 / 4, progress=False)
    model.gradient_checkpointing_enable()
    assert sb.calibrate(model, given, 1 / 4, progress=False) == plain and model.model.gradient_checkpointing

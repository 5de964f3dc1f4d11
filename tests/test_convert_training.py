"""A converted model trains: gradients, checkpointing, autocast, torch.compile, DistributedDataParallel."""

import os
import tempfile

import pytest
import scatterbrain as sb
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

BUDGET = 1 / 4


def encoder(dropout=0.0):
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 48, batch_first=True, dropout=dropout), 2, enable_nested_tensor=False)


def llama():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=50, max_position_embeddings=256))


IDS = torch.randint(2, 50, (2, 96), generator=torch.Generator().manual_seed(0))
X = torch.randn(2, 96, 32, generator=torch.Generator().manual_seed(0))
FEED = {"llama": lambda model: model(input_ids=IDS, labels=IDS, attention_mask=torch.ones_like(IDS), use_cache=False).loss}
FEED["encoder"] = lambda model: model(X).square().mean()
MODELS = {"llama": llama, "encoder": encoder}


def gradients(model, feed):
    model.zero_grad()
    feed(model).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("name", MODELS)
def test_gradients_at_budget_one_are_the_exact_models(name):
    model, feed = MODELS[name]().train(), FEED[name]
    expected = gradients(model, feed)
    sb.convert(model, support=sb.Full() | sb.Window(3), low_rank=None)
    torch.testing.assert_close(gradients(model, feed), expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_a_converted_model_learns(name):
    model, feed = sb.convert(MODELS[name]().train(), budget=BUDGET), FEED[name]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        losses.append(feed(model))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 1e-3


def test_gradient_checkpointing_gives_the_same_gradients():
    model = sb.convert(llama().train(), budget=BUDGET)
    expected = gradients(model, FEED["llama"])
    model.gradient_checkpointing_enable()
    assert torch.equal(gradients(model, FEED["llama"]), expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_are_recomputed_by_us(reentrant):
    layer = sb.convert(encoder(), budget=BUDGET).layers[0]
    plain, again = X.clone().requires_grad_(), X.clone().requires_grad_()
    layer(plain).square().sum().backward()
    checkpoint(layer, again, use_reentrant=reentrant).square().sum().backward()
    assert torch.equal(plain.grad, again.grad)


@pytest.mark.parametrize("name", MODELS)
def test_autocast(name):
    model, feed = sb.convert(MODELS[name]().train(), budget=BUDGET), FEED[name]
    full = feed(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = feed(model)
    loss.backward()
    torch.testing.assert_close(loss.float(), full, rtol=3e-2, atol=3e-2)


def test_dropout_reaches_attention():
    model = sb.convert(encoder(dropout=0.5).train(), budget=BUDGET)
    with torch.no_grad():
        for layer in model.layers:
            layer.dropout.p = layer.dropout1.p = layer.dropout2.p = 0.0
        assert not torch.equal(model(X), model(X))
        model.eval()
        assert torch.equal(model(X), model(X))


@pytest.mark.parametrize("name", MODELS)
def test_compiled_models_agree(name):
    model, feed = sb.convert(MODELS[name](), budget=BUDGET), FEED[name]
    expected = gradients(model, feed)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    model.zero_grad()
    feed(compiled).backward()
    got = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-6)


@torch.no_grad()
def test_a_converted_bert_is_one_graph():
    """No graph breaks where the mask is None; others break to look at the mask, and nn.MultiheadAttention at each module."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 50}
    model = sb.convert(transformers.BertModel(transformers.BertConfig(**sizes)).eval(), budget=BUDGET)
    torch._dynamo.reset()
    assert torch._dynamo.explain(model)(input_ids=IDS).graph_break_count == 0


def _worker(rank, path, name):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    model = sb.convert(MODELS[name]().train(), budget=BUDGET)
    parallel = nn.parallel.DistributedDataParallel(model)
    if name == "llama":
        mine = IDS[rank : rank + 1]
        loss = parallel(input_ids=mine, labels=mine, attention_mask=torch.ones_like(mine), use_cache=False).loss
    else:
        loss = parallel(X[rank : rank + 1]).square().mean()
    loss.backward()
    got = torch.cat([p.grad.flatten() for p in model.parameters()])
    alone = sb.convert(MODELS[name]().train(), budget=BUDGET)
    torch.testing.assert_close(got, gradients(alone, FEED[name]), rtol=1e-3, atol=1e-6)
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_two_processes_share_gradients(name):
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_worker, (os.path.join(folder, "meet"), name), nprocs=2)

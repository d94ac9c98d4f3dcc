"""Modules that run their forward in unusual ways."""

import copy
import random
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from networks import WIDTH, Classifier, Plain, PreNorm, Scaled, data, stack, trainer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lit_resinit import GradientError, ResidualInit, TrainedWeightsError, fold_


def fit(net: nn.Module, root: Path, *shape: int, steps: int = 3, **options: Any) -> tuple[Classifier, ResidualInit]:
    module, ours = Classifier(net, lr=0.1), ResidualInit(**options)
    trainer(root, ours, max_steps=steps, max_epochs=-1).fit(module, data(*(shape or (WIDTH,))))
    return module, ours


def assert_starts_and_learns(module: Classifier, ours: ResidualInit, branches: int) -> None:
    assert len(ours.plan) == branches
    assert ours.identity_report.ok
    assert {b.note for b in ours.identity_report.branches} == {""}
    assert {g.status for g in ours.gradient_report.gates.values()} == {"alive"}
    assert all(bool(module.get_parameter(g.parameter).detach().any()) for g in ours.plan.gates)
    assert ours.history.variance_ratio[0].tolist() == [0.0] * branches
    assert bool((ours.history.variance_ratio[-1] > 0).all())


# -------------------------------------------------------------------- checkpointed activations


class Checkpointed(nn.Module):
    """Every block is recomputed in the backward pass."""

    def __init__(self, block: Any, reentrant: bool | None) -> None:
        super().__init__()
        self.stem, self.reentrant = nn.Linear(WIDTH, WIDTH), reentrant
        self.blocks, self.head = nn.ModuleList([block(), block()]), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


@pytest.mark.parametrize("block", [Plain, Scaled], ids=["insert", "zero"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["nonreentrant", "reentrant"])
def test_activation_checkpointing(reentrant: bool, block: Any, tmp_path: Path) -> None:
    module, ours = fit(Checkpointed(block, reentrant), tmp_path)
    assert_starts_and_learns(module, ours, 2)


def test_recomputation_is_measured_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Checkpointed(Scaled, False)
    plain = copy.deepcopy(net)
    plain.reentrant = None
    found, wanted = fit(net, tmp_path)[1].history, fit(plain, tmp_path)[1].history
    assert torch.equal(found.var_stream, wanted.var_stream)
    assert torch.equal(found.gate, wanted.gate)


# -------------------------------------------------------------------- compiled


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("block", [Plain, Scaled], ids=["insert", "zero"])
@pytest.mark.parametrize("part", ["whole module", "network", "each block", "in place"])
def test_compiled_before_setup(part: str, block: Any, tmp_path: Path) -> None:
    torch._dynamo.reset()
    net = stack(block)
    if part == "network":
        net = torch.compile(net, backend="eager")
    elif part == "each block":
        net = nn.Sequential(*(torch.compile(b, backend="eager") for b in net))
    elif part == "in place":
        net.compile(backend="eager")
    module, ours = Classifier(net, lr=0.1), ResidualInit()
    target = torch.compile(module, backend="eager") if part == "whole module" else module
    trainer(tmp_path, ours, max_steps=5, max_epochs=-1, log_every_n_steps=2).fit(target, data(WIDTH))
    assert len(ours.plan) == 2
    assert "_orig_mod" not in str(ours.plan.to_dict())
    assert ours.identity_report.ok
    assert ours.gradient_report.ok
    gates = {n.replace("_orig_mod.", ""): p for n, p in module.named_parameters()}
    assert all(bool(gates[g.parameter].detach().any()) for g in ours.plan.gates)


@pytest.mark.parametrize("block", [Plain, Scaled], ids=["insert", "zero"])
def test_compiled_after_setup(block: Any, tmp_path: Path) -> None:
    torch._dynamo.reset()

    class Compiles(Classifier):
        def on_fit_start(self) -> None:
            self.net.compile(backend="eager", fullgraph=True)

    module, ours = Compiles(stack(block), lr=0.1), ResidualInit()
    trainer(tmp_path, ours, max_steps=5, max_epochs=-1, log_every_n_steps=2).fit(module, data(WIDTH))
    assert ours.identity_report.ok
    assert ours.gradient_report.ok
    assert all(bool(module.get_parameter(g.parameter).detach().any()) for g in ours.plan.gates)


@pytest.mark.parametrize("compiled", ["block", "gated module"])
def test_a_compiled_twin_without_a_gate_keeps_its_code_for_itself(compiled: str, tmp_path: Path) -> None:
    torch._dynamo.reset()
    module, twin = Classifier(stack(Plain), lr=0.1), Plain()
    for block in (*module.net[:2], twin):
        (block if compiled == "block" else block.f).compile(backend="eager")
    x = torch.randn(4, WIDTH)
    open_branch = twin(x) - x  # compiled before a hook hangs on its twins
    ours = ResidualInit()
    trainer(tmp_path, ours).fit(module, data(WIDTH))
    assert ours.identity_report.ok
    for _ in range(2):  # now one, now the other
        with torch.no_grad():
            module.net[0].f.residual_gate.fill_(0.0)
        assert torch.equal(module.net[0](x), x)
        assert torch.equal(twin(x) - x, open_branch)
    fold_(module)
    assert not any("forward" in vars(m) or m._forward_hooks for m in module.modules())


# -------------------------------------------------------------------- odd forwards


class InPlaceRelu(nn.Module):
    """A ReLU that writes into its input, before the last layer and on the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(x + self.f(x))


@pytest.mark.filterwarnings("ignore:the stream from:lit_resinit.ResInitWarning")
def test_in_place_relu(tmp_path: Path) -> None:
    module, ours = fit(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), *(InPlaceRelu() for _ in range(2)), nn.Linear(WIDTH, 2)), tmp_path
    )
    assert_starts_and_learns(module, ours, 2)


class Attention(nn.Module):
    """``x + attention(x)`` that also hands out its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.attention(h, h, h, need_weights=True)[0]


def test_multihead_attention(tmp_path: Path) -> None:
    net = nn.Sequential(Attention(), Attention(), nn.Flatten(), nn.Linear(3 * WIDTH, 2))
    module, ours = fit(net, tmp_path, 3, WIDTH)
    assert_starts_and_learns(module, ours, 2)


class Padded(nn.Module):
    """An encoder with a padding mask, which evaluates nested tensors on its fast path."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(x.shape[:2], dtype=torch.bool)
        mask[0, 3:] = True
        return self.head(self.encoder(x, src_key_padding_mask=mask)[:, 0])


@pytest.mark.filterwarnings("ignore:the stream from:lit_resinit.ResInitWarning", "ignore:The PyTorch API of nested")
def test_the_fast_path_of_an_encoder_sees_the_gates(tmp_path: Path) -> None:
    module, ours = fit(Padded(), tmp_path, 5, WIDTH, steps=6)
    assert_starts_and_learns(module, ours, 4)
    x = torch.randn(4, 5, WIDTH)
    with torch.no_grad():
        slow = module.train()(x)
        fast = module.eval()(x)
    assert torch.allclose(slow, fast, atol=1e-5)


class Skipped(nn.Module):
    """Blocks that are skipped at random."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Plain() for _ in range(depth)]), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if random.random() > 0.5:
                x = block(x)
        return self.head(x)


def test_layers_skipped_at_random_sleep_until_they_run(tmp_path: Path) -> None:
    random.seed(3)
    _, ours = fit(Skipped(), tmp_path, steps=20, patience=15)
    assert len(ours.plan) == 6
    assert ours.identity_report.ok
    assert {g.status for g in ours.gradient_report.gates.values()} == {"alive"}


class Tied(nn.Module):
    """One block of weights, run twice, and a head tied to the stem."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.stem.weight
        self.first = block()
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(self.stem(x))))


@pytest.mark.parametrize("block", [Plain, Scaled], ids=["insert", "zero"])
def test_tied_weights(block: Any, tmp_path: Path) -> None:
    module, ours = fit(Tied(block), tmp_path)
    assert_starts_and_learns(module, ours, 2)
    assert len(ours.plan.gates) == 1


# -------------------------------------------------------------------- frozen parts


class Adapted(pl.LightningModule):
    """Low-rank adapters of peft on a frozen network with trained norms."""

    def __init__(self, peft: Any) -> None:
        super().__init__()
        net = stack(PreNorm)
        with torch.no_grad():
            for block in net[:2]:
                block.norm.weight.copy_(torch.linspace(0.5, 1.5, WIDTH))
        self.net = peft.get_peft_model(net, peft.LoraConfig(r=2, target_modules=["f.0", "f.2"]))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.5)


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
def test_lora_adapters_are_watched_and_the_frozen_network_left_alone(tmp_path: Path) -> None:
    module = Adapted(pytest.importorskip("peft"))
    ours = ResidualInit(scheme="observe", identity="ignore")
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    with pytest.raises(TrainedWeightsError):
        trainer(tmp_path, ResidualInit()).fit(module, data(WIDTH))
    assert all(torch.equal(before[n], p) for n, p in module.named_parameters())
    trainer(tmp_path, ours).fit(module, data(WIDTH))
    assert ours.gradient_report.ok
    assert {n for n, g in ours.gradient_report.gates.items() if "lora_B" in n} == {
        f"net.base_model.model.{i}.f.{j}.lora_B.default.weight" for i in range(2) for j in (0, 2)
    }
    changed = {n for n, p in module.named_parameters() if not torch.equal(before[n], p)}
    assert changed
    assert all("lora_" in n for n in changed)


def test_frozen_parts_that_hold_no_gate_do_not_matter(tmp_path: Path) -> None:
    net = stack(Scaled)
    for block in net[:2]:
        block.f.requires_grad_(False)
    module, ours = fit(net, tmp_path)
    assert_starts_and_learns(module, ours, 2)


def test_a_frozen_gate_stops_the_run(tmp_path: Path) -> None:
    net = stack(Scaled)
    net[1].scale.requires_grad_(False)
    with pytest.raises(GradientError, match=r"net\.1\.scale .*frozen"):
        fit(net, tmp_path)


def test_a_scalar_is_inserted_into_a_frozen_network_and_learns(tmp_path: Path) -> None:
    net = stack(Plain)
    for block in net[:2]:
        block.requires_grad_(False)
    module, ours = fit(net, tmp_path)
    assert_starts_and_learns(module, ours, 2)
    assert not module.net[0].f[0].weight.requires_grad

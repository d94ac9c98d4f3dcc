"""Faults that hostile use once found, each with the right value."""

import os
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss, normalize
from torch.utils.data import DataLoader, TensorDataset

from lit_resinit import ResidualInit, apply_, check_identity, fold_, make_plan, observe

WIDTH = 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return x + self.f(x)


class Regression(pl.LightningModule):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def training_step(self, batch, batch_idx):
        x, y = batch
        return mse_loss(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def loader():
    return DataLoader(TensorDataset(torch.randn(16, WIDTH), torch.randn(16, WIDTH)), batch_size=8)


def trainer(callback, **more):
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(accelerator="cpu", max_epochs=1, callbacks=[callback], **quiet, **more)


def test_two_streams_that_read_each_other_inside_a_parent_are_named_and_closed():
    class Cross(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

        def forward(self, u, v):
            return u + self.f(torch.cat([u, v], -1))

    class Streams(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.ModuleList([Cross(), Cross()])
            self.b = nn.ModuleList([Cross(), Cross()])
            self.head = nn.Linear(2 * WIDTH, 2)

        def forward(self, u, v):
            for p, q in zip(self.a, self.b, strict=True):
                u, v = p(u, v), q(v, u)
            return self.head(torch.cat([u, v], -1))

    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Streams()

        def forward(self, u, v):
            return self.net(u, v)

    model, inputs = Parent(), (torch.randn(4, WIDTH), torch.randn(4, WIDTH))
    plan = make_plan(model, inputs)
    assert sorted(b.name for b in plan.branches) == ["net.a.0", "net.a.1", "net.b.0", "net.b.1"]
    assert check_identity(apply_(model, plan), plan, inputs).ok


def test_a_network_fed_by_noise_does_not_look_trained():
    class Generator(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.blocks = nn.Linear(WIDTH, WIDTH), nn.Sequential(Block(), Block())

        def forward(self, x):
            return self.blocks(self.stem(torch.randn(len(x), WIDTH)))

    model, x = Generator(), torch.randn(4, WIDTH)
    plan = make_plan(model, x)
    assert len(plan) == 2
    apply_(model, plan)


def test_a_second_fit_proves_no_identity_any_more():
    callback, module = ResidualInit(), Regression(nn.Sequential(Block(), Block()))
    trainer(callback).fit(module, loader())
    assert callback.identity_report.ok
    again = ResidualInit()
    trainer(again).fit(module, loader())
    assert again.identity_report is None
    assert again.gradient_report.ok


def test_a_summand_that_arrives_closed_keeps_its_gate():
    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH, bias=False)
            nn.init.zeros_(self.b.weight)

        def forward(self, x):
            return self.w(x) + self.b(self.a(x))

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), Adapted())

        def forward(self, x):
            return x + self.f(x)

    model, x = nn.Sequential(Outer(), nn.Linear(WIDTH, 2)), torch.randn(8, WIDTH)
    plan = make_plan(model, x)
    apply_(model, plan)
    with observe(model, plan, x) as seen:
        model(x).square().mean().backward()
    assert seen.identity.ok
    assert seen.gradients.ok, str(seen.gradients)


def test_two_exploding_gates_are_named_without_a_healthy_one_beside_them():
    class Normalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.f, self.g = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(1))

        def forward(self, x):
            return x + normalize(self.g * self.f(x), dim=-1)

    model, x = nn.Sequential(Normalised(), Normalised()), torch.randn(8, WIDTH)
    plan = make_plan(model, x, scheme="observe")
    with observe(model, plan, x) as seen:
        model(x).square().mean().backward()
    assert {g.status for g in seen.gradients.gates.values()} == {"exploding"}


def test_two_outputs_of_one_module_get_a_gate_each_and_fold():
    class Joint(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)

        def forward(self, u, v):
            both = torch.cat([u, v], -1)
            return self.left(both), self.right(both)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.joint, self.head = Joint(), nn.Linear(2 * WIDTH, 2)

        def forward(self, u, v):
            a, b = self.joint(u, v)
            return self.head(torch.cat([u + a, v + b], -1))

    model, inputs = Net(), (torch.randn(4, WIDTH), torch.randn(4, WIDTH))
    plan = make_plan(model, inputs, scheme="insert")
    names = {g.parameter for g in plan.gates}
    assert len(names) == 2
    assert check_identity(apply_(model, plan), plan, inputs).ok
    before = model(*inputs)
    assert set(fold_(model)) == names
    assert torch.allclose(model(*inputs), before)


@pytest.mark.parametrize("draw", [lambda: __import__("random").random(), lambda: torch.rand(()).item()])
def test_layers_that_are_skipped_at_random_are_all_planned(draw):
    class Dropped(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block() for _ in range(3)])

        def forward(self, x):
            for block in self.blocks:
                if draw() > 0.3:
                    x = block(x)
            return x

    assert len(make_plan(Dropped(), torch.randn(4, WIDTH))) == 3


def test_a_failed_setup_gives_the_loader_back():
    class Failing(Regression):
        def train_dataloader(self):
            return loader()

        def training_step(self, batch, batch_idx):
            raise KeyError("mine")

    module = Failing(nn.Sequential(Block()))
    with pytest.raises(Exception, match="mine"):
        trainer(ResidualInit()).fit(module)
    assert "train_dataloader" not in vars(module)


def test_the_operand_of_a_merge_that_is_an_index_is_no_factor():
    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.expert = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            chosen = (x[:, 0] > -100.0).nonzero().squeeze(-1)
            out = torch.zeros_like(x).index_add(0, chosen, self.expert(x[chosen]))
            return x + out

    model, x = nn.Sequential(Routed(), Routed()), torch.randn(5, WIDTH)
    plan = make_plan(model, x)
    assert check_identity(apply_(model, plan), plan, x).ok


DEEP = """
from networks import WIDTH, Classifier, Plain, Scaled, data, stack, trainer
from lit_resinit import GradientError, ResidualInit


class Dead(Scaled):
    def forward(self, x):
        return x + (self.scale * self.f(x)).relu()


fit = trainer("{root}", ResidualInit(), max_steps=4, max_epochs=-1)
fit.fit(Classifier(stack(Plain, 700)), data(WIDTH))
print("trained", fit.global_step)
try:
    trainer("{root}", ResidualInit("observe")).fit(Classifier(stack(lambda: Dead(value=0.0), 700)), data(WIDTH))
except GradientError:
    print("raised")
"""


def test_the_graph_of_a_deep_network_goes_piece_by_piece(tmp_path: Path) -> None:
    import resource

    def small_stack() -> None:
        resource.setrlimit(resource.RLIMIT_STACK, (512 * 1024, 512 * 1024))

    script = [sys.executable, "-c", DEEP.format(root=tmp_path)]
    here = Path(__file__).parent
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(here), str(here.parent)])}
    done = subprocess.run(
        script, env=environment, preexec_fn=small_stack, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "trained 4" in done.stdout
    assert "raised" in done.stdout

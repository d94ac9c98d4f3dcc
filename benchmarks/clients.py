"""Published packages with the callback, through their own interface: train, save, load, predict, compare.

Run as ``python -m benchmarks.clients --environments DIR [--only NAME] [--save FILE]``. ``DIR`` holds one virtual
environment for each package, made from its file in ``benchmarks/clients/`` (``python -m venv DIR/NAME`` and
``DIR/NAME/bin/pip install -r benchmarks/clients/NAME.txt``). Each model is trained for a few steps with
``ResidualInit()`` handed to the package the way its own documentation shows, then saved and loaded by the package.
The number of branches is compared with the number of residual additions in the package's source. A model that is
refused, or whose gradients are judged dead, is listed with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import io
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
STEPS = 6
Row = dict[str, Any]


def ours(**options: Any) -> Any:
    from lit_resinit import ResidualInit

    return ResidualInit(table=False, **options)


def found_in(callbacks: list[Any]) -> Any:
    """The callback that really ran, for some packages train copies; None without one."""
    return next((c for c in callbacks if type(c).__name__ == "ResidualInit"), None)


def row(model: str, true: int | None, run: Callable[[list[Any]], tuple[Any, float]]) -> Row:
    """One model: its branches, both verdicts, and how far predictions moved by saving and loading, with and without."""
    started = time.perf_counter()
    try:
        _, alone = run([])
        callback, moved = run([ours()])
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        return {"model": model, "true": true, "found": None, "says": said, "seconds": time.perf_counter() - started}
    good = callback.identity_report.ok and callback.gradient_report.ok
    return {
        "model": model,
        "true": true,
        "found": len(callback.plan),
        "good": bool(good),
        "moved": moved,
        "alone": alone,
        "seconds": time.perf_counter() - started,
    }


# -------------------------------------------------------------------- the packages


def neuralforecast() -> Iterator[Row]:
    import numpy as np
    import pandas as pd
    from neuralforecast import NeuralForecast, models

    days = pd.date_range("2020", periods=120)
    frame = pd.DataFrame({"unique_id": "a", "ds": days, "y": np.sin(np.arange(120) / 7) + np.arange(120) / 100})
    common = {"h": 8, "input_size": 24, "max_steps": STEPS, "random_seed": 1, "logger": False, **QUIET}

    def run(kind: str, options: dict[str, Any], own: list[Any]) -> tuple[Any, float]:
        model = getattr(models, kind)(**common, **options, callbacks=own)
        forecast = NeuralForecast([model], freq="D")
        forecast.fit(frame)
        with tempfile.TemporaryDirectory() as folder:
            before = forecast.predict()
            forecast.save(folder, overwrite=True, save_dataset=True)
            after = NeuralForecast.load(folder).predict()
        (name,) = [c for c in before.columns if c not in ("unique_id", "ds")]
        callback = found_in(forecast.models[0].trainer_kwargs["callbacks"])
        return callback, float(np.abs(before[name].to_numpy() - after[name].to_numpy()).max())

    small = {"hidden_size": 16, "n_heads": 2, "encoder_layers": 2, "patch_len": 4, "stride": 4}
    yield row("PatchTST", 4, lambda own: run("PatchTST", small, own))
    yield row("NHITS", 2, lambda own: run("NHITS", {}, own))
    yield row("TSMixer", 4, lambda own: run("TSMixer", {"n_series": 1, "n_block": 2}, own))


def pytorch_forecasting() -> Iterator[Row]:
    import numpy as np
    import pandas as pd
    import torch
    from pytorch_forecasting import NBeats, TimeSeriesDataSet

    frame = pd.DataFrame({"t": np.arange(120), "g": "a", "y": np.sin(np.arange(120) / 7)})
    options = {"time_idx": "t", "target": "y", "group_ids": ["g"], "max_encoder_length": 16, "max_prediction_length": 4}
    data = TimeSeriesDataSet(frame, **options, time_varying_unknown_reals=["y"])

    def run(own: list[Any]) -> tuple[Any, float]:
        model = NBeats.from_dataset(data, widths=[16, 32])
        trainer = lightning().Trainer(max_steps=STEPS, callbacks=own, logger=False, **QUIET)
        trainer.fit(model, data.to_dataloader(batch_size=16))
        with tempfile.TemporaryDirectory() as folder:
            trainer.save_checkpoint(f"{folder}/run.ckpt")
            loaded = NBeats.load_from_checkpoint(f"{folder}/run.ckpt").eval()
        batch, _ = next(iter(data.to_dataloader(train=False, batch_size=16)))
        with torch.no_grad():
            moved = model.eval()(batch)["prediction"] - loaded(batch)["prediction"]
        return found_in(trainer.callbacks), float(moved.abs().max())

    yield row("NBeats", 6, run)


def darts() -> Iterator[Row]:
    import numpy as np
    from darts import TimeSeries
    from darts import models as of

    series = TimeSeries.from_values(np.sin(np.arange(150, dtype=np.float32) / 7))

    def run(kind: str, options: dict[str, Any], own: list[Any]) -> tuple[Any, float]:
        given = {"callbacks": own, "accelerator": "cpu", "enable_progress_bar": False, "logger": False}
        common = {"input_chunk_length": 16, "output_chunk_length": 4, "n_epochs": 1, "batch_size": 32}
        model = getattr(of, kind)(**common, **options, pl_trainer_kwargs=given, random_state=1)
        model.fit(series)
        with tempfile.TemporaryDirectory() as folder:
            model.save(f"{folder}/model.pt")
            loaded = getattr(of, kind).load(f"{folder}/model.pt", trusted=True)
        moved = model.predict(4, series=series).values() - loaded.predict(4, series=series).values()
        return found_in(own), float(np.abs(moved).max())

    small = {"d_model": 16, "nhead": 2, "num_encoder_layers": 2, "num_decoder_layers": 1, "dim_feedforward": 16}
    yield row("TransformerModel", 7, lambda own: run("TransformerModel", small, own))
    yield row(
        "TSMixerModel", None, lambda own: run("TSMixerModel", {"hidden_size": 8, "ff_size": 8, "num_blocks": 2}, own)
    )
    yield row(
        "NBEATSModel", 2, lambda own: run("NBEATSModel", {"num_stacks": 1, "num_blocks": 2, "layer_widths": 16}, own)
    )


def lightly() -> Iterator[Row]:
    import torch
    import torchvision
    from lightly.loss import NTXentLoss
    from lightly.models.modules import SimCLRProjectionHead
    from torch import nn

    pl = lightning()

    class SimCLR(pl.LightningModule):
        """As in the package's documentation."""

        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Sequential(*list(torchvision.models.resnet18().children())[:-1])
            self.projection_head, self.criterion = SimCLRProjectionHead(512, 32, 16), NTXentLoss()

        def forward(self, x: Any) -> Any:
            return self.projection_head(self.backbone(x).flatten(start_dim=1))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.criterion(self(batch[0]), self(batch[1]))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    def run(own: list[Any]) -> tuple[Any, float]:
        model, views = SimCLR(), [torch.randn(8, 3, 32, 32) for _ in range(2)]
        trainer = pl.Trainer(max_steps=STEPS, callbacks=own, logger=False, **QUIET)
        trainer.fit(model, torch.utils.data.DataLoader([views] * STEPS, batch_size=None))
        with tempfile.TemporaryDirectory() as folder:
            torch.save(model.backbone.state_dict(), f"{folder}/backbone.pt")
            plain = nn.Sequential(*list(torchvision.models.resnet18().children())[:-1])
            plain.load_state_dict(torch.load(f"{folder}/backbone.pt"))
        with torch.no_grad():
            moved = model.backbone.eval()(views[0]) - plain.eval()(views[0])
        return found_in(trainer.callbacks), float(moved.abs().max())

    # two views go through eight blocks each
    yield row("SimCLR, ResNet-18", 16, run)


def chemprop() -> Iterator[Row]:
    import torch
    from chemprop import data, models, nn

    points = [data.MoleculeDatapoint.from_smi(s, [float(len(s))]) for s in ("CCO", "CCN", "CCC", "c1ccccc1") * 4]
    loader = data.build_dataloader(data.MoleculeDataset(points), batch_size=8)

    def run(own: list[Any]) -> tuple[Any, float]:
        model = models.MPNN(nn.BondMessagePassing(d_h=16), nn.MeanAggregation(), nn.RegressionFFN(input_dim=16))
        trainer = lightning().Trainer(max_steps=STEPS, callbacks=own, logger=False, **QUIET)
        trainer.fit(model, loader)
        with tempfile.TemporaryDirectory() as folder:
            models.save_model(f"{folder}/model.pt", model)
            loaded = models.load_model(f"{folder}/model.pt").eval()
        batch = next(iter(data.build_dataloader(data.MoleculeDataset(points), batch_size=8, shuffle=False)))
        with torch.no_grad():
            moved = model.eval()(batch.bmg) - loaded(batch.bmg)
        return found_in(trainer.callbacks), float(moved.abs().max())

    yield row("MPNN, bonds", 2, run)


def pytorch_tabular() -> Iterator[Row]:
    import numpy as np
    import pandas as pd
    from pytorch_tabular import TabularModel
    from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
    from pytorch_tabular.models import FTTransformerConfig

    draw = np.random.default_rng(0)
    frame = pd.DataFrame(draw.normal(size=(64, 4)), columns=list("abcd"))
    frame["y"] = (frame["a"] > 0).astype(int)

    def run(own: list[Any]) -> tuple[Any, float]:
        columns = DataConfig(target=["y"], continuous_cols=list("abcd"))
        network = FTTransformerConfig(task="classification", num_heads=2, num_attn_blocks=2, input_embed_dim=8)
        with tempfile.TemporaryDirectory() as folder:
            how = TrainerConfig(max_epochs=1, batch_size=16, accelerator="cpu", progress_bar="none", load_best=True)
            how.checkpoints_path = folder
            parts = {"data_config": columns, "model_config": network, "trainer_config": how}
            model = TabularModel(**parts, optimizer_config=OptimizerConfig(), verbose=False)
            model.fit(train=frame, validation=frame, callbacks=own)
            model.save_model(f"{folder}/saved")
            loaded = TabularModel.load_model(f"{folder}/saved")
            before, after = model.predict(frame), loaded.predict(frame)
        moved = before.select_dtypes("float") - after.select_dtypes("float")
        return found_in(model.trainer.callbacks), float(np.abs(moved.to_numpy()).max())

    yield row("FTTransformer", 4, run)


PACKAGES: dict[str, Callable[[], Iterator[Row]]] = {
    "neuralforecast": neuralforecast,
    "pytorch-forecasting": pytorch_forecasting,
    "darts": darts,
    "lightly": lightly,
    "chemprop": chemprop,
    "pytorch-tabular": pytorch_tabular,
}
QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def lightning() -> Any:
    import lightning.pytorch as pl

    return pl


# -------------------------------------------------------------------- driver


def play(name: str) -> None:
    """In the package's own environment: print a row for each model."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with contextlib.redirect_stdout(io.StringIO()):
        rows = list(PACKAGES[name]())
    versions = {p: importlib.metadata.version(p) for p in (name, "torch", "lightning")}
    print("ROWS" + json.dumps({"versions": versions, "rows": rows}))


def judge(found: Row) -> str:
    """What a row says, in a few words."""
    if found["found"] is None:
        return "refused: " + " ".join(found["says"].split())[:300]
    moved = found["moved"] > max(1e-4, 2 * found["alone"])
    right = found["found"] == found["true"] and found["good"] and not moved  # None: not counted in the source yet
    return "right" if right else "WRONG"


def table(results: dict[str, Any]) -> list[str]:
    lines = [
        "| package | model | additions in its source | found | moved by saving and loading, without | with | verdict |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for name, result in results.items():
        if isinstance(result, str):
            lines.append(f"| {name} | - | - | - | - | - | not run: {result} |")
            continue
        label = f"{name} {result['versions'][name]}"
        for found in result["rows"]:
            number, moved = found["found"], found.get("moved")
            cells = ["-" if number is None else str(number)]
            cells += ["-" if moved is None else f"{m:.1e}" for m in (found.get("alone"), moved)]
            true = "not counted" if found["true"] is None else found["true"]
            lines.append(f"| {label} | {found['model']} | {true} | {' | '.join(cells)} | {judge(found)} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environments", type=Path, help="folder of virtual environments, by package")
    parser.add_argument("--only", choices=PACKAGES)
    parser.add_argument("--play", choices=PACKAGES, help="run one package here, in this environment")
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    if options.play:
        play(options.play)
        return 0
    results: dict[str, Any] = {}
    for name in [options.only] if options.only else PACKAGES:
        python = options.environments / name / "bin" / "python"
        command = [str(python), "-m", "benchmarks.clients", "--play", name]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        answer = [line for line in done.stdout.splitlines() if line.startswith("ROWS")]
        last = (done.stderr.strip().splitlines() or ["nothing printed"])[-1]
        results[name] = json.loads(answer[0].removeprefix("ROWS")) if answer else last[:200]
        print("\n".join(table({name: results[name]})[2:]), flush=True)
    if options.save:
        options.save.write_text("\n".join(table(results)) + "\n")
    return sum("WRONG" in line for line in table(results))


if __name__ == "__main__":
    sys.exit(main())

"""One training step before an engine packs the parameters: the only one in which gates can be read there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from lit_resinit.errors import ResInitError, warn
from lit_resinit.graph.keep import keep_rng, keep_state
from lit_resinit.judge.trial import Finding, Trial
from lit_resinit.trainer.inputs import apart, candidates

_REST = (
    "Sleeping gates are not followed, nothing is recorded, and checkpoints keep the inserted scalars, which "
    "`python -m lit_resinit fold` folds. With ModelParallelStrategy (FSDP2) all of this works."
)


def judge_before(
    trainer: Any,
    module: nn.Module,
    trial: Trial,
    example_inputs: Any,
    act: Callable[[Iterable[Finding]], None],
    engine: str,
) -> None:
    """Prove the identity and judge the gradients in a step of this package's own, which leaves nothing behind.

    Args:
        trainer: The Trainer, which has not built its engine yet.
        module: The module, its gates closed.
        trial: The trial of the run.
        example_inputs: Of the callback.
        act: What is done with findings.
        engine: The strategy's name.
    """
    tried: list[str] = []
    try:
        for what, inputs, run in candidates(trainer, module, example_inputs, tried):
            found = None
            with apart(trainer, module), keep_rng(), keep_state(module):
                try:
                    found = _step(module, trial, inputs, run)
                except ResInitError:
                    raise
                except Exception as error:
                    tried.append(f"{what}: {type(error).__name__}: {error}")
                finally:
                    trial.stop()
            if found is not None:
                act(found)
                asleep = (
                    []
                    if trial.gradients is None
                    else [g for g in trial.gradients.gates.values() if g.status == "asleep"]
                )
                waits = f"; {len(asleep)} gates sleep" if asleep else ""
                warn(
                    f"under {engine} the gates were closed and judged on one batch in `setup`, before the engine packs "
                    f"them{waits}. {_REST}"
                )
                return
    finally:
        trial.close()
    warn(
        f"under {engine} the gates were closed, and neither their identity nor their gradients could be judged: tried "
        f"one step in `setup` on {'; '.join(tried) or 'nothing'}. Check them on one device: `Trainer(devices=1, "
        f"fast_dev_run=True, callbacks=[ResidualInit()])`. {_REST}"
    )


def _step(module: nn.Module, trial: Trial, inputs: Any, run: Any) -> list[Finding]:
    module.train()
    trial.before_forward(inputs)
    out = run(module, inputs, {})
    loss = out.get("loss") if isinstance(out, dict) else out
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise TypeError("the step returned no loss")
    found = trial.after_forward(loss)
    if any(f.error is not None for f in found):
        return found
    loss.backward()
    return [*found, *trial.after_backward()]

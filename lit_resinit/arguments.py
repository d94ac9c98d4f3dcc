"""What stands on the command line, as values: inputs, weights of a file, and messages that speak of flags."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pickle
import re
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lit_resinit.errors import ResInitError
from lit_resinit.words import together

Kind = Literal["float", "int", "bool", "mask", "ones"]
_EXAMPLES = "2,3,64,64 or input_ids=2,16:int:0-999 or attention_mask=2,16:ones"
_SPEC = re.compile(
    r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<sizes>\d+(?:,\d+)*)(?::(?P<kind>float|int|bool|mask|ones))?"
    r"(?::(?P<low>-?[\d.]+)-(?P<high>-?[\d.]+))?"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Input:
    """A random input, as ``--input`` describes it.

    Args:
        shape: Its sizes.
        kind: ``float`` numbers, ``int``, ``bool``, a ``mask`` that is true everywhere, or integer ``ones``.
        name: Name of the argument; empty for a positional one.
        bounds: Lowest and highest number; None for the usual ones.
    """

    shape: tuple[int, ...]
    kind: Kind = "float"
    name: str = ""
    bounds: tuple[float, float] | None = None

    def draw(self) -> Tensor:
        """The tensor: normal numbers or uniform ones between bounds; integers from 0 to 9, or between bounds."""
        if self.kind == "float":
            if self.bounds is None:
                return torch.randn(self.shape)
            low, high = self.bounds
            return low + (high - low) * torch.rand(self.shape)
        if self.kind == "int":
            low, high = self.bounds or (0, 9)
            return torch.randint(int(low), int(high) + 1, self.shape)
        if self.kind == "bool":
            return torch.rand(self.shape) < 0.5
        return torch.ones(self.shape, dtype=torch.bool if self.kind == "mask" else torch.int64)


def as_input(text: str) -> Input:
    """Read ``[NAME=]SIZES[:KIND[:LOW-HIGH]]``.

    Raises:
        argparse.ArgumentTypeError: If the text is something else, showing what is expected.

    Example:
        >>> as_input("input_ids=2,16:int:0-999")
        Input(shape=(2, 16), kind='int', name='input_ids', bounds=(0.0, 999.0))
    """
    found = _SPEC.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"expected positive sizes such as {_EXAMPLES} but got {text!r}")
    kind: Any = found["kind"] or "float"
    shape = tuple(int(size) for size in found["sizes"].split(","))
    try:
        bounds = None if found["low"] is None else (float(found["low"]), float(found["high"]))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected two numbers such as 0-999 but got {text!r}") from None
    if min(shape) < 1:
        raise argparse.ArgumentTypeError(f"expected positive sizes such as {_EXAMPLES} but got {text!r}")
    if bounds is not None and (kind not in ("float", "int") or bounds[0] > bounds[1]):
        raise argparse.ArgumentTypeError(
            f"expected a range for float or int, its lower end first, such as 2,16:int:0-999 but got {text!r}"
        )
    return Input(shape, kind, found["name"] or "", bounds)


def draw_inputs(inputs: list[Input]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Positional inputs and keyword inputs, in the order of the command line."""
    drawn = [(i.name, i.draw()) for i in inputs]
    return tuple(t for name, t in drawn if not name), {name: t for name, t in drawn if name}


def as_json_object(text: str) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        argparse.ArgumentTypeError: If the text is something else.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'expected a JSON object such as {{"num_classes": 10}} but got {text!r}')
    return value


# -------------------------------------------------------------------- weights


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a state dict, or the one in a checkpoint, into a model.

    Where a checkpoint's module holds the model under a name (``net.``), that name is left out.

    Raises:
        FileNotFoundError: If there is no such file.
        ResInitError: If it holds no state dict, or not that of this model.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, LookupError, ValueError) as error:
        raise ResInitError(
            f"reading {path}: expected a state dict, or a checkpoint of plain types and tensors with one in it, found "
            f"another kind of file ({type(error).__name__})."
        ) from error
    state = _state_dict(found)
    if state is None:
        raise ResInitError(
            f"reading {path}: expected a state dict, or a checkpoint with one under 'state_dict' or 'model', found "
            f"{sorted(map(str, found))[:5] if isinstance(found, dict) else type(found).__name__}."
        )
    state = _below(state, set(model.state_dict()))
    missing, unexpected = model.load_state_dict(state, strict=False)
    if missing or unexpected:
        parts = [
            f"{len(n)} {word} ({together(n)})" for n, word in ((missing, "missing"), (unexpected, "too many")) if n
        ]
        raise ResInitError(
            f"loading {path} into {type(model).__name__}: expected its {len(model.state_dict())} names, found "
            f"{' and '.join(parts)}. Name the callable that builds this network, with its `--arguments`."
        )


def _state_dict(found: Any) -> dict[str, Tensor] | None:
    for value in (found, *(found.get(key) for key in ("state_dict", "model") if isinstance(found, dict))):
        if isinstance(value, dict) and value and all(isinstance(v, Tensor) for v in value.values()):
            return value
    return None


def _below(state: dict[str, Tensor], wanted: set[str]) -> dict[str, Tensor]:
    """The state of that part whose names are wanted: all of it, or what is below one name."""
    prefixes = {""} | {name[: m.end()] for name in state for m in re.finditer(r"\.", name)}
    best = max(sorted(prefixes, key=len), key=lambda p: sum(n.startswith(p) and n[len(p) :] in wanted for n in state))
    return {n[len(best) :]: t for n, t in state.items() if n.startswith(best)}


# -------------------------------------------------------------------- messages

_FLAGS = (
    (r"`make_plan\(model, args, kwargs\)`, or `ResidualInit\(example_inputs=\.\.\.\)`", "`--input`"),
    (r"`example_inputs`", "`--input`"),
    (r"`overwrite_trained=True`", "`--overwrite-trained`"),
    (r"`(include|exclude)`", r"`--\1`"),
    (r"scheme='(\w+)'", r"`--scheme \1`"),
    (
        r"To watch an open network as it is, pass identity='ignore' or exclude those branches\.",
        "An open network is no fault where it is meant: `--exclude` leaves branches out.",
    ),
)


def in_flags(text: str) -> str:
    """A message of the package as one of the command line: flags in place of Python's arguments.

    Example:
        >>> in_flags("Use scheme='auto', or leave the branch out with `exclude`.")
        'Use `--scheme auto`, or leave the branch out with `--exclude`.'
    """
    for pattern, flag in _FLAGS:
        text = re.sub(pattern, flag, text)
    return text

"""A causal language model of transformers: from a directory, with LoRA adapters if wanted, and its logits.

Responsible for the network: reading it, freezing it under adapters, and computing logits where they are needed. The
architecture, its file names and its activation checkpointing come from transformers, the adapters from peft.

Two ideas. Documents share rows only if the architecture keeps them apart, which no list can know: so a small forward
tests it, and also whether the model is causal at all. And the logits of all tokens are many times larger than the rest
of a model, so the vocabulary head gets the hidden states of predicted tokens alone.
"""

from __future__ import annotations

import importlib
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hetseq import ConfigError, DataError
from hetseq.tasks.hf_causal_lm.files import has_weights

logger = logging.getLogger(__name__)

#: of a log record that only matters where a run begins with these weights
_ABOUT_START = {"is_about_start": True}
_INSTALL = "pip install 'hetseq[hf]'"
_RATE = re.compile(r"(drop|dropout)(_prob|_rate|_p)?$|_pdrop$")
_HUB_CACHE = re.compile(r"models--([^/]+)--([^/]+)/snapshots/")
#: lengths of the documents in the rows of the test, and the tolerances of logits, in units in the last place
_TEST_LENGTHS = (5, 7)
_SAME_SHAPE_UNITS, _OTHER_SHAPE_UNITS = 4, 16


@dataclass(frozen=True)
class Lora:
    """The adapters (Hu et al. 2021, arXiv 2106.09685): rank, alpha, and the modules; no targets: peft's own choice."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = ()


@dataclass(frozen=True)
class Setting:
    """How a model is built. `dropout` replaces all rates of its configuration, and is that of the adapters."""

    dtype: torch.dtype = torch.float32
    dropout: float | None = None
    lora: Lora | None = None
    checkpoints_activations: bool = False


def build(folder: Path, setting: Setting) -> Any:
    """The model of a directory, in training mode on the CPU; a PeftModel if `setting` has LoRA.

    Without weights in the directory they are drawn from torch's generator. Under adapters the weights of a directory
    are frozen, have the type `setting.dtype`, and are left out of `state_dict()`; drawn ones are frozen and stay there,
    because no other machine could draw the same bits. Raises DataError and ConfigError.
    """
    config = read_config(folder)
    if setting.dropout is not None:
        _set_dropout(config, setting.dropout, folder)
    is_read = has_weights(folder)
    model = _read(folder, config, setting.dtype) if is_read else _draw(folder, config, setting)
    model.config.use_cache = False
    if setting.lora is not None:
        model = _with_adapters(model, folder, setting)
        if is_read:
            model.register_state_dict_post_hook(_drop_base)
    if setting.checkpoints_activations:
        _checkpoint_activations(model, folder)
    return model.train()


def read_config(folder: Path) -> Any:
    """The configuration of a directory. Raises DataError unless this transformers has a causal model for it."""
    transformers = library("transformers")
    place = folder / "config.json"
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of an unknown model_type, a wrong value, code of its own
        raise DataError(
            f"{place}: transformers {transformers.__version__} does not know this model ({_first_line(error)}): install"
            " a transformers that does, or name another model"
        ) from error
    if getattr(config, "quantization_config", None) is not None:
        raise DataError(f"{place} has a quantization_config: give the model with weights of 16 or 32 bits")
    if type(config) not in transformers.AutoModelForCausalLM._model_mapping:
        raise DataError(
            f"{place} has model_type {config.model_type}, for which transformers {transformers.__version__} has no"
            " causal language model: expected one such as gpt2, llama, qwen2 or gemma"
        )
    return config


def most_positions(config: Any) -> int | None:
    """The longest row that a model takes, in tokens; None: no limit is known."""
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def vocab_size(config: Any) -> int:
    """The number of token ids of a model."""
    return int(config.get_text_config().vocab_size)


def hub_name(folder: Path) -> str:
    """How others name the model of a directory: by its repository if the cache of the Hub holds it, else the path."""
    found = _HUB_CACHE.search(f"{folder.absolute()}/")
    return f"{found[1]}/{found[2]}" if found else str(folder)


def library(name: str) -> Any:
    """The module `name` of transformers or peft. Raises ConfigError where the package is absent."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"--task hf_causal_lm needs {name.partition('.')[0]}, which cannot be imported ({error}): {_INSTALL}"
        ) from error


# Logits


class PredictedOnly:
    """Gives the vocabulary head of a model the hidden states of predicted tokens alone, whatever the architecture.

    One for each model. A forward of the model outside `logits`, as in `generate`, is left as it is.
    """

    def __init__(self, model: Any) -> None:
        self._places: Tensor | None = None
        self._shape: tuple[int, ...] = ()
        model.get_output_embeddings().register_forward_pre_hook(self._select)

    def logits(self, model: Any, input_ids: Tensor, position_ids: Tensor | None, places: Tensor) -> Tensor:
        """The logits (m, vocabulary) of the model at `places` (m,), row * L + column of input_ids (r, L).

        With position_ids (r, L) documents of a row are kept apart, where positions begin at 0 again.
        """
        self._places, self._shape = places, tuple(input_ids.shape)
        options = {} if position_ids is None else {"position_ids": position_ids}
        try:
            found: Tensor = model(input_ids=input_ids, use_cache=False, **options).logits
        finally:
            self._places = None
        if found.shape[:2] == input_ids.shape:  # a head that has not been called as a module of its own
            return found.flatten(0, 1).index_select(0, places)
        return found[0]

    def _select(self, _: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        hidden = arguments[0]
        if self._places is None or tuple(hidden.shape[:2]) != self._shape:
            return None
        return (hidden.flatten(0, 1).index_select(0, self._places)[None], *arguments[1:])


@torch.no_grad()
def keeps_documents_apart(model: Any, folder: Path) -> bool:
    """Whether documents that share a row, each with positions from 0, have the logits that they have alone.

    Two documents are computed in one row, once more with other tokens in the first one, and the second by itself.
    Draws no random numbers. Raises DataError if a token's logits depend on a later token.
    """
    was_training, size = model.training, vocab_size(model.config)
    first, second = _TEST_LENGTHS
    ids = (torch.arange(first + second) * 7 + 3) % size  # (T,)
    changed, later = ids.clone(), ids.clone()
    changed[:first] = (changed[:first] + 1) % size
    later[-1] = (later[-1] + 1) % size
    positions = torch.cat([torch.arange(first), torch.arange(second)])
    model.eval()
    try:
        plain = _logits(model, ids)
        if _differ(plain[:-1], _logits(model, later)[:-1], _SAME_SHAPE_UNITS):
            raise DataError(
                f"{folder / 'config.json'}: {type(model).__name__} is no causal language model, because a token's"
                " prediction changes with a later token: name a model that predicts each token from earlier ones"
            )
        try:
            packed, other = _logits(model, ids, positions), _logits(model, changed, positions)
        except (TypeError, ValueError, RuntimeError):  # a model without position_ids
            return False
        alone = _logits(model, ids[first:])
        return not _differ(packed[first:], other[first:], _SAME_SHAPE_UNITS) and not _differ(
            packed[first:], alone, _OTHER_SHAPE_UNITS
        )
    finally:
        model.train(was_training)


def _logits(model: Any, ids: Tensor, positions: Tensor | None = None) -> Tensor:
    """The logits of one row, (T, vocabulary)."""
    options = {} if positions is None else {"position_ids": positions[None]}
    found: Tensor = model(input_ids=ids[None], use_cache=False, **options).logits[0]
    return found


def _differ(one: Tensor, other: Tensor, units: float) -> bool:
    """Whether logits differ by more than `units` in the last place; some operations always have only 32 bits."""
    eps = max(torch.finfo(one.dtype).eps, torch.finfo(torch.float32).eps)
    one, other = one.double(), other.double()
    return not float((one - other).abs().max()) <= units * eps * float(one.abs().max())


# Reading


def _read(folder: Path, config: Any, dtype: torch.dtype) -> Any:
    """The pre-trained model: transformers copies one tensor after the other into its place."""
    transformers = library("transformers")
    transformers.utils.logging.disable_progress_bar()
    try:
        with _quiet("transformers"):
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
    except Exception as error:  # a damaged file, a missing one, a wrong shape
        raise DataError(
            f"{folder}: transformers cannot read its weights ({_first_line(error)}): copy the model again"
        ) from error
    missing = sorted(info["missing_keys"])
    if missing or info["mismatched_keys"]:
        found = f"lack {_few(missing)}" if missing else f"have another shape in {_few(info['mismatched_keys'])}"
        raise DataError(
            f"{folder}: its weights {found} of the {type(model).__name__} that config.json describes: are they the"
            " weights of another model?"
        )
    if info["unexpected_keys"]:
        logger.info("%s: not needed: %s", folder, _few(sorted(info["unexpected_keys"])), extra=_ABOUT_START)
    return model


def _draw(folder: Path, config: Any, setting: Setting) -> Any:
    transformers = library("transformers")
    what = "the base under the adapters is random, so every checkpoint holds it" if setting.lora else "it starts anew"
    logger.warning("%s has no weights: they are drawn from --seed; %s", folder, what, extra=_ABOUT_START)
    with _quiet("transformers"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=setting.dtype, trust_remote_code=False)


def _set_dropout(config: Any, rate: float, folder: Path) -> None:
    text = config.get_text_config()
    names = [name for name, value in text.to_dict().items() if _RATE.search(name) and isinstance(value, int | float)]
    for name in names:
        setattr(text, name, rate)
    if not names and rate:
        logger.info("%s: %s has no dropout of its own, which --dropout could change", folder, config.model_type)


def _checkpoint_activations(model: Any, folder: Path) -> None:
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise ConfigError(
            f"--activation-checkpointing: {type(model).__name__} of {folder} has none in transformers: leave it out"
        )
    # the second is how older versions call it
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    enable = next(getattr(model, name) for name in names if hasattr(model, name))
    enable({"use_reentrant": False})


# Adapters


def _with_adapters(model: Any, folder: Path, setting: Setting) -> Any:
    """The model under peft: all its own parameters frozen, adapters in 32 bits or more."""
    peft, lora = library("peft"), setting.lora
    assert lora is not None
    _check_targets(model, lora.targets)
    targets: Any = list(lora.targets) or None
    adapters = peft.LoraConfig(
        task_type="CAUSAL_LM", r=lora.rank, lora_alpha=lora.alpha, lora_dropout=setting.dropout or 0.0,
        target_modules="all-linear" if lora.targets == (_ALL,) else targets,
        base_model_name_or_path=hub_name(folder),
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*fan_in_fan_out")  # peft finds out by itself
        warnings.filterwarnings("ignore", category=FutureWarning)  # between the two libraries
        try:
            return peft.get_peft_model(model, adapters)
        except ValueError as error:
            if lora.targets:
                raise ConfigError(f"--lora-targets {','.join(lora.targets)}: {_first_line(error)}") from error
            raise ConfigError(
                f"peft {peft.__version__} has no default targets for {model.config.model_type}: give --lora-targets,"
                f" of {_few(_linear_names(model))}, or {_ALL}"
            ) from error


_ALL = "all-linear"  # peft's word for every linear module but the head


def _check_targets(model: Any, targets: Sequence[str]) -> None:
    """Raise ConfigError for a target that no module has; peft overlooks one beside others that exist."""
    names = [name for name, _ in model.named_modules()]
    for target in targets:
        if target != _ALL and not any(name == target or name.endswith(f".{target}") for name in names):
            raise ConfigError(
                f"--lora-targets {','.join(targets)}: no module of {type(model).__name__} is called {target}; it has"
                f" {_few(_linear_names(model))}, or give {_ALL}"
            )


def _linear_names(model: nn.Module) -> list[str]:
    kinds = {"Linear", "Conv1D"}
    names = [name.rpartition(".")[2] for name, module in model.named_modules() if type(module).__name__ in kinds]
    return list(dict.fromkeys(names))


def _drop_base(model: nn.Module, state: dict[str, Any], prefix: str, _: Mapping[str, Any]) -> None:
    """Leave frozen parameters out of `state_dict()`; buffers stay."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            state.pop(prefix + name, None)


# Helpers


class _quiet:
    """transformers' and peft's own words to the log, of which ours says what matters, are kept to errors."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def __enter__(self) -> None:
        self._level = self._logger.level
        self._logger.setLevel(logging.ERROR)

    def __exit__(self, *_: object) -> None:
        self._logger.setLevel(self._level)


def _first_line(error: BaseException) -> str:
    lines: Iterator[str] = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)[:200].rstrip(".:")


def _few(names: Sequence[Any], most: int = 6) -> str:
    shown = ", ".join(map(str, names[:most]))
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"

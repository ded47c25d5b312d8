"""A causal language model of transformers: from a directory, with LoRA adapters if wanted, and its logits.

Responsible for the network: reading it, freezing it under adapters, and computing logits where they are needed. The
architecture, its file names and its activation checkpointing come from transformers, the adapters from peft.

Two ideas. Documents share rows only if the architecture keeps them apart, which no list can know: so a small forward
tests it, and also whether the model is causal at all. And the logits of all tokens are many times larger than the rest
of a model, so the vocabulary head gets the hidden states of predicted tokens alone.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hetseq import ConfigError, DataError
from hetseq.tasks.hf_causal_lm.files import has_weights
from hetseq.tasks.hf_causal_lm.libraries import first_line, library, quiet_transformers

logger = logging.getLogger(__name__)

#: of a log record that only matters where a run begins with these weights
_ABOUT_START = {"is_about_start": True}
_RATE = re.compile(r"(?<!layer)(?<!layer_)(drop|dropout)(_prob|_rate|_p)?$|_pdrop$")  # layerdrop skips whole layers
_HUB_CACHE = re.compile(r"models--([^/]+)--([^/]+)/snapshots/")
_TEST_LENGTHS = (5, 7)  # of the documents in a row of the test
# Of a visible change, and counts as none. Measured in 32 and 16 bits: where documents or later tokens are seen at least
# 0.18, in 12 architectures; by rounding at most 5e-7, in 24 layers of experts.
_LARGEST_PART = 0.1
_FEW_WORDS = 64
_FACTOR = "lora_factor"
_ALL = "all-linear"  # peft's word for every linear module but the head


@dataclass(frozen=True)
class Lora:
    """The adapters (Hu et al. 2021, arXiv 2106.09685): rank, alpha, and the modules; no targets: peft's own choice."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = ()


@dataclass(frozen=True)
class Setting:
    """How a model is built. `dropout` replaces all rates of its configuration, and the adapters have the same."""

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
    if setting.dtype is torch.float64:
        config._experts_implementation = "eager"  # torch's grouped products have 32 bits at most
    is_read = has_weights(folder)
    model = _read(folder, config, setting.dtype) if is_read else _draw(folder, config, setting)
    model.config.use_cache = False
    if setting.lora is not None:
        model = _with_adapters(model, folder, setting)
        # the factor of the adapters is in no state_dict; as part of the base it is compared like the weights
        factor = torch.tensor(setting.lora.alpha / setting.lora.rank, dtype=torch.float64)
        model.register_parameter(_FACTOR, nn.Parameter(factor, requires_grad=False))
        model.register_state_dict_post_hook(_drop_base if is_read else _drop_factor)
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
            f"{place}: transformers {transformers.__version__} does not know this model ({first_line(error)}): install"
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


def architecture(model: Any) -> str:
    """The name of a model's class in transformers, under adapters too."""
    return type(model.get_base_model() if hasattr(model, "peft_config") else model).__name__


def hub_name(folder: Path) -> str:
    """How others name the model of a directory: by its repository if the cache of the Hub holds it, else the path."""
    found = _HUB_CACHE.search(f"{folder.absolute()}/")
    return f"{found[1]}/{found[2]}" if found else str(folder)


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

    Two documents are computed in one row, once more with another first one, and the second by itself. A difference
    counts if it is more than a part of the one that an earlier token makes, since logits may be large and alike. All
    rows have one length, so that equal tokens are computed alike, in 16 bits too. Draws no random numbers. Raises
    DataError if a token's logits depend on a later token.
    """
    was_training, size = model.training, vocab_size(model.config)
    first, second = _TEST_LENGTHS
    ids = (torch.arange(first + second) * 7 + 3) % size  # (T,)
    other, later, earlier, alone = ids.clone(), ids.clone(), ids.clone(), torch.zeros_like(ids)
    other[:first] = (other[:first] + 1) % size
    later[-1] = (later[-1] + 1) % size
    earlier[0] = (earlier[0] + 1) % size
    alone[:second] = ids[first:]
    positions = torch.cat([torch.arange(first), torch.arange(second)]).expand(2, -1)
    rows = torch.stack([ids, later, earlier, alone])
    model.eval()
    try:
        plain, after, before, single = _logits(model, rows)
        visible = _distance(plain[1:], before[1:])
        if not _distance(plain[:-1], after[:-1]) <= _LARGEST_PART * visible:
            raise DataError(
                f"{folder / 'config.json'}: {architecture(model)} is no causal language model, because a token's"
                " prediction changes with a later token: name a model that predicts each token from earlier ones"
            )
        try:
            packed, changed = _logits(model, torch.stack([ids, other]), positions)
        except (TypeError, ValueError, RuntimeError):  # a model without position_ids
            return False
        gaps = _distance(packed[first:], changed[first:]), _distance(packed[first:], single[:second])
        return all(gap <= _LARGEST_PART * visible for gap in gaps)
    finally:
        model.train(was_training)


def _logits(model: Any, ids: Tensor, positions: Tensor | None = None) -> Tensor:
    """The logits of rows, (r, T, vocabulary)."""
    options = {} if positions is None else {"position_ids": positions}
    found: Tensor = model(input_ids=ids, use_cache=False, **options).logits
    return found


def _distance(one: Tensor, other: Tensor) -> float:
    """The largest difference of logits (T, vocabulary), but for an offset of all of a token, which means nothing."""
    one, other = (logits.double() - logits.double().mean(-1, keepdim=True) for logits in (one, other))
    return float((one - other).abs().max())


def continuations(model: Any, input_ids: Tensor, attention_mask: Tensor, *, most: int) -> Tensor:
    """The likeliest `most` tokens after each row, until an end; (n, at most `most`) int64, padded with 0.

    Of the settings that the model was published with only its ends count: a penalty would be another model.
    """
    published = model.generation_config
    model.generation_config = library("transformers").GenerationConfig(
        max_new_tokens=most, do_sample=False, use_cache=True, pad_token_id=0,
        eos_token_id=getattr(published, "eos_token_id", None),
    )  # fmt: skip
    try:
        found: Tensor = model.generate(input_ids=input_ids, attention_mask=attention_mask)
    finally:
        model.generation_config = published
    return found[:, input_ids.shape[1] :]


def small_keeps_documents_apart(folder: Path, setting: Setting) -> bool:
    """`keeps_documents_apart` of a model with as few layers and words as show it, for one that has no numbers yet.

    False where transformers makes no such model. Draws no random numbers. Raises DataError.
    """
    config = read_config(folder)
    text = config.get_text_config()
    kinds = list(getattr(text, "layer_types", None) or ["all"])
    layers = next(number for number in range(1, len(kinds) + 1) if set(kinds[:number]) == set(kinds))
    with torch.random.fork_rng(devices=[]):
        try:
            text.num_hidden_layers, text.vocab_size, text.pad_token_id = layers, _FEW_WORDS, None
            if len(kinds) > 1:
                text.layer_types = kinds[:layers]
            with quiet_transformers():
                model = library("transformers").AutoModelForCausalLM.from_config(
                    config, dtype=setting.dtype, trust_remote_code=False
                )
        except Exception as error:  # of an architecture whose layers are no plain number
            logger.info("%s: no small model to try out (%s)", folder, first_line(error))
            return False
        return keeps_documents_apart(model, folder)


# Reading


def _read(folder: Path, config: Any, dtype: torch.dtype) -> Any:
    """The pre-trained model: transformers copies one tensor after the other into its place."""
    transformers = library("transformers")
    transformers.utils.logging.disable_progress_bar()
    try:
        with quiet_transformers():
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
            f"{folder}: transformers cannot read its weights ({first_line(error)}): copy the model again"
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
    with quiet_transformers():
        return transformers.AutoModelForCausalLM.from_config(config, dtype=setting.dtype, trust_remote_code=False)


def _set_dropout(config: Any, rate: float, folder: Path) -> None:
    if not _set_rates(config.get_text_config(), rate) and rate:
        logger.info("%s: %s has no dropout of its own, which --dropout could change", folder, config.model_type)


def _set_rates(config: Any, rate: float) -> bool:
    """Set all rates of a configuration and of the configurations in it; whether there are any."""
    names = [name for name, value in vars(config).items() if _RATE.search(name) and isinstance(value, int | float)]
    for name in names:
        try:
            setattr(config, name, rate)
        except Exception as error:  # a field that transformers takes for a whole number
            logger.warning("--dropout leaves %s at %s: %s", name, getattr(config, name), first_line(error))
    nested = [_set_rates(value, rate) for value in vars(config).values() if hasattr(value, "to_dict")]
    return bool(names) or any(nested)


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
    names = _few(_linear_names(model))  # peft may leave a part of its own modules behind
    adapters = peft.LoraConfig(
        task_type="CAUSAL_LM", r=lora.rank, lora_alpha=lora.alpha, lora_dropout=setting.dropout or 0.0,
        target_modules="all-linear" if lora.targets == (_ALL,) else targets,
        base_model_name_or_path=hub_name(folder),
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what the two libraries set by themselves
        try:
            adapted = peft.get_peft_model(model, adapters)
        except ValueError as error:
            if lora.targets:
                told = str(error)
                why = "it has adapters for linear modules and embeddings only" if "\n" in told else first_line(error)
                raise ConfigError(
                    f"--lora-targets {','.join(lora.targets)}: peft refuses them ({why}): give names of {names}"
                ) from error
            raise ConfigError(
                f"peft {peft.__version__} has no default targets for {model.config.model_type}: give --lora-targets,"
                f" of {names}, or {_ALL}"
            ) from error
    if lora.targets == (_ALL,) and (stacks := _stacks(adapted)):
        logger.info("no adapters on %s: they are no linear modules, but stacks of experts' matrices", _few(stacks, 2))
    return adapted


def _stacks(model: nn.Module) -> list[str]:
    """The names of parameters that hold the matrices of several experts, one behind the other."""
    return [
        f"{name}.{own}" for name, module in model.named_modules() if not isinstance(module, nn.Conv1d)
        for own, weight in module.named_parameters(recurse=False) if weight.ndim == 3
    ]  # fmt: skip


def _check_targets(model: Any, targets: Sequence[str]) -> None:
    """Raise ConfigError for a target that no module has; peft overlooks one beside others that exist."""
    names = [name for name, _ in model.named_modules()]
    if _ALL in targets and len(targets) > 1:
        raise ConfigError(f"--lora-targets {','.join(targets)}: {_ALL} goes alone; name all modules, or give {_ALL}")
    for target in targets:
        if target != _ALL and not any(name == target or name.endswith(f".{target}") for name in names):
            raise ConfigError(
                f"--lora-targets {','.join(targets)}: no module of {type(model).__name__} is called {target}; it has"
                f" {_few(_linear_names(model))}, or give {_ALL}"
            )


def _linear_names(model: Any) -> list[str]:
    kinds, head = {"Linear", "Conv1D"}, model.get_output_embeddings()
    found = [(name, module) for name, module in model.named_modules() if type(module).__name__ in kinds]
    names = [name.rpartition(".")[2] for name, module in found if module is not head]
    return list(dict.fromkeys(names))


def _drop_base(model: nn.Module, state: dict[str, Any], prefix: str, _: Mapping[str, Any]) -> None:
    """Leave frozen parameters out of `state_dict()`; buffers stay."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            state.pop(prefix + name, None)


def _drop_factor(_: nn.Module, state: dict[str, Any], prefix: str, __: Mapping[str, Any]) -> None:
    state.pop(prefix + _FACTOR, None)


# Helpers


def _few(names: Sequence[Any], most: int = 6) -> str:
    shown = ", ".join(map(str, names[:most]))
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"

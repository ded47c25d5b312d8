"""Reads and writes networks in Hugging Face directories: `config.json`, weights, and for BERT the vocabulary.

Responsible for mapping their tensors to ours, for tensors that may be missing or left over, and for directories that
`from_pretrained` opens; the arithmetic is in `tasks/bert/model.py` and `tasks/gpt/model.py`, file access in
`huggingface_files`. Does not need transformers. The one idea: every tensor is accounted for. An unknown tensor, a
missing one, or one of another shape is an error, because a network with one layer left at its initialisation trains
well enough to go unnoticed.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from hetseq import DataError
from hetseq.tasks.bert.heads import BertForSequenceClassification, BertForTokenClassification, Labelling
from hetseq.tasks.bert.model import TIED_NAMES, BertConfig, BertForPreTraining
from hetseq.tasks.bert.vocab import SPECIAL_TOKENS, read_vocab
from hetseq.tasks.gpt.model import GptConfig, GptForCausalLM, from_hugging_face, their_names, to_hugging_face
from hetseq.tasks.gpt.tokenizer import TOKENIZER, read_tokens
from hetseq.tasks.nn.huggingface_files import TensorFiles, tensor_files
from hetseq.tasks.nn.model_config import read_object

logger = logging.getLogger(__name__)

_CONFIG_NAME, _WEIGHTS_NAME, _VOCAB_NAME = "config.json", "model.safetensors", "vocab.txt"
_TOKENIZER_CONFIG_NAME = "tokenizer_config.json"

#: tensors in older files that are not weights: positions, the causal mask, frequencies
_NO_WEIGHTS = re.compile(r"(^|\.)(position_ids|attn\.(masked_)?bias|rotary_emb\.inv_freq)$")
#: heads of tasks that HetSeq does not have
_OTHER_HEADS = re.compile(r"^(classifier|qa_outputs|score)\.")


@dataclass(frozen=True)
class _Layout:
    """The tensors that a directory must hold for one model."""

    expected: Mapping[str, torch.Size]  # their name -> shape
    sources: Callable[[str], tuple[str, ...]]  # our name -> theirs
    convert: Callable[[str, tuple[Tensor, ...]], Tensor]  # our name, their tensors -> our tensor
    tied: Mapping[str, str]  # their second name of a tensor -> the first
    base: str  # prefix of all names except heads, absent in a file of the model without heads
    heads: Mapping[str, str]  # prefix of the names of a head -> its title
    unwanted: tuple[str, ...] = ()  # prefixes of tensors to ignore


def read_bert(
    folder: str | Path, *, heads_may_be_missing: bool = False, dropout: float | None = None
) -> BertForPreTraining:
    """The BERT in a directory, in fp32 and in training mode; `dropout` replaces both rates of its configuration.

    With `heads_may_be_missing`, for fine-tuning, the pooler and the pre-training heads may be absent: they keep their
    random initialisation, drawn from torch's generator, and the log names them. Heads of other tasks are skipped and
    named too.

    Raises DataError naming directory, file and tensor for another architecture, a tensor that is missing, left over or
    of another shape, and a file that is damaged or holds more than tensors.
    """
    folder = _existing(folder)
    config = BertConfig.from_json_file(folder / _CONFIG_NAME)
    model = BertForPreTraining(config if dropout is None else config.with_dropout(dropout))
    _fill_(model, folder, _bert_layout(model), heads_may_be_missing=heads_may_be_missing)
    return model


def read_encoder_(model: Labelling, folder: str | Path) -> None:
    """Copy the weights of a BERT in a directory, with any heads, into a model with a label head.

    The label head is copied if it has the same kind and the same labels. Otherwise it keeps its initialisation, as does
    a missing pooler; the log names them. Raises DataError as `read_bert`.
    """
    folder = _existing(folder)
    _fill_(model, folder, _labelling_layout(model, folder), heads_may_be_missing=True)


def read_gpt(folder: str | Path, *, heads_may_be_missing: bool = False, dropout: float | None = None) -> GptForCausalLM:
    """The GPT-2 or Llama in a directory, as `read_bert`; only an untied head may be missing.

    `dropout` replaces all rates of its configuration.
    """
    folder = _existing(folder)
    config = GptConfig.from_json_file(folder / _CONFIG_NAME)
    model = GptForCausalLM(config if dropout is None else config.with_dropout(dropout))
    _fill_(model, folder, _gpt_layout(model), heads_may_be_missing=heads_may_be_missing)
    return model


def write_pretrained(
    model: nn.Module,
    folder: str | Path,
    *,
    vocab_file: Path | None = None,
    is_lower_case: bool | None = None,
    tokenizer_file: Path | None = None,
) -> None:
    """Write a directory that `from_pretrained` of transformers opens, for a BERT or a causal language model.

    `folder` must be empty or not exist. With the vocabulary of a BERT, `AutoTokenizer` opens it too; it lower-cases
    words if `is_lower_case`, or if that is None, according to `looks_lower_case`. A causal language model has a
    `tokenizer_file`, tokenizer.json; a tokenizer_config.json beside it is copied, otherwise its special tokens come
    from the model's configuration. Raises DataError.
    """
    folder, config = Path(folder), _config_of(model)
    weights = _their_tensors(model)
    files: dict[str, bytes] = {}
    if vocab_file is not None:
        tokens = read_vocab(vocab_file)
        is_lower = looks_lower_case(tokens) if is_lower_case is None else is_lower_case
        files[_TOKENIZER_CONFIG_NAME] = _json({"tokenizer_class": "BertTokenizer", "do_lower_case": is_lower})
        files[_VOCAB_NAME] = "".join(f"{token}\n" for token in tokens).encode()
    if tokenizer_file is not None:
        files |= _tokenizer_files(tokenizer_file, config)
    files[_CONFIG_NAME] = _json(config)
    try:
        folder.mkdir(exist_ok=True)
        if any(folder.iterdir()):
            raise DataError(f"{folder} is not empty: expected a folder without files; nothing is overwritten")
        # save_file rejects views: a transposed one would be written in memory order
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / _WEIGHTS_NAME, _METADATA)
        for name, content in files.items():
            (folder / name).write_bytes(content)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{folder} cannot be written: {error}; make room, or name another folder") from error


#: of a log record that only matters where a run begins with these weights
_ABOUT_START = {"is_about_start": True}
#: transformers refuses a file without it
_METADATA = {"format": "pt"}


def _existing(folder: str | Path) -> Path:
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"{folder} is not a directory: expected a Hugging Face directory ({_CONFIG_NAME}, weights)")
    return folder


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=2).encode() + b"\n"


def looks_lower_case(tokens: Iterable[str]) -> bool:
    """Whether no token of a vocabulary has an upper-case letter, except the special tokens."""
    return all(token == token.lower() for token in tokens if token not in SPECIAL_TOKENS)


def _tokenizer_files(path: Path, config: Mapping[str, Any]) -> dict[str, bytes]:
    """The tokenizer files of a causal language model for transformers."""
    tokens = read_tokens(path)
    if len(tokens) > config["vocab_size"]:
        raise DataError(
            f"{path} has {len(tokens):,} tokens, but the model has {config['vocab_size']:,}: expected as many or fewer;"
            " give the tokenizer of this model"
        )
    beside = path.with_name(_TOKENIZER_CONFIG_NAME)
    try:
        content = path.read_bytes()
        told = beside.read_bytes() if beside.is_file() else None
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}; expected a file you may read") from error
    if told is None:
        ids = {name: config.get(f"{name}_id") for name in ("bos_token", "eos_token", "pad_token")}
        special = {name: tokens[at] for name, at in ids.items() if isinstance(at, int) and at < len(tokens)}
        # this class uses tokenizer.json unchanged; spaces before punctuation belong to the text
        told = _json({
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **special,
        })  # fmt: skip
    return {TOKENIZER: content, _TOKENIZER_CONFIG_NAME: told}


def _config_of(model: nn.Module) -> dict[str, Any]:
    if isinstance(model, BertForPreTraining):
        return {"model_type": "bert", "architectures": ["BertForPreTraining"], **dataclasses.asdict(model.config)}
    if isinstance(model, BertForTokenClassification | BertForSequenceClassification):
        return {
            "model_type": "bert",
            "architectures": [type(model).__name__],
            **dataclasses.asdict(model.config),
            "classifier_dropout": model.dropout.p,
            "id2label": {str(number): label for number, label in enumerate(model.labels)},
            "label2id": {label: number for number, label in enumerate(model.labels)},
        }
    if isinstance(model, GptForCausalLM):
        return model.config.to_hugging_face()
    raise DataError(f"Hugging Face has no class for a {type(model).__name__}: expected a BERT or a GPT of tasks/")


def _their_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The weights by their names, without second names of tied ones, which transformers ties itself."""
    own = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
    return dict(to_hugging_face(model.config, own)) if isinstance(model, GptForCausalLM) else own


def _bert_layout(model: BertForPreTraining) -> _Layout:
    return _Layout(
        expected={name: tensor.shape for name, tensor in _their_tensors(model).items()},
        sources=lambda name: (name,),
        convert=lambda _, pieces: pieces[0],
        tied=TIED_NAMES,
        base="bert.",
        heads={
            "cls.predictions.": "the head for masked words",
            "cls.seq_relationship.": "the head for next sentences",
            "bert.pooler.": "the pooler",
        },
    )


def _labelling_layout(model: Labelling, folder: Path) -> _Layout:
    own = _config_of(model)
    theirs = read_object(folder / _CONFIG_NAME, "the configuration of a BERT")
    has_same_head = all(theirs.get(key) == own[key] for key in ("architectures", "id2label"))
    expected = {name: tensor.shape for name, tensor in _their_tensors(model).items()}
    heads = {"classifier.": "the head for labels"}
    unwanted = ["cls."] if has_same_head else ["cls.", "classifier."]
    if isinstance(model, BertForSequenceClassification):
        heads["bert.pooler."] = "the pooler"
    else:
        unwanted.append("bert.pooler.")
    return _Layout(
        expected=expected,
        sources=lambda name: (name,),
        convert=lambda _, pieces: pieces[0],
        tied={},
        base="bert.",
        heads=heads,
        unwanted=tuple(unwanted),
    )


def _gpt_layout(model: GptForCausalLM) -> _Layout:
    config = model.config
    (words,) = their_names(config, "embeddings.tokens.weight")
    return _Layout(
        expected={name: tensor.shape for name, tensor in _their_tensors(model).items()},
        sources=lambda name: their_names(config, name),
        convert=lambda name, pieces: from_hugging_face(config, name, pieces),
        tied={"lm_head.weight": words} if config.is_tied else {},
        base=f"{words.split('.')[0]}.",
        heads={} if config.is_tied else {"lm_head.": "the vocabulary head"},
    )


@torch.no_grad()
def _fill_(model: nn.Module, folder: Path, layout: _Layout, *, heads_may_be_missing: bool) -> None:
    """Copy the weights of a directory into the model."""
    with tensor_files(folder) as files:
        found = _by_full_name(files, layout)
        stored = {name: own for name, own in found.items() if not name.startswith(layout.unwanted)}
        if len(stored) < len(found):
            logger.info(
                "%s: not needed: %s", folder, ", ".join(sorted(found.keys() - stored.keys())), extra=_ABOUT_START
            )
        initialised = _missing_heads(stored, layout) if heads_may_be_missing else {}
        _check_names(files, stored, layout, initialised)
        for name, parameter in model.named_parameters():
            theirs = layout.sources(name)
            if initialised.keys().isdisjoint(theirs):
                pieces = tuple(_read(files, stored[each], layout.expected[each]) for each in theirs)
                parameter.copy_(layout.convert(name, pieces))
        _check_tied(files, stored, layout)
    if initialised:
        logger.warning(
            "%s: left as initialised: %s", folder, ", ".join(dict.fromkeys(initialised.values())), extra=_ABOUT_START
        )


def _by_full_name(files: TensorFiles, layout: _Layout) -> dict[str, str]:
    """Full name -> name in the file. A model without heads is stored without the prefix of its names."""
    plain = {re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name): name for name in files.names}
    plain = {re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name): stored for name, stored in plain.items()}
    if any(name.startswith(layout.base) for name in plain):
        found = plain
    else:
        found = {name if name in layout.expected else layout.base + name: stored for name, stored in plain.items()}
    # a file may have either of two tied names
    return {first: found[second] for second, first in layout.tied.items() if second in found} | found


def _missing_heads(stored: Mapping[str, str], layout: _Layout) -> dict[str, str]:
    """The tensors of heads that are missing entirely -> the title of the head."""
    return {
        name: title
        for beginning, title in layout.heads.items()
        if not any(name.startswith(beginning) and name in stored for name in layout.expected)
        for name in layout.expected
        if name.startswith(beginning)
    }


def _check_names(
    files: TensorFiles, stored: Mapping[str, str], layout: _Layout, initialised: Mapping[str, str]
) -> None:
    missing = [name for name in layout.expected if name not in stored and name not in initialised]
    if missing:
        head = next((title for beginning, title in layout.heads.items() if missing[0].startswith(beginning)), None)
        hint = f"{head} is incomplete" if head else "are these the weights of another model?"
        raise DataError(
            f"{files.folder}: {_file_names(files)} lacks the tensor {missing[0]}{_others(missing)}, which"
            f" {_CONFIG_NAME} requires: {hint}"
        )
    known = layout.expected.keys() | layout.tied.keys()
    surplus = {name: own for name, own in stored.items() if name not in known and not _NO_WEIGHTS.search(name)}
    left_out = sorted(own for own in surplus.values() if _OTHER_HEADS.match(own))
    foreign = [own for own in surplus.values() if own not in left_out]
    if foreign:
        raise DataError(
            f"{files.names[foreign[0]]} has the tensor {foreign[0]}{_others(foreign)}, which the model of"
            f" {files.folder / _CONFIG_NAME} does not have: are these the weights of another model?"
        )
    if left_out:
        logger.warning(
            "%s: skipped, since the model has no such head: %s", files.folder, ", ".join(left_out), extra=_ABOUT_START
        )


def _file_names(files: TensorFiles) -> str:
    return ", ".join(sorted({path.name for path in files.names.values()}))


def _others(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _read(files: TensorFiles, stored: str, shape: torch.Size) -> Tensor:
    tensor = files.read(stored)
    if tensor.shape != shape:
        raise DataError(
            f"{files.names[stored]}: the tensor {stored} has shape {tuple(tensor.shape)}: expected {tuple(shape)} by"
            f" {files.folder / _CONFIG_NAME}"
        )
    return tensor


def _check_tied(files: TensorFiles, stored: Mapping[str, str], layout: _Layout) -> None:
    """Raise DataError if two tied names hold different numbers: then the head has separate weights."""
    for second, first in layout.tied.items():
        if second in stored and first in stored and stored[second] != stored[first]:
            shape = layout.expected[first]
            if not torch.equal(_read(files, stored[second], shape), _read(files, stored[first], shape)):
                raise DataError(
                    f"{files.names[stored[second]]}: the tensor {stored[second]} differs from {stored[first]}, but by"
                    f" {files.folder / _CONFIG_NAME} they are tied (tie_word_embeddings): one of the two files is wrong"
                )

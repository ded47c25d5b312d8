"""Early checks: the launcher looks for the files of an included task before it starts workers.

Each function takes the configuration of a run, and raises the same error that the task would raise seconds later on
every rank. Imports no torch, and reads no rows. The task itself makes all other checks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hetseq import Config, MissingSplitError
from hetseq.tasks.bert.config import BertConfig
from hetseq.tasks.bert.files import BertFiles, find_hdf5, hdf5_names
from hetseq.tasks.bert.files import find_records as find_bert_records
from hetseq.tasks.bert.fine_tuning_files import find_files as find_beginning
from hetseq.tasks.gpt.config import GptConfig
from hetseq.tasks.gpt.files import GptFiles
from hetseq.tasks.gpt.files import find_records as find_gpt_records
from hetseq.tasks.hf_causal_lm.files import CausalLmFiles, has_weights
from hetseq.tasks.mnist_files import find_files, half_of
from hetseq.tasks.nn.init_from import find_weights
from hetseq.tasks.rows import labelled_texts, tagged_words
from hetseq.tasks.rows.record_index import Index
from hetseq.tasks.rows.records import open_shard
from hetseq.tasks.rows.split_files import find_split


def check_bert(config: Config) -> None:
    """`--task bert`: configuration, vocabulary, the files of each split, and whether there are weights."""
    files = BertFiles(config, _option(config, "init_from"))
    data = files.data
    files.network()
    index = find_bert_records(data, hdf5_names(data))

    def check(split: str) -> None:
        if index is None:
            files.check_other_splits(find_hdf5(data, split), split)
        else:
            _check_records(index, split, config)

    _check_splits(config, check)
    if files.init_folder is not None:
        find_weights(files.init_folder)


def check_gpt(config: Config) -> None:
    """`--task gpt`: the same as `check_bert`."""
    files = GptFiles(config, _option(config, "init_from"))
    index, config_file = find_gpt_records(files.data), files.config_file()
    GptConfig.from_json_file(config_file)
    _check_splits(config, lambda split: _check_records(index, split, config))
    if files.init_from is not None:
        find_weights(config_file.parent)


def check_hf_causal_lm(config: Config) -> None:
    """`--task hf_causal_lm`: the model directory, the files of each split, and a tokenizer if the data are text."""
    files = CausalLmFiles(config, _option(config, "model"))
    files.read_config()
    index = files.records()

    def check(split: str) -> None:
        if index is None:
            files.text_file(split)
        else:
            _check_records(index, split, config)

    _check_splits(config, check)
    if index is None:
        files.find_tokenizer()
    has_weights(files.folder())


def check_ner(config: Config) -> None:
    """`--task bert_ner`: the file of each split, configuration, vocabulary, and whether there are weights."""
    _check_fine_tuning(config, tagged_words.SUFFIXES)


def check_classify(config: Config) -> None:
    """`--task bert_classify`: the same as `check_ner`."""
    _check_fine_tuning(config, labelled_texts.SUFFIXES)


def check_mnist(config: Config) -> None:
    """`--task mnist`: the files of each half."""
    data = config.data.data

    def check(split: str) -> None:
        half = half_of(split)
        if data is not None:
            find_files(Path(data).expanduser(), half)

    _check_splits(config, check)


def _check_fine_tuning(config: Config, suffixes: tuple[str, ...]) -> None:
    data = config.data
    if data.data is None:
        return  # the task itself asks for --data
    folder, splits = Path(data.data).expanduser(), (data.train_subset, *data.valid_subsets)
    find_split(folder, data.train_subset, suffixes=suffixes, other_splits=splits)
    weights, config_file, _ = find_beginning(config, _option(config, "init_from"))
    BertConfig.from_json_file(config_file)
    _check_splits(config, lambda split: find_split(folder, split, suffixes=suffixes, other_splits=splits))
    if weights is not None:
        find_weights(weights)


def _option(config: Config, name: str) -> Any:
    """An option of the task, or None if the run has no options of the task."""
    return getattr(config.extras.get("task"), name, None)


def _check_records(index: Index, split: str, config: Config) -> None:
    """Raise MissingSplitError if the index has no such split, DataError if one of its files is missing."""
    files = index.split(split).files_up_to(config.data.num_file)
    if _option(config, "local_copy") is not None:
        return  # the task reads copies of the files, which may exist already
    for file in files:
        if not file.path.exists():
            open_shard(file, index.columns)  # raises DataError


def _check_splits(config: Config, check: Callable[[str], object]) -> None:
    """Check the splits of a run. The default validation split may be missing, as it may for a worker."""
    check(config.data.train_subset)
    for split in () if config.validation.disable_validation else config.data.valid_subsets:
        try:
            check(split)
        except MissingSplitError:
            if config.data.valid_subset != type(config.data).valid_subset:
                raise

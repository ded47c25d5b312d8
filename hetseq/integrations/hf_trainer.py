"""`HetSeqTrainer`: Hugging Face's Trainer with the step of HetSeq.

Responsible for the loop of `Trainer.train`, and for evaluation and saving within it. Everything else is the Trainer's
own: optimizer, schedule, sampler, loss, logging, callbacks, checkpoint folders. It uses only the public names of
HetSeq. The one idea: a micro-batch's loss times its count is a sum, so any cut of a step gives the Trainer's gradient.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

import hetseq
from hetseq.integrations.sampler_order import SamplerOrder

try:
    _trainer: Any = importlib.import_module("transformers.trainer")
    importlib.import_module("accelerate")  # the Trainer asks for it when its arguments are made
except ImportError as error:
    raise hetseq.ConfigError(
        f"HetSeqTrainer needs two packages: pip install 'transformers>=4.57' 'accelerate>=1.1' ({error})"
    ) from error
_callback: Any = importlib.import_module("transformers.trainer_callback")
_modeling: Any = importlib.import_module("transformers.models.auto.modeling_auto")
_utils: Any = importlib.import_module("transformers.trainer_utils")

_IGNORED_LABEL = -100
_CLIP_EPSILON = 1e-6  # of torch.nn.utils.clip_grad_norm_
#: fields of TrainerState that belong to this rank or this start, or have another form in `_Progress`
_NOT_SHARED = {
    "is_local_process_zero", "is_world_process_zero", "stateful_callbacks", "log_history", "trial_name", "trial_params",
    "max_steps", "num_train_epochs", "logging_steps", "eval_steps", "save_steps", "train_batch_size",
}  # fmt: skip
_REFUSED: dict[str, str] = {
    "deepspeed": "HetSeq divides the training itself: leave it out",
    "fsdp": "HetSeq divides the training itself: leave it out",
    "parallelism_config": "HetSeq divides the training itself: leave it out",
    "torch_compile": "compile the model before it is given to HetSeqTrainer",
    "auto_find_batch_size": "HetSeq halves micro-batches where memory runs out, with the same result: leave it out",
    "eval_on_start": "call trainer.evaluate() before trainer.train()",
    "include_tokens_per_second": "metrics.jsonl of the run directory has the speed: leave it out",
    "enable_jit_checkpoint": "HetSeq saves when a job is told to end: leave it out",
}
#: methods of the Trainer that HetSeq's step replaces, and where to say it instead
_NOT_CALLED = {"training_step": "compute_loss", "get_batch_samples": "count_items"}
_INSIDE_BACKWARD = ("lomo", "layerwise")  # optimizers that update there


class HetSeqTrainer(_trainer.Trainer):  # type: ignore[misc]
    """`transformers.Trainer` that trains on unequal devices and nodes, through lost ranks, with one result.

    Takes what `transformers.Trainer` takes; the script is started by `hetseq run`, or by python as one rank. The global
    batch is per_device_train_batch_size * gradient_accumulation_steps samples, whatever the ranks, in the order of the
    Trainer's sampler. Every rank runs the script. It resumes from the checkpoints of the run directory
    (`hetseq run --save-dir`; without a launcher output_dir/hetseq); folders checkpoint-N are written by the first rank.
    Raises ConfigError for arguments that ask for another way of dividing the training.
    """

    state: Any
    control: Any
    lr_scheduler: Any
    _created_lr_scheduler: bool

    def __init__(self, model: Any = None, args: Any = None, *others: Any, **named: Any) -> None:
        if args is None:
            args = _trainer.TrainingArguments(output_dir="tmp_trainer")
        _refuse(args)
        if model is None:
            raise hetseq.ConfigError(
                "HetSeqTrainer got no model: give it the model itself in place of model_init, since it takes its"
                " precision from the weights"
            )
        self._run = hetseq.start(
            save_dir=None if _text(args.save_strategy) == "no" else os.path.join(args.output_dir, "hetseq"),
            seed=args.seed,
            precision=_precision_of(args, model),
        )
        device = self._run.device
        vars(args).update(_setup_devices=device, _n_gpu=int(device.type == "cuda"), disable_tqdm=True)
        if device.type == "cuda":
            torch.cuda.set_device(device)  # the arguments have chosen the first one
        super().__init__(model, args, *others, **named)
        self.accelerator._models.append(self.model)  # the model is placed already; nothing may wrap it
        self._is_between_steps = self._has_begun = False
        self._tr_loss = torch.zeros(())

    # the loop

    def train(self, resume_from_checkpoint: Any = None, *others: Any, **named: Any) -> Any:
        """As `Trainer.train`; the run directory says where it stands, so the same command resumes by itself.

        `resume_from_checkpoint` only demands that there is something to resume. Raises TaskError if there is not.
        """
        if self._has_begun:
            raise hetseq.TaskError("trainer.train() was called a second time: a process has one run; start another one")
        self._is_resume_asked = bool(resume_from_checkpoint)
        return super().train(None, *others, **named)

    def _inner_training_loop(
        self, batch_size: Any = None, args: Any = None, resume_from_checkpoint: Any = None, trial: Any = None,
        ignore_keys_for_eval: Any = None,
    ) -> Any:  # fmt: skip
        if trial is not None:
            raise hetseq.TaskError(
                "hyperparameter_search trains several times: a process has one run; start one for each"
            )
        loader = self.get_train_dataloader()
        data = SamplerOrder(loader, batch_size=self._train_batch_size, seed=self.args.seed)
        size = self._train_batch_size * self.args.gradient_accumulation_steps
        self._batches, in_epoch = math.ceil(len(data) / self._train_batch_size), math.ceil(len(data) / size)
        max_steps = self.args.max_steps
        if max_steps <= 0:
            max_steps = math.ceil(self.args.num_train_epochs * in_epoch)
        if max_steps <= 0:
            raise hetseq.TaskError(
                f"TrainingArguments(num_train_epochs={self.args.num_train_epochs}) trains nothing: call"
                " trainer.evaluate() without trainer.train()"
            )
        self._prepare(loader, max_steps, math.ceil(max_steps / in_epoch))
        began_s, epoch = time.time(), 0
        for step in self._run.steps(
            data, global_batch_size=size, max_epoch=math.ceil(max_steps / in_epoch), max_steps=max_steps,
            collate=_Counted(self, loader.collate_fn), shuffle=False,
            clip_norm=self.args.max_grad_norm or 0.0, clip_epsilon=_CLIP_EPSILON,
        ):  # fmt: skip
            self._begin()
            if step.epoch != epoch:
                epoch = step.epoch
                self._fire("on_epoch_begin")
            self._fire("on_step_begin")
            for samples, count, inputs in step:
                self._add(step, inputs, samples, count)
            with self._between_steps():
                self._end_step(step, step.number - (epoch - 1) * in_epoch, ignore_keys_for_eval)
            if self.control.should_training_stop and self.state.global_step < max_steps:  # else the loop ends anyway
                self._run.stop()
        self._begin()
        return self._finish(began_s, size)

    def _prepare(self, loader: Any, max_steps: int, epochs: int) -> None:
        """Optimizer, schedule, state and callbacks, as the Trainer makes them."""
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self.create_optimizer_and_scheduler(num_training_steps=max_steps)
        self.state = _callback.TrainerState(stateful_callbacks=[*_exportable(self), self.control])
        self.state.epoch, self.state.train_batch_size = 0, self._train_batch_size
        self.state.compute_steps(self.args, max_steps)
        self.state.init_training_references(self, max_steps, epochs, None)
        self._tr_loss, self._total_loss_scalar, self._globalstep_last_logged = torch.zeros(()), 0.0, 0
        handler = self.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = self.model, self.optimizer, self.lr_scheduler
        handler.train_dataloader = loader
        for name, instead in _NOT_CALLED.items():
            if getattr(type(self), name) is not getattr(_trainer.Trainer, name):
                raise hetseq.TaskError(f"{type(self).__name__}.{name} would not be called: override {instead}")
        for callback in handler.callbacks:
            if type(callback).on_substep_end is not _callback.TrainerCallback.on_substep_end:
                raise hetseq.TaskError(
                    f"{type(callback).__name__}.on_substep_end would not be called, since HetSeq cuts a step for each"
                    " rank: use on_step_end"
                )
        if getattr(self.args, "gradient_checkpointing", False) and not getattr(
            self.model, "is_gradient_checkpointing", False
        ):
            self.model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs
            )
        self.optimizer.register_step_pre_hook(lambda *_: self._fire("on_pre_optimizer_step"))
        self.optimizer.register_step_post_hook(lambda *_: self._fire("on_optimizer_step"))
        self._run.own(
            model=self.model, optimizer=self.optimizer, lr_scheduler=self.lr_scheduler, trainer=_Progress(self)
        )
        self.model.train()

    def _begin(self) -> None:
        """Once in a process, when it has the state of the run."""
        if self._has_begun:
            return
        self._has_begun = True
        if self._is_resume_asked and not self.state.global_step:
            raise hetseq.TaskError(
                "trainer.train(resume_from_checkpoint=...): the run directory has no checkpoint, and HetSeq resumes"
                " from its own alone: for a first start leave the argument out; weights of another training are loaded"
                " by from_pretrained"
            )
        self._fire("on_train_begin")

    def _add(self, step: hetseq.Step, inputs: dict[str, Any], samples: int, count: int | None) -> None:
        """The gradient of one micro-batch: its loss is a mean over `count` labels, or over its samples."""
        if count == 0:
            return  # no label: nothing to divide, and nothing to learn
        inputs = self._prepare_inputs(inputs)
        items = None if count is None else torch.tensor(count, device=self.args.device)
        with self.compute_loss_context_manager():
            loss = self.compute_loss(self.model, inputs, num_items_in_batch=items)
        number = samples if count is None else count
        step.backward(loss * number, count=number)

    def _end_step(self, step: hetseq.Step, in_epoch: int, ignore_keys: Any) -> None:
        """What the Trainer does after an update."""
        state = self.state
        rate = self._get_learning_rate()
        if step.loss is None:
            self._tr_loss += self._tr_loss / (1 + state.global_step - self._globalstep_last_logged)
        else:
            self._tr_loss += step.loss
            if not _follows_metric(self.lr_scheduler):
                self.lr_scheduler.step()
        state.global_step += 1
        done = min(in_epoch * self.args.gradient_accumulation_steps, self._batches)
        state.epoch = step.epoch - 1 + done / self._batches
        report = (step.grad_norm, self.model, None, step.epoch - 1, ignore_keys, None)
        self._fire("on_step_end")
        self._maybe_log_save_evaluate(self._tr_loss, *report, learning_rate=rate)
        if self.control.should_epoch_stop:
            raise hetseq.TaskError(
                "a callback has set control.should_epoch_stop: HetSeq ends an epoch with its last sample; use"
                " control.should_training_stop"
            )
        if step.ends_epoch or self.control.should_training_stop:
            self._fire("on_epoch_end")
            self._maybe_log_save_evaluate(self._tr_loss, *report, learning_rate=rate)

    def _finish(self, began_s: float, size: int) -> Any:
        """Behind the loop, on every rank."""
        steps = self.state.global_step
        train_loss = (self._total_loss_scalar + float(self._tr_loss)) / max(steps, 1)
        metrics = _utils.speed_metrics("train", began_s, num_samples=steps * size, num_steps=steps)
        metrics["train_loss"] = train_loss
        self.log(metrics)
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            self._load_best_model()
        self._fire("on_train_end")
        if self.neftune_noise_alpha is not None:
            self.neftune_hook_handle.remove()
        self.is_in_train = False
        return _utils.TrainOutput(steps, train_loss, metrics)

    def count_items(self, inputs: Mapping[str, Any]) -> int | None:
        """What the loss of a micro-batch on the host is a mean over: its labels; None means its samples.

        Override it if `compute_loss` gives the mean of something else.
        """
        labels = inputs.get("labels")
        if not isinstance(labels, torch.Tensor):
            return None
        smoother = self.label_smoother
        is_mean = smoother and "num_items_in_batch" not in inspect.signature(type(smoother).__call__).parameters
        count = None if is_mean else self._get_num_items_in_batch([inputs], labels.device)
        if count is None:  # the loss then divides by a number of its own
            name = _unwrapped(self.model)._get_name()
            shifts = name in _modeling.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
            count = (labels[..., 1:] if shifts else labels).ne(_IGNORED_LABEL).sum()
        return int(count)

    # evaluation, saving, and which rank this is

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        """As `Trainer.evaluate`. In the loop every rank calls it: the loss is divided among the ranks, with equal bits
        on any; with `compute_metrics` the first rank measures all data while the others wait."""
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        if not self._is_between_steps or isinstance(chosen, dict):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        began_s, loader = time.time(), self.get_eval_dataloader(eval_dataset)
        self.callback_handler.eval_dataloader = loader
        data = SamplerOrder(loader, batch_size=self.args.eval_batch_size, seed=self.args.seed)

        def measure(batch: tuple[int, int | None, dict[str, Any]]) -> dict[str, tuple[torch.Tensor, int]]:
            samples, _, inputs = batch
            loss = self.prediction_step(self.model, inputs, prediction_loss_only=True, ignore_keys=ignore_keys)[0]
            return {} if loss is None else {f"{metric_key_prefix}_loss": (loss.double() * samples, samples)}

        def measure_all() -> dict[str, float]:
            found = self.evaluation_loop(
                loader, "Evaluation", ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix
            )
            return {name: float(value) for name, value in found.metrics.items()}

        if self.compute_metrics is None:
            collate = _Counted(self, loader.collate_fn)
            metrics = self._run.evaluate(data, measure, batch_size=self.args.eval_batch_size, collate=collate)
        else:
            with self._as_it_was():
                metrics = self._run.only_first(measure_all)
        metrics |= self._run.only_first(
            lambda: _utils.speed_metrics(
                metric_key_prefix, began_s, num_samples=len(data),
                num_steps=math.ceil(len(data) / self.args.eval_batch_size),
            )
        )  # fmt: skip
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As `Trainer.save_model`, by the first rank; any rank may call it."""
        if self._run.is_first:
            super().save_model(output_dir, _internal_call=_internal_call)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        def save() -> str | None:
            super(HetSeqTrainer, self)._save_checkpoint(model, trial)
            best: str | None = self.state.best_model_checkpoint
            return best

        self.state.best_model_checkpoint = self._run.only_first(save)

    def is_world_process_zero(self) -> bool:
        """Whether this is the first rank; another one may become it when ranks are lost."""
        return self._run.is_first

    def is_local_process_zero(self) -> bool:
        """As `is_world_process_zero`: the other ranks of a node have log files."""
        return self._run.is_first

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Any:
        """The computation of bf16=True and fp16=True, also outside of the loop."""
        if not (self.args.bf16 or self.args.fp16):
            return contextlib.nullcontext()
        kind = torch.bfloat16 if self.args.bf16 else torch.float16
        return torch.autocast(self.args.device.type, kind, cache_enabled=bool(cache_enabled))

    def _fire(self, event: str) -> None:
        self.state.is_world_process_zero = self.state.is_local_process_zero = self._run.is_first
        self.control = getattr(self.callback_handler, event)(self.args, self.state, self.control)

    @contextlib.contextmanager
    def _between_steps(self) -> Iterator[None]:
        self._is_between_steps = True
        yield
        self._is_between_steps = False

    @contextlib.contextmanager
    def _as_it_was(self) -> Iterator[None]:
        """Modules stay in training mode, though one rank evaluates."""
        yield
        self.model.train()


class _Counted:
    """A collate function whose batches know their samples and their count of labels."""

    def __init__(self, trainer: HetSeqTrainer, collate: Callable[[Any], Any]) -> None:
        self._trainer, self._collate = trainer, collate

    def __call__(self, samples: list[Any]) -> tuple[int, int | None, dict[str, Any]]:
        inputs = dict(self._collate(samples))
        return len(samples), self._trainer.count_items(inputs), inputs


class _Progress:
    """The state of the Trainer and its callbacks, which checkpoints hold and a rank that joins is given."""

    def __init__(self, trainer: HetSeqTrainer) -> None:
        self._trainer = trainer
        self._logged, self._history = -1, torch.empty(0, dtype=torch.uint8)

    def state_dict(self) -> dict[str, Any]:
        trainer, state = self._trainer, self._trainer.state
        if self._logged != len(state.log_history):  # as a tensor, since the other values are compared at each step
            self._logged = len(state.log_history)
            self._history = torch.frombuffer(bytearray(_json(state.log_history).encode()), dtype=torch.uint8)
        values = {
            field.name: getattr(state, field.name)
            for field in dataclasses.fields(state)
            if field.name not in _NOT_SHARED
        }
        losses = [float(trainer._tr_loss), trainer._total_loss_scalar, trainer._globalstep_last_logged]
        kept = {
            "state": values,
            "losses": losses,
            "callbacks": [of.state()["attributes"] for of in _exportable(self._trainer)],
        }
        return {**json.loads(_json(kept)), "log_history": self._history}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        trainer = self._trainer
        for name, value in state["state"].items():
            setattr(trainer.state, name, value)
        trainer.state.log_history = json.loads(bytes(state["log_history"].tolist()))
        loss, trainer._total_loss_scalar, trainer._globalstep_last_logged = state["losses"]
        trainer._tr_loss = torch.tensor(loss)
        for callback, attributes in zip(_exportable(trainer), state["callbacks"], strict=True):
            vars(callback).update(attributes)


def _exportable(trainer: HetSeqTrainer) -> list[Any]:
    """The callbacks that have a state."""
    return [of for of in trainer.callback_handler.callbacks if isinstance(of, _callback.ExportableState)]


def _json(value: Any) -> str:
    """The value as text; numbers of NumPy and torch as plain ones."""
    return json.dumps(value, default=float)


def _refuse(args: Any) -> None:
    """Raise ConfigError for arguments that HetSeq does not follow."""
    for name, remedy in _REFUSED.items():
        if getattr(args, name, None):
            raise hetseq.ConfigError(f"TrainingArguments({name}=...) is not for HetSeqTrainer: {remedy}")
    if _text(args.include_num_input_tokens_seen) not in ("no", "False"):
        raise hetseq.ConfigError(
            "TrainingArguments(include_num_input_tokens_seen=...) is not for HetSeqTrainer: a rank sees its share"
            " alone; leave it out"
        )
    if any(word in _text(args.optim) for word in _INSIDE_BACKWARD):
        raise hetseq.ConfigError(
            f"TrainingArguments(optim={_text(args.optim)!r}) is not for HetSeqTrainer: it updates the model inside"
            " backward, before the gradient of the step is complete; choose another optimizer"
        )
    if getattr(args, "train_sampling_strategy", "random") == "batch_rebalance":
        raise hetseq.ConfigError(
            "TrainingArguments(train_sampling_strategy='batch_rebalance') is not for HetSeqTrainer: HetSeq balances the"
            " ranks itself; leave it out"
        )
    if args.world_size > 1:
        raise hetseq.ConfigError(
            "TrainingArguments found the process group of another launcher (WORLD_SIZE, RANK): start the script with"
            " hetseq run alone"
        )


def _precision_of(args: Any, model: Any) -> str | None:
    """HetSeq's precision, as the arguments say, or else the weights."""
    if args.bf16 or args.fp16:
        return "bf16" if args.bf16 else "fp16"
    kind = getattr(model, "dtype", None) or next((value.dtype for value in model.parameters()), None)
    names = {torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16"}
    return names.get(kind, "tf32" if args.tf32 else None)  # type: ignore[arg-type]


def _unwrapped(model: Any) -> Any:
    """The model below the adapters of PEFT."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _follows_metric(scheduler: Any) -> bool:
    """Whether the schedule takes its steps with evaluations."""
    kinds = (torch.optim.lr_scheduler.ReduceLROnPlateau, getattr(_trainer, "GreedyLR", ()))
    return isinstance(scheduler, kinds)


def _text(value: Any) -> str:
    """The value of an option, which may be an enumeration."""
    return str(getattr(value, "value", value))

"""How checkpoints are read: on any number of ranks, only if they fit the run, and executing nothing.

Overridden of `transformers.Trainer`, and why:

- `train`: checks a checkpoint before anything is loaded from it; takes an adapter alone as a starting point.
- `_run_epoch`: a run that was finished when it was saved takes no step more.
- `_load_from_checkpoint`, `_load_best_model`: adapters into the parameters as they lie over the ranks.
- `_load_optimizer_and_scheduler`: optimizer state by parameter name; each rank takes its shards.
- `_load_rng_state`: random numbers of every rank from one file, and the completions GRPO still held.
- `_load_scaler`: a run without a gradient scaler may go on from one with it.
"""

import os

from transformers import set_seed

from . import differences, provenance, rollout_buffer, staging, training_state
from .logging import get_logger

logger = get_logger(__name__)

SCHEDULER_FILE, RANDOM_FILE, STATE_FILE, SCALER_FILE = "scheduler.pt", "rng_state.json", "trainer_state.json", "scaler.pt"


class ResumeMixin:
    """Comes before a `transformers.Trainer` in the bases. Needs `self.ranks`, made on all ranks before training."""

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        """`transformers.Trainer.train`, whose `resume_from_checkpoint` may also be a folder with an adapter alone.

        Raises:
            ValueError: if the checkpoint is not whole, is from a newer version, or was trained on or with something else.
        """
        return super().train(self._check_start(resume_from_checkpoint), *args, **kwargs)

    def _check_start(self, start) -> str | None:
        if start in (None, False, "False", "false"):
            return None
        folder = self._newest_checkpoint() if start in (True, "True", "true") else os.fspath(start)
        if not os.path.isdir(folder):
            raise ValueError(
                f"`resume_from_checkpoint={folder!r}` is no folder that rank {self.ranks.rank} can see. "
                "Write True for the newest checkpoint in `output_dir`, or the path of a checkpoint or of an adapter."
            )
        record = provenance.read_record(folder)
        whole = record is not None and os.path.isfile(os.path.join(folder, STATE_FILE))
        self._refuse_differences(folder, record, position=whole and not self.args.ignore_data_skip)
        if record is None:
            for own in training_state.adapter_folders(self.model, folder).values():
                for difference in differences.base_of_adapter(own, self._base):
                    logger.warning("%s has an adapter for the %s. If they are not the same weights, it does not fit.", own, difference)
        if whole:
            return folder
        self._load_from_checkpoint(folder)
        logger.warning(
            "%s holds %s: training starts from its adapter, with a new optimizer, schedule and data order.",
            folder, "an adapter and no training state" if record else "what other tools wrote, of which only the adapter is read",
        )  # fmt: skip
        return None

    def _newest_checkpoint(self) -> str:
        run_dir = self.args.output_dir
        self.ranks.meet("`train(resume_from_checkpoint=True)`")
        if self.args.should_save:
            staging.rescue(run_dir, provenance.is_complete)
        newest = ""
        if self.ranks.rank == 0:
            found = staging.checkpoints(run_dir)
            complete = [path for path in found if provenance.is_complete(path)]
            if complete and complete[-1] != found[-1]:
                logger.warning("%s is not a whole checkpoint of ours; resuming from %s.", found[-1], complete[-1])
            newest = (complete or found or [""])[-1]
        newest = self.ranks.hear(newest)
        if not newest:
            raise ValueError(
                f"`resume_from_checkpoint=True`, but `output_dir={run_dir!r}` has no folder checkpoint-N. Leave it out to start "
                "anew, or write the path of a checkpoint."
            )
        return newest

    def _refuse_differences(self, folder: str, record: dict | None, *, position: bool) -> None:
        for own in training_state.adapter_folders(self.model, folder).values():
            if os.path.isfile(os.path.join(own, "adapter_model.bin")):
                raise ValueError(f"{own} holds adapter_model.bin, a pickle, which is not read. Save the adapter as safetensors.")
        found = differences.of_checkpoint(folder, record, self.model, self._record(), position=position)
        if not found:
            return
        what = f"{folder} was trained with other settings: {'; '.join(found)}."
        if not getattr(self.args, "force_resume", False):
            raise ValueError(f"{what} Write the settings of the checkpoint, or `force_resume=True` to go on regardless.")
        logger.warning("%s Going on, because `force_resume=True`.", what)

    def _run_epoch(self, *args, **kwargs):
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        folders = training_state.adapter_folders(self.model, resume_from_checkpoint)
        for adapter, folder in folders.items():
            training_state.load_adapter(self.model, adapter, folder)

    def _load_best_model(self):
        best = self.state.best_model_checkpoint
        logger.info("Loading the best adapter from %s (score: %s).", best, self.state.best_metric)
        self._load_from_checkpoint(best)

    def _load_optimizer_and_scheduler(self, checkpoint):
        if checkpoint is not None:
            path = os.path.join(checkpoint, training_state.OPTIMIZER_FILE)
            if os.path.isfile(path):
                training_state.load_optimizer(self._bare_optimizer(), self.model, path)
                self.lr_scheduler.load_state_dict(training_state.load_plain(os.path.join(checkpoint, SCHEDULER_FILE)))
            else:
                logger.warning("%s was saved with `save_only_model=True`: the optimizer and the schedule start anew.", checkpoint)
        super()._load_optimizer_and_scheduler(checkpoint)  # what TRL's trainers keep beside it

    def _load_scaler(self, checkpoint):
        path = os.path.join(checkpoint or "", SCALER_FILE)
        if checkpoint is None or not os.path.isfile(path):
            return
        if self.accelerator.scaler is None:
            logger.warning("%s was saved with `fp16=True`; its gradient scale has no effect here.", checkpoint)
            return
        self.accelerator.scaler.load_state_dict(training_state.load_plain(path))

    def _load_rng_state(self, checkpoint):
        path = os.path.join(checkpoint, RANDOM_FILE) if checkpoint is not None else ""
        if not os.path.isfile(path):
            return
        states = provenance.read_json(path)["ranks"]
        if self.ranks.rank < len(states):
            training_state.set_random_state(states[self.ranks.rank])
        else:  # a rank that was not there: numbers of its own, the same at every resume
            set_seed(self.args.seed + 1000 * self.state.global_step + self.ranks.rank)
        if len(states) != self.ranks.size:
            logger.info("Saved with %d ranks, resumed with %d: dropout and sampling draw other numbers.", len(states), self.ranks.size)
        rollout_buffer.load_buffer(self, checkpoint)

    def _record(self) -> dict:
        rows = getattr(self.train_dataset, "__len__", None)
        return {
            "base": self._base,
            "quantization": provenance.describe_quantization(self.model),
            "dtype": str(self.model.get_base_model().dtype).removeprefix("torch."),
            "method": self._name,
            "world_size": self.args.world_size,
            "rows_per_step": provenance.rows_per_step(self.args),
            "train_rows": rows() if rows else None,
        }

    @property
    def _base(self) -> dict:
        if not hasattr(self, "_base_description"):
            self._base_description = provenance.describe_base(self.model, self._revision)
        return self._base_description

    @property
    def _revision(self) -> str | None:
        return (self.args.model_init_kwargs or {}).get("revision")

    def _bare_optimizer(self):
        return getattr(self.optimizer, "optimizer", self.optimizer)

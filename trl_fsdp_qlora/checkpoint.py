"""Checkpoints that any number of ranks can resume: how they are written. How they are read is in `resume`.

Overridden of `transformers.Trainer`, and why:

- `save_model`: adapters only, gathered on every rank, each file written whole. Every rank must call it.
- `_save_checkpoint`, `_get_output_dir`, `_push_from_checkpoint`: a checkpoint is filled beside its place and renamed; only
  then are older ones removed, and it is uploaded.
- `_finish_current_push`: an upload that failed in the background is said.
- `create_model_card`: a full disk there must not leave the other ranks waiting.
- `_save_optimizer_and_scheduler`: optimizer state whole and by parameter name.
- `_save_rng_state`: random numbers of every rank in one file, and the completions GRPO still holds.

The data position, the schedule, callbacks and the best metric are transformers', unchanged.
"""

import json
import os
import shutil

import torch
from accelerate.utils import gather_object
from safetensors.torch import save_file

from . import provenance, rollout_buffer, staging, training_state
from .logging import get_logger
from .resume import RANDOM_FILE, SCHEDULER_FILE, STATE_FILE, ResumeMixin

logger = get_logger(__name__)


class CheckpointMixin(ResumeMixin):
    """Comes before a `transformers.Trainer` in the bases. Needs `self.ranks`, made on all ranks before training."""

    _staged_run = None  # where checkpoint-N is being filled, during `_save_checkpoint`

    def save_model(self, output_dir=None, _internal_call=False):
        """Write the adapter, its configuration and the tokenizer or processor to `output_dir`. Call it on all ranks.

        Raises:
            RuntimeError: if not every rank calls it.
            OSError: if the folder cannot be written; the files that were there are then as they were.
        """
        output_dir = output_dir or self.args.output_dir
        if self._staged_run:  # called by `_save_checkpoint`, where all ranks are
            adapters = training_state.gather_adapters(self.model)
            self._attempt(lambda: self._write_model(output_dir, adapters))
            return
        self.ranks.meet(f"`save_model({output_dir!r})`")
        self._finish_current_push()  # it reads the files that are replaced now
        adapters = training_state.gather_adapters(self.model)
        self._failure = None
        self._attempt(lambda: self._replace_model(output_dir, adapters))
        self._raise_together(output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _replace_model(self, output_dir: str, adapters: dict[str, torch.Tensor]) -> None:
        try:
            staged = os.path.join(staging.start_staging(output_dir), "model")
            os.makedirs(staged)
            readme = os.path.join(output_dir, "README.md")  # PEFT adds to a model card that is there
            if os.path.isfile(readme):
                shutil.copy(readme, staged)
            self._write_model(staged, adapters)
            provenance.write_record(staged, self._record())
            staging.flush(staged)
            staging.publish_files(staged, output_dir)
        finally:
            staging.end_staging(output_dir)

    def _write_model(self, folder: str, adapters: dict[str, torch.Tensor]) -> None:
        for config in self.model.peft_config.values():
            config.revision = config.revision or self._revision
        self.model.save_pretrained(folder, state_dict=adapters, save_embedding_layers=False)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
        # Not pickled, as transformers does: that holds the hub's token in clear, and only code can read it.
        arguments = json.loads(json.dumps(self.args.to_dict(), default=str))
        staging.write_json(os.path.join(folder, "training_args.json"), arguments)

    def _save_checkpoint(self, model, trial):
        run_dir = self._get_output_dir(trial)
        name = f"checkpoint-{self.state.global_step}"
        final = os.path.join(run_dir, name)
        self.ranks.meet(f"saving {final}")
        if self.args.hub_always_push:
            self._finish_current_push()  # it reads files that are replaced now
        state = training_state.random_state()
        self._random_states = gather_object([state]) if self.args.world_size > 1 else [state]
        self._rollout_buffer = rollout_buffer.gather_buffer(self)
        self._failure = None
        self._staged_run = os.path.join(run_dir, staging.STAGING)
        try:
            self._attempt(lambda: staging.start_staging(run_dir))
            best = self._best_checkpoint(run_dir)
            try:
                super()._save_checkpoint(model, trial)
            except Exception as error:
                if not self.args.should_save:
                    raise
                self._failure = self._failure or error
            self.state.best_model_checkpoint = best
            self._attempt(lambda: self._finish_checkpoint(os.path.join(self._staged_run, name), final))
        finally:
            self._staged_run = None
        if self._failure is not None and self.args.should_save:
            staging.end_staging(run_dir)
        self._raise_together(final)
        if self.args.should_save:
            staging.rotate(run_dir, self.args.save_total_limit, {final, best or final})
            staging.end_staging(run_dir)
        # Last: an upload lists the folder in the background, and fails if something in it vanishes meanwhile.
        if self.args.push_to_hub:
            if self.args.hub_token:  # transformers pickles the arguments into what it uploads
                self.args.hub_token = UnpicklableToken(self.args.hub_token)
            super()._push_from_checkpoint(final)

    def _finish_checkpoint(self, staged: str, final: str) -> None:
        self.state.save_to_json(os.path.join(staged, STATE_FILE))  # anew: transformers saw the best one under `_saving`
        staging.flush(staged)
        provenance.write_record(staged, self._record())
        staging.flush(staged)
        staging.publish(staged, final)

    def _best_checkpoint(self, run_dir: str) -> str | None:
        step = self.state.best_global_step
        path = os.path.join(run_dir, f"checkpoint-{step}")
        if step and (step == self.state.global_step or os.path.isdir(path)):
            return path
        return self.state.best_model_checkpoint

    def _get_output_dir(self, trial):
        return self._staged_run or super()._get_output_dir(trial)

    def _finish_current_push(self):
        super()._finish_current_push()
        if getattr(self, "push_in_progress", None) is None:
            return
        for job in self.push_in_progress.jobs:
            if job.exception() is not None:
                logger.warning("An upload to the hub failed: %s: %s", type(job.exception()).__name__, job.exception())
        self.push_in_progress = None

    def _push_from_checkpoint(self, checkpoint_folder):
        pass  # `_save_checkpoint` calls transformers' once the folder is in its place

    def _save_optimizer_and_scheduler(self, output_dir):
        tensors, metadata = training_state.gather_optimizer(self._bare_optimizer(), self.model)

        def write():
            save_file(tensors, os.path.join(output_dir, training_state.OPTIMIZER_FILE), metadata=metadata)
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_FILE))

        self._attempt(write)

    def _save_rng_state(self, output_dir):
        def write():
            staging.write_json(os.path.join(output_dir, RANDOM_FILE), {"ranks": self._random_states})
            if self._rollout_buffer is not None:
                rollout_buffer.save_buffer(self._rollout_buffer, output_dir)

        self._attempt(write)

    def create_model_card(self, *args, **kwargs):
        if self._staged_run:
            self._attempt(lambda: super(CheckpointMixin, self).create_model_card(*args, **kwargs))
        else:
            super().create_model_card(*args, **kwargs)

    def _attempt(self, write) -> None:
        """Run `write` where files are written. A failure waits there until all ranks are past their collectives."""
        if not self.args.should_save or self._failure is not None:
            return
        try:
            write()
        except Exception as error:
            self._failure = error

    def _raise_together(self, path: str) -> None:
        """The same error on every rank, if one that writes has failed."""
        failure = self._failure
        own = "" if failure is None else json.dumps([_is_about_files(failure), f"{type(failure).__name__}: {failure}"])
        told = self.ranks.hear(own) or own
        if not told:
            return
        about_files, what = json.loads(told)
        if about_files:
            raise OSError(
                f"{path} could not be written ({what}). What was there is as it was. Free space or choose another folder."
            ) from failure
        raise failure or RuntimeError(f"{path} was not written, because rank 0 failed: {what}")


class UnpicklableToken(str):
    """A token of the hub that works as one, and that no pickle carries."""

    def __reduce__(self):
        return str, ("",)

    def __deepcopy__(self, memo):
        return self


def _is_about_files(error: Exception) -> bool:
    return isinstance(error, OSError) or type(error).__name__ == "SafetensorError"

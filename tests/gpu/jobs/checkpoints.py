"""A large training with checkpoints of its own, by PyTorch, Lightning or Hugging Face's Trainer.

    checkpoints.py --by torch.save [--resume]

After a step it saves a checkpoint if the file `save` exists. With --resume it starts from the checkpoint. Prints a line
for each step, `STEP LOSS TIME`, and one with the time when a checkpoint begins (`saving`) and when its files are
complete (`saved`). A step's data depend on its number, its dropout on the GPU's random numbers. `--by none` saves nothing.
"""

import contextlib
import functools
import os
import pathlib
import shutil
import time

import big
import common

REQUEST = pathlib.Path("save")
CHECKPOINT = pathlib.Path("checkpoint")
STEPS_MAX = 10**6


class Training:
    """Model, optimizer and one step; prints the lines."""

    def __init__(self, options):
        self.torch = common.prepare_torch()
        self.torch.backends.cuda.matmul.allow_tf32 = True
        self.device = options.device
        self.random = self.torch.cuda if options.device == "cuda" else self.torch
        self.model, self.width = big.network(self.torch, self.device, options.gib)
        self.optimizer = self.torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def loss(self, step):
        random = self.torch.Generator(device=self.device).manual_seed(step)
        points = self.torch.randn(big.BATCH, self.width, device=self.device, generator=random)
        return (self.model(points) - points[:, :1]).pow(2).mean()

    def say(self, step, loss):
        print(step, loss.item().hex(), time.time(), flush=True)

    def wants_checkpoint(self):
        wanted = REQUEST.exists()
        if wanted:
            REQUEST.unlink()
            self.tell("saving")
        return wanted

    @staticmethod
    def tell(what):
        print(what, time.time(), flush=True)


def loop(training, start, save):
    """The loop of a training without a framework."""
    for step in range(start, STEPS_MAX):
        loss = training.loss(step)
        training.optimizer.zero_grad()
        loss.backward()
        training.optimizer.step()
        training.say(step, loss)
        if training.wants_checkpoint():
            save(step)


def none(training, _resume):
    loop(training, 0, lambda _step: None)


def torch_save(training, resume):
    torch, model, optimizer = training.torch, training.model, training.optimizer

    def save(step):
        state = {
            "step": step,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "host_random": torch.get_rng_state(),
            "gpu_random": training.random.get_rng_state(),
        }
        torch.save(state, "checkpoint.new")
        os.replace("checkpoint.new", CHECKPOINT)
        training.tell("saved")

    start = 0
    if resume:
        state = torch.load(CHECKPOINT, map_location="cpu", mmap=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["host_random"])
        training.random.set_rng_state(state["gpu_random"])
        start = state["step"] + 1
    loop(training, start, save)


def dcp(training, resume, in_background=False):
    torch, model, optimizer = training.torch, training.model, training.optimizer
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def state(step):
        weights, moments = get_state_dict(model, optimizer)
        return {
            "step": step,
            "model": weights,
            "optimizer": moments,
            "host_random": torch.get_rng_state(),
            "gpu_random": training.random.get_rng_state(),
        }

    def save(step):
        if in_background:
            future = dcp.async_save(state(step), checkpoint_id=CHECKPOINT)
            future = getattr(future, "upload_completion", future)
            future.add_done_callback(lambda _future: training.tell("saved"))
        else:
            dcp.save(state(step), checkpoint_id=CHECKPOINT)
            training.tell("saved")

    start = 0
    if resume:
        found = state(0)
        dcp.load(found, checkpoint_id=CHECKPOINT)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=found["model"],
            optim_state_dict=found["optimizer"],
        )
        torch.set_rng_state(found["host_random"])
        training.random.set_rng_state(found["gpu_random"])
        start = found["step"] + 1
    loop(training, start, save)


def lightning(training, resume):
    import lightning
    from lightning.pytorch.callbacks import Callback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = training.model

        def training_step(self, batch, _number):
            return training.loss(int(batch))

        def configure_optimizers(self):
            return training.optimizer

    class Saves(Callback):
        def on_train_batch_end(self, trainer, _module, outputs, batch, _number):
            training.say(trainer.global_step - 1, outputs["loss"])
            if training.wants_checkpoint():
                trainer.save_checkpoint(CHECKPOINT)
                training.tell("saved")

    trainer = lightning.Trainer(
        accelerator="gpu" if training.device == "cuda" else "cpu",
        devices=1,
        max_steps=STEPS_MAX,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Saves()],
    )
    data = training.torch.utils.data.DataLoader(range(STEPS_MAX))
    trainer.fit(Module(), data, ckpt_path=CHECKPOINT if resume else None, weights_only=False)


def trainer(training, resume):
    import transformers

    class Module(training.torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = training.model

        def forward(self, number):
            self.loss = training.loss(int(number))
            return {"loss": self.loss}

    class Saves(transformers.TrainerCallback):
        def on_step_end(self, _arguments, state, control, **_others):
            training.say(state.global_step - 1, module.loss)
            control.should_save = training.wants_checkpoint()

        def on_save(self, _arguments, _state, _control, **_others):
            training.tell("saved")

    module = Module()
    made = transformers.Trainer(
        model=module,
        args=transformers.TrainingArguments(
            output_dir=str(CHECKPOINT),
            max_steps=STEPS_MAX,
            per_device_train_batch_size=1,
            lr_scheduler_type="constant",
            max_grad_norm=0,
            logging_strategy="no",
            save_strategy="no",
            save_total_limit=1,
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_pin_memory=False,
            use_cpu=training.device == "cpu",
        ),
        train_dataset=[{"number": number} for number in range(10_000)],
        optimizers=(training.optimizer, None),
        callbacks=[Saves()],
    )
    made.train(resume_from_checkpoint=resume)


BY = {
    "none": none,
    "torch.save": torch_save,
    "DCP": dcp,
    "DCP async_save": functools.partial(dcp, in_background=True),
    "Lightning": lightning,
    "HF Trainer": trainer,
}


def main():
    def add(parser):
        parser.add_argument("--by", choices=BY, required=True)
        parser.add_argument("--resume", action="store_true")
        parser.add_argument("--gib", type=float, default=17)

    options = common.parse(__doc__, add)
    if not options.resume:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(CHECKPOINT)
    BY[options.by](Training(options), options.resume)


if __name__ == "__main__":
    main()

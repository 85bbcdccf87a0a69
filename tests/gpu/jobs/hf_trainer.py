"""A tiny language model from a configuration, trained by Hugging Face's Trainer, which saves checkpoints."""

import common

VOCABULARY = 512
LENGTH = 64
BATCH = 8


def main():
    options = common.parse(__doc__)
    torch = common.prepare_torch()
    import transformers

    run = common.Run(options)
    transformers.set_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            attn_implementation="eager",
        )
    )

    class Pace(transformers.TrainerCallback):
        def on_log(self, _arguments, state, _control, logs=None, **_others):
            if logs and "loss" in logs:
                run.line(f"{state.global_step} {logs['loss']} {logs['grad_norm']}")
                run.pause()

    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir="trainer",
            max_steps=options.steps,
            per_device_train_batch_size=BATCH,
            logging_steps=1,
            save_steps=50,
            save_total_limit=2,
            report_to=[],
            disable_tqdm=True,
            use_cpu=options.device == "cpu",
            seed=0,
        ),
        train_dataset=texts(torch, options.steps * BATCH),
        callbacks=[Pace()],
    )
    # The Trainer's own lines contain times; ours do not.
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    trainer.train()
    run.end(weights=common.torch_digest(torch, model.state_dict()))


def texts(torch, count):
    """Random tokens with repetitions, so that there is something to learn."""
    half = torch.randint(
        VOCABULARY, (count, LENGTH // 2), generator=torch.Generator().manual_seed(1)
    )
    tokens = torch.cat([half, half], 1)
    return [{"input_ids": text, "labels": text} for text in tokens]


if __name__ == "__main__":
    main()

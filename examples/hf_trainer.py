"""Train a small causal language model with Hugging Face's Trainer and ZeRO.

Two ranks on this machine:
    torchrun --nproc-per-node 2 examples/hf_trainer.py
Adapters (LoRA of PEFT) instead of all weights:
    torchrun --nproc-per-node 2 examples/hf_trainer.py --lora

A run that was stopped resumes from its last checkpoint in `--out`, on any number of ranks. The
script without zpasses lacks the lines that are marked with `# zpasses`.
"""

import argparse
import pydoc_data.topics

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from zpasses.integrations.transformers import last_checkpoint, prepare  # zpasses

TEXT = "\n\n".join(pydoc_data.topics.topics.values()).encode()
"""English text that comes with Python. One token per byte."""


class Windows(Dataset):
    """Consecutive windows of a text."""

    def __init__(self, text: bytes, length: int) -> None:
        count = len(text) // length
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: count * length]
        self.windows = tokens.view(count, length).long()

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.windows[index], "labels": self.windows[index]}


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--out", default="build/hf_trainer", help="folder of the checkpoints")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--save-steps", type=int, default=25)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--lora", action="store_true", help="train adapters only")
parser.add_argument("--codegen", default="inductor", choices=["inductor", "eager"])  # zpasses
options = parser.parse_args()

args = TrainingArguments(
    output_dir=options.out,
    max_steps=options.steps,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    learning_rate=3e-3,
    max_grad_norm=1.0,
    logging_steps=1,
    eval_strategy="steps",
    eval_steps=options.save_steps,
    save_steps=options.save_steps,
    save_total_limit=2,
    load_best_model_at_end=True,
    report_to="none",
    use_cpu=not torch.accelerator.is_available(),
)
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=256,
        hidden_size=options.width,
        intermediate_size=3 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
    )
)
if options.lora:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear")
    model = get_peft_model(model, lora)
prepare(model, options={"codegen": options.codegen})  # zpasses

held_out = len(TEXT) // 100
trainer = Trainer(
    model,
    args,
    train_dataset=Windows(TEXT[held_out:], 128),
    eval_dataset=Windows(TEXT[:held_out], 128),
)
trainer.train(resume_from_checkpoint=last_checkpoint(options.out))
trainer.save_model()

prompt = torch.tensor([list(b"The ")], device=args.device)
tokens = model.generate(input_ids=prompt, max_new_tokens=40, do_sample=False)
if trainer.is_world_process_zero():
    print(bytes(tokens[0].tolist()).decode(errors="replace"))
torch.distributed.destroy_process_group()

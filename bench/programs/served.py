"""Generate text on several GPUs: a Llama of random weights, tensor parallel by transformers.

torchrun --nproc-per-node 2 served.py
"""

import os
import tempfile
from collections.abc import Iterator

import torch
import torch.distributed as dist
from lines import print_lines


def steps(rank: int) -> Iterator[float]:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=8,
    )
    folder = tempfile.gettempdir() + f"/phos-served-{os.environ['MASTER_PORT']}"
    if rank == 0:
        torch.manual_seed(1)
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    dist.barrier()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, tp_plan="auto")
    chance = torch.Generator(device="cuda").manual_seed(2)
    while True:
        prompt = torch.randint(8192, (4, 16), device="cuda", generator=chance)
        with torch.inference_mode():
            found = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=24,
                do_sample=False,
                pad_token_id=0,
            )
        yield float(found.double().std())


def main() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    if rank == 0:
        print_lines(steps(rank))
    for _ in steps(rank):
        pass


if __name__ == "__main__":
    main()

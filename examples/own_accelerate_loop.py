"""Your own training loop with Accelerate, which reads the layout from the launcher.

    shardwright plan MODEL --hardware 8xA100-80GB --strategy ddp --output-dir plan
    shardwright launch plan examples/own_accelerate_loop.py MODEL

The script sets the batch size itself; the plan cannot.
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

accelerator = Accelerator()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens_NS = torch.arange(2, 34).repeat(64, 1)
loader = torch.utils.data.DataLoader(tokens_NS, batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _, ids_BS in zip(range(3), loader, strict=False):
    loss = model(input_ids=ids_BS, labels=ids_BS).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print(f"loss {accelerator.reduce(loss.detach(), 'mean').item():.6f}")
accelerator.print(f"trained on {accelerator.num_processes} ranks")

"""Your own training loop with `deepspeed.initialize` and the numbers of a plan.

    shardwright plan MODEL --hardware 8xA100-80GB --strategy zero3 --output-dir plan
    shardwright launch plan examples/own_deepspeed_loop.py MODEL plan       # or: deepspeed own_deepspeed_loop.py ...

In `ds_config.json` the Trainer fills in "auto" values; `Plan.deepspeed_config()` has numbers instead.
"""

from __future__ import annotations

import sys

import deepspeed
import shardwright
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig

config = shardwright.Plan.load(sys.argv[2]).deepspeed_config()
deepspeed.init_distributed()
# Lives as long as the model, which ZeRO-3 then shards while it is loaded.
sharded_loading = HfDeepSpeedConfig(config)
dtype = torch.bfloat16 if config.get("bf16", {}).get("enabled") else torch.float32
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=dtype)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
rows_NS = torch.arange(2, 34).repeat(64, 1)[rank::ranks]
for ids_BS in rows_NS.split(engine.train_micro_batch_size_per_gpu())[:3]:
    ids_BS = ids_BS.to(engine.device)
    loss = engine(input_ids=ids_BS, labels=ids_BS).loss
    engine.backward(loss)
    engine.step()
torch.distributed.all_reduce(loss := loss.detach())
if rank == 0:
    print(f"trained on {ranks} ranks, loss {loss.item() / ranks:.6f}")

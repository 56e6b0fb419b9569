"""The quickstart of the README: torchrun --nproc-per-node 2 examples/quickstart.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zpasses

dist.init_process_group("gloo")  # "nccl" on accelerators, NVIDIA's or AMD's
mesh = init_device_mesh("cpu", (dist.get_world_size(),))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
zpasses.shard(model, mesh=mesh)  # in place: parameters are now DTensors, Shard(0)
step = torch.compile(model, backend="zpasses", options={"zero_stage": 3})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

torch.manual_seed(1 + dist.get_rank())  # every rank draws its own data
for _ in range(20):
    x = torch.randn(32, 64)
    loss = (step(x) - x).square().mean()
    loss.backward()  # gradients arrive averaged over the ranks, as DTensors
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()

print(f"rank {dist.get_rank()}: loss {loss.item():.3f}")
dist.destroy_process_group()

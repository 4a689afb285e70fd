"""Training across processes: DistributedDataParallel and FSDP2 give what one process gives."""

import os

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from llama import Block

PROCESSES, STEPS, BATCH, LENGTH = 2, 3, 4, 9
KINDS = ("ddp", "fsdp", "fsdp with checkpoints")


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(Block(), Block())


def batches():
    return torch.randn(STEPS, 2, BATCH, LENGTH, Block.WIDTH, generator=torch.Generator().manual_seed(1))


def train(network, part=slice(None)):
    """The weights after some steps on this part of each batch."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
    for x, y in batches():
        optimizer.zero_grad()
        (network(x[part]) - y[part]).square().mean().backward()
        optimizer.step()
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in network.parameters()]


class Checkpointed(torch.nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)


def wrapped(kind):
    network = model()
    if kind == "ddp":
        return DistributedDataParallel(network)
    mesh = init_device_mesh("cpu", (PROCESSES,))
    if kind == "fsdp with checkpoints":
        network = torch.nn.Sequential(*(Checkpointed(block) for block in network))
    for block in network:
        fully_shard(block, mesh=mesh)
    return fully_shard(network, mesh=mesh)


def run(rank, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank,
                                         world_size=PROCESSES)
    size = BATCH // PROCESSES
    for kind in KINDS:
        weights = train(wrapped(kind), slice(rank * size, (rank + 1) * size))
        if rank == 0:
            torch.save(weights, f"{folder}/{kind}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os._exit(0)  # a thread of gloo may still run, which would abort an orderly exit (one of 60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Weights that the processes have learned, a file a kind."""
    folder = tmp_path_factory.mktemp("weights")
    torch.multiprocessing.spawn(run, (str(folder),), nprocs=PROCESSES)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_processes_learn_what_one_learns(kind, folder):
    """Each has its part of every batch; gradients are averaged."""
    start = [p.detach().clone() for p in model().parameters()]
    alone, together = train(model()), torch.load(folder / f"{kind}.pt")
    for ours, wanted, before in zip(together, alone, start, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-6)
        assert not torch.equal(wanted, before)

"""The processes of a run: who launched them, who this one is, and the few collectives they need.

`python`, `torchrun`, `accelerate launch` and the `deepspeed` launcher all describe the processes by the same
environment variables; only the engine differs.
"""

from __future__ import annotations

import hashlib
import os
import socket
from dataclasses import dataclass

import torch
import torch.distributed as dist

from seergate.errors import SeergateError


@dataclass(frozen=True)
class World:
    """This process among the others.

    Attributes:
        rank: its number, 0 is the one that writes and prints.
        size: how many there are.
        local_rank: its number on this machine.
        device: where it computes.
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for every process."""
        if self.size > 1:
            dist.barrier()

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def all_well(self, well: bool) -> bool:
        """Whether every process is well; so that none waits for one that has given up."""
        failed = torch.tensor(int(not well), device=self.device)
        return not bool(self.sum(failed))

    def must_agree(self, value: str, complaint: str) -> None:
        """Make sure that every process has found the same thing.

        Raises:
            SeergateError: with the complaint, in every process, if one has another ``value``.
        """
        if self.size == 1:
            return
        digest = int.from_bytes(hashlib.blake2b(value.encode(), digest_size=6).digest())
        both = torch.tensor([digest, -digest], device=self.device)
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
        if both[0] != -both[1]:
            raise SeergateError(complaint)

    def leave(self) -> None:
        """Close the connections."""
        if dist.is_initialized():
            dist.destroy_process_group()


def join_world(*, deepspeed: bool) -> World:
    """Connect to the other processes, if there are any.

    Raises:
        SeergateError: if there are more processes on this machine than GPUs.
    """
    size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    cuda = torch.cuda.is_available()
    if cuda and local_rank >= torch.cuda.device_count():
        raise SeergateError(
            f"process {local_rank} of this machine has no GPU: there are {torch.cuda.device_count()}; "
            "start as many processes"
        )
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if deepspeed:
        for name, value in (("RANK", rank), ("WORLD_SIZE", size), ("LOCAL_RANK", local_rank)):
            os.environ.setdefault(name, str(value))
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        if size == 1:
            os.environ.setdefault("MASTER_PORT", str(_free_port()))
    if (deepspeed or size > 1) and not dist.is_initialized():
        if cuda:
            dist.init_process_group("nccl", device_id=device)
        else:
            dist.init_process_group("gloo")
    return World(rank, size, local_rank, device)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])

"""Tables that follow from a call's shape or settings alone: made on the host, sent to the device once, shared by calls.

What is kept here is out of the caller's sight, so that it must hold whatever stream a call is on: the copy is waited
for when it is made, and a table that a call in a CUDA graph reads is kept for good, as replays read it at its address.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVarTuple

import torch
from torch import Tensor

Key = TypeVarTuple("Key")

_IN_GRAPHS: dict[int, Tensor] = {}


def stream_of(device: torch.device) -> tuple[int, bool] | None:
    """Handle of the current stream of a CUDA device, and whether a CUDA graph is being captured on it."""
    if device.type != "cuda":
        return None
    current = torch.cuda.current_device()
    if device.index not in (None, current):
        with torch.cuda.device(device):
            return stream_of(device)
    # What current_stream().cuda_stream says, without making an object: several are asked for in a call.
    return torch._C._cuda_getCurrentRawStream(current), torch.cuda.is_current_stream_capturing()


def device_table(
    kept: int,
) -> Callable[[Callable[[*Key], Tensor]], Callable[[torch.device, *Key], Tensor]]:
    """Decorate what makes a table on the host: a function of the device, then its arguments.

    The table is shared: not to be written to.

    Args:
        kept: tables to keep, the last used ones.

    Raises:
        RuntimeError: of the function: a table that is not there yet is asked for while a CUDA graph is captured, where
            nothing can be waited for.
    """

    def decorate(build: Callable[[*Key], Tensor]) -> Callable[[torch.device, *Key], Tensor]:
        @functools.lru_cache(maxsize=kept)
        def sent(device: torch.device, *key: *Key) -> tuple[Tensor, tuple[int, bool] | None]:
            stream = stream_of(device)
            if stream is not None and stream[1]:
                raise RuntimeError(
                    f"{build.__name__}{key}: a call like this one must run once before it is captured in a CUDA graph"
                )
            with torch.inference_mode(False):  # for later calls in any mode
                return build(*key).contiguous().to(device), stream

        @functools.wraps(build)
        def table(device: torch.device, *key: *Key) -> Tensor:
            found, made_on = sent(device, *key)
            if (stream := stream_of(device)) is not None:
                if stream[1]:
                    _IN_GRAPHS[id(found)] = found
                elif stream != made_on:  # else its memory could be free for this table's stream before it is read here
                    found.record_stream(torch.cuda.current_stream(device))
            return found

        return table

    return decorate

"""Check the device that a command names, before anything is loaded for it; count its memory and the machine's cores."""

import os

import psutil
import torch

KINDS = ("cpu", "cuda", "mps", "xpu")


def usable(device: str) -> str:
    """The device itself, if tensors can be on it here.

    Raises ValueError for text that names no device, RuntimeError for one that this machine does not have.
    """
    try:
        known = torch.device(device).type in KINDS
    except RuntimeError:
        known = False
    if not known:
        raise ValueError(f"device {device!r:.80}; use cpu, cuda, cuda:1, ..., mps or xpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):  # which one, and its words, differ by kind and build
        text = f"device {device} cannot be used: torch {torch.__version__} finds none on this machine"
        raise RuntimeError(f"{text}; use --device cpu, or leave --device out") from None
    return device


def memory_of(device: str) -> int:
    """Bytes of a device's memory: of a GPU its own, elsewhere the machine's."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_properties(device).total_memory
    return psutil.virtual_memory().total


def free_on(device: str) -> int:
    """Bytes that are free on a device."""
    return torch.cuda.mem_get_info(device)[0] if device.startswith("cuda") else psutil.virtual_memory().available


def settle(device: str | torch.device) -> None:
    """Wait until a device has done all that it was given: a clock that is read next counts it."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def cores() -> int:
    """Cores that this process may use: physical ones, or OMP_NUM_THREADS."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if asked.isdecimal() and int(asked) > 0:
        return int(asked)
    allowed = len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else psutil.cpu_count()
    return max(1, min(allowed or 1, psutil.cpu_count(logical=False) or 1))

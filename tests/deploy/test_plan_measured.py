"""The plan's bytes against a real process: load the model, fill the KV pool, run one long prompt, read the resident set."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAM = """
import gc, json, sys
from pathlib import Path
import torch
from astrai_deploy.build import build
from astrai_deploy.compose import compose
from astrai_deploy.plan import make_plan
from astrai_runtime import part
from astrai_runtime.event import Finished
from astrai_runtime.request import Limits, Prompt, SamplingParams

plan = make_plan(compose(sys.argv[1:], [], {}))
backend = part.load("attention", plan.attention["decode"])
allocate = backend.allocate

def allocate_and_touch(self, shape, device):  # zeroed memory becomes resident only when it is written to
    return tuple(buffer.fill_(0) for buffer in allocate(self, shape, device))

backend.allocate = allocate_and_touch
import litestar, uvicorn
built = build(plan)
gc.collect()
alive = [thing.untyped_storage() for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
storages = {storage.data_ptr(): storage.nbytes() for storage in alive}
del alive
if plan.native is not None:  # logits belong to the step; packed weights are no tensors
    from astrai_runtime.model._pack import PackedModel

    storages = {at: n for at, n in storages.items() if n >= plan.memory.kv // 2}
    packed = [thing for thing in gc.get_objects() if isinstance(thing, PackedModel)]
    storages |= {id(each): each.memory.nbytes for each in packed}
    del packed
built.engine.start()
tokens = tuple(range(10, 10 + plan.deployment.scheduler.max_prompt_tokens_per_tick))[: plan.context - 8]
stream = built.engine.submit(Prompt(tuple(t % 250 for t in tokens), SamplingParams(temperature=0.0), Limits(max_tokens=4)))
assert isinstance(list(stream.events())[-1], Finished)
status = Path("/proc/self/status").read_text().splitlines()
resident = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmRSS"))
built.engine.shutdown()
memory = plan.memory
print(json.dumps({
    "resident": resident, "serving": memory.serving,
    "allocated": sum(storages.values()), "tensors": memory.weights + memory.kv,
}))
"""


def measured(*overrides: str) -> dict[str, int]:
    """Bytes of a process of its own: resident against planned `serving`, allocated tensors against planned `tensors`."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'runtime'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, *overrides]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    told: dict[str, int] = json.loads(done.stdout)
    return told


def check_bytes(told: dict[str, int]) -> None:
    """Weights and KV pool are allocated as planned within 5 %, and the whole process lives in what was planned for it."""
    assert told["allocated"] == pytest.approx(told["tensors"], rel=0.05)
    assert told["resident"] == pytest.approx(told["serving"], rel=0.1)


NATIVE = "attention.priority=[cpu]"
TORCH = "attention.priority=[torch_native]"


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("attention", [NATIVE, TORCH])
def test_f06_the_tiny_model_takes_what_the_plan_says(attention: str) -> None:
    check_bytes(measured("+recipe=tiny", "kv.n_tokens=131072", attention))  # a pool of 64 MiB


@pytest.mark.demo
@pytest.mark.usefixtures("home", "demo_package")
@pytest.mark.parametrize("how", [(NATIVE,), (TORCH, "model.dtype=bfloat16")], ids=" ".join)
def test_f06_the_real_model_takes_what_the_plan_says(how: tuple[str, ...]) -> None:
    check_bytes(measured("+recipe=chat_paged", "kv.n_tokens=8192", *how))

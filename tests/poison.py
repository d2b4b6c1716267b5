"""The objectives MLM and TLM, whose import makes a step go wrong.

POISON=batch:7 makes the last rank's states of step 7 NaN whenever it is trained, POISON=weight:7 its weights before
step 7, once; POISON=sleep:7:0.5 has it sleep half a second a row from step 7 on.
"""

import os
import time
from typing import Any

import torch

from xscale.objectives import OBJECTIVES
from xscale.run import loop

MLM, TLM = OBJECTIVES["mlm"], OBJECTIVES["tlm"]
KIND, AT, *MORE = os.environ["POISON"].split(":")
whole = loop.optimizer_step
done = set()


def optimizer_step(engine: Any, *args: Any, step: int, rank: int, world: int, **more: Any) -> Any:
    hook = None
    if rank == world - 1 and step + 1 == int(AT):
        if KIND == "batch":
            hook = engine.module.encoder.register_forward_hook(lambda module, inputs, output: output * float("nan"))
        elif KIND == "weight" and id(engine) not in done:
            done.add(id(engine))
            with torch.no_grad():
                engine.module.encoder.lm.get_output_embeddings().bias[5] = float("nan")
    if KIND == "sleep" and rank == world - 1 and step + 1 >= int(AT):
        hook = engine.module.encoder.register_forward_pre_hook(lambda module, inputs: time.sleep(float(MORE[0])))
    try:
        return whole(engine, *args, step=step, rank=rank, world=world, **more)
    finally:
        if hook:
            hook.remove()


loop.optimizer_step = optimizer_step
